"""Policies (PIP-437 and more): the settings that a store keeps for itself, what may be set where, what is in force.

Four scopes: the store, a namespace, a topic, a subscription. Each field is taken from the narrowest scope that sets it,
so that a topic's zero turns off what its namespace asks for. Which scope that is, is remembered with the value, for
audits and for the error that a producer gets.

Pure values here: `policy_records.py` has the rows, and the engine caches what is in force.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..config import StoreConfig
from ..duration import OptionalMilliseconds, take_plain
from ..errors import DelayTooLong, InvalidArgument
from ..message import MAX_DUE_MS
from ..names import TopicName

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_INT64_MAX = 2**63 - 1
_DAY_MS = 86_400_000

PolicyValue = bool | int | str
PolicyChange = PolicyValue | timedelta | None
"""Value that may be set for a field: a ``timedelta`` becomes ms, None unsets it."""

_NUMBERS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "tick_time_ms": (0, 0, MAX_DUE_MS),
        "max_delivery_delay_ms": (0, 0, MAX_DUE_MS),
        "fixed_delivery_delay_ms": (0, 0, MAX_DUE_MS),
        "retention_ms": (0, 0, _INT64_MAX),
        "retention_bytes": (0, 0, _INT64_MAX),
        "ttl_ms": (0, 0, _INT64_MAX),
        "max_redeliveries": (-1, -1, 2**32 - 1),
        "ack_timeout_ms": (0, 0, _INT64_MAX),
        "nack_backoff_ms": (1_000, 0, _DAY_MS),
        "nack_backoff_max_ms": (60_000, 0, _DAY_MS),
        "max_in_flight": (0, 0, 2**32 - 1),
        "max_pending": (0, 0, _INT64_MAX),
    }
)
"""Default, lowest and highest value of each field that is a number."""


_NOT_SET: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class DelayedDeliveryPolicies:
    """The delay policies of one scope (PIP-437); a field that is None is not set there.

    active: False delivers messages at once whatever delay they ask for, and no other delay policy applies.
    tick_time_ms: Pulsar's tick, in ms. Firing is exact here and no message is ever early, so a tick of 0 or 1 is
        exact too; a larger one rounds due times up to the next multiple of it (counted from the epoch), so that
        messages of one tick are fired together, late by less than a tick.
    max_delivery_delay_ms: longest delay a producer may ask for, in ms; a longer one is refused with DelayTooLong.
        0: no limit.
    fixed_delivery_delay_ms: the delay of every message in ms, whatever its producer asked for, and beside the
        maximum; not to be set for the whole store. 0: none.

    They hold for what producers send and reschedule. A retry (`Subscription.retry_later`) goes by them too, but for the
    fixed delay. Occurrences of a schedule are due by their timetable, and dead letters, also requeued ones, at once.

    Equal to others, and to `Policies`, that set the same fields to the same values. Raises InvalidArgument naming
    the field.
    """

    active: bool | None = None
    tick_time_ms: OptionalMilliseconds = _NOT_SET
    max_delivery_delay_ms: OptionalMilliseconds = _NOT_SET
    fixed_delivery_delay_ms: OptionalMilliseconds = _NOT_SET

    def __post_init__(self) -> None:
        take_plain(self)
        for name, value in self.fields_set().items():
            check_value(name, value)

    def fields_set(self) -> dict[str, PolicyValue]:
        """The fields that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DelayedDeliveryPolicies):
            return NotImplemented
        return self.fields_set() == other.fields_set()

    def __hash__(self) -> int:
        return hash(tuple(self.fields_set().items()))


