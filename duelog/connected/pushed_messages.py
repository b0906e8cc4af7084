"""Messages that are pushed to a consumer ahead of its calls, and acknowledgements that go together.

A credit is renewed when half of it is used up, so that messages come while others are worked on. Acknowledgements are
sent by one thread: those that come while it waits for an answer are its next request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from duelog.operations.wire_client import Call, Connection, is_gone
from duelog.store.clock import Monitor
from duelog.store.message import ReceivedMessage
from duelog.store.position import MessageId


def received(call: Call) -> list[ReceivedMessage]:
    """The messages of an answer, which know by which connection they came."""
    messages: list[ReceivedMessage] = [] if call.result is None else call.result.to_list()
    for message in messages:
        message._connection = call.connection
    return messages


class PushedMessages:
    """Messages that have come and were not taken yet. Thread-safe."""

    def __init__(self, connection: Connection, start: Callable[..., object], most: int) -> None:
        """start: asks for messages by [how many, None], and has `done` called with the answer. most: here at a time."""
        self._start = start
        self._most = most
        self._connection = connection
        self._changed = Monitor()
        self._messages: deque[ReceivedMessage] = deque()
        self._asked = False
        self._none = False
        """True if the other process had none, and does not wait for any."""
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def take(self, most: int, timeout_s: float | None, stopped: Callable[[], bool]) -> list[ReceivedMessage]:
        """Wait for messages; at most so many, none: the time is over, or `stopped()`. Raises what asking did."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed.lock:
                while self._messages and self._messages[0]._connection != self._connection.count:  # given back
                    self._messages.popleft()
                wanted = 0 if self._asked or self._error is not None else self._most - len(self._messages)
                if 2 * wanted < self._most:
                    wanted = 0
                self._asked |= bool(wanted)
            if wanted:
                try:
                    self._start([wanted, None], done=self._come)
                except BaseException:
                    with self._changed.lock:
                        self._asked = False
                    raise
            with self._changed.lock:
                if stopped():
                    return []
                if self._messages:
                    return [self._messages.popleft() for _ in range(min(most, len(self._messages)))]
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                left = None if deadline is None else deadline - time.monotonic()
                if self._none or (left is not None and left <= 0):
                    self._none = False
                    return []
                self._changed.wait(left)

    def wake(self) -> None:
        """Have `stopped` asked again."""
        with self._changed.lock:
            self._changed.notify_all()

    def _come(self, call: Call) -> None:
        """Take an answer. In the thread that reads."""
        with self._changed.lock:
            self._asked = False
            if call.error is not None:
                self._error = call.error
            elif call.result is None:
                self._none = True
            else:
                self._messages += received(call)
            self._changed.notify_all()


class Acknowledging:
    """Acknowledgements on their way. Thread-safe."""

    def __init__(self, send: Callable[[Sequence[MessageId]], object]) -> None:
        """send: acknowledges positions, and waits for the answer."""
        self._send = send
        self._changed = Monitor()
        self._positions: list[MessageId] = []
        self._sending = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="duelog-acknowledge", daemon=True)
        self._thread.start()

    def add(self, positions: Sequence[MessageId]) -> None:
        """Have positions acknowledged soon. Raises what an earlier request did."""
        with self._changed.lock:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._positions += positions
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until what was added is answered."""
        with self._changed.lock:
            while self._positions or self._sending:
                self._changed.wait()

    def close(self) -> None:
        """Send what there is; wait until that is answered. Raises what one did, unless the other is gone."""
        with self._changed.lock:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None and not is_gone(self._error):
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed.lock:
                self._sending = False
                self._changed.notify_all()
                while not (self._positions or self._ended):
                    self._changed.wait()
                positions, self._positions, self._sending = self._positions, [], True
            if not positions:
                with self._changed.lock:
                    self._sending = False
                return
            try:
                self._send(positions)
            except BaseException as error:
                self._error = error
