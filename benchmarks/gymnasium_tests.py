"""Gymnasium's own tests of vector environments, wrappers and registration, run on gymllm.

Three runs put an `EnvPool`, with each worker, in the place of `SyncVectorEnv` and `AsyncVectorEnv`; three put
an environment of gymllm in the place of CartPole and Pendulum, and gymllm's wrappers in that of Gymnasium's.
What does not pass in a first run, which changes nothing, is left out. The tests come from a checkout near the
installed version, as the sdist has two of them: `python benchmarks/gymnasium_tests.py path/to/Gymnasium`.
"""

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import gymnasium
import pytest

from gymllm import wrappers
from gymllm.pool import WORKERS, EnvPool

ENVS = ("gymllm/FrozenLake-v0", "gymllm/Arithmetic-v0", "gymllm/Gym-v0")
REPLACED = "CartPole-v1|Pendulum-v1"
POOL_FILES = """vector wrappers/vector wrappers/test_normalize_observation.py utils/test_performance.py
    utils/test_save_video.py envs/registration/test_make_vec.py"""
ENV_FILES = """wrappers envs/test_envs.py envs/registration utils/test_env_checker.py utils/test_play.py
    utils/test_save_video.py test_core.py"""
INSIDE = "looks into .envs; the pool's environments may be in other processes"
PAST_END = "steps past the episode's end; the pool resets by itself only where asked to"
CARTPOLE = "about CartPole's class, arguments, attributes or spec, or Gymnasium's own specs"
NOT_APPLICABLE = {
    "(timeout|out_of_order)_async": "the pool has no split calls (step_async, step_wait)",
    "space_async_vector_env_shared|^gymllm.*vec_num_envs.async": "needs memory of a fixed size",
    "async_vector_subenv_error": "faults are `EnvBatchError`, on purpose, and no warnings",
    "(invalid_observation|obs_mode_diff|mixed.*(diff|_mode2))": "no observation_mode: one factory",
    "vector/utils/": "helpers of Gymnasium's, no vector environment",
    "metadata_sync|equivalence_with_wrapper|^[itp].*vec_(wrappers|with_spec_add)": INSIDE,
    "^thread.*(CarRacing.*-3-|render_async)": "pygame goes wrong in any threads, the pool's or not",
    "^gymllm.*(reward_accumulation|clip_reward_wr|loop_real_env)": "acts with integers, not texts",
    "^gymllm.*(skip_obs|trip_keeps|resize.*invalid|aware.*def|RescaleO|box_obs)": "is for numbers",
    "^gymllm.*::test_padding_type": "stacks observations as arrays",
    "^gymllm(.*_screen_size|/A.*(stack_size.[234]|delay_v.*[34])|/[AG].*(video_length|with_rgb))": PAST_END,
    "^gymllm.*stack_size_failures": "its bad padding, 'unknown', is a good text",
    "^gymllm.*(make.py::test_order_enf|full_integration|env_spec_pprint|no_arguments|with_render)": CARTPOLE,
    "^gymllm.*(vec_env_id|_vectorization|get_set_wrapper|vec_with_spec.*kwargs1?[89])": CARTPOLE,
}
"""Run and test, as a regular expression, to why the test says nothing about gymllm."""
results: dict[str, tuple[str, str]] = {}  # of the plug-in: test to its outcome and the reason


def in_turn(env_fns: list[Callable[[], Any]], folder: str) -> gymnasium.Env[Any, Any]:
    """Makes the i-th environment the i-th time, whatever process that is in."""
    turn = len(list(Path(folder).iterdir()))
    Path(folder, str(turn)).touch()
    return env_fns[turn % len(env_fns)]()


class SyncVectorEnv(EnvPool):
    """A pool with the constructor of Gymnasium's class; like that, it makes its environments at once."""

    where, made = "inline", 0

    def __init__(self, env_fns: Any, *, autoreset_mode: Any = "NextStep", **_: object) -> None:
        """Starts all, one by one. What is ignored says how Gymnasium would move observations."""
        SyncVectorEnv.made += 1
        each, self._counted = list(env_fns), tempfile.TemporaryDirectory()
        make = functools.partial(in_turn, each, self._counted.name)
        options: dict[str, Any] = {"worker": self.where, "text": False, "max_starts": 1}
        super().__init__(make, len(each), autoreset_mode=autoreset_mode, **options)
        self.call("render_mode")


