"""Starts a model, an engine and a socket; ends them."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Awaitable, Callable, Generator

import anyio
import anyio.to_thread

from gymllm.engine import GenerateRequest, SamplingParams
from gymllm.errors import ConfigError, MissingExtraError
from gymllm.event_loop import LOOP_OPTIONS
from gymllm.timeline import Timeline
from gymllm_agents import Tokenizer, train_tokenizer
from gymllm_trainers.interrupt import Interrupt
from gymllm_trainers.models import (
    Decoder,
    load_model,
    random_decoder,
    tiny_config,
)
from gymllm_trainers.serve.fallback import JaxEngine
from gymllm_trainers.serve.settings import TINY, ServeSettings

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
        decoder, tokenizer = load(settings)

        async def interrupted() -> None:
            with anyio.CancelScope() as scope, interrupt.cancels(scope):
                await anyio.sleep_forever()

        anyio.run(
            functools.partial(
                serve, settings, decoder, tokenizer, listener, until=interrupted, say=_say
            ),
            backend="asyncio",
            backend_options=LOOP_OPTIONS,
        )


def _say(line: str) -> None:
    print(f"gymllm-serve: {line}", flush=True)  # noqa: T201 (a command line speaks)


def load(settings: ServeSettings) -> tuple[Decoder, Tokenizer]:
    """The model.

    Raises:
        GymLLMError: It can't be had, or is made for shorter conversations.
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
        model = load_model(settings.model, dtype=settings.dtype)
        decoder, tokenizer = model.decoder(compute_dtype=settings.dtype), model.tokenizer
    longest = decoder.config.max_position_embeddings
    if settings.engine.context_length > longest:
        raise ConfigError(
            f"--engine.context-length is {settings.engine.context_length}, but {settings.model} was made "
            f"for at most {longest} tokens."
        )
    return decoder, tokenizer


@contextlib.contextmanager
def listening(host: str, port: int) -> Generator[socket.socket]:
    """A bound socket, closed at the end of the block. Nobody can connect before a server uses it.

    Raises:
        ConfigError: The address can't be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host} port {port} ({error.strerror}). Choose another --port or --host; "
            "--port 0 takes a free one."
        ) from error
    with listener:
        yield listener


async def serve(
    settings: ServeSettings,
    decoder: Decoder,
    tokenizer: Tokenizer,
    listener: socket.socket,
    *,
    until: Callable[[], Awaitable[None]],
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Answers until it is told to end; then requests that run are answered with an error.

    Args:
        settings: As the command line has them.
        decoder: The model.
        tokenizer: Its own.
        listener: Bound; closed at the end.
        until: Returns when it is time to end.
        say: Takes lines for whoever started it: each program that is compiled, and where it listens.

    Raises:
        EngineError: The engine can't generate.
    """
    engine = JaxEngine(
        decoder,
        settings.engine,
        timeline=Timeline(),
        tokenizer=tokenizer,
        log=lambda name: say(f"compiling {name}"),
    )
    service = Service(
        engine,
        tokenizer,
        name=settings.served_name,
        vocabulary=decoder.config.vocab_size,
        most_sequences=settings.engine.slots + settings.queue,
    )
    weights = Weights(service, decoder.config, path=settings.model, dtype=settings.dtype)
    app = make_app(
        service,
        Control(service, weights, settings.engine),
        api_key=settings.api_key or os.environ.get(API_KEY_VARIABLE, ""),
        most_bytes=settings.max_body_mb << 20,
        is_ready=engine.ready.is_set,
    )
    server = _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GRACE_S,
        )
    )

    async def announce() -> None:
        await anyio.to_thread.run_sync(engine.ready.wait, abandon_on_cancel=True)
        trial = GenerateRequest(
            prompt_ids=[tokenizer.eos_token_id],
            sampling=SamplingParams(max_new_tokens=1),
            request_id="trial",
        )
        async with service.running.run([trial]) as pieces:
            async for _ in pieces:
                pass
        host, port = listener.getsockname()[:2]
        say(f"{settings.served_name} at http://{f'[{host}]' if ':' in host else host}:{port}")

    async def end() -> None:
        await until()
        service.running.ending = True
        server.should_exit = True
        await engine.aclose()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(announce, name="announce")
            group.start_soon(end, name="end")
            await server.serve(sockets=[listener])
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


class _Server(uvicorn.Server):
    """Leaves signals to `gymllm_trainers.interrupt`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none."""
        yield
