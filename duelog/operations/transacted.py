"""The operations of a transaction, asked for by name: bound once, whatever they are written in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from duelog.store.errors import InvalidArgument

from .operation import Operation, Right

TRANSACTED = ("send", "ack", "cancel", "cancel_key", "reschedule", "put_document", "delete_document")
"""Methods of a `Transaction`."""


def transact(transaction: Any, operations: Iterable[object], *, in_json: bool) -> list[Any]:
    """Do operations together or not at all: {"operation": NAME, ...} with arguments as of `Transaction`; their results.

    in_json: their values are in JSON; then an error tells the place of its operation too. Raises InvalidArgument, and
    as the transaction.
    """
    results = []
    with transaction:
        for at, given in enumerate(operations):
            if not isinstance(given, Mapping) or given.get("operation") not in TRANSACTED:
                expected = f'expected an object with "operation", one of {", ".join(TRANSACTED)}'
                raise InvalidArgument(f"operations[{at}]", given, expected)
            arguments = {name: value for name, value in given.items() if name != "operation"}
            operation = _operation(transaction.__class__, given["operation"])
            try:
                results.append(operation.call(transaction, arguments, in_json=in_json))
            except InvalidArgument as error:
                field = f"operations[{at}].{error.field}" if in_json else error.field
                raise InvalidArgument(field, error.value, error.reason) from None
    return [None if result is None else result.value for result in results]


@cache
def _operation(kind: type, name: str) -> Operation:
    return Operation(getattr(kind, name), Right.ADMIN)
