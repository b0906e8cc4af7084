"""Which stores a list, a glob and a placement table mean, and that one that fails hides nothing of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from duelog.store.errors import DamagedStore, InvalidArgument
from duelog.tools.fleet import each_store, is_fleet, stores_of


def stores(parent: Path, *names: str) -> list[Path]:
    """Directories that look like stores."""
    for name in names:
        (parent / name).mkdir()
        (parent / name / "STORE").touch()
    return [parent / name for name in names]


def test_a_glob_means_the_stores_among_what_it_matches(tmp_path: Path) -> None:
    """Also one that has lost its STORE file; files and other directories are left out."""
    found = stores(tmp_path, "a", "b[1]", "c")
    (tmp_path / "c" / "STORE").unlink()
    (tmp_path / "c" / "main").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes").touch()
    assert stores_of([f"{tmp_path}/*"]) == found
    assert stores_of([tmp_path / "b[1]"]) == [tmp_path / "b[1]"]
    with pytest.raises(InvalidArgument, match="matches no store"):
        stores_of([f"{tmp_path}/x*"])


def test_each_store_is_meant_once_in_the_order_given(tmp_path: Path) -> None:
    """However often and by whatever path it is named."""
    a, b = stores(tmp_path, "a", "b")
    (tmp_path / "link").symlink_to(a)
    assert stores_of([b, tmp_path / "link", f"{tmp_path}/*", a]) == [b, tmp_path / "link"]


def test_the_directory_of_one_store_is_no_fleet(tmp_path: Path) -> None:
    """A list, a glob and a file are, also where they mean a single store."""
    (only,) = stores(tmp_path, "a*")
    assert not is_fleet([only])
    assert not is_fleet([tmp_path / "missing"])
    assert is_fleet([only, only])
    assert is_fleet([tmp_path / "?"])
    assert is_fleet([only / "STORE"])


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_store_that_fails_is_named_and_the_others_are_done(tmp_path: Path, at_once: int) -> None:
    """Results in the order of the stores; a mistake of the program is raised."""

    def work(store: Path) -> int:
        if store.name == "b":
            raise DamagedStore(store, "has\na hole")
        return len(store.name)

    outcomes = list(each_store([Path("a"), Path("b"), Path("cc")], work, at_once=at_once))
    assert [(each.store.name, each.result) for each in outcomes] == [("a", 1), ("b", None), ("cc", 2)]
    assert "has a hole" in outcomes[1].reason
    with pytest.raises(ZeroDivisionError):
        list(each_store([Path("a")], lambda store: 1 // 0, at_once=at_once))
