"""The four packages are released together: one version, and they ask for each other at it."""

import configparser
from pathlib import Path

ROOT = Path(__file__).parent.parent
NESTED = ("envs", "agents", "trainers")


def read_setup(folder: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / folder / "setup.cfg")
    return parser


def test_the_four_versions_are_equal():
    version = (ROOT / "VERSION").read_text().strip()
    for folder in NESTED:
        assert read_setup(folder)["metadata"]["version"] == version, folder


def test_packages_ask_for_each_other_at_exactly_their_version():
    version = (ROOT / "VERSION").read_text().strip()
    for folder in NESTED:
        required = read_setup(folder)["options"]["install_requires"].split()
        own = [requirement for requirement in required if requirement.startswith("gymllm")]
        assert own, folder
        assert all(requirement.endswith(f"=={version}") for requirement in own), own
