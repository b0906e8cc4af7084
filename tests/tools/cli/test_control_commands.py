"""Commands do the same, and print the same, whether the store is open in another process or in none."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig, SystemClock
from tests.packaging.tree import ROOT
from tests.tools.command_line import DUELOG, FUTURE_MS, calendar, event, json_lines_of, json_of, ok, refused, run

LINES = """
tick {}
topics list {}
topics create {} other
topics create {} other
send {} t pay --at 2100-01-01T00:00:00Z --key k --property a=b --json
send {} t later --at 4102444800001 --dedup-key once
send {} t later --at 4102444800001 --dedup-key once
send {} t later --at 4102444800002 --dedup-key once --replace
cancel {} t --dedup-key once --dedup-key never
cancel {} t --dedup-key once --json
count {} t --prefix on
scheduled {} t --newest-first --limit 1
cancel {} t
cancel {} t 1:1 --dedup-key once
send {} tt pay
send {} t pay --at 1795251600
scheduled {} t --json
cancel {} t 2:0 9999:1
reschedule {} t 2:1 --at 4102444800009
scheduled {} t --limit 1
subscriptions list {} t
subscriptions create {} t late --position latest
peek {} t mailer --max 2
receive {} t mailre --timeout 0
receive {} T mailer --timeout 0
receive {} t mailer --max 2 --timeout 0 --json
receive {} t mailer --no-ack --timeout 0
skip {} t mailer --max 1
seek {} t mailer --to latest
receive {} t mailer --timeout 0
seek {} t mailer --to earliest
seek {} t mailer --due 2001-09-09T01:46:42Z --json
receive {} t mailer --max 9 --timeout 0
seek {} t mailer --to nowhere
seek {} t nosuch --to earliest
seek {} nosuch s --to earliest
expire {} t mailer --older-than PT1S
pause {} t mailer --until 2099-01-01T00:00:00Z --json
seek {} t mailer --to earliest
receive {} t mailer --timeout 0
stats {} t
resume {} t mailer
receive {} t mailer --timeout 0
policies set {} --topic t --ttl 1h30m --max-redeliveries 3
policies get {} --topic t --json
policies unset {} --topic t ttl_ms
policies unset {} --topic t nonsense
policies get {}
policies remove {} --topic t
tick {}
snapshot save {}
stats {} t
stats {} none
partitions {} --json
unsubscribe {} t late
unsubscribe {} t late
delete-topic {} other
delete-topic {} other
topics list {} --json
reschedule {} t 3:0 --after 1h30m --json
stats {} --topics 1
stats {} --json
dead-letters list {}
dead-letters list {} --topic u --subscription s --older-than PT1S --json
dead-letters list {} --reason nothing --json
dead-letters list {} --older-than soon
dead-letters export {} DIR/letters.jsonl --key k
dead-letters export {} DIR/letters.jsonl --key k
dead-letters requeue {} 9999:9
dead-letters requeue {}
dead-letters requeue {} --all --key k --after 1h --json
dead-letters requeue {} --all --topic a//b
dead-letters purge {} --all --reason nothing
dead-letters purge {} --all
dead-letters list {} --json
schedules add {} nosuch daily x --cron @daily
schedules add {} t daily x --cron @daily --timezone Europe/Rome --count 3 --jitter 10m --until 2099-12-31T00:00Z
schedules add {} t daily x --cron @daily --timezone Europe/Rome --count 3 --jitter 10m --until 2099-12-31T00:00Z
schedules add {} t daily y --cron @weekly --key k --property a=b --misfires latest --grace 5m --json
schedules add {} new hourly z --cron @hourly --create
schedules add {} t bad x --cron @never
schedules add {} t bad x --cron @daily --interval 1h
schedules add {} t bad x --interval 1ms
schedules add {} t bad x --interval 99999999999999s
schedules show {} t daily --next 2
schedules show {} t nosuch
schedules list {}
schedules list {} --topic t --json
schedules list {} --topic nosuch
schedules pause {} t daily --json
schedules pause {} t nosuch
schedules resume {} t daily
schedules resume {} nosuch daily
schedules remove {} t daily
schedules remove {} t daily --json
import {} DIR/lines.jsonl --once nightly --json
import {} DIR/lines.jsonl --once nightly --json
import {} DIR/lines.jsonl --once nightly --batch 1
import {} DIR/wrong.jsonl
import {} DIR/late.jsonl
import {} DIR/nosuch.jsonl
import {} --ics DIR/calendar.ics --topic dates
import {} --ics DIR/calendar.ics --topic dates --json
import {} --ics DIR/moved.ics --topic dates
import {} --ics DIR/lines.jsonl
scheduled {} dates --json
scheduled {} imported --json
policies set {} --topic imported --max-delay 1h
import {} DIR/lines.jsonl
import {} --ics DIR/calendar.ics --topic imported
scheduled {} imported --limit 1 --json
"""

IN_A_HUNDRED_DAYS = f"DTSTART:{datetime.now(UTC) + timedelta(days=100):%Y%m%dT%H%M%SZ}"
CALENDAR = calendar(event("UID:1@example.org", IN_A_HUNDRED_DAYS, "SUMMARY:Dentist", alarms=[":-PT15M"]))

FILES = {
    "lines.jsonl": """{"topic": "imported", "payload": "a", "deliver_at": "2100-01-01T09:00:00Z", "key": "k"}
        {"topic": "t", "payload_base64": "AP8=", "deliver_at": 4102444800000, "properties": {"a": "b"}}
        {"topic": "imported", "payload": "c", "deliver_at": 4102444800001}""",
    "wrong.jsonl": """{"topic": "imported", "payload": "a"}
        {"topic": "imported", "payload": "b", "deliver_at": "soon"}""",
    "late.jsonl": """{"topic": "imported", "payload": "a"}
        {"topic": "imported", "payload": "b", "deliver_at": 253402300800000}""",
    "calendar.ics": CALENDAR,
    "moved.ics": CALENDAR.replace("-PT15M", "-PT30M"),
}
"""Lines to import."""

VARYING = "|".join(
    (
        r'"publish_ms": \d+',
        r'"disk_bytes": \d+|disk +[\d.]+ .iB',
        r'"disk_[a-z]+_bytes": \d+|of it [a-z]+(?: \(made ahead\))? +[\d.]+ \S*B',
        r'"oldest_[a-z_]*": \d+',
        r"next at .*|a delay of \d+ ms",
        r'"seconds": [\d.]+|in [\d.]+ s',
        r"\b(?:[6-9]\d|\d{3,}):\d+\b",  # ids in ledgers that are numbered from where the store was opened
    )
)
"""Values that depend on when a command ran, and on how often a store was closed."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with five messages that are due, and a subscription of them."""
    path = tmp_path / "store"
    minute_ago = ManualClock(SystemClock().now_ms() - 60_000)
    with DelayedStore.open(path, clock=minute_ago) as store:
        store.topic("t").subscribe("mailer").close()
        for number in range(5):
            store.topic("t").send(b"m%d" % number, deliver_after=number)
        store.topic("t").send(b"far", deliver_at=FUTURE_MS)
        store.update_policies(topic="u", max_redeliveries=0)
        with store.topic("u").subscribe("s") as consumer:
            for key in (None, "k"):
                store.topic("u").send(b"dead", key=key)
            consumer.nack(consumer.receive(2), delay=0)
            assert consumer.receive(2) == []
    return path


