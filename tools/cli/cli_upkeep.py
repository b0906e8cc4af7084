"""The commands that make and keep a store: init, backup, move-namespace, repair, compact, tick; policies.

`duelog policies` has what a store keeps, and the delay policies of PIP-437. These have the flags of Pulsar's admins.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument, short_names
from ...store.names import TopicName
from .. import output as out
from ..values import MIN_DEAD_RATIO, alone, iso_time, open_to_read, require_store, settings_of
from .options import (
    NOTHING,
    Given,
    Group,
    KeptPolicies,
    Master,
    Place,
    PolicyOptions,
    Store,
    Stores,
    allow_every_descriptor,
    argument,
    asked,
    end_fleet,
    in_fleet,
    option,
    policy_values,
)

if TYPE_CHECKING:
    from ... import Policies
    from ..compact_store import CompactionReport, PartitionCompaction, Runner

app = typer.Typer()


@app.command("init")
def init(
    store: Store,
    partition: Annotated[
        str, option("DURATION", "Span of due time of one partition; it cannot be changed later.")
    ] = "1d",
    kept: KeptPolicies = NOTHING,
) -> None:
    """Make a store, with what it is to keep unless a namespace, topic or subscription says otherwise.

    `send --create` and `import` make one too, with a day for the span and the defaults for the rest. `duelog policies`
    shows and changes what is set here; the span stays.

    $ duelog init data --partition 1h --retention 7d --max-redeliveries 5
    """
    from ... import DelayedStore, StoreConfig
    from ...opening import stored_span_ms
    from ...store.policy.policies import DEFAULTS

    if stored_span_ms(store) is not None:
        raise InvalidArgument("STORE", str(store), "there is a store already")
    values = policy_values(kept)
    chosen: dict[str, Any] = {name: value for name, value in values.items() if value != DEFAULTS[name]}
    span_ms = round(1000 * duration_seconds("--partition", partition))
    config = StoreConfig(partition_ms=span_ms, background=False, **chosen)
    with DelayedStore.open(store, config) as opened:
        set_ = opened.policies()
    shown = {} if set_ is None else set_.fields_set()
    line = ", ".join(f"{name}={value}" for name, value in {"partition_ms": span_ms, **shown}.items())
    out.answer({"partition_ms": span_ms, "policies": shown}, line)


@app.command("backup")
def backup(
    store: Store,
    dest: Annotated[
        Path | None, argument("[DEST]", "Where to make the copy: an empty directory, or none.", show_default=False)
    ] = None,
) -> None:
    """Copy a store while it is in use, by this process or another. Restoring is opening the copy.

    Without DEST a store with a copy in object storage gets a manifest there: what has changed is uploaded, and
    `duelog restore` begins with it.

    The copy is the store as of one instant after the command began. A file named BACKUP, with the checksums of the
    others, is written last: a copy without one is not complete. `duelog check --deep DEST` compares the copy with it,
    as long as no process has opened it for writing.

    $ duelog backup data copies/2026-11-21
    """
    allow_every_descriptor()
    if dest is None:
        taken_ms = _save_manifest(store)
        out.answer({"taken_ms": taken_ms}, f"the copy has a manifest as of {iso_time(taken_ms)}")
        return
    with open_to_read(store) as opened:
        result = opened.backup(dest)
    if out.in_json():
        out.write_json(asdict(result))
        return
    out.say(f"copied {result.partitions:,} partitions and the main environment, {out.size_text(result.file_bytes)}")


def _save_manifest(store: Path) -> int:
    """Have the process that has a store open make a manifest, or this one where none has."""
    from ... import DelayedStore
    from ...connected.connected_store import connect
    from ...operations.wire import Disconnected
    from ...replica.replica_status import shipped_to

    require_store(store)
    url = shipped_to(store)
    if url is None:
        raise InvalidArgument("DEST", None, "left out, and the store has no copy: `duelog replica init` prepares one")
    try:
        with connect(store) as opened:
            return opened.save_manifest()
    except Disconnected:
        with DelayedStore.open(store, settings_of(store, replica=url, background=False)) as opened:
            return opened.save_manifest()


@app.command("move-namespace")
def move_namespace(
    namespace: Annotated[str, typer.Argument(metavar="TENANT/NAMESPACE", show_default=False)],
    to: Annotated[str, option("BROKER", "Name of the broker that is to serve it.")],
    placement: Annotated[Path, option("FILE", "The placement table, with `store` of both brokers.")],
) -> None:
    """Move a namespace to a store of its own, and have the placement table say so.

    End both brokers first: no process may have either store open. The new store, which must not be there yet, gets all
    that the old one has of the namespace, with ids, due times, positions and policies as they are; then the table is
    switched, then the old store forgets it. A command that was interrupted is given again: nothing is lost, and nothing
    is there twice.

    $ duelog move-namespace acme/orders --to b --placement placement.toml
    """
    from ..move_namespace import move_namespace as run

    allow_every_descriptor()
    with alone("no broker may have either of the two: end both first"):
        moved = run(placement, namespace, to, (lambda step: None) if out.in_json() else out.say)
    if out.in_json():
        out.write_json(asdict(moved))
        return
    what = "moved" if moved.copied else "was moved before; removed from the old store"
    out.say(
        f"{namespace} {what}: {moved.topics:,} topics, {moved.pending:,} messages pending, {moved.backlog:,} to deliver"
    )


@app.command("repair")
def repair(
    store: Store,
    output: Annotated[Path | None, option("FILE", "Where to put what is discarded; else STORE-given-up.jsonl.")] = None,
) -> None:
    """Make anew what can be told from the rest, discard what cannot, into a file with the reasons: the store is usable.

    Refused while a process has the store open. Make a copy of the store first: what is discarded is not delivered any
    more. The file has a JSON line for each entry or record: environment, ledger, entry, reason, and the bytes as far
    as they can be read; messages that only a damaged write-ahead log had are among them. Exit status 1: something is
    left that cannot be repaired; restore a backup.

    $ duelog repair data --output given-up.jsonl
    """
    from ..repair.repair_store import repair_store

    require_store(store)
    with alone("repair rewrites the files that it works on: end it first"):
        beside = (path := store.absolute()).with_name(f"{path.name}-given-up.jsonl")  # `.` alone has no name
        report = repair_store(store, output or beside)
    for action in report.actions:
        out.answer({"action": action}, out.printable(action))
    if out.in_json():
        figures = {name: value for name, value in asdict(report).items() if name != "actions"}
        out.write_json({**figures, "left": [found.message for found in report.left]})
    else:
        for found in report.left:
            out.write_line(out.printable(f"left: {found.code}: {found.address}: {found.message}"))
        for kind, tally in report.kinds.items():
            out.write_line(f"{kind}: {tally.found:,} found, {tally.kept:,} kept, {tally.discarded:,} discarded")
        out.say(
            f"messages lost: {report.lost:,}; that may come again though acknowledged: {report.again:,}, "
            f"though cancelled: {report.uncancelled:,}"
        )
        out.say(f"discarded: {report.given_up:,}; left: {len(report.left):,}")
    if report.left:
        raise typer.Exit(1)


@app.command("compact")
def compact(
    stores: Stores,
    min_dead_ratio: Annotated[
        float, option("R", "Rewrite a partition if this share of its bytes can go.", min=0, max=1)
    ] = MIN_DEAD_RATIO,
    dry_run: Annotated[bool, option("--dry-run", "Only say what would be dropped.")] = False,
    spark: Annotated[bool, option("--spark", "Plan and copy by Spark (duelog[spark]).")] = False,
    master: Master = None,
) -> None:
    """Rewrite closed partitions without the bodies of messages that no subscription needs any more.

    A body is dropped once its message was cancelled or acknowledged by every subscription of its topic; message ids
    and due times stay. What the store's retention keeps stays too (`duelog policies`); what is dropped cannot be gone
    back to by seeking. Works beside a process that has the store open, which takes finished partitions over
    at its next tick, and with none. Each copy is verified against its source first. Exit status 1: a partition could
    not be compacted, and is as it was. Of several stores each is compacted on its own; exit status 2: one could not be
    opened.

    $ duelog compact data --min-dead-ratio 0.5
    $ duelog compact "stores/*"
    """
    from ..columns.sealed import copy_url
    from ..compact_store import compact_store
    from ..fleet import is_fleet, stores_of

    if not stores:
        raise InvalidArgument("STORE", None, "expected the directory of a store")
    if is_fleet(stores):
        from ..spark.spark_jobs import compact_fleet

        found, how = stores_of(stores), {"min_dead_ratio": min_dead_ratio, "dry_run": dry_run}
        outcomes = in_fleet(compact_fleet, found, spark, master, **how)
        if out.in_json():
            out.write_json_lines({"store": each.name, **_as_json(each.result, each.reason)} for each in outcomes)

        def show(store: Path, report: CompactionReport) -> None:
            out.write_line(out.printable(f"{store}:"))
            _show(report, dry_run)

        end_fleet(outcomes, None if out.in_json() else show, lambda report: report.failed)
        return
    (store,) = stores
    if spark:
        from ..spark.spark_jobs import compact_with_spark

    run: Runner | None = (lambda tasks, progress: compact_with_spark(tasks, master=master)) if spark else None
    with out.progress_bar("bytes") as progress:
        report = compact_store(store, min_dead_ratio=min_dead_ratio, dry_run=dry_run, run=run, progress=progress)
    _show(report, dry_run, "at its next tick" if copy_url(store) is None else "with its next manifest")
    if report.waiting and not dry_run and copy_url(store) is None:
        _have_adopted(store)
    if report.failed:
        raise typer.Exit(1)


def _have_adopted(store: Path) -> None:
    """Have the process that has a store open take over what was compacted, at once if it can be asked."""
    from ...operations.wire_client import Connection

    client = Connection.to(store)
    if client is not None:
        with client:
            client.ask("tick", {})


@app.command("tick")
def tick(store: Store) -> None:
    """Do what is due now: fire, close, trim, delete; and say when the next thing is. For stores that no process keeps.

    $ duelog tick data
    """
    with asked(store, writes=True) as opened:
        done = opened.tick()
    counts = ", ".join(f"{name}: {done[name]:,}" for name in ("fired", "closed", "trimmed", "deleted", "snapshots"))
    due = "nothing is planned" if done["next_due_ms"] is None else f"next at {iso_time(done['next_due_ms'])}"
    out.answer(done, f"{counts}; {due}")


def _as_json(report: CompactionReport | None, reason: str = "") -> dict[str, object]:
    if report is None:
        return {"reason": reason}
    rows = [{**asdict(each), "dead_ratio": each.dead_ratio} for each in report.partitions]
    return {"partitions": rows, "bytes_before": report.bytes_before, "bytes_after": report.bytes_after}


def _show(report: CompactionReport, dry_run: bool, when: str = "at its next tick") -> None:
    if out.in_json():
        out.write_json(_as_json(report))
    else:
        columns = ("partition", ">messages", ">dead", ">dead bytes", ">ratio", ">before", ">after", "", "")
        out.write_table(f"closed partitions: {len(report.partitions):,}", columns, map(_row, report.partitions))
    if dry_run:
        return
    compacted = sum(each.file_bytes_after is not None for each in report.partitions)
    before, after = out.size_text(report.bytes_before), out.size_text(report.bytes_after)
    out.say(f"compacted: {compacted:,} partitions, {before} before, {after} after")
    if report.waiting:
        out.say(f"{len(report.waiting):,} are taken over by the process that has the store open, {when}")
    if report.failed:
        out.say(f"{len(report.failed):,} could not be compacted and are as they were")


def _row(each: PartitionCompaction) -> tuple[object, ...]:
    after = None if each.file_bytes_after is None else out.size_text(each.file_bytes_after)
    return (
        each.partition,
        each.messages,
        each.dead_messages,
        out.size_text(each.dead_bytes),
        f"{each.dead_ratio:.0%}",
        out.size_text(each.file_bytes),
        after,
        each.outcome,
        each.reason,
    )


policies_app = typer.Typer(
    name="policies",
    no_args_is_help=True,
    help="Policies of a store, a namespace, a topic or a subscription: look at them, set, unset and remove them.",
)

Scope = Annotated[
    Given,
    Group(
        namespace=Annotated[
            str | None, option("--namespace", "-n", "NAMESPACE", "Of this namespace: tenant/namespace.")
        ],
        topic=Annotated[str | None, option("--topic", "TOPIC", "Of this topic.")],
        subscription=Annotated[
            str | None, option("--subscription", "-s", "SUBSCRIPTION", "Of this subscription of --topic.")
        ],
    ),
]
"""Where policies are set; nothing: in the store."""


@policies_app.command("get")
def get_(store: Place, scope: Scope = NOTHING) -> None:
    """Show what is set: at every scope, or at one; for a topic or a subscription what is in force, by which scope.

    $ duelog policies get data --topic reminders --subscription mailer
    $ duelog policies get --server http://localhost:8080 --topic reminders
    """
    namespace, topic, subscription = scope.values()
    with store.opened() as there:
        here = there.policies(**scope)
        if topic is not None or subscription is not None:
            _show_topic(str(topic), subscription, here, there.effective(str(topic), subscription))
            return
        scopes = here or {}
        if namespace is not None and here is not None:
            scopes = {f"namespace {namespace}": here}
        values = ({"scope": name, **policies} for name, policies in scopes.items())
        rows = (
            (short_names(of) if at == 0 else "", name, value)
            for of, policies in scopes.items()
            for at, (name, value) in enumerate((name, value) for name, value in policies.items() if value is not None)
        )
        out.listing(values, "policies", ["scope", "policy", ">value"], rows)


def _show_topic(topic: str, subscription: str | None, here: dict[str, Any] | None, found: dict[str, Any]) -> None:
    name, values, set_at = str(TopicName.parse(topic)), found["values"], found["set_at"]
    if out.in_json():
        out.write_json(
            {"topic": name, "subscription": subscription, "set": here, "effective": values, "set_at": set_at}
        )
        return
    rows = [
        (policy, here and here[policy], value, set_at[policy] and short_names(set_at[policy]))
        for policy, value in values.items()
    ]
    of = name if subscription is None else f"subscription {subscription} of {name}"
    out.write_table(f"policies of {short_names(of)}", ["policy", ">set here", ">in force", "set at"], rows)


@policies_app.command("set")
def set_(store: Place, scope: Scope = NOTHING, policies: PolicyOptions = NOTHING) -> None:
    """Set policies of the store, a namespace, a topic or a subscription; what is not named stays as it is.

    $ duelog policies set data --namespace public/default --enable --time 1s --max-delay 7d
    $ duelog policies set data --topic reminders --retention 7d --max-redeliveries 5
    """
    values = policy_values(policies)
    if not values:
        raise InvalidArgument("policies", None, "give one of --enable, --max-delay, --retention, ...; see --help")
    with store.opened(writes=True) as there:
        _say(there.update_policies(values, **scope))


@policies_app.command("unset")
def unset_(
    store: Place,
    fields: Annotated[list[str], argument("POLICY...", "Such as retention_ms, as `get` shows it.")],
    scope: Scope = NOTHING,
) -> None:
    """Unset single policies at one scope, so that the next wider one counts; the others stay.

    $ duelog policies unset data --topic reminders retention_ms
    """
    with store.opened(writes=True) as there:
        _say(there.update_policies(dict.fromkeys(fields), **scope))


def _say(policies: Policies) -> None:
    line = ", ".join(f"{name}={value}" for name, value in policies.fields_set().items())
    out.answer(asdict(policies), line or "nothing is set there")


@policies_app.command("remove")
def remove_(store: Place, scope: Scope = NOTHING) -> None:
    """Remove everything that is set at one scope, so that the next wider one counts; of the store: the defaults.

    $ duelog policies remove data --topic reminders
    """
    with store.opened(writes=True) as there:
        removed = there.remove_policies(**scope)
    out.answer({"removed": removed}, "removed" if removed else "nothing was set there")
