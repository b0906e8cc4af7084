"""The protocol of replication as a model: every interleaving of three processes at one log in object storage.

A log object is created if absent; who creates the next number, with a higher epoch, leads. A leader tells a client the
id of an entry when it has it locally, and acknowledges it as replicated when its object is stored. Puts arrive at any
time after they were sent, also after their sender gave up waiting; answers are lost; a manifest is written and the log
pruned. There is no clock but `fresh`: the leader's last success, or its look at the log's end as it opens, lies within
the lease. A new leader opens its store first, and puts heartbeats meanwhile; the store goes on where it finds the log's
end, as another maker of objects, while heartbeats may be on their way, and more may follow.

What must hold: the copy, and who leads by the newest epoch, have every replicated entry; no id was told for two
entries; a leader is deposed only by a higher epoch.
"""

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

FAULTS = {
    "no look": "a put that ends after the lease counts without a look at listing and manifest",
    "slow put only": "the lease is counted from the beginning of the put, not from the success before it",
    "no look after the fence": "a new leader does not look at listing and manifest after its fence",
    "pruned early": "log objects go while an old leader may still be within its lease",
    "own object is another's": "a number that is taken deposes the leader, though its own lost put took it",
    "acknowledged before the put": "an entry counts as replicated when its put is sent",
    "ids again": "a new leader goes on from the ids that it has, not from ids of its epoch",
    "heartbeat is the entry": "a number that a heartbeat of its opening took counts as the put of the store",
    "heartbeat deposes": "a heartbeat of its opening deposes the store",
    "no look behind the heartbeat": "a store whose number a heartbeat took goes on behind whatever lies there",
}

BEGINNINGS: dict[str, tuple[str, ...]] = {
    "a leader": (),
    "an opening whose heartbeat comes late": (
        "fences 1",
        "arrives 1",
        "leads 1",
        "heartbeat 1",
        "opens 1",
        "puts an entry 1",
        "arrives late 1",
    ),
}
"""Steps from `start` to where looking begins: what follows the second lies behind millions of states from the first."""

ENTRIES, EPOCHS, NUMBERS = 2, 3, 5
"""Bounds: entries that clients send, epochs, and numbers that heartbeats reach."""

FOLLOWS, FENCES, OPENS, LEADS, DEPOSED = range(5)
SENT, STORED, TAKEN, UNKNOWN = range(4)
NOTHING = -1
"""In place of an entry: a heartbeat or a fence."""
_PROCESSES = 3


class LogObject(NamedTuple):
    """An object of the log, or its put. `owner`: the process that makes it; two never make the same bytes.

    Those of a store that a process has opened after its fence have an owner of their own.
    """

    seq: int
    epoch: int
    entry: int
    owner: int


class Manifest(NamedTuple):
    """The newest manifest: the number it stands at, the entries it has (bits), the epoch of who wrote it."""

    seq: int
    entries: int
    epoch: int


class Process(NamedTuple):
    """One process. `seq`: its next number; `entries`: what it has, as bits; `put`: its put, and the answer."""

    role: int = FOLLOWS
    epoch: int = 0
    seq: int = 0
    entries: int = 0
    put: tuple[int, int] | None = None
    fresh: bool = True
    slow: bool = False
    next_id: int = 0
    opened: bool = False


class State(NamedTuple):
    """All of the world. `wire`: puts that may still arrive; `told`: (id, entry) that a client was given."""

    log: tuple[LogObject, ...]
    manifest: Manifest
    processes: tuple[Process, ...]
    wire: frozenset[LogObject]
    replicated: int
    told: frozenset[tuple[int, int]]
    sent: int
    prunings: int


def start() -> State:
    """The first process leads, two follow."""
    leader = Process(LEADS, 1, 1, next_id=10)
    return State(
        (LogObject(0, 1, NOTHING, 0),),
        Manifest(0, 0, 1),
        (leader, Process(), Process()),
        frozenset(),
        0,
        frozenset(),
        0,
        0,
    )


def newest_epoch(state: State) -> int:
    """The highest epoch that listing and manifest show."""
    return max([state.manifest.epoch, *(each.epoch for each in state.log)])


def _bit(entry: int) -> int:
    return 0 if entry == NOTHING else 1 << entry


def _own(state: State, index: int) -> LogObject:
    process = state.processes[index]
    entry = NOTHING if process.put is None else process.put[0]
    return LogObject(process.seq, process.epoch, entry, _owner(index, process))


def _owner(index: int, process: Process) -> int:
    return index + _PROCESSES if process.opened else index


def _with(state: State, index: int, process: Process) -> State:
    processes = list(state.processes)
    processes[index] = process
    return state._replace(processes=tuple(processes))