@dataclass(frozen=True, slots=True, eq=False)
class Policies(DelayedDeliveryPolicies):
    """Everything that may be set at one scope; a field that is None is not set there, and a wider scope has its say.

    Times are in ms, or a ``timedelta`` that becomes one.

    "Off" is a value, so that a narrower scope can turn off what a wider one sets: 0 for times and sizes, -1 for
    `max_redeliveries`, "" for `dead_letter_topic`. The first four fields are those of `DelayedDeliveryPolicies`.

    For the store, a namespace or a topic:

    retention_ms: how long acknowledged ledgers of a main log are kept, from when they are closed; 0: not by age.
    retention_bytes: how many bytes of the newest acknowledged ledgers of a main log are kept; 0: not by size. A
        ledger is kept as long as either asks for it. Both cost disk only, and allow seeking back.
    max_pending: how many messages of a topic may be pending, that is not due yet; a send that would make it more is
        refused whole with QuotaExceeded. Retries, requeued dead letters and occurrences of schedules count, and are not
        refused. 0: no limit.
    replicated: True: what is sent, cancelled and acknowledged durably is told once it is in the store's copy
        (`StoreConfig.replica`); False: once it is on this machine. Where no scope sets it, `StoreConfig.durability`
        says it.

    For a subscription too:

    ttl_ms: how long after its due time an unacknowledged message counts as acknowledged, and is not handed out any
        more; 0: for ever.
    max_redeliveries: deliveries after the first before a message goes to the dead-letter topic; -1: no limit.
    dead_letter_topic: name of the dead-letter topic; "": ``<topic>-<subscription>-DLQ``.
    ack_timeout_ms: a message handed out and not acknowledged for this long is delivered again; 0: when its consumer
        closes.
    nack_backoff_ms: a message given back without a delay is handed out again after this, doubled with each
        redelivery.
    nack_backoff_max_ms: the most that it is doubled to.
    max_in_flight: how many messages one consumer may hold unacknowledged; it is handed no more until it acknowledges
        or gives back some. 0: no limit. Readers have none.

    Raises InvalidArgument naming the field.
    """

    retention_ms: OptionalMilliseconds = _NOT_SET
    retention_bytes: int | None = None
    ttl_ms: OptionalMilliseconds = _NOT_SET
    max_redeliveries: int | None = None
    dead_letter_topic: str | None = None
    ack_timeout_ms: OptionalMilliseconds = _NOT_SET
    nack_backoff_ms: OptionalMilliseconds = _NOT_SET
    nack_backoff_max_ms: OptionalMilliseconds = _NOT_SET
    max_in_flight: int | None = None
    max_pending: int | None = None
    replicated: bool | None = None


DELAY_FIELDS = tuple(field.name for field in fields(DelayedDeliveryPolicies))
POLICY_FIELDS = tuple(field.name for field in fields(Policies))
CONFIG_FIELDS = tuple(name for name in POLICY_FIELDS if name in {field.name for field in fields(StoreConfig)})
"""Fields that `StoreConfig` has the defaults of."""

_OF_TOPICS = (*DELAY_FIELDS, "retention_ms", "retention_bytes", "max_pending", "replicated")
SUBSCRIPTION_FIELDS = tuple(name for name in POLICY_FIELDS if name not in _OF_TOPICS)
"""Fields that may be set for a subscription: it has no log of its own, and no producer sends to it."""

_DEFAULTS: dict[str, PolicyValue] = {
    "active": True,
    "replicated": False,
    "dead_letter_topic": "",
    **{name: default for name, (default, _, _) in _NUMBERS.items()},
}
DEFAULTS: Mapping[str, PolicyValue] = MappingProxyType({name: _DEFAULTS[name] for name in POLICY_FIELDS})
"""Values in force where no scope sets a field: `StoreConfig`'s own defaults, as values of policies."""

KEEP_ALL: Mapping[str, PolicyValue] = MappingProxyType({**DEFAULTS, "retention_ms": _INT64_MAX})
"""Values in force in a store whose record of defaults is lost: it keeps everything."""


def delay_part(policies: DelayedDeliveryPolicies) -> DelayedDeliveryPolicies:
    """The delay policies among what is set."""
    return DelayedDeliveryPolicies(*(getattr(policies, name) for name in DELAY_FIELDS))


