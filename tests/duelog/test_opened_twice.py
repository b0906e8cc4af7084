"""A store that one process opens twice: the second opening says so, whatever way it takes, and the first goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock
from duelog.errors import AlreadyOpen, StoreLocked
from tests.conftest import START_MS
from tests.duelog.store_state import CONFIG, fill


@pytest.mark.parametrize("second", [False, True], ids=["to write", "to read"])
@pytest.mark.parametrize("first", [False, True], ids=["written", "read"])
@pytest.mark.parametrize("way", ["same", "relative", "dots", "link"])
def test_a_second_opening_in_one_process_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, first: bool, second: bool
) -> None:
    """By the same path, a relative one, one with dots or a symbolic link; for writing and for reading."""
    path = tmp_path / "store"
    fill(path)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    other = {"same": path, "relative": Path("store"), "dots": path / ".." / "store", "link": tmp_path / "link"}[way]
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS), read_only=first) as store:
        descriptors = set(os.listdir("/proc/self/fd"))
        with pytest.raises(AlreadyOpen, match="this process has this store open already") as caught:
            DelayedStore.open(other, CONFIG, read_only=second)
        assert caught.value.path == other.absolute()
        assert isinstance(caught.value, StoreLocked)
        assert set(os.listdir("/proc/self/fd")) <= descriptors
        assert store.stats().pending == 3
    DelayedStore.open(other, CONFIG, read_only=second).close()


def test_of_threads_that_open_one_store_at_once_one_gets_it_and_others_hear_why(tmp_path: Path) -> None:
    """None takes another thread of its own process for another process."""
    path = tmp_path / "store"
    fill(path)
    start, errors, stores = threading.Barrier(8), list[Exception](), list[DelayedStore]()

    def open_it() -> None:
        start.wait()
        try:
            stores.append(DelayedStore.open(path, CONFIG))
        except StoreLocked as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 1
    assert [type(error) for error in errors] == [AlreadyOpen] * 7
    stores[0].close()


def test_a_child_of_a_process_that_has_the_store_open_hears_of_another_process(tmp_path: Path) -> None:
    """What its parent holds is not its own: it cannot share that."""
    path = tmp_path / "store"
    fill(path)
    with DelayedStore.open(path, CONFIG):
        child = os.fork()
        if not child:
            try:
                DelayedStore.open(path, CONFIG)
            except StoreLocked as error:
                os._exit(0 if type(error) is StoreLocked else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
