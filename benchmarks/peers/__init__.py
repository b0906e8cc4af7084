"""The peers by key, each at the setting that survives a power cut and at its usual one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..harness.compare import Subject
from .beanstalkd_peer import BeanstalkdPeer
from .duelog_peer import DuelogPeer
from .fleet_peer import FleetPeer
from .huey_peer import HueyPeer
from .limits import PreallocatedFilePeer, RawFilePeer, RawLmdbPeer
from .peer import Peer
from .postgres_peer import PostgresPeer
from .redis_peer import RedisPeer
from .served_peer import ServedPeer
from .sqlite_peer import SqlitePeer


@dataclass(frozen=True, slots=True)
class Kind:
    """A peer at one setting. limit: no peer, but a bound. most: messages it is measured with at most."""

    label: str
    make: Callable[[], Peer]
    missing: Callable[[], str | None]
    survives_power_cut: bool
    limit: bool = False
    most: int | None = None


_SLOW = 10_000


def _present() -> None:
    return None


def _fleet(label: str, brokers: int, *, proxied: bool) -> Kind:
    return Kind(label, lambda: FleetPeer(brokers=brokers, proxied=proxied), FleetPeer.missing, True)


KINDS: dict[str, Kind] = {
    "duelog": Kind("duelog", DuelogPeer, _present, True),
    "duelog:messages": Kind("duelog, Message objects", lambda: DuelogPeer(messages=True), _present, True),
    "duelog:flush": Kind("duelog, acks every 100 ms", lambda: DuelogPeer(durable_acks=False), _present, True),
    "duelog:relaxed": Kind("duelog, relaxed", lambda: DuelogPeer(durability="relaxed"), _present, False),
    "duelog:none": Kind("duelog, none", lambda: DuelogPeer(durability="none"), _present, False),
    "duelog:serve": Kind("duelog serve", ServedPeer, ServedPeer.missing, True),
    "duelog:serve-batched": Kind("duelog serve, batches", lambda: ServedPeer(batching=True), ServedPeer.missing, True),
    "duelog:proxied": _fleet("a proxy and a broker", 1, proxied=True),
    "duelog:two": _fleet("two brokers", 2, proxied=False),
    "duelog:two-proxied": _fleet("a proxy and two brokers", 2, proxied=True),
    "sqlite-full": Kind("SQLite FULL", lambda: SqlitePeer("FULL"), SqlitePeer.missing, True),
    "sqlite-normal": Kind("SQLite NORMAL", lambda: SqlitePeer("NORMAL"), SqlitePeer.missing, False),
    "redis-always": Kind("Redis always", lambda: RedisPeer("always"), RedisPeer.missing, True),
    "redis-everysec": Kind("Redis everysec", lambda: RedisPeer("everysec"), RedisPeer.missing, False),
    "postgres": Kind("PostgreSQL", PostgresPeer, PostgresPeer.missing, True),
    "beanstalkd-fsync": Kind(
        "beanstalkd fsync", lambda: BeanstalkdPeer(fsync=True), BeanstalkdPeer.missing, True, most=_SLOW
    ),
    "beanstalkd": Kind("beanstalkd", lambda: BeanstalkdPeer(fsync=False), BeanstalkdPeer.missing, False),
    "huey-fsync": Kind("huey fsync", lambda: HueyPeer(fsync=True), HueyPeer.missing, True, most=_SLOW),
    "huey": Kind("huey", lambda: HueyPeer(fsync=False), HueyPeer.missing, False, most=_SLOW),
    "raw-lmdb": Kind("limit: raw LMDB", RawLmdbPeer, _present, True, limit=True),
    "raw-file": Kind("limit: raw file", RawFilePeer, _present, True, limit=True),
    "raw-in-place": Kind("limit: preallocated file", PreallocatedFilePeer, _present, True, limit=True),
}

PEERS = [key for key, kind in KINDS.items() if not kind.limit and not key.startswith("duelog")]
DURABLE_PEERS = [key for key in PEERS if KINDS[key].survives_power_cut]
LIMITS = [key for key, kind in KINDS.items() if kind.limit]


def at_most(key: str, n: int) -> int:
    """How many of `n` messages a peer is measured with: slow ones would take hours, and their rate is known sooner."""
    most = KINDS[key].most
    return n if most is None else min(n, most)


def make(key: str, **settings: Any) -> Peer:
    """A new peer by key; not open yet. `settings` are of duelog, besides those of its kind."""
    peer = KINDS[key].make()
    if isinstance(peer, DuelogPeer):
        peer.settings.update(settings)
    return peer


def subjects(*keys: str) -> list[Subject]:
    """Subjects for `compare`."""
    return [Subject(key, KINDS[key].label, KINDS[key].missing()) for key in keys]
