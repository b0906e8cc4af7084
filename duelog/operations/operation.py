"""One operation of an open store, declared by a typed method: its name, arguments, result, and who may ask for it."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache, cached_property
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from duelog.store.errors import InvalidArgument

from .json_form import from_json, to_json

Method: TypeAlias = Callable[..., object]
C = TypeVar("C", bound=Method)

Ask: TypeAlias = Callable[[str, Mapping[str, object]], Any]
"""Does an operation by its name with arguments in JSON, and returns its result in JSON."""


class Right(Enum):
    """Permission that a caller needs in the namespace of the topic; ADMIN is that of the whole store."""

    NONE = "none"
    """Needed by nothing of the table: going on with what was allowed."""
    READ = "read"
    """Granted with either of PRODUCE and CONSUME."""
    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


class Operation:
    """A row of the table.

    `parameters` and `result` are annotated types, resolved when they are first needed: a command that asks another
    process imports what its own operation names, and not the engine.
    """

    def __init__(
        self, name: str, method: Method | str, right: Right, *, looks: bool = False, like: Operation | None = None
    ) -> None:
        """method: `Class.method` of the face, or itself. like: the operation whose arguments its `**` takes."""
        self.name = name
        self.right = right
        self.looks = looks
        """It changes nothing: a role that may only look may ask for it, and a page may ask again and again."""
        self._given = method
        self._like = like

    @cached_property
    def _method(self) -> Method:
        return _face_method(self._given) if isinstance(self._given, str) else self._given

    @property
    def streamed(self) -> bool:
        """The result is a sequence that is made while it is read."""
        return str(self._method.__annotations__["return"]).removeprefix("collections.abc.").startswith("Iterator[")

    @cached_property
    def signature(self) -> Signature:
        """Arguments after `self`, with their defaults."""
        own = [each for each in self._own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        if self._like is not None:
            known = {each.name for each in own}
            others = [each for name, each in self._like.signature.parameters.items() if name not in known]
            own += [each.replace(kind=Parameter.KEYWORD_ONLY) for each in others]
        return Signature(own)

    @cached_property
    def _own(self) -> Signature:
        return Signature(list(signature(self._method).parameters.values())[1:])

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self._method, localns=_face_names(self._method))

    @property
    def parameters(self) -> dict[str, Any]:
        """Types of the arguments by name."""
        kinds = self._hints if self._like is None else {**self._like.parameters, **self._hints}
        return {name: kinds.get(name, str) for name in self.signature.parameters}

    @property
    def result(self) -> Any:
        """Type of the result; of a streamed one, of each element."""
        kind = self._hints["return"]
        return get_args(kind)[0] if get_origin(kind) is Iterator else kind

    def answer(self, operations: object, arguments: Mapping[str, Any]) -> object:
        """Do it with arguments in JSON; the result in JSON, an iterator if it is streamed. Raises InvalidArgument."""
        result = self.call(operations, arguments)
        return map(to_json, result) if self.streamed else to_json(result)

    def call(self, operations: object, arguments: Mapping[str, Any], *, in_json: bool = True) -> Any:
        """Do it with arguments by name, in JSON or as they are; the result as the method returns it.

        Raises InvalidArgument.
        """
        try:
            self.signature.bind(**arguments)
        except TypeError as error:
            raise InvalidArgument("arguments", dict(arguments), f"{self.name}: {error}") from None
        if in_json:
            kinds = self.parameters
            arguments = {name: from_json(kinds[name], value, name) for name, value in arguments.items()}
        return getattr(operations, self.name)(**arguments)

    def ask(self, ask: Callable[[str, Mapping[str, object]], Any], *given: object, **named: object) -> Any:
        """Have it done elsewhere, by a function that takes and gives JSON; the result as the method returns it."""
        arguments = self._own.bind(*given, **named).arguments
        for each in self._own.parameters.values():
            if each.kind is Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(each.name, {})
        answer = ask(self.name, {name: to_json(value) for name, value in arguments.items()})
        if self.streamed:
            return (from_json(self.result, each, self.name) for each in answer)
        return from_json(self.result, answer, self.name)


@cache
def signature_of(method: Method) -> Signature:
    """The signature of a method, which is made once."""
    return signature(method)


def _face_names(method: Method) -> dict[str, Any]:
    """Import what a method's annotations name of the public face and of figures, beside what its module has."""
    texts = [each for each in method.__annotations__.values() if isinstance(each, str)]  # those not evaluated
    names = set(re.findall(r"\w+", " ".join(texts)))
    face, known = sys.modules["duelog"], method.__globals__
    return {
        name: getattr(face if name in face.__all__ else import_module("duelog.stats"), name)
        for name in names
        if name not in known and not hasattr(builtins, name)
    }


def _face_method(member: str) -> Any:
    owner, method = member.split(".")
    home = import_module("duelog.upkeep.jobs") if owner == "Jobs" else sys.modules["duelog"]
    return getattr(getattr(home, owner), method)


def operation(right: Right, *, looks: bool = False, like: Method | str | None = None) -> Callable[[C], C]:
    """Declare a method as an operation; one that READs looks.

    like: a method of the face (`Class.method`), or an operation, whose arguments its `**` takes. REQUIRES: its
    annotations are names of its module or of `_face_names`.
    """
    other = Operation(like, like, right) if isinstance(like, str) else getattr(like, "operation", None)

    def declare(method: C) -> C:
        row = Operation(method.__name__, method, right, looks=looks or right is Right.READ, like=other)
        method.operation = row  # type: ignore[attr-defined]
        return method

    return declare
