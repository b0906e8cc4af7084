"""The list of what `/metrics` has: names, kinds and labels. docs/metrics.md says the same to people.

Names are Pulsar's where it has one for the same thing, so that boards made for it show a broker of this kind too. The
engine's own are those of `duelog.metrics`, as OpenTelemetry's exporters write them: dots are underscores, the unit is a
part of the name, counters end in `_total`. What has a Pulsar name is not there twice.
"""

from typing import NamedTuple

from ... import metrics as engine
from ..listing.memory_limits import BROKER_PREFIX, FIGURES

CLUSTER = ("cluster",)
NAMESPACE = ("cluster", "namespace")
TOPIC = ("cluster", "namespace", "topic")
SUBSCRIPTION = (*TOPIC, "subscription")


class Named(NamedTuple):
    """A metric. labels: without le and quantile; where series are by namespace, without topic and subscription."""

    name: str
    kind: str
    labels: tuple[str, ...]
    description: str


_UNITS = {"s": "_seconds", "By": "_bytes"}

PULSAR_NAMES = {engine.DELAYED, engine.BACKLOG, engine.INDEX}
"""Instruments of the engine that have a name of Pulsar's here."""


def prometheus_name(spec: engine.Spec) -> str:
    """The name of one of the engine's instruments."""
    return spec.name.replace(".", "_") + _UNITS.get(spec.unit, "") + ("_total" if spec.kind == "counter" else "")


def label_name(attribute: str) -> str:
    """The label of an attribute of the engine's: its last word."""
    return attribute.rpartition(".")[2]


def labels_of(spec: engine.Spec) -> tuple[str, ...]:
    """The labels of an instrument: the store is known by its cluster; histograms, many series each, have no topic."""
    names = [label_name(each) for each in spec.attributes if each not in {"duelog.store", "pulsar.cluster"}]
    if spec.kind == "histogram" and "topic" in names:
        names.remove("topic")
    return (*CLUSTER, *names)


ENGINE = tuple(
    Named(prometheus_name(spec), spec.kind, labels_of(spec), spec.description)
    for spec in engine.SPECS
    if spec.name not in PULSAR_NAMES and spec.name != engine.RUNNING  # a broker runs no handlers
)

WRITE_BUCKETS = ("le_0_5", "le_1", "le_5", "le_10", "le_20", "le_50", "le_100", "le_200", "le_1000", "overflow")

