"""``/openapi.json``: what this server takes, by its routes and by the schemas that requests are checked by."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from motley.orchestrator.api.anthropic.generates import COUNT, MESSAGES
from motley.orchestrator.api.errors import ANTHROPIC
from motley.orchestrator.api.mesh.access import NEW_KEY, NEW_TOKEN
from motley.orchestrator.api.mesh.adapters import ADAPTER, PIN
from motley.orchestrator.api.mesh.jobs import JOB
from motley.orchestrator.api.mesh.nodes import BUDGET, LEASE
from motley.orchestrator.api.mesh.plans import PLAN
from motley.orchestrator.api.mesh.session_parameters import SESSION
from motley.orchestrator.api.openai.embeddings import EMBEDDINGS
from motley.orchestrator.api.openai.generates import CHAT, COMPLETION
from motley.orchestrator.api.responses.generates import RESPONSE
from motley.orchestrator.api.tokens import DETOKENIZE, TOKENIZE
from motley.protocol.release import release

_BODIES: dict[tuple[str, str], tuple[str, TypeAdapter[Any]]] = {
    ("POST", "/v1/chat/completions"): ("ChatRequest", CHAT),
    ("POST", "/v1/completions"): ("CompletionRequest", COMPLETION),
    ("POST", "/v1/embeddings"): ("EmbeddingsRequest", EMBEDDINGS),
    ("POST", "/v1/responses"): ("ResponseRequest", RESPONSE),
    ("POST", "/v1/messages"): ("MessagesRequest", MESSAGES),
    ("POST", "/v1/messages/count_tokens"): ("CountRequest", COUNT),
    ("POST", "/tokenize"): ("TokenizeRequest", TOKENIZE),
    ("POST", "/detokenize"): ("DetokenizeRequest", DETOKENIZE),
    ("POST", "/api/sessions"): ("SessionRequest", SESSION),
    ("POST", "/api/plan"): ("PlanBody", PLAN),
    ("POST", "/api/keys"): ("NewKey", NEW_KEY),
    ("POST", "/api/tokens"): ("NewToken", NEW_TOKEN),
    ("PUT", "/api/nodes/{name}/lease"): ("LeaseBody", LEASE),
    ("PUT", "/api/nodes/{name}/budget"): ("BudgetBody", BUDGET),
    ("POST", "/api/jobs"): ("JobBody", JOB),
    ("POST", "/api/adapters"): ("AdapterBody", ADAPTER),
    ("POST", "/api/adapters/{model}/{name}/pin"): ("PinBody", PIN),
}
"""What requests have as their bodies, by method and path; others have none."""
_SCHEMAS = "#/components/schemas/"
_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def openapi_route(routes: Iterable[web.RouteDef]) -> web.RouteDef:
    """The route that tells of these."""
    document = cache(lambda: openapi_document(routes))  # which takes a moment, and few ask for it

    async def openapi(_: web.Request) -> web.Response:
        """Tell what this server takes."""
        return web.json_response(document())

    return web.get("/openapi.json", openapi)


def openapi_document(routes: Iterable[web.RouteDef]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of these routes."""
    schemas: dict[str, Any] = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    for name, schema in _BODIES.values():
        body = schema.json_schema(ref_template=f"{_SCHEMAS}{{model}}")
        schemas |= body.pop("$defs", {})
        schemas[name] = body
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"{(\w+):[^}]*}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Motley", "version": release()},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: web.RouteDef, path: str) -> dict[str, Any]:
    kind = "AnthropicError" if path.startswith(ANTHROPIC) else "Error"
    error = {"description": "An error.", "content": _json({"$ref": f"{_SCHEMAS}{kind}"})}
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "responses": {"2XX": {"description": "The answer."}, "4XX": error, "5XX": error},
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if known := _BODIES.get((route.method, route.path)):
        operation["requestBody"] = {"required": True, "content": _json({"$ref": f"{_SCHEMAS}{known[0]}"})}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
