"""The pages say what the code does: CONTRIBUTING.md, design, testing, settings, broker, protocol, metrics, admin."""

import ast
import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from duelog import DelayedStore
from duelog.broker.cluster.placement import parse_placement
from duelog.broker.metrics.exposition import ENGINE, METRICS
from duelog.metrics import SPECS
from duelog.operations import wire_calls, wire_peer, wire_server, wire_values
from duelog.operations.face_table import FACE
from duelog.operations.wire import HEAD, address_in, framed
from duelog.tools.audit.audit_tables import CODES, TABLES
from duelog.tools.cli.main import app
from tests.broker.admin.rest import administered
from tests.broker.clients.conftest import ServedStore, environment
from tests.duelog.operations.test_wire import answer_of
from tests.packaging.tree import FLOORS, ROOT, modules
from tests.tools.command_line import ok

DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
SECTION = (
    (ROOT / "docs" / "testing.md")
    .read_text(encoding="utf-8")
    .partition("\n## Wrong engines\n")[2]
    .partition("\n## ")[0]
)


def defined(module: Path) -> set[str]:
    """Classes, their methods, and functions of a module."""
    functions = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(module.read_text(encoding="utf-8"))
    outer = [node for node in tree.body if isinstance(node, functions)]
    inner = [(node, member) for node in outer for member in node.body if isinstance(member, functions)]
    return {node.name for node in outer} | {f"{node.name}.{member.name}" for node, member in inner}


MUTANTS = {name for path in (ROOT / "tests").rglob("*mutants.py") for name in defined(path)}


def test_the_design_names_no_attribute_that_is_not_there() -> None:
    """`Class.name` in backticks: the module that defines the class has the name."""
    sources = [path.read_text(encoding="utf-8") for floor in FLOORS for path in modules(ROOT / floor)]
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", DESIGN)
    assert len(named) > 3
    for owner, name in named:
        defining = [source for source in sources if re.search(rf"^class {owner}\b", source, re.MULTILINE)]
        assert any(re.search(rf"\b{name}\b", source) for source in defining), f"{owner}.{name}"


def test_the_table_of_folders_has_every_floor_and_room() -> None:
    """Each folder of a floor that holds modules, floors in their order, and no other."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \| ", text, re.MULTILINE)
    folders = {str(module.parent.relative_to(ROOT)) for floor in FLOORS for module in modules(ROOT / floor)}
    assert sorted(rows) == sorted(folders)
    assert [row for row in rows if "/" not in row] == list(FLOORS)


def test_every_function_on_a_messages_way_exists() -> None:
    """In "Follow a message" each step names modules with classes or functions in them, and they are there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Follow a message\n")[2].partition("\n## ")[0]
    steps = ["Send", "Apply", "Fire", "Receive", "Acknowledge", "Recover"]
    assert re.findall(r"^- \*\*(\w+)\.\*\*", section, re.MULTILINE) == steps
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", section)
    assert len(named) > 10
    assert [(path, name) for path, name in named if name not in defined(ROOT / path)] == []


def test_every_wrong_engine_on_the_page_is_there() -> None:
    """Names with underscores in backticks are functions of the modules of mutants."""
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", SECTION))
    assert len(named) > 30
    assert named - MUTANTS == set()


