import hashlib
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from gates import facts
from gates.directory import DirectoryRefused, read_directory, role_of
from schemas.bundle import Role
from tests.support.chain import TEMPLATE, write_bundle_directory
from tests.support.opened import opened_under


class Remembered(dict):
    def put(self, key, value):
        self[key] = value


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    return write_bundle_directory(tmp_path_factory.mktemp("chain") / "bundle")


@pytest.fixture
def directory(chain, tmp_path) -> Path:
    return Path(shutil.copytree(chain, tmp_path / "bundle"))


def complaints(directory: Path, **options) -> dict[str, str]:
    with pytest.raises(DirectoryRefused) as refused:
        read_directory(directory, **options)
    return {complaint.path: str(complaint) for complaint in refused.value.complaints}


def test_every_file_has_its_hash_size_and_role(directory):
    contents = read_directory(directory)

    assert [(f.path, f.role) for f in contents.files] == [
        ("chat_template.jinja", Role.TEMPLATE),
        ("model.gguf", Role.WEIGHTS),
    ]
    for file in contents.files:
        raw = (directory / file.path).read_bytes()
        assert (file.size, file.sha256) == (len(raw), "sha256:" + hashlib.sha256(raw).hexdigest())


def test_what_was_read_once_is_not_opened_again(directory):
    memory = Remembered()
    with opened_under(directory) as opened:
        first = read_directory(directory, memory=memory)
    assert sorted(opened) == ["chat_template.jinja", "model.gguf"]  # each once: hash and facts from one opening

    with opened_under(directory) as opened:
        second = read_directory(directory, memory=memory)

    assert opened == []
    assert [f.was_read for f in second.files] == [False, False]
    assert [(f.path, f.sha256, f.role, f.facts) for f in second.files] == [
        (f.path, f.sha256, f.role, f.facts) for f in first.files
    ]


def test_a_file_changed_in_place_is_read_again_even_with_its_old_size_and_time(directory):
    memory = Remembered()
    before = read_directory(directory, memory=memory)
    template = directory / "chat_template.jinja"
    state = template.stat()

    template.write_text(TEMPLATE.replace("assistant", "assistent"))
    os.utime(template, ns=(state.st_atime_ns, state.st_mtime_ns))
    with opened_under(directory) as opened:
        after = read_directory(directory, memory=memory)

    assert template.stat().st_size == state.st_size
    assert opened == ["chat_template.jinja"]
    assert after.revision != before.revision


def test_a_file_changed_right_after_it_was_read_is_never_taken_for_the_old_one(directory):
    # Within one tick of the kernel's clock two writes have the same time; reading waits that tick out.
    memory = Remembered()
    template = directory / "chat_template.jinja"
    for round_ in range(30):
        text = f"{round_:04d}"
        template.write_text(text)
        found = read_directory(directory, memory=memory).files[0]
        assert found.sha256 == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_times_that_a_coarse_clock_wrote_are_not_trusted(directory, monkeypatch):
    memory = Remembered()
    real = Path.lstat

    class Coarse:
        def __init__(self, state):
            self.state = state

        def __getattr__(self, name):
            value = getattr(self.state, name)
            return value // 10**9 * 10**9 if name in ("st_ctime_ns", "st_mtime_ns") else value

    monkeypatch.setattr(Path, "lstat", lambda self: Coarse(real(self)))
    monkeypatch.setattr(os, "fstat", lambda fd, fstat=os.fstat: Coarse(fstat(fd)))
    read_directory(directory, memory=memory)
    assert memory == {}


def test_a_damaged_memory_is_not_believed(directory):
    memory = Remembered()
    expected = read_directory(directory, memory=memory)
    for damaged in ("", "{", "[]", '{"sha256": 1}', "null"):
        for key in memory:
            memory[key] = damaged
        found = read_directory(directory, memory=memory)
        assert found.revision == expected.revision


def test_a_new_version_of_a_reader_reads_again(directory, monkeypatch):
    memory = Remembered()
    read_directory(directory, memory=memory)
    monkeypatch.setattr(facts, "VERSION", facts.VERSION + 1)
    assert all(file.was_read for file in read_directory(directory, memory=memory).files)