def nexts(state: State, fault: str | None) -> Iterator[tuple[str, State]]:
    """Each step that any part can take, with the state behind it."""
    there = {each.seq: each for each in state.log}
    for index, process in enumerate(state.processes):
        for name, following in _steps(state, there, index, process, fault):
            yield f"{name} {index}", following
    for put in state.wire:
        yield from _arrivals(state, there, put, fault)


def _arrivals(
    state: State, there: dict[int, LogObject], put: LogObject, fault: str | None
) -> Iterator[tuple[str, State]]:
    after, sender = state._replace(wire=state.wire - {put}), put.owner % _PROCESSES
    process = state.processes[sender]
    waits = process.put is not None and process.put[1] == SENT and _own(state, sender) == put
    if put.seq in there:
        own = there[put.seq] == put and fault != "own object is another's"
        answer = STORED if own else TAKEN
    else:
        answer = STORED
        after = after._replace(log=tuple(sorted((*after.log, put))))
        if waits:
            yield f"arrives, and its transport sends it again {sender}", state._replace(log=after.log)
    if waits:
        yield f"arrives {sender}", _with(after, sender, process._replace(put=(put.entry, answer)))
        yield f"answer lost {sender}", _with(after, sender, process._replace(put=(put.entry, UNKNOWN)))
    else:
        yield f"arrives late {sender}", after


def _send(state: State, index: int, process: Process, entry: int) -> State:
    following = _with(state, index, process._replace(put=(entry, SENT)))
    return following._replace(wire=state.wire | {LogObject(process.seq, process.epoch, entry, _owner(index, process))})


def _steps(
    state: State, there: dict[int, LogObject], index: int, process: Process, fault: str | None
) -> Iterator[tuple[str, State]]:
    role, put, manifest = process.role, process.put, state.manifest
    if put is not None and put[1] == SENT:
        yield "gives up waiting", _with(state, index, process._replace(put=(put[0], UNKNOWN)))
    if put is not None and put[1] == UNKNOWN:  # reads the number
        if process.seq not in there:
            yield "puts again", _send(state, index, process, put[0])
        else:
            answer = STORED if there[process.seq] == _own(state, index) else TAKEN
            yield "reads", _with(state, index, process._replace(put=(put[0], answer)))
    if role == FOLLOWS and newest_epoch(state) < EPOCHS:
        entries, seq = manifest.entries, manifest.seq + 1
        while seq in there:
            entries |= _bit(there[seq].entry)
            seq += 1
        epoch = newest_epoch(state) + 1
        known = max((id_ for id_, entry in state.told if entries >> entry & 1), default=9)
        next_id = known + 1 if fault == "ids again" else 10 * epoch
        yield "fences", _send(state, index, Process(FENCES, epoch, seq, entries, next_id=next_id), NOTHING)
    if role == FENCES and put is not None:
        if put[1] == TAKEN:
            yield "follows on", _with(state, index, Process())
        elif put[1] == STORED:
            passed = manifest.seq >= process.seq or newest_epoch(state) > process.epoch
            if passed and fault != "no look after the fence":
                yield "fenced too late", _with(state, index, Process())
            else:
                yield "leads", _with(state, index, process._replace(role=OPENS, seq=process.seq + 1, put=None))
    if role == OPENS:
        last = max(state.log, default=None)
        if last is not None and last.owner == index and last.epoch == process.epoch:
            opened = process._replace(role=LEADS, seq=last.seq + 1, put=None, opened=True, fresh=True)
            yield "opens", _with(state, index, opened)
        else:
            yield "deposed", _with(state, index, process._replace(role=DEPOSED, put=None))
    leads = process.fresh or newest_epoch(state) <= process.epoch  # by its lease, or by a look after it
    if role == LEADS and process.opened and leads:  # the thread of its heartbeats has not heard of it yet
        beats = (each.seq for each in state.log if (each.owner, each.epoch) == (index, process.epoch))
        following = max(beats, default=NUMBERS) + 1
        if following <= NUMBERS and following not in there:
            beat = LogObject(following, process.epoch, NOTHING, index)
            yield "beats on", state._replace(wire=state.wire | {beat})
    if role in (OPENS, LEADS):
        yield from _leads(state, there, index, process, fault)


