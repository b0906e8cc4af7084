"""The port to object storage: log objects that are created if absent, and files, under one prefix. By obstore.

Whoever makes the log goes by one promise of the store, that of two creators of a name one is refused. An append ends in
one of three ways: it is stored (`append` returns), the number is taken (AlreadyThere), or nobody knows (Unreachable);
`Shipping` settles the last two. The client does not try an append again by itself.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from duelog.store.errors import InvalidArgument, ReplicaUnreachable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

LOG, MANIFESTS, FILES, COMPACTED = "log", "snap", "files", "compacted"
"""Folders under the prefix."""

_TIMEOUTS: dict[str, Any] = {"timeout": "30s", "connect_timeout": "5s", "allow_http": True}
_NO_RETRIES: dict[str, Any] = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL")
_LONGEST_REASON = 300
_PIECE_BYTES = 1 << 20
_PAGE = 1_000
"""Objects of one request of a listing, or of a removal."""
_AHEAD = 16
"""Log objects that are read at once: each takes the time of an answer, however small it is."""


Content = bytes | Sequence[bytes | bytearray | memoryview]
"""The content of an object, whole or in parts."""


class AlreadyThere(Exception):
    """The number of a log object is taken."""


class Listed(NamedTuple):
    """An object of a listing."""

    name: str
    size: int
    modified: datetime


def check_url(field: str, url: object) -> None:
    """Raise InvalidArgument for a place that is no URL of object storage, or has credentials in it, which are shown."""
    if not isinstance(url, str):
        raise InvalidArgument(field, url, "expected a str")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        shown = f"{parts.scheme}://..."
        raise InvalidArgument(field, shown, "expected no credentials in it: they come from the environment")
    if not re.fullmatch(r"(s3|s3a|gs|az|abfs|abfss)://[^/]+/.+|file:///.+|memory:///.*", url):
        expected = "expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory"
        raise InvalidArgument(field, url, expected)


class Bucket:
    """The objects under one prefix. Thread-safe. Each call raises ReplicaUnreachable where there is no answer."""

    def __init__(self, url: str, store: ObjectStore | None = None) -> None:
        """`store`: in place of the one that `url` names. Raises InvalidArgument, also where obstore is missing."""
        check_url("replica", url)
        self.url = url
        try:
            import obstore  # noqa: PLC0415 - an extra, and only a store with a replica needs it
            import obstore.exceptions  # noqa: PLC0415
            import obstore.store  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise InvalidArgument("replica", url, "needs pip install 'duelog[replica]'") from error
        self._api = obstore
        self._taken = obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError
        self._failed = obstore.exceptions.BaseError
        self._check: Callable[[], None] = lambda: None
        if store is None:
            options: dict[str, Any] = {"client_options": _TIMEOUTS, "retry_config": _NO_RETRIES}
            if url.startswith("file:"):
                options = {"mkdir": True, "automatic_cleanup": True}
            elif url.startswith("memory:"):
                options = {}
            with self._answered():
                store = obstore.store.from_url(url, **options)
        self._store = store

    def checked(self, check: Callable[[], None]) -> Bucket:
        """The same objects, by calls that raise what `check` raises, also between the pages of a listing."""
        bucket = copy(self)
        bucket._check = check
        return bucket

    @contextmanager
    def _answered(self) -> Iterator[None]:
        self._check()
        try:
            yield
        except (self._failed, OSError, ValueError) as error:
            raise ReplicaUnreachable(self.url, _reason(error)) from None  # what it was has requests, and their headers

    # -- the log -----------------------------------------------------------------------------------

    def append(self, seq: int, content: Content) -> None:
        """Create the log object of a number. Raises AlreadyThere; ReplicaUnreachable: it may be there, or come yet."""
        self.create(log_name(seq), content)

    def read(self, seq: int) -> bytes | None:
        """The log object of a number; None: there is none."""
        return self.get(log_name(seq))

    def read_each(self, start: int, limit: int) -> Iterator[bytes | None]:
        """The log objects of numbers from `start` to before `limit`, in order, some of them read ahead."""
        if limit - start < 2:
            yield from map(self.read, range(start, limit))
            return
        numbers = iter(range(start, limit))
        with ThreadPoolExecutor(_AHEAD, "duelog-replica-read") as threads:
            try:
                ahead = deque(threads.submit(self.read, number) for number in islice(numbers, _AHEAD))
                while ahead:
                    content = ahead.popleft().result()
                    ahead += [threads.submit(self.read, number) for number in islice(numbers, 1)]
                    yield content
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def numbers(self, start: int = 0) -> list[int]:
        """The numbers of log objects from `start` on, ascending."""
        return self._numbers(LOG, start)

    def manifests(self) -> list[int]:
        """The numbers that manifests stand at, ascending."""
        return self._numbers(MANIFESTS, 0)

    def _numbers(self, folder: str, start: int) -> list[int]:
        offset = f"{folder}/{start - 1:016d}" if start else None
        names = [each.name.rpartition("/")[2] for each in self.listing(folder, offset)]
        return sorted(int(name) for name in names if re.fullmatch("[0-9]{16}", name) and int(name) >= start)

    # -- files -------------------------------------------------------------------------------------

    def create(self, name: str, content: Content) -> None:
        """Create an object that is not there. Raises as `append`."""
        try:
            with self._answered():
                try:
                    self._api.put(self._store, name, content, mode="create", use_multipart=False)
                except self._taken as error:
                    raise AlreadyThere(name) from error
        except NotImplementedError as error:
            raise InvalidArgument("replica", self.url, "this store cannot create an object if absent") from error

    def put(self, name: str, content: Content | Path) -> None:
        """Create or replace an object, by a file in parts where it is large."""
        with self._answered():
            self._api.put(self._store, name, content)

    def get(self, name: str) -> bytes | None:
        """The content of an object; None: there is none."""
        with self._answered():
            try:
                return bytes(self._api.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def download(self, name: str) -> Iterator[bytes] | None:
        """The content of an object in pieces; None: there is none."""
        with self._answered():
            try:
                found = self._api.get(self._store, name)
            except FileNotFoundError:
                return None
        return self._pieces(name, found)

    def _pieces(self, name: str, found: Any) -> Iterator[bytes]:
        with self._answered():
            if self.url.startswith("file:"):  # a stream of it takes 15 times the processor time: it reads 8 KiB at once
                size = found.meta["size"]
                for start in range(0, size, _PIECE_BYTES):
                    end = min(start + _PIECE_BYTES, size)
                    yield bytes(self._api.get_range(self._store, name, start=start, end=end))
                return
            for piece in found.stream(min_chunk_size=_PIECE_BYTES):
                yield bytes(piece)

    def listing(self, folder: str, offset: str | None = None) -> list[Listed]:
        """The objects in a folder whose names come after `offset`."""
        found: list[Listed] = []
        with self._answered():
            for page in self._api.list(self._store, folder, offset=offset, chunk_size=_PAGE):
                self._check()
                found += [Listed(each["path"], each["size"], each["last_modified"]) for each in page]
        return found

    def delete(self, names: list[str]) -> None:
        """Remove objects; one that is not there is passed over."""
        for begin in range(0, len(names), _PAGE):
            with self._answered():
                try:
                    self._api.delete(self._store, names[begin : begin + _PAGE])
                except FileNotFoundError:
                    for name in names[begin : begin + _PAGE]:
                        try:
                            self._api.delete(self._store, name)
                        except FileNotFoundError:
                            continue


def log_name(seq: int) -> str:
    """Name of the log object of a number."""
    return f"{LOG}/{seq:016d}"


def manifest_name(seq: int) -> str:
    """Name of the manifest that stands at a number."""
    return f"{MANIFESTS}/{seq:016d}"


def _reason(error: BaseException) -> str:
    """The first line of an error, without any value that the environment keeps secret."""
    text = str(error).partition("\n")[0]
    for name, value in os.environ.items():
        if _SECRET.search(name.upper()) and len(value) > 3:
            text = text.replace(value, "***")
    return f"{type(error).__name__}: {text[:_LONGEST_REASON]}"
