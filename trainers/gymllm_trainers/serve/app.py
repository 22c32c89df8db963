"""Which path is answered by what."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gymllm.errors import UnknownNameError
from gymllm_trainers.serve.chat import Chat
from gymllm_trainers.serve.completions import Completions
from gymllm_trainers.serve.connection import Body, Handler, answers, refusal_response
from gymllm_trainers.serve.control import Control
from gymllm_trainers.serve.generate import Generate
from gymllm_trainers.serve.problems import RefusedError
from gymllm_trainers.serve.service import Service


def make_app(
    service: Service,
    control: Control,
    *,
    api_key: str,
    most_bytes: int,
) -> Starlette:
    """The ASGI application.

    Args:
        service: What all routes share.
        control: Handlers of SGLang's further routes.
        api_key: What clients must have, except for /health; empty: nothing.
        most_bytes: Longest body of a request.
    """

    async def models(given: Body) -> Response:
        model = {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "gymllm",
            "max_model_len": service.engine.context_length,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def health(request: Request) -> Response:
        engine = service.engine
        if service.running.ending or engine.closed or not engine.ready.is_set():
            return refusal_response(RefusedError(503, "not ready.", code="unavailable"))
        return Response()

    def route(path: str, handler: Handler, *methods: str, outlives_client: bool = False) -> Route:
        endpoint = answers(
            handler, api_key=api_key, most_bytes=most_bytes, outlives_client=outlives_client
        )
        return Route(path, endpoint, methods=methods)

    routes = [
        Route("/health", health, methods=["GET"]),
        route("/v1/models", models, "GET"),
        route("/v1/chat/completions", Chat(service), "POST"),
        route("/v1/completions", Completions(service), "POST"),
        route("/generate", Generate(service), "POST", "PUT"),
        route("/abort_request", control.abort, "POST"),
        route("/pause_generation", control.pause, "POST"),
        route("/continue_generation", control.resume, "POST"),
        route("/flush_cache", control.flush, "GET", "POST"),
        # A swap that is half done is finished.
        route("/update_weights_from_disk", control.update, "POST", outlives_client=True),
        route("/health_generate", control.health_generate, "GET"),
        route("/get_model_info", control.model_info, "GET"),
        route("/get_server_info", control.server_info, "GET"),
    ]
    paths = [each.path for each in routes]

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} is not for {request.url.path}."
        if error.status_code == 404:
            message = str(UnknownNameError("path", request.url.path[:200], paths))
        return refusal_response(RefusedError(error.status_code, message))

    return Starlette(routes=routes, exception_handlers={HTTPException: refuse})