@pytest.fixture
def taken(path: Path) -> Iterator[DelayedStore]:
    """It, opened by a program."""
    with DelayedStore.open(path, StoreConfig(background=False)) as opened:
        yield opened
        assert list(opened.check()) == []


def test_the_same_commands_print_the_same_of_a_store_that_is_open_elsewhere(path: Path) -> None:
    """Answers, errors and exit statuses, one command after the other; nothing tells which process did it."""
    for name, content in FILES.items():
        (path.parent / name).write_text(content)
    copy = shutil.copytree(path, path.parent / "copy" / path.name)
    with ExitStack() as stack:
        stack.enter_context(DelayedStore.open(path, StoreConfig(background=False)))
        for line in filter(None, LINES.splitlines()):
            found = []
            for where in (path, copy):
                exported = line.replace("DIR/letters", f"{where.parent}/letters")
                wanted = exported.format(where).replace("DIR", str(path.parent))
                result = run(*wanted.split())
                shown = f"{result.stdout}\n{result.stderr}".replace(str(where.parent), "DIR")
                shown = shown.replace(str(path.parent), "DIR")
                shown = re.sub(VARYING, "", shown)
                found.append((result.exit_code, shown))
            assert found[0] == found[1], line


def test_topics_delete_refuses_a_topic_with_a_consumer_of_the_program(taken: DelayedStore) -> None:
    """But with `--force`; a subscription that nobody uses does not keep it."""
    with taken.topic("t").subscribe("mailer"):
        assert "force" in refused("topics", "delete", taken.path, "t")
        assert taken.topic("t").exists()
        ok("delete-topic", taken.path, "t", "--force")
        assert not taken.topic("t").exists()
    ok("topics", "delete", taken.path, "u")


