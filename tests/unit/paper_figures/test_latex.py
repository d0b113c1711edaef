"""What a paper takes: the claims, the numbers and a figure, read by LaTeX where there is one, and by rule always."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from optcc.experiments.bound_record import BoundCurves
from optcc.experiments.claims import package_table
from optcc.experiments.paper_claims import CLAIMS
from optcc.paper_figures import build, claims_table, numbers

TABLE = package_table(CLAIMS)
CLAIMS_TEX = claims_table.as_tex(TABLE)
NUMBERS_TEX = numbers.as_tex({"claims": claims_table.numbers(TABLE)})
PACKAGES = ("booktabs", "longtable", "graphicx", "lmodern")
PAPER = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage{%s}
\setlength{\textwidth}{24cm}
\input{numbers}
\begin{document}
R2CCL recovers in \optccnumber{claims/R20/measured} (\optccnumber{claims/R20/verdict}).
\input{claims}
%s
\end{document}
"""
ENGINES = ("pdflatex", "lualatex", "xelatex")
UNESCAPED = re.compile(r"(?<!\\)[#$_^&~]")


def engine() -> str:
    """A LaTeX that has the packages; skips where there is none."""
    found = next((path for name in ENGINES if (path := shutil.which(name)) is not None), None)
    if found is None:
        pytest.skip(f"none of {', '.join(ENGINES)} on this machine")
    return found


def typeset(folder: Path, paper: str) -> tuple[int, str]:
    """The exit code and the log of LaTeX; skips where a package is missing."""
    (folder / "paper.tex").write_text(paper, encoding="utf-8")
    words = [engine(), "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "paper.tex"]
    done = subprocess.run(words, cwd=folder, capture_output=True, timeout=120, check=False)
    said = done.stdout.decode(errors="replace")
    missing = re.search(rf"File `({'|'.join(PACKAGES)})\.sty' not found", said)
    if missing is not None:
        pytest.skip(f"LaTeX has no {missing[1]}.sty")
    return done.returncode, said


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with the table and the numbers."""
    (tmp_path / "claims.tex").write_bytes(CLAIMS_TEX)
    (tmp_path / "numbers.tex").write_bytes(NUMBERS_TEX)
    return tmp_path


def test_latex_takes_the_table_the_numbers_and_a_figure(written: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'optcc[viz]'")
    engine()
    build.build([BoundCurves.own_path], written / "drawn")
    pictures = sorted((written / "drawn").glob("*.pdf"))
    shown = "\n".join(rf"\includegraphics{{drawn/{each.stem}.pdf}}" for each in pictures)
    code, said = typeset(written, PAPER % (",".join(PACKAGES), shown))
    assert code == 0, said[-2000:]
    assert pictures and (written / "paper.pdf").read_bytes().startswith(b"%PDF")
    assert not re.search(r"Missing character|undefined", said)


def test_latex_stops_at_a_number_that_is_gone(written: Path) -> None:
    code, said = typeset(written, PAPER % (",".join(PACKAGES), r"\optccnumber{claims/R20/gone}"))
    assert code != 0 and "there is no number claims/R20/gone" in said


def braces(text: str) -> int:
    """The depth at which a text ends; -1 if a brace closes that was not open."""
    depth = 0
    for each in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if each == "{" else -1
        if depth < 0:
            return -1
    return depth


def test_every_number_is_one_definition_that_tex_can_read() -> None:
    head, *lines = NUMBERS_TEX.decode().split("\\expandafter\\def")
    assert braces(head) == 0 and r"\providecommand{\optccnumber}" in head
    names = []
    for line in lines:
        found = re.fullmatch(r"\\csname optcc/([A-Za-z0-9./-]+)\\endcsname\{(.*)\}\n", line)
        assert found is not None, line
        names.append(found[1])
        assert braces(found[2]) == 0 and not UNESCAPED.search(found[2]), line
        assert not re.search(r"(?<!\\)%", found[2]), "it would hide the rest of the line"
    assert len(names) == len(set(names)) == len(claims_table.numbers(TABLE))
    assert set(re.findall(r"\\optccnumber\{([^}]*)\}", PAPER)) <= set(names)


def test_the_table_is_closed_and_has_no_character_that_tex_lacks() -> None:
    text = CLAIMS_TEX.decode()
    assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text) != []
    code = re.sub(r"(?m)^%.*$", "", text)
    assert braces(code) == 0 and not re.search(r"(?<!\\)%", code)
    known = set("µ×ß°±²³·")  # of those beyond ASCII, what T1 and TS1 have
    assert {each for each in text + NUMBERS_TEX.decode() if ord(each) > 127} <= known
    commands = set(re.findall(r"\\([A-Za-z]+)", code))
    ours = {"begin", "end", "linewidth", "caption", "noindent", "texttt"}
    assert commands - {"textbackslash", "textasciitilde", "textasciicircum"} <= ours | {
        "toprule",
        "midrule",
        "bottomrule",
        "endfirsthead",
        "endhead",
        "endfoot",
    }
