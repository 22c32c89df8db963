"""Engines on the devices there are: one, one over several devices, or several side by side."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import fields
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

from gymllm.engine import Engine, GenerateRequest, Generation
from gymllm.errors import ConfigError, EngineError
from gymllm.timeline import Timeline
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.engine.config import EngineConfig
from gymllm_trainers.engine.engine import EngineCounts, JaxEngine
from gymllm_trainers.engine.tickets import Delta
from gymllm_trainers.models.decoder import Decoder
from gymllm_trainers.models.sharding import abstract_state, make_mesh

Tree = Any
"""A pytree of arrays."""

REMEMBERED = 16_384
"""Beginnings of conversations whose replica is remembered."""

MOST_AHEAD = 8
"""Requests that a replica may have more than the least busy one before a conversation leaves it: by then
waiting there costs more than computing its prompt again."""


class EmbeddedEngine(Engine, Protocol):
    """What the trainer, the evaluator and the server use of an engine in this process."""

    ready: threading.Event

    @property
    def idle_cause(self) -> Callable[[], str]: ...
    @idle_cause.setter
    def idle_cause(self, cause: Callable[[], str]) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def counts(self) -> EngineCounts: ...
    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    async def generate_n(self, request: GenerateRequest, n: int) -> list[Generation]: ...
    def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]: ...
    def publish(self, state: Tree, version: int) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def clear_cache(self) -> None: ...


def open_engine(
    decoder: Decoder,
    config: EngineConfig,
    *,
    timeline: Timeline,
    tokenizer: Tokenizer | None = None,
    version: int = 0,
    name: str = "engine",
    log: Callable[[str], None] = lambda name: None,
) -> JaxEngine | Replicas:
    """Makes the engine that `config.tensor` and `config.replicas` ask for; see `JaxEngine`.

    Raises:
        ConfigError: There are not as many devices, or the model can't be divided like that.
    """
    meshes = engine_meshes(config)
    if not meshes:
        return JaxEngine(
            decoder,
            config,
            timeline=timeline,
            tokenizer=tokenizer,
            version=version,
            name=name,
            log=log,
        )
    engines = [
        JaxEngine(
            _sharded(decoder, mesh),
            config,
            timeline=timeline,
            tokenizer=tokenizer,
            version=version,
            name=f"{name}_{number}" if config.replicas > 1 else name,
            mesh=mesh,
            log=log,
        )
        for number, mesh in enumerate(meshes)
    ]
    return engines[0] if len(engines) == 1 else Replicas(engines)


def engine_meshes(config: EngineConfig) -> list[Mesh]:
    """The devices of each replica, the first ones of this process; empty where the engine is on just one.

    Raises:
        ConfigError: There are not as many devices.
    """
    wanted, devices = config.tensor * config.replicas, jax.local_devices()
    if wanted == 1:
        return []
    if wanted > len(devices):
        has = "there are" if jax.process_count() == 1 else f"process {jax.process_index()} has"
        raise ConfigError(
            f"engine.tensor ({config.tensor}) times engine.replicas ({config.replicas}) is {wanted}, but "
            f"{has} {len(devices)} devices ({devices[0].platform}). Lower one of them."
        )
    return [
        make_mesh(fsdp=1, tensor=config.tensor, devices=devices[start : start + config.tensor])
        for start in range(0, wanted, config.tensor)
    ]


class Replicas:
    """Several engines as one: a conversation returns to the replica that has its pages."""

    def __init__(self, engines: list[JaxEngine]) -> None:
        """Takes the engines over; they serve the same weights and have the same sizes."""
        self.engines = engines
        self.config = engines[0].config
        self._homes: OrderedDict[tuple[int, ...], JaxEngine] = OrderedDict()
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self.ready: threading.Event = _All([engine.ready for engine in engines])

    # ------------------------------------------------------------------ as one

    @property
    def context_length(self) -> int:
        """Tokens of prompt and generation together."""
        return self.config.context_length

    @property
    def version(self) -> int:
        """Oldest version that a replica's next step runs with."""
        return min(engine.version for engine in self.engines)

    @property
    def closed(self) -> bool:
        """Whether none takes requests any more."""
        return all(engine.closed for engine in self.engines)

    @property
    def waiting(self) -> int:
        """Requests that hold no pages yet."""
        return sum(engine.waiting for engine in self.engines)

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return sum(engine.running for engine in self.engines)

    @property
    def free_pages(self) -> int:
        """Pages that nobody reads."""
        return sum(engine.free_pages for engine in self.engines)

    @property
    def counts(self) -> EngineCounts:
        """Totals of all replicas since the start."""
        total = EngineCounts()
        for each in fields(EngineCounts):
            parts = (getattr(engine.counts, each.name) for engine in self.engines)
            setattr(total, each.name, sum(parts))
        return total

    @property
    def idle_cause(self) -> Callable[[], str]:
        """Says why there is nothing to do."""
        return self.engines[0].idle_cause

    @idle_cause.setter
    def idle_cause(self, cause: Callable[[], str]) -> None:
        for engine in self.engines:
            engine.idle_cause = cause

    async def generate(self, request: GenerateRequest) -> Generation:
        """As `JaxEngine.generate`, on the replica that suits best."""
        return await self._choose(request).generate(request)

    async def generate_n(self, request: GenerateRequest, n: int) -> list[Generation]:
        """As `JaxEngine.generate_n`: all on one replica, which computes the prompt once."""
        return await self._choose(request).generate_n(request, n)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """As `JaxEngine.stream`."""
        stream = self._choose(request).stream(request)
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()

    def publish(self, state: Tree, version: int) -> None:
        """As `JaxEngine.publish`, to all replicas: none takes weights that one refuses."""
        with self._publishing:  # in the same order to all
            for engine in self.engines:
                engine.publish(state, version)

    def pause(self) -> None:
        """No step is started until `resume`."""
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        """Goes on after `pause`."""
        for engine in self.engines:
            engine.resume()

    def clear_cache(self) -> None:
        """Forgets the keys and values that no running request reads."""
        for engine in self.engines:
            engine.clear_cache()

    async def aclose(self) -> None:
        """Ends every request with `EngineError`, and the threads."""
        for engine in self.engines:
            await engine.aclose()

    # ------------------------------------------------------------------ which one

    def _choose(self, request: GenerateRequest) -> JaxEngine:
        """The replica that served the longest beginning of this prompt, unless it is much busier."""
        alive = [engine for engine in self.engines if not engine.closed]
        if not alive:
            raise EngineError("every replica of the engine is down.")
        least = min(alive, key=_load)
        ids, size = tuple(map(int, request.prompt_ids)), self.config.page_size
        # Beginnings of 1, 2, 4, ... pages: few keys a prompt, and a fork still finds a good part.
        lengths = [size << power for power in range((len(ids) // size).bit_length())]
        keys = [ids[:length] for length in lengths]
        with self._lock:
            home = next((self._homes[key] for key in reversed(keys) if key in self._homes), least)
            if home.closed or _load(home) - _load(least) > MOST_AHEAD:
                home = least
            for key in keys:
                self._homes[key] = home
                self._homes.move_to_end(key)
            while len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return home


def _sharded(decoder: Decoder, mesh: Mesh) -> Decoder:
    """A decoder with the same parameters on the mesh; the one given stays where it is."""
    graph, state = nnx.split(decoder)
    placed = jax.tree.map(
        lambda leaf, there: jax.device_put(leaf, there.sharding),
        state,
        abstract_state(decoder, mesh),
    )
    return nnx.merge(graph, placed)


def _load(engine: JaxEngine) -> int:
    return engine.waiting + engine.running


class _All(threading.Event):
    """Set once all of some events are."""

    def __init__(self, events: list[threading.Event]) -> None:
        super().__init__()
        self._events = events

    def is_set(self) -> bool:
        return all(event.is_set() for event in self._events)

    def wait(self, timeout: float | None = None) -> bool:
        return all(event.wait(timeout) for event in self._events)