BROKER = (
    Named("pulsar_topics_count", "gauge", NAMESPACE, "Topics of the namespace"),
    Named("pulsar_subscriptions_count", "gauge", TOPIC, "Subscriptions"),
    Named("pulsar_producers_count", "gauge", TOPIC, "Producers that are open"),
    Named("pulsar_consumers_count", "gauge", TOPIC, "Consumers that are open, readers among them"),
    Named("pulsar_rate_in", "gauge", TOPIC, "Messages that came, a second"),
    Named("pulsar_rate_out", "gauge", TOPIC, "Messages sent to consumers, a second"),
    Named("pulsar_throughput_in", "gauge", TOPIC, "Bytes that came, a second"),
    Named("pulsar_throughput_out", "gauge", TOPIC, "Bytes sent to consumers, a second"),
    Named("pulsar_average_msg_size", "gauge", TOPIC, "Bytes of a message that came in the last period"),
    Named("pulsar_storage_write_rate", "gauge", TOPIC, "Entries written, a second; a batch is one"),
    Named("pulsar_in_messages_total", "counter", TOPIC, "Messages that came"),
    Named("pulsar_in_bytes_total", "counter", TOPIC, "Bytes that came"),
    Named("pulsar_storage_size", "gauge", TOPIC, "Bytes of what is stored: the main log, and what waits for its time"),
    Named("pulsar_msg_backlog", "gauge", TOPIC, "Backlog of all subscriptions, what is delayed included"),
    Named("pulsar_delayed_message_index_size_bytes", "gauge", TOPIC, "Memory of the topic's delay indexes, estimated"),
    *(
        Named(f"pulsar_storage_write_latency_{each}", "gauge", TOPIC, "SENDs of the last period by ms to their receipt")
        for each in WRITE_BUCKETS
    ),
    Named("pulsar_storage_write_latency_count", "gauge", TOPIC, "SENDs of the last period that have their receipt"),
    Named("pulsar_storage_write_latency_sum", "gauge", TOPIC, "Milliseconds that they took together"),
    Named("pulsar_subscription_back_log", "gauge", SUBSCRIPTION, "Messages not acknowledged, delayed ones included"),
    Named("pulsar_subscription_back_log_no_delayed", "gauge", SUBSCRIPTION, "Messages fired and not acknowledged"),
    Named("pulsar_subscription_delayed", "gauge", SUBSCRIPTION, "Messages of the subscription not due yet"),
    Named("pulsar_subscription_in_replay", "gauge", SUBSCRIPTION, "Messages that wait to be sent again"),
    Named("pulsar_subscription_unacked_messages", "gauge", SUBSCRIPTION, "Messages that consumers hold"),
    Named("pulsar_subscription_blocked_on_unacked_messages", "gauge", SUBSCRIPTION, "1: nothing is sent, too many are"),
    Named("pulsar_subscription_consumers_count", "gauge", SUBSCRIPTION, "Consumers of the subscription"),
    Named("pulsar_subscription_msg_rate_out", "gauge", SUBSCRIPTION, "Messages sent, a second"),
    Named("pulsar_subscription_msg_throughput_out", "gauge", SUBSCRIPTION, "Bytes sent, a second"),
    Named("pulsar_subscription_msg_rate_redeliver", "gauge", SUBSCRIPTION, "Messages sent again, a second"),
    Named("pulsar_subscription_msg_ack_rate", "gauge", SUBSCRIPTION, "Acknowledgements taken, a second"),
    Named("pulsar_out_messages_total", "counter", SUBSCRIPTION, "Messages sent"),
    Named("pulsar_out_bytes_total", "counter", SUBSCRIPTION, "Bytes sent"),
    Named("pulsar_broker_topics_count", "gauge", CLUSTER, "Topics of the broker"),
    Named("pulsar_broker_subscriptions_count", "gauge", CLUSTER, "Subscriptions of topics in use"),
    Named("pulsar_broker_producers_count", "gauge", CLUSTER, "Producers that are open"),
    Named("pulsar_broker_consumers_count", "gauge", CLUSTER, "Consumers that are open"),
    Named("pulsar_broker_rate_in", "gauge", CLUSTER, "Messages that came, a second"),
    Named("pulsar_broker_rate_out", "gauge", CLUSTER, "Messages sent to consumers, a second"),
    Named("pulsar_broker_throughput_in", "gauge", CLUSTER, "Bytes that came, a second"),
    Named("pulsar_broker_throughput_out", "gauge", CLUSTER, "Bytes sent to consumers, a second"),
    Named("pulsar_broker_storage_size", "gauge", CLUSTER, "Bytes stored of topics in use"),
    Named("pulsar_broker_msg_backlog", "gauge", CLUSTER, "Backlog of topics in use, what is delayed included"),
    Named("pulsar_broker_publish_latency", "summary", CLUSTER, "Milliseconds from a SEND to its receipt, last period"),
    Named("pulsar_active_connections", "gauge", CLUSTER, "Connections of clients"),
    Named("pulsar_connection_created_total_count", "gauge", CLUSTER, "Connections that clients made"),
    Named("pulsar_connection_create_success_count", "gauge", CLUSTER, "Connections that were let in"),
    Named("pulsar_connection_create_fail_count", "gauge", CLUSTER, "Connections over a limit, refused"),
    Named("pulsar_connection_closed_total_count", "gauge", CLUSTER, "Connections that ended"),
    Named("duelog_broker_publish_seconds", "histogram", CLUSTER, "Time from a SEND to its receipt"),
    Named("duelog_broker_dispatch_seconds", "histogram", CLUSTER, "Time from due, or stored, to first sent"),
    Named("duelog_broker_send_errors_total", "counter", (*CLUSTER, "error"), "SENDs refused, by the error told"),
    Named("duelog_broker_duplicates_total", "counter", CLUSTER, "SENDs that were stored already"),
    Named("duelog_broker_redelivered_total", "counter", CLUSTER, "Messages sent again"),
    Named("duelog_broker_acknowledged_total", "counter", CLUSTER, "Acknowledgements taken; a cumulative one is one"),
    Named("duelog_broker_unanswered_sends", "gauge", CLUSTER, "SENDs that wait for their answer"),
    Named("duelog_broker_blocked_sends", "gauge", CLUSTER, "SENDs that wait for the engine to have capacity"),
    Named("duelog_broker_pending_requests", "gauge", CLUSTER, "Requests under way, SENDs and acknowledgements apart"),
    Named("duelog_broker_write_queue_bytes", "gauge", CLUSTER, "Bytes that wait to be written to clients"),
    Named("duelog_broker_write_queue_longest_bytes", "gauge", CLUSTER, "Those of the connection with the most"),
    Named("duelog_broker_paused_connections", "gauge", (*CLUSTER, "reason"), "Connections not read, by reason"),
    Named("duelog_broker_topic_list_watchers", "gauge", CLUSTER, "Watchers of topic lists"),
    Named("duelog_broker_topic_list_watched_names_bytes", "gauge", CLUSTER, "Memory of names that watchers keep"),
    Named("duelog_broker_topic_list_waiting_changes", "gauge", CLUSTER, "Changes that wait to be sent to watchers"),
    Named("duelog_broker_event_loop_lag_seconds", "histogram", CLUSTER, "How late the event loop is for a timer"),
    Named("duelog_broker_event_loop_lag_longest_seconds", "gauge", CLUSTER, "The longest in the last period"),
    Named("duelog_broker_scrape_seconds", "gauge", CLUSTER, "What the scrape before this one took"),
    Named("duelog_store_failed", "gauge", CLUSTER, "1: nothing is written until the store is opened again"),
    Named("duelog_store_size_bytes", "gauge", CLUSTER, "Disk space of the store"),
    Named("duelog_store_part_size_bytes", "gauge", (*CLUSTER, "part"), "What of it is of each part of the store"),
    Named("duelog_disk_size_bytes", "gauge", CLUSTER, "Size of the file system that the store is on"),
    Named("duelog_disk_free_bytes", "gauge", CLUSTER, "What of it this process may still use"),
)  # fmt: skip

LIMITS = tuple(
    Named(f"{BROKER_PREFIX}{kind}_{name}", metric, CLUSTER, f"PIP-442, {kind}: {text}")
    for kind in ("heap", "direct")
    for name, metric, text in FIGURES
)

PROCESS = (
    Named("process_virtual_memory_bytes", "gauge", (), "Address space of the process"),
    Named("process_resident_memory_bytes", "gauge", (), "Memory of the process"),
    Named("process_start_time_seconds", "gauge", (), "When the process began, seconds since 1970"),
    Named("process_cpu_seconds_total", "counter", (), "Processor time of the process"),
    Named("process_open_fds", "gauge", (), "Open file descriptors"),
    Named("process_max_fds", "gauge", (), "File descriptors that may be open"),
)

METRICS = (*BROKER, *ENGINE, *LIMITS, *PROCESS)

BY_NAME = {each.name: each for each in METRICS}
