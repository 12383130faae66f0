"""C135: a branch of a repository moves between two registrations; what is stored names a commit, never the branch."""

import re

import pytest

from gates.files.document import refuse_document
from schemas.bundle import Bundle
from tests.support.chain import write_bundle_directory
from tests.support.command import Command
from tests.support.factories import bundle_body
from tests.support.hub import Hub, Repository


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    (tmp_path / "home").mkdir()
    return Command(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture
def files(tmp_path):
    return {path.name: path.read_bytes() for path in write_bundle_directory(tmp_path / "chain").iterdir()}


def test_c135_main_that_moved_is_another_bundle_and_a_readme_is_the_same_to_serve(
    command, files, monkeypatch, tmp_path
):
    command.use("http://127.0.0.1:1", "token")
    with Hub({"org/r": Repository(files | {"README.md": b"one"}, {"model.gguf"}, name="org/r")}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url())

        def ingest():
            words = ("--engine-environment", "sha256:" + "e" * 64, "--engine-version", "1", "--dry-run", "--json")
            ran = command("bundle", "create", "hf:org/r@main", "--allow-host", hub.url("cdn"), *words)
            assert ran.status == 0, ran
            return Bundle.model_validate(ran.json)

        first = ingest()
        other = write_bundle_directory(tmp_path / "other", context_length=1024)
        changed = files | {"model.gguf": (other / "model.gguf").read_bytes()}
        hub.repositories["org/r"] = Repository(changed | {"README.md": b"two"}, {"model.gguf"}, name="org/r")
        second = ingest()
        hub.repositories["org/r"] = Repository(changed | {"README.md": b"three"}, {"model.gguf"}, name="org/r")
        third = ingest()
    revisions = [bundle.sources[0].revision for bundle in (first, second, third)]
    assert all(re.fullmatch("[0-9a-f]{40}", one) for one in revisions)
    assert len(set(revisions)) == 3
    assert len({first.digest, second.digest, third.digest}) == 3
    assert first.serving_digest != second.serving_digest == third.serving_digest


@pytest.mark.parametrize(
    ("revision", "is_pinned"), [("main", False), ("v1.0", False), ("a" * 39, False), ("a" * 40, True)]
)
def test_c135_a_document_that_names_what_can_move_is_refused(revision, is_pinned):
    source = {"kind": "huggingface", "location": "org/r", "revision": revision}
    found = [(place, one.code) for place, one in refuse_document(Bundle.model_validate(bundle_body(sources=[source])))]
    assert found == ([] if is_pinned else [("/sources/0/revision", "revision-floating")])
