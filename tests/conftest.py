"""Fixtures for every test that opens a store: whatever was opened is checked at the end."""

import itertools
import os
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from duelog import Clock, DelayedStore, ManualClock, StoreConfig, TickResult
from duelog.store.env import body_file
from duelog.store.files import failpoints

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

START_MS = 1_790_000_000_000
"""2026-09-21T14:13:20Z: where test clocks begin, in the middle of a day."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what is to run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEMORY = "/dev/shm"
"""A file system in memory, where waiting for the disk costs nothing."""


def holds_stores(directory: str) -> bool:
    """True if a file system has space for what tests make, and writes past the page cache."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.close(os.open(file.name, os.O_WRONLY | getattr(os, "O_DIRECT", 0)))
        return shutil.disk_usage(directory).free > 4 << 30
    except OSError:
        return False


if holds_stores(MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)  # where tmp_path lies

LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A loaded machine draws and runs slowly, which says nothing of the code."""
settings.register_profile("same", LOADED, derandomize=True)
settings.register_profile("new", LOADED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
"""Every run has the same random examples; HYPOTHESIS_PROFILE=new has new ones each time."""

for sliced in ("upkeep.maintenance._SLICE_S", "upkeep.reclaiming._SLICE_S", "markers.firing.loaded._LOAD_SLICE_S"):
    pytest.MonkeyPatch().setattr(f"duelog.{sliced}", 60.0)
"""A slice of a tick is cut by the machine's clock. Here one does all that is due, however slow the machine is."""

OpenStore = Callable[..., DelayedStore]
Plant = Callable[..., None]
Value = TypeVar("Value")


class LeadingClock(ManualClock):
    """A clock that tests move, and that lets be written what is due in a moment, as the machine's does."""

    def __init__(self, now_ms: int, lead_ms: int = 5) -> None:
        super().__init__(now_ms)
        self.lead_ms = lead_ms


def present(value: Value | None) -> Value:
    """The value, which is to be there."""
    assert value is not None
    return value


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises, whatever it is given."""

    def raise_(*_: object, **__: object) -> Any:
        raise error

    return raise_


def in_threads(works: Iterable[Callable[[], object]]) -> None:
    """Do each in a thread of its own, begun in this order; all have ended when this returns."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tick_after(store: DelayedStore, clock: ManualClock, ms: int) -> TickResult:
    """Let time pass, and have the store do what is due."""
    clock.advance(ms)
    return store.tick()


def applied(store: DelayedStore) -> DelayedStore:
    """Have all that was sent be in LMDB; the store."""
    store._engine.writer().apply_all()
    return store


@pytest.fixture
def clock() -> ManualClock:
    """A clock that tests move."""
    return ManualClock(START_MS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of a store, still missing."""
    return tmp_path / "store"


@pytest.fixture
def open_store(tmp_path: Path, clock: ManualClock) -> Iterator[OpenStore]:
    """Open a store in `tmp_path`/store (or `path`) on the manual clock; checked and closed at the end."""
    stores: list[DelayedStore] = []

    def open_(path: Path | None = None, config: StoreConfig | None = None, *, clock_: Clock | None = None,
              read_only: bool = False) -> DelayedStore:  # fmt: skip
        store = DelayedStore.open(path or tmp_path / "store", config, clock=clock_ or clock, read_only=read_only)
        stores.append(store)
        return store

    yield open_
    for store in reversed(stores):
        if not store.closed:
            findings = list(store.check())
            store.close()
            assert findings == []


class BodyMapsMade:
    """The maps of body files that were made."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[mmap]] = []

    def __call__(self, *arguments: Any, **named: Any) -> mmap:
        """Make one."""
        new = mmap(*arguments, **named)
        self.made.append(weakref.ref(new))
        return new

    def alive(self) -> int:
        """Those that were not given back."""
        return sum(each() is not None for each in self.made)


@pytest.fixture
def body_maps(monkeypatch: pytest.MonkeyPatch) -> BodyMapsMade:
    """Tells which maps of body files are made, and given back."""
    made = BodyMapsMade()
    monkeypatch.setattr(body_file, "mmap", made)
    return made


@pytest.fixture
def disarmed() -> Iterator[None]:
    """No failpoint stays armed after the test, also of a store that is closed after it."""
    yield
    failpoints.disarm()


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Have the `at`-th call of a function from now on raise, after it was made or before; no other does."""

    def plant_(owner: Any, name: str, error: BaseException, *, after: bool = True, at: int = 1) -> None:
        original, calls = getattr(owner, name), itertools.count(1)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            planted = next(calls) == at
            if planted and not after:
                raise error
            value = original(*arguments, **options)
            if planted:
                raise error
            return value

        monkeypatch.setattr(owner, name, wrapped)

    return plant_


@pytest.fixture
def config(request: pytest.FixtureRequest) -> StoreConfig:
    """The configuration of `store`: CONFIG of the test's module where it has one, or a parameter of the test."""
    return getattr(request.module, "CONFIG", StoreConfig())


@pytest.fixture
def store(open_store: OpenStore, config: StoreConfig) -> DelayedStore:
    """An empty store on the manual clock."""
    return open_store(config=config)