def test_every_suite_of_wrong_engines_is_run_when_its_code_changes() -> None:
    """The table of `.ci/run` has each, and the places whose code it breaks."""
    table = re.search(r'^suites="\\\n(.*?)"$', (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert table is not None
    suites = {suite: places for suite, *places in map(str.split, table[1].splitlines())}
    assert [path for row in suites.items() for path in (row[0], *row[1]) if not (ROOT / path).exists()] == []
    marking = [path for path in (ROOT / "tests").rglob("test_*.py") if "wrong_engines(" in path.read_text("utf-8")]
    assert {str(path.relative_to(ROOT)) for path in marking if path != Path(__file__)} <= suites.keys()


def test_every_failpoint_on_the_page_is_reached() -> None:
    """Names with a dot in backticks are those that the code says to `reach`."""
    named = set(re.findall(r"`([a-z]+\.[a-z]+)`", SECTION))
    code = "".join(path.read_text(encoding="utf-8") for floor in FLOORS for path in modules(ROOT / floor))
    assert named
    assert named - set(re.findall(r'"([a-z]+\.[a-z]+)"', code)) == set()


SCRIPT = Path("docs/site/configuration.py")
SETTINGS = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in SETTINGS.splitlines() if line.startswith("| `")]


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command that writes the page, of the copy of the documents under `root`."""
    command = [sys.executable, str(root / SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_page_is_current() -> None:
    """A setting, policy, default or meaning that changed is on it."""
    done = run(ROOT, "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_that_is_not_current_is_told_and_made_anew(tmp_path: Path) -> None:
    """The check names the command, which writes the page that the repository has."""
    shutil.copytree(ROOT / SCRIPT.parent, tmp_path / SCRIPT.parent)
    page = tmp_path / "docs" / "configuration.md"
    page.write_text(SETTINGS.replace("| `86400000` (1 d) |", "| `3600000` (1 h) |"), encoding="utf-8")
    assert page.read_text(encoding="utf-8") != SETTINGS
    done = run(tmp_path, "--check")
    assert (done.returncode, "python docs/site/configuration.py" in done.stderr) == (1, True)
    assert run(tmp_path).returncode == 0
    assert page.read_text(encoding="utf-8") == SETTINGS


def test_every_setting_says_what_it_means() -> None:
    """No row without a meaning, and no number of ms, bytes or seconds without its unit."""
    assert len(ROWS) > 100
    assert [row[0] for row in ROWS if len(row) < 5 or not re.search(r"\w", row[4])] == []
    numbers = [row for row in ROWS if re.search(r"int|integer|number|float", row[1])]
    assert [row[0] for row in numbers if not row[3].strip()] == []


configuration = pytest.importorskip("duelog.broker.configuration")
broker_module = pytest.importorskip("duelog.broker.server.broker")

SCALE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
BROKER = (ROOT / "docs" / "broker.md").read_text(encoding="utf-8")


def test_the_file_of_settings_on_the_page_is_taken(tmp_path: Path) -> None:
    """Its names are those of the broker and, in the table, of the store."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", BROKER, re.MULTILINE | re.DOTALL)
    path = tmp_path / "broker.toml"
    path.write_text(text, encoding="utf-8")
    settings = configuration.read_settings(configuration.BrokerConfig, path)
    assert (settings.web_service_port, settings.allow_auto_topic_creation) == (8080, False)
    assert broker_module.store_config(settings).ack_timeout_ms == 600_000


def test_the_python_program_of_the_page_runs(tmp_path: Path) -> None:
    """Against a broker at another port, which then ends cleanly."""
    pytest.importorskip("pulsar")
    (program,) = re.findall(r"^```python\n(.*?)^```$", BROKER, re.MULTILINE | re.DOTALL)
    path, broker = tmp_path / "program.py", ServedStore(tmp_path)
    path.write_text(
        program.replace("pulsar://localhost:6650", broker.url) + "assert message.data() == b'pay the bill'\n"
    )
    broker.start()
    try:
        subprocess.run([sys.executable, str(path)], env=environment(), check=True, timeout=60)
        assert broker.stop() == 0
    finally:
        broker.kill()


def test_the_table_of_the_page_places_namespaces() -> None:
    """Each namespace has the owner that the text says."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", SCALE, re.MULTILINE | re.DOTALL)
    table = parse_placement(text, Path("placement.toml"))
    owners = [table.owner(each) for each in ("acme/orders", "acme/mail", "public/default")]
    assert [each and each.name for each in owners] == ["a", "b", "a"]


PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()


def test_the_exchange_is_what_is_said_there(tmp_path: Path) -> None:
    """Body for body; the greeting's facts are those that the table lists."""
    lines = re.findall(r"^    (<-|->) (\[.*\])$", PROTOCOL, re.MULTILINE)
    assert len(lines) == 5
    with DelayedStore.open(tmp_path / "store") as store, closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(20)
        with address_in(store.path) as address:
            client.connect(address)
        greeting = answer_of(client)
        assert [name for name in greeting[2] if f"`{name}`" not in PROTOCOL] == []
        assert set(greeting[2]["capabilities"]) == set(FACE)
        for direction, body in lines[1:]:
            value = json.loads(body)
            if direction == "->":
                client.sendall(framed(wire_values.pack(value)))
            else:
                assert answer_of(client, raw=True) == value


def test_the_frame_is_that_of_the_request() -> None:
    """Byte for byte."""
    shown = bytes.fromhex(re.findall(r"`(00 00 00 [0-9a-f \n]*)`", PROTOCOL)[0])
    assert HEAD.unpack_from(shown)[0] == len(shown) - 4
    assert shown == framed(wire_values.pack([1, "Topic.exists", ["reminders"], [], {}]))


