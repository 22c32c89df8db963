"""One HTTP request: its body comes in within bounds, its answer goes out, and if its client vanishes
the work for it ends."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar, final

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gymllm_trainers.serve.fields import parse_object
from gymllm_trainers.serve.problems import RefusedError, as_refusal, error_body, error_headers

BODY_S = 60.0
"""Longest that a body may take to come."""
STALLED_S = 60.0
"""Longest that a client may leave what it is sent unread."""

T = TypeVar("T")
Body = Mapping[str, object]
Handler = Callable[[Body], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


class Emit(Protocol):
    """Sends one event to the client."""

    async def __call__(self, event: Mapping[str, object] | str) -> None:
        """An object, as JSON; or a text as it is."""
        ...


@final
class EventStream(Response):
    """Server-sent events. What goes wrong before the first one is an error like any other."""

    def __init__(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        """Takes what emits the events; it is cancelled when the client vanishes."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the producer, as an ASGI application."""
        begun = False
        one_at_a_time = anyio.Lock()

        async def emit(event: Mapping[str, object] | str) -> None:
            nonlocal begun
            data = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
            # Shielded: an abort must not lose what was told already. Who has vanished reads at once.
            with anyio.fail_after(STALLED_S, shield=True):
                async with one_at_a_time:
                    if not begun:
                        await send(
                            {
                                "type": "http.response.start",
                                "status": 200,
                                "headers": self.raw_headers,
                            }
                        )
                        begun = True
                    body = f"data: {data}\n\n".encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})

        async def work() -> None:
            try:
                await self._produce(emit)
            except Exception as error:
                if not begun:
                    raise
                await emit(error_body(as_refusal(error)))
            await send({"type": "http.response.body", "body": b""})

        try:
            await while_connected(receive, work)
        except (ClientDisconnect, TimeoutError, OSError):
            return  # nobody reads any more
        except Exception as error:
            await refusal_response(error)(scope, receive, send)


def answers(
    handler: Handler, *, api_key: str = "", most_bytes: int, outlives_client: bool = False
) -> Endpoint:
    """An endpoint that reads a JSON object and answers it.

    Args:
        handler: Answers; an `EventStream` where it goes on.
        api_key: What the client must have; empty: nothing, but web pages are refused.
        most_bytes: Longest body.
        outlives_client: Whether the work goes on when the client vanishes.
    """

    async def endpoint(request: Request) -> Response:
        try:
            check_client(request, api_key)
            data = await _read_body(request, most_bytes)
            body = parse_object(data) if data.strip() else {}
            if outlives_client:
                return await handler(body)
            return await while_connected(request.receive, lambda: handler(body))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return refusal_response(error)

    return endpoint


def refusal_response(error: Exception) -> Response:
    """The answer to an error."""
    refusal = as_refusal(error)
    return JSONResponse(
        error_body(refusal), status_code=refusal.status, headers=error_headers(refusal)
    )


def check_client(request: Request, api_key: str) -> None:
    """Lets those in who have the key; where there is none, everybody but web pages.

    A page in somebody's browser may send a request to any address the browser reaches, this machine's own
    among them, and it can't help saying so (`Origin`).

    Raises:
        RefusedError: The client has no key, or another, or is a page.
    """
    if not api_key:
        if "origin" in request.headers:
            raise RefusedError(
                403, "a server without a key takes no requests of web pages; start it with a key."
            )
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), api_key.encode())
    if scheme.lower() != "bearer" or not right:
        raise RefusedError(
            401,
            'this server asks for its key: send the header "Authorization: Bearer KEY".',
            code="invalid_api_key",
        )


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """What `work` comes to, unless the client vanishes: then it is cancelled.

    Raises:
        ClientDisconnect: The client vanished.
    """
    done: list[T] = []

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch, name="client")
            done.append(await work())
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) == 1:
            raise errors.exceptions[0] from None
        raise
    if not done:
        raise ClientDisconnect
    return done[0]


async def _read_body(request: Request, most_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    data = bytearray()
    if size <= most_bytes:
        try:
            with anyio.fail_after(BODY_S):
                async for chunk in request.stream():
                    data += chunk
                    size = len(data)
                    if size > most_bytes:
                        break
        except TimeoutError:
            raise RefusedError(408, f"the body did not come within {BODY_S:.0f} s.") from None
    if size > most_bytes:
        raise RefusedError(
            413,
            f"the body has more than {most_bytes} bytes; send less at once, or start the server with a "
            "larger --max-body-mb.",
        )
    return bytes(data)
