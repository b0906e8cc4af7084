"""`duelog serve --standby` as two processes: clients come to either, and go on with the one that leads."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import duelog
from duelog import DelayedStore, StoreConfig
from duelog.errors import (
    Deposed,
    InvalidArgument,
    NotLeader,
    ReplicaDamaged,
    ReplicaUnreachable,
    StoreFailed,
    StoreFull,
)
from duelog.opening import staged_of
from duelog.replica.bucket import Bucket
from duelog.replica.following import Standby
from duelog.replica.restoring import GapFound
from tests.duelog.replica.machines import WITHIN_S, Machines
from tests.tools.command_line import json_of, ok, refused

pytest.importorskip("crc32c", reason="needs duelog[broker]")
pytest.importorskip("obstore", reason="needs duelog[replica]")

import aiohttp

from duelog.broker.configuration import BrokerConfig
from duelog.broker.server.broker import Broker
from duelog.broker.server.turns import Turns, _Way

DAY_S = 86_400
DEPOSED, FAILED = StoreFailed(Path("data"), "deposed"), StoreFailed(Path("data"), "Input/output error")
FULL = StoreFull(Path("data"), "no space to write")
DEPOSED.__cause__ = Deposed("s3://b/x", "another machine has taken over")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Two machines, the first of which leads, and the second follows."""
    machines = Machines(tmp_path, (tmp_path / "copy").as_uri())
    machines.prepare("one", "[store]\nlease_ms = 1000\nship_ms = 50\ndurability = 'replicated'\n")
    try:
        machines.join("one")
        machines.join("two")
        yield machines
    finally:
        machines.close()


def send(machines: Machines, name: str, payload: bytes) -> None:
    """Send a message by way of a machine."""
    with duelog.connect(machines.addresses[name][1]) as store:
        store.topic("a").send(payload, deliver_after=DAY_S)


@pytest.mark.kill
def test_clients_go_on_with_the_machine_that_leads(machines: Machines, tmp_path: Path) -> None:
    """By way of either; after a kill, and after an end that hands over."""
    send(machines, "one", b"1")
    send(machines, "two", b"2")
    machines.end("one")
    machines.wait(lambda: machines.leader == "two")
    send(machines, "two", b"3")
    machines.begin("one")
    machines.wait(machines.is_settled)
    send(machines, "one", b"4")
    machines.end("two", signal.SIGTERM)
    machines.wait(lambda: machines.leader == "one")
    send(machines, "one", b"5")
    assert json_of("replica", "diverged", tmp_path / "one") == {"messages": [], "sent": 0}
    machines.end("one", signal.SIGTERM)
    with DelayedStore.open(tmp_path / "one") as store:
        assert list(store.check(deep=True)) == []
        found = sorted(bytes(message.payload) for message in store.topic("a").scheduled())
        assert found == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.kill
def test_a_leader_hands_over_and_follows_and_leads_again_where_nobody_else_does(
    machines: Machines, tmp_path: Path
) -> None:
    """Asked by its directory, or by way of any machine; no process ends, and nothing is set aside."""
    send(machines, "one", b"1")
    ok("replica", "hand-over", tmp_path / "one")
    machines.wait(lambda: machines.leader == "two")
    machines.wait(machines.is_settled)
    send(machines, "one", b"2")
    ok("replica", "hand-over", machines.addresses["one"][1])
    machines.wait(lambda: machines.leader == "one")
    machines.wait(machines.is_settled)
    machines.end("two")
    machines.leader = ""
    ok("replica", "hand-over", tmp_path / "one")
    machines.wait(lambda: machines.leader == "one")
    send(machines, "one", b"3")
    assert not list(tmp_path.glob("*.diverged"))
    machines.end("one", signal.SIGTERM)
    assert "no process" in refused("replica", "hand-over", tmp_path / "one")
    with DelayedStore.open(tmp_path / "one") as store:
        assert sorted(bytes(message.payload) for message in store.topic("a").scheduled()) == [b"1", b"2", b"3"]


@pytest.mark.kill
def test_a_leader_that_was_stopped_follows_when_it_goes_on(machines: Machines) -> None:
    """And passes clients on. Before, its broker had ended the threads by which it listens, and the process failed."""
    machines.processes["one"].send_signal(signal.SIGSTOP)
    machines.wait(lambda: machines.leader == "two")
    machines.processes["one"].send_signal(signal.SIGCONT)
    machines.wait(machines.is_settled)
    send(machines, "one", b"x")


