"""What happens when a part fails, where `test_takeovers` has no event of it: processes, SeaweedFS and disks that fail.

Nothing is cut off here, so all are at ports of localhost. Without SeaweedFS the copy is in a directory, which is never
down.
"""

import asyncio
import re
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("crc32c", reason="needs duelog[broker]")
pytest.importorskip("obstore", reason="needs duelog[replica]")

import duelog
from duelog import DelayedStore
from duelog.broker.protocol import commands
from duelog.broker.protocol.commands import LookupKind
from duelog.errors import DuelogError, NotLeader, NotReplicated, StoreFull
from duelog.replica.bucket import Bucket, log_name
from duelog.replica.log_object import FENCE, RESIGNED, read_object, unpack
from duelog.replica.manifest import read_manifest
from tests.broker.clients.conftest import ServedStore
from tests.broker.server.raw_client import RawClient
from tests.conftest import present
from tests.disaster.loop_disk import Disk, loop_disk
from tests.duelog.replica.machines import SERVES, WITHIN_S, Machines
from tests.duelog.replica.proxy import proxy
from tests.duelog.replica.seaweed import KEYS, Seaweed, weed
from tests.ports import free_port
from tests.proof import length
from tests.tools.command_line import json_of, ok, process, run

pytestmark = [pytest.mark.kill, pytest.mark.xdist_group("what happens")]  # one SeaweedFS for all

DISK_BYTES = 200 << 20
FENCES = length("DUELOG_FENCES", 2, 20)
DAY_S = 86_400
SETTINGS = """
[store]
lease_ms = 2000
ship_ms = 50
durability = "replicated"
"""
LONG = SETTINGS.replace("2000", "6000")
"""Of those that are to lead on, whatever else this machine does."""
ALONE = """
[store]
ship_ms = 50
replicated_timeout_ms = 500
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """SeaweedFS; skips where it is not installed."""
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    server.begin()
    yield server
    server.kill()


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix, which this process and its children find."""
    if weed() is None:
        return (tmp_path / "copy").as_uri()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": request.getfixturevalue("server").address}.items():
        monkeypatch.setenv(name, value)
    return f"s3://backups/{tmp_path.name}"


@pytest.fixture
def disk() -> Iterator[Disk]:
    """A file system for the store of one machine, which holds a second copy of its files, for manifests."""
    with loop_disk("ext4", DISK_BYTES) as disk:
        yield disk


@pytest.fixture
def machines(url: str, tmp_path: Path) -> Iterator[Machines]:
    """Machines, none of which has begun."""
    machines = Machines(tmp_path, url)
    try:
        yield machines
    finally:
        machines.close()


def connected(machines: Machines, name: str) -> DelayedStore:
    """The store that a machine serves."""
    return duelog.connect(machines.addresses[name][1])


def send(machines: Machines, name: str, *payloads: bytes) -> None:
    """Send messages one by one, each until it is told: it may be in doubt, or its leader have stalled, before."""
    with connected(machines, name) as store:
        for payload in payloads:

            def is_sent() -> bool:
                with suppress(NotLeader, NotReplicated):
                    store.topic("a").send(payload, deliver_after=DAY_S)  # noqa: B023
                    return True
                return False

            machines.wait(is_sent)


def waiting(store: DelayedStore, topic: str = "a") -> set[bytes]:
    """The payloads that wait in a topic."""
    return {bytes(message.payload) for message in store.topic(topic).scheduled()}


def said(machines: Machines, *words: str) -> list[str]:
    """The lines with all of these words."""
    return [line for line in machines.said if all(word in line for word in words)]


def ended(machines: Machines, name: str) -> int:
    """Wait until a process has ended by itself; its exit status."""
    process = machines.processes.pop(name)  # one that is there, and has ended so, is a failure
    try:
        machines.wait(lambda: process.poll() is not None)
    finally:
        process.kill()
        process.wait()
    return process.returncode


