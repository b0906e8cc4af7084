"""Links to brokers of one client: one to each broker that it has asked something of, with its credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from ..protocol import commands
from ..protocol.commands import Command, ServerError
from ..protocol.failures import Refused
from .broker_link import Answer, BrokerLink, Challenged, Dialer, Unreachable
from .placement import Address


class ClientLinks:
    """Of the event loop's thread."""

    def __init__(
        self, dialer: Dialer, connect: Callable[[], commands.Connect], challenged: Challenged | None = None
    ) -> None:
        """connect: how the client introduces itself now. challenged: told when a broker asks for credentials.

        None: a link that is asked for them ends; the next has those that the client has given since.
        """
        self._connect = connect
        self._dialer = dialer
        self._challenged = challenged or (lambda link, _: link.close())
        self._links: dict[Address, asyncio.Task[BrokerLink]] = {}

    async def link(self, address: Address) -> BrokerLink:
        """The link to a broker, made where there is none. Raises Refused."""
        task = self._links.get(address)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().closed)):
            task = asyncio.create_task(self._dialer.link(address, self._connect(), self._challenged))
            self._links[address] = task
        return await asyncio.shield(task)

    async def first(self, addresses: Iterable[Address]) -> BrokerLink:
        """A link to the first of several brokers that can be reached. Raises Refused."""
        failure: Unreachable | None = None
        for address in addresses:
            try:
                return await self.link(address)
            except Unreachable as error:
                failure = failure or error
        raise failure or Refused(ServerError.SERVICE_NOT_READY, "there is no broker to be asked")

    async def ask(
        self,
        addresses: Iterable[Address],
        command: Command,
        request_id: int,
        sized: Callable[[int], Awaitable[None]] | None = None,
    ) -> tuple[BrokerLink, Answer]:
        """Ask the first broker that can be reached; which one that was, and its answer. Raises Refused."""
        link = await self.first(addresses)
        if sized is None:
            return link, await link.ask(command, request_id)
        return link, await link.ask_large(command, request_id, sized)

    def close(self) -> None:
        """The client is gone."""
        for task in self._links.values():
            task.add_done_callback(_close)
            task.cancel()


def _close(task: asyncio.Task[BrokerLink]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
