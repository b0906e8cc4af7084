"""Who may produce to a topic: the access modes Shared, Exclusive, WaitForExclusive and ExclusiveWithFencing.

A state machine of one topic, without input or output. An exclusive producer has a topic epoch, which rises whenever
another becomes the exclusive one; one that comes back with a lower epoch was fenced meanwhile.

Source of the rules: Apache Pulsar, AbstractTopic.addProducer, and PIP-68.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from ..protocol.failures import Refused, ServerError
from ..protocol.parts import AccessMode

P = TypeVar("P")

MAX_EPOCH = 1 << 48
"""No producer has had a higher one; a client that says so would end the epochs that there are."""


class Admission(NamedTuple, Generic[P]):
    """What follows from asking for a place."""

    admitted: bool
    """False: it waits for its turn."""
    new_epoch: int | None
    """The topic's epoch to be recorded before the producer hears that it is admitted; None: it stays."""
    fenced: list[P]
    """Producers that are to be closed."""


class ProducerAccess(Generic[P]):
    """The producers of one topic, and those that wait to be the only one."""

    def __init__(self, epoch: int | None) -> None:
        self.epoch = epoch
        """None: no producer was ever exclusive."""
        self.members: set[P] = set()
        self.exclusive: P | None = None
        self._waiting: deque[tuple[P, int | None]] = deque()

    def admit(self, producer: P, mode: AccessMode, epoch: int | None) -> Admission[P]:
        """Admit a producer, or have it wait; `epoch` is what it had when it was exclusive before. Raises Refused."""
        taken = bool(self.members or self._waiting)
        if mode == AccessMode.SHARED:
            if self.exclusive is not None or self._waiting:
                raise Refused(ServerError.PRODUCER_BUSY, "the topic has an exclusive producer, or one that waits")
            self.members.add(producer)
            return Admission(True, None, [])
        self._check_epoch(epoch)
        if mode == AccessMode.EXCLUSIVE and taken:
            raise Refused(ServerError.PRODUCER_FENCED, "the topic has producers already")
        if mode == AccessMode.WAIT_FOR_EXCLUSIVE and taken:
            self._waiting.append((producer, epoch))
            return Admission(False, None, [])
        fenced = [*self.members, *(each for each, _ in self._waiting)]
        self.members.clear()
        self._waiting.clear()
        return Admission(True, self._make_exclusive(producer, epoch), fenced)

    def leave(self, producer: P) -> tuple[P | None, int | None, list[P]]:
        """Remove a producer: (the one whose turn it is now or None, the epoch to be recorded, those that are fenced).

        A producer that was removed before changes nothing.
        """
        self._waiting = deque(each for each in self._waiting if each[0] is not producer)
        self.members.discard(producer)
        if self.exclusive is producer:
            self.exclusive = None
        fenced: list[P] = []
        while self._waiting and not self.members:
            following, epoch = self._waiting.popleft()
            try:
                self._check_epoch(epoch)
            except Refused:
                fenced.append(following)
                continue
            return following, self._make_exclusive(following, epoch), fenced
        return None, None, fenced

    def _check_epoch(self, epoch: int | None) -> None:
        if epoch is not None and epoch > MAX_EPOCH:
            raise Refused(ServerError.NOT_ALLOWED, f"no topic has had epoch {epoch}")
        if epoch is not None and self.epoch is not None and epoch < self.epoch:
            raise Refused(ServerError.PRODUCER_FENCED, f"the topic's epoch is {self.epoch}, the producer's {epoch}")

    def _make_exclusive(self, producer: P, epoch: int | None) -> int:
        self.members.add(producer)
        self.exclusive = producer
        if epoch is None:
            epoch = 0 if self.epoch is None else self.epoch + 1
        self.epoch = epoch
        return epoch
