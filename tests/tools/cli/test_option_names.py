"""Names of options and arguments: the same everywhere, for the same thing."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import typer

from duelog.tools.cli.main import app

OPTIONS = {
    "--topic": "TOPIC", "--subscription": "SUBSCRIPTION", "--namespace": "NAMESPACE", "--key": "KEY",
    "--property": "NAME=VALUE", "--server": "URL", "--token": "TOKEN", "--tls-trust": "FILE",
    "--at": "TIME", "--after": "DURATION", "--from": "TIME", "--until": "TIME", "--for": "DURATION", "--due": "TIME",
    "--published": "TIME", "--older-than": "DURATION", "--timeout": "DURATION", "--ttl": "DURATION",
    "--retention": "DURATION", "--ack-timeout": "DURATION", "--backoff": "DURATION", "--max": "N", "--limit": None,
    "--json": None, "--create": None, "--all": None, "--dry-run": None, "--spark": None, "--replace": None,
}  # fmt: skip
"""The options that have one meaning for all, and what they take."""

OTHER_NAMES = {
    "--since", "--before", "--start-time", "--end-time", "--within", "--wait", "--age", "--max-messages", "--number",
    "--sub", "--subscription-name", "--topic-name", "--ns", "--url", "--host-url", "--auth", "--filter", "--yes",
    "--format", "--make", "--new", "--simulate", "--dedupe", "--expires",
}  # fmt: skip
"""Names that other tools have for these; here they are none."""

TWO_MEANINGS = {"--partition", "--output", "--to"}
"""A length of time of `init`, else the name of one; a file or a directory; a broker, a URL or a place in a log."""

WITHOUT_JSON = {"serve", "proxy", "worker", "completion", "table"}
"""They run until they are ended, print what is no answer, or write a file of another kind."""


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


COMMANDS = dict(commands(typer.main.get_command(app)))


def options(command: Any) -> dict[str, str | None]:
    """The names of each option of a command."""
    return {
        name: each.metavar
        for each in command.params
        if each.param_type_name == "option"
        for name in each.opts
        if name.startswith("--")
    }


def test_an_option_has_the_name_and_the_value_that_it_has_everywhere() -> None:
    """By the table; and no command calls it as other tools do."""
    found = {name: options(command) for name, command in COMMANDS.items()}
    assert {
        (name, each): taken
        for name, takes in found.items()
        for each, taken in takes.items()
        if OPTIONS.get(each, taken) != taken or each in OTHER_NAMES
    } == {}


def test_an_option_takes_the_same_in_every_command() -> None:
    """Those that are not in the table too."""
    taken: dict[str, set[str | None]] = defaultdict(set)
    for command in COMMANDS.values():
        for name, value in options(command).items():
            taken[name].add(value)
    assert {name for name, values in taken.items() if len(values) > 1} - TWO_MEANINGS == set()
    assert OPTIONS.keys() - taken.keys() == set()


def test_the_store_comes_first_then_the_topic_then_the_subscription() -> None:
    """And every command that answers can answer in JSON."""
    for name, command in COMMANDS.items():
        arguments = [each.metavar for each in command.params if each.param_type_name == "argument"]
        places = [each.strip("[].") for each in arguments if each.strip("[].") in ("STORE", "TOPIC", "SUBSCRIPTION")]
        assert places == ["STORE", "TOPIC", "SUBSCRIPTION"][: len(places)], name
        assert arguments[: len(places)] == [each for each in arguments if each.strip("[].") in places], name
        assert ("--json" in options(command)) == (name not in WITHOUT_JSON), name
