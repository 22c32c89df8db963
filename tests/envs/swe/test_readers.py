"""Every data set's rows become tasks; what can't is refused with what would do."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gymllm.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError
from gymllm_envs.swe.patching import apply_patch
from gymllm_envs.swe.readers import read_row
from gymllm_envs.swe.readers.reversing import reverse_patch
from gymllm_envs.swe.readers.swe_bench import split_eval_script
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.sources import load_tasks
from gymllm_envs.swe.task import SweTask, write_tasks

DATA = Path(__file__).parent / "data"
FAULTY = {"halving/core.py": "def halve(n):\n    return n // 3\n"}
MENDED = {"halving/core.py": "def halve(n):\n    return n // 2\n"}
FILES = sorted(DATA.glob("*.jsonl"))
SEVEN = "tests/test_core.py::test_seven"


def tasks(name: str) -> list[SweTask]:
    return load_tasks(DATA / f"{name}.jsonl")


def row(name: str, number: int = 0) -> dict[str, object]:
    return json.loads((DATA / f"{name}.jsonl").read_text().splitlines()[number])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_gold_patch_mends_the_tree(file: Path) -> None:
    assert apply_patch(load_tasks(file)[0].patch, FAULTY.get) == MENDED


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_tasks_of_others_survive_our_own_file(file: Path, tmp_path: Path) -> None:
    read = load_tasks(file)
    write_tasks(tmp_path / "tasks.jsonl", read)
    again = load_tasks(tmp_path / "tasks.jsonl")
    assert again == read
    assert [Recipe.of(task) for task in again] == [Recipe.of(task) for task in read]


def test_swe_bench_has_its_harness_commands_and_images() -> None:
    flask, django = tasks("swe_bench")
    assert flask.id == "pallets__flask-1"
    assert flask.image == "swebench/sweb.eval.x86_64.pallets_1776_flask-1:latest"
    assert flask.test_command == "pytest -rA tests/test_core.py"
    assert (flask.fail_to_pass, flask.workdir) == ((SEVEN,), "/testbed")
    assert flask.base_commit == "1" * 40
    assert flask.extra["version"] == "2.3"
    assert Recipe.of(flask).log_parser == "parse_log_flask"
    assert "conda activate testbed" in Recipe.of(flask).test_setup
    assert django.test_command.endswith("--parallel 1 queries.test_qs")
    assert Recipe.of(django).log_parser == "parse_log_django"
    assert "LC_ALL=en_US.UTF-8" in Recipe.of(django).test_setup


def test_swe_bench_5_has_its_command_in_the_script() -> None:
    (task,) = tasks("swe_bench_5")
    recipe = Recipe.of(task)
    assert task.test_command == "pytest -rA tests/test_core.py"
    assert recipe.log_parser == "parse_log_flask"
    assert "python -m pip install -e ." in recipe.test_setup
    for ours in ("git apply", "git checkout", "test_seven", "EOF_"):
        assert ours not in recipe.test_setup


def test_swe_bench_5_without_markers_or_by_failures_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="no command between"):
        split_eval_script("pytest -rA\n", "a.jsonl:1")
    with pytest.raises(ConfigError, match="fail_only"):
        read_row({**row("swe_bench_5"), "eval_type": "fail_only"}, "a.jsonl:1")


def test_swe_gym_has_its_own_images_and_commands() -> None:
    moto, mypy = tasks("swe_gym")
    assert moto.image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-3:latest"
    assert moto.test_command == "pytest -n0 -rA tests/test_core.py"
    assert not Recipe.of(moto).skipped_is_kept
    assert mypy.test_command == 'pytest -n0 -rA -k "testHalf or testThird"'


def test_swe_smith_puts_its_bug_in_and_hides_the_tests_that_tell() -> None:
    (task,) = tasks("swe_smith")
    assert apply_patch(task.bug_patch, MENDED.get) == FAULTY
    assert task.image == "jyangballin/swesmith.x86_64.john_1776_halving.0123abcd"
    assert task.repo == "john/halving"
    assert task.pass_to_pass == ("tests/test_core.py::test_zero",)
    assert task.test_command.endswith("--verbose tests/test_core.py")
    assert Recipe.of(task).hidden == ("tests/test_core.py",)
    without = {**row("swe_smith"), "problem_statement": ""}
    assert "broken" in read_row(without, "a.jsonl:1").problem_statement


def test_swe_rebench_says_how_tests_are_run() -> None:
    first, second = tasks("swe_rebench")
    assert first.image == "swerebench/sweb.eval.x86_64.john_1776_halving-5:latest"
    assert first.test_command.endswith("-W ignore::DeprecationWarning tests/test_core.py")
    assert second.workdir == "/halving"
    assert second.test_command == "pip list\npytest -rA -v tests/"
    assert Recipe.of(second).format == "swe-rebench-v2"


def test_r2e_gym_expects_what_the_commit_gave() -> None:
    (task,) = tasks("r2e_gym")
    recipe = Recipe.of(task)
    assert task.id == "halving-" + "5" * 40
    assert task.problem_statement == "halve(7) gives 2."
    assert task.fail_to_pass == ("test_seven", "test_zero")
    assert recipe.expected == {
        "test_seven": "PASSED",
        "test_zero": "PASSED",
        "Rounding.test_odd": "FAILED",
    }
    assert {"/r2e_tests", "run_tests.sh", "/root/r2e_tests"} <= {*recipe.hidden}
    assert "tests/test_core.py" not in task.patch


def test_unknown_rows_say_their_fields_and_the_formats() -> None:
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:7 is in no format .* question, answer\. .*swe-smith"
    ):
        read_row({"question": "?", "answer": 3}, "a.jsonl:7")


def test_a_repository_that_nobody_knows_needs_a_command() -> None:
    unknown = {**row("swe_bench"), "repo": "john/halving"}
    with pytest.raises(ConfigError, match=r"nothing says how the tests of 'john/halving' are run"):
        read_row(unknown, "a.jsonl:1")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("swe_bench", {"FAIL_TO_PASS": "[]"}, "no FAIL_TO_PASS"),
        ("swe_bench", {"FAIL_TO_PASS": "test_a"}, "must be a list of names"),
        ("swe_bench", {"FAIL_TO_PASS": [1]}, "must be a list of names"),
        ("swe_bench", {"problem_statement": 3}, "problem_statement must be a text"),
        ("swe_bench", {"test_patch": "@@ -1 +1 @@\n"}, "test_patch"),
        ("swe_smith", {"patch": "@@ -1,2 +1,2 @@\n x\n"}, "cut short"),
        ("swe_smith", {"instance_id": "python__mypy.1.a__b"}, "don't run in pytest"),
        ("swe_rebench", {"install_config": "{"}, "install_config is no JSON"),
        ("swe_rebench", {"install_config": {"test_cmd": "pytest"}}, "log_parser must be a text"),
        ("r2e_gym", {"expected_output_json": "["}, "expected_output_json is no JSON"),
        ("r2e_gym", {"expected_output_json": "{}"}, "no FAIL_TO_PASS"),
    ],
)
def test_a_wrong_field_is_named(name: str, change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read_row({**row(name), **change}, "a.jsonl:1")
    assert "a.jsonl:1" in str(caught.value)


def json_list(path: Path) -> None:
    path.write_text(json.dumps([row("swe_smith")], indent=1))


def table(path: Path) -> None:
    fields = {k: json.dumps(v) if isinstance(v, list) else v for k, v in row("swe_smith").items()}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerow(fields)


def parquet(path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row("swe_smith")]), path)


@pytest.mark.parametrize(
    ("name", "write"), [("a.json", json_list), ("a.csv", table), ("a.parquet", parquet)]
)
def test_files_of_every_kind_give_the_same(
    name: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path / name)
    assert load_tasks(tmp_path / name) == tasks("swe_smith")


def test_a_folder_is_read_by_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, source in (("test-00000-of-00001", "swe_smith"), ("train-00000-of-00001", "r2e_gym")):
        (tmp_path / f"data/{name}.jsonl").write_text((DATA / f"{source}.jsonl").read_text())
    assert load_tasks(tmp_path) == tasks("swe_smith")
    assert load_tasks(tmp_path, "train") == tasks("r2e_gym")


def test_task_folders_of_swebench_are_read(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    fields = row("swe_bench_5")
    folder = tmp_path / "tasks/pallets__flask-1"
    folder.mkdir(parents=True)
    files = {
        "patch": "gold.patch",
        "test_patch": "test.patch",
        "eval_script": "eval.sh",
        "problem_statement": "problem_statement.md",
    }
    for name, file in files.items():
        (folder / file).write_text(str(fields.pop(name)))
    tests = {name: fields.pop(name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    (folder / "tests.json").write_text(json.dumps(tests))
    (folder / "task.yaml").write_text(yaml.safe_dump({**fields, "split": "test"}))
    (task,) = load_tasks(tmp_path)
    (same,) = tasks("swe_bench_5")
    assert (task.test_command, task.patch) == (same.test_command, same.patch)
    (folder / "eval.sh").unlink()
    with pytest.raises(ConfigError, match=r"pallets__flask-1' can't be read"):
        load_tasks(tmp_path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no-such-file.jsonl", "can't be read"),
        ("neither file nor name", "is no file, no folder, and no name"),
        ("{empty}", "holds neither"),
    ],
)
def test_a_source_that_is_none_is_refused(source: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load_tasks(source.format(empty=tmp_path))


def test_two_tasks_of_one_id_and_no_tasks_are_refused(tmp_path: Path) -> None:
    text = (DATA / "swe_smith.jsonl").read_text()
    (tmp_path / "two.jsonl").write_text(text + text)
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl").write_text(text[:40])
    with pytest.raises(ConfigError, match=r"two\.jsonl:2: there are two tasks"):
        load_tasks(tmp_path / "two.jsonl")
    with pytest.raises(ConfigError, match="holds no tasks"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"cut\.jsonl:1 is no JSON"):
        load_tasks(tmp_path / "cut.jsonl")


@pytest.mark.parametrize(
    ("package", "source"),
    [("datasets", "princeton-nlp/SWE-bench_Verified"), ("pyarrow.parquet", "{folder}/a.parquet")],
)
def test_what_reads_it_is_named_where_it_is_missing(
    package: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm-envs\[hub\]"'):
        load_tasks(source.format(folder=tmp_path))


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((EnvError, ConfigError), match="can't be had from the hub"):
        load_tasks("princeton-nlp/SWE-bench_Verified")


def test_a_recipe_of_a_file_is_checked() -> None:
    (task,) = tasks("swe_smith")
    given = {"instance_id": "a", "problem_statement": "b", "FAIL_TO_PASS": ["c"]}
    image = {"image_name": "d", "test_command": "e"}
    for recipe, says in (
        ({"log_parser": 3}, "log_parser must be a text"),
        ({"hidden": "f"}, "hidden must be a list"),
        ({"skipped_is_kept": "yes"}, "skipped_is_kept must be true or false"),
        ({"expected": []}, "expected must be an object"),
        ([], "recipe must be an object"),
    ):
        with pytest.raises(ConfigError, match=says):
            Recipe.of(read_row({**given, **image, "recipe": recipe}, "a.jsonl:1"))
    with pytest.raises(UnknownNameError, match="Did you mean log_parser"):
        Recipe.of(read_row({**given, **image, "recipe": {"log_parsr": "f"}}, "a.jsonl:1"))
    bare = SweTask(id="a", repo="b", problem_statement="c", fail_to_pass=("d",), image="e")
    with pytest.raises(ConfigError, match="has no test_command"):
        Recipe.of(bare)
    assert Recipe.of(task).extra()["recipe"] == task.extra["recipe"]


def test_reversing_a_patch_twice_gives_it_back() -> None:
    patch = (
        "diff --git a/new.txt b/new.txt\nnew file mode 100644\n--- /dev/null\n+++ b/new.txt\n"
        "@@ -0,0 +1,2 @@\n+--- not a header\n++++ nor this\n"
        "diff --git a/old.txt b/old.txt\n--- a/old.txt\n+++ b/old.txt\n"
        "@@ -1,3 +1,2 @@ def f():\n one\n-two\n-three\n+two and three\n\\ No newline at end of file\n"
    )
    before = {"old.txt": "one\ntwo\nthree\n"}
    after = apply_patch(patch, before.get)
    assert after == {"new.txt": "--- not a header\n+++ nor this\n", "old.txt": "one\ntwo and three"}
    texts = {path: text for path, text in after.items() if text is not None}
    assert apply_patch(reverse_patch(patch), texts.get) == {"new.txt": None, **before}
    assert reverse_patch(reverse_patch(patch)) == patch
