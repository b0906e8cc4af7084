"""An exception at each line that runs, in each operation of a store; the program goes on, and a twin is compared.

An operation of a small store is run once under `sys.settrace`, which tells the lines of duelog that it comes to. Then
it is run again for each of them, and an exception of each kind is raised there. The program goes on with the same
store, or closes and opens it; what is delivered at the end is held against a twin in plain Python. A run that does not
end is killed by `faulthandler`, which shows where it stands.

Not raised at: the exit of a `with` statement, the first line of a `finally`, and `try:`. Nothing is called between the
block and these, so no call can fail there, and CPython looks for signals after calls and at jumps back only. For
interrupts the lines of `contextlib` and `threading` that duelog runs count as well.

    python -m tests.disaster.exception_sweep fire --points 200
"""

import argparse
import ast
import contextlib
import dis
import errno
import faulthandler
import functools
import json
import os
import shutil
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import lmdb

import duelog
from duelog.errors import DuelogError
from tests.disaster import sweep_mutants, sweep_scenarios
from tests.disaster.running import memory
from tests.disaster.sweep_scenarios import START_MS, Run, Scenario, Twin

PATIENCE_S = 60
"""A run that takes longer hangs."""

KINDS: dict[str, Callable[[], BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "interrupts": KeyboardInterrupt,  # and another some lines after it
    "memory": MemoryError,
    "emfile": lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "enospc": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "lmdb": lambda: lmdb.Error("mdb_get: Input/output error"),
}

_INTERRUPTS = ("interrupt", "interrupts")

_PACKAGE = os.path.join(os.path.dirname(duelog.__file__), "")
_STANDARD = {contextlib.__file__: "contextlib.py", threading.__file__: "threading.py"}


class Place(NamedTuple):
    """The `nth` time that an operation comes to a line."""

    file: str
    line: int
    nth: int


class Point(NamedTuple):
    """An exception, the place at which it is raised, and whether the store is then opened anew."""

    place: Place
    kind: str
    reopen: bool

    def __str__(self) -> str:
        how = "reopened" if self.reopen else "goes on"
        return f"{self.place.file}:{self.place.line} ({self.place.nth}), {self.kind}, {how}"


@functools.cache
def _spared(code: CodeType) -> frozenset[int]:
    """Offsets at which a line of `code` begins at which nothing is raised."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "PRECALL"]
    spared = {each.offset for each in instructions if each.opname == "NOP"}
    for at, (first, second, third, call) in enumerate(zip(*(instructions[k:] for k in range(4)), strict=False)):
        loads = (first, second, third)
        if (
            call.opname == "CALL"
            and call.arg == 2
            and all(each.argval is None and "LOAD" in each.opname for each in loads)
        ):
            spared.add(first.offset)
            if at and instructions[at - 1].opname == "SWAP":  # with a value to be returned
                spared.add(instructions[at - 1].offset)
    return frozenset(spared)


@functools.cache
def _finally_lines(path: str) -> frozenset[int]:
    tree = ast.parse(Path(path).read_bytes())
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    return frozenset(node.finalbody[0].lineno for node in tries if node.finalbody)


class Tracer:
    """Counts the lines that are come to, and raises at one of them."""

    def __init__(self, place: Place | None = None, kind: str = "interrupt") -> None:
        self.lines: Counter[tuple[str, int]] = Counter()
        self.raised: BaseException | None = None
        self._further = 1 + zlib.crc32(str(place).encode()) % 40 if kind == "interrupts" else 0
        """So many lines after the first exception another is raised; 0: none is."""
        self._place = place
        self._kind = kind

    @contextlib.contextmanager
    def tracing(self, everywhere: bool) -> Iterator[None]:
        """Trace this thread for the block, and with `everywhere` the threads started in it; none raises after it."""
        if everywhere:
            threading.settrace(self._called)
        else:
            sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self._place = None  # a thread that goes on is traced still

    def caused(self, error: BaseException | None) -> bool:
        """True if an exception is the one that was raised here, or was caused by it."""
        while error is not None and error is not self.raised:
            error = error.__cause__ or error.__context__
        return error is not None

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return self._line
        if file in _STANDARD and self._kind in _INTERRUPTS and frame.f_back is not None:
            back = frame.f_back.f_code.co_filename
            if back.startswith(_PACKAGE) or back in _STANDARD:
                return self._line
        return None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        entered = event == "return" and frame.f_code.co_qualname == "Condition.__enter__"  # has its lock by now
        if (event != "line" and not entered) or (self.raised is not None and not self._further):
            return self._line
        code = frame.f_code
        file, line = code.co_filename, frame.f_lineno
        if event == "line" and (frame.f_lasti in _spared(code) or line in _finally_lines(file)):
            return self._line
        if self.raised is not None:
            self._further -= 1
            if not self._further:
                raise KeyboardInterrupt
            return self._line
        name = _STANDARD.get(file) or file[len(_PACKAGE) :]
        self.lines[name, line] += 1
        if self._place == (name, line, self.lines[name, line]):
            self.raised = KINDS[self._kind]()
            raise self.raised
        return self._line


class Template:
    """A store as it is before an operation, and its twin."""

    def __init__(self, scenario: Scenario, path: Path) -> None:
        made = Run(path, scenario.config, Twin(), START_MS)
        scenario.before(made)
        made.store.close()
        self._path = path
        self._scenario = scenario
        self._twin = made.twin
        self._now_ms = made.clock.now_ms()

    def run(self, scratch: Path, tracer: Tracer) -> Run:
        """Do the operation on a copy, traced; what is raised is taken for granted, if it was raised on purpose."""
        scenario = self._scenario
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(self._path, scratch)
        with tracer.tracing(everywhere=True) if scenario.background else contextlib.nullcontext():
            run = Run(scratch, scenario.config, self._twin, self._now_ms, background=scenario.background)
            try:
                scenario.ready(run)
                with contextlib.nullcontext() if scenario.background else tracer.tracing(everywhere=False):
                    scenario.act(run)
            except BaseException as error:
                if not isinstance(error, DuelogError) and not tracer.caused(error):
                    raise
            finally:
                scenario.after(run)
        return run


def places(template: Template, scratch: Path) -> list[Place]:
    """Where an operation comes: each line once, and once more, the last time, where it comes to it again."""
    tracer = Tracer()
    run = template.run(scratch, tracer)
    run.conclude(reopen=False)
    assert not run.wrong, run.wrong
    found = []
    for (file, line), times in sorted(tracer.lines.items()):
        found += [Place(file, line, 1)] if times == 1 else [Place(file, line, 1), Place(file, line, times)]
    return found


def points(scenario: Scenario, found: list[Place], wanted: int | None) -> list[Point]:
    """Choose what is raised: all of it, or as many as `wanted`, always the same; every second one an interrupt."""
    all_of_it = [
        Point(place, kind, reopen)
        for place in found
        for kind in KINDS
        for reopen in (False, True)
        if (place.file not in _STANDARD.values() or kind in _INTERRUPTS)
        and not (scenario.background and kind in _INTERRUPTS)
    ]
    if wanted is None:
        return all_of_it
    by_chance = sorted(all_of_it, key=lambda point: zlib.crc32(f"{scenario.name} {point}".encode()))
    interrupts = [point for point in by_chance if point.kind in _INTERRUPTS]
    others = [point for point in by_chance if point.kind not in _INTERRUPTS]
    half = min(max(wanted // 2, wanted - len(others)), len(interrupts))
    return [*interrupts[:half], *others[: wanted - half]]


def judge(template: Template, point: Point, scratch: Path) -> list[str]:
    """Run with one exception raised and return what is wrong afterwards."""
    run = template.run(scratch, Tracer(point.place, point.kind))
    run.conclude(reopen=point.reopen)
    return run.wrong


def sweep(
    scenario: Scenario,
    wanted: int | None,
    begin: int,
    say: Callable[[Any], object],
    file: str | None = None,
    patience_s: float = PATIENCE_S,
    enough: int = 1_000,
) -> None:
    """Run every point from `begin` on, until `enough` were wrong; says what is about to be run, and what was wrong."""
    with tempfile.TemporaryDirectory(dir=memory(), prefix="sweep-") as directory:
        scratch = Path(directory) / "run"
        template = Template(scenario, Path(directory) / "template")
        found = [place for place in places(template, scratch) if file in (None, place.file)]
        chosen = points(scenario, found, wanted)
        say(["points", len(chosen)])
        for number, point in enumerate(chosen[begin:], begin):
            say(["begins", number, str(point)])
            faulthandler.dump_traceback_later(patience_s, exit=True)
            try:
                wrong = judge(template, point, scratch)
            except Exception as error:  # whatever it is, it is a finding
                wrong = [f"the program could not go on: {type(error).__name__} {error}"]
            if wrong:
                say(["wrong", number, str(point), wrong])
                enough -= 1
            if not enough:
                break
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """One scenario, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=sorted(sweep_scenarios.SCENARIOS))
    parser.add_argument("--points", type=int, help="how many, all by default")
    parser.add_argument("--begin", type=int, default=0, help="the first to run")
    parser.add_argument("--file", help="raise in one file only, as store/env/environment.py")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="s after which a run hangs")
    parser.add_argument("--mutant", help="a wrong engine of sweep_mutants")
    options = parser.parse_args()
    if options.mutant:
        sweep_mutants.apply(options.mutant)
    sweep(
        sweep_scenarios.SCENARIOS[options.scenario],
        options.points,
        options.begin,
        lambda said: print(json.dumps(said), flush=True),
        options.file,
        options.patience,
    )


if __name__ == "__main__":
    main()