@pytest.mark.kill
def test_pulsar_clients_find_the_leader(machines: Machines) -> None:
    """By the address of a standby; and one that has both addresses goes on after a takeover, without a call of its."""
    pulsar = pytest.importorskip("pulsar", reason="pulsar-client is not installed")
    client = pulsar.Client(machines.addresses["two"][0], operation_timeout_seconds=WITHIN_S)
    try:
        consumer = client.subscribe("t", "s", pulsar.ConsumerType.Shared)
        producer = client.create_producer("t", send_timeout_millis=WITHIN_S * 1000)
        producer.send(b"before")
        message = consumer.receive(WITHIN_S * 1000)
        assert message.data() == b"before"
        consumer.acknowledge(message)
        machines.end("one")
        machines.wait(lambda: machines.leader == "two")
        producer.send(b"after")
        while message.data() != b"after":
            message = consumer.receive(WITHIN_S * 1000)
    finally:
        client.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which a standby, which has followed and does not run, would have its store."""
    standby = Standby(tmp_path / "data", Bucket((tmp_path / "copy").as_uri()), lease_ms=1_000)
    assert not standby.begin()
    return tmp_path / "data"


@pytest.mark.parametrize(
    "command",
    [
        "stats {0}",
        "check {0}",
        "send {0} a x",
        "audit {0}",
        "repair {0}",
        "init {0}",
        "send {0} a x --create",
        "import {0} {0}.lines --topic a",
        "serve {0} --port 0",
    ],
)
@pytest.mark.parametrize("is_there", [False, True], ids=["absent", "empty"])
def test_a_command_on_the_directory_of_a_standby_says_that_it_is_one(place: Path, command: str, is_there: bool) -> None:
    """It said that there is no such directory, or made a store there, which was in the standby's way."""
    place.with_name("data.lines").touch()
    if is_there:
        place.mkdir()
    error = refused(*command.format(place).split())
    assert "a standby has no store here before it leads" in error
    assert str(staged_of(place)) in error
    assert not place.exists() or not any(place.iterdir())


def test_a_program_makes_no_store_in_the_place_of_a_standby(place: Path) -> None:
    """Neither by opening it nor by a backup or a restore."""
    copy = (place.parent / "other-copy").as_uri()
    store = DelayedStore.open(place.with_name("other"), StoreConfig(background=False))
    with store, pytest.raises(InvalidArgument, match="a standby has no store here"):
        store.backup(place)
    ok("replica", "init", place.with_name("other"), copy)
    with DelayedStore.open(place.with_name("other"), StoreConfig(background=False, replica=copy)) as shipping:
        shipping.save_manifest()
    assert "a standby has no store here" in refused("restore", copy, place)
    with pytest.raises(InvalidArgument, match="a standby has no store here"):
        DelayedStore.open(place)
    assert not place.exists()


def test_a_standby_without_a_copy_is_refused(tmp_path: Path) -> None:
    """With the option that is missing."""
    assert "--replica" in refused("serve", tmp_path / "store", "--standby")