def test_the_store_of_a_receiving_command_can_be_sent_to(path: Path) -> None:
    """`duelog receive` waits with the store open; `duelog send` reaches it, and is received."""
    command = [*DUELOG, "receive", str(path), "t", "mailer", "--max", "6", "--timeout", "60s", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        first = [json.loads(receiver.stdout.readline()) for _ in range(5)]
        sent = json_of("send", path, "t", "now")
        assert json.loads(receiver.stdout.readline())["message_id"] == sent["message_id"]
    assert ([each["payload"] for each in first], receiver.returncode) == (["m0", "m1", "m2", "m3", "m4"], 0)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_transaction_in_a_file_is_done_whole_or_not_at_all(path: Path, tmp_path: Path, elsewhere: bool) -> None:
    """Whether another process has the store open or none; a line that cannot be is named, a result is a line."""
    lines = tmp_path / "lines"
    timeout = json_of("send", path, "timeouts", "x", "--after", "1h", "--dedup-key", "17", "--create")["message_id"]
    operations: list[dict[str, object]] = [
        {"operation": "cancel_key", "topic": "timeouts", "key": "17"},
        {"operation": "cancel", "topic": "timeouts", "message_id": "9:9", "required": False},
        {"operation": "send", "topic": "invoices", "payload": "next", "deliver_after": "1d", "dedup_key": "17"},
        {"operation": "put_document", "key": "order/17", "value_base64": "AP8=", "expected": None},
    ]
    lines.write_text("\n".join(map(json.dumps, operations)))
    with ExitStack() as stack:
        if elsewhere:
            stack.enter_context(DelayedStore.open(path, StoreConfig(background=False)))
        done = json_lines_of("tx", path, lines)
        assert [each["operation"] for each in done] == [each["operation"] for each in operations]
        assert [each["result"] for each in done[:2]] == [True, False]
        (sent,) = json_lines_of("scheduled", path, "invoices")
        assert (sent["message_id"], sent["payload"]) == (done[2]["result"], "next")
        assert json_lines_of("scheduled", path, "timeouts") == []
        assert "nothing of the transaction is stored: cancel key '17'" in refused("tx", path, lines)
        for line, said in (
            ('{"operation": "send", "topic": "t"}', "line 1: payload"),
            ('{"operation": "nonsense"}', "operations[0]"),
            ('{"operation": "cancel", "topic": "t", "message_id": "x"}', "operations[0].message_id='x'"),
            ('{"operation": "cancel", "topic": "t"}', "operations[0].arguments"),
            ("[]", "line 1: line"),
        ):
            assert said in refused("tx", path, input=line.encode())
    with DelayedStore.open(path, read_only=True) as store:
        assert store.topic("timeouts").state(timeout) == "cancelled"
        assert store.documents.get("order/17") == (b"\x00\xff", 1)
        assert len(list(store.topic("invoices").scheduled())) == 1


def test_an_import_larger_than_a_request_may_be_is_sent_in_pieces(tmp_path: Path) -> None:
    """Whatever the batch: each request keeps to what the socket takes, and the order of the lines is kept."""
    path, file = tmp_path / "store", tmp_path / "lines.jsonl"
    payloads = [f"{number:0100d}{'x' * 700}" for number in range(3_000)]
    line = {"topic": "t", "deliver_at": FUTURE_MS, "key": "\u2603", "properties": {"a": "\n" * 30}}
    file.write_text("".join(json.dumps({**line, "payload": payload}) + "\n" for payload in payloads))
    with DelayedStore.open(path, StoreConfig(background=False, max_message_bytes=1_000)) as store:
        assert json_of("import", path, file, "--batch", 3_000, "--once", "nightly")["messages"] == 3_000
        assert json_of("import", path, file, "--once", "nightly")["stored_before"] == 3_000
        assert [each.payload.decode() for each in store.topic("t").scheduled()] == payloads


@pytest.mark.parametrize(
    "command",
    ["stats {}", "topics list {}", "send {} t x --after 1h", "count {} t",
     "cancel {} t 1:1", "skip {} t mailer --max 2", "policies set {} --topic t --ttl 1h",
     "dead-letters purge {} --all", "schedules add {} t daily x --cron @daily"],
)  # fmt: skip
def test_a_command_that_another_process_does_loads_neither_the_engine_nor_numpy(
    taken: DelayedStore, command: str
) -> None:
    """One import at the head of a module of commands had each of them take twice the processor time."""
    python, *words = [*DUELOG, *command.format(taken.path).split()]
    done = subprocess.run([python, "-X", "importtime", *words], check=False, capture_output=True, text=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "duelog.operations.wire_client" in loaded
    assert not loaded & {"numpy", "duelog.engine"}


SENDING = """
import sys
sys.path.append({root!r})
from pathlib import Path
from duelog.tools.asking import asked
sys.stdin.readline()
for number in range(40):
    with asked(Path({path!r}), writes=True) as store:
        store.send("t", b"")
"""


def test_commands_that_run_at_once_wait_for_each_other(path: Path) -> None:
    """Each opens the store for a moment, or asks the one that has it, which may just be closing it: none is refused."""
    code = SENDING.format(root=str(ROOT), path=str(path))
    command = [sys.executable, "-c", code]
    with ExitStack() as stack:
        senders = [stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for _ in range(3)]
        for sender in senders:
            assert sender.stdin is not None
            sender.stdin.write(b"\n")
            sender.stdin.close()
        assert [sender.wait(120) for sender in senders] == [0, 0, 0]
    with DelayedStore.open(path) as store, store.topic("t").subscribe("mailer") as mailer:
        assert sum(message.payload == b"" for message in mailer.receive(200, timeout=20)) == 120


def test_what_a_program_has_in_hand_is_not_disturbed(taken: DelayedStore, path: Path) -> None:
    """An exclusive consumer keeps its subscription; a shared one shares; seeking moves under both."""
    taken.tick()
    with taken.topic("t").subscribe("mailer") as consumer:
        assert len(consumer.receive(2, timeout=0)) == 2
        assert "mailer" in refused("receive", path, "t", "mailer", "--timeout", 0)
        assert "mailer" in refused("unsubscribe", path, "t", "mailer")
        assert "mailer" in refused("seek", path, "t", "mailer", "--to", "latest")
    with taken.topic("t").subscribe("mailer", type="shared") as consumer:
        assert len(consumer.receive(2, timeout=0)) == 2
        assert len(json_lines_of("receive", path, "t", "mailer", "--type", "shared", "--max", 9, "--timeout", 0)) == 3
        assert json_of("seek", path, "t", "mailer", "--to", "earliest")["position"].endswith(":0")
        assert len(consumer.receive(9, timeout=0)) == 5


def test_figures_at_a_shell_are_those_that_the_program_has_in_memory(taken: DelayedStore, path: Path) -> None:
    """Messages that a consumer holds, those that wait to be handed out again, and that the subscription is paused."""
    taken.tick()
    with taken.topic("t").subscribe("mailer") as consumer:
        held = consumer.receive(3, timeout=0)
        consumer.nack(held[:1], delay=60)
        taken.topic("t").subscription("mailer").pause()
        (found,) = json_of("stats", path, "t")["subscriptions"]
        names = ("consumers", "unacknowledged", "redelivering", "dead_lettered", "paused", "backlog")
        assert [found[name] for name in names] == [1, 2, 1, 0, True, 5]
        assert "paused" in ok("stats", path, "t")


BAD: list[tuple[list[str], str]] = [
    (["seek", "t", "mailer"], "--to: expected one of --to, --due and --published"),
    (["seek", "t", "mailer", "--to", "latest", "--due", "0"], "expected one of"),
    (["seek", "t", "mailer", "--due", "tomorrow"], "--due='tomorrow'"),
    (["skip", "t", "mailer"], "Missing option '--max'"),
    (["expire", "t", "mailer", "--older-than", "P1M"], "--older-than='P1M': expected seconds"),
    (["pause", "t", "mailer", "--for", "1h", "--until", "4102444800000"], "--for='1h': --until is given too"),
    (["pause", "t", "mailer", "--until", "0"], "until"),
    (["peek", "t", "mailer", "--max", "0"], "--max"),
]


def test_bad_values_are_refused_by_option_and_value(path: Path) -> None:
    """Exit status 2 and one line; nothing is changed."""
    for arguments, said in BAD:
        command, *others = arguments
        assert said in refused(command, path, *others)
    assert len(json_lines_of("peek", path, "t", "mailer", "--max", 9)) == 1  # what was due when it was sent
