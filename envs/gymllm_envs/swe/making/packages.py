"""The packages that bugs are made in: pinned, permissively licensed, Python alone, tests in the sdist.

None of them is carried by the standard library, pip or setuptools: the released sources would lie about in
every sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass

from gymllm.errors import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package: where it comes from, and how its tests run."""

    name: str
    version: str
    sha256: str
    """Of the source distribution."""
    licence: str
    """SPDX."""
    source_root: str = ""
    """What goes on PYTHONPATH, from the tree's root: "" or "src"."""
    sources: tuple[str, ...]
    """Folders or modules that bugs are put in, below `source_root`."""
    tests: tuple[str, ...]
    """Files or folders with its tests, from the tree's root."""
    requirements: tuple[str, ...] = ()
    """Wheels that package or tests import, pinned; all that these need, too."""
    pytest_arguments: tuple[str, ...] = ()
    """Of its own; none of the list needs any."""
    deselected: tuple[str, ...] = ()
    """Beginnings of node ids of tests that need what no sandbox has, or that depend on time or chance."""
    needs_metadata: bool = False
    """It asks importlib.metadata for itself."""

    @property
    def sdist(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def archive(self) -> str:
        """The sdist's file name."""
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"


def package_named(name: str) -> Package:
    """Looks a package up.

    Raises:
        UnknownNameError: There is none of that name.
    """
    if name not in PACKAGES:
        raise UnknownNameError("package", name, PACKAGES, "See gymllm-swe-tasks list.")
    return PACKAGES[name]


_LIST = (
    Package(
        name="toolz",
        version="1.2.0",
        sha256="9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490",
        licence="BSD-3-Clause",
        sources=("toolz",),
        tests=("toolz/tests",),
    ),
    Package(
        name="boltons",
        version="26.2.0",
        sha256="d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c",
        licence="BSD-3-Clause",
        sources=("boltons",),
        tests=("tests",),
    ),
    Package(
        name="tabulate",
        version="0.10.0",
        sha256="e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d",
        licence="MIT",
        sources=("tabulate",),
        tests=("test",),
    ),
    Package(
        name="parse",
        version="1.22.4",
        sha256="706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5",
        licence="MIT",
        sources=("parse",),
        tests=("tests",),
    ),
    Package(
        name="humanize",
        version="4.17.0",
        sha256="1d6a36c453dbfbb3f0b34601d2e0b4ce5d48d780305cd45714843f0068fde6ac",
        licence="MIT",
        source_root="src",
        sources=("humanize",),
        tests=("tests",),
        requirements=("freezegun==1.5.5", "python-dateutil==2.9.0.post0", "six==1.17.0"),
        deselected=("tests/test_benchmarks.py", "tests/test_i18n.py"),
    ),
    Package(
        name="funcy",
        version="2.1",
        sha256="8979feb3de7120afd1d00e5a8eae810c1942e4bfbc91697151e9ee1e49f79284",
        licence="BSD-3-Clause",
        sources=("funcy",),
        tests=("tests",),
        requirements=("whatever==0.7",),
    ),
    Package(
        name="glom",
        version="25.12.0",
        sha256="1ae7da88be3693df40ad27bdf57a765a55c075c86c971bcddd67927403eb0069",
        licence="BSD-3-Clause",
        sources=("glom",),
        tests=("glom/test",),
        requirements=("attrs==26.1.0", "boltons==26.2.0", "face==26.0.1"),
    ),
    Package(
        name="cachetools",
        version="8.0.2",
        sha256="30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0",
        licence="MIT",
        source_root="src",
        sources=("cachetools",),
        tests=("tests",),
    ),
    Package(
        name="webcolors",
        version="25.10.0",
        sha256="62abae86504f66d0f6364c2a8520de4a0c47b80c03fc3a5f1815fedbef7c19bf",
        licence="BSD-3-Clause",
        source_root="src",
        sources=("webcolors",),
        tests=("tests",),
    ),
    Package(
        name="isodate",
        version="0.7.2",
        sha256="4cd1aa0f43ca76f4a6c6c0292a85f40b35ec2e43e315b59f06e6d32171a953e6",
        licence="BSD-3-Clause",
        source_root="src",
        sources=("isodate",),
        tests=("tests",),
    ),
    Package(
        name="inflection",
        version="0.5.1",
        sha256="1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
        licence="MIT",
        sources=("inflection",),
        tests=("test_inflection.py",),
    ),
    Package(
        name="jsonpatch",
        version="1.48",
        sha256="81e9a03754137a1201d9b534ddd599cc0eb5983fe941bce238dc8a76e442bb94",
        licence="BSD-3-Clause",
        sources=("jsonpatch",),
        tests=("tests.py",),
        requirements=("jsonpointer==3.12",),
    ),
    Package(
        name="jsonpointer",
        version="3.12",
        sha256="7a3dcc11b64053eaa9c549e85e413f8d40a075215f793a331bed9182a14251ae",
        licence="BSD-3-Clause",
        sources=("jsonpointer",),
        tests=("tests.py",),
    ),
    Package(
        name="sqlparse",
        version="0.6.1",
        sha256="ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7",
        licence="BSD-3-Clause",
        sources=("sqlparse",),
        tests=("tests",),
    ),
    Package(
        name="schema",
        version="0.7.8",
        sha256="e86cc08edd6fe6e2522648f4e47e3a31920a76e82cce8937535422e310862ab5",
        licence="MIT",
        sources=("schema",),
        tests=("test_schema.py",),
    ),
    Package(
        name="voluptuous",
        version="0.16.0",
        sha256="006535e22fed944aec17bef6e8725472476194743c87bd233e912eb463f8ff05",
        licence="BSD-3-Clause",
        sources=("voluptuous",),
        tests=("voluptuous/tests/tests.py",),
    ),
    Package(
        name="parso",
        version="0.8.7",
        sha256="eaaac4c9fdd5e9e8852dc778d2d7405897ec510f2a298071453e5e3a07914bb1",
        licence="MIT",
        sources=("parso",),
        tests=("test",),
    ),
    Package(
        name="semver",
        version="3.1.2",
        sha256="bea193552413194252d33ff26ce0962b76669bd1c6fb17e8e203ac37f072feaf",
        licence="BSD-3-Clause",
        source_root="src",
        sources=("semver",),
        tests=("tests",),
    ),
)
PACKAGES: dict[str, Package] = {package.name: package for package in _LIST}
"""By name."""
