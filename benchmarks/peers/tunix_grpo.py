"""google-tunix's GRPO update on recorded groups: python tunix_grpo.py MODEL_FOLDER TRACE.json ROWS BUDGET.

Its own trainer, loss and packing, fed as its agentic learner feeds them: prompts padded on the left to the
longest prompt, completions on the right to the longest completion. BUDGET is its max_seq_token_per_tpu, and
ROWS how many padded sequences are computed at once. No reference model and no second forward pass (beta 0).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from answering import answer
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import algo_core, trainer
from tunix.rl import utils as rl_utils
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig
from tunix.rl.agentic.agentic_rl_learner import TrainExample
from tunix.sft.peft_trainer import TrainingConfig

EOS = -1
STEP = 64
"""Padded lengths are multiples of this."""


class Peer:
    """One model and its trainers, by mode and number of micro-batches in a step."""

    def __init__(self, folder: str, trace: str, rows: int, budget: int) -> None:
        shape = json.loads((Path(folder) / "config.json").read_text())
        config = qwen3.ModelConfig(
            num_layers=shape["num_hidden_layers"],
            vocab_size=shape["vocab_size"],
            embed_dim=shape["hidden_size"],
            hidden_dim=shape["intermediate_size"],
            num_heads=shape["num_attention_heads"],
            head_dim=shape["head_dim"],
            num_kv_heads=shape["num_key_value_heads"],
            rope_theta=shape["rope_theta"],
            norm_eps=shape["rms_norm_eps"],
            use_tied_embedding=shape["tie_word_embeddings"],
        )
        self.model = qwen3_params.create_model_from_safe_tensors(folder, config, dtype=jnp.float32)
        self.groups: list[list[dict[str, Any]]] = json.loads(Path(trace).read_text())
        self.rows, self.budget = rows, budget
        members = [member for group in self.groups for member in group]
        self.prompt = _up(max(len(member["prompt"]) for member in members))
        self.completion = _up(max(len(member["completion"]) for member in members))
        said = {i for member in members for part in ("prompt", "completion") for i in member[part]}
        # It takes every token of this id for padding, wherever it stands.
        self.pad = min(set(range(shape["vocab_size"])) - said)
        self.trainers: dict[int, trainer.Trainer] = {}

    def step(self, groups: list[int], packed: bool, logprobs: bool = False) -> dict[str, Any]:
        """One optimizer step on groups of the trace; with `logprobs`, also each token's, before it."""
        members = [member for index in groups for member in self.groups[index]]
        if logprobs:
            return {"logprobs": self.logprobs(members[0])}
        started = time.perf_counter()
        padded = self.padded(members)
        examples = [one for (one,) in self.pack(padded)] if packed else padded
        one = self.trainer_of(len(examples))
        one.train(examples)
        jax.block_until_ready(nnx.state(self.model))
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "trained": int(sum(np.asarray(each.completion_mask).sum() for each in examples)),
            "tokens": sum(self.real(each) for each in examples),
            "computed": sum(each.prompt_ids.size + each.completion_ids.size for each in examples),
            "micro_batches": len(examples),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def padded(self, members: list[dict[str, Any]]) -> list[TrainExample]:
        """As its learner pads them, `rows` at a time."""
        made = []
        for start in range(0, len(members), self.rows):
            part = members[start : start + self.rows]
            prompts = np.full((len(part), self.prompt), self.pad, np.int32)
            ids = np.full((len(part), self.completion), self.pad, np.int32)
            mask = np.zeros((len(part), self.completion), np.int32)
            old = np.zeros((len(part), self.completion), np.float32)
            for row, member in enumerate(part):
                size = len(member["completion"])
                prompts[row, self.prompt - len(member["prompt"]) :] = member["prompt"]
                ids[row, :size] = member["completion"]
                mask[row, :size] = member["mask"]
                old[row, :size] = member["logprobs"]
            made.append(
                TrainExample(
                    prompt_ids=jnp.asarray(prompts),
                    prompt_mask=jnp.asarray(prompts != self.pad),
                    completion_ids=jnp.asarray(ids),
                    completion_mask=jnp.asarray(mask),
                    advantages=jnp.array([member["advantage"] for member in part], jnp.float32),
                    ref_per_token_logps=None,
                    old_per_token_logps=jnp.asarray(old),
                    policy_version=np.zeros(len(part), np.int32),
                )
            )
        return made

    def real(self, example: TrainExample) -> int:
        """Tokens of an example that are no padding."""
        if example.segment_ids is not None:
            return int((np.asarray(example.segment_ids) > 0).sum())
        ids = (example.prompt_ids, example.completion_ids)
        return int(sum((np.asarray(part) != self.pad).sum() for part in ids))

    def pack(self, examples: list[TrainExample]) -> Any:
        """Its packing, which keeps of each completion as many tokens as its mask has ones."""
        return rl_utils.pack_sequences(iter([[one] for one in examples]), self.budget, self.pad)

    def trainer_of(self, micro_batches: int) -> trainer.Trainer:
        """Its trainer, which takes an optimizer step every so many micro-batches."""
        if micro_batches not in self.trainers:
            algorithm = GRPOConfig(num_generations=8, beta=0.0, loss_agg_mode="token-mean")
            algorithm.temperature = 1.0
            made = trainer.Trainer(
                self.model,
                optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, b1=0.9, b2=0.99)),
                TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=micro_batches),
                custom_checkpoint_metadata_fn=dict,
            )
            made.is_managed_externally = True
            pad = self.pad
            made.with_loss_fn(
                lambda model, train_example, algo_config: algo_core.grpo_loss_fn(
                    model, train_example, algo_config=algo_config, pad_id=pad, eos_id=EOS
                ),
                has_aux=True,
            )
            made.with_gen_model_input_fn(
                lambda one: {"train_example": one, "algo_config": algorithm}
            )
            self.trainers.clear()  # the moments of two would not fit beside each other
            self.trainers[micro_batches] = made
        return self.trainers[micro_batches]

    def logprobs(self, member: dict[str, Any]) -> list[float]:
        """Log-probability of each token of a completion, as its loss sees them."""
        from tunix.rl import common

        (one,) = self.padded([member])
        graph, state = nnx.split(self.model)
        values = common.compute_per_token_logps(
            graph, state, one.prompt_ids, one.completion_ids, pad_id=self.pad, eos_id=EOS
        )
        return np.asarray(values)[0, : len(member["completion"])].tolist()


def _up(size: int) -> int:
    return -(-size // STEP) * STEP


if __name__ == "__main__":
    folder, trace, rows, budget = sys.argv[1:]
    answer({"step": Peer(folder, trace, int(rows), int(budget)).step})
