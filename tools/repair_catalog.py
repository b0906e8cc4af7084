"""The main environment's part of a repair: damaged records, main logs, subscriptions, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..cleanup.mend import GivenUp
from ..partitions.timespan import parse_directory_name
from ..recurring import unpack_schedule
from ..store import catalog, datafile
from ..store import format as fmt
from ..store.environment import Environment
from ..store.errors import DuelogError
from ..store.format import (
    CorruptRecord,
    CursorRecord,
    LedgerState,
    PartitionInfo,
    PartitionRecord,
    PartitionState,
    Table,
    TopicRecord,
)
from ..store.transaction import Transaction

GiveUp = Callable[[GivenUp], object]


def mend_catalog(main: Environment, path: Path, give_up: GiveUp) -> list[str]:
    """Remove damaged records, make those anew that others tell of, and mend the main logs. Says what it did."""
    actions = []
    bad = _damaged_records(main)
    for key, value, reason in bad:
        give_up(GivenUp("main", 0, None, reason, key + value))
    kept = [key for key, _, _ in bad if key[0] == Table.FRONTIER]
    removed = [key for key, _, _ in bad if key[0] != Table.FRONTIER]
    if removed:
        main.write(lambda transaction: [transaction.delete(key) for key in removed])
        actions.append(f"main: removed {len(removed)} damaged records")
    if kept:
        raise CorruptRecord("a frontier cannot be read: messages would fire twice or never; restore a backup")
    main.write(lambda transaction: _restore_topics(transaction, actions))
    main.write(lambda transaction: _restore_ledgers(transaction, main, actions))
    main.write(lambda transaction: _restore_partitions(transaction, path, actions))
    main.write(lambda transaction: _restore_cursors(transaction, removed, actions))
    main.write(lambda transaction: _restore_counters(transaction, path, actions))
    _drop_strangers(main, give_up, actions)
    return actions


def _damaged_records(main: Environment) -> list[tuple[bytes, bytes, str]]:
    found = []
    with main.read() as raw:
        for view, value in raw.cursor():
            key = bytes(view)
            if key[0] == Table.RUN:
                break
            try:
                fields = fmt.unseal(key, value)
                if key[0] == Table.SCHEDULE:
                    unpack_schedule(fields)
            except CorruptRecord as error:
                found.append((key, bytes(value), str(error)))
    return found


def _restore_topics(transaction: Transaction, actions: list[str]) -> None:
    raw = transaction.raw
    by_name = {key[1:].decode(): TopicRecord.unpack(row) for key, row in catalog.rows(raw, fmt.prefix(Table.TOPIC))}
    by_id = {fmt.trailing_u32(key): row.decode() for key, row in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))}
    for topic_id, name in by_id.items():
        if name not in by_name:
            transaction.put(fmt.topic_key(name), TopicRecord(topic_id, 0).pack())
            actions.append(f"topic {name}: registered again")
    for name, record in by_name.items():
        if record.topic_id not in by_id:
            transaction.put(fmt.topic_name_key(record.topic_id), name.encode())
            actions.append(f"topic {name}: named again")


def _restore_ledgers(transaction: Transaction, main: Environment, actions: list[str]) -> None:
    """Topics without an open ledger get one; ledgers that have lost their record are given up with their runs."""
    topics = [fmt.trailing_u32(key) for key, _ in catalog.rows(transaction.raw, fmt.prefix(Table.TOPIC_NAME))]
    for topic_id in topics:
        ledgers = catalog.ledgers(transaction.raw, topic_id)
        if all(record.state is not LedgerState.OPEN for _, record in ledgers):
            _restore_counters(transaction, None, [])
            catalog.add_ledger(transaction, topic_id, 0)
            actions.append(f"topic {topic_id}: a new ledger begun")


def _restore_partitions(transaction: Transaction, path: Path, actions: list[str]) -> None:
    known = dict(catalog.partitions(transaction.raw))
    for directory in sorted((path / "partitions").glob("*/g*")):
        try:
            start_ms = parse_directory_name(directory.parent.name)
            if start_ms in known or datafile.inspect(directory).transaction <= 1:
                continue
            environment = Environment(directory, name=directory.parent.name, read_only=True)
            try:
                fields = environment.get(fmt.PARTITION_INFO_KEY)
            finally:
                environment.close()
            info = None if fields is None else PartitionInfo.unpack(fields)
        except (DuelogError, CorruptRecord, ValueError):
            continue
        if info is not None and info.start_ms == start_ms:
            record = PartitionRecord(info.end_ms, info.generation, PartitionState.OPEN, 0, 0)
            transaction.put(fmt.partition_key(start_ms), record.pack())
            actions.append(f"partition {directory.parent.name}: registered again")
    registered = dict(catalog.partitions(transaction.raw))
    for topic_id, start_ms, _ in list(catalog.frontiers(transaction.raw)):
        if start_ms not in registered:
            transaction.delete(fmt.frontier_key(topic_id, start_ms))
            actions.append(f"topic {topic_id}: its frontier in partition {start_ms}, which is gone, removed")


def _restore_cursors(transaction: Transaction, removed: Iterable[bytes], actions: list[str]) -> None:
    """A subscription whose record was damaged begins again at the start of the log: rather twice than never."""
    for key in removed:
        if key[0] != Table.CURSOR:
            continue
        topic_id = fmt.trailing_u32(key[:5])
        ledgers = catalog.ledgers(transaction.raw, topic_id)
        if not ledgers or catalog.topic_name(transaction.raw, topic_id) is None:
            continue
        number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
        transaction.put(key, CursorRecord(number, 0, ledgers[0][0], 0, 0).pack())
        actions.append(f"topic {topic_id}: subscription {key[5:].decode(errors='replace')} begins at the start again")


def _restore_counters(transaction: Transaction, path: Path | None, actions: list[str]) -> None:
    """Counters go past every number in use. Logs of partitions have their numbers from the ledgers' counter too."""
    raw = transaction.raw
    ledgers = [fmt.trailing_u64(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.LEDGER))]
    ledgers += [record.ledger_id for _, _, record in catalog.frontiers(raw)]
    for directory in sorted((path / "partitions").glob("*/g*")) if path is not None else ():
        try:
            environment = Environment(directory, name=directory.parent.name, read_only=True)
        except DuelogError:
            continue
        try:
            with environment.read() as partition:
                ledgers += [fmt.unpack_u64(row) for _, row in catalog.rows(partition, fmt.prefix(Table.LOG))]
        except CorruptRecord:
            continue
        finally:
            environment.close()
    topics = [fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))]
    used = {
        catalog.LEDGERS: max(ledgers, default=0),
        catalog.TOPICS: max(topics, default=0),
        catalog.SUBSCRIPTIONS: max((row.subscription_id for _, _, row in catalog.cursors(raw)), default=0),
    }
    for name, highest in used.items():
        fields = transaction.get(fmt.counter_key(name))
        if (1 if fields is None else fmt.unpack_u64(fields)) <= highest:
            transaction.put(fmt.counter_key(name), fmt.pack_u64(highest + 1_000))
            actions.append(f"counter {name}: set past {highest}")