def _leads(
    state: State, there: dict[int, LogObject], index: int, process: Process, fault: str | None
) -> Iterator[tuple[str, State]]:
    put, manifest, taken = process.put, state.manifest, there.get(process.seq)
    is_own = process.opened and taken is not None and (taken.owner, taken.epoch) == (index, process.epoch)
    if process.fresh:
        slow = put is not None or process.slow
        yield "lease passes", _with(state, index, process._replace(fresh=False, slow=slow))
    if put is None:
        if process.role == LEADS and state.sent < ENTRIES:
            entry = state.sent
            following = _send(state, index, process._replace(slow=False, next_id=process.next_id + 1), entry)
            following = following._replace(sent=entry + 1, told=state.told | {(process.next_id, entry)})
            if fault == "acknowledged before the put":
                following = following._replace(replicated=state.replicated | _bit(entry))
            yield "puts an entry", following
        if process.seq < NUMBERS:
            yield "heartbeat", _send(state, index, process._replace(slow=False), NOTHING)
        if process.role == LEADS and process.seq - 1 > manifest.seq:
            yield "manifest", state._replace(manifest=Manifest(process.seq - 1, process.entries, process.epoch))
        old = [each for each in state.processes if each.role == LEADS and each.epoch < newest_epoch(state)]
        late = fault == "pruned early" or not any(each.fresh for each in old)
        if process.role == LEADS and state.prunings < 1 and late and any(seq < manifest.seq for seq in there):
            kept = tuple(each for each in state.log if each.seq >= manifest.seq)  # that one says who leads
            yield "prunes", state._replace(log=kept, prunings=state.prunings + 1)
    elif put[1] == TAKEN and not (is_own and fault == "heartbeat is the entry"):
        goes_on = is_own and (state.log[-1].epoch == process.epoch or fault == "no look behind the heartbeat")
        if goes_on and fault != "heartbeat deposes":
            behind = process._replace(seq=state.log[-1].seq + 1, fresh=True)  # it has looked
            yield "goes on behind its heartbeat", _send(state, index, behind, put[0])
        else:
            yield "deposed", _with(state, index, process._replace(role=DEPOSED, put=None))
    elif put[1] in (STORED, TAKEN):
        looks = {"no look": False, "slow put only": process.slow}.get(fault or "", not process.fresh)
        passed = newest_epoch(state) > process.epoch or manifest.seq >= process.seq
        if looks and passed:
            yield "deposed", _with(state, index, process._replace(role=DEPOSED, put=None))
        else:
            bit = _bit(put[0])
            done = process._replace(
                seq=process.seq + 1, entries=process.entries | bit, put=None, fresh=True, slow=False
            )
            yield "stored", _with(state, index, done)._replace(replicated=state.replicated | bit)


def wrong(state: State) -> str | None:
    """What is wrong with a state; None: nothing."""
    ids = [id_ for id_, _ in state.told]
    if len(set(ids)) < len(ids):
        return f"an id was told for two entries: {sorted(state.told)}"
    copied = state.manifest.entries
    for each in state.log:
        copied |= _bit(each.entry)
    if state.replicated & ~copied:
        return f"the copy lacks replicated entries: {state.replicated:b}"
    newest = newest_epoch(state)
    for process in state.processes:
        if process.role == DEPOSED and newest <= process.epoch:
            return f"the leader of epoch {process.epoch} was deposed by none"
        if process.role in (OPENS, LEADS) and process.epoch >= newest and state.replicated & ~process.entries:
            return f"the leader of epoch {process.epoch} lacks replicated entries: {state.replicated:b}"
    return None


class Explored(NamedTuple):
    """How many states were looked at, whether they are all, and what is wrong with the last; `steps` lead there."""

    states: int
    whole: bool
    wrong: str | None = None
    steps: tuple[str, ...] = ()


_Path = tuple[Any, str]
"""The path before, and a step."""


def explore(fault: str | None, most: int, beginning: str) -> Explored:
    """Look at up to `most` states behind a beginning, breadth first, and stop at the first that is wrong.

    A state that was met is known by its hash alone: of 10**7 a pair has the same with a probability of 3e-6.
    """
    first = start()
    for step in BEGINNINGS[beginning]:
        first = next(following for name, following in nexts(first, None) if name == step)
    met = {hash(first)}
    waiting: deque[tuple[State, _Path | None]] = deque([(first, None)])
    same: dict[object, Any] = {}
    """Each part of a state by its value, so that states share them: a third of the memory."""
    states = 0
    while waiting:
        if states == most:
            return Explored(states, whole=False)
        state, path = waiting.popleft()
        states += 1
        if (found := wrong(state)) is not None:
            steps: list[str] = []
            while path is not None:
                steps.append(path[1])
                path = path[0]
            return Explored(states, False, found, tuple(reversed(steps)))
        for name, following in nexts(state, fault):
            if (known := hash(following)) not in met:
                met.add(known)
                shared = State(*(same.setdefault(part, part) for part in following))
                waiting.append((shared, (path, sys.intern(name))))
    return Explored(states, whole=True)
