"""Ids of what was not shipped are given to nothing else by the store that is restored."""

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig
from duelog.errors import DocumentChanged
from duelog.replica.shipping import ENTRIES
from duelog.replica.takeover import renew_ids
from duelog.tools.audit.store_audit import audit_store
from tests.duelog.replica.faulty import URL, FaultyBucket, restored, ship
from tests.duelog.side_by_side import crashed

DAY_S = 86_400
CONFIG = StoreConfig(replica=URL)
DAYS = range(4)


def send_each_day(store: DelayedStore, topic: str, payload: bytes) -> list[MessageId]:
    """Send one message for each of some days; day 0 is now."""
    return [store.topic(topic).send(payload, deliver_after=DAY_S * day) for day in DAYS]


@pytest.fixture
def old(bucket: FaultyBucket, tmp_path: Path, clock: ManualClock) -> tuple[list[MessageId], int]:
    """Ids and a version that a store has given out, and not shipped before its machine was lost."""
    with DelayedStore.open(tmp_path / "lost", CONFIG, clock=clock) as store:
        store.topic("a").subscribe("s").close()
        for topic in ("a", "b"):
            send_each_day(store, topic, b"shipped")
        store.topic("empty").create()
        store.documents.put("d", b"shipped")
        ship(store)
        bucket.is_down = True
        unshipped = [each for topic in ("a", "b", "empty", "new") for each in send_each_day(store, topic, b"lost")]
        version = store.documents.put("d", b"lost")
    bucket.is_down = False
    return unshipped, version


def test_a_restored_store_gives_no_id_of_an_unshipped_tail_again(
    old: tuple[list[MessageId], int], bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """Neither to a message nor to a document; who cancels or compares by an old one changes nothing."""
    unshipped, version = old
    restored(bucket, tmp_path / "restored")
    with DelayedStore.open(tmp_path / "restored", clock=clock) as store:
        before = store.stats().pending
        new = [each for topic in ("a", "b", "empty", "new") for each in send_each_day(store, topic, b"new")]
        assert not set(new) & set(unshipped)
        for topic in ("a", "b", "empty", "new"):
            for each in unshipped:
                store.topic(topic).cancel(each)  # it counts as cancelled, or is unknown
        assert store.stats().pending == before + len(new) - 4
        with pytest.raises(DocumentChanged):
            store.documents.put("d", b"new", expected=version)
        assert list(store.check(deep=True)) == []
        clock.advance(DAY_S * 5_000)
        store.tick()
        with store.topic("a").subscribe("s") as consumer:
            payloads = sorted(message.payload for message in consumer.receive(100, timeout=0))
        assert store._engine.delivery.quarantine.items() == []
        assert payloads == [b"new"] * len(DAYS) + [b"shipped"] * len(DAYS)


def test_a_restore_of_a_restore_passes_over_ids_again(
    old: tuple[list[MessageId], int], bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """The takeover commit is in the log of the second copy; a crash right after it leaves a store that opens."""
    restored(bucket, tmp_path / "restored")
    bucket.delete([each.name for folder in ("log", "snap", "files") for each in bucket.listing(folder)] + ["STORE"])
    with DelayedStore.open(tmp_path / "restored", CONFIG, clock=clock) as store:
        ids = send_each_day(store, "a", b"new")
        ship(store)
    restored(bucket, tmp_path / "again")
    with DelayedStore.open(tmp_path / "again", clock=clock) as store:
        later = send_each_day(store, "a", b"newer")
        assert [after.entry_id - before.entry_id > ENTRIES for before, after in zip(ids, later, strict=True)][1:] == [
            True
        ] * (len(DAYS) - 1)
        assert list(store.check(deep=True)) == []
        assert store.stats().pending == 2 * (len(DAYS) - 1) + 2 * (len(DAYS) - 1)
        assert [each.messages for each in store.partitions()] == [4] * (len(DAYS) - 1)


def test_a_crash_amid_the_takeover_commit_is_survived(bucket: FaultyBucket, tmp_path: Path, clock: ManualClock) -> None:
    """Its rows are read back from the log, also where what they follow was applied before."""
    from duelog.replica.takeover import renew_ids  # noqa: PLC0415

    with DelayedStore.open(tmp_path / "store", clock=clock) as store:
        send_each_day(store, "a", b"x")
        store.topic("a").send_batch([Message(b"x", deliver_after=DAY_S * day) for day in DAYS] * 3)
        store._engine.writer().apply_all()
        renew_ids(store._engine)
        send_each_day(store, "a", b"y")
        copy = crashed(store, tmp_path / "crashed")
        expected = store.stats().pending
    with DelayedStore.open(copy, clock=clock) as again:
        assert again.stats().pending == expected
        assert list(again.check(deep=True)) == []
        again._engine.writer().apply_all()
        assert list(again.check(deep=True)) == []
    assert audit_store(copy, as_of_ms=clock.now_ms()).findings == []


def test_a_takeover_of_many_topics_flushes_few_groups(tmp_path: Path, clock: ManualClock) -> None:
    """One for each takes 10,000 topics the time of 10,000 flushes, in which nobody leads."""
    with DelayedStore.open(tmp_path / "store", clock=clock) as store:
        names = [f"t{at}" for at in range(1_200)]
        old = store.send_batch([(name, Message(b"x")) for name in names])
        before = store._engine.writer().counts.commits
        renew_ids(store._engine)
        assert store._engine.writer().counts.commits - before < 10
        new = store.send_batch([(name, Message(b"x")) for name in names])
        assert max(each.ledger_id for each in old) < min(each.ledger_id for each in new)
