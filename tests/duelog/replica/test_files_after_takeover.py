"""The files of a new leader's manifests are its own: places of the log mean something else to each epoch."""

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.replica.following import Standby
from tests.duelog.replica.faulty import URL, FaultyBucket, manifested, restored, ship

CONFIG = StoreConfig(replica=URL, lease_ms=10_000)
DAY_S = 86_400


def test_a_new_leader_takes_no_file_of_the_one_before_for_its_own(
    bucket: FaultyBucket, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby numbers what it applies its own way: a file with the same last place may lack the group behind it."""
    now_s = [1_000.0]
    monkeypatch.setattr("duelog.replica.shipping.since_boot_s", lambda: now_s[0])
    sent: list[bytes] = []

    def send() -> None:
        sent.append(b"%d" % len(sent))
        leader.topic("a").send(sent[-1], deliver_after=DAY_S)
        ship(leader)

    def checkpoint() -> None:
        leader._engine.writer().apply_all()

    with DelayedStore.open(tmp_path / "one", CONFIG, clock=clock) as leader:
        send()
        checkpoint()
        manifested(leader)
        follower = Standby(tmp_path / "two", bucket, lease_ms=10_000, elapsed=lambda: now_s[0])
        assert not follower.begin()
        assert not follower.step()
        send()
        checkpoint()
        send()
        checkpoint()
        send()
        assert not follower.step()
        send()
        checkpoint()
        manifested(leader)
        send()
        assert not follower.step()
        now_s[0] += 11
        assert follower.step()
    with DelayedStore.open(tmp_path / "two", CONFIG, clock=clock) as second:
        manifested(second)
    restored(bucket, tmp_path / "restored")
    with DelayedStore.open(tmp_path / "restored", clock=clock) as store:
        assert sorted(bytes(message.payload) for message in store.topic("a").scheduled()) == sorted(sent)
