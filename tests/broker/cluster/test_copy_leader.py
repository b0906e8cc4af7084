"""Brokers of a placement table that are found by a copy: who leads it, a bucket that is down, lookups meanwhile."""

import logging
import sys
from pathlib import Path

import aiohttp
import pytest

pytest.importorskip("obstore", reason="needs duelog[replica]")

from duelog.broker.cluster.placement import Address, KnownBrokers, PlacementFile, parse_placement
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import LookupKind, ServerError
from duelog.broker.protocol.failures import Refused
from duelog.replica.bucket import Bucket, manifest_name
from duelog.replica.log_object import FENCE, HEARTBEAT, LogObject, Owner
from duelog.store.errors import InvalidArgument, ReplicaUnreachable
from tests.broker.cluster.test_placement import TWO, Pair
from tests.broker.cluster.test_proxy import proxy_to
from tests.broker.server.raw_client import RawClient, end_clients


class Copy:
    """A copy's log, written as leaders write it."""

    def __init__(self, folder: Path) -> None:
        self.url = folder.as_uri()
        self.bucket = Bucket(self.url)
        self.number = 0

    def put(self, epoch: int, address: str, kind: int = HEARTBEAT) -> None:
        """Append an object of a leader that serves at an address."""
        self.number += 1
        owner = Owner(f"opening-{epoch}", 1_000, address)
        made = LogObject(bytes(16), epoch, self.number, 1, 1, 0, 0, str(owner), kind=kind)
        self.bucket.append(self.number, made.pack())


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A copy on a disk that nobody leads."""
    return Copy(tmp_path / "copy")


def file_of(folder: Path, url: str) -> PlacementFile:
    """A table with one broker, found by a copy."""
    path = folder / "p.toml"
    path.write_text(f'default = "a"\n[brokers.a]\nreplica = "{url}"\n')
    return PlacementFile(path)


def test_a_broker_is_where_the_newest_epoch_of_its_copy_says(tmp_path: Path, copy: Copy) -> None:
    """Nowhere before there is a leader; the fence of the next one has no address, and changes nothing yet."""
    file = file_of(tmp_path, copy.url)
    assert not file.refresh()
    with pytest.raises(Refused, match=r"broker a: the copy .* has named no leader yet") as refused:
        assert file.table.brokers["a"].address
    assert refused.value.error is ServerError.SERVICE_NOT_READY
    copy.put(1, "pulsar://one:6650,pulsar+ssl://one:6651,duelog://one:6652")
    assert file.refresh()
    found = file.table.brokers["a"]
    assert (found.address, found.tls_url) == (Address("one", 6650), "pulsar+ssl://one:6651")
    copy.put(2, "", FENCE)
    assert not file.refresh()
    assert file.table.brokers["a"] == found
    copy.put(2, "pulsar+ssl://two:6651")
    assert file.refresh()
    assert file.table.brokers["a"].address == Address("two", 6651, tls=True)
    copy.put(2, "pulsar+ssl://two:6651")
    assert not file.refresh()


def test_a_bucket_that_is_down_leaves_the_last_leader_and_is_told_once(
    tmp_path: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it was there again; a table that changes meanwhile is taken all the same, with the leader."""
    file = file_of(tmp_path, copy.url)
    copy.put(1, "pulsar://one:6650")
    file.refresh()

    def is_down(bucket: Bucket, start: int = 0) -> range:
        raise ReplicaUnreachable(bucket.url, "is down")

    for _ in range(2):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "span", is_down)
            assert not file.refresh()
            assert not file.refresh()
            file.path.write_text(file.path.read_text() + "\n")
            assert file.refresh()
        assert [each.levelno for each in caplog.records] == [logging.WARNING]
        assert "pulsar://one:6650" in caplog.text
        assert file.table.brokers["a"].address == Address("one", 6650)
        assert not file.refresh()


def test_an_object_that_is_damaged_or_names_no_broker_leaves_the_last_leader(tmp_path: Path, copy: Copy) -> None:
    """The next that is whole counts."""
    file = file_of(tmp_path, copy.url)
    copy.put(1, "pulsar://one:6650")
    file.refresh()
    copy.put(2, "pulsar://two:99999")
    assert not file.refresh()
    copy.number += 1
    copy.bucket.append(copy.number, b"x")
    assert not file.refresh()
    assert file.table.brokers["a"].address == Address("one", 6650)
    copy.put(2, "pulsar://two:6650")
    assert file.refresh()
    assert file.table.brokers["a"].address == Address("two", 6650)


