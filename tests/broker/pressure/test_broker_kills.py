"""`duelog serve` killed with SIGKILL under four real clients, again and again, judged by what they see of it.

DUELOG_BROKER_KILLS=100 makes it a hundred times.
"""

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from duelog import DelayedStore
from tests.broker.clients.conftest import ServedStore, environment
from tests.broker.pressure.delivery_twin import Outage, Record, judge, read_records
from tests.broker.pressure.kill_mutants import MUTANTS
from tests.proof import length, wrong_engines

pytest.importorskip("pulsar")
pytestmark = [pytest.mark.kill, pytest.mark.series]

HERE = Path(__file__).parent
KILLS = length("DUELOG_BROKER_KILLS", 1, 10)
CLIENTS = 4
WAIT_S = 60


class MutantStore(ServedStore):
    """A wrong broker."""

    mutant = ""

    def command(self) -> list[str]:
        return [sys.executable, str(HERE / "kill_mutants.py"), self.mutant]


def run_client(broker: ServedStore, name: str, file: Path, *more: str) -> None:
    """A client that ends by itself."""
    command = [sys.executable, str(HERE / "killed_client.py"), broker.url, name, str(file), *more]
    subprocess.run(command, env=environment(), check=True, timeout=600)


class Series:
    """Four clients, one broker, its deaths."""

    def __init__(self, broker: ServedStore, folder: Path, seed: int, drain_s: float) -> None:
        """drain_s: how long clients may take to acknowledge everything at the end."""
        self._broker = broker
        self._drain_s = drain_s
        self._random = random.Random(seed)
        self._files = [folder / f"client-{number}" for number in range(CLIENTS)]
        self._audit = folder / "audit"
        self.outages: list[Outage] = []

    def kill(self) -> None:
        """Kill the broker, and start it again."""
        killed = time.time()
        self._broker.kill()
        self._broker.start()
        self.outages.append(Outage(killed, time.time()))

    def records(self) -> dict[str, Record]:
        """The records of the clients, by topic."""
        return read_records(self._files, self._audit)

    def run(self, kills: int) -> list[str]:
        """Run clients and kills; the rules that were broken."""
        run_client(self._broker, "prepare", self._audit)
        clients = [
            subprocess.Popen(
                [sys.executable, str(HERE / "killed_client.py"), self._broker.url, str(number), str(file)],
                env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for number, file in enumerate(self._files)
        ]  # fmt: skip

        def tell() -> None:
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("\n")
                client.stdin.flush()

        def hear(text: str) -> None:
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline() == f"{text}\n", "a client has died"

        try:
            hear("ready")
            for _ in range(kills):
                time.sleep(self._random.uniform(0.3, 2.5))  # any moment, long enough to connect again or not
                self.kill()
            tell()
            hear("flushed")
            tell()
            self._drain()
            self.kill()  # what was acknowledged before must not come again
            stored = sum(len(each.receipts) for each in self.records().values())
            run_client(self._broker, "audit", self._audit, str(stored))
            tell()
            assert [client.wait(WAIT_S) for client in clients] == [0] * CLIENTS
        finally:
            for client in clients:
                client.kill()
                client.communicate()
        return judge(self.records(), self.outages)

    def _drain(self) -> None:
        """Wait until everything is acknowledged, and no acknowledgement is new; a twin says what is missing."""
        end = time.monotonic() + self._drain_s
        while any(each.unfinished() for each in self.records().values()) and time.monotonic() < end:
            time.sleep(0.3)
        time.sleep(1.5)


def figures(records: dict[str, Record]) -> Counter[str]:
    """Count the events of a series."""
    found: Counter[str] = Counter()
    for record in records.values():
        found["receipts"] += len(record.receipts)
        found["deliveries"] += len(record.got)
        found["acknowledged"] += len(record.acked)
        found["redelivered with a count"] += sum(each.redelivered > 0 for each in record.got)
        found["delayed"] += sum(not text.endswith(":0") for text in record.receipts)
        found["seeks"] += len(record.sought)
        found["delivered twice or more"] += len(record.got) - len({each.text for each in record.got})
    return found


def test_receipts_survive_kills_and_nothing_is_early_twice_or_out_of_order(tmp_path: Path) -> None:
    """Immediate and delayed sends, acknowledgements, seeks and redeliveries under way at each of the kills."""
    broker = ServedStore(tmp_path / "broker", brokerDeduplicationEnabled=True)
    broker.start()
    try:
        series = Series(broker, tmp_path, seed=KILLS, drain_s=WAIT_S)
        wrong = series.run(KILLS)
        found = figures(series.records())
        print(f"{len(series.outages)} kills: {dict(found)}")
        assert not wrong, "\n".join([f"{len(wrong)} in all", *wrong[:20], broker.log()])
        assert all(count for name, count in found.items() if KILLS >= 10 or name != "seeks"), found
        assert found["receipts"] > 50 * KILLS
        assert broker.stop() == 0
    finally:
        broker.kill()
    with DelayedStore.open(tmp_path / "broker" / "store") as store:
        assert list(store.check(deep=True)) == []


@pytest.mark.parametrize("mutant", wrong_engines(each.__name__ for each in MUTANTS))
def test_a_wrong_broker_is_found(tmp_path: Path, mutant: str) -> None:
    """The series sees a receipt that was sent too soon, an acknowledgement that was lost or went too far."""
    broker = MutantStore(tmp_path / "broker", brokerDeduplicationEnabled=True)
    broker.mutant = mutant
    broker.start()
    try:
        wrong = Series(broker, tmp_path, seed=1, drain_s=5).run(1)
    finally:
        broker.kill()
    expected = {
        "receipt_before_the_flush": "not stored",
        "acknowledgement_forgotten": "came again",
        "acknowledgement_too_far": "never acknowledged",
        "early": "ms early",
    }[mutant]
    assert any(expected in each for each in wrong), wrong[:5]
