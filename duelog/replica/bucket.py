"""The port to object storage: log objects that are created if absent, and files, under one prefix. By obstore.

Whoever makes the log goes by one promise of the store, that of two creators of a name one is refused. An append ends in
one of three ways: it is stored (`append` returns), the number is taken (AlreadyThere), or nobody knows (Unreachable);
`LogWriter` settles the last two. The client does not try an append again by itself.
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

_ANSWER_S = 30.0
"""How long an answer may take, from the request on, and what is read between two parts of it."""

_CONNECT_S = 5.0
_CONTENT_S = 86_400
"""How long all of a file may take."""

_ANSWERS = 4
"""Answers that fail to come, one after the other, in a lease."""

_LEAST_ANSWER_S = 0.5
"""However short the lease is: a bucket that is far away answers by then."""

_TRIES = 8
"""Tries of one put, at the most, each of which has twice the time of the one before."""

_BYTES_A_S = 1_000_000
"""The slowest way on which a put is not given up before its time."""

_NO_RETRIES: dict[str, Any] = {"max_retries": 0, "retry_timeout": timedelta(seconds=_ANSWER_S)}
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
        self._answer_s = _ANSWER_S
        self._is_remote = store is None and not url.startswith(("file:", "memory:"))
        self._clients: dict[float, ObjectStore] = {}
        """By how long they wait for an answer, where that is not as usual."""
        self._store = self._connected(_ANSWER_S) if store is None else store

    def _connected(self, answer_s: float) -> ObjectStore:
        options: dict[str, Any] = {"client_options": _timeouts(answer_s), "retry_config": _NO_RETRIES}
        if self.url.startswith("file:"):
            options = {"mkdir": True, "automatic_cleanup": True}
        elif self.url.startswith("memory:"):
            options = {}
        with self._answered():
            found: ObjectStore = self._api.store.from_url(self.url, **options)
            return found

    def for_lease(self, lease_ms: int | None) -> Bucket:
        """The same objects, asked so that in a lease there is time to ask again where no answer comes.

        That holds for the log, manifests, and all else that is small. What puts or reads files, and whoever removes
        objects, waits as long as without a lease: None.
        """
        if not self._is_remote:
            return self
        bucket = copy(self)
        if lease_ms is None:
            bucket._answer_s = _ANSWER_S
        else:
            bucket._answer_s = min(max(lease_ms / 1000 / _ANSWERS, _LEAST_ANSWER_S), _ANSWER_S)
        return bucket

    def _client(self, size: int = 0, tries: int = 0) -> ObjectStore:
        """The client for what is small; a put of a larger `size` has longer, and one that was tried in vain twice that.

        So what is large for its way is stored in the end, though the lease passes meanwhile.
        """
        answer_s = self._answer_s * 2 ** min(tries, _TRIES)
        while answer_s < _ANSWER_S and size > answer_s * _BYTES_A_S:
            answer_s *= 2
        answer_s = min(answer_s, _ANSWER_S)
        if answer_s == _ANSWER_S:
            return self._store
        if answer_s not in self._clients:
            self._clients[answer_s] = self._connected(answer_s)
        return self._clients[answer_s]

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

    def append(self, seq: int, content: Content, tries: int = 0) -> None:
        """Create the log object of a number. `tries`: how often that was tried before, in vain.

        Raises AlreadyThere; ReplicaUnreachable: it may be there, or come yet.
        """
        self.create(log_name(seq), content, tries)

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
        return sorted(_numbers_of(self.listing(LOG, _before(start)), start))

    def manifests(self) -> list[int]:
        """The numbers that manifests stand at, ascending."""
        return sorted(_numbers_of(self.listing(MANIFESTS), 0))

    def span(self, start: int = 0) -> range:
        """The numbers from the first to the last log object of those from `start` on; they are dense in a whole log.

        It lists a page here and there, by doubled and then halved steps: all of a week of log takes minutes.
        """
        if self.url.startswith("file:"):  # each page would read the whole directory, and has no order
            found = self.numbers(start)
            return range(found[0], found[-1] + 1) if found else range(0)
        span, step, grows = range(0), 0, True
        while True:
            page = next(self._pages(LOG, _before(start + step)), [])
            numbers = _numbers_of(page, start + step)
            if numbers:
                span = range(span.start if span else numbers[0], numbers[-1] + 1)
                start = span.stop
            if (numbers and len(page) < _PAGE) or not (numbers or step):
                return span
            grows = grows and bool(numbers)
            step = max(2 * step, _PAGE) if grows else step // 2 if step > _PAGE else 0

    # -- files -------------------------------------------------------------------------------------

    def create(self, name: str, content: Content, tries: int = 0) -> None:
        """Create an object that is not there. Arguments and errors as of `append`."""
        try:
            with self._answered():
                try:
                    client = self._client(_size(content), tries)
                    self._api.put(client, name, content, mode="create", use_multipart=False)
                except self._taken as error:
                    raise AlreadyThere(name) from error
        except NotImplementedError as error:
            raise InvalidArgument("replica", self.url, "this store cannot create an object if absent") from error

    def put(self, name: str, content: Content | Path) -> None:
        """Create or replace an object, by a file in parts where it is large."""
        client = self._store if isinstance(content, Path) else self._client(_size(content))
        with self._answered():
            self._api.put(client, name, content)

    def get(self, name: str) -> bytes | None:
        """The content of an object; None: there is none."""
        with self._answered():
            try:
                return bytes(self._api.get(self._client(), name).bytes())
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
        return [each for page in self._pages(folder, offset) for each in page]

    def _pages(self, folder: str, offset: str | None) -> Iterator[list[Listed]]:
        client = self._client() if folder in (LOG, MANIFESTS) else self._store
        with self._answered():
            for page in self._api.list(client, folder, offset=offset, chunk_size=_PAGE):
                self._check()
                yield [Listed(each["path"], each["size"], each["last_modified"]) for each in page]

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


def _size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else sum(map(len, content))


def _timeouts(answer_s: float) -> dict[str, Any]:
    """The options of a client that waits so long for an answer: of a put until it is stored, of what is read each part.

    `timeout` would end the reading of a large file, however fast it comes.
    """
    return {
        "read_timeout": timedelta(seconds=answer_s),
        "connect_timeout": timedelta(seconds=min(answer_s, _CONNECT_S)),
        "timeout": timedelta(seconds=_CONTENT_S),
        "allow_http": True,
    }


def log_name(seq: int) -> str:
    """Name of the log object of a number."""
    return f"{LOG}/{seq:016d}"


def _before(seq: int) -> str | None:
    """The name after which log objects from a number on are listed; None: all of them."""
    return log_name(seq - 1) if seq else None


def _numbers_of(objects: list[Listed], start: int) -> list[int]:
    names = (each.name.rpartition("/")[2] for each in objects)
    return [int(name) for name in names if re.fullmatch("[0-9]{16}", name) and int(name) >= start]


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
