"""The part of the table that is the public face itself: which methods another process may call, and who may.

A method is written once, in its class; a row of this table offers it under `Class.method`, with its own arguments and
result. What is not in it (`NOT_OFFERED`) is had only in the process that has the store open, and says so by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from duelog.store.errors import InvalidArgument

from .json_form import to_json
from .operation import Operation, Right

_READ, _PRODUCE, _CONSUME, _ADMIN = Right.READ, Right.PRODUCE, Right.CONSUME, Right.ADMIN

_OFFERED: dict[str, dict[Right, str]] = {
    "DelayedStore": {
        _READ: "effective_policies timeline topic_rows",
        _CONSUME: "dead_letters* requeue_dead_letters purge_dead_letters receiving*",
        _PRODUCE: "send_batch",
        _ADMIN: "transaction topics* create_topics* delete_topic set_policies update_policies policies* all_policies* "
        "remove_policies accept_clock hand_over save_snapshots* save_manifest* flush* stats* suspended* partitions* "
        "kept_by* snapshots* overview* timeline_by_topic* calendar* connections*",
    },
    "Documents": {_ADMIN: "get* put delete items*"},
    "Topic": {
        _READ: "producer_number state position_of positions ledgers get scheduled count keys find schedules "
        "subscriptions exists stats",
        _PRODUCE: "send send_batch send_payloads create* cancel* cancel_batch* reschedule reschedule_batch fire_now "
        "cancel_key cancel_keys every* pause_schedule* resume_schedule* remove_schedule",
        _CONSUME: "subscribe reader unsubscribe clear_inline",
    },
    "Producer": {_PRODUCE: "last_sequence_id* send send_batch"},
    "SubscriptionAdmin": {_CONSUME: "peek* skip expire reset pause* resume* stats* tasks*"},
    "Subscription": {
        _CONSUME: "receive* ack* ack_cumulative* nack extend* nack_all retry_later dead_letter seek pause* resume* "
        "stats* active* paused* max_in_flight* hands_alike* held* holds report_task* close*"
    },
}
"""Names by class and right; over TCP what is the whole store's takes ADMIN, whatever it is here.

`*`: it may be done twice, with the same result for what is stored, as all that READs.
"""

NOT_OFFERED: Mapping[str, str] = {
    "DelayedStore": "config clock jobs listen on_topics tick check backup report_to",
    "Topic": "sender put",
    "Producer": "send_encoded",
    "Subscription": "poll poll_columns polls_at_once add_waker remove_waker wait",
}
"""Names by class that only the process has that has the store open: its clock and what drives it, its files, callbacks.

The store's `close`, from outside, closes the connection alone.
"""

ONCE = frozenset(
    {"DelayedStore.send_batch", "Documents.put", "Documents.delete", "Topic.cancel_key", "Topic.reschedule"}
)
"""Operations that a client numbers, so that they are done once however often it asks."""


class Row(NamedTuple):
    """One operation: a method, or a property, of a class of the face."""

    owner: str
    method: str
    right: Right
    repeated: bool
    """True where a client may ask again when it does not know whether it was done."""

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.method}"


FACE: Mapping[str, Row] = {
    f"{owner}.{(method := marked.rstrip('*'))}": Row(owner, method, right, right is _READ or method != marked)
    for owner, rows in _OFFERED.items()
    for right, methods in rows.items()
    for marked in methods.split()
}
"""The rows by name."""

_NAMED_BY = {"Topic": ("topic",), "SubscriptionAdmin": ("topic", "subscription")}
"""Arguments that say which object of a class is meant, where the store has many."""


def object_of(store: Any, row: Row, target: Sequence[Any], topic: Callable[[Any], Any]) -> Any:
    """The object whose method a row is. topic: finds one by its name. Raises InvalidArgument."""
    match row.owner, target:
        case "DelayedStore", []:
            return store
        case "Documents", []:
            return store.documents
        case "Jobs", []:
            return store.jobs
        case "Topic", [name]:
            return topic(name)
        case "Producer", [name, producer]:
            return topic(name).producer(producer)
        case "SubscriptionAdmin", [name, subscription]:
            return topic(name).subscription(subscription)
    raise InvalidArgument("target", target, f"{row.name} has another")


class FaceOperation(Operation):
    """A method of the face, offered as an operation; the arguments before its own say which object is meant."""

    def __init__(self, row: Row, looks: bool) -> None:
        super().__init__(row.method, row.name, row.right, looks=looks)
        self._row = row

    def __set_name__(self, operations: type, name: str) -> None:
        self.name, self.operation = name, self

    def __get__(self, operations: Any, kind: type) -> Any:
        return self if operations is None else partial(self._do, operations._store)

    @cached_property
    def _own(self) -> Signature:
        before = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in _NAMED_BY.get(self._row.owner, ())]
        return Signature([*before, *super()._own.parameters.values()])

    def ask(self, ask: Callable[[str, Mapping[str, object]], Any], *given: object, **named: object) -> Any:
        """Have it done elsewhere; the result in JSON, as its type is the engine's, and so are names of arguments."""
        arguments = self._own.bind(*given, **named).arguments if given else named
        return ask(self.name, {name: to_json(value) for name, value in arguments.items()})

    def _do(self, store: Any, *given: Any, **named: Any) -> Any:
        arguments = self._own.bind(*given, **named).arguments
        target = [arguments.pop(each) for each in _NAMED_BY.get(self._row.owner, ())]
        return getattr(object_of(store, self._row, target, store.topic), self._row.method)(**arguments)


def offered(member: str, right: Right | None = None, *, looks: bool = False) -> Any:
    """Offer a method of the face, or of `Jobs`, as an operation as it is. member: `Class.method`.

    right: another than by `duelog.connect`.
    """
    owner, method = member.split(".")
    row = Row(owner, method, right or FACE[member].right, repeated=False)
    return FaceOperation(row, looks or row.right is _READ)
