"""The OpenAPI document of the routes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from .http_request import Request
from .routing import Need, Route

_ROLES = {
    Need.NOTHING: "needs no credentials",
    Need.LOGIN: "any role",
    Need.SUPERUSER: "superusers",
    Need.TENANT: "superusers, administrators of the tenant",
    Need.PRODUCE: "superusers, administrators of the tenant, roles that may produce in the namespace",
    Need.CONSUME: "superusers, administrators of the tenant, roles that may consume in the namespace",
    Need.EITHER: "superusers, administrators of the tenant, roles that may produce or consume in the namespace",
}


class OpenApi:
    """Answers with the document."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = [*routes, *self.routes()]

    def routes(self) -> list[Route]:
        """The document itself."""
        return [Route("GET", "/duelog/v1/openapi.json", self.document, "This document", Need.NOTHING)]

    async def document(self, request: Request) -> dict[str, Any]:
        """OpenAPI 3.1."""
        paths: dict[str, dict[str, Any]] = {}
        for route in sorted(self._routes, key=lambda route: (route.path, route.method)):
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
        return {
            "openapi": "3.1.0",
            "info": {"title": "duelog", "version": version("duelog")},
            "paths": paths,
            "components": {
                "securitySchemes": {
                    "token": {"type": "http", "scheme": "bearer"},
                    "basic": {"type": "http", "scheme": "basic"},
                },
                "schemas": {"Failure": {"type": "object", "properties": {"reason": {"type": "string"}}}},
            },
            "security": [{"token": []}, {"basic": []}, {}],
        }


def _operation(route: Route) -> dict[str, Any]:
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
        for part in route.segments
        if part.startswith("{")
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query]
    failure = {
        "description": "what keeps it from being done",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Failure"}}},
    }
    found: dict[str, Any] = {
        "operationId": f"{route.method} {route.path}",
        "summary": route.summary,
        "description": f"For: {_ROLES[route.need]}.",
        "parameters": parameters,
        "responses": {"2XX": {"description": "done"}, "4XX": failure, "5XX": failure},
    }
    if route.need is Need.NOTHING:
        found["security"] = []
    if route.body:
        found["requestBody"] = {"content": {"application/json": {"schema": {"type": route.body}}}}
    return found
