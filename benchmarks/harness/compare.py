"""Measuring subjects in turns: one run of each after the other, the order rotated, so that noise meets all alike."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .isolated import MeasurementFailed, run_isolated
from .options import ROOT, Options
from .results import REFERENCE, Measure, Results, console
from .revision import Revision, checked_out


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to measure: `key` is what the measuring function gets, `label` what tables show.

    missing: how to get it, where it is not installed; such a subject is left out and mentioned.
    """

    key: str
    label: str
    missing: str | None = None


DUELOG = Subject(REFERENCE, "duelog")


def compare(
    results: Results,
    case: str,
    function: str,
    arguments: dict[str, Any],
    measures: Sequence[Measure],
    subjects: Sequence[Subject] = (DUELOG,),
    *,
    runs: int | None = None,
) -> None:
    """Measure every subject `runs` times by `function` ("benchmarks.module:name").

    The function gets `subject=`, `directory=` and `arguments`, and returns a value for the name of each measure.
    A subject that fails is mentioned in the results and left out of the further runs.
    """
    options = results.options
    with ExitStack() as stack:
        trees = {subject.key: ROOT for subject in subjects}
        left = _chosen(results, subjects, options)
        if options.against is not None:
            revision = stack.enter_context(checked_out(options.against))
            left = _with_revision(left, trees, revision)
        progress = stack.enter_context(_progress())
        task = progress.add_task("", total=None)
        for run in range(runs or options.runs):
            at = run % len(left) if left else 0
            for subject in [*left[at:], *left[:at]]:
                progress.update(task, description=f"{results.workload}, {case}, run {run + 1}: {subject.label}")
                key = subject.key.partition("@")[0]
                try:
                    answer = run_isolated(
                        function, {"subject": key, **arguments}, tree=trees[subject.key], directory=options.directory
                    )
                except MeasurementFailed as error:
                    results.failures.append(f"{subject.label} failed ({case}): {error}")
                    left = [other for other in left if other is not subject]
                    continue
                for measure in measures:
                    if measure.name in answer:
                        results.add(case, subject.key, subject.label, measure, float(answer[measure.name]))


def _chosen(results: Results, subjects: Sequence[Subject], options: Options) -> list[Subject]:
    chosen = []
    for subject in subjects:
        if options.only and subject.key not in options.only:
            continue
        if options.against is not None and subject.key.partition(":")[0] != REFERENCE:
            continue
        if subject.missing is None:
            chosen.append(subject)
        elif (note := f"{subject.label} is left out: {subject.missing}") not in results.notes:
            results.notes.append(note)
    return chosen


def _with_revision(subjects: list[Subject], trees: dict[str, Path], revision: Revision) -> list[Subject]:
    both = []
    for subject in subjects:
        other = Subject(f"{subject.key}@{revision.name}", f"{subject.label} at {revision.name}")
        trees[other.key] = revision.tree
        both += [subject, other]
    return both


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    )
