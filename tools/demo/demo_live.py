"""The demo to look at: the trace's delays, compressed, through a store on the system's clock, with the page open on it.

A day of the trace takes a day divided by `speed`. What was written before the trace's last years is left out, as in the
demo; nothing is verified here.
"""

import asyncio
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from duelog import DelayedStore, Message, Subscription

from ...broker.page.operation_resource import asking
from ...broker.page.page_server import serve_page
from ...store.errors import ClosedError
from ..output import flush_output, write_line
from .demo_trace import Trace, load_trace

_STEP_S = 0.1


class LiveReplay:
    """Sends what the trace has written by now, and receives what is due, in two threads."""

    def __init__(self, store: DelayedStore, trace: Trace, speed: float) -> None:
        self._store, self._trace, self._speed = store, trace, speed
        self._topic = store.topic("git")
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._receive)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        trace, began_ms = self._trace, self._store.clock.now_ms()
        first_ms = int(trace.written_ms[0])
        at = 0
        while at < len(trace) and not self._ended.wait(_STEP_S):
            by_ms = first_ms + (self._store.clock.now_ms() - began_ms) * self._speed
            limit = int(trace.written_ms.searchsorted(by_ms, side="right"))
            rows = trace[at:limit]
            dues = began_ms + (rows.due_ms - first_ms) / self._speed
            if limit > at:
                pairs = zip(rows.ids, dues.astype(int).tolist(), strict=True)
                self._topic.send_batch(
                    (Message(name.encode(), deliver_at=due_ms, key=name) for name, due_ms in pairs), allow_past=True
                )
            at = limit

    def _receive(self) -> None:
        with self._topic.subscribe("demo") as subscription:
            while not self._ended.is_set():
                self._take(subscription)

    def _take(self, subscription: Subscription) -> None:
        try:
            subscription.ack(subscription.receive(1_000, timeout=_STEP_S))
        except ClosedError:
            self._ended.set()


def show_demo(store: Path | None, years: int, all_: bool, speed: float) -> None:
    """Replay the trace, and serve the page of it, until SIGTERM or Ctrl-C. store: None: a temporary one."""
    trace = load_trace() if all_ else load_trace().last_years(years)
    with ExitStack() as stack:
        path = store or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="duelog-demo-"))) / "store"
        opened = stack.enter_context(DelayedStore.open(path))
        stack.enter_context(LiveReplay(opened, trace, speed))
        asyncio.run(serve_page(asking(opened), _say))


def _say(address: str) -> None:
    write_line(f"the demo is shown at {address}")
    flush_output()
