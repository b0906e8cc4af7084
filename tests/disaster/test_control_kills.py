"""The process that answers by the control socket is killed over and over: what it has answered is there.

DUELOG_CONTROL_KILLS says how often; twenty times unless it is set.
"""

import base64
import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock
from duelog.operations.wire import Disconnected
from duelog.operations.wire_client import Connection
from duelog.store.policy.policy_records import Scope
from tests.conftest import present
from tests.disaster.fork_server import serve
from tests.disaster.kill_series import KILLED, Server
from tests.disaster.power_keys import KEYS, PLACES, SUBSCRIPTIONS, TOPIC, Seen, World, policies_of
from tests.disaster.working import CONFIG, START_MS, say
from tests.proof import length

pytestmark = [pytest.mark.kill, pytest.mark.series]

KILLS = length("DUELOG_CONTROL_KILLS", 5, 20)
FAR_MS = 10_000_000
HOLDING = replace(CONFIG, control=True)


def request_of(world: World, chance: random.Random, number: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """An operation, its arguments, and how they change what there is; nothing fires, so each key's message waits."""
    key, name = chance.choice(KEYS), chance.choice(SUBSCRIPTIONS)
    held = world.keys.get(key)
    gone = [] if held is None else [held.text]
    match chance.choice(("send", "send", "send", "cancel_key", "pause", "resume", "update_policies")):
        case "send":
            text, replaces = f"{key}:{number}", chance.random() < 0.6
            arguments = {
                "topic": TOPIC,
                "payload": base64.b64encode(text.encode()).decode(),
                "deliver_at": START_MS + FAR_MS,
                "dedup_key": key,
                "replace": replaces,
            }
            if held is not None and not replaces:
                return "send", arguments, {}
            return "send", arguments, {"gone": gone, "sent": [text], "keys": {key: [text, None, 0, 0]}}
        case "cancel_key":
            return "cancel_key", {"topic": TOPIC, "key": key}, {"gone": gone, "keys": {key: None}}
        case "pause":
            until_ms = chance.choice((None, START_MS + FAR_MS + number))
            arguments = {"topic": TOPIC, "subscription": name, "until_ms": until_ms}
            return "pause", arguments, {"pauses": {name: until_ms}}
        case "resume":
            return "resume", {"topic": TOPIC, "subscription": name}, {"pauses": {name: 0}}
        case _:
            place, values = chance.choice(PLACES), {"max_redeliveries": number}
            scope = str(Scope.of(**place))
            change = {"policies": {scope: world.policies.get(scope, {}) | values}}
            return "update_policies", {**place, "values": values}, change


def test_what_a_killed_process_has_answered_by_the_control_socket_is_there(places: Path) -> None:
    """An unanswered request is done whole or not at all: keys, pauses, policies; the next process answers."""
    server, chance, path = Server("tests.disaster.test_control_kills"), random.Random(KILLS), places / "store"
    world, answered, unanswered = World(), 0, 0
    with DelayedStore.open(path, HOLDING, clock=ManualClock(START_MS)) as store:
        for name in SUBSCRIPTIONS:
            store.topic(TOPIC).subscribe(name).close()
        world.policies = policies_of(store)
    for kill in range(KILLS):
        child, after = -1, world
        for fact in server.run({"path": str(path)}):
            match fact:
                case ["pid", child]:
                    pass
                case ["opened"]:
                    client = present(Connection.to(path))
                    killing = threading.Timer(chance.uniform(0, 0.003), os.kill, (child, signal.SIGKILL))
                    begun = answered + chance.randrange(1, 30)
                    try:
                        while True:
                            if answered == begun:
                                killing.start()
                            name, arguments, change = request_of(world, chance, 1_000_000 * kill + answered)
                            after = world.after(change)
                            client.ask(name, arguments)
                            world, answered = after, answered + 1
                    except Disconnected:
                        unanswered += after is not world
                    killing.join()
                    client.close()
                case ["exit", status]:
                    assert os.waitstatus_to_exitcode(status) == KILLED
                case ["trouble", text]:
                    pytest.fail(text)
        with DelayedStore.open(path, HOLDING, clock=ManualClock(START_MS)) as store:
            seen = Seen(store)
            assert seen.troubles == []
            differ = [seen.differs_from(each, START_MS) for each in (world, after)]
            assert [] in differ, differ
            world = after if differ[1] == [] else world
            assert list(store.check(deep=True)) == []
    server.close()
    assert answered
    print(f"\n{KILLS} kills, {answered} answers, {unanswered} that did not come")


def run(request: dict[str, Any]) -> None:
    """Hold the store open until killed: the program that is killed, of which this module is the fork server."""
    say("pid", os.getpid())
    with DelayedStore.open(request["path"], HOLDING, clock=ManualClock(START_MS)):
        say("opened")
        threading.Event().wait()


if __name__ == "__main__":
    serve(run)
