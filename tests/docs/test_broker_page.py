"""docs/broker.md and docs/scale.md do what they say: files of settings and a table are taken, the program runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from duelog.broker.cluster.placement import parse_placement
from tests.broker.clients.conftest import ServedStore, environment
from tests.packaging.tree import ROOT

configuration = pytest.importorskip("duelog.broker.configuration")
broker_module = pytest.importorskip("duelog.broker.server.broker")

SCALE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "broker.md").read_text(encoding="utf-8")


def test_the_file_of_settings_on_the_page_is_taken(tmp_path: Path) -> None:
    """Its names are those of the broker and, in the table, of the store."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "broker.toml"
    path.write_text(text, encoding="utf-8")
    settings = configuration.read_settings(configuration.BrokerConfig, path)
    assert (settings.web_service_port, settings.allow_auto_topic_creation) == (8080, False)
    assert broker_module.store_config(settings).ack_timeout_ms == 600_000


def test_the_python_program_of_the_page_runs(tmp_path: Path) -> None:
    """Against a broker at another port, which then ends cleanly."""
    pytest.importorskip("pulsar")
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
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
