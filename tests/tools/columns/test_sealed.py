"""Sealed generations: what is listed, and what is refused before LMDB sees it."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from duelog.partitions.timespan import directory_name
from duelog.store.env.environment import Environment
from duelog.store.errors import BrokenInvariant, DamagedStore
from duelog.tools.columns.sealed import identity_of, open_sealed, sealed_generations
from tests.duelog.writing_process import HOUR_MS, WritingProcess
from tests.tools.closed_days import DAY_MS, FIRST_MS, Built, build


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A store of three closed days and an open one, which tests do not change."""
    return build(tmp_path_factory.mktemp("sealed") / "store", messages=500)


def test_closed_partitions_are_listed_and_open_ones_are_not(built: Built) -> None:
    """Each closed day comes once, in order; the day that has begun does not."""
    found = sealed_generations(built.path)
    assert [sealed.start_ms for sealed in found] == [FIRST_MS, FIRST_MS + DAY_MS, FIRST_MS + 2 * DAY_MS]
    assert all(sealed.path.is_dir() and sealed.file_bytes > 0 for sealed in found)
    assert [sealed.partition for sealed in found] == [directory_name(sealed.start_ms) for sealed in found]
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_sealed_generation_is_read_beside_the_process_that_has_the_store_open(tmp_path: Path) -> None:
    """No lock is taken: a directory that may not be written to is read as well."""
    with WritingProcess(tmp_path / "store") as process:
        process.do("subscribe", "t", "slow")
        process.send("t", "x", 10, HOUR_MS)
        process.do("advance", 2 * HOUR_MS)
        found = sealed_generations(tmp_path / "store")
        before = sorted(path.name for path in found[0].path.iterdir())
        with open_sealed(found[0], identity_of(tmp_path / "store").store_id) as environment, environment.read() as raw:
            assert raw.stat()["entries"] > 0
        assert sorted(path.name for path in found[0].path.iterdir()) == before


def test_a_generation_that_is_gone_or_another_is_refused(built: Built, tmp_path: Path) -> None:
    """Missing, grown, swapped and foreign directories are DamagedStore, not an empty result."""
    store = shutil.copytree(built.path, tmp_path / "store")
    store_id = identity_of(store).store_id
    first, second, third = sealed_generations(store)
    shutil.rmtree(first.path)
    with pytest.raises(DamagedStore, match="deleted or replaced"), open_sealed(first, store_id):
        pass
    with pytest.raises(DamagedStore, match="registered"):
        sealed_generations(store)
    with (second.path / "data.mdb").open("ab") as file:
        file.write(bytes(4096))
    with pytest.raises(DamagedStore, match="bytes, was"), open_sealed(second, store_id):
        pass
    with pytest.raises(DamagedStore, match="catalog says"), open_sealed(third, b"x" * 16):
        pass
    shutil.copytree(third.path, first.path)
    swapped = first._replace(file_bytes=third.file_bytes)
    with pytest.raises(DamagedStore, match="catalog says"), open_sealed(swapped, store_id):
        pass


def test_a_truncated_generation_does_not_kill_its_reader(built: Built, tmp_path: Path) -> None:
    """Pages that lie past the end of the file are found before LMDB maps them."""
    store = shutil.copytree(built.path, tmp_path / "store")
    path = sealed_generations(store)[0].path / "data.mdb"
    with path.open("r+b") as file:
        file.truncate(3 * 4096)
    sealed = sealed_generations(store)[0]
    with pytest.raises(DamagedStore, match="truncated"), open_sealed(sealed, identity_of(store).store_id):
        pass


def test_only_a_reader_may_do_without_locks(tmp_path: Path) -> None:
    """An environment that writes has locks."""
    with pytest.raises(BrokenInvariant, match="without locks"):
        Environment(tmp_path / "e", name="e", create=True, lock=False)
