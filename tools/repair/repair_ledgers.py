"""Ledgers under repair: which topic one belongs to whose record is lost, and what that record said.

Of a partition's logs the frontier of a topic names its log; the key of a damaged record names the topic; markers lie in
a main log of the topic; an entry that was rescheduled or follows another names that one, of the same topic. Else it is
that of the only topic that has no log here, where none was deleted.

Of main logs the key of a damaged record names the topic. Where the record is gone, its runs tell: markers point into a
log of the topic, cursors, acknowledgements and frontiers name the ledger; else the topic whose list has a gap there: it
has no open ledger, or one of its ledgers was closed at another time than the next was begun.

Where all that fails the ledger becomes a topic of its own: messages that can be read are not discarded because nothing
says whose they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...background.schedule_record import schedule_rows, unpack_schedule
from ...store.codec import format as fmt
from ...store.codec.format import LedgerRecord, LedgerState, Table
from ...store.codec.run import Run, RunKind
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.env.transaction import Transaction
from ...store.errors import CorruptRecord
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.log.scan import runs
from .repair_catalog import RECOVERED, main_ledgers, recover_topic, run_ledgers, topic_ids
from .repair_fired import marker_runs
from .repair_report import Account

_Lists = dict[int, list[tuple[int, LedgerRecord]]]


def read_logs(environment: Environment) -> dict[int, int]:
    """Topic id -> ledger id of the logs of a partition."""
    with environment.read() as raw:
        rows = catalog.rows(raw, fmt.prefix(Table.LOG))
        return {fmt.trailing_u32(key): fmt.unpack_u64(fields) for key, fields in rows}


def mend_logs(
    main: Environment, environment: Environment, start_ms: int, lost: Iterable[bytes], elsewhere: dict[int, int],
    account: Account,
) -> dict[int, int]:  # fmt: skip
    """Name every log of a partition; topic id -> ledger id.

    lost: keys of records that cannot be read. elsewhere: ledger id -> topic id of the logs of all partitions.
    """
    logs = read_logs(environment)
    named = [fmt.trailing_u32(key) for key in lost if key[0] == Table.LOG]
    missing: dict[int, int] = {}
    with main.read() as raw:
        for topic_id, start, frontier in catalog.frontiers(raw):
            if start == start_ms and logs.get(topic_id) != frontier.ledger_id:
                missing[topic_id] = frontier.ledger_id
        topics = topic_ids(raw)
        following = raw.get(fmt.counter_key(catalog.TOPICS))
        fields = None if following is None else fmt.unseal(fmt.counter_key(catalog.TOPICS), following)
        none_deleted = fields is not None and fmt.unpack_u64(fields) == len(topics) + 1
    with environment.read() as raw:
        orphans = [found for found in run_ledgers(raw) if found not in {*logs.values(), *missing.values()}]
    for ledger_id in orphans:
        free = topics - logs.keys() - missing.keys()
        claims = _claims(main, environment, ledger_id, elsewhere) & (free | set(named))
        if not claims:
            claims = {topic_id for topic_id in named if topic_id not in missing} or (free if none_deleted else set())
        if len(claims) == 1:
            missing[claims.pop()] = ledger_id
        else:
            suffix = f"ledger-{ledger_id}"
            missing[account.write(main, lambda transaction: recover_topic(transaction, suffix, account))] = ledger_id  # noqa: B023

    def register(transaction: Transaction) -> None:
        for topic_id, ledger_id in missing.items():
            transaction.put(fmt.log_key(topic_id), fmt.pack_u64(ledger_id))

    if missing:
        environment.write(register)
        account.say(f"{environment.name}: {len(missing)} logs registered again")
    return {**logs, **missing}


def _claims(main: Environment, environment: Environment, ledger_id: int, elsewhere: dict[int, int]) -> set[int]:
    """Topics that something says have a log of this ledger id."""
    with main.read() as raw:
        owners = main_ledgers(raw)
        found = {owners[run.ledger_id] for run in marker_runs(raw, owners) if run.target == ledger_id}
        for key, fields in schedule_rows(raw):
            try:
                waiting = unpack_schedule(fields, "", "").next_id
            except CorruptRecord:
                continue
            if waiting is not None and waiting.ledger_id == ledger_id:
                found.add(fmt.split_named_key(key)[0])
    with environment.read() as raw:
        for run in runs(raw, environment.name, ledger_id):
            if isinstance(run, Run) and run.kind == RunKind.MESSAGES and run.conditional:
                found |= {elsewhere[old] for old in run.replaced()[0].tolist() if old in elsewhere}
    return found


def mend_ledgers(main: Environment, lost: Iterable[bytes], logs: dict[int, int], account: Account) -> None:
    """Make records of ledgers anew; each topic has an open one afterwards.

    lost: keys of records that cannot be read. logs: ledger id -> topic id of the logs of all partitions.
    """
    named = {fmt.trailing_u64(key): fmt.leading_u32(key) for key in lost if key[0] == Table.LEDGER}

    def work(transaction: Transaction) -> None:
        raw = transaction.raw
        topics = topic_ids(raw)
        for ledger_id in sorted({*run_ledgers(raw), *named} - main_ledgers(raw).keys()):
            lists: _Lists = {topic_id: catalog.ledgers(raw, topic_id) for topic_id in topics}
            topic_id = named.get(ledger_id) or _owner(raw, ledger_id, lists, logs)
            if topic_id is None:
                topic_id = recover_topic(transaction, f"ledger-{ledger_id}", account)
                _begin_with(transaction, topic_id, ledger_id)
                lists[topic_id] = catalog.ledgers(raw, topic_id)
                topics.add(topic_id)
            elif topic_id not in lists:
                continue  # deleted with its topic
            record = _record(raw, topic_id, ledger_id, lists[topic_id], logs)
            transaction.put(fmt.ledger_key(topic_id, ledger_id), record.pack())
            account.say(f"topic {topic_id}: ledger {ledger_id} registered again, {record.entries} entries")
        for topic_id in sorted(topics):
            ledgers = catalog.ledgers(raw, topic_id)
            if all(record.state is not LedgerState.OPEN for _, record in ledgers):
                catalog.add_ledger(transaction, topic_id, 0)
                account.say(f"topic {topic_id}: a new ledger begun")

    account.write(main, work)


def _begin_with(transaction: Transaction, topic_id: int, ledger_id: int) -> None:
    """Have the subscription of a recovered topic begin with a ledger."""
    for _, name, row in list(catalog.cursors(transaction.raw, topic_id)):
        if name == RECOVERED:
            transaction.put(fmt.cursor_key(topic_id, name), row._replace(ledger_id=ledger_id, next_entry=0).pack())


def _owner(raw: Reads, ledger_id: int, lists: _Lists, logs: dict[int, int]) -> int | None:
    """The topic that a ledger without a record belongs to, if the rest tells."""
    claims = {logs.get(run.target) for run in marker_runs(raw, [ledger_id])}
    claims |= {topic_id for topic_id, _, row in catalog.cursors(raw) if row.ledger_id == ledger_id}
    claims |= {topic_id for topic_id, _, row in catalog.frontiers(raw) if row.fired and row.marker_ledger == ledger_id}
    subscriptions = {row.subscription_id: topic_id for topic_id, _, row in catalog.cursors(raw)}
    for key, _ in catalog.rows(raw, fmt.prefix(Table.ACKED)):
        if fmt.trailing_u64(key) == ledger_id:
            claims.add(subscriptions.get(fmt.leading_u32(key)))
    claims = (claims & lists.keys()) or {topic_id for topic_id in lists if _has_gap(raw, topic_id, ledger_id, lists)}
    if not claims and len(lists) == 1:
        claims = set(lists)
    return claims.pop() if len(claims) == 1 else None


def _has_gap(raw: Reads, topic_id: int, ledger_id: int, lists: _Lists) -> bool:
    """Whether a topic's list lacks a ledger where `ledger_id` would stand."""
    before = [row for row in lists[topic_id] if row[0] < ledger_id]
    after = [row for row in lists[topic_id] if row[0] > ledger_id]
    if not after:
        return not before or before[-1][1].state is not LedgerState.OPEN
    if before:
        return before[-1][1].closed_ms < after[0][1].created_ms  # it closes when all in it is due, or later
    record = catalog.find_topic(raw, catalog.topic_name(raw, topic_id) or "")
    return record is not None and record.created_ms != after[0][1].created_ms


