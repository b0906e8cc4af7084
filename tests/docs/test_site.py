"""The site that `make docs` builds: complete, and nothing in it is loaded from elsewhere."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from duelog.tools.cli.main import app
from tests.packaging.tree import ROOT

SITE = ROOT / "docs" / "site"

LOADS = {
    "script.html": '<script src="https://cdn.example/x.js"></script>',
    "style.html": '<link rel="stylesheet" href="//fonts.example/css">',
    "picture.html": '<img alt="" src="http://example.org/x.png">',
    "inline.html": "<style>body { background: url('https://example.org/x.png') }</style>",
    "attribute.html": '<p style="background: url(//example.org/x.png)">',
    "fetching.html": '<script>fetch("https://example.org/data")</script>',
    "sources.html": '<img alt="" srcset="x.png 1x, https://example.org/y.png 2x">',
    "refresh.html": '<meta http-equiv="refresh" content="0; url=https://example.org/">',
    "sheet.css": '@import "https://fonts.example/css";',
    "font.css": "@font-face { src: url(https://fonts.example/a.woff2) }",
    "worker.js": "importScripts('https://unpkg.example/worker')",
}

LOADS_NOTHING = {
    "link.html": '<a href="https://example.org/">there</a><link rel="canonical" href="https://example.org/here">',
    "own.html": '<script src="_static/x.js"></script><img alt="" src="data:image/png;base64,AAAA">',
    "namespace.js": 'document.createElementNS("http://www.w3.org/2000/svg", "svg") // see https://example.org/',
    "data.css": "a { content: url('data:image/svg+xml,<svg xmlns=\"http://www.w3.org/2000/svg\"/>') }",
}


def offline(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the check that `make docs` makes of what it built."""
    command = [sys.executable, str(SITE / "offline.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_whatever_a_page_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    """Each form in a file of its own, beside files that only link."""
    for name, text in {"index.html": "", **LOADS, **LOADS_NOTHING}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = offline(tmp_path)
    assert done.returncode == 1
    assert sorted(line.partition(" loads ")[0] for line in done.stderr.splitlines()) == sorted(LOADS)


def test_a_site_that_loads_nothing_passes_and_no_site_does_not(tmp_path: Path) -> None:
    """An empty folder is a build that failed."""
    assert offline(tmp_path).returncode == 1
    for name, text in {"index.html": "", **LOADS_NOTHING}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = offline(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_document_has_its_place_on_the_site() -> None:
    """In the table of contents of docs/site/conf.py, once."""
    for node in ast.parse((SITE / "conf.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CONTENTS":
            contents: dict[str, tuple[str, ...]] = ast.literal_eval(node.value)
    listed = [page for pages in contents.values() for page in pages]
    folders = (ROOT / "docs", ROOT / "docs" / "guide", SITE)
    documents = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    documents += [path for folder in folders for path in folder.glob("*.md")]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT).with_suffix("")) for path in documents)


def test_the_reference_of_the_command_line_has_every_command_and_option() -> None:
    """A section for each command, with all its options; the links in lists of commands lead to sections."""
    made = subprocess.run([sys.executable, str(SITE / "commands.py")], capture_output=True, text=True, check=True)
    parts = re.split(r"^#+ `(.*)`$", made.stdout, flags=re.MULTILINE)
    sections = {"duelog": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    commands = dict(commands_of(get_command(app), "duelog"))
    assert sections.keys() == commands.keys()
    assert len(commands) > 50
    options = [
        (name, option)
        for name, command in commands.items()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and not getattr(parameter, "hidden", False)
    ]
    assert [(name, option) for name, option in options if option not in sections[name]] == []
    links = re.findall(r"\]\(#([\w-]+)\)", made.stdout)
    assert sorted(links) == sorted(name.replace(" ", "-") for name in commands.keys() - {"duelog"})


def commands_of(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """A command and those below it, by the words that call them."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from commands_of(below, f"{name} {word}")


@pytest.mark.skipif("DUELOG_SITE" not in os.environ, reason="builds the site, which installs Sphinx: DUELOG_SITE=1")
def test_the_site_is_built_and_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    """`make docs` in a copy of the repository, then once more with a link that is broken."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "build"))
    command = ["make", "--no-print-directory", "docs", f"VENV={os.environ.get('DUELOG_SITE_VENV', tmp_path / 'venv')}"]
    subprocess.run(command, cwd=copy, check=True, timeout=900)
    assert {"index.html", "search.html", "searchindex.js"} <= {path.name for path in copy.glob("site/*")}
    start = (copy / "site" / "index.html").read_text(encoding="utf-8")
    assert "pip install duelog" in start
    assert "http-equiv" not in start
    assert (copy / "site" / "docs" / "site" / "api" / "DelayedStore.html").is_file()
    assert 'id="duelog-topics-list"' in (copy / "site" / "docs" / "site" / "commands.html").read_text(encoding="utf-8")
    with (copy / "docs" / "drain.md").open("a", encoding="utf-8") as page:
        page.write("\nSee [there](design.md#no-such-heading).\n")
    done = subprocess.run(command, cwd=copy, check=False, timeout=900, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no-such-heading" in done.stderr
