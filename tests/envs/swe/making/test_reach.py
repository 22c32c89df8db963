"""Runs in the sandbox, and what they say of a package made on the spot."""

from __future__ import annotations

import pytest

from gymllm.errors import EnvError
from gymllm_envs.swe.making.packages import Package
from gymllm_envs.swe.making.reach import find_reach, functions_in, source_files
from gymllm_envs.swe.making.running import PackageSandbox, Run

FILE = "tests/test_shapes.py"


@pytest.mark.asyncio
async def test_lines_know_their_tests(shapes: Package) -> None:
    async with await PackageSandbox.open(shapes) as sandbox:
        reach = await find_reach(sandbox)
        (found,) = source_files(shapes, sandbox.folder)
        functions = {f.name: f for _, f in functions_in(sandbox.folder, found)}
    assert found == "shapes.py"
    assert f"{FILE}::test_fails_always" not in reach.tests
    assert f"{FILE}::test_depends_on_the_hash_seed" not in reach.tests
    assert f"{FILE}::test_fits[sides0-True]" in reach.tests
    assert reach.tests[f"{FILE}::test_area"].file == FILE

    def of(name: str) -> set[str]:
        tests = reach.of_function("shapes.py", functions[name])
        return {test.rpartition("::")[2] for test in tests}

    assert of("waits") == {"test_waits"}
    assert of("largest") == {"test_largest", "test_none"}
    assert of("Box.area") == {"test_area", "test_total", "test_largest"}
    assert of("unreached") == set()
    raising = functions["largest"].node.body[0].lineno + 1
    assert reach.of_line("shapes.py", raising, functions["largest"]) == {
        f"{FILE}::TestLargest::test_none"
    }


@pytest.mark.asyncio
async def test_runs_put_files_in_place_and_back(shapes: Package) -> None:
    async with await PackageSandbox.open(shapes) as sandbox:
        text = (sandbox.folder / "shapes.py").read_text()
        lines = (sandbox.folder / FILE).read_text().split("\n")
        plain = Run(targets=(FILE,), tests=(f"{FILE}::test_waits", f"{FILE}::test_area"), cpu_s=5)

        def faulty(old: str, new: str, cpu_s: float = 5) -> Run:
            files = {"shapes.py": text.replace(old, new)}
            return Run(targets=(FILE,), tests=plain.tests, files=files, cpu_s=cpu_s)

        results = await sandbox.run(
            [
                plain,
                faulty("n -= 1", "n -= 2"),
                plain,
                faulty("n -= 1", "n -= 0", 1),
                faulty("n -= 1", "import os; os._exit(3)"),
                faulty("class Box", "clas Box"),
                plain,
            ],
            hash_seed=1,
        )
    assert [r.ended for r in results] == ["done"] * 3 + ["timeout", "crash", "done", "done"]
    assert [len(r.having("passed")) for r in results] == [2, 1, 2, 1, 1, 0, 2]
    failed = results[1].tests[f"{FILE}::test_waits"]
    assert failed.failure is not None
    assert failed.failure.message.startswith("assert -1 == 0")
    assert failed.failure.error == "AssertionError"
    assert lines[failed.failure.line - 1] == "    zero(waits(3))"
    assert results[5].uncollected == (FILE,)
    assert "SyntaxError" in results[5].complaints


@pytest.mark.asyncio
async def test_shuffled_runs_have_their_order(shapes: Package) -> None:
    async with await PackageSandbox.open(shapes) as sandbox:
        runs = [Run(targets=(FILE,), shuffle=seed, cpu_s=10) for seed in (1, 1, 2)]
        orders = [list(r.tests) for r in await sandbox.run(runs, hash_seed=1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


@pytest.mark.asyncio
async def test_a_package_without_passing_tests_is_told(shapes: Package) -> None:
    async with await PackageSandbox.open(shapes) as sandbox:
        (sandbox.folder / FILE).write_text("import missing_module\n")
        with pytest.raises(
            EnvError, match=r"(?s)tests of shapes==1.0 can't be used.*missing_module"
        ):
            await find_reach(sandbox)
