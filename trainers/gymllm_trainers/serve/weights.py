"""New weights from a folder, while requests go on."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import final

import anyio
import anyio.to_thread
from flax import nnx

from gymllm.errors import ModelError
from gymllm_trainers.models import DecoderConfig, load_model
from gymllm_trainers.serve.service import Service


@final
class Weights:
    """The weights that are served: where they came from, and how others take their place."""

    def __init__(self, service: Service, config: DecoderConfig, *, path: str, dtype: str) -> None:
        """Takes what is known of them.

        Args:
            service: Its engine has them.
            config: The model's shape.
            path: Where they came from.
            dtype: What they are kept and computed in.
        """
        self.path, self.config, self.dtype = path, config, dtype
        self._service = service
        self._one_at_a_time = anyio.Lock()

    async def update(self, path: str, name: str | None, *, clears_cache: bool) -> str:
        """Reads a folder and publishes what is in it.

        Args:
            path: A model folder, or a .gguf file.
            name: What clients call the new weights; None: their number.
            clears_cache: Whether keys and values that no request is using are forgotten.

        Returns:
            What they are called.

        Raises:
            ModelError: They can't be read, are of another model, or hold what is no number. The old
                ones stay.
        """
        engine = self._service.engine
        async with self._one_at_a_time:
            version = engine.version + 1
            await anyio.to_thread.run_sync(self._publish, path, version)
            if name is not None:
                self._service.version_names[version] = name
            self.path = path
            if clears_cache:
                engine.clear_cache()
        return self._service.version_name(version)

    def _publish(self, path: str, version: int) -> None:
        # `load_model` would take it for a hub name, and download. pathlib raises for a name too long.
        if not os.path.exists(path):
            raise ModelError(f"there is no such file or folder as {path} on the server's disk.")
        model = load_model(path, dtype=self.dtype)
        differs = [
            f"{field.name} is {getattr(model.config, field.name)}, not {getattr(self.config, field.name)}"
            for field in fields(self.config)
            if getattr(model.config, field.name) != getattr(self.config, field.name)
        ]
        if differs:
            raise ModelError(
                f"{path} is of another architecture than the served model ({'; '.join(differs)}). The "
                "weights stay as they were."
            )
        decoder = model.decoder(compute_dtype=self.dtype)
        self._service.engine.publish(nnx.state(decoder), version)