def test_the_bounds_and_the_extension_types_are_those_of_the_code() -> None:
    """The figures of one table, the codes of another."""
    table = dict(re.findall(r"^\| ([a-z][^|]*) \| (.*) \|$", PROTOCOL.partition("## Bounds")[2], re.MULTILINE))
    assert table["connections at a time"].startswith(f"{wire_server.MOST_CLIENTS:,};")
    assert table["requests under way in a connection"] == f"{wire_peer.MOST_REQUESTS:,}"
    assert table["answers that a peer has not read"].startswith(f"{wire_peer.MOST_UNREAD_BYTES >> 20} MiB;")
    stalled, last = wire_peer.STALLED_S, wire_server.LAST_ANSWER_S
    assert table["a frame without its end, or answers not read"].startswith(f"{stalled:.0f} s; {last:.0f} s")
    assert table["consumers, credits of one"] == f"{wire_calls.MOST_CONSUMERS:,}"
    values = PROTOCOL.partition("## Values")[2].partition("## Operations")[0]
    codes = ",".join(re.findall(r"^\| ([0-9, ]+) \| ", values, re.MULTILINE)).split(",")
    assert sorted(map(int, codes)) == sorted(wire_values._READERS)


AUDIT = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
METRICS_PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def rows(page: str, cells: int) -> list[list[str]]:
    """The rows of a page's tables that have so many cells and begin with a name in backticks."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [row for row in found if len(row) == cells and row[0].startswith("`")]


def test_the_page_lists_every_instrument_and_what_a_broker_exports_beside_them() -> None:
    """In the order of the code, each with its kind and what belongs to it; another table explains the attributes."""
    listed = [
        (name.strip("`"), kind, unit.strip("`"), tuple(re.findall(r"`([^`]+)`", attributes)), description)
        for name, kind, unit, attributes, description in rows(METRICS_PAGE, 5)
    ]
    assert listed == [(spec.name, spec.kind, spec.unit, spec.attributes, spec.description) for spec in SPECS]
    explained = {name.strip("`") for name, _ in rows(METRICS_PAGE, 2)}
    assert explained == {attribute for spec in SPECS for attribute in spec.attributes}
    beside = [
        (name.strip("`"), kind, tuple(re.findall(r"`([^`]+)`", labels)), description)
        for name, kind, labels, description in rows(METRICS_PAGE, 4)
    ]
    assert beside == [tuple(each) for each in METRICS if each not in ENGINE]
    # Two instruments of one name would be merged by an SDK, two metrics by Prometheus.
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    assert len({each.name for each in METRICS}) == len(METRICS)


def test_the_page_lists_every_kind_of_finding_every_table_and_every_option() -> None:
    """With severity, meaning and advice, in the order of the code, and no other."""
    expected = [[f"`{name}`", code.severity, code.meaning, code.advice] for name, code in CODES.items()]
    assert rows(AUDIT, 4) == expected
    assert [row[0].strip("`") for row in rows(AUDIT, 2)] == list(TABLES)
    options = {word.strip("[]`,;:") for word in ok("audit", "--help").split() if word.startswith("--")} - {"--help"}
    assert [option for option in sorted(options) if option not in AUDIT] == []


ADMIN = (ROOT / "docs" / "admin.md").read_text(encoding="utf-8")
SHOWN = {re.split(r"[?\s]", each)[0].rstrip("/") for each in re.findall(r"`([^`\n]+)`", ADMIN)} | {
    word.split("?")[0] for each in re.findall(r"`([^`\n]+)`", ADMIN) for word in re.split(r"[\s,]+", each)
}
"""Texts in backticks, and each word of them, without queries."""

ROOMS = ("topic_resource", "subscription_resource", "schedule_resource", "topic_stats")


def test_every_route_of_topics_messages_and_jobs_is_on_the_page(tmp_path: Path) -> None:
    """By the end of its path; parameters may have any name there."""

    async def main() -> list[str]:
        async with administered(tmp_path / "store") as (broker, _, _):
            assert broker.application is not None
            found = []
            for route in broker.application.router.routes:
                if route.handler.__module__.rpartition(".")[2] in ROOMS:
                    found.append(route.path)
            return found

    shown = {re.sub(r"\{\w+\}", "{}", each) for each in SHOWN}
    routes = asyncio.run(main())
    assert len(routes) > 30
    missing = []
    for route in routes:
        ends = [re.sub(r"\{\w+\}", "{}", part) for part in route.strip("/").split("/")]
        tails = {"/".join(ends[at:]) for at in range(len(ends))}
        if not any(each.removeprefix("...").strip("/") in tails for each in shown if each.strip("./{}")):
            missing.append(route)
    assert missing == []


def test_every_command_that_takes_a_server_is_on_the_page() -> None:
    """In the table of the command line; a group by its name."""
    table = ADMIN[ADMIN.index("## The command line and a server") :]
    told = set(re.findall(r"[a-z-]+", " ".join(re.findall(r"`([^`\n]+)`", table))))
    commands: dict[str, Any] = getattr(get_command(app), "commands")  # noqa: B009 (typed as one command)
    found = {
        name
        for name, each in commands.items()
        for inner in getattr(each, "commands", {"": each}).values()
        if any("--server" in option.opts for option in inner.params)
    }
    assert len(found) > 10
    assert found <= told
