"""Where clients reach this broker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Addresses:
    """Of the binary protocol and of administration; empty: not that way. Known once the broker listens."""

    pulsar: str = ""
    pulsar_tls: str = ""
    http: str = ""
    https: str = ""

    @property
    def broker_id(self) -> str:
        """`host:port`, by which Pulsar's tools name a broker."""
        found = self.http or self.https or self.pulsar or self.pulsar_tls
        return found.partition("://")[2]
