"""The operations of a transaction, asked for by name: bound once, whatever they are written in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from duelog.store.errors import DocumentChanged, InvalidArgument, TransactionConflict, checked_list

from .operation import Operation, Right
from .wire import Disconnected

TRANSACTED = ("send", "ack", "cancel", "cancel_key", "reschedule", "put_document", "delete_document")
"""Methods of a `Transaction`."""


def transact(transaction: Any, operations: Iterable[object], *, in_json: bool) -> list[Any]:
    """Do operations together or not at all: {"operation": NAME, ...} with arguments as of `Transaction`; their results.

    in_json: their values are in JSON; then an error tells the place of its operation too. Raises InvalidArgument, and
    as the transaction.
    """
    results = []
    with transaction:
        for at, given in enumerate(checked_list("operations", operations, "a list of operations")):
            if not isinstance(given, Mapping) or given.get("operation") not in TRANSACTED:
                expected = f'expected an object with "operation", one of {", ".join(TRANSACTED)}'
                raise InvalidArgument(f"operations[{at}]", given, expected)
            arguments = {name: value for name, value in given.items() if name != "operation"}
            operation = _operation(transaction.__class__, given["operation"])
            try:
                results.append(operation.call(transaction, arguments, in_json=in_json))
            except InvalidArgument as error:
                if not in_json:
                    raise
                raise InvalidArgument(f"operations[{at}].{error.field}", error.value, error.reason) from None
    if transaction.stored_before:
        raise Disconnected("the transaction is stored; its results were lost with the connection", stored=True)
    return [None if result is None else result.value for result in results]


def changed_once(transaction: Any, change: str, arguments: Iterable[Any], named: dict[str, Any]) -> Any:
    """Cancel by key or reschedule in a numbered transaction; the result as of `Topic`.

    Raises Disconnected where it is done already, and the new id not known any more.
    """
    try:
        with transaction:
            result = getattr(transaction, change)(*arguments, **named)
    except TransactionConflict as error:
        if error.operation != result.operation:
            raise
        return False if change == "cancel_key" else None
    if not transaction.stored_before:
        return result.value
    if change == "cancel_key":
        return True
    raise Disconnected("the message is rescheduled; its new id was lost with the connection", stored=True)


def document_once(transaction: Any, change: str, documents: Any, key: str, *value: Any, **expected: Any) -> Any:
    """Put or delete a document in a numbered transaction; the result as of `Documents`, DocumentChanged too.

    Raises Disconnected where it is done already, and the result not known any more.
    """
    try:
        with transaction:
            result = getattr(transaction, f"{change}_document")(key, *value, **expected)
    except TransactionConflict:
        found = documents.get(key)
        raise DocumentChanged(key, expected["expected"], found and found.version) from None
    if not transaction.stored_before:
        return result.value
    raise Disconnected(f"the {change} of a document is stored; its result was lost with the connection", stored=True)


@cache
def _operation(kind: type, name: str) -> Operation:
    return Operation(name, getattr(kind, name), Right.ADMIN)
