"""A store that is connected to, for tests that drive its clock: what its process alone has is that of the open one."""

from collections.abc import Callable, Iterator
from pathlib import Path

from duelog import DelayedStore, Finding, StoreConfig, TickResult
from duelog.connected.connected_store import ConnectedStore
from duelog.engine import Engine
from duelog.operations.wire_client import Connection
from duelog.store.clock import Clock
from tests.conftest import present


class Reached(ConnectedStore):
    """A connection to a store that is open in this process."""

    def __init__(self, inside: DelayedStore) -> None:
        super().__init__(present(Connection.to(inside.path)))
        self.inside = inside

    @property
    def _engine(self) -> Engine:  # type: ignore[override]  # tests look behind the face
        return self.inside._engine

    @property
    def path(self) -> Path:
        return self.inside.path

    @property
    def config(self) -> StoreConfig:
        return self.inside.config

    @property
    def clock(self) -> Clock:
        return self.inside.clock

    def close(self) -> None:
        """The store, and with it the connection: tests open it again."""
        self.inside.close()
        super().close()

    def tick(self) -> TickResult:
        """As of the open store."""
        return self.inside.tick()

    def check(self, *, deep: bool = False, progress: Callable[[int, int], object] | None = None) -> Iterator[Finding]:
        """As of the open store."""
        return self.inside.check(deep=deep, progress=progress)