def _record(
    raw: Reads, topic_id: int, ledger_id: int, ledgers: list[tuple[int, LedgerRecord]], logs: dict[int, int]
) -> LedgerRecord:
    """What the record of a ledger said, as its runs and its neighbours tell."""
    found = [run for run in runs(raw, "main", ledger_id) if isinstance(run, Run)]
    before = [row for number, row in ledgers if number < ledger_id]
    after = [row for number, row in ledgers if number > ledger_id]
    mark = raw.get(fmt.counter_key(catalog.CLOCK))
    now_ms = 0 if mark is None else fmt.unpack_u64(fmt.unseal(fmt.counter_key(catalog.CLOCK), mark))
    created_ms = before[-1].closed_ms if before else 0
    entries = find_tail(raw, "main", ledger_id)
    size = sum(run.stored_bytes for run in found)
    if not after:
        return LedgerRecord(created_ms, 0, 0, 0, LedgerState.OPEN)
    state = LedgerState.CLOSED
    cursors = [row for _, _, row in catalog.cursors(raw, topic_id)]
    if all(row.ledger_id > ledger_id for row in cursors) and not any(
        row.state is not LedgerState.TRIMMING for row in before
    ):
        gone = [run for run in found if run.kind == RunKind.MARKERS and run.target not in logs]
        if not found or found[0].first_entry or gone:  # it was being removed
            state = LedgerState.TRIMMING
    latest = max((int(run.dues().max()) for run in found if run.kind == RunKind.MESSAGES), default=0)
    return LedgerRecord(created_ms, max(after[0].created_ms or now_ms, latest), entries, size, state)
