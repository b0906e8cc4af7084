"""Moving a namespace to a store of its own: backup, pruning of both sides, switch of the placement table.

The new store begins as a backup of the whole one, from which everything that is not of the namespace is removed: so
all that a store knows of the namespace goes along, byte for byte. The order is what makes it safe to be interrupted:

1. backup to TARGET.moving, which is made anew by the next attempt
2. pruning there: topics, policies and documents of other namespaces
3. both sides compared, the copy checked, a document that says where it comes from, a file with what is there
4. TARGET.moving becomes TARGET
5. the placement table is switched, the file emptied
6. the namespace's topics, policies and documents are removed from the old store, then the file from the new one

Until 5 the old store has everything and is what is served; from 5 on the new one. An attempt after 5 does only 6; where
the file is gone too, topics in the old store came later and are nowhere else: it is refused. One between 4 and 5 begins
anew, if TARGET is as the file says: no process has used it. No process may have either store open, so nothing is sent
or fired meanwhile.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import DelayedStore
from ..backup import MANIFEST
from ..broker.cluster.placement import Placement, place_namespace, read_placement
from ..opening import stored_span_ms
from ..stats import TopicStats
from ..store.clock import Clock, ManualClock, SystemClock
from ..store.config import StoreConfig
from ..store.errors import DamagedStore, InvalidArgument
from ..store.files.directory import children, discard_tree, move, remove_tree, write_file
from ..store.names import SCHEME, TopicName, validate_namespace_name

_ORIGIN = "moved/"
"""Documents that say where a namespace came from."""

_UNFINISHED = "MOVING"
"""The file in a new store until the old one has forgotten the namespace.

Until the table names the new store it has that store's files, with sizes and times; then it is empty.
"""

_SHARED = ("setting/",)
"""Documents of the whole store; they go along."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Figures of a move. A second attempt that only finished the first one has copied nothing."""

    source: Path
    target: Path
    topics: int
    pending: int
    """Messages that were not due."""
    backlog: int
    """Messages due and not acknowledged, counted for each subscription."""
    copied: bool


def move_namespace(
    placement: Path, namespace: str, broker: str, say: Callable[[str], object] = lambda step: None
) -> Moved:
    """Move `tenant/namespace` to the store of another broker of the table, which has none yet.

    Raises InvalidArgument for what cannot be moved so, StoreLocked while a process has one of the stores open,
    StoreFull, DamagedStore: before the table is switched; then nothing has changed.
    """
    validate_namespace_name(namespace)
    table = read_placement(placement)
    target = _store_of(table, broker, placement)
    owner = table.owner(namespace)
    if owner is None:
        raise InvalidArgument("namespace", namespace, f"no broker of {placement} serves it")
    if owner.name == broker:
        return _finish(table, namespace, target, say)
    source = _store_of(table, owner.name, placement)
    clock = ManualClock(SystemClock().now_ms())  # it stands: what is due is so on both sides
    with _open(source, clock) as old:  # its lock keeps another attempt from what this one has made
        if _is_unused(target):
            remove_tree(target)
        if children(target):
            raise InvalidArgument("store", str(target), "is not empty: a namespace moves to a store of its own")
        if os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
            raise InvalidArgument("store", str(target), "is no directory")
        if not any(old.topics(namespace)) and not any(_is_of(namespace, path) for path, _ in _rest(old)):
            reason = f"{source} has no topic, policy or document of it; the table alone has another broker serve it"
            raise InvalidArgument("namespace", namespace, reason)
        topics = _copy(old, namespace, target, clock, say)
        place_namespace(placement, namespace, broker)
        write_file(target / _UNFINISHED, b"")
        say(f"{placement} says broker {broker}")
        _remove(old, namespace, say)
    (target / _UNFINISHED).unlink()
    return Moved(source, target, len(topics), *_sums(topics), copied=True)


def _store_of(table: Placement, broker: str, placement: Path) -> Path:
    found = table.brokers.get(broker)
    if found is None:
        raise InvalidArgument("broker", broker, f"expected a broker of {placement}: {', '.join(table.brokers)}")
    if found.store is None:
        raise InvalidArgument("broker", broker, f"{placement} does not say where its store is")
    return found.store


def _open(path: Path, clock: Clock) -> DelayedStore:
    """A store that is there, with nothing going on in it by itself."""
    span_ms = stored_span_ms(path)
    if span_ms is None:
        raise InvalidArgument("store", str(path), "is no store")
    return DelayedStore.open(path, StoreConfig(partition_ms=span_ms, background=False), clock=clock)


