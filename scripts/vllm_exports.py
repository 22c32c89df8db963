"""What vLLM computes from the folders that we write: `check_exports.py --with vllm`.

vLLM's attention for CPUs takes heads of 32 numbers and more, so the tiny checkpoints of the tests lend their
families' shapes, with wider heads and random weights; SmolLM2-135M is checked too where its package is
installed. vLLM continues each prompt greedily; we then compute the log-probabilities of the same tokens, and
those of the likeliest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the Python that has vLLM has no gymllm
    from gymllm_trainers.models import Decoder, DecoderConfig, LoadedModel, Params

HEAD, NEW, RANK = 32, 16, 3
LARGEST = 1e-3
"""Largest difference of log-probabilities in float32."""
ROUNDING = 2
"""In bfloat16, how many times farther from what float32 gives vLLM may be than we are: logits from 4 to 8
alone are rounded by as much as 0.016 there."""
QUESTION = "What is the capital of France?"


def write(root: Path, fixtures: Path) -> None:
    """Writes every family's folders: the model in both types, in shards, adapters beside it, and merged."""
    from gymllm.errors import ModelError
    from gymllm_trainers.models import build_decoder, load_model

    for checkpoint in sorted(fixtures.glob("tiny_*")):
        try:
            model = load_model(checkpoint)
        except ModelError:  # a reward model has no head that generates
            continue
        config = wide(model.config)
        params = random_params(config)
        model = dataclasses.replace(model, config=config, params=params)
        write_model(root / checkpoint.name, model, build_decoder(config, params))
    try:
        model = load_model("smollm2")
    except ModelError as error:
        print(f"SmolLM2-135M isn't checked: {error}")
    else:
        write_model(root / "smollm2", model, model.decoder())


def wide(config: DecoderConfig) -> DecoderConfig:
    """The same family with heads that vLLM's attention computes."""
    if config.qkv_bias:  # vLLM refuses Qwen2 with a window in some of its layers
        config = dataclasses.replace(config, sliding_window=None, sliding_layers=())
    return dataclasses.replace(
        config,
        head_dim=HEAD,
        hidden_size=HEAD * config.num_attention_heads,
        intermediate_size=128,
        expert_size=64 if config.num_experts else 0,
    )


def random_params(config: DecoderConfig) -> Params:
    """Weights whose every part shows in the logits."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from gymllm_trainers.models import decoder_params, random_decoder

    generator = np.random.default_rng(0)

    def draw(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        noise = generator.normal(size=leaf.shape)
        if name.endswith("norm"):
            noise = 0.2 * noise + (0 if config.norm_offset else 1)
        elif name.endswith("bias"):
            noise *= 0.3
        else:
            noise *= leaf.shape[-2 if name != "embedding" else -1] ** -0.5 * 1.5
        return jnp.asarray(noise, jnp.float32)

    shapes = decoder_params(nnx.eval_shape(lambda: random_decoder(config, seed=0)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def write_model(folder: Path, model: LoadedModel, decoder: Decoder) -> None:
    """Writes one model in all the ways that we write models."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from gymllm import Message
    from gymllm_trainers.models import decoder_params, merge_adapters, save_adapters, save_model
    from gymllm_trainers.models.decoder import LoRAParam

    def save(kind: str, params: Params, max_shard_bytes: int = 2**31) -> None:
        save_model(
            folder / kind,
            model.config,
            params,
            model.tokenizer,
            max_shard_bytes=max_shard_bytes,
        )

    params = decoder_params(decoder)
    save("float32", params)
    save("shards", params, max_shard_bytes=max(50_000, 2 * model.config.parameters))
    save("bfloat16", jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    decoder.add_adapters(rank=RANK, alpha=2.0 * RANK, rngs=nnx.Rngs(0))
    for seed, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(decoder, LoRAParam))):
        noise = np.random.default_rng(seed).normal(0, 0.05, variable[...].shape)
        variable[...] = jnp.asarray(noise, jnp.float32)
    save_adapters(folder / "adapters", decoder, str(folder / "float32"))
    save("merged", decoder_params(merge_adapters(decoder)))

    generator = np.random.default_rng(1)
    template = model.tokenizer.template
    assert template is not None, "every checkpoint here has one"
    text = template.render([Message(role="user", content=QUESTION)], add_generation_prompt=True)
    chat = model.tokenizer.encode(text, allow_special=True)
    prompts = [generator.integers(0, model.config.vocab_size, size).tolist() for size in (3, 24)]
    (folder / "prompts.json").write_text(json.dumps([*prompts, [int(i) for i in chat]]))


# ------------------------------------------------------------------ in the Python that has vLLM


