"""The network between a store and its clients is cut and healed, in network namespaces of this machine.

DUELOG_CUTS says how often. Parts in the server's namespace go on meanwhile.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import duelog
from tests.disaster.connected_parts import HELD, SUBSCRIPTION
from tests.disaster.connected_twin import Part, Twin, judged, subscribe
from tests.disaster.network import Network, network_of
from tests.proof import length

pytestmark = [pytest.mark.fault, pytest.mark.series]

CUTS = length("DUELOG_CUTS", 1, 40)
SILENT_S = 2
"""How long a connection outlives a cut; the product has 30."""
PORT = 6700


@pytest.fixture
def network() -> Iterator[Network]:
    """A server and a client, where this user may make namespaces."""
    with network_of("server", "client") as network:
        yield network


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
    within, address = {"s": network.within("server"), "c": network.within("client")}, network.address("server")
    server: dict[str, object] = {"part": "server", "place": str(path), "listen": [address, PORT]}
    took = list[float]()
    with twin:
        Part("server", twin, within["s"], silent_s=SILENT_S, **server)
        assert twin.wait_for_facts(1)  # it is up
        for name in ("client-s", "receiver-s", "client-c", "receiver-c", "holder-c"):
            part, _, end = name.partition("-")
            place = f"duelog://{address}:{PORT}"
            Part(name, twin, within[end], part=part, place=place, silent_s=SILENT_S)
        for number in range(CUTS):
            assert twin.wait_for_facts(chance.randrange(5, 60), of_client)
            assert twin.wait_for_facts(chance.randrange(5, 60), of_receiver)
            if number % 2:
                network.cut("server", "client")
                assert twin.wait_for_facts(chance.randrange(20, 200))
            else:
                with duelog.connect(path) as beside:
                    since = len(twin.facts)
                    beside.topic(HELD).send(b"%d" % number)
                    assert twin.wait_for_facts(1, of_holder, since)
                    network.cut("server", "client")
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
