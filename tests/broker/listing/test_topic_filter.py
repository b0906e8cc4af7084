"""Patterns and hashes of topic lists."""

import pytest

from duelog.broker.listing.topic_listing import UnreadablePattern, compiled, selected, topics_hash

NAMES = [f"persistent://public/default/{name}" for name in ("a", "a.b", "axb", "p-partition-0", "p-partition-1", "q")]


def local(names: list[str]) -> list[str]:
    """Without what they share."""
    return [name.removeprefix("persistent://public/default/") for name in names]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("public/default/a", ["a"]),
        ("persistent://public/default/a.*", ["a", "a.b", "axb"]),
        (r"persistent://public/default/a\.b", ["a.b"]),
        (r"\Qpersistent://public/default/a.b\E", ["a.b"]),
        (r"^\Qpersistent://public/default/a.b\E$", ["a.b"]),
        ("public/default/p", ["p-partition-0", "p-partition-1"]),
        ("public/default/p-partition-0", []),
        ("a", []),
        ("public/default/(a|q)", ["a", "q"]),
        ("public/default/.", ["a", "p-partition-0", "p-partition-1", "q"]),
    ],
)
def test_a_pattern_is_matched_in_full_without_scheme_and_partition(pattern: str, found: list[str]) -> None:
    """Pulsar's broker does the same."""
    assert local(selected(NAMES, compiled(pattern))) == found


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", "[z-a]", "a{2000}"])
def test_a_pattern_that_re2_cannot_read_is_told(pattern: str) -> None:
    """Look-ahead and references need time without a bound."""
    with pytest.raises(UnreadablePattern):
        compiled(pattern)


def test_the_hash_is_the_one_that_clients_compute() -> None:
    """CRC-32C of the sorted names, its bytes from the lowest."""
    assert topics_hash([]) == "00000000"
    assert topics_hash(["persistent://tenant/ns/topic1"]) == "fd59a01d"
    assert topics_hash(NAMES) == topics_hash(reversed(NAMES)) != topics_hash(NAMES[1:])
