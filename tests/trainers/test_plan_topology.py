"""`--plan TOPOLOGY`: names, arithmetic, what is read out of compiled programs, and the compiler itself."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from gymllm.errors import ConfigError, MissingExtraError, UnknownNameError
from gymllm_trainers.cli import train
from gymllm_trainers.config import load_config
from gymllm_trainers.models.sharding import MESH_AXES, param_shardings
from gymllm_trainers.plan import SHAPES
from gymllm_trainers.plan_chips import TPUS, parse_topology, take_topology
from gymllm_trainers.plan_estimate import (
    FULLEST,
    Layout,
    Work,
    best_layouts,
    elements,
    estimate,
    smallest,
    step_flops,
)
from gymllm_trainers.plan_hlo import summarise
from gymllm_trainers.plan_topology import plan_for

LIBTPU = "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "chip", "devices"),
    [
        ("v5e:4x4", "v5e", 16),
        ("v5p:4x4x4", "v5p", 64),
        ("v6e:16x16", "v6e", 256),
        ("tpu7x:2x2x1", "tpu7x", 8),
        ("cpu:8", "cpu", 8),
        ("gpu", "H100", 1),
        ("gpu:H200", "H200", 1),
        ("gpu:8xA100", "A100", 8),
    ],
)
def test_topologies_are_read(name: str, chip: str, devices: int) -> None:
    found = parse_topology(name)
    assert (found.chip.name, found.devices) == (chip, devices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5x:4x4", r"Unknown topology 'v5x'\. Did you mean v5"),
        ("v5p:4x4", r"v5p chips are laid out takes 3 numbers, as in v5p:4x4x4"),
        ("v5e:4xfour", r"takes 2 numbers, as in v5e:4x4"),
        ("cpu:many", r"'many' is no number of devices"),
        ("gpu:8xH10", r"Unknown GPU 'H10'\. Did you mean H100"),
    ],
)
def test_topologies_that_are_none_are_refused(name: str, message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        parse_topology(name)


def test_the_topology_is_what_follows_plan() -> None:
    assert take_topology(["--plan", "cpu:8", "--seed", "1"]) == (
        ["--plan", "--seed", "1"],
        "cpu:8",
    )
    assert take_topology(["--plan=v5e:4x4"]) == (["--plan"], "v5e:4x4")
    assert take_topology(["--plan", "--seed", "1"]) == (["--plan", "--seed", "1"], None)
    assert take_topology(["--seed", "1"]) == (["--seed", "1"], None)


# ------------------------------------------------------------------ arithmetic


def work(name: str, *, longest: int = 2048, trained: int | None = None) -> Work:
    model = SHAPES[name]
    return Work(
        model=model,
        weight_bytes=4,
        compute_bytes=2,
        remat="full",
        trained=model.parameters if trained is None else trained,
        state_bytes=8,
        tokens=64 * longest,
        longest=longest,
        head_chunk=512,
    )


def layout(rows: int, row_tokens: int, **sizes: int) -> Layout:
    return Layout(
        mesh=tuple(sizes.get(axis, 1) for axis in MESH_AXES), rows=rows, row_tokens=row_tokens
    )


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"])
def test_one_device_keeps_every_parameter_and_many_a_share(name: str) -> None:
    model = SHAPES[name]
    assert elements(model, AbstractMesh((1,) * len(MESH_AXES), MESH_AXES)) == model.parameters
    divided = layout(1, 1, fsdp=16, tensor=4).abstract
    # Norms are whole on each; they are next to nothing.
    assert elements(model, divided) == pytest.approx(model.parameters / 64, rel=0.02)


def test_flops_of_a_step_by_hand() -> None:
    model = SHAPES["Qwen/Qwen3-8B"]
    a_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12_288
    a_token = 2 * (36 * a_layer + 4096 * 151_936) + 4 * 36 * 4096 * 2048 / 2
    found = step_flops(work("Qwen/Qwen3-8B"))
    assert found.model == pytest.approx(3 * a_token * 64 * 2048, rel=1e-3)
    assert found.computed == pytest.approx(4 * a_token * 64 * 2048, rel=1e-3)
    adapters = step_flops(work("Qwen/Qwen3-8B", trained=model.parameters // 100))
    assert 0.6 < adapters.model / found.model < 0.75


def test_memory_falls_with_devices_and_grows_with_tokens() -> None:
    one, chip = work("Qwen/Qwen3-8B"), TPUS["v5p"]
    few = estimate(one, layout(16, 4096, fsdp=16), chip)
    many = estimate(one, layout(64, 4096, fsdp=64), chip)
    more = estimate(one, layout(32, 4096, fsdp=16), chip)
    assert few.parameters == pytest.approx(8_190_735_360 * 4 / 16, rel=1e-3)
    assert few.optimizer == pytest.approx(2 * few.parameters)
    assert many.bytes < few.bytes < more.bytes
    assert few.links_s > more.links_s  # weights are gathered half as often


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("Qwen/Qwen3-0.6B", "v5e:4x4"),
        ("Qwen/Qwen3-8B", "v5p:4x4x4"),
        ("Qwen/Qwen3-32B", "v5p:4x4x4"),
        ("Qwen/Qwen3-30B-A3B", "v6e:8x8"),
    ],
)
def test_suggestions_fit_and_the_fastest_comes_first(name: str, topology: str) -> None:
    target = parse_topology(topology)
    found = best_layouts(work(name), target.chip, target.devices)
    assert found
    for one in found:
        assert math.prod(one.layout.mesh) == target.devices
        assert one.bytes <= FULLEST * target.chip.memory_bytes
        assert 0 < one.mfu <= 1
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)


def test_what_fits_nowhere_has_no_suggestion() -> None:
    target = parse_topology("v5e:2x2")
    assert best_layouts(work("Qwen/Qwen3-32B"), target.chip, target.devices) == []
    least = smallest(work("Qwen/Qwen3-32B"), target.chip, target.devices)
    assert least is not None
    assert least.bytes > target.chip.memory_bytes


# ------------------------------------------------------------------ compiled programs' text

HLO = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %s = f32[] add(%a, %a)
}

%fused.1 (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %g.1 = bf16[16,8]{1,0:T(8,128)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8]
}

%fused.2 (p: bf16[4,8]) -> bf16[16,8] {
  %p.2 = bf16[4,8]{1,0} parameter(0)
  ROOT %g.2 = bf16[16,8]{1,0:T(8,128)S(1)} all-gather(%p.2), channel_id=7, replica_groups=[2,4]<=[8]
}

%all-reduce-scatter.3 (p: f32[8,8]) -> f32[2,8] {
  %p.3 = f32[8,8]{1,0} parameter(0)
  %r = f32[8,8]{1,0} all-reduce(%p.3), channel_id=8, replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  ROOT %d = f32[2,8]{1,0} slice(%r)
}

%body (t: (s32[], bf16[16,8])) -> (s32[], bf16[16,8]) {
  %t = (s32[], bf16[16,8]) parameter(0)
  %x = bf16[16,8]{1,0} fusion(%t), kind=kCustom, calls=%fused.1
  %y = bf16[16,8]{1,0} fusion(%t), kind=kCustom, calls=%fused.2
  %z = f32[2,8]{1,0} fusion(%t), kind=kCustom, calls=%all-reduce-scatter.3
  %k = bf16[4,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %o = (s32[], bf16[16,8]) tuple(%t, %x)
}

%condition (t: (s32[], bf16[16,8])) -> pred[] {
  %t.2 = (s32[], bf16[16,8]) parameter(0)
  %n = s32[]{:T(128)} constant(28)
  ROOT %c = pred[] compare(%t.2, %n), direction=LT
}

%endless (t: (s32[], bf16[16,8])) -> pred[] {
  %t.3 = (s32[], bf16[16,8]) parameter(0)
  ROOT %c.2 = pred[] compare(%t.3, %t.3), direction=LT
}

%body.2 (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t.4 = (s32[], f32[4]) parameter(0)
  %q = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%t.4), channel_id=9
  ROOT %q.2 = f32[4]{0} collective-permute-done(%q)
}

ENTRY %main (p: bf16[4,8]) -> f32[4] {
  %p.5 = bf16[4,8]{1,0} parameter(0)
  %w = (s32[], bf16[16,8]) while(%p.5), condition=%condition, body=%body
  %w.2 = (s32[], f32[4]) while(%w), condition=%endless, body=%body.2
  ROOT %e = f32[100]{0} all-reduce(%w), channel_id=11, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}
"""


