"""Requests under way, of all sessions, as clients see them."""

from __future__ import annotations

from aiohttp import web

from motley.orchestrator.serving.answering.requests import Requests


class RequestsApi:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/api/requests", self.requests)]

    async def requests(self, _: web.Request) -> web.Response:
        """The requests under way: what they are called (``x-request-id``), what they do, since when, and how far."""
        told = [{**each._asdict(), "seconds": round(each.seconds, 3)} for each in self._requests.under_way()]
        return web.json_response({"requests": told})
