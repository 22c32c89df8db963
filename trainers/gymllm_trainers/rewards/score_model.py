"""A reward model of the hub: a decoder whose last hidden state a linear head of one label scores.

transformers calls these `...ForSequenceClassification` with `num_labels` 1, and so they are trained and
published (Bradley-Terry models of preferences: Ouyang et al. 2022, arXiv:2203.02155, sec. 3.5).

Axes: B rows, T tokens of a row, D model, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import anyio
import anyio.to_thread
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.typing import DTypeLike

from gymllm.errors import ConfigError, ModelError
from gymllm.trajectory import Trajectory
from gymllm_agents import ChatFormat, Tokenizer
from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import Decoder
from gymllm_trainers.models.hub import ARCHITECTURES, config_from_hub
from gymllm_trainers.models.load import (
    Sliceable,
    TensorSource,
    all_finite,
    build_decoder,
    open_safetensors,
    read_json,
    read_params,
    resolve_model,
)

CLASSIFIER, CAUSAL = "ForSequenceClassification", "ForCausalLM"
HEAD = "score.weight"


@final
class ScoreModel:
    """Scores conversations, many at once: those that wait while others are computed share the next rows."""

    def __init__(
        self,
        decoder: Decoder,
        head_D: npt.ArrayLike,
        tokenizer: Tokenizer,
        *,
        pad_id: int | None = None,
        rows: int = 4,
        row_tokens: int = 4096,
    ) -> None:
        """Takes them.

        Args:
            decoder: The trunk; its own output head is not used.
            head_D: The score's linear map, [D], without a bias.
            tokenizer: With the chat template that the model was trained with.
            pad_id: Tokens of this id at a sequence's end are not its last; None: there is none.
            rows: Rows that are computed at once, >= 1.
            row_tokens: Tokens of a row; the longest sequence that can be scored, >= 2.

        Raises:
            ConfigError: A size is out of its range.
            ModelError: The chat template can't be used.
        """
        if rows < 1 or row_tokens < 2:
            raise ConfigError(f"rows must be >= 1 and row_tokens >= 2, got {rows} x {row_tokens}.")
        self._graph, self._state = nnx.split(decoder)
        self._head_D = jnp.asarray(head_D)
        self._form = ChatFormat(tokenizer, report=False)
        self._pad_id, self._rows, self._row_tokens = pad_id, rows, row_tokens
        self._waiting: list[_Wanted] = []
        self._computing = anyio.Lock()
        self._program = jax.jit(self._scores)

    async def score(self, trajectory: Trajectory) -> float:
        """The head's output after the whole conversation, as the model's own chat template shows it.

        Raises:
            ModelError: The conversation is longer than a row, or the template refuses it.
        """
        ids = self._form.whole_ids(trajectory.messages, opens_turn=False)
        self._check_length(len(ids))
        wanted = _Wanted(ids)
        self._waiting.append(wanted)
        try:
            async with self._computing:
                if wanted in self._waiting:
                    # With all that came while the ones before were computed; others wait for it too.
                    together, self._waiting = self._waiting, []
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(self._score_waiting, together)
        finally:
            if wanted in self._waiting:  # cancelled before it was computed
                self._waiting.remove(wanted)
        if wanted.error is not None:
            raise wanted.error
        assert wanted.score is not None, "whoever computed it has set it"
        return wanted.score

    def _score_waiting(self, together: list[_Wanted]) -> None:
        try:
            scores = self.score_ids([one.ids for one in together])
        except Exception as error:  # it is everyone's, whoever's thread this is
            for one in together:
                one.error = error
            return
        for one, score in zip(together, scores, strict=True):
            one.score = float(score)

    def score_ids(self, sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Scores [N], float32, of sequences of ids.

        Raises:
            ModelError: One is empty or longer than a row.
        """
        for sequence in sequences:
            self._check_length(len(sequence))
        scores = np.empty(len(sequences), np.float32)
        placed = _first_fit([len(sequence) for sequence in sequences], self._row_tokens)
        for start in range(0, len(placed), self._rows):
            part = placed[start : start + self._rows]
            shape = (self._rows, self._row_tokens)
            ids_BT, positions_BT, ends_BT = (np.zeros(shape, np.int32) for _ in range(3))
            last: list[tuple[int, int, int]] = []
            for row, members in enumerate(part):
                at = 0
                for index in members:
                    sequence = np.asarray(sequences[index], np.int32)
                    size = len(sequence)
                    ids_BT[row, at : at + size] = sequence
                    positions_BT[row, at : at + size] = np.arange(size)
                    ends_BT[row, at : at + size] = at + size
                    last.append((index, row, at + self._last(sequence)))
                    at += size
            score_BT = np.asarray(
                self._program(self._state, self._head_D, ids_BT, positions_BT, ends_BT)
            )
            for index, row, place in last:
                scores[index] = score_BT[row, place]
        return scores

    def _scores(
        self,
        state: nnx.State,
        head_D: jax.Array,
        ids_BT: jax.Array,
        positions_BT: jax.Array,
        ends_BT: jax.Array,
    ) -> jax.Array:
        decoder = nnx.merge(self._graph, state)
        hidden_BTD = decoder.hidden(ids_BT, positions_BT, ends_BT)
        return jnp.einsum(
            "btd,d->bt",
            hidden_BTD,
            head_D.astype(hidden_BTD.dtype),
            preferred_element_type=jnp.float32,
        )

    def _last(self, ids: npt.NDArray[np.int32]) -> int:
        """Place of the last token that is no padding; transformers takes the same."""
        real = np.flatnonzero(ids != self._pad_id) if self._pad_id is not None else np.array([])
        return int(real[-1]) if len(real) else len(ids) - 1

    def _check_length(self, size: int) -> None:
        if not 1 <= size <= self._row_tokens:
            raise ModelError(
                f"a conversation of {size} tokens can't be scored in rows of {self._row_tokens}: set "
                "reward.row_tokens to as many, up to what the reward model was made for."
            )


