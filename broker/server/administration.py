"""The routes of a broker's administration: each resource, made for one store and its services."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import fields

from ...delayed_store import DelayedStore
from ..admin.brokers import Brokers
from ..admin.http_request import Reply, Request
from ..admin.openapi import OpenApi
from ..admin.rest_lookup import RestLookup
from ..admin.routing import Need, Route
from ..metrics.exposition import Exposition
from ..metrics.text_format import CONTENT_TYPE
from ..operate.schedule_resource import ScheduleResource
from ..operate.stats_resource import StatsResource
from ..operate.store_resource import StoreResource
from ..operate.subscription_resource import SubscriptionResource
from ..operate.topic_finder import TopicFinder
from ..operate.topic_resource import TopicResource
from ..operate.topic_stats import TopicFigures
from ..tenancy.namespace_policies import NamespacePolicies
from ..tenancy.namespaces import Namespaces
from ..tenancy.policy_store import PolicyStore
from ..tenancy.rest_schemas import RestSchemas
from ..tenancy.tenants import Tenants
from .configuration import BrokerConfig, in_file
from .services import Services

_SCRAPE_S = 30.0
"""What a client has to take /metrics in: the next page is not made before."""


def routes_of(store: DelayedStore, services: Services, config: BrokerConfig) -> list[Route]:
    """All of them."""
    resources, access, addresses, cluster = (
        services.resources,
        services.access,
        services.addresses,
        config.cluster_name,
    )
    policies = NamespacePolicies(PolicyStore(store), resources, access)
    elsewhere = None if services.ownership is None else services.ownership.tenant_elsewhere
    namespaces = Namespaces(store, resources, policies, services.removal, services.topic_names, cluster, elsewhere)
    settings = {in_file(each.name): getattr(config, each.name) for each in fields(config)}
    workers, producers, consumers = services.workers, services.producers, services.consumers
    finder = TopicFinder(store, resources, workers)
    figures = TopicFigures(
        producers, consumers, services.rates, store.clock.now_ms, services.facts.deduplicates, addresses
    )
    routes = [
        *Tenants(resources, namespaces, cluster, addresses).routes(),
        *Brokers(store, cluster, addresses, settings, services.dynamic).routes(),
        *namespaces.routes(),
        *policies.routes(),
        *RestLookup(resources, services.urls, addresses).routes(),
        *RestSchemas(services.schemas, resources).routes(),
        *TopicResource(store, services, finder).routes(),
        *SubscriptionResource(finder, consumers, workers, store.clock.now_ms).routes(),
        *StatsResource(finder, figures, workers).routes(),
        *ScheduleResource(finder, workers).routes(),
        *StoreResource(store, producers, consumers, services.rates, workers, services.jobs).routes(),
    ]
    routes.append(_metrics(services.exposition, config))
    return [*routes, *OpenApi(routes).routes()]


def _metrics(exposition: Exposition, config: BrokerConfig) -> Route:
    """Asks for credentials where the broker does, unless it is set otherwise."""

    async def text(_: Request) -> Reply:
        async with AsyncExitStack() as stack:
            body = await stack.enter_async_context(exposition.page())
            return Reply(body, CONTENT_TYPE, until_left=stack.pop_all(), within_s=_SCRAPE_S)

    asks = config.authenticate_metrics_endpoint
    if asks is None:
        asks = bool(config.authentication_providers)
    need = Need.LOGIN if asks else Need.NOTHING
    return Route("GET", "/metrics", text, "Metrics in Prometheus' text format", need)
