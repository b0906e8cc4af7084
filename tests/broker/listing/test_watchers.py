"""WATCH_TOPIC_LIST and CLOSE: with time and workers moved by hand; over real connections, whatever comes.

DUELOG_TOPIC_LISTS=10 makes ten times as many topics, and clients.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast
from unittest.mock import patch

import pytest

from duelog import DelayedStore, TopicEvent
from duelog.broker.configuration import BrokerConfig
from duelog.broker.listing import watchers
from duelog.broker.listing.memory_limits import DualMemoryLimiter, Limits, LookupGate, list_bytes
from duelog.broker.listing.topic_listing import topics_hash
from duelog.broker.listing.watchers import NameSets, Watchers
from duelog.broker.lookup.resources import NamespaceSettings, Resources
from duelog.broker.protocol import commands
from duelog.broker.protocol.failures import Refused, ServerError
from duelog.broker.protocol.loop_calls import LoopCalls, Workers
from duelog.broker.security.permissions import Action, Permissions
from tests.broker.listing.watching import NAMESPACE, PREFIX, WatchingClient, held_broker
from tests.broker.peers import FakePeer, HeldWorkers, TestLoop, idle
from tests.conftest import OpenStore, present, raising

ALL = f"{PREFIX}.*"
ROOM = Limits(100_000, 10, 1_000)


def names(*local: str) -> list[str]:
    """In full."""
    return [PREFIX + name for name in local]


class EventStore:
    """A store whose events come when the test says so."""

    def __init__(self, store: DelayedStore) -> None:
        self.documents = store.documents
        self.hear: Callable[[list[TopicEvent]], object] | None = None
        self.there: set[str] = set()
        self.reads = 0
        self.topics = self._topics

    def on_topics(self, callback: Callable[[list[TopicEvent]], object]) -> Callable[[], None]:
        self.hear = callback

        def end() -> None:
            self.hear = None

        return end

    def _topics(self, namespace: str) -> Any:
        self.reads += 1
        prefix = f"persistent://{namespace}/"
        return [type("T", (), {"name": name}) for name in sorted(self.there) if name.startswith(prefix)]

    def change(self, new: list[str] = [], deleted: list[str] = []) -> list[TopicEvent]:  # noqa: B006
        """Create and delete topics; the events."""
        self.there = (self.there | set(new)) - set(deleted)
        events = [TopicEvent("created", name, 1) for name in new]
        return events + [TopicEvent("deleted", name, 1) for name in deleted]


class Stand:
    """The service over such a store."""

    def __init__(
        self,
        store: DelayedStore,
        heap: Limits = ROOM,
        direct: Limits = ROOM,
        *,
        secured: bool = False,
        max_kept_bytes: int = 100 << 20,
        **settings: Any,
    ) -> None:
        self.loop = TestLoop()
        self.store = EventStore(store)
        self.limiter = DualMemoryLimiter(heap, direct, self.loop)
        config = BrokerConfig(**settings)
        self.gate = LookupGate(config.max_concurrent_lookup_request)
        self.workers = HeldWorkers()
        self.resources = Resources(store.documents)
        permissions = Permissions(self.resources if secured else None)
        workers, calls = Workers(self.workers), LoopCalls(self.loop)
        self.sets = NameSets(cast(DelayedStore, self.store), workers, calls, max_kept_bytes)
        self.watchers = Watchers(permissions, self.limiter, config, self.gate, self.sets, workers, self.loop)

    async def watch(self, peer: FakePeer, number: int = 1, pattern: str = ALL, found: str | None = None,
                    namespace: str = "public/default") -> None:  # fmt: skip
        """Ask; the request has the watcher's number and 100."""
        self.watchers.watch(peer, commands.WatchTopicList(100 + number, number, namespace, pattern, found))
        await idle()

    async def hear(self, events: list[TopicEvent]) -> None:
        """The store tells."""
        present(self.store.hear)(events)
        await idle()
        self.advance(0)
        await idle()

    async def change(self, new: list[str] = [], deleted: list[str] = []) -> None:  # noqa: B006
        """Topics come and go, and the store tells."""
        await self.hear(self.store.change(new, deleted))

    def advance(self, seconds: float) -> None:
        """Move time on, and call what is due from that, too."""
        self.loop.advance(seconds)
        while any(timer.at <= self.loop.now and not timer.cancelled for timer in self.loop.timers):
            self.loop.advance(0)

    def held(self) -> tuple[int, int, int]:
        """Bytes in use, of both kinds, and listings under way."""
        return self.limiter.heap.acquired, self.limiter.direct.acquired, self.gate.under_way