def test_the_revision_depends_on_paths_and_bytes_and_on_nothing_else(directory, tmp_path):
    there = Path(shutil.copytree(directory, tmp_path / "elsewhere" / "other-name"))
    os.utime(there / "model.gguf", (1, 1))
    assert read_directory(there).revision == read_directory(directory).revision

    with (there / "model.gguf").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert read_directory(there).revision != read_directory(directory).revision


def test_progress_ends_at_all_bytes_whether_read_or_remembered(directory):
    memory = Remembered()
    for _ in range(2):
        steps: list[tuple[int, int]] = []
        read_directory(directory, memory=memory, progress=lambda done, total, steps=steps: steps.append((done, total)))
        size = sum(path.stat().st_size for path in directory.iterdir())
        assert sum(done for done, _ in steps) == size
        assert {total for _, total in steps} == {size}


def test_hidden_and_excluded_files_are_left_out_and_listed(directory):
    (directory / ".git").mkdir()
    (directory / ".git" / "config").write_text("x")
    (directory / ".gitattributes").write_text("x")
    (directory / "original").mkdir()
    (directory / "original" / "weights.pth").write_bytes(b"\x80\x02")
    (directory / "notes.xyz").write_text("x")

    contents = read_directory(directory, exclude=["original/*", "*.xyz"])

    assert len(contents.files) == 2
    assert contents.left_out == (".git/", ".gitattributes", "notes.xyz", "original/weights.pth")


def test_everything_wrong_is_told_at_once_with_what_to_do(directory, tmp_path):
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"GGUF")
    (directory / "link.gguf").symlink_to(outside)
    (directory / "loop").symlink_to(directory)
    (directory / "code.py").write_text("x = 1")
    (directory / "old.BIN").write_bytes(b"x")
    (directory / "what.xyz").write_text("x")
    (directory / "a b.json").write_text("{}")
    (directory / "nul.json").write_text("{}")
    os.mkfifo(directory / "pipe.json")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(directory / "socket.json"))

    found = complaints(directory)
    listening.close()

    assert set(found) == {
        "link.gguf",
        "loop",
        "code.py",
        "old.BIN",
        "what.xyz",
        "a b.json",
        "nul.json",
        "pipe.json",
        "socket.json",
    }
    assert "symbolic link" in found["link.gguf"]
    assert "symbolic link" in found["loop"]
    assert "no regular file" in found["pipe.json"]
    assert "--exclude" in found["what.xyz"]


