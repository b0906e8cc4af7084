"""Trimming: removal of whole ledgers from the front of a main log, and its consequences.

A ledger goes when every subscription's mark-delete position is past it and retention allows. One
transaction marks it TRIMMING and releases each closed partition whose last marker of this topic lay in
it; its runs are then removed in bounded parts, so that firing is not held up, its record with the last of them, and
its body file. A crash in between leaves a TRIMMING record, or the file, which the next open finishes.
"""

from collections.abc import Callable, Sequence

from ..store.codec import format as fmt
from ..store.codec.format import LedgerState, PartitionRecord, PartitionState
from ..store.env.body_file import body_files
from ..store.env.environment import Environment
from ..store.env.transaction import LmdbTransaction, Transaction
from ..store.files.failpoints import reach
from ..store.log import catalog
from ..store.log.ledger import find_tail
from ..store.log.managed_ledger import LedgerInfo, ManagedLedger
from ..store.position import Position

_RUNS_A_PART = 512


def passed(ledger: LedgerInfo, mark_deletes: Sequence[Position]) -> bool:
    """Return whether every entry of a closed ledger is at or before each of the mark-delete positions.

    True without subscriptions: nobody is ever going to read the fired messages of such a topic.
    """
    last = Position(ledger.ledger_id, ledger.entries - 1)
    return all(mark_delete >= last for mark_delete in mark_deletes)


def first_kept(
    ledgers: Sequence[LedgerInfo],
    mark_deletes: Sequence[Position],
    retention_ms: int,
    retention_bytes: int,
    now_ms: int,
) -> tuple[int, int | None]:
    """(id of the first ledger to keep, when to look again because of `retention_ms`).

    `ledgers` is a main log's list, the open ledger last. A passed ledger is kept while it is younger than
    `retention_ms`, counted from `closed_ms`, or among the newest `retention_bytes` of passed ones. So with no retention
    at all, with no subscription, and where all acknowledged it, it is kept until the last message in it is due.
    """
    done = []
    for ledger in ledgers:
        if not ledger.closed or not passed(ledger, mark_deletes):
            break
        done.append(ledger)
    retained = 0
    kept_by_size = len(done)
    if retention_bytes:
        while kept_by_size and retained < retention_bytes:
            kept_by_size -= 1
            retained += done[kept_by_size].stored_bytes
    for ledger in done[:kept_by_size]:
        if ledger.closed_ms + retention_ms > now_ms:
            return ledger.ledger_id, ledger.closed_ms + retention_ms
    return ledgers[kept_by_size].ledger_id, None


def roll_ledgers(main: Environment, logs: Sequence[ManagedLedger], now_ms: int) -> None:
    """Close the open ledgers of `logs` and begin the next ones, in one commit; empty ones stay."""

    def work(transaction: Transaction) -> None:
        for log in logs:
            log.roll(transaction, now_ms)

    if logs:
        main.write(work, makes_space=True)


def trim_ledgers(
    main: Environment, firsts: Sequence[tuple[ManagedLedger, int]], trimmed: Callable[[list[int]], object]
) -> None:
    """Trim the closed ledgers of each log before the ledger with it, and release what they held, in one commit.

    trimmed: called as it ends, with the starts of the partitions that no topic holds any more. The runs are still to be
    removed (`remove_part`).
    """

    def work(transaction: Transaction) -> None:
        freed: list[int] = []
        for log, first in firsts:
            log.trim(transaction, first)
            freed += release_before(transaction, log.topic_id, first)
        transaction.after_commit(lambda: trimmed(freed))

    main.write(work, makes_space=True)
    reach("trim.recorded")


def release_before(transaction: Transaction, topic_id: int, first: int | None) -> list[int]:
    """Release each closed partition whose last marker of the topic lies before ledger `first` (None: every one).

    Returns the starts of those without references now.
    """
    freed = []
    for _, start_ms, record in list(catalog.frontiers(transaction.raw, topic_id)):
        if record.released or (first is not None and record.marker_ledger >= first):
            continue
        key = fmt.partition_key(start_ms)
        fields = transaction.get(key)
        partition = None if fields is None else PartitionRecord.unpack(fields)
        if partition is None or partition.state is not PartitionState.CLOSED:
            continue  # it is released when it closes
        transaction.put(fmt.frontier_key(topic_id, start_ms), record._replace(released=1).pack())
        transaction.put(key, partition._replace(references=partition.references - 1).pack())
        if partition.references == 1:
            freed.append(start_ms)
    return freed


def remove_ledgers(main: Environment, ledgers: Sequence[tuple[int, int]]) -> None:
    """Remove the runs of the ledgers (topic id, ledger id) that were trimmed, in parts, then their records."""
    while ledgers:
        ledgers = remove_part(main, ledgers)


def remove_part(main: Environment, ledgers: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """One bounded commit of `remove_ledgers`; returns the ledgers that are left.

    The log need not know of it: a commit that is lost leaves the last runs of a ledger with its record.
    """

    def part(transaction: LmdbTransaction) -> int:
        cursor = transaction.raw.cursor()
        budget = _RUNS_A_PART
        done = 0
        for topic_id, ledger_id in ledgers[:_RUNS_A_PART]:
            more = cursor.set_range(fmt.run_prefix(ledger_id))
            while more and budget and fmt.is_run_of(cursor.key(), ledger_id):
                more = cursor.delete()
                budget -= 1
            if not budget:
                break
            transaction.delete(fmt.ledger_key(topic_id, ledger_id))
            done += 1
        transaction.last_run = _last_run(transaction)
        return done

    done = main.commit(part)
    reach("trim.part")
    main.remove_bodies(ledger_id for _, ledger_id in ledgers[:done])
    return ledgers[done:]


def _last_run(transaction: LmdbTransaction) -> bytes:
    cursor = transaction.raw.cursor()
    return max(bytes(cursor.key()), fmt.RUN_PREFIX) if cursor.last() else fmt.RUN_PREFIX


def remove_unnamed_bodies(main: Environment) -> None:
    """Remove the body files of ledgers without runs: a crash kept them from being removed, or from being named.

    REQUIRES: nothing is sent.
    """
    with main.read() as raw:
        unnamed = [each for each in body_files(main.path) if not find_tail(raw, main.name, each)]
    main.remove_bodies(unnamed)


def unfinished(main: Environment) -> list[tuple[int, int]]:
    """(topic id, ledger id) of the ledgers that were trimmed and not yet removed."""
    rows = []
    for page in catalog.pages(main, fmt.prefix(fmt.Table.LEDGER)):
        for key, fields in page:
            if fmt.LedgerRecord.unpack(fields).state is LedgerState.TRIMMING:
                rows.append((fmt.leading_u32(key), fmt.trailing_u64(key)))
    return rows