@pytest.fixture
def on_stand(open_store: OpenStore) -> "OnStand":
    """A stand and a connection; nothing is held at their end."""

    @asynccontextmanager
    async def opened(*args: Any, **kwargs: Any) -> AsyncIterator[tuple[Stand, FakePeer]]:
        stand, peer = Stand(open_store(), *args, **kwargs), FakePeer()
        yield stand, peer
        stand.watchers.close_all()
        peer.leave()
        await idle()
        assert stand.held() == (0, 0, 0)
        assert (len(stand.watchers), len(stand.sets), stand.sets.kept_bytes) == (0, 0, 0)
        assert stand.store.hear is None

    return opened


OnStand = Callable[..., AbstractAsyncContextManager[tuple[Stand, FakePeer]]]


async def test_a_watcher_is_answered_with_the_topics_and_then_told_what_changes(on_stand: OnStand) -> None:
    """In the order of the commits, each with the hash after it; a pattern its part."""
    async with on_stand() as (stand, peer):
        await stand.change(names("a", "b"))
        await stand.watch(peer)
        await stand.watch(peer, 2, f"{PREFIX}(b|c)")
        assert peer.take() == [
            commands.WatchTopicListSuccess(101, 1, topics_hash(names("a", "b")), names("a", "b")),
            commands.WatchTopicListSuccess(102, 2, topics_hash(names("b")), names("b")),
        ]
        await stand.change(names("c", "x"))
        await stand.change([], names("a", "x"))
        assert peer.take() == [
            commands.WatchTopicUpdate(1, topics_hash(names("a", "b", "c", "x")), names("c", "x"), ()),
            commands.WatchTopicUpdate(2, topics_hash(names("b", "c")), names("c"), ()),
            commands.WatchTopicUpdate(1, topics_hash(names("b", "c")), (), names("a", "x")),
        ]


async def test_a_topic_that_comes_and_goes_in_one_commit_is_told_of_each_time(on_stand: OnStand) -> None:
    """Also one that is deleted and made again: its messages are gone."""
    async with on_stand() as (stand, peer):
        await stand.watch(peer)
        peer.take()
        one = names("a")
        await stand.hear(stand.store.change(one) + stand.store.change([], one) + stand.store.change(one))
        updates = peer.got(commands.WatchTopicUpdate)
        assert [(list(each.new_topics), list(each.deleted_topics)) for each in updates] == [
            (one, []),
            ([], one),
            (one, []),
        ]
        assert [each.topics_hash for each in updates] == [topics_hash(one), topics_hash([]), topics_hash(one)]


async def test_names_that_change_over_and_over_are_few_updates(on_stand: OnStand) -> None:
    """Creating and deleting cancel out, once they were told of ten times."""
    async with on_stand() as (stand, peer):
        await stand.watch(peer)
        peer.take()
        events = [
            each for _ in range(5_000) for each in stand.store.change(names("a")) + stand.store.change([], names("a"))
        ]
        await stand.hear(events + stand.store.change(names("b")))
        updates = peer.got(commands.WatchTopicUpdate)
        assert len(updates) == 11
        assert updates[-1].topics_hash == topics_hash(names("b"))


async def test_a_watcher_that_has_the_hash_is_sent_no_names(on_stand: OnStand) -> None:
    """A listing does the same."""
    async with on_stand() as (stand, peer):
        await stand.change(names("a"))
        await stand.watch(peer, found=topics_hash(names("a")))
        assert peer.take() == [commands.WatchTopicListSuccess(101, 1, topics_hash(names("a")), ())]


