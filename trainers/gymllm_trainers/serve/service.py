"""What all routes share: the engine, the model's words, what runs, which weights these are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import cast, final

import anyio
import anyio.to_thread

from gymllm.engine import GenerateRequest, SamplingParams
from gymllm.errors import ContextLengthError
from gymllm_agents import Tokenizer
from gymllm_trainers.engine import EmbeddedEngine
from gymllm_trainers.serve.problems import RefusedError
from gymllm_trainers.serve.running import Running


@final
class Service:
    """One served model. Closes nothing."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        tokenizer: Tokenizer,
        *,
        name: str,
        vocabulary: int,
        most_sequences: int,
    ) -> None:
        """Takes the parts.

        Args:
            engine: Generates.
            tokenizer: The model's own.
            name: What clients call the model.
            vocabulary: Number of ids that the model knows.
            most_sequences: That may generate or wait.
        """
        self.engine, self.tokenizer = engine, tokenizer
        self.name, self.vocabulary = name, vocabulary
        self.created = int(time.time())
        self.running = Running(engine, most=most_sequences)
        self.version_names: dict[int, str] = {}
        """What clients call versions of the weights, where they have named them."""
        self._encoder = tokenizer.copy_backend()
        self._token_texts: dict[int, str] = {}
        self._anchor = tokenizer.encode("a", allow_special=False)[-1:]
        self._anchor_text = tokenizer.decode(self._anchor, skip_special=False)

    def check_model(self, name: str) -> None:
        """Lets requests pass for the model that is served, or for none by name.

        Raises:
            RefusedError: Another one is asked for.
        """
        if name and name != self.name:
            raise RefusedError(
                404,
                f"there is no model {name[:200]!r} here, only {self.name!r}.",
                code="model_not_found",
                param="model",
            )

    def version_name(self, version: int) -> str:
        """What a version of the weights is called."""
        return self.version_names.get(version, str(version))

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a whole prompt. Control tokens in it are control tokens.

        Args:
            text: Of the client, who writes the whole prompt.
            add_special: Put before it what the model's tokenizer puts before a text (a bos token).
        """
        safe = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        encoded = await anyio.to_thread.run_sync(
            lambda: self._encoder.encode(safe, add_special_tokens=add_special).ids
        )
        return encoded

    def token_text(self, token: int) -> str:
        """The text of one token, as it stands inside of a text."""
        text = self._token_texts.get(token)
        if text is None:
            # Behind another, as some tokenizers drop a blank at the start of a text.
            both = self.tokenizer.decode([*self._anchor, token], skip_special=False)
            text = self._token_texts[token] = both[len(self._anchor_text) :]
        return text

    def check_prompt(self, ids: object, name: str) -> list[int]:
        """A prompt of ids.

        Raises:
            RefusedError: It is none, is empty, or holds what is no id of the model.
            ContextLengthError: It leaves no room to generate.
        """
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise RefusedError(400, f"{name} must be a list of token ids.", param=name)
        prompt = cast("list[int]", ids)
        if not prompt:
            raise RefusedError(400, f"{name} is empty; it needs at least one token.", param=name)
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            bad = next(i for i in prompt if not 0 <= i < self.vocabulary)
            raise RefusedError(
                400, f"{name} holds {bad}; the model's ids are below {self.vocabulary}.", param=name
            )
        if len(prompt) >= self.engine.context_length:
            raise ContextLengthError(
                f"a prompt of {len(prompt)} tokens leaves no room in this server's context length of "
                f"{self.engine.context_length} tokens."
            )
        return prompt

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that can be generated behind a prompt."""
        return self.engine.context_length - len(prompt)


def sequences(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, n: int, name: str
) -> list[GenerateRequest]:
    """`n` requests for each prompt, in order; each has a seed of its own."""
    return [
        GenerateRequest(
            prompt_ids=prompt,
            sampling=dataclasses.replace(sampling, seed=sampling.seed + member),
            request_id=name,
        )
        for prompt in prompts
        for member in range(n)
    ]