def judge(root: Path) -> None:
    """Has vLLM continue every folder's prompts; leaves vllm.json in each."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an error is this process's own
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    (root / "version.txt").write_text(vllm.__version__)
    for prompts in sorted(root.glob("*/prompts.json")):
        asked: list[list[int]] = json.loads(prompts.read_text())
        for folder in sorted(path for path in prompts.parent.iterdir() if path.is_dir()):
            try:
                found = continued(folder, asked)
            except Exception as error:
                traceback.print_exc()
                lines = str(error).strip().splitlines() or [""]
                found = {"error": f"{type(error).__name__}: {lines[0]}"}
            (folder / "vllm.json").write_text(json.dumps(found))
            print(f"{folder.relative_to(root)}: {found.get('error', 'done')}", file=sys.stderr)
            with contextlib.suppress(Exception):  # there may be nothing to clean up
                cleanup_dist_env_and_memory()


def continued(folder: Path, prompts: list[list[int]]) -> dict[str, object]:
    """Tokens that vLLM generates, log-probabilities of them and of the prompt's, and a conversation
    as its tokenizer has it."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if adapted(folder) else {}
    llm = LLM(
        str(folder.with_name("float32") if adapted(folder) else folder),
        dtype=computed_in(folder),
        max_model_len=128,
        max_num_seqs=len(prompts),
        enforce_eager=True,
        enable_prefix_caching=False,
        **lora,
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(
            temperature=0,
            max_tokens=NEW,
            logprobs=0,
            # vLLM 0.32 for CPUs can't with adapters: it takes the prompt's tokens for requests.
            prompt_logprobs=None if adapted(folder) else 0,
            ignore_eos=True,
        ),
        lora_request=LoRARequest("adapters", 1, str(folder)) if adapted(folder) else None,
        use_tqdm=False,
    )
    conversation = [{"role": "user", "content": QUESTION}]
    chat = llm.get_tokenizer().apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    generated = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs: list[list[float]] = []
    for output, prompt, ids in zip(outputs, prompts, generated, strict=True):
        known = [*zip(output.outputs[0].logprobs, ids, strict=True)]
        if not adapted(folder):
            known[:0] = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        logprobs.append([each[token].logprob for each, token in known])
    return {"ids": generated, "logprobs": logprobs, "chat": chat}


def adapted(folder: Path) -> bool:
    """Whether a folder holds adapters alone."""
    return folder.name == "adapters"


def computed_in(folder: Path) -> str:
    """The type that a folder's model is computed in."""
    return "bfloat16" if folder.name == "bfloat16" else "float32"


# ------------------------------------------------------------------ here again


def compare(root: Path) -> bool:
    """Prints each folder's largest difference, or vLLM's own error; whether none was too large."""
    from gymllm_trainers.models import load_adapters, load_model

    fine = True
    print(f"vLLM {(root / 'version.txt').read_text()}: largest difference of log-probabilities")
    for prompts in sorted(root.glob("*/prompts.json")):
        asked: list[list[int]] = json.loads(prompts.read_text())
        for folder in sorted(path for path in prompts.parent.iterdir() if path.is_dir()):
            name = f"{folder.relative_to(root)!s:32}"
            recorded = folder / "vllm.json"
            found: dict[str, Any] = {"error": "it ended"}
            if recorded.exists():
                found = json.loads(recorded.read_text())
            if "error" in found:
                print(f"{name} can't: {found['error']}")
                continue
            model = load_model(folder.with_name("float32") if adapted(folder) else folder)
            decoder = model.decoder()
            if adapted(folder):
                load_adapters(folder, decoder)
            exact = [logprobs(decoder, *each) for each in zip(asked, found["ids"], strict=True)]
            difference, margin = differences(exact, asked, found)
            allowed, note = LARGEST, ""
            if computed_in(folder) == "bfloat16":
                rounded = model.decoder(compute_dtype="bfloat16")
                ours = [logprobs(rounded, *each) for each in zip(asked, found["ids"], strict=True)]
                largest = max(
                    np.abs(a - b).max() for (_, a), (_, b) in zip(ours, exact, strict=True)
                )
                allowed, note = ROUNDING * float(largest), f" (ours {largest:.1e})"
            faults = [] if difference < allowed else [f"more than {allowed:.1e}"]
            if margin > allowed:
                faults.append(f"another token is likelier by {margin:.1e}")
            if found["chat"] != asked[-1]:
                faults.append("its tokenizer gives other ids")
            fine = fine and not faults
            print(f"{name} {difference:.1e}{note}{'   <-- ' if faults else ''}{', '.join(faults)}")
    return fine


def logprobs(
    decoder: Decoder, prompt: list[int], generated: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [T] of all tokens but the first, and of the likeliest in their places."""
    import jax
    import jax.numpy as jnp

    ids = jnp.asarray([[*prompt, *generated]], jnp.int32)
    positions = jnp.arange(ids.shape[1])[None]
    hidden = decoder.hidden(ids, positions, jnp.full_like(ids, ids.shape[1]))
    logits = decoder.logits(hidden)[0, :-1]
    all_VT = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32))).T
    return all_VT.max(0), all_VT[np.asarray(ids)[0, 1:], np.arange(all_VT.shape[1])]


def differences(
    exact: list[tuple[np.ndarray, np.ndarray]],
    prompts: list[list[int]],
    found: dict[str, list[list[float]]],
) -> tuple[float, float]:
    """The largest difference of log-probabilities, and the largest by which a token that vLLM chose is less
    likely than our likeliest (0 where both choose the same)."""
    largest = margin = 0.0
    for (likeliest, ours), prompt, theirs in zip(exact, prompts, found["logprobs"], strict=True):
        largest = max(largest, float(np.abs(ours[-len(theirs) :] - np.asarray(theirs)).max()))
        margin = max(margin, float((likeliest - ours)[len(prompt) - 1 :].max()))
    return largest, margin
