"""What families publish raises no alarm but where what is served really changes."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gates.static.composition import of_directory
from gates.static.declared import Declared
from gates.static.examine import examine
from tests.support import published_further
from tests.support.checkpoints import alarms, validate
from tests.support.families import FAMILIES
from tests.support.postgres import PREFIX, hold, memory
from tests.support.published import write

ROOM_BYTES = 1 << 30
"""What has to be free in memory, of which a layout takes a few MB: the rest of it is holes."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a hole is read from one page of zeros: a disk takes a new page for each, and as long as for real bytes."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=memory(room_bytes=ROOM_BYTES)) as made:
        held = hold(Path(made))  # so that no other session takes it for one that was left behind
        yield Path(made)
        if held is not None:
            os.close(held)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_layout_raises_nothing_but_what_is_so(folder, name):
    family = FAMILIES[name]
    root = write(folder / name, family)
    found = validate(root, family.declared)
    assert alarms(found) == family.expected, [one.message for one in found.flaws]
    assert found.verdict == "passed"
    assert found.inferred["weights"]["tensors"] == len(list(family.tensors()))
    if family.declared and not family.has_whole_vocabulary:
        assert alarms(examine(of_directory(root, Declared()))) <= family.expected


@pytest.mark.parametrize("name", published_further.FURTHER)
def test_a_further_published_layout_raises_nothing_but_what_is_so(folder, name):
    layout = published_further.write(folder / name, name)
    found = validate(folder / name, layout.declared)
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
