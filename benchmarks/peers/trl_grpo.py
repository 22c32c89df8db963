"""TRL's GRPO update on recorded groups, on a CPU: python trl_grpo.py MODEL_FOLDER TRACE.json ROWS THREADS.

GRPOTrainer's own loss on inputs as its generation prepares them (prompts padded on the left, completions on
the right, each to the longest of ROWS sequences), backward, and the optimizer step. Its defaults, but float32
and no checkpointing of activations, which would only cost time here.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from answering import answer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class Peer:
    """One trainer."""

    def __init__(self, folder: str, trace: str, rows: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.groups: list[list[dict[str, Any]]] = json.loads(Path(trace).read_text())
        self.rows = rows
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        arguments = GRPOConfig(
            tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            num_generations=8,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
        )
        self.trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
            processing_class=tokenizer,
        )
        self.model = self.trainer.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, betas=(0.9, 0.99), weight_decay=1e-4
        )

    def step(self, groups: list[int], logprobs: bool = False) -> dict[str, Any]:
        """One optimizer step on groups of the trace; with `logprobs`, only the first member's."""
        members = [member for index in groups for member in self.groups[index]]
        if logprobs:
            return {"logprobs": self.logprobs(members[0])}
        starts = range(0, len(members), self.rows)
        started = time.perf_counter()
        trained = sum(sum(member["mask"]) for member in members)
        self.trainer.current_gradient_accumulation_steps = len(starts)
        self.trainer.args.steps_per_generation = len(starts)
        computed = 0
        for start in starts:
            inputs = self.inputs(members[start : start + self.rows], trained)
            computed += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
            loss = self.trainer.compute_loss(self.model, inputs)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "seconds": time.perf_counter() - started,
            "trained": trained,
            "computed": computed,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def inputs(self, members: list[dict[str, Any]], trained: int) -> dict[str, torch.Tensor]:
        """As its generation prepares them."""
        prompt = max(len(member["prompt"]) for member in members)
        completion = max(len(member["completion"]) for member in members)
        shapes = {"prompt": (len(members), prompt), "completion": (len(members), completion)}
        made = {
            f"{part}_{kind}": torch.zeros(shape, dtype=torch.long)
            for part, shape in shapes.items()
            for kind in ("ids", "mask")
        }
        made["tool_mask"] = torch.zeros(shapes["completion"], dtype=torch.long)
        for row, member in enumerate(members):
            size, before = len(member["completion"]), prompt - len(member["prompt"])
            made["prompt_ids"][row, before:] = torch.tensor(member["prompt"])
            made["prompt_mask"][row, before:] = 1
            made["completion_ids"][row, :size] = torch.tensor(member["completion"])
            made["completion_mask"][row, :size] = 1
            made["tool_mask"][row, :size] = torch.tensor(member["mask"])
        made["advantages"] = torch.tensor([member["advantage"] for member in members])
        made["num_items_in_batch"] = torch.tensor(float(trained))
        return made

    def logprobs(self, member: dict[str, Any]) -> list[float]:
        """Log-probability of each token of a completion, as its loss sees them."""
        inputs = self.inputs([member], 1)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        with torch.no_grad():
            values = self.trainer._get_per_token_logps_and_entropies(
                self.model, ids, torch.ones_like(ids), inputs["completion_ids"].shape[1]
            )[0]
        return values[0].tolist()


if __name__ == "__main__":
    folder, trace, rows, threads = sys.argv[1:]
    answer({"step": Peer(folder, trace, int(rows), int(threads)).step})
