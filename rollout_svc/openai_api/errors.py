"""This service's errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import StatusCode
from starlette.responses import JSONResponse

from common.errors import RefitError

_RETRY_SECONDS = 1

# What a client of OpenAI's retries by itself is what may go well later: 429 and from 500 on.
_STATUSES: Mapping[StatusCode, tuple[int, str]] = {
    StatusCode.INVALID_ARGUMENT: (400, "BadRequestError"),
    StatusCode.UNAUTHENTICATED: (401, "AuthenticationError"),
    StatusCode.PERMISSION_DENIED: (403, "PermissionDeniedError"),
    StatusCode.NOT_FOUND: (404, "NotFoundError"),
    # The base, where merged weights took its place, or before it came.
    StatusCode.FAILED_PRECONDITION: (404, "NotFoundError"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "RateLimitError"),
    StatusCode.UNAVAILABLE: (503, "ServiceUnavailableError"),
    StatusCode.DEADLINE_EXCEEDED: (504, "GatewayTimeoutError"),
}


class NoRoute(RefitError, LookupError):
    """The endpoint has no such path, or not with that method."""

    code = StatusCode.NOT_FOUND


def error_response(error: RefitError) -> JSONResponse:
    """The answer to a request that this error ends."""
    status, kind = _STATUSES.get(error.code, (500, "InternalServerError"))
    body = {"message": str(error), "type": kind, "param": _param(error), "code": status}
    headers = {"retry-after": str(_RETRY_SECONDS)} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": body}, status_code=status, headers=headers)


def _param(error: RefitError) -> str | None:
    """The field that the message begins with, where it is one of the request's."""
    field = str(error).partition(":")[0]
    return "model" if field in ("model", "adapter", "adapter.rule") else None
