"""/metrics of a live broker: names, labels, text, figures; and what docs/grafana.json and docs/alerts.yml use."""

import asyncio
import json
import random
import re
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from duelog import DelayedDeliveryPolicies, DelayedStore
from duelog.broker.metrics import exposition
from duelog.broker.metrics.exposition import METRICS, Named
from duelog.broker.protocol import commands
from duelog.broker.server import broker as broker_module
from duelog.broker.server.broker import Broker
from duelog.errors import StoreFailed
from duelog.store.files import directory
from tests.broker.admin.rest import SECURED, Rest, administered
from tests.broker.cluster.test_proxy import proxy_to
from tests.broker.server.raw_client import RawClient, until
from tests.broker.server.test_broker import TOPIC, blob_of
from tests.conftest import present

NAMES = {each.name: each for each in METRICS}


def parsed(text: bytes) -> dict[str, Metric]:
    """By the name of the list: a counter's ends in _total."""
    found = list(text_string_to_metric_families(text.decode()))
    return {f"{each.name}_total" if each.type == "counter" else each.name: each for each in found}


async def text_of(served: exposition.Exposition) -> bytes:
    """The page, read at once."""
    async with served.page() as text:
        return text


@dataclass
class Scraped:
    """A page."""

    families: dict[str, Metric]

    @classmethod
    async def of(cls, rest: Rest) -> Self:
        """The page of a broker."""
        answer = await rest.ask("GET", "/metrics")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return cls(parsed(answer.value))

    def value(self, name: str, /, **labels: str) -> float:
        """The only sample of this name that has these labels."""
        family = name.removesuffix("_count").removesuffix("_sum") if name not in self.families else name
        samples = self.families[family].samples
        (found,) = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
        return float(found)


@asynccontextmanager
async def busy(path: Path, **settings: Any) -> AsyncIterator[tuple[Broker, Rest, DelayedStore, RawClient]]:
    """A broker that has been sent, refused, delivered and acknowledged messages."""
    async with administered(path, cluster_name="west", **settings) as (broker, rest, store):
        store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=3_600_000))
        client = await RawClient.connected(int(broker.urls.plain.rpartition(":")[2]))
        kind = commands.SubscriptionType.SHARED
        assert await client.ask(commands.Subscribe(TOPIC, "s", kind, 1, 3)) == commands.Success(3)
        assert isinstance(await client.ask(commands.Producer(TOPIC, 1, 4)), commands.ProducerSuccess)
        now_ms = store.clock.now_ms()
        delays = [None, None, None, None, now_ms + 60_000, now_ms + 70_000, now_ms + 7_200_000]
        for number, deliver_at in enumerate(delays):
            client.say(commands.Send(1, number), blob=blob_of(number, deliver_at_time=deliver_at))
            await client.hear()
        client.say(commands.Flow(1, 10))
        ids = []
        for _ in range(4):
            received = present(await client.hear_blob())
            assert isinstance(received[0], commands.Message)
            ids.append(received[0].message_id)
        ack = commands.Ack(1, commands.AckType.INDIVIDUAL, ids[:3], request_id=5)
        assert await client.ask(ack) == commands.AckResponse(1, request_id=5)
        services = present(broker._services)
        for call in services.rates.on_period:
            call()
        services.rates.sample()
        try:
            yield broker, rest, store, client
        finally:
            await client.close()


def check_listed(named: Named, family: Metric, by_topic: bool) -> None:
    """A family is as the list says."""
    assert family.type == named.kind, named.name
    assert family.documentation
    wanted = {each for each in named.labels if by_topic or each not in {"topic", "subscription"}}
    for sample in family.samples:
        assert set(sample.labels) - {"le", "quantile"} == wanted, sample


@pytest.mark.parametrize("by_topic", [True, False], ids=["by-topic", "by-namespace"])
async def test_every_metric_of_the_list_is_there_with_its_kind_and_labels_and_no_other(
    tmp_path: Path, by_topic: bool
) -> None:
    """The text parses by prometheus_client; by topic, and by namespace."""
    settings = {"expose_topic_level_metrics_in_prometheus": by_topic}
    async with busy(tmp_path / "store", **settings) as (_, rest, _, _):
        families = (await Scraped.of(rest)).families
        assert set(families) == set(NAMES)
        for name, named in NAMES.items():
            check_listed(named, families[name], by_topic)


