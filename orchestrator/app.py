"""The orchestrator's composition root: builds the parts, starts gRPC and HTTP, stops both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from aiohttp import web

from motley.orchestrator.api.access.callers import Callers
from motley.orchestrator.api.access.certificate import ApiCertificate
from motley.orchestrator.api.access.cors import Cors, check_origin
from motley.orchestrator.api.access.door import IDLE_S, Door
from motley.orchestrator.api.access.guard import Guard
from motley.orchestrator.api.anthropic.routes import AnthropicApi
from motley.orchestrator.api.asking import Asking
from motley.orchestrator.api.errors import errors_as_json
from motley.orchestrator.api.mesh.access import AccessApi
from motley.orchestrator.api.mesh.adapters import AdaptersApi
from motley.orchestrator.api.mesh.experts import ExpertsApi
from motley.orchestrator.api.mesh.jobs import JobsApi
from motley.orchestrator.api.mesh.nodes import NodesApi
from motley.orchestrator.api.mesh.plans import PlansApi
from motley.orchestrator.api.mesh.requests import RequestsApi
from motley.orchestrator.api.mesh.sessions import SessionsApi
from motley.orchestrator.api.openai.embeddings import EmbeddingsApi
from motley.orchestrator.api.openai.routes import OpenAiApi
from motley.orchestrator.api.openapi import openapi_route
from motley.orchestrator.api.operators import HEALTH_PATH, OperatorsApi
from motley.orchestrator.api.request_id import AccessLog, tell_request_id
from motley.orchestrator.api.responses.routes import ResponsesApi
from motley.orchestrator.api.tokens import TokensApi
from motley.orchestrator.api.traced import traced
from motley.orchestrator.api.web import PAGE_PATHS, page_routes
from motley.orchestrator.control import Control, ForNodes, Listeners
from motley.orchestrator.jobs.deliveries import Deliveries
from motley.orchestrator.jobs.running import Jobs
from motley.orchestrator.mesh.addresses import own_addresses
from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.serving.answering.kept_answers import KeptAnswers
from motley.orchestrator.serving.service import Serving
from motley.orchestrator.store.keys import Keys, Scope
from motley.orchestrator.store.members import Members
from motley.orchestrator.store.secret import new_secret
from motley.orchestrator.store.store import Store
from motley.orchestrator.store.tokens import Tokens
from motley.orchestrator.store.usage import Usage
from motley.orchestrator.trust.audit import Audit
from motley.orchestrator.trust.identity import SERVER_NAME, Identity, load_identity, not_kept
from motley.orchestrator.trust.limits import SHAKE_HANDS_S, Limits, limits
from motley.orchestrator.trust.pairings import Pairing, Pairings
from motley.protocol import MESSAGE_BYTES
from motley.protocol.address import JOIN_PORT, is_loopback, join_address
from motley.protocol.clock import elapsed
from motley.protocol.mesh_pb2_grpc import add_MeshServicer_to_server
from motley.transport.certificates import names_in_certificates

MAX_BODY = 2 * 1024 * 1024
"""Bytes of a request body."""
TOKEN_S = 86400.0
"""The join token that is made at every start is valid for a day, ..."""
TOKENS_KEPT = 10
"""... and those of so many starts are."""
TOKEN_NOTE = "made at the start"
STOP_S = 1.0
"""Connections that are still open when the orchestrator stops are cut after this."""

_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What binds to every address, and the one of them for this machine itself."""

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("motley.orchestrator.access")


class OrchestratorError(Exception):
    """The orchestrator cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class OrchestratorConfig:
    """Where the orchestrator listens and what it keeps. Port 0: any free one."""

    host: str = "0.0.0.0"
    """Where nodes reach it (gRPC)."""
    grpc_port: int = JOIN_PORT
    http_host: str = "127.0.0.1"
    """Where clients reach it. Anything but loopback has TLS, and needs an API key."""
    http_port: int = 8000
    https_port: int | None = None
    """Where clients on other machines reach it, with TLS and a key, if `http_host` is loopback and `host` is not; None:
    the port above `grpc_port`, or any free one for 0; -1: nowhere."""
    certificate: tuple[Path, Path] | None = None
    """Files of a certificate for the API, and its key; None: the mesh's authority issues one."""
    insecure: bool = False
    """Whether an API off loopback goes without TLS."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may read what the API answers."""
    state_dir: Path = Path("state")
    database: str = ""
    """URL of a database; empty: SQLite in `state_dir`."""
    api_key: str | None = None
    """May do everything, and is wanted on loopback too."""
    rebalance_at: float = 0.2
    """A session that nobody asks anything is planned anew when that saves this part of a token's time; 0: never."""
    advertise: str = ""
    """Address under which other machines reach this one; empty: they are told those that it has."""


