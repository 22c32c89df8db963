"""Records what `gymllm-train --plan` says of well-known models, in docs/plans/.

    JAX_PLATFORMS=cpu TPU_LIBRARY_PATH=FOLDER/libtpu/libtpu.so python scripts/record_plans.py [NAME ...]

On demand: each compiles for minutes, and needs libtpu (docs/scale.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from gymllm_trainers.config import load_config
from gymllm_trainers.plan_report import print_plan
from gymllm_trainers.plan_topology import plan_for

FOLDER = Path(__file__).parents[1] / "docs" / "plans"
COMMON = [
    "--model.compute-dtype", "bfloat16", "--model.remat", "full", "--engine.cache-dtype", "bfloat16",
    "--engine.context-length", "2048", "--engine.slots", "64", "--engine.cache-mb", "4096",
    "--rollout.group-size", "8", "--learner.groups-per-step", "64",
]  # fmt: skip
PLANS: dict[str, tuple[str, list[str]]] = {
    "qwen3-0.6b_v5e-4x4": ("v5e:4x4", ["--model.name", "Qwen/Qwen3-0.6B"]),
    "qwen3-8b_v5p-4x4x4": (
        "v5p:4x4x4",
        ["--model.name", "Qwen/Qwen3-8B", "--engine.tensor", "4"],
    ),
    "qwen3-32b_v5p-4x4x4": (
        "v5p:4x4x4",
        ["--model.name", "Qwen/Qwen3-32B", "--engine.tensor", "4", "--mesh.tensor", "4"],
    ),
    "qwen3-32b_gpu-64xH100": (
        "gpu:64xH100",
        ["--model.name", "Qwen/Qwen3-32B", "--engine.tensor", "8", "--mesh.tensor", "8"],
    ),
}
PROGRAMS = {"qwen3-32b_v5p-4x4x4": ("gradient", "step")}
"""Where not all of them: its engine is compiled as the 8B model's is."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PLANS:
        topology, flags = PLANS[name]
        config = load_config([*COMMON, *flags])
        found = plan_for(config, topology, programs=PROGRAMS.get(name))
        gradient = found.programs.get("gradient", {})
        if found.topology.chip.kind == "tpu" and not gradient.get("kernels"):
            raise SystemExit(f"{name}: the gradient holds no Pallas kernel: not splash attention.")
        with (FOLDER / f"{name}.txt").open("w") as file:
            console = Console(file=file, width=110, highlight=False)
            said = " ".join([*COMMON, *flags])
            console.print(f"$ gymllm-train --plan {topology} {said}\n", soft_wrap=True)
            print_plan(found, config, console)
        print(name, flush=True)


if __name__ == "__main__":
    main()
