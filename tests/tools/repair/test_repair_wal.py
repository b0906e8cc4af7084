"""`duelog repair` and the write-ahead log: what it holds is delivered, what is lost of it is not made up."""

import os
import random
import shutil
from collections.abc import Callable, Set
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import FormatMismatch
from duelog.opening import read_identity
from duelog.store.codec import format as fmt
from duelog.store.codec.format import Table, copy_key
from duelog.store.codec.run import Run
from duelog.store.env.environment import Environment
from duelog.store.log import catalog
from duelog.store.wal import segment
from duelog.store.wal.segment import RowKind, salvage
from duelog.store.wal.write_batch import single_rows
from duelog.tools.repair.repair_store import RepairReport, repair_store
from duelog.tools.store_check import check_store
from tests.conftest import HOUR_MS, START_MS, OpenStore
from tests.disaster.running import forked
from tests.model.driver import copy_store
from tests.proof import length
from tests.tools.small_records import flip, keys

CONFIG = StoreConfig(partition_ms=HOUR_MS, background=False)
TRIALS = length("DUELOG_REPAIR_TRIALS", 6, 20)
DUES = (START_MS + 3 * HOUR_MS, START_MS + 9 * HOUR_MS)


class Crashed:
    """A copy of an open store, and what was sent to it: payloads by id."""

    def __init__(self, path: Path, sent: dict[str, str], output: Path) -> None:
        self.path = path
        self.sent = sent
        self.output = output

    @property
    def segment(self) -> Path:
        """The last segment."""
        return max((self.path / "wal").iterdir())

    def groups(self) -> list[list[str]]:
        """The ids of what each group of the last segment holds."""
        store_id = read_identity(self.path, CONFIG).store_id
        found = []
        for group in salvage(self.path / "wal", int(self.segment.stem), store_id):
            runs = [
                Run("", row.key, memoryview(row.value)) for row in single_rows(group.rows()) if row.kind == RowKind.RUN
            ]
            found.append([f"{run.ledger_id}:{entry}" for run in runs for entry in range(run.first_entry, run.limit)])
        return found

    def repair(self) -> RepairReport:
        """Repair it; nothing is left, and check agrees."""
        report = repair_store(self.path, self.output)
        assert report.left == check_store(self.path, deep=True) == []
        return report

    def delivered(self, known: Set[str] | None = None) -> dict[str, str]:
        """Payloads by id that come out of it once all is due, of those sent before the damage.

        What is sent after it is not lost, and gets new ids, but for those that nothing knows any more.
        """
        clock = ManualClock(START_MS)
        known = self.sent.keys() if known is None else known
        found: dict[str, str] = {}
        with DelayedStore.open(self.path, CONFIG, clock=clock) as store:
            new = {str(store.topic("t").send(b"new", deliver_at=due_ms)) for due_ms in DUES}
            assert not new & known
            after = self.path.with_name("after")
            copy_store(self.path, after)  # a crash right after they were sent
        with DelayedStore.open(after, CONFIG, clock=clock) as store:
            reader = store.topic("t").subscribe("s")
            clock.advance(24 * HOUR_MS)
            store.tick()
            for message in reader.receive(1_000, timeout=0):
                found[str(message.message_id)] = message.payload.decode()
            assert list(store.check(deep=True)) == []
        shutil.rmtree(after)
        assert new <= found.keys()
        return {message_id: payload for message_id, payload in found.items() if message_id not in new}


@pytest.fixture
def crashed(open_store: OpenStore, tmp_path: Path) -> Crashed:
    """Two partitions with ten messages each and six in the main log; the last of each in the write-ahead log alone.

    `tmp_path`/before is the store with four, applied.
    """
    store = open_store(config=CONFIG)
    topic = store.topic("t")
    topic.subscribe("s").close()
    sent: dict[str, str] = {}

    def send(number: int) -> None:
        sent[str(topic.send(b"one %d" % number, deliver_at=DUES[number % 2] + number))] = f"one {number}"

    for number in range(4):
        send(number)
    store._engine.writer().apply_all()
    copy_store(store.path, tmp_path / "before")
    for due_ms in DUES:
        for message_id in topic.send_payloads([b"batch"] * 4, deliver_at=due_ms):
            sent[str(message_id)] = "batch"
    sent[str(topic.send(b"early"))] = "early"
    store._engine.writer().apply_all()
    for number in range(8):
        send(number)
    for message_id in topic.send_batch([Message(b"now"), Message(b"now"), Message(b"later", deliver_at=DUES[0])]):
        sent[str(message_id)] = "now" if len(sent) < 23 else "later"
    copy_store(store.path, tmp_path / "crashed")
    return Crashed(tmp_path / "crashed", sent, tmp_path / "given-up")


def partition_file(store: Path, number: int) -> Path:
    """The data file of one of the partitions."""
    return sorted(store.glob("partitions/*/g*/data.mdb"))[number]


def break_group(crashed: Crashed, number: int) -> None:
    """Break a group of the last segment, all of which begin at sectors and take one."""
    content = bytearray(crashed.segment.read_bytes())
    content[4096 + 512 * number + 40] ^= 1
    crashed.segment.write_bytes(content)


