"""docs/broker.md does what it says: its settings are those of the code, its Python program runs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from tests.broker.clients.conftest import ServedStore, environment
from tests.packaging.tree import ROOT

configuration = pytest.importorskip("duelog.broker.server.configuration")

PAGE = (ROOT / "docs" / "broker.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    """Settings and their defaults, as the page has them."""
    found = {}
    for names, defaults in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|.*\|$", PAGE, re.MULTILINE):
        values = defaults.strip().replace("`", "").split(", ")
        for place, name in enumerate(names.replace("`", "").split(", ")):
            found[name] = values[place] if place < len(values) else ""
    return found


def shown(default: object) -> str:
    """A default as the page has it."""
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None or default == () else str(default)


def test_the_page_has_every_setting_with_its_default() -> None:
    """In one table, and no other."""
    settings = {
        configuration.in_file(each.name): shown(each.default)
        for each in fields(configuration.BrokerConfig)
        if each.default is not MISSING
    }
    found = rows()
    found["tokenAudienceClaim"], found["tokenAudience"] = "aud", ""
    assert {name: found.get(name) for name in settings} == settings
    assert found.keys() <= settings.keys()


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


def test_the_page_is_short() -> None:
    """A page that is read to its end."""
    assert len(PAGE.split()) <= 2_700