async def test_figures_are_those_of_what_was_sent_delivered_and_refused(tmp_path: Path) -> None:
    """Four due at once, two delayed, one over the longest delay; three acknowledged."""
    async with busy(tmp_path / "store") as (_, rest, store, client):
        page = await Scraped.of(rest)
        of_topic = {"cluster": "west", "namespace": "public/default", "topic": TOPIC}
        of_one = {**of_topic, "subscription": "s"}
        sizes = [len(blob_of(each)) for each in range(6)]
        expected = {
            "pulsar_producers_count": 1,
            "pulsar_consumers_count": 1,
            "pulsar_subscriptions_count": 1,
            "pulsar_in_messages_total": 6,
            "pulsar_msg_backlog": 3,
            "pulsar_storage_write_latency_count": 6,
            "duelog_topic_pending": 2,
            "pulsar_broker_topic_messages_delayed_rejected_total": 1,
        }
        assert {name: page.value(name, **of_topic) for name in expected} == expected
        of_subscription = {
            "pulsar_subscription_back_log": 3,
            "pulsar_subscription_back_log_no_delayed": 1,
            "pulsar_subscription_delayed": 2,
            "pulsar_subscription_unacked_messages": 1,
            "pulsar_subscription_consumers_count": 1,
            "pulsar_out_messages_total": 4,
            "pulsar_out_bytes_total": sum(sizes[:4]),
        }
        assert {name: page.value(name, **of_one) for name in of_subscription} == of_subscription
        assert page.value("pulsar_subscription_msg_ack_rate", **of_one) > 0
        assert page.value("pulsar_rate_in", **of_topic) > page.value("pulsar_rate_out", **of_topic) > 0
        of_broker = {
            "pulsar_active_connections": 1,
            "pulsar_connection_created_total_count": 1,
            "pulsar_broker_topics_count": 1,
            "pulsar_broker_msg_backlog": 3,
            "duelog_broker_publish_seconds_count": 6,
            "duelog_broker_dispatch_seconds_count": 4,
            "duelog_broker_acknowledged_total": 3,
            "duelog_store_failed": 0,
            "duelog_firing_lag_seconds": 0,
            "pulsar_broker_publish_latency_count": 6,
        }
        assert {name: page.value(name, cluster="west") for name in of_broker} == of_broker
        assert page.value("duelog_broker_send_errors_total", error="not_allowed") == 1
        assert page.value("pulsar_broker_publish_latency", quantile="0.99") > 0
        assert page.value("pulsar_topics_count", namespace="public/default") == 1
        assert await client.ask(commands.CloseConsumer(1, 8)) == commands.Success(8)
        assert await client.ask(commands.CloseProducer(1, 9)) == commands.Success(9)
        store.delete_topic(TOPIC)
        for _ in range(1_000):  # a thread of the engine tells
            page = await Scraped.of(rest)
            if not page.families["pulsar_broker_topic_messages_delayed_rejected_total"].samples:
                break
        assert not [each for each in page.families.values() if any("topic" in s.labels for s in each.samples)]


@pytest.mark.parametrize(
    ("secured", "setting", "is_open"),
    [(True, None, False), (True, True, False), (True, False, True), (False, None, True), (False, False, True)],
)
async def test_metrics_ask_for_credentials_where_the_broker_does_unless_it_is_set_otherwise(
    tmp_path: Path, secured: bool, setting: bool | None, is_open: bool
) -> None:
    """Any good credentials will do."""
    settings = SECURED if secured else {}
    async with administered(tmp_path / "store", authenticate_metrics_endpoint=setting, **settings) as (_, rest, _):
        assert (await rest.ask("GET", "/metrics")).status == (200 if is_open else 401)
        assert (await rest.ask("GET", "/metrics", role="anybody")).status == 200


