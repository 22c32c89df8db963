"""Starts a model, an engine and a socket; ends them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import anyio
import anyio.to_thread

from gymllm.engine import GenerateRequest, SamplingParams
from gymllm.errors import ConfigError, MissingExtraError, ModelError, UnknownNameError
from gymllm.event_loop import LOOP_OPTIONS
from gymllm.timeline import Timeline
from gymllm_agents import Tokenizer, train_tokenizer
from gymllm_trainers.compilation import use_compilation_cache
from gymllm_trainers.engine import EmbeddedEngine, EngineConfig, open_engine
from gymllm_trainers.interrupt import Interrupt
from gymllm_trainers.models import (
    Decoder,
    DecoderConfig,
    load_model,
    random_decoder,
    tiny_config,
)
from gymllm_trainers.run_folder import RunFolder
from gymllm_trainers.serve.settings import DEFAULT_CONTEXT, TINY, ServeSettings

try:
    import uvicorn

    from gymllm_trainers.serve.app import make_app
    from gymllm_trainers.serve.control import Control
    from gymllm_trainers.serve.service import Service
    from gymllm_trainers.serve.weights import Weights
except ImportError as error:
    raise MissingExtraError(
        f'gymllm-serve needs starlette and uvicorn ({error}): pip install "gymllm-trainers[serve]"'
    ) from error

API_KEY_VARIABLE = "GYMLLM_API_KEY"
GRACE_S = 2
"""From the end of all requests to that of their connections, at most."""


def run(settings: ServeSettings) -> None:
    """Serves until Ctrl-C or SIGTERM.

    Raises:
        GymLLMError: The model, the address or a setting can't be used.
        KeyboardInterrupt: The signal came; requests were answered with an error, everything is closed.
    """
    with Interrupt() as interrupt, listening(settings.host, settings.port) as listener:
        use_compilation_cache()
        decoder, tokenizer = load(settings)
        anyio.run(
            _run,
            settings,
            decoder,
            tokenizer,
            listener,
            interrupt,
            backend="asyncio",
            backend_options=LOOP_OPTIONS,
        )


def load(settings: ServeSettings) -> tuple[Decoder, Tokenizer]:
    """The model.

    Raises:
        GymLLMError: It can't be had.
    """
    if settings.model == TINY:
        tokenizer = train_tokenizer([], vocab_size=259)
        config = tiny_config(
            tokenizer.vocab_size, max_position_embeddings=settings.engine.context_length
        )
        decoder = random_decoder(
            config, seed=settings.seed, dtype=settings.dtype, compute_dtype=settings.dtype
        )
    else:
        try:
            model = load_model(_model_of(settings.model), dtype=settings.dtype)
        except UnknownNameError as problem:
            known = [TINY, *problem.known]
            raise UnknownNameError("model", settings.model, known, problem.hint) from None
        decoder, tokenizer = model.decoder(compute_dtype=settings.dtype), model.tokenizer
    return decoder, tokenizer


def _model_of(name: str) -> str:
    """What to load; of a run's folder, the model that the run wrote."""
    run = RunFolder(Path(name).expanduser())
    if not run.config.is_file():
        return name
    if not run.model.is_dir():
        raise ModelError(
            f"the run in {run.path} has written no model yet: a run does at its end. Let it go on with "
            f"gymllm-train --resume {run.path}."
        )
    return str(run.model)


def fitting(
    config: EngineConfig, model: DecoderConfig, *, say: Callable[[str], None]
) -> EngineConfig:
    """The engine's sizes, the default context no longer than what the model was made for; which is said.

    Raises:
        ConfigError: Another context is, and was asked for.
    """
    longest = model.max_position_embeddings
    if config.context_length <= longest:
        return config
    if config.context_length == DEFAULT_CONTEXT:
        say(f"the context is {longest} tokens, what the model was made for")
        return dataclasses.replace(config, context_length=longest)
    raise ConfigError(
        f"--engine.context-length is {config.context_length}, but the model was made for at most "
        f"{longest} tokens."
    )


@contextlib.contextmanager
def listening(host: str, port: int) -> Generator[socket.socket]:
    """A bound socket, closed at the end of the block. Nobody can connect before a server uses it.

    Raises:
        ConfigError: The address can't be used.
    """
    with contextlib.ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"can't listen on {host} port {port} ({error.strerror}). Choose another --port or "
                "--host; --port 0 takes a free one."
            ) from error
        yield listener


async def _run(
    settings: ServeSettings,
    decoder: Decoder,
    tokenizer: Tokenizer,
    listener: socket.socket,
    interrupt: Interrupt,
) -> None:
    async def interrupted() -> None:
        with anyio.CancelScope() as scope, interrupt.cancels(scope):
            await anyio.sleep_forever()

    sizes = fitting(settings.engine, decoder.config, say=_say)
    settings = dataclasses.replace(settings, engine=sizes)
    engine = open_engine(
        decoder,
        settings.engine,
        timeline=Timeline(),
        tokenizer=tokenizer,
        log=lambda name: _say(f"compiling {name}"),
    )
    try:
        await serve(
            engine,
            settings,
            decoder.config,
            tokenizer,
            listener,
            until=interrupted,
            say=_say,
        )
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


def _say(line: str) -> None:
    print(f"gymllm-serve: {line}", flush=True)  # noqa: T201 (a command line speaks)


async def serve(
    engine: EmbeddedEngine,
    settings: ServeSettings,
    model: DecoderConfig,
    tokenizer: Tokenizer,
    listener: socket.socket,
    *,
    until: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
) -> None:
    """Answers until it is told to end; then requests that run are answered with an error.

    Args:
        engine: Stays open.
        settings: As the command line has them.
        model: The engine's.
        tokenizer: Its own.
        listener: Bound; closed at the end.
        until: Returns when it is time to end.
        say: Told where it listens, once everything is compiled.

    Raises:
        EngineError: The engine can't generate.
    """
    service = Service(
        engine,
        tokenizer,
        name=settings.served_name,
        vocabulary=model.vocab_size,
        most_sequences=settings.engine.slots + settings.queue,
    )
    weights = Weights(service, model, path=settings.model, dtype=settings.dtype)
    app = make_app(
        service,
        Control(service, weights, settings.engine),
        api_key=settings.api_key or os.environ.get(API_KEY_VARIABLE, ""),
        most_bytes=settings.max_body_mb << 20,
    )
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            timeout_graceful_shutdown=GRACE_S,
        )
    )

    async def announce() -> None:
        await anyio.to_thread.run_sync(engine.ready.wait, abandon_on_cancel=True)
        await engine.generate(
            GenerateRequest(
                prompt_ids=[tokenizer.eos_token_id], sampling=SamplingParams(max_new_tokens=1)
            )
        )
        host, port = listener.getsockname()[:2]
        say(f"{settings.served_name} at http://{f'[{host}]' if ':' in host else host}:{port}")

    async def end() -> None:
        await until()
        server.should_exit = True
        service.running.end()

    async with anyio.create_task_group() as group:
        group.start_soon(announce, name="announce")
        group.start_soon(end, name="end")
        await server.serve(sockets=[listener])
        group.cancel_scope.cancel()


class _Server(uvicorn.Server):
    """Leaves signals to `gymllm_trainers.interrupt`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none."""
        yield
