"""Values as people write them: times, properties, and the opening of a store for a tool.

What cannot be read is InvalidArgument with the field and the value, which the command line turns into exit status 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..store.errors import AlreadyOpen, InvalidArgument, StoreLocked

if TYPE_CHECKING:
    from .. import DelayedStore, StoreConfig
    from ..opening import Identity

MIN_DEAD_RATIO = 0.3
"""Share of a partition's bytes that can go from which on compaction rewrites it, unless it is told another."""

_MOST_NAME_BYTES = 200
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(/|$)")
"""As a path has it, with one slash of the two."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_MS = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)
"""The last of the year 9999."""
_MILLISECONDS = re.compile(r"\d{1,20}", re.ASCII)


def time_ms(field: str, text: str) -> int:
    """An instant in epoch ms: digits are milliseconds, anything else is ISO 8601 with a zone.

    >>> time_ms("at", "2026-11-21T09:00:00Z"), time_ms("at", "2026-11-21T10:00+01:00")
    (1795251600000, 1795251600000)
    """
    stripped = text.strip()
    if _MILLISECONDS.fullmatch(stripped):
        ms = int(stripped)
    else:
        try:
            moment = datetime.fromisoformat(stripped)
        except ValueError:
            raise InvalidArgument(
                field, text, "expected ISO 8601 with a zone (2026-11-21T09:00:00Z) or milliseconds since 1970"
            ) from None
        if moment.tzinfo is None:
            raise InvalidArgument(field, text, "has no zone and could mean any; add Z or an offset such as +01:00")
        ms = -((_EPOCH - moment) // timedelta(milliseconds=1))  # rounded up, so that nothing is early
    if not 0 <= ms <= _MAX_MS:
        raise InvalidArgument(field, text, "not in the years 1970 to 9999")
    return ms


def time_range_ms(start: str | None, end: str | None) -> tuple[int | None, int | None]:
    """--from and --until, each None where it is not given. Raises InvalidArgument, also where the second is earlier."""
    start_ms = None if start is None else time_ms("--from", start)
    end_ms = None if end is None else time_ms("--until", end)
    if start_ms is not None and end_ms is not None and end_ms < start_ms:
        raise InvalidArgument("--until", end, f"is before --from={start!r}")
    return start_ms, end_ms


def iso_time(ms: int) -> str:
    """An instant as ISO 8601 in UTC, with milliseconds where there are any; a number that is no date as it is.

    >>> iso_time(1_795_251_600_000), iso_time(1_500)
    ('2026-11-21T09:00:00Z', '1970-01-01T00:00:01.500Z')
    """
    if not 0 <= ms <= _MAX_MS:
        return str(ms)
    moment = _EPOCH + timedelta(milliseconds=ms)
    return f"{moment:%Y-%m-%dT%H:%M:%S}{f'.{ms % 1000:03d}' if ms % 1000 else ''}Z"


def path_segment(text: str) -> str:
    """A text as the name of a file or directory: percent-encoded, and cut short with a hash where that is too long.

    >>> path_segment("a/b c")
    'a%2Fb%20c'
    """
    quoted = quote(text, safe="")
    if len(quoted) <= _MOST_NAME_BYTES:
        return quoted
    return f"{quoted[:_MOST_NAME_BYTES].rpartition('%')[0]}~{sha256(text.encode()).hexdigest()[:32]}"


def properties_of(pairs: Iterable[str]) -> dict[str, str]:
    """Properties from `name=value` texts.

    >>> properties_of(["shop=7", "note=a=b"])
    {'shop': '7', 'note': 'a=b'}
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not mark or not name:
            raise InvalidArgument("--property", pair, "expected name=value")
        if name in found:
            raise InvalidArgument("--property", pair, "this name is given twice")
        found[name] = value
    return found


def stored_identity(path: Path) -> Identity:
    """Read the STORE file, whatever the span it was made with. Raises FormatMismatch, DamagedStore."""
    from ..opening import read_identity

    return read_identity(path, settings_of(path))


def settings_of(path: Path, span_ms: int | None = None, **settings: Any) -> StoreConfig:
    """Settings with the span that a store was made with; of one that is not made yet `span_ms`, None: the default."""
    from .. import StoreConfig
    from ..opening import stored_span_ms

    span_ms = stored_span_ms(path) or span_ms
    return StoreConfig(**settings) if span_ms is None else StoreConfig(partition_ms=span_ms, **settings)


def require_store(path: Path) -> None:
    """Refuse a path that holds no store, before anything is opened or made. Raises InvalidArgument."""
    if (path / "STORE").exists():
        return
    from ..opening import refuse_standby

    refuse_standby("STORE", path)
    refuse_url("STORE", path)
    if not path.exists():
        raise InvalidArgument("STORE", str(path), "there is no such directory; `duelog init` makes a store")
    raise InvalidArgument("STORE", str(path), "this is no store: it has no file named STORE")


def refuse_url(field: str, path: Path) -> None:
    """Raise InvalidArgument for a path that was meant as a URL, where no directory is of that name."""
    if _URL.match(str(path)) and not path.exists():
        reason = (
            "expected a directory; the URL of a copy to read is s3://bucket/prefix, gs://, az:// or file:///directory"
        )
        raise InvalidArgument(field, str(path), reason)


@contextmanager
def extra(command: str, name: str) -> Iterator[None]:
    """Import what an extra brings inside the block: InvalidArgument, naming the command, says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidArgument(command, error.name, f"is not installed; pip install 'duelog[{name}]'") from error


@contextmanager
def alone(why: str) -> Iterator[None]:
    """Run a block that needs a store for itself; where another process has it open, StoreLocked says why."""
    try:
        yield
    except AlreadyOpen:
        raise
    except StoreLocked as error:
        error.args = (f"{error}; {why}",)
        raise


def open_to_read(path: Path) -> DelayedStore:
    """Open an existing store read-only, with the span it was made with: beside a writing process too."""
    from .. import DelayedStore

    require_store(path)
    return DelayedStore.open(path, settings_of(path), read_only=True)


def open_to_write(path: Path, *, create: bool, span_ms: int | None = None) -> DelayedStore:
    """Open a store for writing with the span it was made with; where there is none, make it if `create`.

    span_ms: that of a store that is made; None: a day. Commands record no settings of their own: a store of an earlier
    version, which has none, keeps everything until a program opens it. Raises StoreLocked while another process writes.
    """
    from .. import DelayedStore, SystemClock
    from ..engine import open_engine

    if not create:
        require_store(path)
    config = settings_of(path, span_ms, background=False)
    engine = open_engine(path.absolute(), config, SystemClock(), read_only=False, records_defaults=False)
    return DelayedStore(engine)