def test_a_look_lists_what_is_new_alone(tmp_path: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one from the newest manifest on: a log has up to 600,000 objects of a week."""
    for _ in range(3):
        copy.put(1, "pulsar://one:6650")
    copy.bucket.put(manifest_name(2), b"")
    starts: list[int] = []
    span = Bucket.span

    def noted(bucket: Bucket, start: int = 0) -> range:
        starts.append(start)
        return span(bucket, start)

    monkeypatch.setattr(Bucket, "span", noted)
    file = file_of(tmp_path, copy.url)
    assert file.refresh()
    assert not file.refresh()
    assert starts == [2, 3]


def test_a_broker_that_was_not_found_yet_is_not_taken_for_another(tmp_path: Path, copy: Copy) -> None:
    """One that serves with TLS alone is named by an empty url."""
    file = file_of(tmp_path, copy.url)
    known = KnownBrokers(["pulsar+ssl://h:1"], file)
    assert known.named("", "pulsar+ssl://h:1") == Address("h", 1, tls=True)
    assert list(known.all()) == [Address("h", 1, tls=True)]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ('replica = "s3://b/x"\nurl = "pulsar://h:1"', "brokers.a.url"),
        ('replica = "s3://b/x"\ntls_url = "pulsar+ssl://h:1"', "brokers.a.tls_url"),
        ('http_url = "http://h:1"', "brokers.a.url"),
        ('replica = "s3://b"', "brokers.a.replica"),
        ('replica = "s3://b/x"\n[brokers.b]\nreplica = "s3://b/x/"', "brokers.b.replica"),
    ],
)
def test_a_broker_has_either_a_url_or_a_copy(lines: str, named: str) -> None:
    """One copy is of one broker."""
    with pytest.raises(InvalidArgument, match=f"^{named}="):
        parse_placement(f"[brokers.a]\n{lines}", Path("p.toml"))


def test_a_copy_needs_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker and a proxy say so when they start."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidArgument, match=r"^replica='s3://b/x': needs pip install 'duelog\[replica\]'"):
        file_of(tmp_path, "s3://b/x")


async def test_clients_are_told_to_come_again_until_a_copy_names_its_leader(tmp_path: Path, copy: Copy) -> None:
    """By a broker and by a proxy; then lookups, questions and connections go there."""
    pair = Pair(tmp_path)
    own = f'url = "pulsar://127.0.0.1:{pair.ports["b"]}"'
    pair.path.write_text(pair.path.read_text().replace(own, f'replica = "{copy.url}"'))
    proxied = tmp_path / "proxied.toml"
    proxied.write_text(f'default = "b"\n[brokers.b]\nreplica = "{copy.url}"\n')
    settings = {"placement_file": proxied, "placement_refresh_seconds": 0.02, "web_service_port": 0}
    try:
        await pair.start("a")
        await pair.start("b")
        a = await RawClient.connected(pair.ports["a"])
        refused = await a.ask_for(commands.LookupResponse, commands.Lookup(TWO, 1))
        assert (refused.response, refused.error) == (LookupKind.FAILED, ServerError.SERVICE_NOT_READY)
        metadata = await a.ask_for(commands.PartitionedMetadataResponse, commands.PartitionedMetadata(TWO, 2))
        assert metadata.error is ServerError.SERVICE_NOT_READY
        async with proxy_to(**settings) as (proxy, port), aiohttp.ClientSession() as session:
            early = await RawClient.open(port)
            early.say(commands.Connect("test", protocol_version=21))
            told = await early.hear()
            assert isinstance(told, commands.Error)
            assert told.error is ServerError.SERVICE_NOT_READY
            async with session.get(f"{proxy.web_urls.plain}/health") as health:
                assert (health.status, "has named no leader yet" in await health.text()) == (503, True)
            leader = f"pulsar://127.0.0.1:{pair.ports['b']}"
            copy.put(1, leader)
            while True:  # until a has looked
                found = await a.ask_for(commands.LookupResponse, commands.Lookup(TWO, 3))
                if found.response != LookupKind.FAILED:
                    break
            assert (found.response, found.url) == (LookupKind.REDIRECT, leader)
            while True:  # until the proxy has, too
                async with session.get(f"{proxy.web_urls.plain}/health") as health:
                    if health.status == 200:
                        break
            client = await RawClient.connected(port)
            placed = await client.ask_for(commands.LookupResponse, commands.Lookup(TWO, 1))
            assert (placed.response, placed.url, placed.through_proxy) == (LookupKind.CONNECT, leader, True)
            await client.close()
        end_clients()
    finally:
        await pair.stop()
