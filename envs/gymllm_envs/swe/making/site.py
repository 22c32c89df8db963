"""The folder that sandboxes are shown with pytest, coverage and what tests of the packages import.

Pinned wheels, for the interpreter that runs us: it is also the one inside. Kept apart from the host's own
packages, which no sandbox sees.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gymllm.errors import ConfigError, EnvError
from gymllm_envs.swe.making.cache import cache_folder, folder_once

PINNED = (
    "pytest==9.2.0",
    "iniconfig==2.3.1",
    "packaging==26.4",
    "pluggy==1.7.0",
    "pygments==2.21.0",
    "coverage==7.17.5",
)
"""What every sandbox gets; all that these need, too."""


def site_folder(extra: Sequence[str] = ()) -> Path:
    """The folder with `PINNED` and more, installed at first use, then kept. Nobody may write to it.

    Args:
        extra: Further wheels as "name==version", with all that they need.

    Raises:
        ConfigError: An entry that isn't pinned.
        EnvError: pip can't install them.
    """
    for requirement in extra:
        if requirement.count("==") != 1:
            raise ConfigError(f'extra must be pinned as "name==version", got {requirement!r}.')
    wanted = sorted({*PINNED, *extra})
    version = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}"
    recipe = "\n".join([version, platform.machine(), *wanted])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    return folder_once(cache_folder() / "site" / digest, lambda new: _install(wanted, new))


def _install(wanted: Sequence[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--target", str(folder), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise EnvError(
            f"pip could not install what the tests run with ({' '.join(wanted)}). Check the network and "
            f"that `{sys.executable} -m pip` works. It said:\n{said}"
        )
