"""The orchestrator's composition root: builds the parts, starts gRPC and HTTP, stops both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from aiohttp import web

from motley.orchestrator.api.errors import errors_as_json
from motley.orchestrator.api.experts import ExpertsApi
from motley.orchestrator.api.guard import guard, is_loopback
from motley.orchestrator.api.nodes import NodesApi
from motley.orchestrator.api.openai import OpenAiApi
from motley.orchestrator.api.sessions import SessionsApi
from motley.orchestrator.api.web import PAGE_PATHS, page_routes
from motley.orchestrator.control import Control
from motley.orchestrator.identity import Identity, load_api_key, load_identity
from motley.orchestrator.nodes import NodeTable
from motley.orchestrator.serving.service import Serving
from motley.protocol import MESSAGE_BYTES
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
        own = _own_address(host) if host in _EVERY else None
        return self._http_url(own) if own else None

    @property
    def join_target(self) -> str:
        """``host:port`` for nodes to dial."""
        host = self._config.host
        if host in _EVERY:
            host = _own_address("0.0.0.0") or "127.0.0.1"
        return f"{_bracketed(host)}:{self._grpc_port}"

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
        control = Control(self._identity, nodes)
        serving = control.listener = Serving(nodes, control, time.monotonic)
        async with contextlib.AsyncExitStack() as stack:
            await self._start_grpc(stack, self._identity, control)
            await self._start_http(stack, serving)
            watch = asyncio.create_task(serving.watch())
            stack.callback(watch.cancel)
            stack.push_async_callback(serving.stop)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """End all requests, release all ranks, close all connections."""
        await self._stack.aclose()

    def _http_url(self, host: str) -> str:
        return f"http://{_bracketed(host)}:{self._http_port}"

    async def _start_grpc(self, stack: contextlib.AsyncExitStack, identity: Identity, control: Control) -> None:
        config = self._config
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # a taken port is an error
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ]
        )
        add_MeshServicer_to_server(control, server)  # type: ignore[no-untyped-call]
        credentials = grpc.ssl_server_credentials([(identity.key_pem, identity.certificate_pem)])
        try:
            self._grpc_port = server.add_secure_port(f"{_bracketed(config.host)}:{config.grpc_port}", credentials)
        except RuntimeError as error:
            raise _cannot_listen("nodes", config.host, config.grpc_port, "--port") from error
        await server.start()
        stack.push_async_callback(server.stop, grace=STOP_S)
        stack.callback(control.drop_all)

    async def _start_http(self, stack: contextlib.AsyncExitStack, serving: Serving) -> None:
        config = self._config
        middlewares = [errors_as_json, guard(self.api_key, public=PAGE_PATHS)]
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
        sessions = serving.sessions
        app.router.add_routes(NodesApi(serving.nodes, sessions).routes())
        app.router.add_routes(SessionsApi(sessions, serving.lifecycle).routes())
        app.router.add_routes(ExpertsApi(sessions, serving.upkeep).routes())
        app.router.add_routes(OpenAiApi(sessions, serving.requests).routes())
        app.router.add_routes(page_routes())
        runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that has gone cancels its request
            shutdown_timeout=STOP_S,
            access_log=_access_log,
            access_log_format='%a "%r" %s %Tfs',
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, config.http_host, config.http_port)
        try:
            await site.start()
        except OSError as error:
            raise _cannot_listen("clients", config.http_host, config.http_port, "--http-port") from error
        self._http_port = runner.addresses[0][1]


def _cannot_listen(whom: str, host: str, port: int, option: str) -> OrchestratorError:
    return OrchestratorError(
        f"cannot listen for {whom} on {host} port {port} (is it taken, or is that no address of this machine?)."
        f" Choose another with {option}"
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_address(bound: str) -> str | None:
    """This machine's address in its network, of the family of `bound`: the one it would send from to the outside.

    Nothing is sent; None where there is no network.
    """
    family, outside = (socket.AF_INET6, "2001:db8::1") if ":" in bound else (socket.AF_INET, "192.0.2.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
