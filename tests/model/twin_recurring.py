"""A kept schedule said plainly: an interval, and the pending occurrence."""

from dataclasses import dataclass

from duelog import MessageId


@dataclass
class TwinSchedule:
    """next_due_ms, next_id: the pending occurrence, or one that is due and not followed yet; None: paused."""

    number: int
    interval_ms: int
    next_due_ms: int | None = None
    next_id: MessageId | None = None

    @property
    def paused(self) -> bool:
        return self.next_due_ms is None

    def following_ms(self, now_ms: int) -> int:
        """The first occurrence after `now_ms`, in step with the one that waited."""
        assert self.next_due_ms is not None
        due_ms = self.next_due_ms
        while due_ms <= now_ms:
            due_ms += max((now_ms - due_ms) // self.interval_ms, 1) * self.interval_ms
        return due_ms