async def test_a_page_has_series_of_a_limited_number_of_topics_and_sums_of_the_rest(tmp_path: Path) -> None:
    """Topics and subscriptions count; sums over all series are the same, and more topics are no more bytes."""
    store_path = tmp_path / "store"
    async with administered(store_path, cluster_name="west", max_topics_in_prometheus=10) as (_, rest, store):
        topics = [store.topic(f"persistent://public/default/t{number:03}") for number in range(100)]
        for topic in topics:
            with topic.subscribe("s"):
                topic.send(b"x")
        large = store.topic("persistent://public/default/a-large-one")
        for number in range(11):
            large.subscribe(f"s{number}").close()
        answer = await rest.ask("GET", "/metrics")
        families = parsed(answer.value)
        rest_of = {"cluster": "west", "namespace": "public/default", "topic": "others"}
        for name, per_topic in (("duelog_messages_sent_total", 1), ("pulsar_msg_backlog", 1)):
            found = {each.labels["topic"]: each.value for each in families[name].samples if each.name == name}
            own = {str(topic.name): per_topic for topic in topics[:5]}
            assert found == {**own, "others": 95 * per_topic}, name
        backlog = families["pulsar_subscription_back_log"].samples
        assert [each.value for each in backlog if each.labels == {**rest_of, "subscription": "others"}] == [95]
        assert sum(each.value for each in families["pulsar_subscriptions_count"].samples) == 111
        for number in range(100, 200):
            store.topic(f"persistent://public/default/t{number:03}").send(b"x")
        after = await rest.ask("GET", "/metrics")
        assert abs(len(after.value) - len(answer.value)) < 1_000
        assert len(after.value) < 100_000


@pytest.mark.parametrize("by_topic", [True, False], ids=["by-topic", "by-namespace"])
async def test_a_page_has_series_of_a_limited_number_of_namespaces_and_sums_of_the_rest(
    tmp_path: Path, by_topic: bool
) -> None:
    """The engine's figures of them, too."""
    settings: dict[str, Any] = {"max_topics_in_prometheus": 3, "expose_topic_level_metrics_in_prometheus": by_topic}
    async with administered(tmp_path / "store", **settings) as (_, rest, store):
        for number in range(20):
            store.topic(f"persistent://public/n{number}/t").send(b"x")
        families = parsed((await rest.ask("GET", "/metrics")).value)
        found = {each.labels["namespace"]: each.value for each in families["pulsar_topics_count"].samples}
        assert len(found) == 4
        assert (found["others"], sum(found.values())) == (17, 20)
        for family in families.values():
            assert len({each.labels.get("namespace") for each in family.samples}) <= 7, family.name


