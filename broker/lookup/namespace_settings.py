"""Settings of tenants, namespaces and topics, and their form in documents.

Delay policies, retention and time to live are not here: the store keeps them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from ..security.permissions import Action
from .compatibility import Compatibility


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """Settings of a tenant."""

    admin_roles: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"adminRoles": list(self.admin_roles)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(tuple(found["adminRoles"]))


@dataclass(frozen=True, slots=True)
class AutoCreation:
    """The rule of creating a topic when a client first asks for it."""

    allowed: bool = True
    partitions: int = 0
    """Partitions of a topic created so; 0: it is a plain topic."""


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """Settings of a namespace; None: the broker's configuration holds."""

    auto_creation: AutoCreation | None = None
    deduplication: bool | None = None
    compatibility: Compatibility | None = None
    permissions: Mapping[str, frozenset[Action]] = field(default_factory=lambda: MappingProxyType({}))
    """By role."""

    def to_json(self) -> dict[str, Any]:
        creation = self.auto_creation
        return {
            "autoCreation": creation and {"allowed": creation.allowed, "partitions": creation.partitions},
            "deduplication": self.deduplication,
            "compatibility": self.compatibility,
            "permissions": {role: sorted(actions) for role, actions in self.permissions.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        creation, compatibility = found["autoCreation"], found["compatibility"]
        return cls(
            None if creation is None else AutoCreation(creation["allowed"], creation["partitions"]),
            found["deduplication"],
            None if compatibility is None else Compatibility(compatibility),
            {role: frozenset(map(Action, actions)) for role, actions in found["permissions"].items()},
        )


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Settings of a topic; None: the namespace's hold."""

    deduplication: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return {"deduplication": self.deduplication}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["deduplication"])


@dataclass(frozen=True, slots=True)
class PartitionedTopic:
    """A topic divided into partitions."""

    partitions: int

    def to_json(self) -> dict[str, Any]:
        return {"partitions": self.partitions}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["partitions"])
