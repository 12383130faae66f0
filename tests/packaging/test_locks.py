import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = ("deploy/requirements.lock", "deploy/requirements-build.lock", "deploy/requirements-mutation.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LOCKED_EXTRAS = ("embedded", "demo", "dev")

PIN = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+) \\\n(?P<hashes>(?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
    re.MULTILINE,
)


def pins(lock: str) -> dict[str, Version]:
    text = (ROOT / lock).read_text("utf-8")
    return {canonicalize_name(pin["name"]): Version(pin["version"]) for pin in PIN.finditer(text)}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_hashed_pins_and_comments_and_nothing_else(lock):
    rest = PIN.sub("", (ROOT / lock).read_text("utf-8"))
    assert pins(lock)
    assert [line for line in rest.splitlines() if line and not line.lstrip().startswith("#")] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_place_to_download_from(lock):
    assert not re.search(r"https?:|file:|--(extra-)?index|--find-links|--trusted", (ROOT / lock).read_text("utf-8"))


def test_the_lock_satisfies_every_requirement_of_the_project():
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(one for extra in LOCKED_EXTRAS for one in extras[extra])]
    locked = pins("deploy/requirements.lock")
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != PROJECT["project"]["name"]:
            assert requirement.specifier.contains(locked[name]), f"{requirement}: run make lock"


@pytest.mark.parametrize("lock", LOCKS[1:])
def test_the_locks_agree(lock):
    locked = pins("deploy/requirements.lock")
    for name, version in pins(lock).items():
        assert locked.get(name, version) == version


def test_no_engine_framework_is_among_our_requirements():
    assert not pins("deploy/requirements.lock").keys() & {"torch", "vllm", "sglang", "transformers", "tensorflow"}