async def test_one_page_is_in_memory_at_a_time_and_who_takes_none_of_it_loses_the_connection(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next page is made when the last has left; a reader that is too slow is not waited for.

    It is too slow when the test says so.
    """
    monkeypatch.setattr(broker_module, "_SCRAPE_S", 61.25)
    served, limited = rest.services.exposition, asyncio.timeout
    limits: list[asyncio.Timeout] = []
    made = 0

    def timeout(seconds: float | None) -> asyncio.Timeout:
        limit = limited(seconds)
        if seconds == 61.25:
            limits.append(limit)
        return limit

    monkeypatch.setattr(asyncio, "timeout", timeout)

    async def large() -> bytes:
        nonlocal made
        made += 1
        return random.Random(made).randbytes(32 << 20 if made == 1 else 100)

    monkeypatch.setattr(served, "_make", large)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rest.address.rpartition(":")[2]), limit=1)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await reader.read(1) == b"H"
    answers = [asyncio.create_task(rest.ask("GET", "/metrics")) for _ in range(6)]
    await until(lambda: served._scrape is not None and served._scrape.readers == 6)
    assert (made, len(limits)) == (1, 1)
    limits[0].reschedule(asyncio.get_running_loop().time())
    pages = {(await answer).value for answer in answers}
    assert (made, len(pages)) == (2, 1)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    await until(lambda: served._scrape is None)


async def test_a_store_that_has_failed_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its directory is gone: what needs it is left out, all else is there when it is needed most."""
    monkeypatch.setattr(directory, "LOOK_NS", 0)

    async with busy(tmp_path / "store") as (_, rest, store, _):
        shutil.rmtree(store.path)
        with pytest.raises(StoreFailed):
            store.topic("t").send(b"")
        page = await Scraped.of(rest)
        assert page.value("duelog_store_failed", cluster="west") == 1
        assert page.value("pulsar_active_connections", cluster="west") == 1
        assert page.value("process_open_fds") > 0
        assert "duelog_disk_free_bytes" not in page.families
    assert "a part of /metrics is left out" in caplog.text


async def test_a_scrape_lets_the_loop_go_on(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop copies its figures a few topics a turn; a worker reads the store and writes the text."""
    monkeypatch.setattr(exposition, "_TOPICS_A_TURN", 2)
    writers: list[threading.Thread] = []
    write_topics = exposition.write_topics

    def written(*arguments: Any, **options: Any) -> None:
        writers.append(threading.current_thread())
        write_topics(*arguments, **options)

    monkeypatch.setattr(exposition, "write_topics", written)
    client = await rest.client()
    for number in range(20):
        await client.ask(commands.Producer(f"{TOPIC}{number}", number, number))
    scrape = asyncio.ensure_future(text_of(rest.services.exposition))
    turns = 0
    while not writers:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10
    assert len(parsed(await scrape)["pulsar_producers_count"].samples) == 20
    assert writers[0] is not threading.main_thread()


async def test_a_large_page_is_compressed_for_who_takes_it_so(rest: Rest) -> None:
    """A page of many topics is megabytes, and mostly the same."""
    page = b"# a line of the page\n" * 100_000

    async def large() -> bytes:
        return page

    rest.services.exposition._make = large  # type: ignore[method-assign]
    for accepted, encoding in (("gzip", "gzip"), ("identity", None)):
        answer = await rest.ask("GET", "/metrics", headers={"Accept-Encoding": accepted})
        assert (answer.value, answer.headers.get("Content-Encoding")) == (page, encoding)


async def test_many_who_ask_at_once_get_one_page_and_a_stopped_broker_leaves_nothing_behind(rest: Rest) -> None:
    """Scrapes do not add up; the store has the listeners that it had."""
    services = present(rest.services)
    made: list[bytes] = []
    served = services.exposition
    make = served._make

    async def counted() -> bytes:
        made.append(await make())
        return made[-1]

    served._make = counted  # type: ignore[method-assign]
    pages = await asyncio.gather(*(text_of(served) for _ in range(20)))
    assert (len(made), len(set(pages))) == (1, 1)
    metrics = present(rest.store._engine.metrics)
    listeners = len(metrics._storage.listeners)
    await rest.broker.stop()
    assert len(metrics._storage.listeners) == listeners - 1
    assert services.producers.sends.received is None


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


ALERTED = {
    "DuelogFiringStopped", "DuelogLate", "DuelogStoreFull", "DuelogStoreFailed", "DuelogBacklogGrows",
    "DuelogEventLoopLag", "DuelogDelaysRefused", "DuelogTopicListMemoryHigh", "DuelogTopicListQueueFull",
    "DuelogTopicListTimeouts", "DuelogTopicListWaits", "DuelogProxyTopicListMemoryHigh",
    "DuelogProxyTopicListQueueFull", "DuelogProxyTopicListTimeouts", "DuelogProxyTopicListWaits",
}  # fmt: skip
"""An operator is woken for each; those of topic lists are the four that PIP-442 asks for."""


def test_each_alert_is_there_and_says_how_bad_it_is_what_is_wrong_and_what_to_do() -> None:
    """Names are one each; those without `for` are of what does not pass by itself."""
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule.get("for") or rule["alert"] in {"DuelogStoreFailed", "DuelogEntriesUnreadable"}
        texts = " ".join(rule["annotations"].values())
        known = {label for name, _ in used(rule["expr"]) for label in _LABELS[family_of(name)]}
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= known
    assert {rule["alert"] for rule in RULES} >= ALERTED
