"""Charts of bars over time that a reader can zoom and ask, as JSON for a page: the only place that imports Bokeh.

    library()                      the JavaScript that draws them, to be in the page itself
    item(charts, target)           charts with one time axis below each other, as JSON for the element `target`

The same charts give the same bytes: Bokeh numbers its objects on through a process, so they are numbered anew here.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optcc.paper_figures import style

ROW_PX, CHART_PX = 24, 115
"""Height of a row, and of what is above and below all rows of a chart."""
_MARK_ROWS = 0.75
"""Height of the word of a mark, in rows; each has a line of its own above the rows."""


@dataclass(frozen=True)
class BarLayer:
    """Bars of one colour: parallel columns `left`, `right` (in the unit of the chart), `top`, `bottom` (rows from 0
    down) and what else `hover` names, pairs of a word and a column."""

    name: str
    colour: str
    columns: dict[str, list[Any]]
    hover: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        assert {"left", "right", "top", "bottom"} <= self.columns.keys(), self.name
        assert len({len(each) for each in self.columns.values()}) == 1, self.name
        assert {column for _, column in self.hover} <= self.columns.keys(), self.name


@dataclass(frozen=True)
class TimeMark:
    """A line across all rows, with a word."""

    at: float
    text: str
    colour: str = style.INK


@dataclass(frozen=True)
class BarChart:
    """Rows of bars from `begin` to `end` along `unit`; an entry in the legend shows and hides its layer."""

    title: str
    unit: str
    rows: tuple[str, ...]
    begin: float
    end: float
    layers: tuple[BarLayer, ...]
    marks: tuple[TimeMark, ...] = ()


def is_installed() -> bool:
    """True if charts can be made."""
    try:
        return importlib.util.find_spec("bokeh") is not None
    except (ImportError, ValueError):  # as where a module of that name is None
        return False


def library() -> str:
    """Bokeh's JavaScript, as it comes with its package."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", minified=True, components=["bokeh"]).js_raw)


def item(charts: Sequence[BarChart], target: str) -> str:
    """What `Bokeh.embed.embed_item` takes, safe within a script of a page."""
    from bokeh.embed import json_item
    from bokeh.layouts import column
    from bokeh.models import Range1d

    begin, end = min(each.begin for each in charts), max(each.end for each in charts)
    shared = Range1d(begin, end, bounds=(begin, end))
    plots = [_plot(chart, shared) for chart in charts]
    made = json_item(column(plots, sizing_mode="stretch_width"), target)
    return json.dumps(_renumbered(made, {}), separators=(",", ":")).replace("<", "\\u003c")


def _plot(chart: BarChart, shared: Any) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, Label, Range1d, Span
    from bokeh.plotting import figure

    n, above = len(chart.rows), _MARK_ROWS * len(chart.marks) + 0.1
    plot = figure(
        title=chart.title,
        height=round(CHART_PX + ROW_PX * (n + above)),
        sizing_mode="stretch_width",
        x_range=shared,
        y_range=Range1d(n, -above),
        x_axis_label=chart.unit,
        tools="xpan,xwheel_zoom,xbox_zoom,reset",
    )
    plot.toolbar.logo = None
    plot.grid.grid_line_alpha = 0.5
    plot.yaxis.ticker = [row + 0.5 for row in range(n)]
    plot.yaxis.major_label_overrides = {row + 0.5: name for row, name in enumerate(chart.rows)}
    for layer in chart.layers:
        bars = plot.quad(
            source=ColumnDataSource(layer.columns),
            fill_color=layer.colour,
            line_color="white",
            line_width=0.3,
            legend_label=layer.name,
        )
        tips = [(word, f"@{{{name}}}") for word, name in layer.hover]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, visible=False))
    for line, mark in enumerate(reversed(chart.marks), 1):
        beyond = mark.at > (chart.begin + chart.end) / 2
        plot.add_layout(Span(location=mark.at, dimension="height", line_color=mark.colour, line_dash="dashed"))
        plot.add_layout(
            Label(
                x=mark.at,
                y=-_MARK_ROWS * line,
                x_offset=-4 if beyond else 4,
                text_align="right" if beyond else "left",
                text=mark.text,
                text_color=mark.colour,
                text_font_size="11px",
                text_baseline="top",
                background_fill_color="white",
                background_fill_alpha=0.85,
            )
        )
    if chart.layers:
        legend = plot.legend[0]
        legend.orientation, legend.click_policy, legend.label_text_font_size = "horizontal", "hide", "11px"
        plot.add_layout(legend, "above")
    return plot


def _renumbered(value: Any, names: dict[str, str]) -> Any:
    """`value` with each object's id by the order in which the ids occur."""
    if isinstance(value, dict):
        return {
            key: names.setdefault(each, f"b{len(names)}")
            if key in ("id", "root_id") and isinstance(each, str)
            else _renumbered(each, names)
            for key, each in value.items()
        }
    return [_renumbered(each, names) for each in value] if isinstance(value, list) else value
