"""Wrong brokers, patched into the served process only, that the kill series must find out.

python kill_mutants.py NAME ARGUMENTS...        as `duelog ARGUMENTS...`
"""

import asyncio
import sys
from typing import Any

from duelog.broker.consume import pump
from duelog.broker.produce import sends
from duelog.broker.produce.sends import Reply
from duelog.store.position import MessageId
from duelog.tools.cli.main import main


def receipt_before_the_flush() -> None:
    """A receipt leaves before the engine has written the message."""
    put = sends.Sends._put

    def wrong(self: Any, reply: Any, item: Any) -> bool:
        later: Any = Reply(reply.producer, reply.sequence_id, reply.highest_sequence_id)
        asyncio.get_running_loop().call_later(0.3, put, self, later, item)
        asyncio.get_running_loop().call_soon(self._heard, [(reply, MessageId(1, reply.sequence_id))])
        return True

    sends.Sends._put = wrong  # type: ignore[method-assign]


def acknowledgement_forgotten() -> None:
    """One of many acknowledgements is not told to the engine."""
    acknowledge = pump._Job._acknowledge

    def wrong(self: Any, consumer: Any, acks: Any, durable: bool) -> None:
        acks.places = [place for place in acks.places if place % 7]
        acknowledge(self, consumer, acks, durable)

    pump._Job._acknowledge = wrong  # type: ignore[method-assign]


def acknowledgement_too_far() -> None:
    """With a message the one after it is acknowledged, now and then."""
    acknowledge = pump._Job._acknowledge

    def wrong(self: Any, consumer: Any, acks: Any, durable: bool) -> None:
        if acks.places and max(acks.places) % 3 == 0:
            acks.places.append(max(acks.places) + 1)
        acknowledge(self, consumer, acks, durable)

    pump._Job._acknowledge = wrong  # type: ignore[method-assign]


def early() -> None:
    """A due time is taken for half a second less."""
    checked = sends.Sends._checked

    def wrong(self: Any, *arguments: Any) -> Any:
        found = checked(self, *arguments)
        return found if found.deliver_at is None else found._replace(deliver_at=found.deliver_at - 500)

    sends.Sends._checked = wrong  # type: ignore[method-assign, assignment]


MUTANTS = (receipt_before_the_flush, acknowledgement_forgotten, acknowledgement_too_far, early)

if __name__ == "__main__":
    {each.__name__: each for each in MUTANTS}[sys.argv.pop(1)]()
    main()
