"""The port against real stores: a directory, memory, and an S3 server; the same calls, the same outcomes."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import obstore.store
import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import ReplicaUnreachable
from duelog.replica.bucket import AlreadyThere, Bucket, Listed
from duelog.replica.identity import probe
from duelog.replica.manifest import read_manifest
from tests.conftest import START_MS, in_threads, present
from tests.duelog.replica.faulty import log_of, restored, ship
from tests.duelog.replica.proxy import Proxy, proxy
from tests.duelog.replica.seaweed import KEYS, seaweed
from tests.proof import length
from tests.tools.command_line import json_of, ok, run

ATOMIC = ("directory", "memory", "weed")
"""Without moto's server, which looks and stores in two steps: the probe finds it out once in some hundred races."""

ROUNDS = length("DUELOG_REPLICA_RACES", 5, 50)
PUTS = length("DUELOG_REPLICA_PUTS", 60, 10_000)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The address of moto's server, with a bucket `backups`."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    import boto3  # noqa: PLC0415 - comes with moto
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patched:
        for name, value in KEYS.items():
            patched.setenv(name, value)
        boto3.client("s3", endpoint_url=address, region_name="us-east-1").create_bucket(Bucket="backups")
    yield address
    server.stop()


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of SeaweedFS."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as address:
        yield address


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix on a server that speaks S3, found by the environment."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": moto}.items():
        monkeypatch.setenv(name, value)
    return "s3://backups/copies"


