"""Names as clients give them."""

from __future__ import annotations

import pytest

from duelog.broker.lookup.topic_address import (
    TopicAddress,
    namespace_of,
    partition_name,
    shown_subscription,
    stored_subscription,
)
from duelog.broker.protocol.failures import Refused, ServerError


@pytest.mark.parametrize(
    ("text", "full", "base", "partition"),
    [
        ("t", "persistent://public/default/t", "persistent://public/default/t", -1),
        ("a/b/t", "persistent://a/b/t", "persistent://a/b/t", -1),
        ("persistent://a/b/t.*[x]+", "persistent://a/b/t.*[x]+", "persistent://a/b/t.*[x]+", -1),
        ("t-partition-0", "persistent://public/default/t-partition-0", "persistent://public/default/t", 0),
        ("t-partition-12", "persistent://public/default/t-partition-12", "persistent://public/default/t", 12),
        (
            "t-partition-1-partition-2",
            "persistent://public/default/t-partition-1-partition-2",
            "persistent://public/default/t-partition-1",
            2,
        ),
    ],
)
def test_a_name_means_a_topic_and_a_partition(text: str, full: str, base: str, partition: int) -> None:
    """Full and short forms."""
    address = TopicAddress.parse(text)
    assert (str(address.name), str(address.base), address.partition) == (full, base, partition)


@pytest.mark.parametrize(
    "local", ["t-partition-", "t-partition-01", "t-partition-x", "t-partition--1", "-partition-1", "t-partition-1-DLQ"]
)
def test_a_name_that_only_resembles_a_partition_is_a_plain_topic(local: str) -> None:
    """Numbers are written in one way, behind a name."""
    address = TopicAddress.parse(local)
    assert address.partition == -1
    assert address.base == address.name


@pytest.mark.parametrize(
    "text",
    ["", "a/b", "a/b/c/d", "persistent://a/b", "persistent://a/b/", "kafka://a/b/c", "a b/c/d", "x\0y", "t" * 400],
)
def test_a_name_that_breaks_the_rules_is_an_invalid_topic_name(text: str) -> None:
    """Also one whose key the store could not hold."""
    with pytest.raises(Refused) as caught:
        TopicAddress.parse(text)
    assert caught.value.error == ServerError.INVALID_TOPIC_NAME


def test_a_topic_that_is_not_persistent_is_not_allowed() -> None:
    """Nothing here forgets."""
    with pytest.raises(Refused) as caught:
        TopicAddress.parse("non-persistent://public/default/t")
    assert caught.value.error == ServerError.NOT_ALLOWED


def test_a_partition_whose_name_would_be_too_long_is_refused() -> None:
    """Before anything is made."""
    base = TopicAddress.parse("t" * 370).name
    with pytest.raises(Refused) as caught:
        partition_name(base, 0)
    assert caught.value.error == ServerError.INVALID_TOPIC_NAME


@pytest.mark.parametrize("text", ["", "public", "a/b/c", "a b/c"])
def test_a_namespace_has_two_parts(text: str) -> None:
    """Else it is refused."""
    assert namespace_of("a/b") == "a/b"
    with pytest.raises(Refused):
        namespace_of(text)


@pytest.mark.parametrize("name", ["s", "a/b", "50%", "a%2Fb", "%25/%2F", "/", "ü/ü"])
def test_a_subscription_is_shown_as_it_was_named(name: str) -> None:
    """The store takes no `/`."""
    stored = stored_subscription(name)
    assert "/" not in stored
    assert shown_subscription(stored) == name


@pytest.mark.parametrize("name", ["", "a\nb", "/" * 100])
def test_a_subscription_that_the_store_cannot_name_is_not_allowed(name: str) -> None:
    """Clients take that for final."""
    with pytest.raises(Refused) as caught:
        stored_subscription(name)
    assert caught.value.error == ServerError.NOT_ALLOWED
