"""The same face for asyncio: `async with duelog.aio.DelayedStore.open("data") as store`.

Nothing here blocks the event loop: what may wait for a disk or a lock runs in threads of the store, some for commits
and some for looking, so that slow commits do not hold up receivers. A waiting receiver holds no thread: the topic
wakes it through `loop.call_soon_threadsafe`. (On a clock of the program's own that something else moves, it does.)

Cancelling an await is safe. A cancelled `receive` loses nothing: messages that were just being handed to it are given
back at once, and count as delivered once more. A cancelled `send` may have sent its message: it is taken back only
if it was not being written yet. Whatever else is cancelled goes on to its end in its thread.

Values, errors and arguments are those of `duelog`, where each method is described. An object belongs to the event loop
in which it was made.
"""

from .face import DelayedStore, Producer, Subscription, SubscriptionAdmin, Topic

__all__ = ["DelayedStore", "Producer", "Subscription", "SubscriptionAdmin", "Topic"]
