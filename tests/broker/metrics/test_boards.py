"""docs/grafana.json and docs/alerts.yml against what a live broker exports: every metric and label that they use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest

from duelog.broker.metrics.metric_names import METRICS
from tests.broker.cluster.proxied import proxy_to
from tests.broker.metrics.test_exposition import Scraped, busy, parsed

DOCS = Path(__file__).parents[3] / "docs"
BOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((DOCS / "alerts.yml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]

OF_PROMETHEUS = {"instance", "job", "le", "quantile"}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"\{([^}]*)\}")
_RANGE = re.compile(r"\[[^]]*\]")
_METRIC = re.compile(r"\b[a-zA-Z_][a-zA-Z0-9_]*\b(?!\s*\()")
_KEYWORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "offset", "bool"}
_OF_PROXY = {
    each.name.replace("pulsar_broker_", "pulsar_proxy_"): each
    for each in METRICS
    if each.name.startswith("pulsar_broker_topic_list_")
}
_EXPORTED = {each.name: each for each in METRICS} | _OF_PROXY
_LABELS = {name: set(each.labels) for name, each in _EXPORTED.items()}
_KINDS = {name: each.kind for name, each in _EXPORTED.items()}


def used(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics of an expression, each with the labels that it needs."""
    grouped = {label.strip() for found in _GROUPING.findall(expression) for label in found.split(",")}
    plain = _RANGE.sub("", _GROUPING.sub("", expression))
    selected = [set(re.findall(r"(\w+)\s*[=!]", found)) for found in _SELECTOR.findall(plain)]
    marked = _SELECTOR.sub("{}", plain)
    at = 0
    for found in _METRIC.finditer(marked):
        if found[0] in _KEYWORDS:
            continue
        labels = set(grouped)
        if marked[found.end() :].lstrip().startswith("{}"):
            labels |= selected[at]
            at += 1
        yield found[0], labels - OF_PROMETHEUS


def family_of(name: str) -> str:
    """The metric that a series is of."""
    if name in _LABELS:
        return name
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    assert _KINDS.get(base) in {"histogram", "summary"}, f"{name} is no metric"
    return base


def expressions() -> list[tuple[str, str]]:
    """Every expression of the board and of the alerts, and where it is."""
    found = [(rule["alert"], rule["expr"]) for rule in RULES]
    for panel in BOARD["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            found.append((variable["name"], f"sum by ({label}) ({series})"))
    return found


async def test_every_metric_and_label_of_board_and_alerts_is_exported_by_a_live_broker_or_proxy(tmp_path: Path) -> None:
    """Names from the page that it serves; labels from its samples, where it has any, and from the list."""
    proxied = proxy_to("pulsar://localhost:1")
    async with busy(tmp_path / "store") as (_, rest, _, _), proxied as (proxy, _):
        families = (await Scraped.of(rest)).families | parsed(generate_latest(proxy))
    checked = 0
    for where, expression in expressions():
        metrics = list(used(expression))
        assert metrics, where
        for name, labels in metrics:
            family = family_of(name)
            assert family in families, f"{where}: {name} is not exported"
            assert labels <= _LABELS[family], f"{where}: {name} has no {labels - _LABELS[family]}"
            for sample in families[family].samples:
                assert labels <= set(sample.labels), f"{where}: {sample}"
            checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ('sum by (le) (rate(a_bucket{x="1",le="2"}[5m])) / b', [("a_bucket", {"x"}), ("b", set())]),
        ("c > 3 and on (y) d offset 5m", [("c", {"y"}), ("d", {"y"})]),
        ("absent(e)", [("e", set())]),
    ],
)
def test_metrics_are_found_in_expressions(expression: str, found: list[tuple[str, set[str]]]) -> None:
    """Names and labels that the test above looks for."""
    assert list(used(expression)) == found


def test_the_board_can_be_loaded(tmp_path: Path) -> None:
    """Its data source is a variable, panels have numbers of their own, lie beside each other and say what they show."""
    panels: list[dict[str, Any]] = BOARD["panels"]
    assert (BOARD["uid"], BOARD["title"], BOARD["id"]) == ("duelog-broker", "duelog", None)
    assert BOARD["schemaVersion"] >= 36
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["datasource"] == source
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            assert target["datasource"] == source
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            known = {label for name, _ in used(target["expr"]) for label in _LABELS[family_of(name)]}
            assert labels <= known | OF_PROMETHEUS


def test_each_alert_says_how_bad_it_is_what_is_wrong_and_what_to_do() -> None:
    """Names are one each; those without `for` are of what does not pass by itself."""
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule.get("for") or rule["alert"] in {"DuelogStoreFailed", "DuelogEntriesUnreadable"}
        texts = " ".join(rule["annotations"].values())
        known = {label for name, _ in used(rule["expr"]) for label in _LABELS[family_of(name)]}
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= known


ALERTED = {
    "DuelogFiringStopped", "DuelogLate", "DuelogStoreFull", "DuelogStoreFailed", "DuelogBacklogGrows",
    "DuelogEventLoopLag", "DuelogDelaysRefused", "DuelogTopicListMemoryHigh", "DuelogTopicListQueueFull",
    "DuelogTopicListTimeouts", "DuelogTopicListWaits", "DuelogProxyTopicListMemoryHigh",
    "DuelogProxyTopicListQueueFull", "DuelogProxyTopicListTimeouts", "DuelogProxyTopicListWaits",
}  # fmt: skip
"""An operator is woken for each; those of topic lists are the four that PIP-442 asks for."""


def test_there_is_an_alert() -> None:
    """Each of these, and perhaps more."""
    assert {rule["alert"] for rule in RULES} >= ALERTED
