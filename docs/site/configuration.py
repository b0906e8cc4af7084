"""Writes docs/configuration.md from the code: `python docs/site/configuration.py`; `--check` says if it is current.

Names, types and defaults are those of the classes, meanings those of their docstrings; a unit follows from the end of
a name (`_ms`, `_bytes`). Nothing on the page is written by hand but the sentences between the tables, below.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

from duelog import Policies, StoreConfig
from duelog.broker.cluster.proxy import ProxyConfig
from duelog.broker.configuration import BrokerConfig
from duelog.store.config import SendDurability
from duelog.store.policy.policies import DEFAULTS, SUBSCRIPTION_FIELDS, DelayedDeliveryPolicies

PAGE = Path(__file__).parents[1] / "configuration.md"

HEAD = """# Configuration

Every setting of a store, of policies, of the broker and of the proxy, made from the code by `python
docs/site/configuration.py`. A value of the wrong type or outside its range is refused with `InvalidArgument`, which
names the setting and the value; so is a name that is not known.
"""

STORE = """## Settings of a store

`StoreConfig(...)`, given to `DelayedStore.open`; in the settings of a broker the table `[store]`. A program may open a
store with other values each time, but for `partition_ms`, which is fixed when the store is made.
"""

POLICIES = """## Policies

What a store keeps for itself: `Policies(...)`, set by `store.set_policies`, `store.update_policies` or `duelog policies
set` for the store, a namespace, a topic or a subscription. Each field is taken from the narrowest scope that sets it;
the default holds where none does. `duelog policies get` shows what is in force, and where each value was set.
"""

BROKER = """## Settings of a broker

`duelog serve --config FILE`, in TOML; options of the command count more. The names are those of Apache Pulsar where it
has a setting of the same meaning ([the broker](broker.md)).
"""

PROXY = """## Settings of a proxy

`duelog proxy --config FILE`, in TOML; options of the command count more ([several brokers](scale.md)).
"""

UNITS = (
    (re.compile("_ms$|_millis$"), "ms"),
    (re.compile("_sec$|_secs$|_seconds$"), "s"),
    (re.compile("_mb$"), "MiB"),
    (re.compile("_bytes$|^max_message_size$|^write_(high|low)_mark$"), "bytes"),
    (re.compile("_entries$|^fire_batch$"), "entries"),
    (re.compile("_port(_tls)?$"), "port"),
    (
        re.compile("_redeliveries$|_messages_|_connections|_partitions$|_threads$|_requests?(_|$)|_size$|_length$"),
        "number",
    ),
    (re.compile("_(producers|consumers|watchers)_per_connection$|^max_topics_in_prometheus$"), "number"),
    (re.compile("^max_(in_flight|pending)$"), "messages"),
    (re.compile("_ratio$"), "share"),
)
"""By the name of a setting: the unit of its values."""

SPANS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))
SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Setting(NamedTuple):
    """One row of a table."""

    name: str
    type: str
    default: str
    unit: str
    meaning: str

    def row(self) -> str:
        """Render as Markdown."""
        meaning = re.sub("``(.*?)``", r"`\1`", self.meaning).replace("|", "\\|")
        meaning = meaning[:1].upper() + meaning[1:]
        return f"| `{self.name}` | {self.type} | {self.default} | {self.unit} | {meaning} |"


class DocumentedField(NamedTuple):
    """A field that a docstring describes, `name: text` with its other lines indented, and the heading above it."""

    name: str
    text: str
    heading: str


FIELD = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): (.*)")
"""The first line of a field's description; several names share one."""


def documented_fields(docstring: str) -> Iterator[DocumentedField]:
    """Read what a docstring says of each field, in order. A heading is what is bold at the start of a line."""
    heading, lines = "", inspect.cleandoc(docstring).splitlines()
    for number, line in enumerate(lines):
        if line.startswith("**"):
            heading = line.split("**")[1]
        elif found := FIELD.fullmatch(line):
            rest = [each.strip() for each in _indented(lines[number + 1 :])]
            for name in found[1].split(", "):
                yield DocumentedField(name, " ".join([found[2], *rest]), heading)


