"""Plots that can be read on a telephone: one column, large type, values written beside the bars."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .results import REFERENCE, Results, Series, console

_WIDTH_INCHES = 6.0
_DPI = 150
_OURS, _LIMIT, _PEER = "#1b6ca8", "#9aa5ad", "#d98c3f"
_COLOURS = ("#1b6ca8", "#d98c3f", "#3a8f5c", "#a23b72", "#5b5b5b", "#8c6bb1")


class Line(NamedTuple):
    """A line of a line plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def _pyplot() -> Any:
    """The plotting library without a display, or None, with a word, where it is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        console.print("  no plots: pip install matplotlib")
        return None
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 13, "axes.titlesize": 15, "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False, "figure.dpi": _DPI})
    return importlib.import_module("matplotlib.pyplot")


def _path(results: Results, name: str) -> Path | None:
    folder = results.options.plots
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"bench-{name}.png"


def bars(results: Results, measure: str, title: str, *, name: str | None = None, log: bool = False) -> None:
    """A plot of one measure: a panel for each case, a bar for each subject, whiskers from least to most."""
    path = _path(results, name or results.workload)
    cases = list(dict.fromkeys(series.case for series in results.series if series.measure.name == measure))
    if path is None or not cases or (pyplot := _pyplot()) is None:
        return
    panels = [results.of(case, measure) for case in cases]
    rows = sum(len(panel) for panel in panels)
    heights = [len(panel) + 1 for panel in panels]
    figure, axes = pyplot.subplots(
        len(cases), 1, figsize=(_WIDTH_INCHES, 1.2 + 0.42 * rows + 0.75 * len(cases)), squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, case, panel in zip(axes[:, 0], cases, panels, strict=True):
        _panel(axis, panel, log=log)
        axis.set_title(case, loc="left", fontsize=13)
    figure.suptitle(f"{title}\n({panels[0][0].measure.unit}, {panels[0][0].measure.better} is better)", fontsize=14)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    console.print(f"  plot: {path}")


def _panel(axis: Any, panel: list[Series], *, log: bool) -> None:
    labels = [series.label.removeprefix("limit: ") for series in panel]
    medians = [series.median for series in panel]
    colours = [_colour(series) for series in panel]
    spread = [
        [series.median - min(series.values) for series in panel],
        [max(series.values) - series.median for series in panel],
    ]
    places = range(len(panel))
    axis.barh(places, medians, color=colours, xerr=spread, ecolor="#333333", capsize=3)
    if log:
        axis.set_xscale("log")
    axis.set_yticks(list(places), labels)
    axis.invert_yaxis()
    axis.margins(x=0.22)
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)
    for place, series in zip(places, panel, strict=True):
        form = series.measure.show or short
        axis.annotate(
            form(series.median), (max(series.values), place), xytext=(6, 0), textcoords="offset points", va="center"
        )


def _colour(series: Series) -> str:
    if series.subject.partition("@")[0].partition(":")[0] == REFERENCE:
        return _OURS
    return _LIMIT if series.label.startswith("limit: ") else _PEER


def lines(
    results: Results,
    name: str,
    title: str,
    panels: Sequence[tuple[str, Sequence[Line]]],
    x_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """A plot of lines: a panel for each (y label, lines), one x axis."""
    path = _path(results, name)
    if path is None or not panels or (pyplot := _pyplot()) is None:
        return
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(_WIDTH_INCHES, 1.0 + 2.6 * len(panels)), squeeze=False, sharex=True
    )
    for axis, (y_label, drawn) in zip(axes[:, 0], panels, strict=True):
        for line, colour in zip(drawn, _COLOURS, strict=False):
            axis.plot(line.x, line.y, marker="o" if len(line.x) < 40 else "", color=colour, label=line.label)
        if log_x:
            axis.set_xscale("log")
        if log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(y_label, loc="left", fontsize=13)
        axis.grid(alpha=0.3)
        if len(drawn) > 1:
            axis.legend(fontsize=11, frameon=False)
    axes[-1, 0].set_xlabel(x_label)
    figure.suptitle(title, fontsize=15)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    console.print(f"  plot: {path}")


def short(value: float) -> str:
    """A number in few characters: 343 k, 1.2 M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:.3g}"
