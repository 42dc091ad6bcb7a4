"""Errors as clients see them, with a fitting HTTP status: in OpenAI's form, on Anthropic's routes in theirs."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from motley.orchestrator.serving.errors import BusyError, ServingError
from motley.protocol.wording import human_bytes

ANTHROPIC = "/v1/messages"
"""Where Anthropic's routes begin."""

_log = logging.getLogger(__name__)

_STATUS = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "no_chat_template": 400,
    "unknown_node": 400,
    "unknown_engine": 400,
    "unusable_engine": 400,
    "invalid_adapter": 400,
    "model_not_found": 404,
    "adapter_not_found": 404,
    "job_not_found": 404,
    "name_in_use": 409,
    "cannot_move": 409,
    "idempotency_key_reused": 422,
    "no_expert_hosts": 409,
    "experts_moving": 409,
    "order_refused": 409,
    "cannot_train": 409,
    "insufficient_memory": 422,
    "unreachable_nodes": 422,
    "too_many_requests": 429,
    "too_many_jobs": 429,
    "internal_error": 500,
    "adapter_unavailable": 503,
    "caches_lost": 503,
    "session_not_ready": 503,
    "session_closed": 503,
    "no_nodes": 503,
    "node_lost": 503,
    "peer_lost": 503,
    "replanned": 503,
    "peer_timeout": 503,
    "worker_died": 503,
    "device_leased": 503,
    "device_lost": 503,
    "out_of_memory": 503,  # a machine's free memory is what its other programs leave: it may be another time
    "timed_out": 504,
}
"""HTTP status by `Failure.code`."""
UNSERVABLE = 422
"""That of a model which a node cannot describe, for a reason that has no status of its own: see `ApiError.of`."""

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a client is told.

    Attributes:
        param: the parameter that is to blame, as a path (``messages[0].content``).
        code: stable, snake_case.
        retry_after_s: when to try again, in whole seconds; None: nothing is said of that.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, error: ServingError, default: int = 500) -> ApiError:
        """What a client is told of an error; one with a code that has no status of its own gets `default`."""
        failure, wait = error.failure, error.retry_after_s if isinstance(error, BusyError) else None
        status, param = _STATUS.get(failure.code, default), failure.param or None
        return cls(status, failure.message, param=param, code=failure.code, retry_after_s=wait)

    @property
    def body(self) -> dict[str, Any]:
        match self.status:
            case 401:
                kind = "authentication_error"
            case 403:
                kind = "permission_error"
            case 429:
                kind = "rate_limit_error"
            case status if status < 500:
                kind = "invalid_request_error"
            case _:
                kind = "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error as Anthropic has it."""
        usual = "api_error" if self.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(self.status, usual), "message": str(self)}}

    def response(self, path: str = "") -> web.Response:
        """The error as an answer.

        Args:
            path: of the request.
        """
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        body = self.anthropic_body if path.startswith(ANTHROPIC) else self.body
        return web.json_response(body, status=self.status, headers=headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error the form that its route has, whoever raised it."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response(request.path)
    except ServingError as error:
        return ApiError.of(error).response(request.path)
    except web.HTTPNotFound:
        return ApiError(404, f"there is no {request.path}", code="not_found").response(request.path)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
        response = ApiError(405, message, code="method_not_allowed").response(request.path)
        response.headers["Allow"] = allowed
        return response
    except web.HTTPRequestEntityTooLarge:
        message = f"the request is longer than {human_bytes(request.client_max_size)}"
        return ApiError(413, message, code="request_too_large").response(request.path)
    except web.HTTPException as error:
        return ApiError(error.status, error.reason).response(request.path)
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        why = "an internal error; the orchestrator's log has more"
        return ApiError(500, why, code="internal_error").response(request.path)
