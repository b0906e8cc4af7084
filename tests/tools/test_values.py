"""Times, properties and stores as people write them; one store that fails hides nothing of the others."""

from pathlib import Path

import pytest

from duelog.errors import InvalidArgument
from duelog.store.errors import DamagedStore
from duelog.tools.fleet import each_store, is_fleet, stores_of
from duelog.tools.values import iso_time, properties_of, time_ms


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1795251600000", 1_795_251_600_000),
        ("2026-11-21T09:00:00Z", 1_795_251_600_000),
        ("2026-11-21T10:00:00+01:00", 1_795_251_600_000),
        ("2026-11-21T09:00:00.0001Z", 1_795_251_600_001),
        ("20261121T090000Z", 1_795_251_600_000),
        ("0", 0),
        ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
    ],
)
def test_a_time_is_milliseconds_or_iso_8601_with_a_zone(text: str, ms: int) -> None:
    """A duration finer than a millisecond is rounded up, so that nothing is early."""
    assert time_ms("at", text) == ms


@pytest.mark.parametrize(
    "text",
    ["", "tomorrow", "2026-11-21", "2026-11-21T09:00:00", "-1", "1969-12-31T23:59:59Z", "253402300800000", "9" * 30,
     "2026-13-01T00:00Z", "9999-12-31T23:59:59.9999Z", "1.5"],
)  # fmt: skip
def test_a_time_without_a_zone_or_out_of_range_is_refused(text: str) -> None:
    """The error names the field and what was given."""
    with pytest.raises(InvalidArgument) as raised:
        time_ms("at", text)
    assert (raised.value.field, raised.value.value) == ("at", text)


def test_times_are_shown_as_they_are_read() -> None:
    """`iso_time` is the inverse of `time_ms`."""
    for ms in (0, 1, 999, 1_795_251_600_000, 253_402_300_799_999):
        assert time_ms("at", iso_time(ms)) == ms


@pytest.mark.parametrize(
    ("pairs", "said"),
    [(["shop"], "name=value"), (["=7"], "name=value"), ([""], "name=value"), (["a=1", "a=2"], "twice")],
)
def test_a_property_needs_a_name_of_its_own_and_a_value(pairs: list[str], said: str) -> None:
    """An argument that is no name=value is refused, and of one name neither value is taken silently."""
    with pytest.raises(InvalidArgument, match=said):
        properties_of(pairs)
    assert properties_of(["a=", "b=c=d"]) == {"a": "", "b": "c=d"}


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
