"""The engine's model through a connection: the same rules, and every call of a store by `duelog.connect`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, DuelogError, MessageId, Subscription, Topic
from duelog.connected.connected_store import ConnectedSubscription, ConnectedTopic
from duelog.operations import wire_values
from duelog.store.names import TopicName
from tests.conftest import present
from tests.duelog.reaching import Reached
from tests.proof import length

from .driver import SimulatedCrash
from .engine_machine import EngineMachine
from .test_engine_model import SETTINGS


class ReachedTopic(ConnectedTopic):
    """A topic that is connected to, but for what calls functions of the program."""

    def put(self, *given: Any, **named: Any) -> bool:
        """As of the open store."""
        assert isinstance(self._store, Reached)
        return self._store.inside.topic(self.name).put(*given, **named)

    def send(self, *given: Any, **named: Any) -> MessageId:
        """A crash that is simulated amid a send ends the thread that writes, which says so."""
        try:
            return super().send(*given, **named)
        except DuelogError as error:
            if "broken off by SimulatedCrash" in str(error):
                raise SimulatedCrash from error
            raise


class ReachedWithPut(Reached):
    """A connection whose topics have `put`."""

    def topic(self, name: str) -> Topic:
        """The topic of a name."""
        return ReachedTopic(self, TopicName.parse(name))


class ConnectedMachine(EngineMachine):
    """The model test of a store that is connected to.

    Without the rule whose send runs the rest of the model in its own thread, which is the server's here.
    """

    send_that_stalls = None

    def _opened(self, path: Path) -> DelayedStore:
        self.patch.setattr(
            "duelog.operations.wire_calls._AT_ONCE", 100
        )  # a `receive` is one look, as the rules know it
        return ReachedWithPut(DelayedStore.open(path, replace(self.config, control=True), clock=self.clock))

    def _inside(self, consumer: Subscription) -> Subscription:
        assert isinstance(consumer, ConnectedSubscription)
        control = present(self.store._engine.control)
        held = (peer.calls.consumers.get(consumer._key) for peer in control._peers)
        (found,) = (each for each in held if each is not None)
        return found.subscription  # type: ignore[no-any-return]  # the server's, which names no class of the face


wire_values._BUILTIN[SimulatedCrash.__name__] = SimulatedCrash  # type: ignore[assignment]
ConnectedMachine.TestCase.settings = type(SETTINGS)(
    SETTINGS, max_examples=length("DUELOG_CONNECTED_MODEL_EXAMPLES", 10, 500)
)
TestConnected = pytest.mark.series(ConnectedMachine.TestCase)
