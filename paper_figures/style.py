"""How every figure looks, and the only place that imports matplotlib.

Nothing global is changed: `applied` holds the parameters for the length of a `with`, on top of matplotlib's own
defaults and not of the user's, so that a record gives the same bytes on every machine with the same matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from optcc.errors import EnvironmentMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS_IN = 72.0
"""Points in an inch."""
COLUMN_IN = 3.4
"""Width of one column of a two-column paper."""
PAGE_IN = 7.0
"""Width of both columns and the gap."""
PNG_DPI = 200
"""Dots per inch of `NAME.png`; `NAME@2x.png` has twice as many."""

TITLE_PT = 8.0
LABEL_PT = 7.0
SMALL_PT = 6.0
LINE = 1.25
"""From one line of text to the next, in font sizes."""

INK = "#1a1a1a"
FAINT = "#5f5f5f"
WRONG = "#c00020"
"""For wrong elements and for runs that did not end: no schedule has a colour like it."""
T_FF = r"T$_\mathrm{ff}$"
"""The time of the fault-free ring; the text that it is in needs `parse_math=True`."""

_COLOURS = MappingProxyType(
    {
        "mpi": "#a6a6a6",
        "ring": "#56b4e9",
        "r2ccl-balance": "#f0c24b",
        "r2ccl-allreduce": "#cc79a7",
        "optcc": "#0072b2",
        "optimal": "#009e73",
        "hierarchical": "#882255",
    }
)
"""Okabe and Ito's colours, told apart with any colour vision, less the reds, and a colour of Tol's; in the order in
which bars stand."""
_SPARE = ("#e69f00", "#8c6bb1", "#44aa99", "#999933", "#332288")
"""For names that are not yet in the list: which one follows from the name alone."""


def colour(schedule: str) -> str:
    """The colour of a schedule: the same in every figure, whatever else is in it.

    >>> colour("ring"), colour("optcc"), colour("to-be-invented") in _SPARE
    ('#56b4e9', '#0072b2', True)
    """
    known = _COLOURS.get(schedule)
    return known or _SPARE[hashlib.sha256(schedule.encode()).digest()[0] % len(_SPARE)]


def order(schedule: str) -> tuple[int, str]:
    """A key to sort schedules by: peers, baselines, ours, and then the names that are new."""
    names = tuple(_COLOURS)
    return (names.index(schedule) if schedule in _COLOURS else len(names), schedule)


def parameters() -> dict[str, Any]:
    """What differs from matplotlib's defaults."""
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so it is the same everywhere
        "font.size": LABEL_PT,
        "text.color": INK,
        "text.parse_math": False,  # a name is a name, also with two dollars in it
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.labelsize": LABEL_PT,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.color": INK,
        "ytick.color": INK,
        "ytick.labelsize": LABEL_PT,
        "ytick.major.size": 2.5,
        "ytick.major.width": 0.6,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.5,
        "legend.frameon": False,
        "legend.fontsize": SMALL_PT,
        "pdf.fonttype": 42,  # TrueType, embedded: journals refuse Type 3
        "ps.fonttype": 42,
        "svg.fonttype": "path",  # looks the same where the font is missing
        "svg.hashsalt": "optcc",  # otherwise ids are random
    }


def require_matplotlib() -> None:
    """Raises EnvironmentMissing if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EnvironmentMissing(f"figures need matplotlib ({error}): pip install 'optcc[viz]'") from None


@contextmanager
def applied() -> Iterator[None]:
    """matplotlib's defaults and our parameters, until the end of the `with`."""
    require_matplotlib()
    from matplotlib import style

    with style.context(parameters(), after_reset=True):
        yield


def new_figure(width_pt: float, height_pt: float) -> Figure:
    """An empty figure of that size in points, known to no window system and to no global list."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_pt / POINTS_IN, height_pt / POINTS_IN))


def formats(quick: bool) -> tuple[str, ...]:
    """Endings of the files of a figure: one PNG if `quick`."""
    return (".png",) if quick else (".svg", ".pdf", ".png", "@2x.png")


def render(figure: Figure, ending: str) -> bytes:
    """The figure as a file with that ending, one of `formats`; the same figure gives the same bytes, without dates."""
    kind = ending.rpartition(".")[2]
    metadata: dict[str, dict[str, Any]] = {
        "svg": {"Date": None, "Creator": "optcc"},
        "pdf": {"CreationDate": None, "Creator": "optcc"},
        "png": {"Software": None},
    }
    buffer = io.BytesIO()
    with applied():
        dpi = PNG_DPI * (2 if ending.startswith("@2x") else 1)
        figure.savefig(buffer, format=kind, dpi=dpi if kind == "png" else POINTS_IN, metadata=metadata[kind])
    return buffer.getvalue()


@cache
def text_width_pt(text: str, size_pt: float, weight: str = "normal") -> float:
    """The width of one line of text in points, normal or bold; call it while the style is applied."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    font = FontProperties(family="DejaVu Sans", size=size_pt, weight=weight)
    width: float = TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]
    return float(width)


def wrapped(
    parts: Sequence[str], joint: str, width_pt: float, size_pt: float, lines_max: int, weight: str = "normal"
) -> list[str]:
    """`parts` joined by `joint` into lines no wider than `width_pt`; what does not fit in `lines_max` becomes `…`.

    A part is never broken, so a line with a single part can be wider.
    """
    lines: list[str] = []
    for number, part in enumerate(parts):
        piece = part + (joint if number + 1 < len(parts) else "")
        if lines and text_width_pt((lines[-1] + piece).rstrip(), size_pt, weight) <= width_pt:
            lines[-1] += piece
        else:
            lines.append(piece)
    if len(lines) > lines_max:
        lines = [*lines[: lines_max - 1], lines[lines_max - 1].rstrip() + "…"]
    return [line.rstrip() for line in lines]


def stacked(place: float, count: int, spread: float) -> list[float]:
    """Where so many dots of a row stand, the first one lowest on an axis that points down, `spread` rows in all.

    >>> stacked(2, 3, 0.5), stacked(2, 1, 0.5)
    ([2.25, 2.0, 1.75], [2.25])
    """
    return [place + spread * (0.5 - each / max(1, count - 1)) for each in range(count)]


def put_ratio(axes: Axes, ratio: float, right_of: float, row: float, gid: str) -> None:
    """Writes a ratio in a row, beside what is drawn up to `right_of` in it."""
    how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    axes.annotate(f"{ratio:.2f}", (right_of, row), (4, 0), size=SMALL_PT, gid=gid, **how)


def spaced(quantity: str) -> str:
    """A size or a rate as a sentence has it, with a space before its unit.

    >>> spaced("64MiB"), spaced("12.5GB/s"), spaced("0")
    ('64 MiB', '12.5 GB/s', '0')
    """
    return re.sub(r"(?<=\d)(?=[A-Za-z])", " ", quantity, count=1)


def label(text: str, length_max: int) -> str:
    """`text` from a file as it may stand in a figure: printable, and cut with `…` where it is too long.

    >>> label("r2ccl\\0", 10), label("a name without an end", 10)
    ('r2ccl?', 'a name wi…')
    """
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return shown if len(shown) <= length_max else shown[: length_max - 1] + "…"
