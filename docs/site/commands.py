"""Prints the reference of the command line, made from the commands by typer: `python docs/site/commands.py`.

conf.py puts it below docs/site/commands.md when the site is built, so that no copy of it can be out of date.
"""

import re
import subprocess
import sys

_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def reference() -> str:
    """The reference as Markdown: the help of `duelog`, then a section a command.

    typer shortens the help in its lists of commands; here they are links to the sections. The option `--help`, which
    every command has, is left out.
    """
    command = [sys.executable, "-m", "typer", "duelog.tools.cli.main", "utils", "docs", "--name", "duelog"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sections = re.split(r"^(?=#)", made.partition("\n")[2], flags=re.MULTILINE)
    return "".join(_section(section) for section in sections)


def _section(text: str) -> str:
    heading = re.match(r"#+ `(.*)`", text)
    prefix = heading[1] if heading else "duelog"
    text = text.replace("* `--help`: Show this message and exit.\n", "")
    text = text.replace("**Options**:\n\n\n", "")
    before, title, commands = text.partition("**Commands**:\n\n")
    names = re.findall(r"^\* `([\w-]+)`", commands, re.MULTILINE)
    links = [f"[`{name}`](#{f'{prefix} {name}'.replace(' ', '-')})" for name in names]
    return _markdown(before) + title + (", ".join(links) + "\n\n" if links else "")


def _markdown(text: str) -> str:
    """Help as Markdown for Sphinx: examples are for a shell, and `<name>` outside code is no tag of HTML."""
    parts = _CODE.split(text)
    parts[::2] = [part.replace("<", r"\<") for part in parts[::2]]
    parts[1::2] = [re.sub(r"^```\n", "```sh\n", part, count=1) for part in parts[1::2]]
    return "".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
