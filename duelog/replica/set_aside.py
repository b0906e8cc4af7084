"""The tail of a leader that was deposed: what it told clients, and had not shipped.

NAME.diverged/EPOCH beside the store has the messages of groups behind the fence, a line of JSON each, and the whole
directory as it was. Where there are no such groups the copy has everything, and the directory is removed.
"""

import base64
import json
import logging
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from pyroaring import BitMap

from duelog.delayed_store import DelayedStore
from duelog.engine import Engine, open_engine
from duelog.opening import StoreLock, stored_span_ms
from duelog.partitions.cancellations import members
from duelog.store.clock import SystemClock
from duelog.store.codec.body import DEDUP, decode_body
from duelog.store.codec.format import Table
from duelog.store.codec.run import Run, RunKind
from duelog.store.config import StoreConfig
from duelog.store.errors import CorruptEntry, DuelogError, ReplicaRefused, ReplicaUnreachable
from duelog.store.files.directory import make_directory, move, move_away, remove_tree, write_file
from duelog.store.log import catalog
from duelog.store.message import Message
from duelog.store.wal.segment import Group, RowKind, place_of
from duelog.store.wal.write_batch import single_rows

from .bucket import Bucket
from .log_object import FENCE, find_object, read_object
from .log_tail import LogLost, LogTail
from .replica_status import MESSAGES, aside_of, tails_of

_log = logging.getLogger("duelog.replica")

_SENT_AT_ONCE = 1_000


class AsideMessage(NamedTuple):
    """A message of a tail that was set aside, with the id that its sender was told."""

    topic: str
    message_id: str
    due_ms: int
    message: Message


def set_aside(path: Path, bucket: Bucket, epoch: int) -> None:
    """Move the store in `path`, which led in `epoch` and was deposed, out of the way.

    Raises ReplicaUnreachable, ReplicaDamaged; ReplicaRefused where a tail of that epoch was set aside before;
    StoreLocked where a process has it open, which may be stopped, and tell clients of what it has written then.
    """
    lock = StoreLock(path)
    try:
        lock.take()
        _set_aside(path, bucket, epoch)
    finally:
        lock.release()


def _set_aside(path: Path, bucket: Bucket, epoch: int) -> None:
    try:
        messages = _unshipped(path, _end_of(bucket, epoch))
    except ReplicaUnreachable:
        raise  # what was not shipped is known once the bucket answers
    except (DuelogError, LogLost) as error:
        _log.error("%s: what was not shipped cannot be read: %s", path, error)
        messages = []
    if messages is None:
        _log.warning("%s: another leads, and the copy has all of this directory, which is removed", path)
        gone = path.with_name(f"{path.name}.removed")
        remove_tree(gone)  # what a kill left of it
        move_away(path, gone)  # of half a directory nobody could say what it is
        remove_tree(gone)
        return
    target = aside_of(path) / str(epoch)
    if (target / "store").exists():
        raise ReplicaRefused(bucket.url, f"{target / 'store'} is in the way: a tail of that epoch was set aside before")
    make_directory(target.parent)
    make_directory(target)
    write_file(target / MESSAGES, b"".join(json.dumps(each).encode() + b"\n" for each in messages))
    move(path, target / "store")
    text = "%s: another leads; %d messages were not shipped, and are set aside in %s (`duelog replica diverged`)"
    _log.error(text, path, len(messages), target)


def _unshipped(path: Path, place: int) -> list[dict[str, Any]] | None:
    """The messages of groups from a place on; None: there are no such groups. Raises DuelogError, LogLost."""
    config = StoreConfig(partition_ms=stored_span_ms(path) or 86_400_000, background=False, control=False)
    engine = open_engine(path, config, SystemClock(), read_only=True)
    try:
        store_id, oldest = engine.storage.store_id, catalog.oldest_segment(engine.storage.main)
        tail = LogTail(path, store_id, place)
        try:
            groups = [raw.whole(store_id, partial(_log.error, "%s: %s", path)) for raw in tail.rest()]
        finally:
            tail.close()
        # What follows is in the log, or recovery refuses it.
        if tail.place < place_of(oldest or 0, 0) or None in groups:
            raise LogLost("the log before what is not applied was given up")
        return list(_messages(engine, [group for group in groups if group is not None])) if groups else None
    finally:
        engine.close()


