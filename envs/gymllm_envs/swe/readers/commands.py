"""Test commands of the repositories in data sets that don't say them in their rows.

SWE-bench up to swebench 4 and SWE-Gym keep them in their harness (`MAP_REPO_VERSION_TO_SPECS`), by
repository and version; swebench 5 moved them into each row's `eval_script`. Only what grading needs is here:
the command, the parser of its log, what must be exported or built before. Images have all else installed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gymllm_envs.swe.patching import PatchError, read_patch

CONDA = "source /opt/miniconda3/bin/activate\nconda activate testbed"
CONDA_PATH = (
    "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:"
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
"""What the environment "testbed" of the images of SWE-bench and those built like them has on its PATH."""

# No index and no build isolation: there is no network, and what builds need is in the images.
_INSTALL = "python -m pip install --no-index --no-deps --no-build-isolation"
_UTF8 = "export LANG=en_US.UTF-8 LC_ALL=en_US.UTF-8 LANGUAGE=en_US:en PYTHONIOENCODING=utf8"
_PYTEST = "pytest -rA"


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Of one repository."""

    test: str = _PYTEST
    """Test files follow."""
    parser: str = "parse_log_pytest"
    setup: str = ""
    """After the environment is active: what to export; what to build, as compiled sources need."""


SWE_BENCH = {
    "astropy/astropy": Commands(
        test="pytest -rA -vv -o console_output_style=classic --tb=no",
        parser="parse_log_astropy",
        setup=f"{_INSTALL} -e .",
    ),
    "django/django": Commands(
        test="./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
        parser="parse_log_django",
        setup=f"{_UTF8}\n{_INSTALL} -e . || python setup.py install",
    ),
    "marshmallow-code/marshmallow": Commands(parser="parse_log_marshmallow"),
    "matplotlib/matplotlib": Commands(
        parser="parse_log_matplotlib", setup=f"{_INSTALL} -e . || python setup.py build install"
    ),
    "mwaskom/seaborn": Commands(test="pytest --no-header -rA", parser="parse_log_seaborn"),
    "pallets/flask": Commands(parser="parse_log_flask"),
    "psf/requests": Commands(parser="parse_log_requests", setup=f"{_INSTALL} ."),
    "pvlib/pvlib-python": Commands(parser="parse_log_pvlib"),
    "pydata/xarray": Commands(parser="parse_log_xarray"),
    "pydicom/pydicom": Commands(parser="parse_log_pydicom"),
    "pylint-dev/astroid": Commands(parser="parse_log_astroid"),
    "pylint-dev/pylint": Commands(parser="parse_log_pylint"),
    "pytest-dev/pytest": Commands(),
    "pyvista/pyvista": Commands(parser="parse_log_pyvista"),
    "scikit-learn/scikit-learn": Commands(
        parser="parse_log_scikit",
        setup=f"{_INSTALL} -v --no-use-pep517 -e . || {_INSTALL} -v -e .",
    ),
    "sphinx-doc/sphinx": Commands(test="tox --current-env -epy39 -v --", parser="parse_log_sphinx"),
    "sqlfluff/sqlfluff": Commands(parser="parse_log_sqlfluff"),
    "sympy/sympy": Commands(
        test="PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
        parser="parse_log_sympy",
    ),
}
_ONE_PROCESS = Commands(test="pytest -n0 -rA")
SWE_GYM = {
    "bokeh/bokeh": Commands(test="pytest -rA -n0"),
    "conan-io/conan": Commands(test="pytest -n0 -rA", setup="export PYTHONPATH=.:$PYTHONPATH"),
    "dask/dask": Commands(test="pytest -n0 -rA --color=no"),
    "facebookresearch/hydra": Commands(test="pytest -rA --tb=long"),
    "getmoto/moto": _ONE_PROCESS,
    "hypothesisworks/hypothesis": Commands(test="pytest -n0 -rA --tb=no --no-header"),
    "iterative/dvc": Commands(),
    "modin-project/modin": _ONE_PROCESS,
    "pandas-dev/pandas": Commands(
        test="pytest -rA --tb=long", setup=f"{_INSTALL} -ve . -Ceditable-verbose=true"
    ),
    "project-monai/monai": Commands(),
    "pydantic/pydantic": Commands(
        test="pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
        parser="parse_log_pytest_v2",
        setup='export PATH="$HOME/.local/bin:$PATH"',
    ),
    "python/mypy": Commands(test="pytest -n0 -rA -k", parser="mypy"),
    "spyder-ide/spyder": _ONE_PROCESS,
}
"""By repository in lower case."""

# The harness leaves these out of what it gives to the test command.
_NO_TESTS = (
    *(".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml"),
)


def commands_of(repo: str) -> Commands | None:
    """A repository's; None if it is in neither data set."""
    return SWE_BENCH.get(repo) or SWE_GYM.get(repo.lower())


def test_files_of(test_patch: str, where: str) -> list[str]:
    """The files that a patch of tests leaves changed, without those it deletes.

    Raises:
        PatchError: It can't be read.
    """
    try:
        patches = read_patch(test_patch)
    except PatchError as problem:
        raise PatchError(f"{where}: test_patch: {problem}") from problem
    return [patch.new for patch in patches if patch.new is not None]


def test_command(repo: str, commands: Commands, test_patch: str, where: str) -> str:
    """The whole command, as the harness makes it: the test files of `test_patch` follow.

    Raises:
        PatchError: The patch can't be read.
    """
    if repo == "python/mypy":  # its tests are cases in data files, chosen by name
        cases = re.findall(r"\[case ([^\]]+)\]", test_patch)
        return f'{commands.test} "{" or ".join(cases)}"'
    files = [f for f in test_files_of(test_patch, where) if not f.endswith(_NO_TESTS)]
    if repo == "django/django":  # runtests.py takes modules, from its own folder on
        files = [f.removesuffix(".py").removeprefix("tests/").replace("/", ".") for f in files]
    return " ".join([commands.test, *map(_quoted, files)])


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[\w./:@%+=-]+", word) else "'" + word.replace("'", "'\\''") + "'"


def words(command: str) -> Sequence[str]:
    """A command's words, roughly: enough to look for files among them."""
    return re.findall(r"[^\s'\"]+", command)