def test_collectives_are_counted_as_often_as_their_loops_run() -> None:
    found = summarise(HLO, devices=8)
    assert found.kernels == 1
    assert found.unknown_loops == 1
    by_kind = {kind: (one.count, one.sent_bytes) for kind, one in found.collectives.items()}
    assert by_kind == {
        # One gather in two parts, 28 times; a device sends 3 of 4 parts of 16 x 8 bfloat16.
        "all-gather": (28, 28 * 16 * 8 * 2 * 3 / 4),
        "reduce-scatter": (28, 28 * 8 * 8 * 4 * 3 / 4),
        "collective-permute": (1, 16),
        "all-reduce": (1, 2 * 400 * 7 / 8),
    }


# ------------------------------------------------------------------ plans

SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def flags(folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps(SMALL))
    return [
        *("--model.name", str(folder), "--model.compute-dtype", "bfloat16"),
        *("--model.remat", "full", "--learner.rows", "4", "--learner.row-tokens", "2048"),
        "--learner.no-share-prefixes",
    ]


def test_a_gpu_is_planned_by_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["--plan", "gpu:4xH100", *flags(tmp_path)]) == 0
    said = capsys.readouterr().out
    for part in ("fsdp 4; 4 rows of 2,048", "MFU at most", "nothing is compiled for a GPU"):
        assert part in said
    assert "--learner.rows 8 --learner.row-tokens 2048: " in said


