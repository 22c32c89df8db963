"""How a plan for a topology is shown."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.table import Table

from gymllm.errors import RunError
from gymllm_trainers.config import TrainConfig
from gymllm_trainers.plan_chips import parse_topology
from gymllm_trainers.plan_estimate import FULLEST, Estimate, smallest, step_flops
from gymllm_trainers.plan_topology import TopologyPlan, beside, plan_for


def show(config: TrainConfig, topology: str) -> None:
    """Prints the plan.

    Raises:
        ConfigError: The topology's name, or a setting, can't be used; or the model's shape isn't known.
        MissingExtraError: The compiler isn't installed; says what to install.
        RunError: It broke; or, once the plan is printed, the run can't start on these devices as it is set.
    """
    # Nothing is computed here: this machine's devices, and a TPU that libtpu would look for, stay alone.
    jax.config.update("jax_platforms", "cpu")
    console = Console(highlight=False)
    target = parse_topology(topology)
    if target.compiles:
        console.print(f"Compiling for {topology}: minutes for a large model.", style="dim")
    found = plan_for(config, topology)
    print_plan(found, config, console)
    if found.refused:
        raise RunError(f"as set, the run can't start on {topology}: {found.refused}")


def print_plan(found: TopologyPlan, config: TrainConfig, console: Console) -> None:
    """Prints it as a table, and what to change."""
    chip, target = found.topology.chip, found.topology
    table = Table(title=f"Plan of {config.model.name} on {target.name}", title_style="bold")
    for column in ("part", "what", "how much"):
        table.add_column(column)
    last = ""
    for part, what, much in _rows(found, config):
        if part != last and last:
            table.add_section()
        table.add_row(part if part != last else "", what, much)
        last = part
    console.print(table)
    if not target.compiles:
        console.print("By arithmetic alone: nothing is compiled for a GPU that isn't here.")
    elif not found.programs:
        why = "Nothing fits, so nothing" if chip.memory_bytes else "Nothing"
        console.print(f"! {why} was compiled.")
    if chip.kind == "tpu" and found.programs.get("gradient", {}).get("kernels") == 0:
        console.print("! The gradient holds no Pallas kernel: attention takes the slow way there.")
    if chip.kind != "cpu":
        console.print(f"Peaks: {chip.source}. Times are bounds, not measurements.")
    for line in _suggested(found):
        console.print(line, soft_wrap=True)  # flags are there to be copied


def _rows(found: TopologyPlan, config: TrainConfig) -> Iterator[tuple[str, str, str]]:
    target, work = found.topology, found.work
    shown = found.own or found.compiled
    yield "devices", target.chip.name, f"{target.devices:,}"
    yield "model", "parameters", f"{work.model.parameters / 1e6:,.1f} M"
    yield "model", "trained", f"{work.trained / 1e6:,.1f} M"
    if shown is None:
        least = smallest(work, target.chip, target.devices)
        if least is not None:
            yield "layout", "that holds the least", str(least.layout)
            yield from _estimated_memory(least, found.engine_bytes)
        if target.chip.memory_bytes:
            yield "memory", "a device has", _size(target.chip.memory_bytes)
            yield "memory", "fits", "no"
        return
    layout = shown.layout
    yield "layout", "mesh and micro-batch", str(layout)
    yield "layout", "token budget", f"{layout.tokens:,} a micro-batch"
    micro = -(-work.tokens // layout.tokens)
    yield "layout", "a step", f"at most {work.tokens:,} tokens: {micro} micro-batches"
    if found.programs:
        yield from _compiled_memory(found)
    else:
        yield from _estimated_memory(shown, found.engine_bytes)
    limit = target.chip.memory_bytes
    if limit:
        yield "memory of a device", "there is", _size(limit)
        yield "memory of a device", "fits", "yes" if found.fits else "no"
    yield from _programs(found)
    yield from _time(found, shown)


def _estimated_memory(one: Estimate, engine_bytes: float) -> Iterator[tuple[str, str, str]]:
    part = "memory of a device"
    yield part, "parameters", _size(one.parameters)
    yield part, "optimizer", _size(one.optimizer)
    yield part, "gradient", _size(one.gradient)
    yield part, "activations and temporaries, about", _size(one.temporaries)
    if engine_bytes:
        yield part, "engine: weights and KV pages", _size(engine_bytes)
    yield part, "together", _size(one.bytes + engine_bytes)


def _compiled_memory(found: TopologyPlan) -> Iterator[tuple[str, str, str]]:
    part = "memory of a device"
    held: dict[str, float] = {}
    for name in ("step", "gradient"):
        held |= found.programs.get(name, {}).get("held", {})
    for kind in ("parameters", "optimizer", "gradient", "micro-batch"):
        if kind in held:
            yield part, kind, _size(held[kind])
    for name in ("gradient", "step", "score"):
        program = found.programs.get(name, {})
        if "temporaries" in program:
            what = "activations and temporaries" if name != "step" else "new parameters and state"
            yield part, f"{what}: {name}", _size(beside(program))
    engine = found.programs.get("engine", {})
    for kind, size in engine.get("held", {}).items():
        yield part, f"engine: {kind}", _size(size)
    if "temporaries" in engine:
        yield part, "engine: temporaries", _size(engine["temporaries"])
    for name, program in found.programs.items():
        if "error" in program:
            yield part, f"{name}: refused", program["error"]
    yield part, "at most, together", _size(found.held_bytes)


def _programs(found: TopologyPlan) -> Iterator[tuple[str, str, str]]:
    for name, program in found.programs.items():
        if "error" in program:
            continue
        if program["kernels"]:
            yield f"program: {name}", "Pallas kernels", str(program["kernels"])
        for kind, one in program["collectives"].items():
            much = f"{one['count']:,}, {_size(one['sent_bytes'])} sent by a device"
            yield f"program: {name}", kind, much
        if program["unknown_loops"]:
            loops = f"{program['unknown_loops']} with collectives, counted once"
            yield f"program: {name}", "loops of unknown length", loops
        yield f"program: {name}", "compiled in", f"{program['seconds']:.0f} s"


def _time(found: TopologyPlan, shown: Estimate) -> Iterator[tuple[str, str, str]]:
    flops = step_flops(found.work)
    yield "a step", "FLOPs of the model", f"{flops.model:.3g}"
    yield "a step", "with what is computed again", f"{flops.computed:.3g}"
    if math.isnan(found.topology.chip.flops):
        yield "a step", "time", "not predicted: a CPU's peak isn't known"
        return
    links_s = shown.links_s
    gradient = found.programs.get("gradient", {})
    if "collectives" in gradient and not gradient["unknown_loops"]:
        micro = -(-found.work.tokens // shown.layout.tokens)
        sent = sum(one["sent_bytes"] for one in gradient["collectives"].values())
        links_s = micro * sent / found.topology.chip.link_bandwidth
    parts = (shown.compute_s, shown.memory_s, links_s)
    yield "a step", "computing, at the peak", _seconds(shown.compute_s)
    yield "a step", "reading and writing memory", _seconds(shown.memory_s)
    yield "a step", "sending between devices", _seconds(links_s)
    yield (
        "a step",
        "time",
        f"{_seconds(max(parts))} if all overlaps, {_seconds(sum(parts))} if nothing does",
    )
    peak = found.topology.chip.flops * math.prod(shown.layout.mesh)
    low, high = (flops.model / peak / seconds for seconds in (sum(parts), max(parts)))
    yield "a step", "MFU at most", f"{high:.0%}; {low:.0%} if nothing overlaps"


def _suggested(found: TopologyPlan) -> Iterator[str]:
    if not found.suggestions:
        if found.topology.chip.memory_bytes:
            yield (
                "No mesh of these devices fits: set model.remat full, model.dtype bfloat16, "
                "optimizer.state_dtype int8 or model.lora_rank, or take more devices."
            )
        return
    timed = not math.isnan(found.topology.chip.flops)
    if timed:
        yield f"Best by arithmetic, filling at most {FULLEST:.0%} of a device:"
    else:
        yield f"Meshes of {found.topology.devices} devices, those that hold the least first:"
    for one in found.suggestions:
        flags = " ".join(
            f"--mesh.{axis} {size}"
            for axis, size in one.layout.sizes.items()
            if size > 1 or axis == "fsdp"
        )
        speed = f", {_seconds(one.step_s)} a step, MFU at most {one.mfu:.0%}" if timed else ""
        yield (
            f"  {flags} --learner.rows {one.layout.rows} --learner.row-tokens {one.layout.row_tokens}: "
            f"{_size(one.bytes + found.engine_bytes)}{speed}"
        )


def _size(size_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:,.2f} {unit}"
    return f"{size_bytes:.0f} B"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