AsyncVectorEnv = type("AsyncVectorEnv", (SyncVectorEnv,), {})  # told apart by tests of `make_vec`


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `play` tells the plug-in, which is this file."""
    _ = [parser.addoption(name) for name in ("--on", "--results", "--first")]


def pytest_configure(config: pytest.Config) -> None:
    """Puts gymllm in the place of what the tests will import."""
    on, gym, test = str(config.getoption("--on")), cast("Any", gymnasium), cast("Any", pytest)
    if on not in ENVS:  # CartPole's own vector environment is wanted only where that is the test
        gym.make_vec = functools.partial(_make_vec, gym.make_vec)
    if on in WORKERS:
        SyncVectorEnv.where = on
        gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv = SyncVectorEnv, AsyncVectorEnv
        raises = test.raises  # an error's class is Gymnasium's interface, its text is not
        test.raises = lambda *args, match=None, **kwargs: raises(*args, **kwargs)
    elif on in ENVS:
        kwargs = {"env_id": "Acrobot-v1"} if on == "gymllm/Gym-v0" else {}
        spec = gym.registry[on] = dataclasses.replace(gym.spec(on), kwargs=kwargs)
        same = {n: getattr(spec, n) for n in ("entry_point", "vector_entry_point", "kwargs")}
        for name in REPLACED.split("|"):
            gym.registry[name] = dataclasses.replace(gym.spec(name), **same)
        utils = importlib.import_module("tests.envs.utils")
        utils.all_testing_env_specs[:] = [spec]
        utils.all_testing_initialised_envs[:] = [spec.make(disable_env_checker=True).unwrapped]
        classes = [vars(wrappers)[name] for name in wrappers.__all__]
        gym.wrappers.__all__ = [f"gymllm.{c.__name__}" for c in classes if hasattr(c, "class_name")]
        gym.wrappers.__dict__.update({f"gymllm.{c.__name__}": c for c in classes})


def _make_vec(make_vec: Any, id: Any, num_envs: int = 1, **kwargs: Any) -> Any:
    if "test_make_vec" not in inspect.stack(0)[1].filename:
        kwargs = {"vectorization_mode": "sync", **kwargs}
    return make_vec(id, num_envs, **kwargs)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leaves out what does not apply, does not pass in the first run, or makes nothing that is replaced."""
    on, first = config.getoption("--on"), str(config.getoption("--first"))
    passed = {} if on == "gymnasium" else json.loads(Path(first).read_text())
    for item in list(items) if passed else []:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        ours = "gymllm" in str([getattr(value, "spec", value) for value in values])
        named = item.nodeid if "-v" in item.nodeid else inspect.getsource(item.function)
        why = [r for p, r in NOT_APPLICABLE.items() if re.search(p, f"{on}::{item.nodeid}")]
        if on in ENVS and not ours and not re.search(REPLACED, named):
            why = ["makes no environment that is replaced"]
        elif passed.get(item.nodeid, ("passed", ""))[0] not in ("passed", "no pool"):
            why = ["does not pass on Gymnasium itself"]
        if why:
            items.remove(item)
            results[item.nodeid] = ("deselected", why[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Keeps each test's outcome; "no pool" where a test of pools passed without one."""
    report = yield
    beside = item.config.getoption("--on") in WORKERS and not SyncVectorEnv.made
    if report.outcome != "passed":
        results[item.nodeid] = (report.outcome, call.excinfo.exconly())
    elif call.when == "call":
        results[item.nodeid] = ("no pool" if beside else "passed", "")
    SyncVectorEnv.made *= call.when != "teardown"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the outcomes down."""
    Path(str(session.config.getoption("--results"))).write_text(json.dumps(results))


def play(on: str, checkout: Path, files: str, first: Path | str = "") -> Path:
    """One run, in a fresh copy of the tests; gives the file of outcomes."""
    out = Path(tempfile.gettempdir(), f"gymnasium-tests-{on.replace('/', '-')}.json")
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "gymnasium_tests"]
    command += ["--continue-on-collection-errors"]  # of what is not installed
    command += [f"--on={on}", f"--results={out}", f"--first={first}"]
    command += [f"tests/{file}" for file in dict.fromkeys(files.split())]
    path = os.pathsep.join([str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkout / "tests", Path(folder, "tests"))
        shutil.copy(checkout / "pyproject.toml", folder)
        subprocess.run(command, cwd=folder, env=env, stdout=sys.stderr, check=False)
    return out


def main() -> None:
    """Prints tables of outcomes, what failed, what was left out and why, and the sums as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="of Gymnasium's repository, for its tests")
    parser.add_argument("--on", nargs="*", default=[*WORKERS, *ENVS], help="which runs")
    args = parser.parse_args()
    first = play("gymnasium", args.checkout, f"{POOL_FILES} {ENV_FILES}")
    rows: list[dict[str, object]] = []
    kinds = ("passed", "failed", "skipped", "no pool", "deselected")
    for on in args.on:
        out = play(on, args.checkout, POOL_FILES if on in WORKERS else ENV_FILES, first)
        outcomes: dict[str, list[str]] = json.loads(out.read_text())
        counts = Counter((test.split("::")[0], kind) for test, (kind, _) in outcomes.items())
        print(f"\n{on:54}" + "".join(f"{kind:>11}" for kind in kinds))
        for file in sorted({file for file, _ in counts}):
            print(f"{file:54}" + "".join(f"{counts[file, kind]:11}" for kind in kinds))
        left_out = Counter(why for kind, why in outcomes.values() if kind == "deselected")
        print(*(f"{count:5} deselected: {why}" for why, count in left_out.items()), sep="\n")
        failed = [(test, why) for test, (kind, why) in outcomes.items() if kind == "failed"]
        print(*(f"FAILED {test}\n    {why[:200]}" for test, why in failed), sep="\n", flush=True)
        for kind, value in Counter(kind for kind, _ in outcomes.values()).items():
            row = {"what": f"{on}: {kind}", "value": value, "unit": "tests"}
            rows.append({**row, "goal": "0" if kind == "failed" else ""})
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
