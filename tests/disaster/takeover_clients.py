"""Four clients of machines that serve one store by turns: each goes on with the next address when a call fails.

Facts go to stdout. Texts are payloads; no two are the same, and none is sent twice:

    ["sending", topic, text]      about to be sent
    ["told", topic, text, id]     it is stored: in topic "a" in the copy, too, in topic "local" on the leader's machine
    ["cancelling", text]          about to be cancelled
    ["cancelled", text]           it was
    ["got", text, early_ms]       it was received
    ["acked", text]               and its durable acknowledgement is stored
    ["refused", error, reason]    a call failed
    ["trouble", text]             what must never be
"""

import itertools
import os
import sys
import threading
import time
import traceback
from typing import Any

import duelog
from duelog import DelayedStore, MessageId
from duelog.errors import DuelogError
from duelog.operations import wire_address
from tests.disaster.working import say

SUBSCRIPTION, PAUSE_S = "s", 0.04
"""Clients pause between their calls, so that the machines get to run, too."""
DAY_S = 86_400
_RESULT_S = 20
_pause = threading.Event().wait


def send(store: DelayedStore, topic: str, numbers: Any, name: str) -> None:
    """Send to a topic; of the replicated one's messages a third is due soon, and some are cancelled."""
    far = list[tuple[str, MessageId]]()
    for number in numbers:
        text, soon = f"{name}:{number}", topic == "a" and number % 3 == 0
        say("sending", topic, text)
        sent = store.topic(topic).send_async(text.encode(), deliver_after=0.2 if soon else DAY_S * (1 + number % 3))
        message_id = sent.result(_RESULT_S)
        say("told", topic, text, str(message_id))
        if topic == "a" and not soon:
            far.append((text, message_id))
        if len(far) == 4:
            text, message_id = far.pop(0)
            far.clear()
            say("cancelling", text)
            if store.topic(topic).cancel(message_id):
                say("cancelled", text)
            else:
                say("trouble", f"{text} was there to be cancelled")
        _pause(PAUSE_S)


def receive(store: DelayedStore, topic: str, numbers: Any, name: str) -> None:
    """Receive one by one, with durable acknowledgements."""
    with store.topic(topic).subscribe(SUBSCRIPTION, type="shared") as consumer:
        while True:
            for message in consumer.receive(timeout=1):
                text, due_ms = message.payload.decode(), message.due_ms or 0
                say("got", text, due_ms - time.time_ns() // 1_000_000)
                consumer.ack(message, durable=True)
                say("acked", text)


def run(number: int, places: list[str]) -> None:
    """Be one client, for ever."""
    work, topic = ((send, "a"), (send, "a"), (send, "local"), (receive, "a"))[number]
    numbers = itertools.count()
    for place in itertools.islice(itertools.cycle(places), number, None):
        try:
            with duelog.connect(place, reconnect=0) as store:
                work(store, topic, numbers, f"{os.getpid()}:{number}")
        except (DuelogError, TimeoutError) as error:
            say("refused", type(error).__name__, str(error)[:200])
            _pause(0.1)
        except BaseException:
            say("trouble", traceback.format_exc())
            raise


if __name__ == "__main__":
    wire_address.SILENT_S = 2
    for index in range(4):
        threading.Thread(target=run, args=(index, sys.argv[1:])).start()
