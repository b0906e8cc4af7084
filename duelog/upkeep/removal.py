"""Removing topics and subscriptions, with all that they hold; no tick runs beside it."""

from dataclasses import dataclass
from itertools import chain, islice

from duelog.cleanup.trim import release_before, remove_ledgers
from duelog.markers.firing.firing import Firing
from duelog.partitions import producer_numbers as producers
from duelog.store.codec import format as fmt
from duelog.store.codec.format import LedgerState
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import ConsumerBusy, UnknownTopic
from duelog.store.log import catalog
from duelog.store.policy import policy_records
from duelog.store.policy.policy_records import Scope

from ..topics.topic_events import TopicEvent, TopicEvents
from ..topics.topic_list import Topics, TrimAgenda
from ..topics.topic_state import TopicState
from .maintenance import Maintenance
from .policies_in_force import PolicyChanges
from .schedule import schedule_rows

_IDS_A_GROUP = 1_500


@dataclass(eq=False, repr=False)
class Removal:
    """Removes topics and subscriptions of one open store. Thread-safe."""

    _main: Environment
    _topics: Topics
    _agenda: TrimAgenda
    _firing: Firing
    _maintenance: Maintenance
    _policy_changes: PolicyChanges
    _events: TopicEvents

    def remove_topic(self, topic: TopicState) -> None:
        """Remove a topic and all it holds: subscriptions, main log, its claims on partitions. Raises UnknownTopic."""
        with self._maintenance.lock:
            _refuse_deleted(topic)

            def deleted() -> None:
                topic.deleted = True
                self._events.note(TopicEvent("deleted", str(topic.name), topic.topic_id))

            def work(transaction: Transaction) -> tuple[list[int], bool, list[int]]:
                transaction.after_commit(deleted)
                freed, had_policies = _delete_records(transaction, topic)
                ledgers = list(catalog.ledgers(transaction.raw, topic.topic_id))
                for ledger_id, ledger in ledgers:
                    trimming = ledger._replace(state=LedgerState.TRIMMING)
                    transaction.put(fmt.ledger_key(topic.topic_id, ledger_id), trimming.pack())
                return freed, had_policies, [ledger_id for ledger_id, _ in ledgers]

            # alone: what was sent to it is here, and nothing follows
            freed, had_policies, trimmed = self._main.write(work, alone=True, makes_space=True)
            for subscription in topic.followers:
                subscription.deleted = True
            self._topics.forget(topic)
            if had_policies:
                self._policy_changes.forget(Scope(str(topic.name)))
            self._firing.loaded.forget_topic(topic.topic_id)
            remove_ledgers(self._main, [(topic.topic_id, ledger_id) for ledger_id in trimmed])
            while self._remove_ids(topic.topic_id):
                pass
            self._maintenance.delete_released(freed)

    def _remove_ids(self, topic_id: int) -> bool:
        """Remove some of the records that messages of a topic have of their own, as many as a group takes; False: none.

        After a crash the sweep of such records removes what is left.
        """
        with self._main.read() as raw:
            tables = (fmt.Table.KEY, fmt.Table.NUMBERED)
            keys = chain.from_iterable(catalog.keys(raw, fmt.prefix(table, topic_id)) for table in tables)
            some = list(islice(keys, _IDS_A_GROUP))
        if some:
            self._main.write(lambda transaction: [transaction.delete(key) for key in some], makes_space=True)
        return bool(some)

    def remove_subscription(self, topic: TopicState, name: str) -> None:
        """Remove a subscription durably, and release ledgers and partitions that only it held.

        Raises ConsumerBusy, UnknownSubscription, UnknownTopic.
        """
        with self._maintenance.lock:
            _refuse_deleted(topic)
            subscription = topic.subscription(name)
            with subscription.lock:
                if subscription.consumers:
                    raise ConsumerBusy(str(topic.name), name, f"it has {subscription.consumers} consumers")
                subscription.deleted = True

            def work(transaction: Transaction) -> bool:
                catalog.remove_subscription(transaction, subscription.record.subscription_id)
                transaction.delete(fmt.cursor_key(topic.topic_id, name))
                return policy_records.forget_subscription(transaction, topic.name, name)

            try:
                had_policies = self._main.write(work, makes_space=True)
            except BaseException:
                subscription.deleted = False
                raise
            topic.subscriptions = {key: value for key, value in topic.subscriptions.items() if key != name}
            if had_policies:
                self._policy_changes.forget(Scope(str(topic.name), name))
        self._agenda.look_at(topic.topic_id, 0)


def _refuse_deleted(topic: TopicState) -> None:
    """Another call may have been quicker; there may be a topic of the same name again."""
    if topic.deleted:
        raise UnknownTopic(str(topic.name))


def _delete_records(transaction: Transaction, topic: TopicState) -> tuple[list[int], bool]:
    """Delete the records of a topic but for its ledgers'.

    Returns the starts of partitions that no topic holds any more, and whether the topic had policies of its own.
    """
    topic_id = topic.topic_id
    freed = release_before(transaction, topic_id, None)
    transaction.delete(fmt.topic_key(str(topic.name)))
    transaction.delete(fmt.topic_name_key(topic_id))
    had_policies = transaction.delete(fmt.policy_key(str(topic.name)))
    for _, name, record in list(catalog.cursors(transaction.raw, topic_id)):
        catalog.remove_subscription(transaction, record.subscription_id)
        transaction.delete(fmt.cursor_key(topic_id, name))
    for key, _ in list(schedule_rows(transaction.raw, topic_id)):
        transaction.delete(key)
    producers.remove(transaction, topic_id)
    for _, start_ms, _ in list(catalog.frontiers(transaction.raw, topic_id)):
        transaction.delete(fmt.frontier_key(topic_id, start_ms))
    return freed, had_policies
