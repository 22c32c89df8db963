"""SGLang's routes beside /generate: ending and pausing requests, new weights, what is served."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, final

import anyio
from starlette.responses import JSONResponse, PlainTextResponse, Response

from gymllm.engine import GenerateRequest, SamplingParams
from gymllm.errors import GymLLMError
from gymllm_trainers.engine import EngineConfig
from gymllm_trainers.serve.connection import Body
from gymllm_trainers.serve.fields import Unsupported, read_fields
from gymllm_trainers.serve.problems import RefusedError
from gymllm_trainers.serve.service import Service
from gymllm_trainers.serve.weights import Weights

HEALTH_S = 20.0
"""Longest that one token may take, in /health_generate."""

_UPDATE_UNSUPPORTED: Unsupported = {
    "load_format": ("auto", "the folder says its format"),
    "abort_all_requests": (False, "use /abort_request first"),
    "is_async": (False, "the answer comes once the weights are taken over"),
    "torch_empty_cache": (False, ""),
    "keep_pause": (False, "requests are never paused"),
    "recapture_cuda_graph": (False, "there are none"),
    "token_step": (0, ""),
}


@dataclass(frozen=True, kw_only=True)
class AbortBody:
    """`/abort_request`."""

    rid: str = ""
    abort_all: bool = False
    abort_message: str | None = None


@dataclass(frozen=True, kw_only=True)
class PauseBody:
    """`/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


@dataclass(frozen=True, kw_only=True)
class NoBody:
    """Of a route that takes nothing."""


@dataclass(frozen=True, kw_only=True)
class UpdateBody:
    """`/update_weights_from_disk`."""

    model_path: str = ""
    weight_version: str | int | None = None
    flush_cache: bool = True


@final
class Control:
    """The routes' handlers."""

    def __init__(self, service: Service, weights: Weights, config: EngineConfig) -> None:
        """Takes what they control.

        Args:
            service: Its engine and its requests.
            weights: Of the engine.
            config: The engine's sizes, to be told.
        """
        self._service, self._weights, self._config = service, weights, config

    async def abort(self, given: Body) -> Response:
        """Ends requests by name, or all; one that is not there is no error."""
        body = read_fields(AbortBody, given, unsupported={"abort_message": (None, "")})
        if not body.rid and not body.abort_all:
            raise RefusedError(400, "rid, or abort_all as true, must be given.", param="rid")
        self._service.running.abort(None if body.abort_all else body.rid)
        return Response()

    async def pause(self, given: Body) -> Response:
        """Stops generating until `resume`; new requests wait."""
        body = read_fields(PauseBody, given)
        if body.mode == "retract":
            raise RefusedError(
                400,
                "mode retract is not supported here: use in_place, and start the server with "
                "--engine.on-publish recompute for keys and values to be computed anew.",
                param="mode",
            )
        self._service.engine.pause()
        aborted = self._service.running.abort() if body.mode == "abort" else 0
        return JSONResponse({"success": True, "message": f"paused; aborted {aborted} sequences"})

    async def resume(self, given: Body) -> Response:
        """Goes on."""
        read_fields(NoBody, given)
        self._service.engine.resume()
        return JSONResponse({"success": True, "message": "going on"})

    async def flush(self, given: Body) -> Response:
        """Forgets keys and values that no request is using."""
        read_fields(NoBody, given)
        self._service.engine.clear_cache()
        return PlainTextResponse("Cache flushed.\n")

    async def update(self, given: Body) -> Response:
        """New weights, read from a folder on the server's own disk."""
        body = read_fields(UpdateBody, given, unsupported=_UPDATE_UNSUPPORTED)
        if not body.model_path:
            raise RefusedError(400, "model_path must be given.", param="model_path")
        name = None if body.weight_version is None else str(body.weight_version)
        try:
            name = await self._weights.update(body.model_path, name, clears_cache=body.flush_cache)
        except GymLLMError as error:
            # SGLang's form of a failure.
            return JSONResponse(
                {"success": False, "message": str(error), "num_paused_requests": 0},
                status_code=400,
            )
        return JSONResponse(
            {
                "success": True,
                "message": f"serving {body.model_path} as version {name}",
                "num_paused_requests": 0,
            }
        )

    async def health_generate(self, given: Body) -> Response:
        """Generates one token, whatever waits before the engine."""
        request = GenerateRequest(
            prompt_ids=[self._service.tokenizer.eos_token_id],
            sampling=SamplingParams(max_new_tokens=1, temperature=0),
            request_id="health",
        )
        with anyio.move_on_after(HEALTH_S):
            await self._service.engine.generate(request)
            return Response()
        raise RefusedError(503, f"no token within {HEALTH_S:.0f} s.")

    async def model_info(self, given: Body) -> Response:
        """What is served."""
        engine = self._service.engine
        return JSONResponse(
            {
                "model_path": self._weights.path,
                "tokenizer_path": self._weights.path,
                "is_generation": True,
                "weight_version": self._service.version_name(engine.version),
            }
        )

    async def server_info(self, given: Body) -> Response:
        """Sizes, and how much there is to do."""
        service, engine = self._service, self._service.engine
        return JSONResponse(
            {
                "model_path": self._weights.path,
                "served_model_name": service.name,
                "dtype": self._weights.dtype,
                "context_length": engine.context_length,
                "weight_version": service.version_name(engine.version),
                "engine": asdict(self._config),
                "state": {
                    "sequences": service.running.sequences,
                    "most_sequences": service.running.most,
                    "running": engine.running,
                    "waiting": engine.waiting,
                    "free_pages": engine.free_pages,
                    "counts": asdict(engine.counts),
                },
            }
        )
