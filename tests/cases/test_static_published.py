"""What families publish raises no alarm but where what is served really changes."""

import time

import pytest

from gates.static.composition import of_directory
from gates.static.declared import Declared
from gates.static.examine import examine
from tests.support import published_further
from tests.support.checkpoints import alarms, validate
from tests.support.families import FAMILIES
from tests.support.published import write


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_layout_raises_nothing_but_what_is_so(tmp_path, name):
    family = FAMILIES[name]
    root = write(tmp_path / name, family)
    found = validate(root, family.declared)
    assert alarms(found) == family.expected, [one.message for one in found.flaws]
    assert found.verdict == "passed"
    assert found.inferred["weights"]["tensors"] == len(list(family.tensors()))
    if family.declared and not family.has_whole_vocabulary:
        assert alarms(examine(of_directory(root, Declared()))) <= family.expected


@pytest.mark.parametrize("name", published_further.FURTHER)
def test_a_further_published_layout_raises_nothing_but_what_is_so(tmp_path, name):
    layout = published_further.write(tmp_path / name, name)
    found = validate(tmp_path / name, layout.declared)
    assert alarms(found) == layout.expected, [one.message for one in found.flaws]
    assert found.verdict == "passed"
    assert found.inferred["weights"]["tensors"] == layout.tensors


def test_a_thousand_tensors_in_thirty_files_take_less_than_two_seconds_of_processor_time(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.published.SHARD_BYTES", 160_000_000)
    root = write(tmp_path / "m", FAMILIES["llama-3.1-8b-nvfp4"])
    assert len(list(root.glob("*.safetensors"))) >= 30
    started = time.process_time()
    found = validate(root)
    assert time.process_time() - started < 2
    assert found.inferred["weights"]["tensors"] > 950