def _drop_strangers(main: Environment, give_up: GiveUp, actions: list[str]) -> None:
    """Runs, ledgers, cursors and bitmaps that belong to nothing."""
    with main.read() as raw:
        topics = {fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))}
        rows = list(catalog.rows(raw, fmt.prefix(Table.LEDGER)))
        ledgers = {fmt.trailing_u64(key) for key, _ in rows if fmt.trailing_u32(key[:5]) in topics}
        subscriptions = {row.subscription_id for topic_id, _, row in catalog.cursors(raw) if topic_id in topics}
        bad = [key for key, _ in rows if fmt.trailing_u32(key[:5]) not in topics]
        bad += [k for k, _ in catalog.rows(raw, fmt.prefix(Table.CURSOR)) if fmt.trailing_u32(k[:5]) not in topics]
        acked = catalog.rows(raw, fmt.prefix(Table.ACKED))
        bad += [key for key, _ in acked if fmt.trailing_u32(key[:5]) not in subscriptions]
        cursor = raw.cursor()
        more = cursor.set_range(fmt.RUN_PREFIX)
        while more:
            key = bytes(cursor.key())
            ledger_id, first = fmt.split_run_key(key)
            if ledger_id not in ledgers:
                give_up(GivenUp("main", ledger_id, first, "its ledger is in no catalog", bytes(cursor.value())))
                bad.append(key)
            more = cursor.next()
    if bad:
        main.write(lambda transaction: [transaction.raw.delete(key) for key in bad])
        actions.append(f"main: removed {len(bad)} records that belong to nothing")
