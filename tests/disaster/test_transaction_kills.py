"""A program is killed over and over amid transactions that move tokens between topics: each is in exactly one place.

Eight workers of five topics take a token, and in one transaction acknowledge it, send it on (now or later, some with a
key that another transaction cancels or replaces), and count the move in a document. DUELOG_TRANSACTION_KILLS says how
often it is killed.
"""

import os
import random
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, Message, StoreConfig
from duelog.errors import ClosedError, TransactionConflict
from tests.conftest import in_threads
from tests.disaster.fork_server import serve
from tests.disaster.kill_series import KILLED, Server
from tests.disaster.working import say
from tests.proof import length

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_TRANSACTION_KILLS", 8, 40)
CONFIG = StoreConfig(map_bytes=1 << 26, wal_bytes=1 << 20, ack_flush_ms=1, partition_ms=60_000)
TOPICS = [f"place-{at}" for at in range(5)]
TOKENS = 60
WORKERS = 8


def test_a_token_is_in_exactly_one_place_however_often_the_program_is_killed(places: Path) -> None:
    """And the documents have counted as many moves as the tokens say that they have made."""
    server, chance = Server("tests.disaster.test_transaction_kills"), random.Random(KILLS)
    path = places / "store"
    with DelayedStore.open(path, CONFIG) as store:
        for name in TOPICS:
            store.topic(name).subscribe("s", type="shared").close()
        store.topic(TOPICS[0]).send_batch([Message(b"%d 0" % token) for token in range(TOKENS)])
    moves = 0
    for round_ in range(KILLS):
        kill_after = chance.randrange(2, 60)
        for fact in server.run({"path": str(path), "seed": round_}, kill_after):
            match fact:
                case ["moved", count]:
                    moves += count
                case ["exit", status]:
                    assert os.waitstatus_to_exitcode(status) == KILLED
                case ["trouble", text]:
                    pytest.fail(text)
        with DelayedStore.open(path, StoreConfig(partition_ms=60_000, background=False)) as store:
            assert_each_is_in_one_place(store)
    server.close()
    with DelayedStore.open(path, CONFIG, read_only=True) as store:
        assert list(store.check(deep=True)) == []
    print(f"\n{KILLS} kills, at least {moves} moves")
    assert moves > KILLS


def assert_each_is_in_one_place(store: DelayedStore) -> None:
    """Look for every token among what is scheduled, and what is due and not acknowledged."""
    found: list[tuple[int, int]] = []
    for name in TOPICS:
        topic = store.topic(name)
        waiting = [message.payload for message in topic.scheduled()]
        waiting += [message.payload for message in topic.subscription("s").peek(1_000)]
        found += [(int(token), int(moves)) for token, moves in (bytes(each).split() for each in waiting)]
    assert sorted(token for token, _ in found) == list(range(TOKENS))
    counted = {int(key): int(document.value) for key, document in store.documents.items()}
    assert {token: moves for token, moves in found if moves} == counted


def run(request: dict[str, Any]) -> None:
    """Move tokens until the process is killed."""
    say("pid", os.getpid())
    store = DelayedStore.open(request["path"], CONFIG)
    told = threading.Lock()
    outcomes: Counter[str] = Counter()

    def work(number: int) -> None:
        chance = random.Random(f"{request['seed']} {number}")
        while True:
            topic = chance.choice(TOPICS)
            try:
                with store.topic(topic).subscribe("s", type="shared") as consumer:
                    move(store, consumer.receive(3, timeout=0.05), chance)
            except TransactionConflict:  # it was taken back meanwhile
                outcomes["conflict"] += 1
                continue
            except ClosedError:
                return
            with told:
                outcomes["moved"] += 1
                if outcomes["moved"] % 4 == 0:
                    say("moved", 1)

    in_threads(partial(work, number) for number in range(WORKERS))


def move(store: DelayedStore, messages: list[Any], chance: random.Random) -> None:
    """Send what was received on, in one transaction; take other tokens back that wait under their keys, too."""
    with store.transaction() as transaction:
        transaction.ack(messages)
        for message in messages:
            token, moves = message.payload.split()
            later = chance.choice((0, 0, 0.01, 90))
            payload = b"%s %d" % (token, int(moves) + 1)
            key = f"{token.decode()}" if later else None
            transaction.send(chance.choice(TOPICS), payload, deliver_after=later, dedup_key=key)
            transaction.put_document(token.decode(), b"%d" % (int(moves) + 1))
        pull(store, transaction, chance)


def pull(store: DelayedStore, transaction: Any, chance: random.Random) -> None:
    """Cancel a token that waits for long, by its key, and send it on at once."""
    name = chance.choice(TOPICS)
    found = next((each for each in store.topic(name).scheduled() if each.dedup_key is not None), None)
    if found is None or found.dedup_key is None:
        return
    token, moves = found.payload.split()
    document = store.documents.get(token.decode())
    if document is None or document.value != moves:
        return
    transaction.cancel_key(name, found.dedup_key)
    transaction.send(chance.choice(TOPICS), b"%s %d" % (token, int(moves) + 1))
    transaction.put_document(token.decode(), b"%d" % (int(moves) + 1), expected=document.version)


if __name__ == "__main__":
    serve(run)
