"""The body of ``POST /api/sessions``, checked completely and turned into a `SessionRequest`. Pure."""

from __future__ import annotations

from pydantic import TypeAdapter

from motley.orchestrator.api.schema import FieldError, read
from motley.orchestrator.known_models.names import spelled_out
from motley.orchestrator.session_request import ContradictionError, SessionRequest

SESSION = TypeAdapter(SessionRequest)


def session_request(body: object) -> SessionRequest:
    """What a client asks for, short names of models spelled out. A field that is null counts as absent.

    Raises:
        ApiError: 400, naming the field.
    """
    given = {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body
    request = read(SESSION, given)
    assert isinstance(given, dict), "it has been read"
    held = {request.quantisation, *request.quantisations.values()}
    if "block" in given and held <= {"fp32", "fp16"}:
        raise FieldError(
            "block", f"is for quantised weights: quantisation {request.quantisation!r} has no blocks; leave it out"
        )
    try:
        request.check()
    except ContradictionError as error:
        raise FieldError(error.field, str(error)) from error
    return spelled_out(request, quantised="quantisation" in given)