def test_of_a_damaged_log_what_can_be_read_is_delivered(crashed: Crashed) -> None:
    """Before the hole and after it; the log is begun anew, and what is sent then is not taken for applied."""
    broken = crashed.groups()[3]
    break_group(crashed, 3)
    assert any("begun anew" in action for action in crashed.repair().actions)
    again = crashed.repair()
    assert (again.actions, again.given_up) == ([], 0)
    assert crashed.delivered() == {each: payload for each, payload in crashed.sent.items() if each not in broken}


@pytest.mark.parametrize(
    ("damage", "readable"),
    [
        (lambda file: os.truncate(file, 0), 0),
        (lambda file: os.truncate(file, 4096 + 512 * 4), 4),
        (lambda file: file.write_bytes(bytes(4096) + file.read_bytes()[4096:]), 9),
        (Path.unlink, 0),
    ],
    ids=["empty", "cut", "header", "missing"],
)
def test_a_segment_that_is_damaged_as_a_file_gives_what_is_left_of_it(
    crashed: Crashed, damage: Callable[[Path], None], readable: int
) -> None:
    """With nothing readable the store opens with what the environments have."""
    groups = crashed.groups()
    lost = {each for group in groups[readable:] for each in group}
    damage(crashed.segment)
    crashed.repair()
    known = crashed.sent.keys() - lost
    assert crashed.delivered(known) == {each: crashed.sent[each] for each in known}


def test_an_intact_log_is_left_alone_and_applied(crashed: Crashed) -> None:
    """Another file's damage is mended."""
    directory = partition_file(crashed.path, 0).parent
    flip(directory, keys(directory, Table.RUN)[-1], at=-1)
    before = crashed.segment.read_bytes()
    assert crashed.repair().given_up == 1
    assert crashed.segment.read_bytes() == before
    delivered = crashed.delivered()
    assert len(delivered) == len(crashed.sent) - 1
    assert delivered.items() <= crashed.sent.items()


def test_what_a_partition_put_back_lacks_comes_from_the_log_and_from_what_was_applied(
    crashed: Crashed, tmp_path: Path
) -> None:
    """An older file of a partition: a segment that was applied still has what it lacks."""
    shutil.copyfile(partition_file(tmp_path / "before", 1), partition_file(crashed.path, 1))
    assert {"wal"} <= {found.code for found in check_store(crashed.path)}
    crashed.repair()
    assert crashed.delivered() == crashed.sent


@pytest.mark.parametrize("gone", [False, True], ids=["its pages", "its file"])
def test_of_a_partition_that_is_lost_the_messages_of_the_log_are_delivered(crashed: Crashed, gone: bool) -> None:
    """Its pages, and with them the end of its log, or its file, and with it the log's name."""
    file = partition_file(crashed.path, 1)
    size = file.stat().st_size
    in_log = {each for group in crashed.groups() for each in group}
    if gone:
        file.unlink()
    else:
        os.truncate(file, 2 * 4096)
        os.truncate(file, size)
        assert "page" in {found.code for found in check_store(crashed.path)}
    crashed.repair()
    delivered = crashed.delivered()
    assert delivered.items() <= crashed.sent.items()
    assert in_log <= delivered.keys()


def test_a_log_of_which_the_record_is_lost_is_applied_and_begun_anew(crashed: Crashed) -> None:
    """Nothing says where it begins: it is refused, not taken for one that was never begun."""
    key = fmt.counter_key(catalog.WAL)
    main = Environment(crashed.path / "main", name="main")
    main.commit(lambda transaction: [transaction.raw.delete(each) for each in (key, copy_key(key))])
    main.close()
    assert "wal" in {found.code for found in check_store(crashed.path)}
    crashed.repair()
    assert crashed.delivered() == crashed.sent


@pytest.mark.series
def test_a_log_and_a_partition_damaged_together_are_repaired(crashed: Crashed, tmp_path: Path) -> None:
    """Three bits of a data file and one of the log, again and again: what can be read is delivered."""
    random_ = random.Random(11)
    broken = crashed.groups()[4]
    in_log = {each for group in crashed.groups() for each in group} - set(broken)
    left = 0
    for number in range(TRIALS):
        trial = Crashed(tmp_path / "trial", crashed.sent, tmp_path / f"given-up-{number}")
        shutil.rmtree(trial.path, ignore_errors=True)
        copy_store(crashed.path, trial.path)
        break_group(trial, 4)
        file = partition_file(trial.path, number % 2)
        content = bytearray(file.read_bytes())
        for _ in range(3):
            content[random_.randrange(2 * 4096, len(content))] ^= 1 << random_.randrange(8)
        file.write_bytes(content)

        def work(trial: Crashed = trial) -> list[str]:
            return [found.message for found in repair_store(trial.path, trial.output).left]

        found, died = forked(work, tmp_path / "report")
        assert not died
        if found:
            left += 1
            continue
        assert check_store(trial.path, deep=True) == []
        delivered = trial.delivered()
        assert delivered.items() <= crashed.sent.items(), number
        assert in_log <= delivered.keys(), number
    assert left * 4 < TRIALS


def test_a_log_of_a_later_version_is_not_repaired(crashed: Crashed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not damaged; the version that wrote it reads it."""
    before = crashed.segment.read_bytes()
    monkeypatch.setattr(segment, "READ_VERSIONS", (0,))
    with pytest.raises(FormatMismatch):
        repair_store(crashed.path, crashed.output)
    assert crashed.segment.read_bytes() == before
