"""The proxy's settings: one frozen value; in a file (TOML) they have the names of Pulsar's proxy where it has one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from ...store.errors import InvalidArgument
from ..listing.memory_limits import Limits
from ..server.configuration import BrokerConfig, in_file
from .placement import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Settings. In a file `service_port` is `servicePort`, and so on."""

    broker_urls: tuple[str, ...] = ()
    """Brokers that are asked, in turn, where no placement says which."""
    placement_file: Path | None = None
    """Which broker serves which namespace; None: `broker_urls` are asked."""
    placement_refresh_seconds: float = 2
    """How often the file is looked at."""
    bind_address: str = "localhost"
    """Where to listen; "0.0.0.0": every address of this machine."""
    service_port: int | None = 6650
    """None: TLS only. 0: one that is free."""
    service_port_tls: int | None = 6651
    """Used if there is a certificate."""
    web_service_port: int | None = None
    """Port of metrics and health over HTTP. None: there is none. 0: one that is free."""
    tls_certificate_file_path: Path | None = None
    """The certificate chain in PEM."""
    tls_key_file_path: Path | None = None
    """Its key in PEM, not encrypted."""
    tls_cert_refresh_check_duration_sec: float = 10
    """How often both files are looked at."""
    broker_client_trust_certs_file_path: Path | None = None
    """Certificates that brokers' are checked by, for pulsar+ssl; None: those that this machine trusts."""
    tls_hostname_verification_enabled: bool = True
    """True: a broker's certificate has to be for its name."""
    cluster_name: str = "standalone"
    """A label of metrics."""
    max_concurrent_inbound_connections: int = 10_000
    """Connections over it are told so and closed."""
    max_concurrent_inbound_connections_per_ip: int = 10_000
    """Likewise, from one address."""
    max_concurrent_lookup_requests: int = 50_000
    """Lookups and listings under way; those over it are answered TooManyRequests."""
    broker_proxy_connect_timeout_ms: int = 10_000
    """Timeout of a connection to a broker."""
    request_timeout_seconds: float = 30
    """Timeout of a request to a broker."""
    handshake_timeout_seconds: float = 30
    """Timeout of a client's handshake."""
    keep_alive_interval_seconds: float = 30
    """Silence before a PING; after as much again the connection is closed."""
    write_stall_seconds: float = 120
    """A connection is closed that has taken nothing of what waits for it for so long."""
    write_high_mark: int = 1 << 20
    """Bytes that wait for a client at which nothing more is read from its broker."""
    write_low_mark: int = 1 << 18
    """Bytes that wait at which its broker is read again."""
    shutdown_timeout_seconds: float = 5
    """Time that connections have to finish when the proxy ends."""
    max_topic_list_in_flight_heap_mem_size_mb: int = 100
    """Memory of topic lists that are read from brokers; 0: no limit."""
    max_topic_list_in_flight_direct_mem_size_mb: int = 100
    """Memory of topic lists that are written to clients; 0: no limit."""
    max_topic_list_in_flight_heap_mem_size_permits_acquire_timeout_millis: int = 25_000
    """Time that a list may wait for its share, until it is answered TooManyRequests."""
    max_topic_list_in_flight_direct_mem_size_permits_acquire_timeout_millis: int = 25_000
    """Time that a frame may wait for its share."""
    max_topic_list_in_flight_heap_mem_size_permits_acquire_queue_size: int = 1_000
    """Lists that may wait; 0: any number."""
    max_topic_list_in_flight_direct_mem_size_permits_acquire_queue_size: int = 1_000
    """Frames that may wait; 0: any number."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        if not self.broker_urls and self.placement_file is None:
            raise InvalidArgument("brokerUrls", [], "expected brokers, or a placementFile")
        for url in self.broker_urls:
            Address.parse(url, "brokerUrls")
        for each in fields(self):
            number = getattr(self, each.name)
            if isinstance(number, (int, float)) and number < 0:
                raise InvalidArgument(in_file(each.name), number, "expected 0 or more")
        for name in ("max_concurrent_lookup_requests", "broker_proxy_connect_timeout_ms", "request_timeout_seconds"):
            if not getattr(self, name):
                raise InvalidArgument(in_file(name), 0, "expected more than 0")
        self.connections()

    def connections(self) -> BrokerConfig:
        """The settings of a broker whose connections and listeners are the proxy's. Raises InvalidArgument."""
        names = {
            "broker_service_port": "service_port",
            "broker_service_port_tls": "service_port_tls",
            "broker_max_connections": "max_concurrent_inbound_connections",
            "broker_max_connections_per_ip": "max_concurrent_inbound_connections_per_ip",
        }
        same = {each.name for each in fields(self)} & {each.name for each in fields(BrokerConfig)}
        names |= {name: name for name in same if not name.startswith("placement_")}
        try:
            return BrokerConfig(**{name: getattr(self, own) for name, own in names.items()})
        except InvalidArgument as error:
            own = {in_file(name): in_file(own) for name, own in names.items()}.get(error.field, error.field)
            raise InvalidArgument(own, error.value, error.reason) from error

    def limits(self, kind: str) -> Limits:
        """Limits of topic lists that are read from brokers (`heap`) or written to clients (`direct`)."""
        memory = f"max_topic_list_in_flight_{kind}_mem_size"
        permits = f"{memory}_permits_acquire"
        return Limits(
            getattr(self, f"{memory}_mb") << 20,
            getattr(self, f"{permits}_queue_size"),
            getattr(self, f"{permits}_timeout_millis"),
        )
