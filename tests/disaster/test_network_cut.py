"""The network between a store and its clients is cut and healed, in network namespaces of this machine.

DUELOG_CUTS says how often. A third namespace between the two passes packets on, or drops them without a word; none of
them has a default route, so that nothing leaves the machine. Parts in the server's namespace go on meanwhile.
"""

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import duelog
from tests.disaster.connected_parts import HELD, SUBSCRIPTION
from tests.disaster.connected_twin import Part, Twin, judged, subscribe
from tests.proof import length

pytestmark = [pytest.mark.fault, pytest.mark.series]

CUTS = length("DUELOG_CUTS", 1, 40)
SILENT_S = 2
"""How long a connection outlives a cut; the product has 30."""
SERVER, CLIENT, PORT = "10.89.1.1", "10.89.2.1", 6700


class Network:
    """The namespaces of a server and of a client, and one between them."""

    def __init__(self) -> None:
        self.server, self._between, self.client = (f"duelog-{os.getpid()}-{end}" for end in ("s", "b", "c"))
        for name in (self.server, self._between, self.client):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for name, end, address in ((self.server, "s", SERVER), (self.client, "c", CLIENT)):
            beside = f"{address[:-1]}2"
            ip("-n", name, "link", "add", "out", "type", "veth", "peer", "name", end, "netns", self._between)
            for namespace, link, own in ((name, "out", address), (self._between, end, beside)):
                ip("-n", namespace, "address", "add", f"{own}/30", "dev", link)
                ip("-n", namespace, "link", "set", link, "up")
            ip("-n", name, "route", "add", "10.89.0.0/16", "via", beside)
        self.heal()

    def cut(self) -> None:
        """Drop what goes from one to the other."""
        self._forward("0")

    def heal(self) -> None:
        """Pass it on."""
        self._forward("1")

    def _forward(self, value: str) -> None:
        ip("netns", "exec", self._between, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/ip_forward")

    def close(self) -> None:
        for name in (self.server, self._between, self.client):
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    """Run ip(8)."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    """Namespaces, where this user may make them."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made by ip(8), which is not installed")
    found = object.__new__(Network)
    try:
        found.__init__()  # type: ignore[misc]  # so that what a failed one has made is removed
        yield found
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        found.close()


def of_client(part: str, fact: list[Any]) -> bool:
    """Told by the client that is cut off."""
    return part.startswith("client-c.")


def of_receiver(part: str, fact: list[Any]) -> bool:
    """Told by the receiver that is cut off."""
    return part.startswith("receiver-c.")


def of_holder(part: str, fact: list[Any]) -> bool:
    """The one that is cut off and acknowledges nothing has got something."""
    return fact[:2] == ["got", HELD]


def test_a_client_that_is_cut_off_loses_and_doubles_nothing_and_others_get_what_it_held(
    network: Network, places: Path
) -> None:
    """Healed before the server finds the connection dead, all goes on by it; healed after that, by another.

    Amid sends by number and key, batches, transactions, tasks, cancels and acknowledgements.
    """
    path, chance, twin = places / "store", random.Random(CUTS), Twin()
    subscribe(path)
    within = {end: ["ip", "netns", "exec", name] for end, name in (("s", network.server), ("c", network.client))}
    server: dict[str, object] = {"part": "server", "place": str(path), "listen": [SERVER, PORT]}
    took = list[float]()
    with twin:
        Part("server", twin, within["s"], silent_s=SILENT_S, **server)
        assert twin.wait_for_facts(1)  # it is up
        for name in ("client-s", "receiver-s", "client-c", "receiver-c", "holder-c"):
            part, _, end = name.partition("-")
            place = f"duelog://{SERVER}:{PORT}"
            Part(name, twin, within[end], part=part, place=place, silent_s=SILENT_S)
        for number in range(CUTS):
            assert twin.wait_for_facts(chance.randrange(5, 60), of_client)
            assert twin.wait_for_facts(chance.randrange(5, 60), of_receiver)
            if number % 2:
                network.cut()
                assert twin.wait_for_facts(chance.randrange(20, 200))
            else:
                with duelog.connect(path) as beside:
                    since = len(twin.facts)
                    beside.topic(HELD).send(b"%d" % number)
                    assert twin.wait_for_facts(1, of_holder, since)
                    network.cut()
                    began = time.monotonic()
                    with beside.topic(HELD).subscribe(SUBSCRIPTION, type="shared") as consumer:
                        (message,) = consumer.receive(timeout=60)
                        took.append(time.monotonic() - began)
                        assert (message.payload, message.redelivery_count) == (b"%d" % number, 1)
                        consumer.ack(message, durable=True)
            network.heal()
            assert twin.troubles == []
        assert twin.wait_for_facts(5, of_client)
        assert twin.wait_for_facts(5, of_receiver)
    print(f"\n{CUTS} cuts, what was held came to others after at most {max(took):.1f} s, {judged(path, twin)}")
