"""The routes of a broker's administration: each resource, made for one store and its services."""

from __future__ import annotations

from ...delayed_store import DelayedStore
from ..admin.openapi import OpenApi
from ..admin.routing import Route
from .configuration import BrokerConfig
from .services import Services


def routes_of(store: DelayedStore, services: Services, config: BrokerConfig) -> list[Route]:
    """All of them."""
    resources: list[list[Route]] = []
    routes = [route for each in resources for route in each]
    return [*routes, *OpenApi(routes).routes()]
