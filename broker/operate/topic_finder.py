"""Which topics of the store a request means: the topic that it names, or all partitions of a partitioned one."""

from ...delayed_store import DelayedStore
from ...topic import Topic
from ..admin.http_request import HttpError, Request
from ..lookup.resources import Resources
from ..lookup.topic_address import TopicAddress, partition_name
from ..protocol.loop_calls import Workers
from ..tenancy.namespace_policies import existing_namespace

TOPICS = "/admin/v2/persistent/{tenant}/{namespace}"
TOPIC = TOPICS + "/{topic}"
NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}"
WHOLES = (NAMESPACE, NAMESPACE + "/{bundle}")
"""How Pulsar's tools name all topics of a namespace: by itself, or by its one bundle."""

MOST_PEEKED = 10_000
"""Messages of which each may be looked at: those before it are read on the way."""

_BUNDLE = "0x00000000_0xffffffff"


class TopicFinder:
    """Finds them. Of the event loop's thread."""

    def __init__(self, store: DelayedStore, resources: Resources, workers: Workers) -> None:
        self._store = store
        self._resources = resources
        self._workers = workers

    def namespace(self, request: Request) -> str:
        """`tenant/namespace`, which exists. Raises HttpError 404, and 412 for a bundle that is not all of it."""
        namespace, bundle = existing_namespace(self._resources, request), request.path.get("bundle", _BUNDLE)
        if bundle != _BUNDLE:
            raise HttpError(412, f"bundle={bundle!r:.200}: a namespace is one, {_BUNDLE}")
        return namespace

    async def of_namespace(self, request: Request) -> list[Topic]:
        """All topics of a namespace, partitions each by itself. Raises HttpError 404."""
        namespace = self.namespace(request)
        return await self._workers(lambda: list(self._store.topics(namespace)))

    def address(self, request: Request) -> TopicAddress:
        """A topic that need not exist, in a namespace that does. Raises HttpError 404, Refused."""
        self.namespace(request)
        return request.topic

    def topic(self, address: TopicAddress) -> Topic:
        return self._store.topic(str(address.name))

    def partition_topics(self, address: TopicAddress) -> list[Topic]:
        """The topics that hold a partitioned topic's partitions, which need not exist; else none."""
        numbers = range(self._resources.partitions(address.name))
        return [self._store.topic(str(partition_name(address.name, number))) for number in numbers]

    async def one(self, request: Request) -> Topic:
        """A topic that exists. Raises HttpError 404, and 405 for a partitioned one."""
        address = self.address(request)
        partitions = self._resources.partitions(address.name)
        if partitions:
            reason = f"{address.name} is partitioned: ask for one of {partition_name(address.name, 0)} and so on"
            raise HttpError(405, reason)
        (found,) = await self._existing(address, [self.topic(address)])
        return found

    async def every(self, request: Request) -> list[Topic]:
        """The topic, or the partitions of it that exist: at least one. Raises HttpError 404."""
        address = self.address(request)
        return await self._existing(address, self.partition_topics(address) or [self.topic(address)])

    async def _existing(self, address: TopicAddress, topics: list[Topic]) -> list[Topic]:
        found = await self._workers(lambda: [topic for topic in topics if topic.exists()])
        if not found:
            raise HttpError(404, f"topic {address.name} does not exist")
        return found