class Orchestrator:
    """Who is in the mesh and who does what. `start`, then `stop`; not to be started again."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self._config = config
        self._stack = contextlib.AsyncExitStack()
        self._grpc_port = self._http_port = self._https_port = 0
        self._identity: Identity | None = None
        self._certificate: ApiCertificate | None = None
        self.join_token = ""
        """Lets nodes join, for a day from the start on."""
        self.api_key: str | None = None
        """The first API key, if it was made at this start: nobody knows it later."""
        self.show_code: Callable[[Pairing], None] = lambda pairing: None
        """Called when a machine wants to join, with the code that is to be typed there."""
        self.operator_key = new_secret()
        """May do everything, as long as this process lives: for commands of whoever has started it."""

    @property
    def http_url(self) -> str:
        """Where clients on this machine (or, bound to another address, in the network) reach the API."""
        host = self._config.http_host
        scheme = "http" if is_loopback(host) or self._config.insecure else "https"
        return f"{scheme}://{join_address(_EVERY.get(host, host), self._http_port)}"

    @property
    def network_url(self) -> str | None:
        """Where clients on other machines do, if that is another address."""
        host, port = self._config.http_host, self._http_port
        scheme = "http" if self._config.insecure else "https"
        if is_loopback(host):
            host, port, scheme = self._config.host, self._https_port, "https"
        elif host not in _EVERY:
            return None
        own = [one for one in self._reachable_at(host) if host not in _EVERY or self._is_bound(one, host)]
        return f"{scheme}://{join_address(own[0], port)}" if own and port else None

    @property
    def api_trust(self) -> bytes:
        """The certificate by which clients know the API, in PEM: the mesh's authority, or the one given."""
        assert self._certificate is not None, "the orchestrator has not started"
        return self._certificate.trusted

    @property
    def api_name(self) -> str:
        """The name in the API's certificate, wherever it is; "": only its addresses are."""
        return SERVER_NAME if self._config.certificate is None else ""

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
    def fingerprint(self) -> str:
        """Of the mesh's certificate."""
        assert self._identity is not None, "the orchestrator has not started"
        return self._identity.fingerprint

    async def start(self) -> None:
        """Listen for nodes and clients.

        Raises:
            OrchestratorError: a port is taken, or an origin is none.
            CertificateError: the certificate given cannot be used.
            IdentityError: the state folder, or a file in it, cannot be used.
            StoreError: the database cannot be used.
        """
        config = self._config
        for origin in config.cors_origins:
            try:
                check_origin(origin)
            except ValueError as error:
                raise OrchestratorError(f"--cors-origin: {error}") from None
        async with contextlib.AsyncExitStack() as stack:
            # Not in a thread, which would go on writing if this is cancelled: the folder may be a temporary one.
            identity = self._identity = load_identity(config.state_dir)
            store = Store(config.state_dir, config.database)
            stack.callback(store.close)
            known = _Known(store, config.state_dir)
            stack.push_async_callback(known.usage.flush_or_tell)
            certificate = self._certificate = self._make_certificate(identity)
            self.join_token = identity.join_token(await _start_token(known.tokens))
            nodes = NodeTable(time.monotonic, elapsed)
            told = ForNodes(identity.join_token, self._address_here, self._url_for_nodes, lambda: certificate.given)
            pairings = Pairings(time.monotonic)
            control = Control(
                nodes, known.tokens, known.members, pairings, known.audit, told, lambda pairing: self.show_code(pairing)
            )
            serving = Serving(nodes, control, time.monotonic, config.state_dir, config.rebalance_at)
            folder = config.state_dir / "jobs"
            deliveries = Deliveries(nodes, control, serving.lending, serving.relays)
            jobs = Jobs(nodes, deliveries, serving.sessions, serving.adapters, time.monotonic, folder)
            control.listener = Listeners(serving, jobs)
            allowed = limits()
            await self._start_grpc(stack, identity, control, allowed)
            access = AccessApi(
                identity, known.keys, known.tokens, known.members, pairings, known.usage, nodes, control, known.audit
            )
            await self._start_http(stack, serving, jobs, known, access, certificate, allowed)
            watching = (serving.watch(), serving.begin_anew(), jobs.watch())
            for work in (*watching, certificate.keep_valid(), known.usage.keep(), known.answers.watch()):
                task = asyncio.create_task(work)
                task.add_done_callback(_tell_fault)
                stack.callback(task.cancel)
            stack.push_async_callback(jobs.finish)
            stack.push_async_callback(serving.stop)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """End all requests, release all ranks, close all connections."""
        await self._stack.aclose()

    def _make_certificate(self, identity: Identity) -> ApiCertificate:
        config = self._config
        try:
            return ApiCertificate(identity, config.state_dir, self._api_addresses, config.certificate)
        except OSError as error:
            raise not_kept("the API's certificate", config.state_dir, error) from error

    def _api_addresses(self) -> list[str]:
        """Addresses and names under which clients may reach the API."""
        given = [one for one in (self._config.http_host, self._config.host) if one not in _EVERY]
        named = ["localhost", "127.0.0.1", "::1", *names_in_certificates(socket.gethostname())]
        advertised = names_in_certificates(self._config.advertise)
        return list(dict.fromkeys([*named, *given, *advertised, *own_addresses()]))

    def _url_for_nodes(self, from_here: bool) -> str:
        """Where a node reaches the API; empty: nowhere. `from_here`: it is on this machine."""
        alone = is_loopback(self._config.http_host)
        return self.http_url if from_here else self.network_url or ("" if alone else self.http_url)

    def _is_bound(self, address: str, every: str) -> bool:
        """Whether who is bound to every address of a kind is reached at this one, too."""
        return address == self._config.advertise or (":" in address) == (":" in every)

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

    async def _start_http(
        self,
        stack: contextlib.AsyncExitStack,
        serving: Serving,
        jobs: Jobs,
        known: _Known,
        access: AccessApi,
        certificate: ApiCertificate,
        allowed: Limits,
    ) -> None:
        config = self._config
        given = [self.operator_key, *([config.api_key] if config.api_key else [])]
        callers = Callers(known.keys, known.members, given)
        alone = is_loopback(config.http_host)
        guard = Guard(callers, alone and not config.api_key, PAGE_PATHS | {HEALTH_PATH}, config.cors_origins)
        cors = Cors(config.cors_origins)
        middlewares = [traced, errors_as_json, cors.middleware(), guard.middleware()]
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
        sessions = serving.sessions
        asking = Asking(sessions, serving.requests, known.answers, known.usage)
        routes = [
            *NodesApi(serving.nodes, sessions, serving.links, serving.rearranging, serving.orders).routes(),
            *SessionsApi(sessions, serving.lifecycle, serving.rearranging).routes(),
            *PlansApi(serving.forecasts).routes(),
            *AdaptersApi(sessions, serving.adapters).routes(),
            *ExpertsApi(sessions, serving.upkeep).routes(),
            *OpenAiApi(sessions, asking).routes(),
            *EmbeddingsApi(asking).routes(),
            *ResponsesApi(asking).routes(),
            *AnthropicApi(asking).routes(),
            *TokensApi(asking).routes(),
            *RequestsApi(serving.requests).routes(),
            *JobsApi(jobs).routes(),
            *access.routes(),
            *OperatorsApi(serving.nodes, serving.links, sessions, serving.requests).routes(),
        ]
        app.router.add_routes([*routes, openapi_route(routes)])
        app.on_response_prepare.append(tell_request_id)
        app.on_response_prepare.append(cors.tell)
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
        tls = None if alone or config.insecure else certificate.context
        try:
            self._http_port = await door.open(config.http_host, config.http_port, tls)
        except OSError as error:
            raise _cannot_listen("clients", config.http_host, config.http_port, "--http-port") from error
        if alone and not is_loopback(config.host) and config.https_port != -1:
            next_one = config.grpc_port and config.grpc_port + 1
            port = next_one if config.https_port is None else config.https_port
            try:
                self._https_port = await door.open(config.host, port, certificate.context)
            except OSError as error:
                raise _cannot_listen("clients on other machines", config.host, port, "--https-port") from error
        if (self._https_port or not alone) and not config.api_key and not list(known.keys):
            key, self.api_key = await known.keys.create("the first", Scope.USE)
            known.audit.note("key created", id=key.id, note=key.note, scope=key.scope, by="the orchestrator's start")


class _Known:
    """What the database has, and the files beside it."""

    def __init__(self, store: Store, state_dir: Path) -> None:
        self.tokens = Tokens(store)
        self.members = Members(store, self.tokens)
        self.keys = Keys(store)
        self.usage = Usage(store)
        self.audit = Audit(state_dir)
        self.answers = KeptAnswers(state_dir)


async def _start_token(tokens: Tokens) -> str:
    """A join token for this start; those of the latest starts stay valid, as somebody may be typing one."""
    for old in [token for token in tokens if token.note == TOKEN_NOTE][: 1 - TOKENS_KEPT]:
        await tokens.remove(old.id)
    _, secret = await tokens.create(TOKEN_NOTE, TOKEN_S)
    return secret


def _tell_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        _log.error("what the orchestrator does by itself has failed in part", exc_info=fault)


def _cannot_listen(whom: str, host: str, port: int, option: str) -> OrchestratorError:
    return OrchestratorError(
        f"cannot listen for {whom} on {host} port {port} (is it taken, or is that no address of this machine?)."
        f" If Motley runs here already, `motley status` shows it. Choose another with {option}"
    )