async def test_what_changes_between_the_list_and_the_answer_is_not_lost(on_stand: OnStand) -> None:
    """The store tells of it while the list is read, while it is filtered, and while permits are waited for."""
    async with on_stand() as (stand, peer):
        stand.store.change(names("a"))
        stand.workers.held = True
        await stand.watch(peer)
        await stand.hear(stand.store.change(names("b"), names("a")))  # before it is read
        (read,) = stand.workers.waiting
        stand.workers.waiting.clear()
        read()
        await stand.hear(stand.store.change(names("e")))  # after it is read, before it is taken
        await stand.change(names("c"))
        await stand.workers.work()  # filtered
        everything = stand.limiter.direct.acquire(90_000)
        await stand.change(names("d"))
        await stand.workers.work()  # the frame
        assert not everything.cancel()
        stand.limiter.direct.release(everything.result())
        stand.workers.held = False
        await stand.workers.work()
        stand.advance(0)
        await idle()
        (success,) = peer.got(commands.WatchTopicListSuccess)
        known = set(success.topics)
        assert success.topics_hash == topics_hash(known)
        for update in peer.got(commands.WatchTopicUpdate):
            known = (known | set(update.new_topics)) - set(update.deleted_topics)
            assert update.topics_hash == topics_hash(known)
        assert known == set(names("b", "c", "d", "e"))
        assert isinstance(peer.sent[0][0], commands.WatchTopicListSuccess)


@pytest.mark.parametrize(
    ("pattern", "settings", "error"),
    [
        (ALL, {"enable_broker_side_subscription_pattern_evaluation": False}, ServerError.NOT_ALLOWED),
        (PREFIX + "x" * 60, {}, ServerError.NOT_ALLOWED),
        ("(", {}, ServerError.INVALID_TOPIC_NAME),
        (ALL, {"max_topic_list_watchers_per_connection": 0}, ServerError.NOT_ALLOWED),
        (ALL, {"secured": True}, ServerError.AUTHORIZATION),
    ],
)
async def test_what_cannot_be_watched_is_refused(
    on_stand: OnStand, pattern: str, settings: dict[str, Any], error: ServerError
) -> None:
    """Evaluation off, a pattern too long or unreadable, too many watchers, no right."""
    async with on_stand(**settings) as (stand, peer):
        with pytest.raises(Refused) as refused:
            await stand.watch(peer, pattern=pattern)
        assert refused.value.error == error


async def test_a_role_that_may_consume_may_watch(on_stand: OnStand) -> None:
    """The right is the namespace's."""
    async with on_stand(secured=True) as (stand, peer):
        await stand.resources.load()
        granted = NamespaceSettings(permissions={"r": frozenset({Action.CONSUME})})
        await stand.resources.namespaces.change("public/default", lambda before: granted)
        peer.role = "r"
        await stand.watch(peer)
        assert len(peer.got(commands.WatchTopicListSuccess)) == 1


async def test_pauses_double_from_100_ms_to_25_s_less_up_to_a_tenth(on_stand: OnStand) -> None:
    """A watcher that gets no permit tries again after each of them."""
    async with on_stand(ROOM._replace(max_queue=1, timeout_ms=1 << 50)) as (stand, peer):
        everything = stand.limiter.heap.acquire(100_000).result()
        waiting = stand.limiter.heap.acquire(1)
        await stand.watch(peer)
        for number in range(12):
            (timer,) = [each for each in stand.loop.timers if not each.cancelled and each.at < 1e9]
            most = min(0.1 * 2**number, 25)
            assert most * 0.9 <= timer.at - stand.loop.now <= most
            stand.loop.advance(most)
            await idle()
        waiting.cancel()
        stand.limiter.heap.release(everything)
        stand.advance(25)
        await idle()
        assert len(peer.got(commands.WatchTopicListSuccess)) == 1


