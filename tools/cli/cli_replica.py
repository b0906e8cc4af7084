"""The commands `duelog replica init | status | prune` and `duelog restore`: the copy of a store in object storage."""

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument
from ..output import answer, in_json, printable, progress_bar, say, size_text, write_json, write_line
from ..values import iso_time, require_store, stored_identity, time_ms
from .options import Store, allow_every_descriptor, argument, option

app = typer.Typer()
group = typer.Typer(
    name="replica",
    no_args_is_help=True,
    help="The copy of a store in object storage: prepare its prefix, see where it stands, drop what is old.",
)

Url = Annotated[
    str, argument("URL", "Prefix of the copy: s3://bucket/prefix, file:///directory ...", show_default=False)
]


@group.command("init")
def init(
    store: Store,
    url: Url,
    probe: Annotated[
        bool, option("--probe/--no-probe", "Have 32 writers create one object, 50 times: one must win each time.")
    ] = True,
) -> None:
    """Make an empty prefix the place of a store's copy; the store ships there once it is opened with `replica=URL`.

    A bucket that lets two writers create one object is refused. So is a prefix that another store has, or that has a
    log which this directory has not shipped: a copy of a store, or a restored one, takes a new prefix. Credentials come
    from the environment (AWS_ACCESS_KEY_ID and the like).

    $ duelog replica init data s3://backups/orders
    """
    from ...replica import identity
    from ...replica.bucket import Bucket

    require_store(store)
    bucket = Bucket(url)
    if probe:
        identity.probe(bucket)
    found = stored_identity(store)
    identity.claim(bucket, store.absolute(), found.store_id, found.partition_ms)
    answer({"url": url, "store_id": found.store_id.hex(), "probed": probe}, f"{url}: ready for {store}")


@group.command("status")
def status(
    place: Annotated[str, argument("STORE|URL", "Directory of the store, or prefix of its copy.", show_default=False)],
) -> None:
    """Show which moments can be restored, and of a store how far its copy is behind. Exit status 1: damage was found.

    $ duelog replica status data
    $ duelog replica status s3://backups/orders --json
    """
    from ...replica.bucket import Bucket
    from ...replica.replica_status import replica_status, shipped_to

    store, url = None, place
    if "://" not in place:
        store = Path(place)
        require_store(store)
        shipped = shipped_to(store)
        if shipped is None:
            raise InvalidArgument("STORE", place, "has no copy: `duelog replica init` prepares one")
        url = shipped
    found = replica_status(Bucket(url), store)
    if in_json():
        write_json({**found._asdict(), "damaged": list(found.damaged)})
    else:
        reach = "nothing can be restored yet"
        if found.first_ms is not None and found.last_ms is not None:
            reach = f"{iso_time(found.first_ms)} to {iso_time(found.last_ms)}, last group {found.last_place}"
        lines = {
            "url": found.url,
            "store": found.store_id,
            "restorable": reach,
            "manifests": f"{found.manifests:,}"
            + ("" if found.manifest_ms is None else f", newest {iso_time(found.manifest_ms)}"),
            "log": f"{found.log_objects:,} objects, {size_text(found.log_bytes)}",
            "files": f"{found.files:,}, {size_text(found.file_bytes)}",
        }
        if found.lease_ms:
            lines["leader"] = f"epoch {found.epoch}, {printable(found.leader) or 'address unknown'}"
        if found.behind_groups is not None:
            lines["behind"] = f"{found.behind_groups:,} groups, {size_text(found.behind_bytes or 0)}"
        for name, text in lines.items():
            write_line(f"{name + ':':<12}{text}")
        for text in found.damaged:
            say(printable(text))
    if found.damaged:
        raise typer.Exit(1)


@group.command("prune")
def prune(
    url: Url,
    retention: Annotated[str, option("--retention", "DURATION", "Every moment of it can still be restored.")] = "7d",
) -> None:
    """Remove what no restore within the retention needs. A store that ships does so with each manifest.

    The newest manifest always stays; of files that no manifest names those of the last day, too.

    $ duelog replica prune s3://backups/orders --retention 30d
    """
    from ...replica.bucket import Bucket
    from ...replica.identity import store_object
    from ...replica.pruning import prune as run

    bucket = Bucket(url)
    if store_object(bucket) is None:
        raise InvalidArgument("URL", url, "holds no copy of a store: there is no STORE")
    retention_ms = math.ceil(1000 * duration_seconds("--retention", retention))
    pruned = run(bucket, round(time.time() * 1000), retention_ms)
    line = f"removed {pruned.manifests:,} manifests, {pruned.log_objects:,} log objects, {pruned.files:,} files"
    answer(pruned._asdict(), line)