def _end_of(bucket: Bucket, epoch: int) -> int:
    """The place up to which the copy has the groups of an epoch, as the fence behind it says.

    Raises ReplicaDamaged, ReplicaUnreachable; LogLost: the fence was pruned.
    """
    numbers = bucket.span()
    at = bisect_right(numbers, epoch, key=lambda seq: _epoch_at(bucket, numbers.start, seq))
    fence = read_object(bucket, numbers[at])
    if (fence.kind, fence.epoch) != (FENCE, epoch + 1):
        raise LogLost("the end of what was shipped was pruned")
    return fence.begin


def _epoch_at(bucket: Bucket, first: int, seq: int) -> int:
    """The epoch at a number, by the object before where that one is lost."""
    found = None
    while found is None and seq >= first:
        found = find_object(bucket, seq)
        seq -= 1
    return 0 if found is None else found.epoch


def _messages(engine: Engine, groups: list[Group]) -> Iterator[dict[str, Any]]:
    """The messages that groups have and that were not cancelled, but for what a store makes of others: retries, ...

    One that takes the place of another is a message of its own where the other is of these groups.
    """
    topics, own = _topics(engine), {(0, 0)}  # the place of none
    with engine.storage.main.read() as raw:
        cancelled = cache(partial(members, raw, Table.CANCELLED))
        for group in groups:
            for row in single_rows(group.rows()):
                if row.kind != RowKind.RUN:
                    continue
                run = Run("log", row.key, memoryview(bytes(row.value)))
                topic = topics.get(run.ledger_id)
                if run.kind == RunKind.MESSAGES and topic is not None:
                    yield from _of_run(run, topic, own, cancelled(run.ledger_id))


def _topics(engine: Engine) -> dict[int, str]:
    """The topic of each ledger."""
    main = engine.storage.main
    topics: dict[int, str] = {}
    names = {record.topic_id: name for name, record in catalog.topic_names(main)}
    with main.read() as raw:
        for topic_id, name in names.items():
            topics |= {ledger_id: name for ledger_id, _ in catalog.ledgers(raw, topic_id)}
    for partition in engine.storage.partitions.held(partial=True):
        topics |= {log.ledger_id: names[log.topic_id] for log in partition.logs() if log.topic_id in names}
    return topics


def _of_run(run: Run, topic: str, own: set[tuple[int, int]], cancelled: BitMap) -> Iterator[dict[str, Any]]:
    """own: (ledger id, entry id) of the messages before; those of the run are added."""
    ledgers, entries = (column.tolist() for column in run.replaced()) if run.conditional else [[0] * run.count] * 2
    replaced = zip(ledgers, entries, strict=True)
    for (entry_id, body), due_ms, before in zip(run.bodies(), run.dues().tolist(), replaced, strict=True):
        if body is None or isinstance(body, CorruptEntry) or before not in own:
            continue
        own.add((run.ledger_id, entry_id))
        if entry_id in cancelled:
            continue
        _, payload, key, properties, extra = decode_body(body)
        if extra is None or extra.keys() <= {DEDUP, "ttl"}:
            yield {
                "topic": topic,
                "id": f"{run.ledger_id}:{entry_id}",
                "due_ms": due_ms,
                "payload": base64.b64encode(payload).decode(),
                "key": key,
                "properties": properties,
                "ttl_ms": (extra or {}).get("ttl"),
            }


def read_aside(path: Path) -> dict[int, list[AsideMessage]]:
    """The messages of the tails of the store in `path`, by epoch, in the order in which they were sent."""
    return {
        epoch: [_read(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        for epoch, file in tails_of(path).items()
    }


def _read(fields: dict[str, Any]) -> AsideMessage:
    ttl_ms = fields["ttl_ms"]
    message = Message(
        base64.b64decode(fields["payload"]),
        deliver_at=fields["due_ms"],
        key=fields["key"],
        properties=fields["properties"],
        ttl=None if ttl_ms is None else ttl_ms / 1000,
    )
    return AsideMessage(fields["topic"], fields["id"], fields["due_ms"], message)


def send_again(store: DelayedStore, epoch: int, messages: list[AsideMessage]) -> int:
    """Send the messages of a tail to the store that leads, each once however often this is called; how many."""
    by_topic: dict[str, list[AsideMessage]] = {}
    for each in messages:
        by_topic.setdefault(each.topic, []).append(each)
    for topic, of_topic in by_topic.items():
        # with an id, which no other tail has: each prefix begins with epoch 1
        producer = store.topic(topic).producer(f"diverged-{epoch}-{of_topic[0].message_id}")
        for start in range(0, len(of_topic), _SENT_AT_ONCE):
            some = [each.message for each in of_topic[start : start + _SENT_AT_ONCE]]
            producer.send_batch(some, first_sequence_id=start, allow_past=True)
    return len(messages)
