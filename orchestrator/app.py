"""The orchestrator's composition root: builds the parts, starts gRPC and HTTP, stops both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from aiohttp import web

from motley.orchestrator.addresses import own_addresses
from motley.orchestrator.api.anthropic.routes import AnthropicApi
from motley.orchestrator.api.asking import Asking
from motley.orchestrator.api.door import IDLE_S, Door
from motley.orchestrator.api.errors import errors_as_json
from motley.orchestrator.api.guard import guard
from motley.orchestrator.api.mesh.experts import ExpertsApi
from motley.orchestrator.api.mesh.nodes import NodesApi
from motley.orchestrator.api.mesh.plans import PlansApi
from motley.orchestrator.api.mesh.requests import RequestsApi
from motley.orchestrator.api.mesh.sessions import SessionsApi
from motley.orchestrator.api.openai.routes import OpenAiApi
from motley.orchestrator.api.openapi import openapi_route
from motley.orchestrator.api.operators import HEALTH_PATH, OperatorsApi
from motley.orchestrator.api.request_id import AccessLog, tell_request_id
from motley.orchestrator.api.responses.routes import ResponsesApi
from motley.orchestrator.api.tokens import TokensApi
from motley.orchestrator.api.traced import traced
from motley.orchestrator.api.web import PAGE_PATHS, page_routes
from motley.orchestrator.control import Control
from motley.orchestrator.identity import Identity, load_api_key, load_identity
from motley.orchestrator.limits import SHAKE_HANDS_S, Limits, limits
from motley.orchestrator.nodes import NodeTable
from motley.orchestrator.serving.answering.kept_answers import KeptAnswers
from motley.orchestrator.serving.service import Serving
from motley.protocol import MESSAGE_BYTES
from motley.protocol.address import is_loopback, join_address
from motley.protocol.mesh_pb2_grpc import add_MeshServicer_to_server

MAX_BODY = 2 * 1024 * 1024
"""Bytes of a request body. A prompt must pass to its node in one gRPC message, of at most 4 MiB."""
STOP_S = 1.0
"""Connections that are still open when the orchestrator stops are cut after this."""

_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What binds to every address, and the one of them for this machine itself."""

if sys.platform == "linux":

    def _elapsed() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    _elapsed = time.monotonic

_access_log = logging.getLogger("motley.orchestrator.access")


