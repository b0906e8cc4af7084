"""Measurements, their summary, and how it is shown: a table for people and one JSON line for machines."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from .options import Options

Better = Literal["more", "less"]
REFERENCE = "duelog"
"""Key of the subject that the others are compared with."""

console = Console(width=None if os.isatty(1) else 120, highlight=False)


@dataclass(slots=True)
class Measure:
    """A figure that each run of a subject gives: its name in the answer, its unit, and whether more of it is better."""

    name: str
    unit: str
    better: Better = "more"
    show: Callable[[float], str] | None = None


@dataclass(slots=True)
class Series:
    """The values of one measure for one subject in one case, a value for each run."""

    case: str
    subject: str
    label: str
    measure: Measure
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def noise(self) -> float:
        """(max - min) / median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0


@dataclass(slots=True)
class Target:
    """A target, and the figure that was reached."""

    text: str
    value: float
    limit: float
    better: Better
    unit: str = ""

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.better == "more" else self.value <= self.limit


class Results:
    """The results of one workload."""

    def __init__(self, workload: str, options: Options) -> None:
        self.workload = workload
        self.options = options
        self.series: list[Series] = []
        self.targets: list[Target] = []
        self.notes: list[str] = []
        self.failures: list[str] = []

    def add(self, case: str, subject: str, label: str, measure: Measure, value: float) -> None:
        """Add the value of one run."""
        series = self.find(case, subject, measure.name)
        if series is None:
            series = Series(case, subject, label, measure)
            self.series.append(series)
        series.values.append(value)

    def find(self, case: str, subject: str, measure: str) -> Series | None:
        """The series, None when nothing was measured."""
        for series in self.series:
            if (series.case, series.subject, series.measure.name) == (case, subject, measure):
                return series
        return None

    def of(self, case: str, measure: str) -> list[Series]:
        """Every subject's series of a case and measure, in the order they were measured in."""
        return [series for series in self.series if series.case == case and series.measure.name == measure]

    def median(self, case: str, subject: str, measure: str) -> float | None:
        series = self.find(case, subject, measure)
        return None if series is None else series.median

    def best(self, case: str, measure: str, among: Container[str]) -> Series | None:
        """The best series of the subjects `among` these."""
        found = [series for series in self.of(case, measure) if series.subject in among]
        if not found:
            return None
        more = found[0].measure.better == "more"
        return max(found, key=lambda series: series.median if more else -series.median)

    def ratio(self, series: Series, to: Series) -> float:
        """Median of the ratios run by run: what was measured side by side is compared side by side."""
        pairs = [(a, b) for a, b in zip(series.values, to.values, strict=False) if b]
        return statistics.median(a / b for a, b in pairs) if pairs else float("nan")

    def target(self, text: str, value: float | None, limit: float, better: Better, unit: str = "") -> None:
        """Note what was to be reached; without a value (nothing to compare with) it is left out."""
        if value is not None:
            self.targets.append(Target(text, value, limit, better, unit))

    # -- showing -----------------------------------------------------------------------------------

    def show(self) -> None:
        """Print the table, the targets and the JSON line; append the line where it was asked for."""
        if len({series.subject for series in self.series}) == 1:
            console.print(self._wide_table())
        else:
            for measure in dict.fromkeys((s.measure.name, s.measure.unit) for s in self.series):
                console.print(self._table(*measure))
        for target in self.targets:
            sign = "[green]reached[/]" if target.reached else "[red]not reached[/]"
            limit = f"{'at least' if target.better == 'more' else 'at most'} {_number(target.limit)} {target.unit}"
            console.print(f"  {sign}  {target.text}: {_number(target.value)} {target.unit} ({limit.strip()})")
        for note in [*self.notes, *self.failures]:
            console.print(f"  {note}", soft_wrap=True)
        line = json.dumps(self.as_dict(), separators=(",", ":"))
        print(line, flush=True)
        if self.options.json is not None:
            with self.options.json.open("a") as file:
                file.write(line + "\n")

    def _table(self, measure: str, unit: str) -> Table:
        table = Table(title=f"{self.workload}: {measure}, {unit}", title_justify="left", title_style="bold")
        table.add_column("case")
        table.add_column("subject")
        for head in ("median", "min..max", f"{REFERENCE} to it"):
            table.add_column(head, justify="right")
        shown = [series for series in self.series if series.measure.name == measure and series.measure.unit == unit]
        last = ""
        for series in shown:
            if last and series.case != last:
                table.add_section()
            reference = self.find(series.case, REFERENCE, measure)
            ratio = "" if reference is None or reference is series else _ratio(self.ratio(reference, series))
            form = series.measure.show or _number
            spread = f"{form(min(series.values))}..{form(max(series.values))}" if len(series.values) > 1 else ""
            case = series.case if series.case != last else ""
            table.add_row(case, series.label, form(series.median), spread, ratio)
            last = series.case
        return table

    def _wide_table(self) -> Table:
        """A row for each case and a column for each measure, where there is one subject only."""
        names = list(dict.fromkeys((series.measure.name, series.measure.unit) for series in self.series))
        table = Table(title=f"{self.workload}: {self.series[0].label}", title_justify="left", title_style="bold")
        table.add_column("case")
        for name, unit in names:
            table.add_column(f"{name}\n{unit}", justify="right")
        for case in dict.fromkeys(series.case for series in self.series):
            cells = []
            for name, _ in names:
                series = self.find(case, self.series[0].subject, name)
                form = _number if series is None else series.measure.show or _number
                cells.append("" if series is None else form(series.median))
                if series is not None and len(series.values) > 1:
                    cells[-1] += f"\n{form(min(series.values))}..{form(max(series.values))}"
            table.add_row(case, *cells)
        return table

    def as_dict(self) -> dict[str, Any]:
        """Everything, for the JSON line."""
        return {
            "workload": self.workload,
            "runs": self.options.runs,
            "quick": self.options.quick,
            "against": self.options.against,
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
            "results": [
                {
                    "case": series.case,
                    "subject": series.subject,
                    "measure": series.measure.name,
                    "unit": series.measure.unit,
                    "better": series.measure.better,
                    "median": series.median,
                    "min": min(series.values),
                    "max": max(series.values),
                    "values": series.values,
                }
                for series in self.series
            ],
            "targets": [
                {"text": t.text, "value": t.value, "limit": t.limit, "better": t.better, "reached": t.reached}
                for t in self.targets
            ],
            "notes": [*self.notes, *self.failures],
        }


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 100 else f"{value:,.0f}x"
