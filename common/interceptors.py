"""What stands between a call and its servicer: the check of its token, and its errors' statuses."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health

from common.errors import (
    ConfigError,
    PermissionDenied,
    RefitError,
    Unauthenticated,
    Unavailable,
)
from common.tokens import TokenBook

log = logging.getLogger(__name__)

_HEALTH_METHODS = f"/{health.SERVICE_NAME}/"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What a servicer's methods get beside the request."""


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through by their token; behind `ErrorInterceptor`, which answers the refused."""

    def __init__(self, tokens: TokenBook) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_HEALTH_METHODS):
            return handler
        try:
            self._tokens.authorise(method, dict(handler_call_details.invocation_metadata))
        except (Unauthenticated, PermissionDenied) as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: RefitError) -> Any:
    """A method that only raises. Unary, for an error looks the same to every kind of caller."""

    async def refuse(request: Any, context: Context) -> NoReturn:
        raise error

    return grpc.unary_unary_rpc_method_handler(
        refuse, handler.request_deserializer, handler.response_serializer
    )


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns domain errors into their status; any other into INTERNAL with a fixed text."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        if handler_call_details.method.startswith(_HEALTH_METHODS):
            # The stock `Watch` is a coroutine that writes, no generator.
            return handler
        coders = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _mapped_stream(handler.unary_stream), *coders
            )
        return grpc.unary_unary_rpc_method_handler(_mapped_unary(handler.unary_unary), *coders)


def _mapped_unary(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> Any:
        async with _mapped(context):
            return await method(request, context)

    return call


def _mapped_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        async with _mapped(context), contextlib.aclosing(method(request, context)) as responses:
            async for response in responses:
                yield response

    return call


@contextlib.asynccontextmanager
async def _mapped(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except ConfigError as error:
        # Not the caller's fault, and what it names is this machine's own.
        log.error("a call needs what is not configured right: %s", error)
        await _abort(
            context, Unavailable("this service's configuration cannot be used; see its log")
        )
    except RefitError as error:
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("a call failed in a way nobody foresaw")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the server's log")


async def _abort(context: Context, error: RefitError) -> NoReturn:
    """End the call with the error's status, its `ErrorInfo` for machines and when to come again."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=type(error).__name__, domain="refit.v1"))
    status = status_pb2.Status(code=error.code.value[0], message=str(error), details=[info])
    trailing: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", status.SerializeToString())
    ]
    if error.retry_after_seconds is not None:
        # gRPC's own name: clients with a retry policy heed it.
        trailing.append(("grpc-retry-pushback-ms", f"{1000 * error.retry_after_seconds:.0f}"))
    await context.abort(error.code, str(error), trailing_metadata=tuple(trailing))
    raise AssertionError("abort always raises")
