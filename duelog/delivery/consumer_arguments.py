"""Arguments of consumers: how one takes part in a failover subscription; messages or their positions, timeouts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from pyroaring import BitMap

from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import InvalidArgument, checked_int
from duelog.store.message import ReceivedMessage
from duelog.store.names import validate_subscription_name
from duelog.store.position import MessageId, MessageIds, Position
from duelog.store.received_messages import ReceivedMessages

from .key_slots import KeyShared
from .position_set import group_by_ledger, group_ids, group_places

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
        checked_int("priority", self.priority, 0, "an int of at least 0")
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


Acknowledgeable: TypeAlias = ReceivedMessage | MessageId | str
"""A received message, its position or its id, or the text of either."""

_RECEIVED = {ReceivedMessage}
_POSITION_TYPE = {MessageId}
_PLACE = attrgetter("_place")

_TYPES = ("exclusive", "failover", "shared", "key_shared")
_POSITIONS = ("earliest", "latest")


def positions_of(messages: Acknowledgeable | Iterable[Acknowledgeable]) -> Sequence[Position]:
    """The positions of one message or many. Raises InvalidArgument."""
    if isinstance(messages, ReceivedMessage):
        return [messages.position]
    if isinstance(messages, MessageId):
        return [messages]
    if isinstance(messages, str):
        return [MessageId.parse(messages, "messages")]
    return [_position(item) for item in checked(messages)]


def _position(item: Acknowledgeable) -> Position:
    if isinstance(item, ReceivedMessage):
        return item.position
    return MessageId.parse(item, "messages") if isinstance(item, str) else item


def entries_of(messages: Acknowledgeable | Iterable[Acknowledgeable]) -> dict[int, BitMap]:
    """The positions of one message or many, as entry ids by ledger id. Raises InvalidArgument."""
    if isinstance(messages, ReceivedMessage):
        return group_places((messages._place,))
    if isinstance(messages, ReceivedMessages):
        return group_places(messages.places)
    if isinstance(messages, MessageIds):
        return group_ids(messages)
    if type(messages) is list and messages:
        types = set(map(type, messages))
        if types == _RECEIVED:  # what `receive` gave
            return group_places(list(map(_PLACE, messages)))
        if types == _POSITION_TYPE:
            return group_by_ledger(messages)
    return group_by_ledger(positions_of(messages))


def checked(messages: Iterable[Acknowledgeable]) -> Iterator[Acknowledgeable]:
    """The messages one by one. Raises InvalidArgument at what is none."""
    try:
        items = iter(messages)
    except TypeError:
        raise InvalidArgument(
            "messages", messages, "expected received messages, their positions or their ids"
        ) from None
    for item in items:
        if not isinstance(item, (ReceivedMessage, MessageId, str)):
            raise InvalidArgument("messages", item, "expected a received message, its position or its id")
        yield item


def deadline_of(now_ms: int, timeout: Duration | None) -> int | None:
    """When a wait of `timeout` ends. Raises InvalidArgument."""
    if timeout is None:
        return None
    return now_ms + duration_ms("timeout", timeout)


def check_subscribing(
    name: str, type_: str, initial_position: str, failover: Failover | None, key_shared: KeyShared | None
) -> None:
    """Raise InvalidArgument for arguments that `Topic.subscribe` does not take."""
    validate_subscription_name(name)
    if type_ not in _TYPES:
        raise InvalidArgument("type", type_, f"expected one of {', '.join(_TYPES)}")
    if initial_position not in _POSITIONS:
        raise InvalidArgument("initial_position", initial_position, f"expected one of {', '.join(_POSITIONS)}")
    if failover is not None and (not isinstance(failover, Failover) or type_ != "failover"):
        raise InvalidArgument("failover", failover, "expected a Failover, for type='failover'")
    if key_shared is None:
        return
    if not isinstance(key_shared, KeyShared) or type_ not in ("shared", "key_shared"):
        raise InvalidArgument("key_shared", key_shared, "expected a KeyShared, for type='key_shared' or 'shared'")
    alone = key_shared.order_by is not None and key_shared.ranges is None and not key_shared.out_of_order
    if type_ == "shared" and not alone:
        raise InvalidArgument("key_shared", key_shared, "a shared subscription takes `order_by` alone")