@pytest.mark.parametrize("failure", [NotLeader("s3://b/x", "the lease was not renewed in time"), DEPOSED, FAILED, FULL])
def test_a_machine_that_cannot_lead_by_its_copy_tries_again_or_follows(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it opens its store, or closes it. Before, one that was deposed amid a call ended as if its disk had failed."""
    monkeypatch.setattr("duelog.broker.server.turns._FULL_S", 0.0)
    opened = list[str]()

    class Leads:
        lease_ms = 1

        def begin(self) -> bool:
            return True

        def beat(self) -> None:
            """Nothing is to be renewed."""

        def opened(self) -> None:
            """It is not."""

        def resigned_at(self) -> None:
            """Nobody has."""

    def fails() -> NoReturn:
        opened.append("")
        if len(opened) == 2:
            turns._ended.set()
        raise failure

    turns = Turns(Leads(), BrokerConfig(), fails, Broker, print)  # type: ignore[arg-type]
    if failure is FAILED:
        with pytest.raises(StoreFailed):
            asyncio.run(turns.run())
        return
    asyncio.run(turns.run())
    assert len(opened) == 2


def test_the_lease_is_renewed_as_long_as_a_machine_makes_and_opens_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread than theirs, until it is open. Before, a second standby fenced meanwhile.

    Clients that went through to the leader before are let go in between, which a slow one makes last seconds.
    """
    beats, states = threading.Semaphore(0), list[str]()

    def waits(state: str) -> None:
        while beats.acquire(blocking=False):
            pass  # of what was before
        states.extend(state for _ in range(3) if beats.acquire(timeout=WITHIN_S))

    class Way(_Way):
        async def open(self) -> None:
            """Nobody comes."""

        async def close(self) -> None:
            await asyncio.to_thread(waits, "way")

    class Leads:
        lease_ms, leader = 1, None
        steps = 0

        def begin(self) -> bool:
            return False

        def step(self) -> bool:
            self.steps += 1
            if self.steps == 2:
                waits("step")
            return self.steps == 2

        def beat(self) -> None:
            beats.release()

        def opened(self) -> None:
            states.append("ended")

    def opens() -> NoReturn:
        waits("open")
        turns._ended.set()
        raise DEPOSED

    monkeypatch.setattr("duelog.broker.server.turns._Way", Way)
    turns = Turns(Leads(), BrokerConfig(), opens, Broker, print)  # type: ignore[arg-type]
    asyncio.run(turns.run())
    assert states == ["step"] * 3 + ["way"] * 3 + ["open"] * 3 + ["ended"]


@pytest.mark.parametrize(
    "failure",
    [
        ReplicaUnreachable,
        GapFound,
        lambda url, why: ReplicaDamaged(url, "log/1", why),
        lambda _, why: StoreFull(Path("data"), why),
    ],
)
def test_a_standby_goes_on_where_the_copy_is_about_to_be_whole_again_or_its_disk_to_have_space(
    failure: Callable[[str, str], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again. Before, it ended at a gap of the log, a moment before the manifest behind it was put."""
    monkeypatch.setattr("duelog.broker.server.turns._FULL_S", 0.0)
    steps = list[str]()

    class Follows:
        lease_ms, leader = 1, None

        def begin(self) -> bool:
            return False

        def beat(self) -> None:
            """Nothing is to be renewed."""

        def step(self) -> bool:
            steps.append("")
            if len(steps) == 2:
                turns._ended.set()
            raise failure("s3://b/x", "is not whole")

    turns = Turns(Follows(), BrokerConfig(), print, Broker, print)  # type: ignore[arg-type]
    asyncio.run(turns.run())
    assert len(steps) == 2


def test_a_standby_does_not_flood_its_log_while_the_bucket_is_down(caplog: pytest.LogCaptureFixture) -> None:
    """It says so some times a minute. Before, twice a second, for as long as the bucket was down."""
    steps = list[str]()

    class Follows:
        lease_ms, leader = 1, None

        def begin(self) -> bool:
            turns._poll_s = 0.0
            return False

        def beat(self) -> None:
            """Nothing is to be renewed."""

        def step(self) -> bool:
            steps.append("")
            if len(steps) == 50:
                turns._ended.set()
            raise ReplicaUnreachable("s3://b/x", "is down")

    turns = Turns(Follows(), BrokerConfig(), print, Broker, print)  # type: ignore[arg-type]
    asyncio.run(turns.run())
    assert 1 <= caplog.text.count("is down") <= 20


def test_a_standby_whose_address_is_in_use_follows_on(caplog: pytest.LogCaptureFixture) -> None:
    """It says so; clients come to it by no way meanwhile. Before, the process ended."""
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        way = _Way("pulsar://leader:6650", BrokerConfig(bind_address="localhost", broker_service_port=port), None)

        async def run() -> None:
            await way.open()
            await way.close()

        asyncio.run(run())
    assert "another program listens there" in caplog.text


def test_a_standby_says_over_http_that_it_is_one_and_who_leads() -> None:
    """It said that the broker had no such resource; what it has itself is answered, whoever asks."""
    config = BrokerConfig(bind_address="localhost", broker_service_port=0, web_service_port=0)
    way = _Way("pulsar://leader:6650,duelog://leader:6700", config, None)

    async def run() -> None:
        await way.open()
        try:
            assert way._proxy is not None
            async with aiohttp.ClientSession(way._proxy.web_urls.plain, headers={"Authorization": "Bearer x"}) as http:
                for method, path in (
                    ("GET", "/"),
                    ("GET", "/admin/v2/tenants"),
                    ("PUT", "/admin/v2/persistent/public/default/t"),
                    ("POST", "/duelog/v1/operations/overview"),
                ):
                    async with http.request(method, path) as answer:
                        assert answer.status == 503
                        reason = (await answer.json())["reason"]
                        assert reason.startswith(
                            "this is a standby, and pulsar://leader:6650,duelog://leader:6700 leads"
                        )
                for path, status in (("/status.html", 200), ("/metrics", 200)):
                    async with http.get(path) as answer:
                        assert answer.status == status
                async with http.post("/metrics") as answer:
                    assert answer.status == 405
        finally:
            await way.close()

    asyncio.run(run())
