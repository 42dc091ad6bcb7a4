"""A span of OpenTelemetry for each HTTP request that asks for something."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from motley.orchestrator import traces
from motley.orchestrator.api.request_id import request_id


@web.middleware
async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Have a request be a span; those that only look, as the page does every second, are none."""
    resource = request.match_info.route.resource
    if request.method == "GET" or resource is None:
        return await handler(request)
    method, route = request.method, resource.canonical
    told = {"http.request.method": method, "http.route": route, "motley.request": request_id(request)}
    with traces.serving(f"{method} {route}", request.headers, told) as span:
        response = await handler(request)
        span.set({"http.response.status_code": response.status})
        return response
