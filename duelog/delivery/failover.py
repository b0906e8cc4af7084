"""Which consumer of a failover subscription gets its messages, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from duelog.store.errors import InvalidArgument

Choose = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Failover:
    """How a consumer takes part in a failover subscription.

    priority: 0 or more; consumers with a higher number get nothing while there is one with a lower. name: what `choose`
    knows it by. choose: given the names of the consumers of the lowest number, in the order in which they came, the
    place of the one that is to get the messages, None: 0; of the consumer that came first it counts. on_change: told
    whether the consumer gets the messages, when it subscribes and whenever that changes. Both are called by any thread
    inside the store's locks: they return at once and call nothing of the store. What `on_change` raises is logged; when
    `choose` raises, no consumer is added, and when one leaves, the first of those that stay is served.
    """

    priority: int = 0
    name: str = ""
    choose: Choose | None = None
    on_change: Callable[[bool], object] | None = None

    def __post_init__(self) -> None:
        """Raise InvalidArgument for what cannot be."""
        if type(self.priority) is not int or self.priority < 0:
            raise InvalidArgument("priority", self.priority, "expected an int of at least 0")
        if not isinstance(self.name, str):
            raise InvalidArgument("name", self.name, "expected a str")
        for field in ("choose", "on_change"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise InvalidArgument(field, value, "expected something to be called, or None")


def chosen(candidates: Mapping[int, Failover]) -> int:
    """The id of the consumer that gets the messages, of candidates in the order in which they came.

    REQUIRES: there is one. Raises InvalidArgument for what `choose` gives, or raises.
    """
    lowest = min(candidate.priority for candidate in candidates.values())
    best = [consumer for consumer, candidate in candidates.items() if candidate.priority == lowest]
    choose = next(iter(candidates.values())).choose
    if choose is None:
        return best[0]
    names = [candidates[consumer].name for consumer in best]
    try:
        at = choose(names)
    except BaseException as error:
        raise InvalidArgument("choose", choose, f"raised {error!r} for {names}") from error
    if type(at) is not int or not 0 <= at < len(best):
        raise InvalidArgument("choose", choose, f"gave {at!r} for {names}, expected a place in the list")
    return best[at]
