"""duelog itself, by its public face."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .peer import Peer, module

_FLUSH_SECONDS = 0.1


class DuelogPeer(Peer):
    """One topic, one exclusive subscription.

    durable_acks: each `fetch_and_ack` waits for the disk, as the peers' transactions do; else acknowledgements are
    flushed as the background thread does it, every 100 ms. messages: batches are sent as Message objects, else as
    columns (`send_payloads`), as the peers get them.
    """

    def __init__(
        self, *, durable_acks: bool = True, real_time: bool = False, messages: bool = False, **settings: Any
    ) -> None:
        self._durable_acks = durable_acks
        self._messages = messages
        self._real_time = real_time
        self.settings = settings
        self._flush_at = 0.0

    def open(self, directory: Path, now_ms: int) -> None:
        duelog = module("duelog")
        self._message = duelog.Message
        self.clock = None if self._real_time else duelog.ManualClock(now_ms)
        config = duelog.StoreConfig(**self.settings)
        self.store = duelog.DelayedStore.open(directory / "store", config, clock=self.clock)
        self.topic = self.store.topic("benchmark")
        self.subscription = self.topic.subscribe("reader")

    def schedule_one(self, payload: bytes, due_ms: int) -> None:
        self.topic.send(payload, deliver_at=due_ms)

    def schedule_batch(self, payloads: Sequence[bytes], dues: Sequence[int]) -> None:
        if self._messages:
            message = self._message
            self.topic.send_batch([message(p, deliver_at=d) for p, d in zip(payloads, dues, strict=True)])
        else:
            self.topic.send_payloads(payloads, deliver_at=dues)

    def fetch_and_ack(self, now_ms: int, limit: int, wait_seconds: float = 0.0) -> list[bytes]:
        if self.clock is not None and now_ms > self.clock.now_ms():
            self.clock.set(now_ms)
        batch = self.subscription.receive(limit, timeout=wait_seconds)
        self.subscription.ack(batch, durable=self._durable_acks)
        if not self._durable_acks and not self._real_time and time.monotonic() > self._flush_at:
            self.store.flush()
            self._flush_at = time.monotonic() + _FLUSH_SECONDS
        return [message.payload for message in batch]

    def close(self) -> None:
        self.store.close()
