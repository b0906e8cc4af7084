"""The proxy's settings: those that it shares with a broker, some by other names in a file, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from ...store.errors import InvalidArgument
from ..configuration import ServiceConfig
from ..protocol.frames import MAX_MESSAGE_SIZE
from .placement import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig(ServiceConfig):
    """Settings of a proxy."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "broker_service_port": "servicePort",
            "broker_service_port_tls": "servicePortTls",
            "broker_max_connections": "maxConcurrentInboundConnections",
            "broker_max_connections_per_ip": "maxConcurrentInboundConnectionsPerIp",
            "max_concurrent_lookup_request": "maxConcurrentLookupRequests",
        }
    )

    broker_urls: tuple[str, ...] = ()
    """Brokers that are asked, in turn, where no placement says which."""
    tls_hostname_verification_enabled: bool = True
    """True: a broker's certificate has to be for its name."""
    broker_max_connections: int = 10_000
    """Connections over it are told so and closed."""
    broker_proxy_connect_timeout_ms: int = 10_000
    """Timeout of a connection to a broker."""
    request_timeout_seconds: float = 30
    """Timeout of a request to a broker."""
    shutdown_timeout_seconds: float = 5
    """Time that connections have to finish when the proxy ends."""
    max_message_size: int = field(default=MAX_MESSAGE_SIZE, init=False)
    max_pending_requests: int = field(default=1_000, init=False)

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        super(ProxyConfig, self).__post_init__()
        if not self.broker_urls and self.placement_file is None:
            raise InvalidArgument("brokerUrls", [], "expected brokers, or a placementFile")
        for url in self.broker_urls:
            Address.parse(url, "brokerUrls")