def _finish(table: Placement, namespace: str, target: Path, say: Callable[[str], object]) -> Moved:
    """Remove from the old store what the new one has, where an attempt was interrupted after the switch."""
    if stored_span_ms(target) is None:
        raise InvalidArgument("store", str(target), f"is no store, and is to serve {namespace}")
    with DelayedStore.open(target, read_only=True) as new:
        document = new.documents.get(_ORIGIN + namespace)
    if document is None:
        raise InvalidArgument("namespace", namespace, f"is served by the store {target} already")
    source = Path(json.loads(document.value)["store"])
    with _open(source, SystemClock()) as old:
        topics = [each.stats() for each in old.topics(namespace)]
        if topics and not (target / _UNFINISHED).exists():
            raise InvalidArgument("namespace", namespace, f"was moved, and {source} has topics of it that came later")
        _remove(old, namespace, say)
    (target / _UNFINISHED).unlink(missing_ok=True)
    return Moved(source, target, len(topics), *_sums(topics), copied=False)


def _copy(
    old: DelayedStore, namespace: str, target: Path, clock: Clock, say: Callable[[str], object]
) -> list[TopicStats]:
    """Make the new store; what it has."""
    work = target.with_name(target.name + ".moving")
    remove_tree(work)
    try:
        say(f"copying {old.path}")
        old.backup(work)
        (work / MANIFEST).unlink()  # the copy is about to change
        with _open(work, clock) as new:
            say("removing what is of other namespaces from the copy")
            for topic in [each.name for each in new.topics() if TopicName.parse(each.name).namespace_name != namespace]:
                new.delete_topic(topic)
            own = {namespace, namespace.partition("/")[0]}
            _remove_rest(new, lambda path: path not in own and not path.startswith(f"{namespace}/"))
            new.documents.put(_ORIGIN + namespace, json.dumps({"store": str(old.path)}).encode())
            found = [each.stats() for each in new.topics(namespace)]
            expected = [each.stats() for each in old.topics(namespace)]
            if [_figures(each) for each in found] != [_figures(each) for each in expected]:
                raise DamagedStore(work, "does not have what the store has that it was copied from")
            problem = next((each for each in new.check() if each.severity == "error"), None)
            if problem is not None:
                raise DamagedStore(work, f"{problem.code}: {problem.message}")
        write_file(work / _UNFINISHED, json.dumps(_files(work)).encode())
        move(work, target)
    except BaseException:
        discard_tree(work)
        raise
    return found


def _files(store: Path) -> dict[str, list[int]]:
    """Sizes and times by which to tell if a process has written into a store since."""
    found = sorted([*store.rglob("data.mdb"), *(store / "wal").glob("*")])
    return {str(each.relative_to(store)): [each.stat().st_size, each.stat().st_mtime_ns] for each in found}


def _is_unused(target: Path) -> bool:
    """Return True if an attempt that was interrupted just before the switch has left a store."""
    try:
        left = json.loads((target / _UNFINISHED).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(left == _files(target))


def _figures(stats: TopicStats) -> object:
    each = [(one.name, one.backlog, one.mark_delete) for one in stats.subscriptions]
    return stats.name, stats.pending, stats.inline, stats.entries, each


def _sums(topics: list[TopicStats]) -> tuple[int, int]:
    pending = sum(each.pending for each in topics)
    return pending, sum(one.backlog for each in topics for one in each.subscriptions)


def _remove(old: DelayedStore, namespace: str, say: Callable[[str], object]) -> None:
    """Have the old store forget a namespace; what it took on disk is freed as time goes on."""
    say(f"removing it from {old.path}")
    for topic in [each.name for each in old.topics(namespace)]:
        old.delete_topic(topic)
    _remove_rest(old, lambda path: _is_of(namespace, path))


def _is_of(namespace: str, path: str) -> bool:
    return path == namespace or path.startswith(f"{namespace}/")


def _remove_rest(store: DelayedStore, is_wanted: Callable[[str], bool]) -> None:
    for path, remove in list(_rest(store)):
        if is_wanted(path):
            remove()


def _rest(store: DelayedStore) -> Iterator[tuple[str, Callable[[], object]]]:
    """Policies and documents of tenants, namespaces and topics: each one's `tenant/...`, and what removes it."""
    for scope in store.all_policies():
        kind, _, rest = scope.partition(" ")
        if kind == "namespace":
            yield rest, partial(store.remove_policies, namespace=rest)
        elif kind == "topic":
            yield rest.removeprefix(SCHEME), partial(store.remove_policies, topic=rest)
        elif kind == "subscription":
            subscription, _, topic = rest.rpartition(" of topic ")
            yield topic.removeprefix(SCHEME), partial(store.remove_policies, topic=topic, subscription=subscription)
    for key, _ in store.documents.items():
        if not key.startswith((*_SHARED, _ORIGIN)):
            yield key.partition("/")[2], partial(store.documents.delete, key)