@pytest.fixture(params=["directory", "memory", "moto", "weed"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty prefix."""
    if request.param == "memory":
        return Bucket("memory:///", obstore.store.MemoryStore())
    if request.param == "directory":
        return Bucket((tmp_path / "copy").as_uri())
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": request.getfixturevalue(request.param)}.items():
        monkeypatch.setenv(name, value)
    return Bucket(f"s3://backups/{tmp_path.name}")


def test_of_two_creators_of_a_number_one_is_refused(bucket: Bucket) -> None:
    """And what the first wrote stays."""
    bucket.append(1, b"first")
    with pytest.raises(AlreadyThere):
        bucket.append(1, b"second")
    assert (bucket.read(1), bucket.read(2)) == (b"first", None)


@pytest.mark.parametrize("bucket", ATOMIC, indirect=True)
def test_many_creators_at_once_have_one_winner_each_time(bucket: Bucket) -> None:
    """The probe finds nothing wrong, and leaves nothing."""
    probe(bucket, rounds=ROUNDS, creators=8)
    assert bucket.listing("probe") == []


def test_numbers_are_listed_from_one_on(bucket: Bucket) -> None:
    """In order, and none of anything else."""
    assert bucket.numbers() == []
    for seq in (3, 1, 12, 2):
        bucket.append(seq, [b"a", memoryview(b"bc")])
    bucket.put("log/other", b"")
    assert bucket.numbers() == [1, 2, 3, 12]
    assert bucket.numbers(3) == [3, 12]
    assert bucket.read(12) == b"abc"
    contents = dict.fromkeys((1, 2, 3, 12), b"abc")
    assert list(bucket.read_each(1, 30)) == [contents.get(seq) for seq in range(1, 30)]
    assert next(bucket.read_each(1, 30)) == b"abc"


def test_the_first_and_last_number_are_found_in_few_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is missing between, and whatever else lies there. Before, a week of log was listed whole."""
    monkeypatch.setattr("duelog.replica.bucket._PAGE", 3)
    chance, pages, there = Random(1), list[str](), set[int]()
    listed = bucket._pages

    def counted(folder: str, offset: str | None) -> Iterator[list[Listed]]:
        pages.append(folder)
        return listed(folder, offset)

    monkeypatch.setattr(bucket, "_pages", counted)
    bucket.put("log/other", b"")
    for count in (0, 1, 2, 3, 4, 7, 30, 120):
        while len(there) < count:
            seq = chance.randrange(5, 8 + count)
            if seq not in there:
                bucket.append(seq, b"")
                there.add(seq)
        for start in (0, 1, 4, 6, 9, *(chance.randrange(2 * count + 9) for _ in range(3))):
            wanted = [seq for seq in there if seq >= start]
            pages.clear()
            assert bucket.span(start) == (range(min(wanted), max(wanted) + 1) if wanted else range(0))
            assert len(pages) <= 4 + 2 * (len(wanted) // 3).bit_length()


def test_files_are_put_listed_downloaded_and_removed(bucket: Bucket, tmp_path: Path) -> None:
    """A large one by parts; one that is not there is passed over."""
    path = tmp_path / "large"
    path.write_bytes(Random(1).randbytes(12_800_000))
    bucket.put("files/large.mdb", path)
    assert b"".join(present(bucket.download("files/large.mdb"))) == path.read_bytes()
    assert [(each.name, each.size) for each in bucket.listing("files")] == [("files/large.mdb", 12_800_000)]
    bucket.delete(["files/large.mdb", "files/other.mdb"])
    assert bucket.listing("files") == []
    assert bucket.download("files/large.mdb") is None


def test_a_store_is_shipped_and_restored(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each of them."""
    monkeypatch.setattr("duelog.replica.shipping.Bucket", lambda url: bucket)
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "store", StoreConfig(replica="memory:///"), clock=clock) as store:
        for number in range(20):
            store.topic("a").send(b"%d" % number, deliver_after=86_400 * number)
            ship(store)
    assert restored(bucket, tmp_path / "restored").groups > 20
    with DelayedStore.open(tmp_path / "restored", clock=clock) as again:
        assert list(again.check(deep=True)) == []
        assert again.stats().pending == 19


@pytest.mark.series
@pytest.mark.parametrize("server", ["moto", "weed"])
def test_puts_that_a_network_and_a_server_have_go_wrong_put_each_group_into_the_log_once(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group is missing, none is there twice. Before, a refusal with nothing there (409) counted as stored."""
    target, url, places = request.getfixturevalue(server), f"s3://backups/{tmp_path.name}", set[int]()
    monkeypatch.setattr("duelog.replica.shipping._RETRY_MS", 1)
    with proxy(target, PUTS) as (address, proxied):
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
            monkeypatch.setenv(name, value)
        with DelayedStore.open(tmp_path / "store", StoreConfig(replica=url), clock=ManualClock(START_MS)) as store:
            while proxied.puts < PUTS:
                store.topic("a").send(b"x", deliver_after=100)
                places.add(present(store._engine.shipping)._the_source().next_place() - 1)
                ship(store)
    monkeypatch.setenv("AWS_ENDPOINT_URL", target)
    shipped = [group.position for each in log_of(Bucket(url)) for group in each.raw]
    assert len(set(shipped)) == len(shipped)
    assert places <= set(shipped)
    restored(Bucket(url), tmp_path / "restored")
    with DelayedStore.open(tmp_path / "restored", clock=ManualClock(START_MS)) as again:
        assert again.stats().pending == len(places)


@pytest.mark.parametrize("bucket", ATOMIC, indirect=True)
def test_creators_in_threads_make_a_log_without_gaps(bucket: Bucket) -> None:
    """Each takes the next number that it finds free; every entry is there once."""
    entries: list[bytes] = []

    def create(thread: int) -> None:
        for number in range(5):
            content, seq = b"%d-%d" % (thread, number), 1
            entries.append(content)
            while True:
                try:
                    bucket.append(seq, content)
                    break
                except AlreadyThere:
                    seq += 1

    in_threads([lambda thread=thread: create(thread) for thread in range(4)])  # type: ignore[misc]
    assert bucket.numbers() == list(range(1, 21))
    assert sorted(present(bucket.read(seq)) for seq in bucket.numbers()) == sorted(entries)


def test_the_commands_prepare_show_restore_and_prune(s3: str, tmp_path: Path) -> None:
    """With a real server, and without a word of a credential."""
    url, store = f"{s3}/commands", tmp_path / "store"
    ok("init", store)
    assert json_of("replica", "init", store, url, "--no-probe")["probed"] is False
    with DelayedStore.open(store, StoreConfig(replica=url)) as opened:
        opened.topic("a").send(b"1", deliver_after=86_400)
        opened.topic("a").send(b"2")
    status = json_of("replica", "status", store)
    assert (status["behind_groups"], status["manifests"] <= 1, status["damaged"]) == (0, True, [])
    with DelayedStore.open(store, StoreConfig(replica=url)) as opened:
        while opened.stats().replica_manifest_age_ms is None:
            present(opened._engine.shipping).step()
        figures = json_of("stats", store)
        assert (figures["replica_lag_ms"] is not None, figures["replica_error"]) == (True, None)
        end = present(opened._engine.shipping).state().place - 1
    found = json_of("restore", url, tmp_path / "restored", "--check")
    assert (found["findings"], found["place"] >= end) == (0, True)
    assert "restored" in ok("restore", url, tmp_path / "group", "--group", found["place"])
    assert "restorable:" in ok("replica", "status", url)
    assert json_of("replica", "prune", url, "--retention", "1d") == {"manifests": 0, "log_objects": 0, "files": 0}
    ok("init", tmp_path / "other")
    refusals = [
        run("replica", "init", tmp_path / "other", url, "--no-probe"),
        run("replica", "init", tmp_path / "restored", url, "--no-probe"),
        run("replica", "status", tmp_path / "other"),
        run("replica", "status", f"{s3}/nothing"),
        run("restore", url, tmp_path / "restored"),
        run("restore", url, tmp_path / "early", "--at", "2020-01-01T00:00:00Z"),
        run("restore", url, tmp_path / "both", "--at", "2020-01-01T00:00:00Z", "--group", 5),
        run("restore", "s3://AKIA:not-to-be-shown@b/x", tmp_path / "x"),
        run("replica", "prune", "bucket/x"),
    ]
    for each in refusals:
        assert (each.exit_code, each.stdout, each.stderr.count("\n")) == (2, "", 1), each.stderr
        assert "not-to-be-shown" not in each.stderr


def test_the_command_probes_a_bucket(tmp_path: Path) -> None:
    """Unless told otherwise; and leaves nothing, not even an empty directory."""
    ok("init", tmp_path / "store")
    assert json_of("replica", "init", tmp_path / "store", (tmp_path / "copy").as_uri())["probed"] is True
    assert [each.name for each in (tmp_path / "copy").iterdir()] == ["STORE"]


def test_a_backup_of_a_store_with_a_copy_is_a_manifest(tmp_path: Path) -> None:
    """Of the process that has it open, or of the command where none has; it has what was stored by then."""
    store, copy = tmp_path / "store", Bucket((tmp_path / "copy").as_uri())
    ok("init", store)
    refused = run("backup", store)
    assert (refused.exit_code, "no copy" in refused.stderr) == (2, True)
    ok("replica", "init", store, copy.url, "--no-probe")
    assert json_of("backup", store)["taken_ms"] > 0
    with DelayedStore.open(store, StoreConfig(replica=copy.url, ship_ms=60_000)) as opened:
        opened.topic("a").send(b"x", deliver_after=86_400)
        taken_ms = json_of("backup", store)["taken_ms"]
        assert read_manifest(copy, copy.manifests()[-1]).taken_ms == taken_ms
        opened.topic("a").send(b"y", deliver_after=86_400)
        later_ms = opened.save_manifest()
        assert later_ms >= taken_ms
    restored(copy, tmp_path / "restored", at_ms=taken_ms)
    with DelayedStore.open(tmp_path / "restored") as again:
        assert [message.payload for message in again.topic("a").scheduled()] == [b"x"]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in the environment."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("keys")
def test_a_call_that_hangs_leaves_time_in_the_lease_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put, a read, a listing. Before, each took 30 s, and the lease had passed; without a lease they still do.

    A put that is large, or was tried before, has longer: on a slow way it is stored in the end.
    """
    hanging: list[asyncio.Future[bytes]] = []

    async def hang(_: bytes) -> bytes:
        hanging.append(asyncio.get_running_loop().create_future())
        return await hanging[-1]

    with proxy("http://127.0.0.1:9", change=hang) as (address, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        usual = Bucket("s3://b/x")
        bucket, begun_s = usual.for_lease(1_000), time.monotonic()
        calls = (
            lambda: bucket.append(1, b""),
            lambda: bucket.read(1),
            bucket.numbers,
            lambda: bucket.put("snap/1", b""),
        )
        for call in calls:
            with pytest.raises(ReplicaUnreachable):
                call()
        assert time.monotonic() - begun_s < 20
        assert len(hanging) == len(calls)
        assert bucket._client(1_000_000) is bucket._client(0, 1) is not usual._client()
        assert bucket._client(30_000_000) is bucket._client(0, 9) is usual._client()
        assert bucket.for_lease(None)._client() is usual._client()


class Slow(Proxy):
    """Answers by itself, at the pace of a slow network: 300 KiB in 3.5 s."""

    PARTS, PART = 300, bytes(1 << 10)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give part after part."""
        await reader.readuntil(b"\r\n\r\n")
        length, until_s = self.PARTS * len(self.PART), time.monotonic() + 3.5
        modified = "last-modified: Mon, 23 Nov 2026 10:00:00 GMT"
        writer.write(f"HTTP/1.1 200 OK\r\n{modified}\r\ncontent-length: {length}\r\n\r\n".encode())
        for number in range(self.PARTS):
            while time.monotonic() < until_s - (self.PARTS - number) * 0.01:
                await asyncio.sleep(0.005)
            writer.write(self.PART)
            await writer.drain()


@pytest.mark.usefixtures("keys")
def test_a_file_that_takes_longer_than_an_answer_may_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it comes. Before, a file for which 30 s were too short could not be restored."""
    monkeypatch.setattr("duelog.replica.bucket._ANSWER_S", 3.0)
    with proxy("http://127.0.0.1:9", kind=Slow) as (address, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        pieces = present(Bucket("s3://b/x").download("files/slow.mdb"))
        assert sum(map(len, pieces)) == Slow.PARTS * len(Slow.PART)


def test_a_server_that_is_gone_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, without the client's own retries."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-shown")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(ReplicaUnreachable):
        Bucket("s3://b/x").append(1, b"")
    assert run("replica", "status", "s3://b/x").exit_code == 2