def _indented(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("    "):
            return
        yield line


def annotated(cls: type) -> dict[str, tuple[str, str]]:
    """The annotation of each field of a class, as its source has it, and the string under it, "": none."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__[:-1]):
        (body,) = (node.body for node in ast.parse(inspect.getsource(base)).body if isinstance(node, ast.ClassDef))
        for field, below in pairwise([*body, ast.Pass()]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value if isinstance(below, ast.Expr) else None
                meaning = " ".join(str(text.value).split()) if isinstance(text, ast.Constant) else ""
                found[field.target.id] = ast.unparse(field.annotation), meaning
    return found


def unit_of(name: str) -> str:
    """The unit of a setting's values; empty: it has none."""
    return next((unit for pattern, unit in UNITS if pattern.search(name)), "")


def shown(value: object, unit: str) -> str:
    """A default as the page has it: as it is written, and a number of ms or bytes in a larger unit too."""
    if value is None or isinstance(value, (bool, str, Path)):
        return f"`{value!r}`"
    if isinstance(value, (int, float)):
        scale = {"ms": SPANS, "bytes": SIZES}.get(unit, ())
        larger = [f" ({value // size:,} {name})" for size, name in scale if value and not value % size]
        return f"`{value}`" + "".join(larger[:1])
    return "" if not value else f"`{value!r}`"


def in_toml(default: str) -> str:
    """A default as a file has it."""
    return {"`None`": "", "`True`": "`true`", "`False`": "`false`"}.get(default, default.replace("'", '"'))


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


IN_TOML = {
    "str": "string",
    "int": "integer",
    "Count": "integer",
    "float": "number",
    "Seconds": "number",
    "bool": "boolean",
    "Path": "path",
}
"""Types as a file knows them; a setting that may be None may be left out, as any other."""


def _type(annotation: str) -> str:
    """An annotation as readers know it."""
    text = annotation.replace("SendDurability", " | ".join(f'"{each}"' for each in get_args(SendDurability)))
    text = text.replace("OptionalMilliseconds", "Milliseconds | None").replace("Milliseconds", "int | timedelta")
    return f"`{text}`".replace(" | ", "`, `")


def _toml_type(annotation: str) -> str:
    kind = annotation.removesuffix(" | None")
    return IN_TOML.get(kind) or ("list of strings" if kind.startswith("tuple") else "table")


def store_settings() -> dict[str, list[Setting]]:
    """By heading of the docstring of `StoreConfig`."""
    by_name, annotations = {each.name: each for each in fields(StoreConfig)}, annotated(StoreConfig)
    found: dict[str, list[Setting]] = {}
    for each in documented_fields(StoreConfig.__doc__ or ""):
        field, unit = by_name[each.name], unit_of(each.name)
        row = Setting(each.name, _type(annotations[each.name][0]), shown(_default(field), unit), unit, each.text)
        found.setdefault(each.heading, []).append(row)
    return found


def policies() -> list[Setting]:
    """Every field of `Policies`, and in its meaning where it may be set."""
    texts = {
        each.name: each.text
        for cls in (DelayedDeliveryPolicies, Policies)
        for each in documented_fields(cls.__doc__ or "")
    }
    found, annotations = [], annotated(Policies)
    for field in fields(Policies):
        unit = unit_of(field.name)
        kind = _type(annotations[field.name][0].removeprefix("Optional").removesuffix(" | None"))
        text = f"{texts.get(field.name, '')} *{_scopes(field.name)}.*"
        found.append(Setting(field.name, kind, shown(DEFAULTS[field.name], unit), unit, text))
    return found


def _scopes(name: str) -> str:
    if name in SUBSCRIPTION_FIELDS:
        return "Store, namespace, topic, subscription"
    return "Namespace, topic" if name == "fixed_delivery_delay_ms" else "Store, namespace, topic"


def settings_of(cls: type[BrokerConfig] | type[ProxyConfig]) -> list[Setting]:
    """Every setting of a class, under its name in a file."""
    in_file, found, annotations = cls.in_file, [], annotated(cls)
    for field in fields(cls):
        if not field.init:
            continue
        unit, name, (annotation, text) = unit_of(field.name), in_file(field.name), annotations[field.name]
        text = re.sub("`([a-z]+_[a-z_]+)`", lambda match: f"`{in_file(match[1])}`", text)
        text = re.sub(r"\bNone\b", "unset", text)
        default = in_toml(shown(_default(field), unit))
        found.append(Setting(name, _toml_type(annotation), default, unit, text))
    return found


def table(settings: list[Setting]) -> str:
    """Render as Markdown."""
    return "\n".join(
        [
            "| name | type | default | unit | meaning |",
            "| --- | --- | --- | --- | --- |",
            *(each.row() for each in settings),
        ]
    )


def sections() -> Mapping[str, list[Setting]]:
    """Introduction or heading to the settings under it, in the order of the page."""
    store = {f"### {heading}\n": rows for heading, rows in store_settings().items()}
    return {
        STORE: [],
        **store,
        POLICIES: policies(),
        BROKER: settings_of(BrokerConfig),
        PROXY: settings_of(ProxyConfig),
    }


def page() -> str:
    """The whole page."""
    parts = [
        HEAD,
        *(part for text, rows in sections().items() for part in (text, *([table(rows) + "\n"] if rows else []))),
    ]
    return "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def main() -> int:
    """Write the page, or say with the exit status whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is not current")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE.name} is not current: python docs/site/configuration.py writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