@group.command("diverged")
def diverged(
    store: Annotated[Path, argument("STORE", "Directory of the store.", show_default=False)],
    resend: Annotated[
        str | None,
        option(
            "--resend", "PLACE", "Send them to the store that is served there: its directory, or duelog://host:port."
        ),
    ] = None,
) -> None:
    """List messages that this machine had taken as the leader, and had not shipped when another took over.

    They are in STORE.diverged, by epoch, with the whole directory as it was. --resend may be given again: it numbers
    what it sends. Remove STORE.diverged once nothing there is wanted.

    $ duelog replica diverged data --resend duelog://localhost:6651
    """
    from ...connected.connected_store import connect
    from ...replica.set_aside import read_aside, send_again

    tails = read_aside(store.absolute())
    sent = 0
    if resend is not None and any(tails.values()):
        with connect(resend) as leading:
            sent = sum(send_again(leading, epoch, messages) for epoch, messages in tails.items())
    rows = [
        {"epoch": epoch, "topic": each.topic, "id": each.message_id, "due": iso_time(each.due_ms)}
        for epoch, messages in tails.items()
        for each in messages
    ]
    if in_json():
        write_json({"messages": rows, "sent": sent})
        return
    for row in rows:
        write_line(f"epoch {row['epoch']}  {row['due']}  {row['id']}  {printable(str(row['topic']))}")
    write_line(f"{len(rows):,} messages" + (f", {sent:,} sent again" if sent else ""))


@group.command("hand-over")
def hand_over(
    place: Annotated[
        str, argument("STORE|URL", "The store of the leader: its directory, or duelog://host:port.", show_default=False)
    ],
) -> None:
    """Have the leader resign, so that a standby leads at once. The machine that led follows it.

    What was written is in the copy before, and calls that come meanwhile fail. Where no standby is, the machine leads
    again after `lease_ms`.

    $ duelog replica hand-over data
    $ duelog replica hand-over duelog://localhost:6651
    """
    from ...connected.connected_store import connect

    with connect(place) as leading:
        leading.hand_over()
    answer({"handed_over": True}, f"{place}: has resigned, and a standby leads")


@app.command("restore")
def restore(
    url: Url,
    directory: Annotated[Path, argument("DIR", "Where to make the store: an empty directory, or none.")],
    at: Annotated[str | None, option("--at", "TIME", "As the store was then; else as new as can be.")] = None,
    group_: Annotated[int | None, option("--group", "N", "With the groups of the log up to this one.", min=1)] = None,
    check: Annotated[bool, option("--check", "Look through what was restored, as `check --deep` does.")] = False,
    replica: Annotated[
        str | None,
        option("--replica", "URL", "An empty prefix, prepared as the one that the store ships to from now on."),
    ] = None,
    max_local_bytes: Annotated[
        int | None,
        option("--max-local-bytes", "BYTES", "Far days, and those that are over, stay in --replica alone.", min=1),
    ] = None,
) -> None:
    """Restore a store from its copy. Exit status 1: --check has found something.

    The newest manifest at or before the moment, then the log up to it. A damaged or missing file is named, and the
    manifest before is taken. Where the log itself is damaged, or lacks groups, nothing is restored, and the line says
    which --group restores what is before. The store is built in DIR.restoring; a restore that was killed is given
    again. What was restored ships to a new prefix, not to this one.

    --max-local-bytes is for a store that is larger than the disk, and is opened with `max_local_bytes` from then on: of
    what takes more, each file is put under --replica, and one day at a time is here meanwhile.

    $ duelog restore s3://backups/orders data --at 2026-11-23T10:00Z --check
    """
    from ...replica import identity
    from ...replica.bucket import Bucket
    from ...replica.restoring import restore as run
    from ..store_check import check_store

    if at is not None and group_ is not None:
        raise InvalidArgument("--group", group_, "not together with --at")
    if max_local_bytes is not None and replica is None:
        raise InvalidArgument("--max-local-bytes", max_local_bytes, "needs --replica, where the rest is then")
    at_ms = None if at is None else time_ms("--at", at)
    home = None if replica is None else Bucket(replica)
    if home is not None:
        identity.probe(home)
    allow_every_descriptor()
    with progress_bar("bytes", time_left=False) as progress:
        restored = run(
            Bucket(url),
            directory.absolute(),
            at_ms=at_ms,
            group=group_,
            progress=lambda done: progress(done, 0),
            home=home,
            max_local_bytes=max_local_bytes,
        )
    findings = check_store(directory, deep=True) if check else []
    for text in restored.passed_over:
        say(printable(f"passed over: {text}"))
    for finding in findings:
        say(printable(f"{finding.severity}: {finding.code}: {finding.address}: {finding.message}"))
    size = size_text(restored.file_bytes + restored.log_bytes)
    line = (
        f"restored {directory} as of {iso_time(restored.time_ms)}, group {restored.place}: files of "
        f"{iso_time(restored.manifest_ms)}, {restored.groups:,} groups, {size}"
    )
    if restored.away_bytes:
        line += f", of which {size_text(restored.away_bytes)} are in {replica} alone"
    fields = {**restored._asdict(), "path": str(directory), "passed_over": list(restored.passed_over)}
    answer({**fields, "time": iso_time(restored.time_ms), "findings": len(findings)}, line)
    if findings:
        raise typer.Exit(1)