def check_value(name: str, value: object) -> None:
    """Refuse what is no value of a field, or no field; None is one of each. Raises InvalidArgument naming it."""
    if value is None and name in POLICY_FIELDS:
        return
    if name in ("active", "replicated"):
        if not isinstance(value, bool):
            raise InvalidArgument(name, value, "expected True, False or None")
    elif name == "dead_letter_topic":
        if value != "":
            try:
                TopicName.parse(value)  # type: ignore[arg-type]  # parse refuses what is no str
            except InvalidArgument as error:
                raise InvalidArgument(name, value, error.reason) from None
    elif name in _NUMBERS:
        _, lowest, highest = _NUMBERS[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(name, value, "expected an int, or None")
        if not lowest <= value <= highest:
            raise InvalidArgument(name, value, f"expected {lowest} to {highest}")
    else:
        raise InvalidArgument("policy", name, f"expected one of {', '.join(POLICY_FIELDS)}")


def of_config(config: StoreConfig) -> Policies:
    """The policies of a store that is made with `config`: what differs from the defaults is set, the rest is not."""
    return Policies(**{name: value for name, value in _in_config(config).items() if value != DEFAULTS[name]})  # type: ignore[arg-type]


def _in_config(config: StoreConfig) -> dict[str, PolicyValue]:
    """A configuration's defaults of a store in the values of policies: its None is "off"."""
    given = {name: getattr(config, name) for name in CONFIG_FIELDS}
    return {name: DEFAULTS[name] if value is None else value for name, value in given.items()}


@dataclass(frozen=True, slots=True)
class EffectivePolicies:
    """The policies in force for a topic, or one of its subscriptions: every field has a value; see `Policies`.

    set_at: by field name, where its value comes from: "default", "store", "namespace tenant/namespace",
    "topic persistent://tenant/namespace/name" or "subscription NAME of topic persistent://tenant/namespace/name".
    """

    active: bool
    tick_time_ms: int
    max_delivery_delay_ms: int
    fixed_delivery_delay_ms: int
    retention_ms: int
    retention_bytes: int
    ttl_ms: int
    max_redeliveries: int
    dead_letter_topic: str
    ack_timeout_ms: int
    nack_backoff_ms: int
    nack_backoff_max_ms: int
    max_in_flight: int
    max_pending: int
    replicated: bool
    set_at: Mapping[str, str]

    @property
    def is_plain(self) -> bool:
        """True where due times are taken as they are asked for."""
        return (
            self.active
            and self.tick_time_ms <= 1
            and not self.max_delivery_delay_ms
            and not self.fixed_delivery_delay_ms
        )

    def apply(self, dues: npt.NDArray[np.int64], now_ms: int) -> npt.NDArray[np.int64]:
        """The due times that messages get which ask for `dues` at `now_ms` (a due time by then: no delay).

        None is earlier than asked, unless delays are off or fixed. Raises DelayTooLong with the longest delay
        asked; then all are refused. O(messages), in numpy.
        """
        import numpy as np  # noqa: PLC0415 - a command that sends no columns does without

        if not self.active:
            return np.full(len(dues), now_ms, dtype=np.int64)
        if self.fixed_delivery_delay_ms:
            dues = np.full(len(dues), min(now_ms + self.fixed_delivery_delay_ms, MAX_DUE_MS), dtype=np.int64)
        elif self.max_delivery_delay_ms and len(dues):
            longest_ms = int(dues.max()) - now_ms
            if longest_ms > self.max_delivery_delay_ms:
                raise DelayTooLong(longest_ms, self.max_delivery_delay_ms, self.set_at["max_delivery_delay_ms"])
        if self.tick_time_ms > 1:
            tick_ms = self.tick_time_ms
            rounded = np.minimum(-(-dues // tick_ms) * tick_ms, MAX_DUE_MS)
            dues = np.where(dues > now_ms, rounded, dues)
        return dues

    def overridden(self, dues: npt.NDArray[np.int64], now_ms: int) -> npt.NDArray[np.bool_]:
        """Mask the messages whose own delay, asked for by `dues` at `now_ms`, the fixed one replaces."""
        import numpy as np  # noqa: PLC0415 - a command that sends no columns does without

        if not (self.active and self.fixed_delivery_delay_ms):
            return np.zeros(len(dues), dtype=np.bool_)
        fixed_ms = min(now_ms + self.fixed_delivery_delay_ms, MAX_DUE_MS)
        in_place: npt.NDArray[np.bool_] = (dues > now_ms) & (dues != fixed_ms)
        return in_place

    def over_limit(self, dues: npt.NDArray[np.int64], now_ms: int) -> int:
        import numpy as np  # noqa: PLC0415 - a command that sends no columns does without

        return int(np.count_nonzero(dues - now_ms > self.max_delivery_delay_ms))


def merge(
    scopes: Sequence[tuple[str, DelayedDeliveryPolicies]], defaults: Mapping[str, PolicyValue] = DEFAULTS
) -> EffectivePolicies:
    """Merge the policies of scopes, the narrowest first, each with its name for `set_at`, over `defaults`."""
    values = dict(defaults)
    set_at = dict.fromkeys(POLICY_FIELDS, "default" if defaults is DEFAULTS else "nothing recorded yet")
    for where, policies in reversed(scopes):
        for name, value in policies.fields_set().items():
            values[name] = value
            set_at[name] = where
    return EffectivePolicies(**values, set_at=MappingProxyType(set_at))  # type: ignore[arg-type]