def test_without_a_standby_only_what_is_replicated_waits_for_a_bucket_that_is_down(
    server: Seaweed, machines: Machines, url: str, tmp_path: Path
) -> None:
    """Local messages are sent, delivered and acknowledged; once it is back the copy has all that was written."""
    machines.prepare("one", ALONE)
    with DelayedStore.open(tmp_path / "one") as store:
        store.update_policies(topic="a", replicated=True)
    machines.join("one", "--log", "warning")
    with connected(machines, "one") as store, store.topic("local").subscribe("s") as consumer:
        send(machines, "one", b"before")
        server.kill()
        store.topic("local").send(b"delivered")
        message = present(consumer.receive(timeout=WITHIN_S))
        consumer.ack(message, durable=True)
        with pytest.raises(NotReplicated):
            store.topic("a").send(b"in doubt", deliver_after=DAY_S)
        store.topic("local").send(b"local", deliver_after=DAY_S)
        server.begin()
        send(machines, "one", b"after")
    machines.end("one")
    assert json_of("restore", url, tmp_path / "restored", "--check")["findings"] == 0
    with DelayedStore.open(tmp_path / "restored") as store:
        assert waiting(store) == {b"before", b"in doubt", b"after"}
        assert waiting(store, "local") == {b"local"}
        with store.topic("local").subscribe("s") as consumer:
            assert consumer.receive(1, timeout=0) == []


def test_a_lost_or_damaged_object_is_named_and_nobody_leads_with_a_hole(
    machines: Machines, url: str, tmp_path: Path
) -> None:
    """A damaged file: the manifest before is taken. A hole in the log: nothing behind it is given until it is whole."""
    bucket = Bucket(url)
    machines.prepare("one", SETTINGS)
    machines.join("one")
    send(machines, "one", b"1")
    ok("backup", tmp_path / "one")
    machines.end("one", signal.SIGTERM)
    machines.begin("one")
    machines.wait(lambda: len(said(machines, "one:", SERVES)) > 1)
    send(machines, "one", b"2")
    ok("backup", tmp_path / "one")
    earlier, newest = (read_manifest(bucket, seq) for seq in bucket.manifests()[-2:])
    file = next(file.name for file in newest.files if file not in earlier.files)
    content = present(bucket.get(file))
    bucket.put(file, content[:5000] + bytes((content[5000] ^ 1,)) + content[5001:])
    found = json_of("restore", url, tmp_path / "restored", "--check")
    assert (found["findings"], [file in each for each in found["passed_over"]]) == (0, [True])
    machines.join("two")
    assert said(machines, "two:", file)

    machines.processes["two"].send_signal(signal.SIGSTOP)
    send(machines, "one", b"3")
    hole = log_name(bucket.numbers()[-1] + 1)
    send(machines, "one", b"4", b"5")
    lost = present(bucket.get(hole))
    bucket.delete([hole])
    machines.end("one")
    last = bucket.numbers()[-1]
    machines.processes["two"].send_signal(signal.SIGCONT)
    machines.wait(lambda: len(said(machines, "two:", hole, "is missing")) > 2)
    refused = run("restore", url, tmp_path / "none")
    assert (refused.exit_code, hole in refused.stderr) == (2, True)
    group = present(re.search(r"--group (\d+) restores", refused.stderr))[1]
    ok("restore", url, tmp_path / "before", "--group", group, "--check")
    with DelayedStore.open(tmp_path / "before") as store:
        assert waiting(store) == {b"1", b"2", b"3"}

    assert (machines.leader, bucket.numbers()[-1]) == ("one", last)
    bucket.put(hole, lost)
    machines.wait(lambda: machines.leader == "two")
    with connected(machines, "two") as store:
        assert waiting(store) == {b"1", b"2", b"3", b"4", b"5"}