async def test_updates_wait_for_their_turn_and_permits(on_stand: OnStand) -> None:
    """One at a time: the second leaves when the first has left; a timeout is tried again."""
    async with on_stand() as (stand, peer):
        await stand.watch(peer)
        peer.held = True
        peer.take()
        await stand.change(names("a"))
        await stand.change(names("b"))
        assert [each.new_topics for each in peer.got(commands.WatchTopicUpdate)] == [names("a")]
        direct = stand.limiter.direct
        everything = direct.acquire(direct.available).result()
        ahead = direct.acquire(50)
        peer.leave()
        await idle()
        while direct.timeouts < 3:
            stand.advance(0.5)
            await idle()
        assert len(peer.sent) == 1
        direct.release(everything)
        direct.release(ahead.result())
        for _ in range(10):
            stand.advance(1)
            await idle()
        assert [each.new_topics for each in peer.got(commands.WatchTopicUpdate)] == [names("a"), names("b")]


async def test_what_waits_has_a_bound_and_comes_as_one_update_then(
    on_stand: OnStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client does not read: names created and deleted meanwhile are not in it."""
    monkeypatch.setattr(watchers, "MAX_WAITING", 10)

    async with on_stand() as (stand, peer):
        await stand.change(names("old"))
        await stand.watch(peer)
        peer.held = True
        await stand.change(names("first"))
        peer.take()
        for number in range(20):
            await stand.change(names(f"t{number}"))
            await stand.change([], names(f"t{number}", "old") if number == 3 else names(f"t{number}"))
        await stand.change(names("last"))
        watcher = stand.watchers._of_peer[peer.number][1]
        assert len(watcher.updates) == 0
        peer.held = False
        peer.leave()
        await idle()
        (update,) = peer.got(commands.WatchTopicUpdate)
        assert (update.new_topics, update.deleted_topics) == (names("last"), names("old"))
        assert update.topics_hash == topics_hash(names("first", "last"))
        await stand.change(names("after"))
        assert peer.got(commands.WatchTopicUpdate)[1].new_topics == names("after")


async def test_the_same_number_again_is_watched_anew(on_stand: OnStand) -> None:
    """Also with another pattern; one that was not answered yet is told so."""
    async with on_stand() as (stand, peer):
        await stand.change(names("a", "b"))
        await stand.watch(peer)
        await stand.watch(peer, pattern=f"{PREFIX}b")
        assert [each.topics for each in peer.got(commands.WatchTopicListSuccess)] == [names("a", "b"), names("b")]
        peer.take()
        await stand.change(names("c"))
        assert peer.take() == []
        assert len(stand.watchers) == 1
        stand.workers.held = True
        await stand.watch(peer)
        await stand.watch(peer)
        stand.workers.held = False
        for _ in range(3):
            await stand.workers.work()
        error, success = peer.take()
        assert isinstance(error, commands.Error)
        assert error.error == ServerError.SERVICE_NOT_READY
        assert isinstance(success, commands.WatchTopicListSuccess)


async def test_close_always_succeeds_and_nothing_comes_after_it(on_stand: OnStand) -> None:
    """A watcher that is there, one that is being opened, one that is unknown."""
    async with on_stand() as (stand, peer):
        await stand.watch(peer)
        peer.take()
        stand.workers.held = True
        await stand.watch(peer, 2, f"{PREFIX}x")
        for number in (1, 2, 3):
            stand.watchers.close(peer, commands.WatchTopicListClose(200 + number, number))
        await idle()
        stand.workers.held = False
        await stand.workers.work()
        assert peer.take() == [commands.Success(201), commands.Success(202), commands.Success(203)]
        await stand.change(names("a"))
        assert peer.take() == []
        assert (len(stand.watchers), len(stand.sets)) == (0, 0)


async def test_watchers_of_a_namespace_share_one_set_of_names(on_stand: OnStand) -> None:
    """It is read once, and kept once however many watch; views have a reference a name."""
    async with on_stand() as (stand, peer):
        await stand.change(names("a", "b"))
        for number in range(1, 21):
            await stand.watch(peer, number, f"{PREFIX}(a|b)" if number % 2 else ALL)
        assert (stand.store.reads, len(stand.sets)) == (1, 1)
        assert stand.sets.kept_bytes == list_bytes(names("a", "b")) + 2 * 2 * 8


async def test_names_that_watchers_keep_have_a_bound(on_stand: OnStand) -> None:
    """One set there may always be; another namespace is refused then, and watched once there is memory."""
    async with on_stand(max_kept_bytes=100) as (stand, peer):
        await stand.change(names("a", "b"))
        stand.store.there.add("persistent://public/other/c")
        await stand.watch(peer)
        await stand.watch(peer, 2)
        await stand.watch(peer, 3, ".*", namespace="public/other")
        await stand.watch(peer, 4, pattern=f"{PREFIX}b")
        assert [(each.request_id, each.error) for each in peer.got(commands.Error)] == [
            (103, ServerError.TOO_MANY_REQUESTS),
            (104, ServerError.TOO_MANY_REQUESTS),
        ]
        assert len(stand.watchers) == 2
        for number in (1, 2):
            stand.watchers.close(peer, commands.WatchTopicListClose(1, number))
        await stand.watch(peer, 3, ".*", namespace="public/other")
        assert peer.got(commands.WatchTopicListSuccess)[-1].topics == ["persistent://public/other/c"]


async def test_a_failure_of_the_store_is_an_error_and_the_number_is_free(on_stand: OnStand) -> None:
    """The next one is served."""
    async with on_stand() as (stand, peer):
        with patch.object(watchers, "names_of", raising(Refused(ServerError.METADATA, "broken"))):
            await stand.watch(peer)
        assert peer.take() == [commands.Error(101, ServerError.METADATA, "broken")]
        assert (len(stand.watchers), len(stand.sets), len(stand.limiter.sizes)) == (0, 0, 0)
        assert stand.held() == (0, 0, 0)
        await stand.watch(peer)
        assert len(peer.got(commands.WatchTopicListSuccess)) == 1


async def test_views_are_brought_up_to_date_one_at_a_time_and_paced(
    on_stand: OnStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is left for four times as long as one took; changes meanwhile are one update."""
    make = watchers.View.advance

    def slow(view: watchers.View) -> None:
        make(view)
        stand_loop[0].now += 1

    stand_loop: list[TestLoop] = []
    monkeypatch.setattr(watchers.View, "advance", slow)

    async with on_stand() as (stand, peer):
        stand_loop.append(stand.loop)
        await stand.watch(peer)
        peer.take()
        for name in "abcd":
            present(stand.store.hear)(stand.store.change(names(name)))
            await idle()
            stand.loop.advance(1)
            await idle()
        stand.loop.advance(1)
        await idle()
        assert [each.new_topics for each in peer.got(commands.WatchTopicUpdate)] == [names("a"), names("b", "c", "d")]


SCALE = float(os.environ.get("DUELOG_TOPIC_LISTS", "1"))
TOPICS = int(200 * SCALE)

PATTERNS = {1: f"{PREFIX}.*", 2: f"{PREFIX}a-.*", 3: f"{PREFIX}.*[02468]", 4: f"{PREFIX}none"}


def make(store: DelayedStore, names: list[str]) -> None:
    """Create topics, some at a time."""
    for start in range(0, len(names), 37):
        store.create_topics([PREFIX + name for name in names[start : start + 37]])


def drop(store: DelayedStore, names: list[str]) -> None:
    """Delete topics."""
    for name in names:
        store.delete_topic(PREFIX + name)


def expected(names: set[str], watcher_id: int) -> set[str]:
    """The names that a watcher is to know."""
    local = {name.removeprefix(PREFIX) for name in names}
    kept = {
        1: local,
        2: {name for name in local if name.startswith("a-")},
        3: {name for name in local if name[-1] in "02468"},
        4: set[str](),
    }[watcher_id]
    return {PREFIX + name for name in kept}


async def bursts(store: DelayedStore, port: int, topics: int, rng: random.Random) -> None:
    """Topics come and go while clients watch; after each burst every one of them knows what there is."""
    watching = [await WatchingClient.watching(port) for _ in range(4)]
    there: set[str] = set()
    for burst in range(4):
        if burst < 2:  # some begin to watch amid the second burst
            for client in watching[burst::2]:
                for watcher_id, pattern in PATTERNS.items():
                    client.watch(watcher_id, pattern)
        new = [f"{'ab'[number % 2]}-{burst}-{number}" for number in range(topics)]
        old = rng.sample(sorted(there), len(there) * 2 // 3)
        work = [asyncio.to_thread(make, store, new), asyncio.to_thread(drop, store, old)]
        await asyncio.gather(*work)
        there = (there | set(new)) - set(old)
        names = {PREFIX + name for name in there}
        for number, client in enumerate(watching):
            if burst or not number % 2:
                for watcher_id in PATTERNS:
                    wanted, found = expected(names, watcher_id), client.watched[watcher_id]
                    await client.until(lambda found=found, wanted=wanted: found.answers and found.names == wanted)  # type: ignore[misc]
    for client in watching:
        for found in client.watched.values():
            assert (found.answers, found.errors) == (1, [])
        assert not client.watched[4].updates
        await client.end()


async def test_a_watcher_knows_what_the_store_has_after_each_burst(store: DelayedStore) -> None:
    """Its set and its hash; patterns each their part; watchers that begin amid a burst too."""
    async with held_broker(store) as held:
        await bursts(store, held.port, TOPICS, random.Random(7))


async def test_a_watcher_knows_it_under_starvation_too(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permits for one at a time, two may wait for 20 ms, and listings are in the way: it is tried again until it is."""
    monkeypatch.setattr(watchers, "LONGEST_BACKOFF_S", 0.2)

    store = open_store()
    async with held_broker(store, max_topic_list_watchers_mem_size_mb=0) as held:
        limiter = held.services.limiter
        limiter.set_limits(Limits(20_000, 2, 20), Limits(5_000, 2, 20))
        over = False
        refused = served = 0

        async def list_on() -> None:
            nonlocal refused, served
            client = await WatchingClient.watching(held.port)
            while not over:
                answer = await client.topics()
                if isinstance(answer, commands.Error):
                    assert answer.error == ServerError.TOO_MANY_REQUESTS
                    refused += 1
                    await asyncio.sleep(0.01)  # as clients do
                else:
                    served += 1
            await client.end()

        async def starve() -> None:
            async with limiter.heap.holding(20_000):
                while not limiter.heap.timeouts:
                    await asyncio.sleep(0.001)

        listing = [asyncio.create_task(work()) for work in (starve, *[list_on] * 5)]
        await bursts(store, held.port, TOPICS // 3, random.Random(8))
        over = True
        await asyncio.gather(*listing)
        assert refused
        assert served


async def test_watchers_leave_nothing_behind(store: DelayedStore) -> None:
    """Closed, refreshed, connections reset amid everything."""
    make(store, [f"t{number}" for number in range(100)])
    rng = random.Random(9)
    async with held_broker(store) as held:
        services = held.services
        services.limiter.set_limits(Limits(30_000, 5, 20), Limits(10_000, 5, 20))
        for round_ in range(int(20 * SCALE)):
            client = await WatchingClient.watching(held.port)
            for watcher_id in range(5):
                client.watch(watcher_id, f"{PREFIX}.*")
            client.say(commands.WatchTopicListClose(9_999_999, rng.randrange(5)))
            client.say(commands.GetTopics(9_999_998, NAMESPACE))
            await asyncio.to_thread(make, store, [f"more{round_}-{number}" for number in range(5)])
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            client.reset()
        other = await WatchingClient.watching(held.port)
        await other.until(lambda: not len(services.watchers))
        await other.until(lambda: not services.limiter.direct.acquired + services.limiter.heap.acquired)
        held.check_empty()
        assert (len(services.name_sets), services.name_sets.kept_bytes) == (0, 0)
        await other.end()
