"""The plot of the demo: pending messages and disk use over the trace's time, to be read on a phone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#dddddd",
}
_DAY_MS = 86_400_000
_PENDING, _DISK = "#1b6ca8", "#b3541e"

_Floats = npt.NDArray[np.float64]


def draw(times_ms: Sequence[int], pending: Sequence[int], disk_bytes: Sequence[int], messages: int, path: Path) -> None:
    """Write the plot of a replay of `messages` messages to `path`; its ending says the format, PNG if none.

    The first three are samples, of equal number. Raises OSError where it cannot be written, ValueError for an ending
    that matplotlib has no writer for.
    """
    days = np.array(times_ms) / _DAY_MS  # what matplotlib counts dates in, from the same epoch
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6, 7.5), dpi=180, layout="constrained")
        FigureCanvasAgg(figure)  # needs no display, and leaves the process's own figures alone
        upper, lower = figure.subplots(2, 1, sharex=True)
        figure.suptitle(f"{messages:,} messages through one store", fontsize=16, fontweight="bold")
        upper.set_title("Pending messages (sent, not due yet)")
        _curve(upper, days, np.array(pending, np.float64), _PENDING)
        lower.set_title("Disk use of the store, kB")
        _curve(lower, days, np.array(disk_bytes) / 1000, _DISK)
        locator = AutoDateLocator(minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
        lower.xaxis.set_major_locator(locator)
        lower.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        figure.savefig(path, format=None if path.suffix else "png")


def _curve(axes: Axes, days: _Floats, values: _Floats, colour: str) -> None:
    """A stepped curve with its highest point named: what is sampled holds until the next sample."""
    axes.fill_between(days, values, step="post", color=colour, alpha=0.25, linewidth=0)
    axes.step(days, values, where="post", color=colour, linewidth=0.9)
    peak = int(np.argmax(values))
    at, highest = float(days[peak]), float(values[peak])
    axes.plot([at], [highest], "o", color=colour)
    left = at > days[0] + (days[-1] - days[0]) * 0.7
    axes.annotate(
        f"{highest:,.0f}",
        (at, highest),
        xytext=(-8 if left else 8, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontweight="bold",
        color=colour,
    )
    axes.set_ylim(bottom=0, top=highest * 1.08 or 1)
    axes.margins(x=0.01)
