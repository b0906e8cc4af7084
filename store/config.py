"""The settings of a store: one frozen value, checked when it is made.

Three groups: what changes behaviour, the defaults of a store that is made, and what changes speed only. What decides
what is kept lives in the store: its policies (policies.py), of which the second group is the beginning.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from .duration import Milliseconds, OptionalMilliseconds, take_plain
from .errors import InvalidArgument
from .names import TopicName

Durability = Literal["commit", "relaxed", "none"]
"""When a group is on this machine's disk."""

SendDurability = Literal[Durability, "replicated"]
"""When a send returns: see ``StoreConfig.durability``."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_INT64_MAX = 2**63 - 1
_UINT32_MAX = 2**32 - 1

T = TypeVar("T")
_Check = Callable[[str, object], None]


def _setting(default: T, check: _Check) -> T:
    """A field with what raises InvalidArgument for a value that is none of it."""
    return field(default=default, metadata={"check": check})


def _integer(default: int | None, lowest: int, highest: int, *, none: bool = False) -> Any:
    def check(name: str, value: object) -> None:
        if none and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(name, value, "expected an int or None" if none else "expected an int")
        if not lowest <= value <= highest:
            raise InvalidArgument(name, value, f"expected {lowest} to {highest}")

    return _setting(default, check)


def _ratio(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(name, value, "expected a number")
    if not 0 <= value <= 1:
        raise InvalidArgument(name, value, "expected 0 to 1")


def _durability(name: str, value: object) -> None:
    if not isinstance(value, str) or value not in get_args(SendDurability):
        raise InvalidArgument(name, value, f"expected one of {', '.join(get_args(SendDurability))}")


def _optional_url(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or "://" not in value):
        raise InvalidArgument(name, value, "expected a URL of object storage or None")


def _optional_bool(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(name, value, "expected True, False or None")


def _label(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(name, value, "expected a str")
    if not value or not value.isprintable():
        raise InvalidArgument(name, value, "expected one or more printable characters")


def _optional_topic(name: str, value: object) -> None:
    if value is None:
        return
    try:
        TopicName.parse(value)  # type: ignore[arg-type]  # parse refuses what is no str
    except InvalidArgument as error:
        raise InvalidArgument(name, value, error.reason) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of a store; raises InvalidArgument with the field's name and value.

    Times are in ms, or a ``timedelta`` that becomes one; sizes are in bytes.

    **Behaviour**

    partition_ms: span of due time of one partition, 1 to 2**32 - 1; a day. Written into the store when it is made:
        another value at a later open is FormatMismatch. Shorter gives space back sooner and loads smaller indexes;
        each partition costs a directory, three file descriptors while open, and an fsync whenever what was sent to it
        is applied, so spread-out due times want it longer.
    durability: ``"commit"``: a send returns when it is on disk, and nothing is lost at a crash or a power loss.
        ``"relaxed"``: it is in the page cache, and on disk within `relaxed_ms`; a power loss takes at most what was
        done in that time, be it sent, acknowledged or cancelled, and never corrupts.
        ``"none"``: it is in the page cache; a process crash loses nothing, a power loss may lose everything or leave an
        unusable file. For data that can be made again.
        ``"replicated"``: it is on disk, and in the copy (`replica`), so that a loss of the machine loses nothing; what
        cancels, acknowledges durably or changes the store waits likewise. Many wait for one put. The policy
        `replicated` says otherwise for a namespace or a topic.
    inline_delay_ms: a message due within this goes to the main log at once and is tracked in memory until due; 0:
        none does, which is the default: a message in the main log that is not yet visible can be neither
        cancelled nor rescheduled, and what it saves is one write of two where messages are sent one by one, and
        little in batches (`make bench ARGS=short_delays`). Longer holds up trimming of the main log by as much.
    max_message_bytes: largest encoded message: payload, key, properties and some ten bytes; 5 MiB, at most 1 GiB.
        Several large messages of a batch are in memory at once.
    cluster: value of the attribute ``pulsar.cluster`` of the metrics; ``"standalone"``.
    background: run a thread that fires what is due and wakes receivers. None: with the system clock yes, with a
        manual one no. Without it ``receive()`` and ``tick()`` fire.
    control: listen at a Unix socket in the store's directory, for commands of this user (`duelog send` and the like)
        while the store is open here. None: with the system clock yes, with a manual one no. It costs a thread that
        sleeps.
    replica: where the store's copy is kept, ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///directory``
        (`duelog[replica]`); None: nowhere. What is sent, acknowledged and cancelled is there within `ship_ms` and one
        put; a loss of the machine takes at most what was not. Credentials come from the environment, never from here.
    max_clock_jump_ms: firing stops with ClockJumped when the clock is found further forward than this at once; 30
        days; None: any jump is believed. It must be longer than any time for which the store lies closed or the
        machine sleeps, or it asks for ``accept_clock()`` after it.

    **Defaults of a store that is made**: written into the store as its policies when it is made; from then on every
    opening goes by what the store has, and one that asks for something else logs a warning (``duelog.config``).
    ``DelayedStore.set_policies`` changes them, for the store, a namespace, a topic or a subscription. A store that has
    lost its record takes over those of the first program that opens it for writing; commands are none.

    retention_ms: how long acknowledged ledgers of a main log are kept, from when they are closed; 0: not by age.
    retention_bytes: how many bytes of the newest acknowledged ledgers of a main log are kept; 0: not by size. A
        ledger is kept as long as either setting asks for it. Both cost disk only, and allow seeking back.
    ttl_ms: how long after its due time an unacknowledged message counts as acknowledged; None: for ever.
        None lets a dead subscription hold every partition and ledger that it has not read.
    ack_timeout_ms: a message handed out and not acknowledged for this long is delivered again; None: when its
        consumer closes. Shorter than the slowest handler means doubled work.
    nack_backoff_ms: a message given back without a delay is handed out again after this, doubled with each
        redelivery; 1 s.
    nack_backoff_max_ms: the most that it is doubled to; 60 s.
    max_redeliveries: deliveries after the first before a message goes to the dead-letter topic; None: no limit, and
        a message that no handler can take comes back for ever.
    dead_letter_topic: name of the dead-letter topic; None: ``<topic>-<subscription>-DLQ``. Unused where
        max_redeliveries is None.

    **Speed**

    max_in_flight_bytes: memory that messages of `send_async` may take until they are written; 64 MiB. More takes longer
        bursts without waiting, and loses as much of them at a crash.
    wal_bytes: largest segment of the write-ahead log; 128 MiB, 16 KiB to 1 GiB. There are two at most, and what they
        hold is in memory until it is applied. They begin small, and grow with the rate of sends and the number of
        partitions that these touch. Larger is applied more seldom, in larger commits, and read when a crash left it.
        A batch is atomic up to about this size.
    relaxed_ms: with durability "relaxed", how long sends may wait for the flush of the write-ahead log; 20. Longer is
        fewer flushes, and more is lost at a power loss.
    bucket_ms: span of one bucket of the delay index; 60 s. Finer buckets cost memory (at 1 s 60 to 85 bytes a
        message), coarser ones more sorting when a bucket is about to be due.
    preload_ms: how long before its start a partition is loaded; 60 s. Longer holds its index in memory longer, too
        short makes its first messages late by the load.
    fire_batch: most messages fired in one group; 5,000. Larger fires faster and holds up senders for longer.
    ack_flush_ms: how long acknowledgements may wait for a group commit; 100. Longer saves commits; a crash
        delivers the acknowledgements of that time again. 0: every acknowledgement commits.
    tracker_idle_ms: how long the index of a topic's inline messages is kept after its last consumer left; 60 s.
        Building it again reads the headers of the main log's runs.
    tracker_prune_interval_ms: at least so long from one pruning of that index, which drops what all subscriptions have
        received, to the next (PIP-448); 1 s. 0: whenever one receives. With 10,000 new entries it is not
        waited for.
    tracker_prune_ratio: share of the subscriptions with consumers that must have received more since the last
        pruning for another to be tried, 0 to 1; 0.5. What the slowest of them still needs is never forgotten, so 1
        saves the most looks; 0: look each time.
    ledger_max_entries: entries after which a main log starts a new ledger, at most 2**32 - 1; 50,000. Trimming frees
        whole ledgers: smaller frees sooner and costs a catalog record each.
    ledger_max_bytes: bytes after which it does; 64 MiB.
    ledger_max_age_ms: age after which it does; 4 h. A partition is held by the ledger of its last marker.
    snapshot_every_entries: entries appended to a begun partition log between two snapshots of its index; 1,000,000.
        Fewer means more to write, more a longer replay at open (about 10 M entries/s).
    snapshot_part_bytes: largest part of a snapshot, each its own transaction, 1 KiB to 1 GiB; 1 MiB. Larger parts
        hold up senders to that partition for longer.
    max_open_partitions: partition environments open at once; None: of those that were written to 64, and of those that
        are only read a sixteenth of the descriptors that the process may have, 64 to 1,024, within 16 TiB of map_bytes.
        Each costs three descriptors and two mappings, up to four of both more while large batches are read from it,
        one that was written to 3 MB, and opening one again 0.2 ms.
    map_bytes: address space of each environment at its opening, 1 MiB to 64 TiB; 16 GiB. It costs no disk or memory,
        and is grown when full, for the price of one transaction done twice. On machines with little address space
        max_open_partitions times this must fit.
    run_entries: most entries of one run (one LMDB value), 1 to 65,535; 192, so that a batch of 1,000 spread over a
        week is one run a day. Longer runs take less disk and more reading for a single message.
    run_bytes: size at which a run is cut, 1 KiB to 1 GiB; 256 KiB. A larger message is a run of its own.
    ship_ms: how long what is written may wait until it is put into `replica`; 1 s. Shorter loses less with the machine,
        and costs a put each time.
    ship_bytes: it is put sooner once it is this much, 64 KiB to 256 MiB; 4 MiB. Above 16 MiB it is read back from the
        write-ahead log, which costs a read of all that is sent.
    lease_ms: for a store with a standby: how long it leads by the last object that it has put into `replica`, at the
        least one each third of that. The standby takes over once it has seen none for so long; this store refuses what
        writes (NotLeader) from 0.8 of it on. 10,000 is usual, and what `duelog serve --standby` takes. None: no standby
        takes over, and the store goes on without its copy.
    replicated_timeout_ms: how long a send waits for the copy, where it does; 30 s. Then it raises NotReplicated: it is
        on this machine's disk, and may come into the copy yet.
    replica_keep_bytes: the most of the write-ahead log that is kept while `replica` cannot be reached; 1 GiB. Beyond it
        the log goes on, and the copy with a new manifest: no restore reaches a moment between the two.
    replica_retention_ms: how long every moment can be restored; 7 days, one at least.
    max_local_bytes: the most that the store's messages may take of this disk, the write-ahead log not counted; far
        days, and days that are over, are then in `replica` alone, and are fetched `preload_ms`, and a second for each
        50 MB, before they begin, or when a subscription gets to them. It is exceeded where what has begun, is about to,
        is being read, or is not in a manifest yet takes more. None: all of it is here, and what was not is fetched.
    """

    # -- behaviour
    partition_ms: Milliseconds = _integer(86_400_000, 1, _UINT32_MAX)
    durability: SendDurability = _setting("commit", _durability)
    inline_delay_ms: Milliseconds = _integer(0, 0, _INT64_MAX)
    max_message_bytes: int = _integer(5 * MIB, 1, GIB)
    cluster: str = _setting("standalone", _label)
    background: bool | None = _setting(None, _optional_bool)
    control: bool | None = _setting(None, _optional_bool)
    replica: str | None = _setting(None, _optional_url)
    max_clock_jump_ms: OptionalMilliseconds = _integer(2_592_000_000, 1, _INT64_MAX, none=True)

    # -- defaults of a store that is made
    retention_ms: Milliseconds = _integer(0, 0, _INT64_MAX)
    retention_bytes: int = _integer(0, 0, _INT64_MAX)
    ttl_ms: OptionalMilliseconds = _integer(None, 1, _INT64_MAX, none=True)
    ack_timeout_ms: OptionalMilliseconds = _integer(None, 1, _INT64_MAX, none=True)
    nack_backoff_ms: Milliseconds = _integer(1_000, 0, 86_400_000)
    nack_backoff_max_ms: Milliseconds = _integer(60_000, 0, 86_400_000)
    max_redeliveries: int | None = _integer(None, 0, _UINT32_MAX, none=True)
    dead_letter_topic: str | None = _setting(None, _optional_topic)

    # -- speed
    max_in_flight_bytes: int = _integer(64 * MIB, 1, _INT64_MAX)
    wal_bytes: int = _integer(128 * MIB, 16 * KIB, GIB)
    relaxed_ms: Milliseconds = _integer(20, 0, 60_000)
    bucket_ms: Milliseconds = _integer(60_000, 1, _UINT32_MAX)
    preload_ms: Milliseconds = _integer(60_000, 0, _INT64_MAX)
    fire_batch: int = _integer(5_000, 1, 1_000_000)
    ack_flush_ms: Milliseconds = _integer(100, 0, 3_600_000)
    tracker_idle_ms: Milliseconds = _integer(60_000, 0, 86_400_000_000)
    tracker_prune_interval_ms: Milliseconds = _integer(1_000, 0, 86_400_000)
    tracker_prune_ratio: float = _setting(0.5, _ratio)
    ledger_max_entries: int = _integer(50_000, 1, _UINT32_MAX)
    ledger_max_bytes: int = _integer(64 * MIB, 1, _INT64_MAX)
    ledger_max_age_ms: Milliseconds = _integer(14_400_000, 1, _INT64_MAX)
    snapshot_every_entries: int = _integer(1_000_000, 1, _UINT32_MAX)
    snapshot_part_bytes: int = _integer(MIB, KIB, GIB)
    max_open_partitions: int | None = _integer(None, 1, 65_536, none=True)
    map_bytes: int = _integer(16 * GIB, MIB, 64 * 1024 * GIB)
    run_entries: int = _integer(192, 1, 65_535)
    run_bytes: int = _integer(256 * KIB, KIB, GIB)
    ship_ms: Milliseconds = _integer(1_000, 1, 3_600_000)
    ship_bytes: int = _integer(4 * MIB, 64 * KIB, 256 * MIB)
    lease_ms: OptionalMilliseconds = _integer(None, 1_000, 3_600_000, none=True)
    replicated_timeout_ms: Milliseconds = _integer(30_000, 1, 3_600_000)
    replica_keep_bytes: int = _integer(GIB, MIB, _INT64_MAX)
    replica_retention_ms: Milliseconds = _integer(604_800_000, 86_400_000, _INT64_MAX)
    max_local_bytes: int | None = _integer(None, 1, _INT64_MAX, none=True)

    def __post_init__(self) -> None:
        take_plain(self)
        for setting in fields(self):
            setting.metadata["check"](setting.name, getattr(self, setting.name))
        if self.durability == "replicated" and self.replica is None:
            raise InvalidArgument("durability", self.durability, "needs `replica`, which says where the copy is")
        if self.max_local_bytes is not None and self.replica is None:
            raise InvalidArgument("max_local_bytes", self.max_local_bytes, "needs `replica`, where the rest is then")

    @property
    def local_durability(self) -> Durability:
        """When a group is on this machine's disk."""
        return "commit" if self.durability == "replicated" else self.durability

    @property
    def sets_bodies_apart(self) -> bool:
        """True where bodies of large runs go to files of their own, flushed before the group that names them.

        Not where days may be given back (partitions/away.py).
        """
        return self.durability != "none" and self.max_local_bytes is None
