"""The threads in which the calls of one store run, and methods that run in them: some for commits, some for looking.

A method of this face is made from the one of `duelog` that it awaits, with its arguments, types and docstring.
"""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
Face = TypeVar("Face")
Inner_co = TypeVar("Inner_co", covariant=True)

_COMMIT_THREADS = 16
_LOOK_THREADS = 4
_PAGE = 500
"""Items of an iteration fetched by one thread at a time."""


class Threads:
    """Where the calls of one store run."""

    def __init__(self) -> None:
        self._commits = ThreadPoolExecutor(_COMMIT_THREADS, thread_name_prefix="duelog-aio")
        self._looks = ThreadPoolExecutor(_LOOK_THREADS, thread_name_prefix="duelog-aio-look")

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a call that may wait for the disk."""
        return await asyncio.wrap_future(self.start(call, *args, **kwargs))

    def start(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._commits.submit(call, *args, **kwargs)

    def look(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A call that reads."""
        return self._looks.submit(call, *args, **kwargs)

    async def iterate(self, make: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
        items = await self.run(make)
        while page := await self.run(lambda: list(islice(items, _PAGE))):
            for item in page:
                yield item

    def close(self) -> None:
        self._commits.shutdown(wait=False)
        self._looks.shutdown(wait=False)


def close_result(made: Future[Any]) -> None:
    """Close what a cancelled call has opened."""
    if not made.cancelled() and made.exception() is None and hasattr(made.result(), "close"):
        made.result().close()


class InThreads(Generic[Inner_co]):
    """An object of `duelog`, with the threads in which its methods run."""

    def __init__(self, inner: Inner_co, threads: Threads) -> None:
        self._inner = inner
        self._threads = threads

    def __repr__(self) -> str:
        return f"<aio {self._inner!r}>"


class Same(Generic[T]):
    """A property that is the one of the same name in `duelog`, at once: it waits for nothing."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, face: InThreads[Any] | None, owner: type) -> T:
        return cast("T", self if face is None else getattr(face._inner, self._name))


def in_thread(
    method: Callable[Concatenate[Inner_co, P], T],
) -> Callable[Concatenate[InThreads[Inner_co], P], Coroutine[Any, Any, T]]:
    """Make an awaitable method from one of `duelog`: it runs in a thread, with its arguments and its docstring."""

    @functools.wraps(method)
    async def call(self: InThreads[Inner_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(_own(self, method), *args, **kwargs)

    return call


def _own(face: InThreads[Any], method: Callable[Concatenate[Any, P], T]) -> Callable[P, T]:
    """The method of this name that the object has: that of a connected store is another."""
    return cast("Callable[P, T]", getattr(face._inner, method.__name__))


def made_in_thread(
    method: Callable[Concatenate[Inner_co, P], T], face: Callable[[T, Threads], Face]
) -> Callable[Concatenate[InThreads[Inner_co], P], Coroutine[Any, Any, Face]]:
    """Make an awaitable method from one of `duelog` that gives an object; `face` makes that of duelog.aio."""

    @functools.wraps(method)
    async def call(self: InThreads[Inner_co], /, *args: P.args, **kwargs: P.kwargs) -> Face:
        made = self._threads.start(_own(self, method), *args, **kwargs)
        try:
            return face(await asyncio.wrap_future(made), self._threads)
        except asyncio.CancelledError:
            made.add_done_callback(close_result)
            raise

    return call


def iterated(
    method: Callable[Concatenate[Inner_co, P], Iterator[T]],
) -> Callable[Concatenate[InThreads[Inner_co], P], AsyncIterator[T]]:
    """Make an asynchronous iterator from a method of `duelog` that gives an iterator."""

    @functools.wraps(method)
    def iterate(self: InThreads[Inner_co], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self._threads.iterate(lambda: _own(self, method)(*args, **kwargs))

    iterate.__doc__ = f"{inspect.getdoc(method)}\n\nFor `async for`; a page at a time is read in a thread."
    return iterate


def listed(
    method: Callable[Concatenate[Inner_co, P], Iterator[T]],
) -> Callable[Concatenate[InThreads[Inner_co], P], Coroutine[Any, Any, list[T]]]:
    """Make an awaitable method from one of `duelog` that gives an iterator: it gives a list."""

    @functools.wraps(method)
    async def call(self: InThreads[Inner_co], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return await self._threads.run(lambda: list(_own(self, method)(*args, **kwargs)))

    call.__doc__ = f"{inspect.getdoc(method)}\n\nA list. One thread looks to the end, also if the await is cancelled."
    return call


def explained_by(face: Callable[..., object]) -> Callable[[T], T]:
    """Complete the docstring of a method by that of the face: all but its first line, arguments and errors."""

    def explain(method: T) -> T:
        rest = (inspect.getdoc(face) or "").partition("\n\n")[2]  # python -OO has no docstrings
        method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\n{rest}".rstrip()
        return method

    return explain