def test_a_role_is_given_where_the_name_does_not_tell_it(directory):
    (directory / "tokenizer.model").write_text("pieces")
    assert "tokenizer.model" in complaints(directory)

    contents = read_directory(directory, roles={"tokenizer.model": Role.TOKENIZER})

    assert [f.path for f in contents.with_role(Role.TOKENIZER)] == ["tokenizer.model"]
    assert "not in the directory" in complaints(directory, roles={"tokenizer.mod": Role.TOKENIZER})["tokenizer.mod"]


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("model.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ("model.gguf", b"GGUF" + b"\0" * 20, "version 0"),
        ("config.json", b"\x80\x04\x95", "pickle"),
        ("config.json", b'{"a": 1, "a": 2}', "twice"),
        ("config.json", b"[]", "not a JSON object"),
        ("chat_template.jinja", b"#!/bin/sh", "a script"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("model.safetensors.index.json", b"{}", "weight_map"),
        ("adapter_config.json", b'{"r": 8}', "target_modules"),
        ("adapter_config.json", b'{"target_modules": ["q"], "r": 0}', "rank"),
        ("README.md", b"PK\x03\x04", "ZIP"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(directory, name, raw, said):
    (directory / name).write_bytes(raw)
    assert said in complaints(directory)[name]


def test_a_file_that_changes_while_it_is_read_is_refused(directory):
    def change(done: int, total: int) -> None:
        with (directory / "model.gguf").open("ab") as file:
            file.write(b"\0")

    assert "changed while it was read" in complaints(directory, progress=change)["model.gguf"]


def test_what_is_no_directory_is_said_plainly(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in complaints(tmp_path / "file")[""]
    assert "there is no directory" in complaints(tmp_path / "missing")[""]
    (tmp_path / "empty").mkdir()
    assert "holds no file" in complaints(tmp_path / "empty")[""]


# ------------------------------------------------------------------------------------------------ the Hub's cache


@pytest.fixture
def snapshot(directory, tmp_path) -> Path:
    """The directory as the Hub's cache holds it."""
    blobs = tmp_path / "models--org--chain" / "blobs"
    snapshot = tmp_path / "models--org--chain" / "snapshots" / ("ab" * 20)
    blobs.mkdir(parents=True)
    (snapshot / "sub").mkdir(parents=True)
    for path in directory.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    (blobs / ("cd" * 20)).write_text("{}")
    (snapshot / "sub" / "vocab.json").symlink_to(f"../../../blobs/{'cd' * 20}")
    return snapshot


def test_the_hub_cache_is_read_through_its_own_links(snapshot, directory):
    contents = read_directory(snapshot)
    (directory / "sub").mkdir()
    (directory / "sub" / "vocab.json").write_text("{}")
    assert contents.revision == read_directory(directory).revision
    assert all(file.place.is_file() and not file.place.is_symlink() for file in contents.files)


@pytest.mark.parametrize(
    "target", ["../../blobs/../../secret", "../../../blobs/{}", "/etc/passwd", "model.gguf", "../../blobs/x"]
)
def test_any_other_link_in_a_snapshot_is_refused(snapshot, target):
    (snapshot / "config.json").symlink_to(target.format("cd" * 20))
    assert "symbolic link" in complaints(snapshot)["config.json"]


def test_a_snapshot_whose_blob_is_a_link_missing_or_altered_is_refused(snapshot):
    blobs = snapshot.parent.parent / "blobs"
    (blobs / ("ef" * 20)).symlink_to("/etc/passwd")
    (snapshot / "config.json").symlink_to("../../blobs/" + "ef" * 20)
    (snapshot / "merges.txt").symlink_to("../../blobs/" + "01" * 20)
    found = complaints(snapshot)
    assert "no regular file" in found["config.json"]
    assert "not there" in found["merges.txt"]

    (snapshot / "config.json").unlink()
    (snapshot / "merges.txt").unlink()
    template = blobs / (snapshot / "chat_template.jinja").readlink().name
    template.write_text("altered")
    assert "lies in the Hub cache as" in complaints(snapshot)["chat_template.jinja"]


def test_links_of_the_cache_form_elsewhere_are_refused(snapshot, tmp_path):
    moved = tmp_path / "elsewhere" / "plain"
    shutil.copytree(snapshot, moved, symlinks=True)
    assert set(complaints(moved)) == {"chat_template.jinja", "model.gguf", "sub/vocab.json"}


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("model-00001-of-00002.safetensors", Role.WEIGHTS),
        ("mmproj-model-f16.gguf", Role.PROCESSOR),
        ("adapters/de/adapter_model.safetensors", Role.ADAPTER),
        ("model.safetensors.index.json", Role.WEIGHTS_INDEX),
        ("LICENSE", Role.LICENCE),
        ("licence.txt", Role.LICENCE),
        ("USE_POLICY.md", Role.LICENCE),
        ("Readme.txt", Role.DOCUMENTATION),
        ("CHANGES.md", Role.DOCUMENTATION),
        ("preprocessor_config.json", Role.PROCESSOR),
        ("hf_quant_config.json", Role.QUANTIZATION),
        ("LICENSED.txt", None),
        ("data.json", None),
    ],
)
def test_names_tell_roles(path, role):
    assert role_of(path) is role


def test_many_small_files_are_read_in_little_time(tmp_path):
    directory = write_bundle_directory(tmp_path / "many")
    for number in range(300):
        (directory / f"notes-{number}.md").write_text(str(number))
    started = time.perf_counter()
    assert len(read_directory(directory).files) == 302
    assert time.perf_counter() - started < 10
