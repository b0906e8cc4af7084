"""Logs of a partition under repair: which topic a ledger with runs belongs to that the log table does not name.

The frontier of a topic names its log; the key of a damaged record names the topic; markers lie in a main log of the
topic; an entry that was rescheduled or follows another names that one, of the same topic. Else the only topic that has
no log here, where none was deleted. Where all that fails the log gets a topic of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import lmdb

from ...background.recurring import unpack_schedule
from ...store.codec import format as fmt
from ...store.codec.format import Table
from ...store.codec.run import Run, RunKind
from ...store.env.environment import Environment
from ...store.env.transaction import Transaction
from ...store.errors import CorruptRecord
from ...store.log import catalog
from ...store.log.scan import runs
from .repair_catalog import recover_topic, run_ledgers
from .repair_report import Account


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
        topics = {fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))}
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
        found = _marked_by(raw, ledger_id)
        for key, fields in catalog.rows(raw, fmt.prefix(Table.SCHEDULE)):
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


def _marked_by(raw: lmdb.Transaction, ledger_id: int) -> set[int]:
    """Topics in whose main logs markers point into the ledger."""
    found = set()
    for key, _ in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
        for run in runs(raw, "main", fmt.trailing_u64(key)):
            if isinstance(run, Run) and run.kind == RunKind.MARKERS and run.target == ledger_id:
                found.add(fmt.leading_u32(key))
    return found
