"""The brokers that a program knows: those it was told of, and those of the table. It connects to no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..protocol.commands import ServerError
from ..protocol.failures import Refused
from .placement import Address
from .placement_file import PlacementFile


class KnownBrokers:
    """Of the event loop's thread."""

    def __init__(self, urls: Iterable[str], file: PlacementFile | None = None) -> None:
        """Raises InvalidArgument."""
        self._told = list(dict.fromkeys(map(Address.parse, urls)))
        self._file = file
        self._turn = 0

    def all(self) -> Iterator[Address]:
        """Every broker, none twice."""
        placed = [] if self._file is None else [each.address for each in self._file.table.brokers.values()]
        yield from dict.fromkeys([*self._told, *placed])

    def for_namespace(self, namespace: str | None) -> list[Address]:
        """The brokers to be asked about `tenant/namespace`, one after the other until one can be reached.

        None: about anything. Refused: TopicNotFound, where the table names no owner.
        """
        if self._file is None or namespace is None:
            found = list(self.all())
            self._turn += 1
            at = self._turn % len(found)
            return [*found[at:], *found[:at]]
        owner = self._file.table.owner(namespace)
        if owner is None:
            raise Refused(ServerError.TOPIC_NOT_FOUND, f"no broker is placed to serve namespace {namespace}")
        return [owner.address]

    def at(self, place: str) -> Address | None:
        """The known broker at `host:port`, with or without a scheme; None: it is none."""
        place = place.rpartition("://")[2].rstrip("/").lower()
        return next((each for each in self.all() if each.place == place), None)

    def named(self, url: str | None, url_tls: str | None) -> Address | None:
        """The known broker at one of the addresses that a broker has told; None: it is none."""
        if self._file is not None:
            for broker in self._file.table.brokers.values():
                if {url, url_tls} & {broker.url, broker.tls_url} - {None}:
                    return broker.address
        return self.at(url or "") or self.at(url_tls or "")


def namespace_of_topic(topic: str) -> str | None:
    """`tenant/namespace` of a topic's name, as far as it has one: a broker says what is wrong with others."""
    scheme, mark, rest = topic.partition("://")
    parts = (rest if mark else scheme).split("/")
    if len(parts) == 1 and not mark:
        return "public/default"
    return f"{parts[0]}/{parts[1]}" if len(parts) >= 3 else None