@dataclass(eq=False)
class _Wanted:
    """A sequence that waits for its score."""

    ids: list[int]
    score: float | None = None
    error: Exception | None = None


def _first_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Which sequences lie in each row: longest first, each in the first row with room for it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        fit = next((row for row, left in enumerate(room) if left >= sizes[index]), None)
        if fit is None:
            fit = len(rows)
            rows.append([])
            room.append(length)
        rows[fit].append(index)
        room[fit] -= sizes[index]
    return rows


def load_score_model(
    name_or_path: str | Path,
    *,
    rows: int = 4,
    row_tokens: int = 4096,
    dtype: DTypeLike = jnp.float32,
    compute_dtype: DTypeLike = jnp.float32,
) -> ScoreModel:
    """Reads a reward model: a folder in the hub's format, or a hub name.

    Args:
        name_or_path: Holds config.json of a `...ForSequenceClassification`, safetensors with `score.weight`
            [1, D], and the tokenizer with its chat template.
        rows: Rows that are scored at once.
        row_tokens: Tokens of a row.
        dtype: What the weights are kept in.
        compute_dtype: What activations are computed in.

    Raises:
        ModelError: It can't be found, read or computed by our decoder, or has not exactly one label.
        ConfigError: Rows are longer than the model was made for, or a size is out of its range.
    """
    path = resolve_model(str(name_or_path))
    if not path.is_dir():
        raise ModelError(
            f"{path} is no folder; a reward model is a folder in the hub's format, with config.json of "
            f"...{CLASSIFIER} and *.safetensors."
        )
    settings = read_json(path / "config.json")
    config = classifier_config(settings, where=str(path / "config.json"))
    if row_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"reward.row_tokens is {row_tokens}, but {path} was made for at most "
            f"{config.max_position_embeddings} tokens. Lower it."
        )
    with open_safetensors(path) as source:
        head_D = _read_head(source, config)
        params = read_params(_Trunk(source), config, dtype=dtype)
    pad_id = settings.get("pad_token_id")
    return ScoreModel(
        build_decoder(config, params, compute_dtype=compute_dtype),
        head_D,
        Tokenizer.from_folder(path),
        pad_id=pad_id if isinstance(pad_id, int) else None,
        rows=rows,
        row_tokens=row_tokens,
    )


def classifier_config(settings: Mapping[str, object], *, where: str) -> DecoderConfig:
    """The trunk's shape, of a classifier's `config.json`.

    Args:
        settings: The file's content.
        where: The file, for error messages.

    Raises:
        ModelError: No classifier, or of a family that our decoder doesn't compute.
    """
    architectures = settings.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    known = [one.removesuffix(CAUSAL) + CLASSIFIER for one in ARCHITECTURES]
    # Gemma 3's text-only classifier is called by its own rule.
    causal = str(name).replace("TextFor", "For").removesuffix(CLASSIFIER) + CAUSAL
    if not str(name).endswith(CLASSIFIER) or causal not in ARCHITECTURES:
        raise ModelError(
            f"{where} says architectures={architectures!r}; a reward model is one of "
            f"{', '.join(known)}. A model that writes text is a judge: set reward.kind to judge."
        )
    # There is no output head, so nothing to tie; "tied" is what has no tensor of its own.
    return config_from_hub(
        {**settings, "architectures": [causal], "tie_word_embeddings": True}, where=where
    )


def _read_head(source: TensorSource, config: DecoderConfig) -> npt.NDArray[np.float32]:
    shape = source.shapes().get(HEAD)
    expected = (1, config.hidden_size)
    if shape != expected:
        got = "none" if shape is None else f"one of shape {list(shape)}"
        raise ModelError(
            f"{source.where}: expected {HEAD!r} of shape {list(expected)}, got {got}. A reward model has "
            "exactly one label; a classifier of several gives no score."
        )
    head_D = np.asarray(source.read(HEAD)[:, :], np.float32)[0]
    if not all_finite(head_D):
        raise ModelError(f"{source.where}: {HEAD!r} holds values that are NaN or infinite.")
    return head_D


class _Trunk:
    """A checkpoint without its score head, which no decoder has a place for."""

    def __init__(self, source: TensorSource) -> None:
        self.where, self._source = source.where, source

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._source.shapes().items() if name != HEAD}

    def read(self, name: str) -> Sliceable:
        return self._source.read(name)