def test_a_plan_leaves_the_log_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(["--model.name", "HuggingFaceTB/SmolLM2-135M-Instruct"])
    with caplog.at_level(logging.WARNING):
        plan_for(config, "gpu:8xA100", programs=())
        assert not caplog.records, "meshes that are only tried are no news"
        shape = replace(SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"], vocab_size=322)
        param_shardings(shape, AbstractMesh((1, 1, 3, 1, 1), MESH_AXES))
    assert "kept whole" in caplog.text


def test_settings_that_can_not_be_used_there_are_said(tmp_path: Path) -> None:
    config = load_config([*flags(tmp_path), "--mesh.tensor", "3"])
    found = plan_for(config, "gpu:4xH100")
    assert found.own is None
    assert "tensor 3" in found.refused
    assert found.suggestions


@pytest.mark.parametrize("topology", ["cpu:8", "gpu:8"])
def test_a_mesh_that_is_refused_is_answered_with_others_and_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], topology: str
) -> None:
    assert train(["--plan", topology, *flags(tmp_path), "--mesh.tensor", "3"]) == 1
    said, error = capsys.readouterr()
    assert f"can't start on {topology}: mesh.tensor 3 takes a multiple of 3 devices" in error
    assert "The nearest mesh that works: --mesh.tensor 4." in error
    assert "nan" not in said
    suggested = [line.split(":")[0].split() for line in said.splitlines() if "  --mesh" in line]
    assert suggested
    for flag in suggested:  # each is one that the planner takes
        assert plan_for(load_config([*flags(tmp_path), *flag]), topology, programs=()).own


def test_a_model_of_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs the model's shape, .* 'nobody/knows'"):
        plan_for(load_config(["--model.name", "nobody/knows"]), "gpu")


@pytest.mark.skipif(LIBTPU, reason="libtpu is installed")
def test_the_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"gymllm-trainers\[tpu-plan\].*TPU_LIBRARY_PATH"):
        plan_for(load_config(flags(tmp_path)), "v5e:2x2")


@pytest.mark.slow
def test_eight_simulated_devices_are_compiled_for(tmp_path: Path) -> None:
    config = load_config([*flags(tmp_path), "--learner.rows", "8"])
    found = plan_for(config, "cpu:8")
    assert set(found.programs) == {"gradient", "step", "score", "engine"}
    gradient, step = found.programs["gradient"], found.programs["step"]
    parameters = elements(found.work.model, layout(1, 1, fsdp=8).abstract)
    assert gradient["held"]["parameters"] == gradient["held"]["gradient"] == 4 * parameters
    assert step["held"]["optimizer"] == pytest.approx(8 * parameters, rel=1e-3)
    assert gradient["in_place"] >= 4 * parameters  # the gradient is added to where it is
    assert gradient["collectives"]["all-gather"]["count"] > 4


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU, reason="needs libtpu: see docs/scale.md")
def test_a_tpu_is_compiled_for_without_one(tmp_path: Path) -> None:
    found = plan_for(load_config(flags(tmp_path)), "v5e:2x2", programs=("gradient",))
    gradient = found.programs["gradient"]
    # Forward, forward again, and two backward: splash attention, and nothing else is a kernel here.
    assert gradient["kernels"] == 4
    assert gradient["unknown_loops"] == 0
    parameters = elements(found.work.model, layout(1, 1, fsdp=4).abstract)
    # Each gradient is scattered once, in float32; norms are summed.
    scattered = gradient["collectives"]["reduce-scatter"]["sent_bytes"]
    assert scattered == pytest.approx(3 * 4 * parameters, rel=0.01)
    assert gradient["temporaries"] < 200 * 2**20
    assert found.fits