def fill(ballast: Path) -> None:
    """Leave no space on the disk of a file."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass


def test_a_standby_whose_disk_is_full_follows_on_once_there_is_space(
    disk: Disk, machines: Machines, url: str, tmp_path: Path
) -> None:
    """It says so, and takes over with all that was told meanwhile. Before, its process ended."""
    ballast, two = disk.root / "ballast", "full/two"
    (tmp_path / "full").symlink_to(disk.root)
    machines.prepare("one", LONG)
    machines.join("one")
    machines.join(two)
    fill(ballast)
    payloads = [b"%d" % number + bytes(100_000) for number in range(10)]
    send(machines, "one", *payloads)
    machines.wait(lambda: bool(said(machines, f"{two}:", "goes on once there is space")))
    ballast.unlink()
    machines.end("one")
    machines.wait(lambda: machines.leader == two)
    with connected(machines, two) as store:
        assert waiting(store) == set(payloads)


def test_a_leader_whose_disk_is_full_leads_on_and_one_whose_disk_fails_gives_way(
    disk: Disk, machines: Machines, url: str, tmp_path: Path
) -> None:
    """Sends are refused until there is space again. The disk that fails takes nothing with it that was told."""
    bucket, ballast, told = Bucket(url), disk.root / "ballast", set[bytes]()
    (tmp_path / "one").symlink_to(disk.root / "one")
    (disk.root / "one").mkdir()
    machines.prepare("one", LONG)
    machines.join("one")
    machines.join("two")
    with connected(machines, "one") as store:

        def send(*payloads: bytes) -> None:
            for payload in payloads:
                store.topic("a").send(payload, deliver_after=DAY_S)
                told.add(payload)

        send(b"before")
        fill(ballast)
        with pytest.raises(StoreFull):
            send(*(b"%d" % number + bytes(100_000) for number in range(1_000)))
        renewed = bucket.numbers()[-1] + 2
        machines.wait(lambda: bucket.numbers()[-1] >= renewed)
        ballast.unlink()
        send(b"after")
        assert machines.leader == "one"
        disk.shut_down()
        with pytest.raises(DuelogError):
            send(b"lost")
    assert ended(machines, "one") == 2
    machines.wait(lambda: machines.leader == "two")
    assert said(machines, "one: duelog:", "Input/output error")
    objects = [read_object(bucket, seq) for seq in bucket.numbers()]
    fence = next(number for number, each in enumerate(objects) if each.kind == FENCE)
    assert objects[fence - 1].kind == RESIGNED
    with connected(machines, "two") as store:
        assert waiting(store) == told


def test_a_bucket_that_lies_about_conditions_is_refused(
    server: Seaweed, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `init`, which leaves nothing there; without its probe too, and by a store that is opened with the prefix."""

    creators, raced = Counter[bytes](), defaultdict[bytes, asyncio.Event](asyncio.Event)

    async def without_conditions(request: bytes) -> bytes:
        path = request.split()[1]
        if b"/probe/" in path and b"if-none-match" in request.lower():
            creators[path] += 1
            if creators[path] > 1:
                raced[path].set()
            await raced[path].wait()  # of creators one after another it refuses the second
        return re.sub(rb"(?i)\r\nif-none-match: [^\r]*", b"", request)

    bucket = Bucket(url)
    ok("init", tmp_path / "store")
    with proxy(server.address, change=without_conditions) as (address, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        probed = process("replica", "init", tmp_path / "store", url)
        assert (probed.returncode, "lies about conditions: 32 of 32 writers" in probed.stderr) == (2, True)
        assert (bucket.listing("probe"), bucket.get("STORE")) == ([], None)
        for command in (("replica", "init", tmp_path / "store", url, "--no-probe"),
                        ("serve", tmp_path / "store", "--replica", url, "--port", 0)):  # fmt: skip
            refused = process(*command)
            assert (refused.returncode, "lets a second writer create an object" in refused.stderr) == (2, True)
    assert bucket.numbers() == []


def test_of_a_directory_and_its_copy_that_are_open_the_copy_ends(machines: Machines, tmp_path: Path) -> None:
    """With a line that says so; the machine that leads goes on."""
    machines.prepare("one", LONG)
    machines.join("one")
    send(machines, "one", b"1")
    shutil.copytree(tmp_path / "one", tmp_path / "copy of one", ignore=shutil.ignore_patterns("lock.mdb", "CONTROL"))
    machines.add("copy of one", "localhost", free_port(), free_port())
    assert ended(machines, "copy of one") == 2
    machines.wait(lambda: bool(said(machines, "copy of one: duelog:", "elsewhere")))
    send(machines, "one", b"2")
    with connected(machines, "one") as store:
        assert waiting(store) == {b"1", b"2"}


class Fences:
    """Holds a fence up until another machine's of its number has come, and every other time that one longer.

    Namely until the first has shipped: then it comes late.
    """

    def __init__(self) -> None:
        self.makers: dict[int, list[str]] = {}
        """By number of a fence, who has put one, in this order."""
        self._both, self._shipped = (defaultdict[int, asyncio.Event](asyncio.Event) for _ in range(2))

    async def __call__(self, request: bytes) -> bytes:
        """Pass a request on."""
        head, _, body = request.partition(b"\r\n\r\n")
        method, path, *_ = head.split()
        if method == b"PUT" and b"/log/" in path:
            made = unpack("", path.decode(), body)[0]
            self._shipped[made.seq - 1].set()
            if made.kind == FENCE:
                await self._hold(made.seq, made.maker.opening)
        return request

    async def _hold(self, seq: int, maker: str) -> None:
        makers = self.makers.setdefault(seq, [])
        if maker not in makers:
            makers.append(maker)
        if len(makers) > 1:
            self._both[seq].set()
        comes_late = maker != makers[0] and len(self.makers) % 2 == 0
        await (self._shipped if comes_late else self._both)[seq].wait()


@pytest.fixture
def fences(server: Seaweed, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fences]:
    """All of them, by way of which machines go to the server that begin from now on."""
    fences = Fences()
    with proxy(server.address, change=fences) as (address, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield fences


@pytest.mark.series
def test_of_two_standbys_that_fence_at_once_one_leads_and_the_other_follows_it(
    fences: Fences, machines: Machines, url: str
) -> None:
    """Their puts of one number are under way together; nothing that was told is lost."""
    machines.prepare("one", LONG)
    for name in ("one", "two", "three"):
        machines.join(name)
    for number in range(FENCES):
        ended = machines.leader
        send(machines, ended, b"%d" % number)
        machines.end(ended)
        machines.wait(lambda: machines.leader != ended)  # noqa: B023
        machines.begin(ended)
        machines.wait(machines.is_settled)
    with connected(machines, machines.leader) as store:
        assert waiting(store) == {b"%d" % number for number in range(FENCES)}
    assert [len(makers) for makers in fences.makers.values()].count(2) >= FENCES
    bucket = Bucket(url)
    assert {read_object(bucket, seq).kind for seq in fences.makers} == {FENCE}


def test_a_broker_whose_table_names_the_copy_sends_pulsar_clients_to_the_machine_that_leads(
    machines: Machines, url: str, tmp_path: Path
) -> None:
    """Before a takeover and after it, without a call of theirs."""
    pulsar = pytest.importorskip("pulsar", reason="pulsar-client is not installed")
    machines.prepare("one", SETTINGS)
    machines.join("one")
    machines.join("two")
    table, port = tmp_path / "placement.toml", free_port()
    table.write_text(
        f'default = "orders"\n[brokers.orders]\nreplica = "{url}"\n[brokers.front]\nurl = "pulsar://127.0.0.1:{port}"\n'
    )
    settings = {"placementFile": str(table), "placementBroker": "front", "placementRefreshSeconds": 0.1}

    async def found() -> str | None:
        """The address to which a lookup is redirected; None: it is not known yet."""
        client = await RawClient.connected(port)
        answer = await client.ask_for(commands.LookupResponse, commands.Lookup("persistent://public/default/t", 1))
        await client.close()
        return answer.url if answer.response == LookupKind.REDIRECT else None

    with ServedStore(tmp_path / "front", brokerServicePort=port, **settings).running() as front:
        client = pulsar.Client(front.url, operation_timeout_seconds=WITHIN_S)
        try:
            consumer = client.subscribe("t", "s", pulsar.ConsumerType.Shared)
            producer = client.create_producer("t", send_timeout_millis=WITHIN_S * 1000)
            for payload in (b"before", b"after"):
                machines.wait(lambda: asyncio.run(found()) == machines.addresses[machines.leader][0])
                producer.send(payload)
                message = consumer.receive(WITHIN_S * 1000)
                while message.data() != payload:
                    message = consumer.receive(WITHIN_S * 1000)
                consumer.acknowledge(message)
                if payload == b"before":
                    machines.end(ended := machines.leader)
                    machines.wait(lambda: machines.leader != ended)
        finally:
            client.close()
