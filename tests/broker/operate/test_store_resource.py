"""The store as a whole over REST: figures and time partitions."""

from duelog.partitions.timespan import directory_name
from tests.broker.admin.rest import Rest

DUE_MS = 4_000_000_000_000 // 86_400_000 * 86_400_000


async def test_figures_of_the_store_and_the_broker(rest: Rest) -> None:
    """Figures of what is there, and of what came since the start."""
    rest.store.topic("t").send_payloads([b"x"] * 3, deliver_at=DUE_MS)
    found = (await rest.ask("GET", "/duelog/v1/counters")).value
    assert {name: found["store"][name] for name in ("topics", "partitions", "pending")} == {
        "topics": 1,
        "partitions": 1,
        "pending": 3,
    }
    assert (found["producers"], found["consumers"], found["messagesIn"], found["suspended"]) == (0, 0, 0, [])


async def test_a_partition_says_why_it_is_still_there(rest: Rest) -> None:
    """By the name that `duelog partitions` gives; 404 for one that is not there, 412 for no name of one."""
    rest.store.topic("t").send_payloads([b"x"] * 3, deliver_at=DUE_MS)
    (listed,) = (await rest.ask("GET", "/duelog/v1/partitions")).value
    name = directory_name(DUE_MS)
    assert (listed["name"], listed["state"], listed["messages"], listed["pending"]) == (name, "future", 3, 3)
    found = (await rest.ask("GET", f"/duelog/v1/partitions/{name}")).value
    kept = [(each["reason"], each["topic"], each["behind"]) for each in found.pop("keptBy")]
    assert kept == [("not over", "", 0), ("pending", "persistent://public/default/t", 3)]
    assert found == listed
    assert (await rest.ask("GET", "/duelog/v1/partitions/20010101T000000Z")).status == 404
    assert (await rest.ask("GET", "/duelog/v1/partitions/tomorrow")).status == 412