class OrchestratorError(Exception):
    """The orchestrator cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class OrchestratorConfig:
    """Where the orchestrator listens and what it keeps. Port 0: any free one."""

    host: str = "0.0.0.0"
    """Where nodes reach it (gRPC)."""
    grpc_port: int = 7337
    http_host: str = "127.0.0.1"
    """Where clients reach it. Anything but loopback needs an API key: one is made if none is given."""
    http_port: int = 8000
    state_dir: Path = Path("state")
    token: str | None = None
    """Lets nodes join, instead of the secret kept in `state_dir`."""
    api_key: str | None = None
    advertise: str = ""
    """Address under which other machines reach this one; empty: they are told those that it has."""


class Orchestrator:
    """Who is in the mesh and who does what. `start`, then `stop`; not to be started again."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        self._stack = contextlib.AsyncExitStack()
        self._grpc_port = 0
        self._http_port = 0
        self._identity: Identity | None = None
        self.api_key = config.api_key or None
        """What clients must show; None: nothing."""

    @property
    def http_url(self) -> str:
        """Where clients on this machine (or, bound to another address, in the network) reach the API."""
        host = self._config.http_host
        return self._http_url(_EVERY.get(host, host))

    @property
    def network_url(self) -> str | None:
        """Where clients on other machines do, if that is another address."""
        host = self._config.http_host
        reachable = self._reachable_at(host) if host in _EVERY else []
        own = [one for one in reachable if one == self._config.advertise or (":" in one) == (":" in host)]
        return self._http_url(own[0]) if own else None

    @property
    def join_targets(self) -> list[str]:
        """``host:port`` for nodes on other machines to dial, the likeliest to be reached first; empty if none can."""
        return [join_address(host, self._grpc_port) for host in self._reachable_at(self._config.host)]

    @property
    def local_target(self) -> str:
        """``host:port`` for nodes on this machine to dial."""
        host = self._config.host
        return join_address(_EVERY.get(host, host), self._grpc_port)

    @property
    def join_token(self) -> str:
        assert self._identity is not None, "the orchestrator has not started"
        return self._identity.join_token

    async def start(self) -> None:
        """Listen for nodes and clients.

        Raises:
            OrchestratorError: a port is taken.
            IdentityError: the state folder, a file in it, or the token cannot be used.
        """
        config = self._config
        # Not in a thread, which would go on writing if this is cancelled: the folder may be a temporary one.
        self._identity = load_identity(config.state_dir, config.token)
        if self.api_key is None and not is_loopback(config.http_host):
            self.api_key = load_api_key(config.state_dir)
        nodes = NodeTable(time.monotonic, _elapsed)
        control = Control(self._identity, nodes, self._address_here)
        serving = control.listener = Serving(nodes, control, time.monotonic, config.state_dir)
        async with contextlib.AsyncExitStack() as stack:
            allowed = limits()
            await self._start_grpc(stack, self._identity, control, allowed)
            await self._start_http(stack, serving, allowed)
            watch = asyncio.create_task(serving.watch())
            stack.callback(watch.cancel)
            stack.push_async_callback(serving.stop)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """End all requests, release all ranks, close all connections."""
        await self._stack.aclose()

    def _http_url(self, host: str) -> str:
        return f"http://{join_address(host, self._http_port)}"

    def _reachable_at(self, bound: str) -> list[str]:
        """The addresses under which other machines may reach what is bound to an address, the likeliest first."""
        if is_loopback(bound):
            return []
        if self._config.advertise:
            return [self._config.advertise]
        return own_addresses() if bound in _EVERY else [bound]

    def _address_here(self) -> str:
        """The address under which other machines may reach the nodes on this one; empty if there is none."""
        return next(iter(self._reachable_at(self._config.host)), "")

    async def _start_grpc(
        self, stack: contextlib.AsyncExitStack, identity: Identity, control: Control, allowed: Limits
    ) -> None:
        config = self._config
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # a taken port is an error
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_allowed_incoming_connections", allowed.nodes),
                ("grpc.max_concurrent_streams", 1),  # of a connection: a node has one
                ("grpc.server_handshake_timeout_ms", SHAKE_HANDS_S * 1000),
                ("grpc.max_connection_idle_ms", SHAKE_HANDS_S * 1000),  # a node that joins is not idle
            ]
        )
        add_MeshServicer_to_server(control, server)  # type: ignore[no-untyped-call]
        credentials = grpc.ssl_server_credentials([(identity.key_pem, identity.certificate_pem)])
        try:
            self._grpc_port = server.add_secure_port(join_address(config.host, config.grpc_port), credentials)
        except RuntimeError as error:
            raise _cannot_listen("nodes", config.host, config.grpc_port, "--port") from error
        await server.start()
        stack.push_async_callback(server.stop, grace=STOP_S)
        stack.callback(control.drop_all)

    async def _start_http(self, stack: contextlib.AsyncExitStack, serving: Serving, allowed: Limits) -> None:
        config = self._config
        middlewares = [traced, errors_as_json, guard(self.api_key, public=PAGE_PATHS | {HEALTH_PATH})]
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
        sessions = serving.sessions
        asking = Asking(sessions, serving.requests, KeptAnswers(config.state_dir))
        routes = [
            *NodesApi(serving.nodes, sessions, serving.links, serving.rearranging).routes(),
            *SessionsApi(sessions, serving.lifecycle, serving.rearranging).routes(),
            *PlansApi(serving.forecasts).routes(),
            *ExpertsApi(sessions, serving.upkeep).routes(),
            *OpenAiApi(sessions, asking).routes(),
            *ResponsesApi(asking).routes(),
            *AnthropicApi(asking).routes(),
            *TokensApi(asking).routes(),
            *RequestsApi(serving.requests).routes(),
            *OperatorsApi(serving.nodes, serving.links, sessions, serving.requests).routes(),
        ]
        app.router.add_routes([*routes, openapi_route(routes)])
        app.on_response_prepare.append(tell_request_id)
        app.router.add_routes(page_routes())
        runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that has gone cancels its request
            keepalive_timeout=IDLE_S,
            shutdown_timeout=STOP_S,
            access_log=_access_log,
            access_log_class=AccessLog,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None, "it is set up"
        door = Door(runner.server, allowed.clients, allowed.of_one_client)
        stack.push_async_callback(door.close)
        try:
            self._http_port = await door.open(config.http_host, config.http_port)
        except OSError as error:
            raise _cannot_listen("clients", config.http_host, config.http_port, "--http-port") from error


def _cannot_listen(whom: str, host: str, port: int, option: str) -> OrchestratorError:
    return OrchestratorError(
        f"cannot listen for {whom} on {host} port {port} (is it taken, or is that no address of this machine?)."
        f" Choose another with {option}"
    )
