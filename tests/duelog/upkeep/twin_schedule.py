"""A schedule said plainly: every occurrence is gone through, one by one, from the first that waits."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from duelog.upkeep.schedule import Misfires


@dataclass(frozen=True)
class Asked:
    """The arguments of a schedule: each `step_ms`, from when it is made or, by cron, at multiples of it."""

    step_ms: int
    by_cron: bool
    until_ms: int | None
    count: int | None
    jitter_ms: int
    misfires: Misfires
    grace_ms: int


@dataclass
class TwinSchedule:
    """waiting_ms: the nominal time of what waits, or has fallen due and is not followed yet; None: paused, or ended.

    fired: it is in the main log. placed: it was scheduled; else it was sent among those that were late. came: nominal
    times of all that was sent, in order.
    """

    asked: Asked
    waiting_ms: int | None = None
    fired: bool = False
    placed: bool = True
    sent: int = 0
    paused: bool = False
    came: list[int] = field(default_factory=list)
    name: str = "s"

    def begin(self, now_ms: int) -> None:
        """Wait for the first occurrence after now, if there is one."""
        step_ms = self.asked.step_ms
        self._wait(now_ms // step_ms * step_ms + step_ms if self.asked.by_cron else now_ms + step_ms)

    def _wait(self, nominal_ms: int) -> None:
        self.paused, self.fired, self.placed, self.waiting_ms = False, False, True, None
        ended = self.asked.until_ms is not None and nominal_ms > self.asked.until_ms
        if not ended and (self.asked.count is None or self.sent < self.asked.count):
            self.waiting_ms = nominal_ms
            self.sent += 1

    def take_back(self) -> None:
        """The waiting occurrence does not come, unless it has fired."""
        if self.waiting_ms is not None and not self.fired:
            self.sent -= 1
        self.waiting_ms = None

    def due_ms(self, nominal_ms: int) -> int:
        """Up to jitter later, before the next."""
        most = min(self.asked.jitter_ms, self.asked.step_ms - 1)
        digest = hashlib.blake2b(
            f"persistent://public/default/t\0{self.name}\0{nominal_ms}".encode(), digest_size=8
        ).digest()
        return nominal_ms + (int.from_bytes(digest, "big") % (most + 1) if most else 0)

    def _after(self, nominal_ms: int) -> Iterator[int]:
        nominal_ms += self.asked.step_ms
        while self.asked.until_ms is None or nominal_ms <= self.asked.until_ms:
            yield nominal_ms
            nominal_ms += self.asked.step_ms

    def tick(self, now_ms: int, *, up_to_ms: int | None = None, fires: bool = False) -> None:
        """Every due occurrence comes, or is a misfire.

        up_to_ms: of what is late only that, for the rest of it was broken off. fires: what waits fired though it is a
        misfire, for taking it back failed.
        """
        waiting_ms, asked = self.waiting_ms, self.asked
        if waiting_ms is None or self.due_ms(waiting_ms) > now_ms:
            return
        missed: list[int] = []
        for nominal_ms in self._after(waiting_ms):
            if self.due_ms(nominal_ms) > now_ms:
                break
            missed.append(nominal_ms)

        def in_time(nominal_ms: int) -> bool:
            return self.due_ms(nominal_ms) >= now_ms - asked.grace_ms

        young = [nominal_ms for nominal_ms in missed if in_time(nominal_ms)]
        misfired = self.placed and asked.misfires in ("latest", "skip") and not in_time(waiting_ms)
        late = {
            "first": [],
            "all": missed,
            "latest": missed[-1:] if misfired or young != missed else missed,
            "skip": young,
        }[asked.misfires]
        if asked.misfires == "latest" and not missed:
            misfired = False
        if misfired and not self.fired and not fires:
            self.sent -= 1
        elif not self.fired:
            self.came.append(waiting_ms)
        if asked.count is not None:
            late = late[: asked.count - self.sent]
        if up_to_ms is not None:
            late = late[: late.index(up_to_ms) + 1]
        self.came += late
        self.sent += len(late)
        if up_to_ms is not None:
            self.waiting_ms, self.fired, self.placed = up_to_ms, True, False
            return
        following = (missed or [waiting_ms])[-1] + asked.step_ms
        self._wait(following)
