"""Settings of a broker, and those that a proxy shares: a frozen value; a TOML file has them by Pulsar's names.

Where a setting means the same as one of Pulsar's, it has its name. A name that is not known is an error, so that a
setting that was misspelt is not lost.
"""

import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from msgspec import ValidationError, convert

from ..store.errors import InvalidArgument
from .lookup.compatibility import Compatibility
from .protocol.frames import MAX_MESSAGE_SIZE

S = TypeVar("S", bound="ServiceConfig")

Count = Annotated[int, "more than 0"]
Seconds = Annotated[float, "more than 0"]

EVERYWHERE = frozenset({"0.0.0.0", "::", ""})
"""Addresses to listen at that are no address to connect to."""

_WORD = re.compile(r"_(mb$|[a-z])")
_LISTENER = re.compile(r"(\w[\w-]*):(pulsar(?:\+ssl)?://[^\s/,]+:[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Settings that a broker and a proxy have. In a file `bind_address` is `bindAddress`, and so on."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    """By field, its name in a file where Pulsar's proxy has another one."""

    bind_address: str = "localhost"
    """Address to listen at. "0.0.0.0" lets other machines reach it: a broker should authenticate them then."""
    broker_service_port: int | None = 6650
    """Port of the binary protocol. None: TLS only. 0: a free port."""
    broker_service_port_tls: int | None = 6651
    """Used if there is a certificate."""
    web_service_port: int | None = None
    """Port of HTTP: a broker's administration, a proxy's metrics and health. None: none. 0: a free port."""
    tls_certificate_file_path: Path | None = None
    """The certificate chain in PEM."""
    tls_key_file_path: Path | None = None
    """Its key in PEM, not encrypted."""
    tls_cert_refresh_check_duration_sec: float = 10
    """Seconds between two looks at both files."""
    cluster_name: str = "standalone"
    """A label of metrics."""

    max_message_size: Count = MAX_MESSAGE_SIZE
    """Bytes of a message or batch, its metadata included."""
    broker_max_connections: Count = 20_000
    """Connections over it are told so and closed."""
    broker_max_connections_per_ip: Count = 10_000
    """Connections of one address; further ones are told so and closed."""
    handshake_timeout_seconds: Seconds = 30
    """Seconds in which a client has to authenticate."""
    keep_alive_interval_seconds: Seconds = 30
    """Silence before a PING; after as much again the connection is closed."""
    write_stall_seconds: Seconds = 120
    """A connection is closed that has taken nothing of what waits for it for so long."""
    write_high_mark: Count = 1 << 20
    """Bytes that wait for a connection at which it is sent no messages and is not read."""
    write_low_mark: int = 1 << 18
    """Bytes that wait at which the connection gets messages and is read again."""
    max_pending_requests: Count = 1_000
    """Requests of a connection under way at which it is not read."""
    shutdown_timeout_seconds: float = 20
    """Seconds that connections and the store's consumers have to finish in when the broker stops."""

    max_concurrent_lookup_request: Count = 50_000
    """Lookups of a proxy, and listings of topics, under way; those over it are answered TooManyRequests."""
    max_topic_list_in_flight_heap_mem_size_mb: int = 100
    """Memory of topic lists being made; 0: no limit. A broker's administration can change this and the next five."""
    max_topic_list_in_flight_heap_mem_size_permits_acquire_timeout_millis: Count = 25_000
    """Longest wait of a listing for memory, after which it is answered TooManyRequests."""
    max_topic_list_in_flight_heap_mem_size_permits_acquire_queue_size: int = 1_000
    """Listings that may wait; 0: any number."""
    max_topic_list_in_flight_direct_mem_size_mb: int = 100
    """Memory of frames being written; 0: no limit."""
    max_topic_list_in_flight_direct_mem_size_permits_acquire_timeout_millis: Count = 25_000
    """Longest wait of a frame for memory."""
    max_topic_list_in_flight_direct_mem_size_permits_acquire_queue_size: int = 1_000
    """Frames that may wait; 0: any number."""

    placement_file: Path | None = None
    """Which broker serves which namespace, where there are several; a proxy without it asks `broker_urls`."""
    placement_refresh_seconds: float = 2
    """Seconds between two looks at the file, and at the copies it names, for who leads them."""
    broker_client_trust_certs_file_path: Path | None = None
    """Certificates that those of brokers are checked by, for pulsar+ssl; None: those that this machine trusts."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        for each in fields(self):
            number = getattr(self, each.name)
            if isinstance(number, (int, float)):
                self._check(each.name, number >= 0, "expected 0 or more")
                self._check(each.name, number > 0 or each.type not in (Count, Seconds), "expected more than 0")
                self._check(each.name, number <= 65_535 or each.name not in _PORTS, "expected 0 to 65535")
        certified = self.tls_certificate_file_path is not None
        self._check("write_low_mark", self.write_low_mark <= self.write_high_mark, "over writeHighMark")
        both = certified == (self.tls_key_file_path is not None)
        self._check("tls_key_file_path", both, "a certificate and its key go together")
        reachable = certified or self.broker_service_port is not None
        self._check("broker_service_port", reachable, "without a certificate there is no other port")

    def _check(self, name: str, holds: bool, reason: str) -> None:
        """Raise InvalidArgument for a field that is not as it has to be."""
        if not holds:
            raise InvalidArgument(self.in_file(name), getattr(self, name), reason)

    @classmethod
    def in_file(cls, name: str) -> str:
        return cls.OTHER_NAMES.get(name) or _WORD.sub(lambda found: found.group(1).upper(), name)

    @property
    def reachable_address(self) -> str:
        """The host that clients are told to connect to, as URLs have it."""
        return _host_of(self.bind_address)

    def list_limits(self) -> dict[str, int]:
        """The six limits of the memory of topic lists, by name in a file: a broker's until others are set."""
        names = [each.name for each in fields(self) if each.name.startswith("max_topic_list_in_flight_")]
        return {self.in_file(name): getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(ServiceConfig):
    """Settings of a broker."""

    advertised_address: str | None = None
    """Address that LOOKUP gives clients; None: `bind_address`, or the machine's name if that is every address."""
    advertised_listeners: tuple[str, ...] = ()
    """Addresses that LOOKUP gives clients that name a listener: `name:pulsar://host:port`, or `pulsar+ssl`."""
    web_service_port_tls: int | None = None
    """Port of administration over TLS; needs a certificate."""
    max_http_server_connections: Count = 2_048
    """Connections over it are closed."""

    max_pending_publish_requests_per_connection: Count = 1_000
    """SENDs of a connection without an answer at which it is not read."""
    max_producers_per_connection: int = 10_000
    """A producer over it is refused."""
    max_consumers_per_connection: int = 10_000
    """A consumer over it is refused."""
    worker_threads: Count = 16
    """Threads for what waits for the disk."""

    stats_update_frequency_in_secs: Seconds = 60
    """Seconds over which rates are averaged."""
    expose_topic_level_metrics_in_prometheus: bool = True
    """/metrics has series for each topic and subscription; else for each namespace."""
    max_topics_in_prometheus: int = 2_000
    """Topics and subscriptions that have series of their own in /metrics; the rest are summed by namespace. 0: all."""
    authenticate_metrics_endpoint: bool | None = None
    """/metrics asks for credentials; not set: where authenticationProviders are set."""

    allow_auto_topic_creation: bool = True
    """Create a topic for its first producer or consumer."""
    default_num_partitions: int = 0
    """Partitions of topics created so; 0: they are plain topics."""
    broker_deduplication_enabled: bool = False
    """Store messages that producers number only once."""
    delayed_delivery_enabled: bool | None = None
    """Delay messages at all. It and the next two are set for the whole store when the broker starts, as
    `duelog policies set` does, and stay until they are changed; namespaces and topics may have their own. Not set: the
    store keeps what it has."""
    delayed_delivery_tick_time_millis: int | None = None
    """Due times are rounded up to a multiple of it; 0 or 1: they are exact."""
    delayed_delivery_max_delay_in_millis: int | None = None
    """The longest delay that a producer may ask for; 0: no limit."""
    delay_rejection: str = "error"
    """Handling of a delay over the maximum: "error" refuses the message, "clamp" shortens the delay."""
    ack_response_durable: bool = False
    """Answer acknowledgements once they are on disk."""
    max_unacked_messages_per_consumer: Count = 50_000
    """Messages out and not acknowledged at which dispatch to a consumer stops, until half."""
    max_unacked_messages_per_subscription: Count = 200_000
    """The same limit for all consumers of a subscription together."""
    enable_broker_side_subscription_pattern_evaluation: bool = True
    """Match patterns in the broker, and let clients watch for topics."""
    subscription_pattern_max_length: int = 50
    """A longer pattern is left to the client, which polls."""
    max_topic_list_watchers_per_connection: int = 1_000
    """A watcher over it is refused."""
    max_topic_list_watchers_mem_size_mb: int = 100
    """Names that watchers keep; 0: no limit."""
    schema_compatibility_strategy: str = "FULL"
    """Requirement on a topic's next schema, by Pulsar's names."""

    authentication_providers: tuple[str, ...] = ()
    """"token", "basic"; none: every client is let in."""
    anonymous_user_role: str | None = None
    """The role of clients that give no credentials; None: they are refused."""
    authorization_enabled: bool = False
    """Let roles do only what they were granted."""
    super_user_roles: tuple[str, ...] = ()
    """Roles that may do everything."""
    viewer_roles: tuple[str, ...] = ()
    """Roles that may look at everything, on the page and by operations of the table, and change nothing."""
    token_secret_key: str | None = None
    """Key of HS256 and its like: a path, `file://` and a path, or `data:;base64,` and the key."""
    token_public_key: str | None = None
    """Key of RS256 and its like, in the same forms."""
    token_algorithms: tuple[str, ...] = ()
    """Algorithms that a token may be signed by; none: HS256 or RS256, by which key there is."""
    token_auth_claim: str = "sub"
    """The claim that has the role."""
    token_audience_claim: str = "aud"
    """The claim that has the audience."""
    token_audience: str | None = None
    """The audience that a token has to be for; None: any."""
    basic_auth_conf: Path | None = None
    """A file as `htpasswd -B` writes it."""
    authentication_refresh_check_seconds: float = 60
    """Seconds between two checks for expired credentials."""

    placement_broker: str | None = None
    """This broker's name in it."""

    store: dict[str, Any] = field(default_factory=dict)
    """Settings of the store, by the names of `StoreConfig`: the table `[store]`."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        super(BrokerConfig, self).__post_init__()
        self._check("delay_rejection", self.delay_rejection in {"error", "clamp"}, 'expected "error" or "clamp"')
        known = self.schema_compatibility_strategy in set(Compatibility)
        self._check("schema_compatibility_strategy", known, f"expected one of {', '.join(Compatibility)}")
        for listener in self.advertised_listeners:
            if _LISTENER.fullmatch(listener) is None:
                raise InvalidArgument("advertisedListeners", listener, "expected name:pulsar://host:port")
        certified = self.tls_certificate_file_path is not None
        self._check("web_service_port_tls", certified or self.web_service_port_tls is None, "needs a certificate")
        both = (self.placement_file is None) == (self.placement_broker is None)
        reason = "placementFile and placementBroker, the name of this broker in it, go together"
        self._check("placement_broker", both, reason)
        unknown = set(self.authentication_providers) - {"token", "basic"}
        if unknown:
            raise InvalidArgument("authenticationProviders", sorted(unknown), 'expected "token", "basic"')
        asks = bool(self.authentication_providers) or not self.authorization_enabled
        self._check("authorization_enabled", asks, "needs authenticationProviders")

    @property
    def reachable_address(self) -> str:
        return _host_of(self.advertised_address or self.bind_address)

    def delay_policies(self) -> dict[str, Any]:
        """Policies for the whole store that are set here."""
        found = {
            "active": self.delayed_delivery_enabled,
            "tick_time_ms": self.delayed_delivery_tick_time_millis,
            "max_delivery_delay_ms": self.delayed_delivery_max_delay_in_millis,
        }
        return {name: value for name, value in found.items() if value is not None}

    def listeners(self) -> dict[str, dict[str, str]]:
        """Addresses by scheme, `pulsar` and `pulsar+ssl`, by name of the listener."""
        found: dict[str, dict[str, str]] = {}
        for match in map(_LISTENER.fullmatch, self.advertised_listeners):
            if match is not None:
                found.setdefault(match[1], {})[match[2].partition(":")[0]] = match[2]
        return found


_PORTS = ("broker_service_port", "broker_service_port_tls", "web_service_port", "web_service_port_tls")


def _host_of(address: str) -> str:
    host = socket.gethostname() if address in EVERYWHERE else address
    return f"[{host}]" if ":" in host else host


_ONE_INDEX = "duelog has one kind of delay index, on disk and shared by the subscriptions of a topic: leave it out"
_ELSEWHERE = {
    "delayedDeliveryTrackerFactoryClassName": _ONE_INDEX,
    "delayedDeliveryPruneMinIntervalMillis": "here it is tracker_prune_interval_ms of the table [store]",
    "delayedDeliveryPruneEligibleRatio": "here it is tracker_prune_ratio of the table [store]",
    "delayedDeliveryTopicManagerIdleMillis": "here it is tracker_idle_ms of the table [store]",
    "delayedDeliveryMaxDeliveryDelayInMillis": "here, as in Pulsar, it is delayedDeliveryMaxDelayInMillis",
    "maxDelayedDeliveryTimeMs": "here it is the policy --max-delay of `duelog policies set`",
    "fixedDelayedDeliveryTimeMs": "here it is the policy --fixed-delay of `duelog policies set`",
    "isDelayedDeliveryDeliverAtTimeStrict": "no message is delivered early here: leave it out",
    "delayedDeliveryFixedDelayDetectionLookahead": _ONE_INDEX,
    "delayedDeliveryMinIndexCountPerBucket": _ONE_INDEX,
    "delayedDeliveryMaxIndexesPerBucketSnapshotSegment": _ONE_INDEX,
    "delayedDeliveryMaxNumBuckets": _ONE_INDEX,
    "delayedDeliveryMaxTimeStepPerBucketSnapshotSegmentSeconds": "here it is bucket_ms of the table [store]",
}
"""Settings of Pulsar for delayed delivery (PIP-437, PIP-448) that are not taken: what to set in place of them."""


def read_settings(cls: type[S], path: Path | None, **settings: Any) -> S:
    """The settings of a file; `settings` count more, but those that are None. Raises InvalidArgument, OSError."""
    try:
        found = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument("--config", str(path), f"not TOML: {error}") from error
    types = get_type_hints(cls)
    names = {cls.in_file(each.name): each.name for each in fields(cls) if each.init}
    values = {}
    for given, value in found.items():
        if given not in names:
            raise InvalidArgument(given, value, _ELSEWHERE.get(given, f"{path} has a setting that is not known"))
        values[names[given]] = _checked(given, value, types[names[given]])
    return cls(**values | {name: value for name, value in settings.items() if value is not None})


def _checked(name: str, value: object, expected: Any) -> Any:
    """A value of a file in the type of its field."""
    (kind,) = set(get_args(expected)) - {NoneType} if NoneType in get_args(expected) else {expected}
    try:
        return convert(value, kind, dec_hook=lambda _, found: Path(found))
    except ValidationError:
        shown = {Path: "a path", tuple: "a list of texts", dict: "a table", str: "a text", int: "an integer"}
        reason = f"expected {shown.get(get_origin(kind) or kind, kind.__name__)}"
        raise InvalidArgument(name, value, reason) from None
