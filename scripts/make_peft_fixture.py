"""Writes the adapters that tests/trainers/test_peft.py reads, as the package peft saves them.

Run it in an environment of its own, and only when a fixture has to change:

    python -m venv .venv-transformers
    .venv-transformers/bin/pip install torch transformers peft numpy
    .venv-transformers/bin/python scripts/make_peft_fixture.py

It writes, under tests/trainers/fixtures/peft/, adapters of the checkpoint tiny_qwen3 and beside each the
logits that transformers computes with them:

    plain/      one rank and scale on every linear
    patterns/   rsLoRA, ranks and alphas by pattern, two of three layers
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

FIXTURES = Path(__file__).parent.parent / "tests" / "trainers" / "fixtures"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "plain": peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=12, target_modules=LINEARS, lora_dropout=0.1
    ),
    "patterns": peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj", "down_proj"],
        use_rslora=True,
        layers_to_transform=[0, 2],
        rank_pattern={"v_proj": 4, "layers.2.self_attn.q_proj": 1},
        alpha_pattern={"down_proj": 3},
    ),
}


def write(name: str, config: peft.LoraConfig) -> None:
    """Saves one set of random adapters and the logits with them."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        FIXTURES / "tiny_qwen3", dtype=torch.float32, attn_implementation="eager"
    )
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    model.eval()
    folder = FIXTURES / "peft" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    # The machine's own path to the base has no place in a fixture.
    settings = folder / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(FIXTURES / "tiny_qwen3"), "tiny_qwen3"))
    ids = torch.randint(0, 320, (2, 12), generator=generator)
    with torch.no_grad():
        logits = model(ids).logits
    np.savez_compressed(folder / "logits.npz", ids=ids.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    for name, config in CONFIGS.items():
        write(name, config)
    print("wrote", *sorted(str(path) for path in (FIXTURES / "peft").rglob("*.*")), sep="\n  ")
