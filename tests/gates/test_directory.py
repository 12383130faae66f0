import hashlib
import io
import os
import shutil
import socket
import time
import zipfile
from pathlib import Path

import pytest

from gates import facts
from gates.directory import Contents, DirectoryRefused, read_directory
from gates.files.contents import Reader, role_of
from schemas.bundle import Role
from tests.support.chain import TEMPLATE, write_bundle_directory
from tests.support.headers import gguf, safetensors
from tests.support.opened import opened_under

LLAMACPP, VLLM = Reader("llamacpp"), Reader("vllm")


def directory_of(directory: Path, reader: Reader = LLAMACPP, **options) -> Contents:
    return read_directory(directory, reader, **options)


class Remembered(dict):
    def put(self, key, value):
        self[key] = value


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    return write_bundle_directory(tmp_path_factory.mktemp("chain") / "bundle")


@pytest.fixture
def directory(chain, tmp_path) -> Path:
    return Path(shutil.copytree(chain, tmp_path / "bundle"))


def refusals(directory: Path, reader: Reader = LLAMACPP, **options) -> dict[str, str]:
    with pytest.raises(DirectoryRefused) as refused:
        directory_of(directory, reader, **options)
    return {one.file: f"{one}; {one.advice}" for one in refused.value.refusals}


def test_every_file_has_its_hash_size_and_role(directory):
    contents = directory_of(directory)

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
        first = directory_of(directory, memory=memory)
    assert sorted(opened) == ["chat_template.jinja", "model.gguf"]  # each once: hash and facts from one opening

    with opened_under(directory) as opened:
        second = directory_of(directory, memory=memory)

    assert opened == []
    assert [f.was_read for f in second.files] == [False, False]
    assert [(f.path, f.sha256, f.role, f.facts) for f in second.files] == [
        (f.path, f.sha256, f.role, f.facts) for f in first.files
    ]


def test_a_file_changed_in_place_is_read_again_even_with_its_old_size_and_time(directory):
    memory = Remembered()
    before = directory_of(directory, memory=memory)
    template = directory / "chat_template.jinja"
    state = template.stat()

    template.write_text(TEMPLATE.replace("assistant", "assistent"))
    os.utime(template, ns=(state.st_atime_ns, state.st_mtime_ns))
    with opened_under(directory) as opened:
        after = directory_of(directory, memory=memory)

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
        found = directory_of(directory, memory=memory).files[0]
        assert found.sha256 == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_times_that_a_coarse_clock_wrote_are_not_trusted(directory, monkeypatch):
    memory = Remembered()
    real = os.stat

    class Coarse:
        def __init__(self, state):
            self.state = state

        def __getattr__(self, name):
            value = getattr(self.state, name)
            return value // 10**9 * 10**9 if name in ("st_ctime_ns", "st_mtime_ns") else value

    monkeypatch.setattr(os, "stat", lambda *named, **how: Coarse(real(*named, **how)))
    monkeypatch.setattr(os, "fstat", lambda fd, fstat=os.fstat: Coarse(fstat(fd)))
    directory_of(directory, memory=memory)
    assert memory == {}


def test_a_damaged_memory_is_not_believed(directory):
    memory = Remembered()
    expected = directory_of(directory, memory=memory)
    for damaged in ("", "{", "[]", '{"sha256": 1}', "null"):
        for key in memory:
            memory[key] = damaged
        found = directory_of(directory, memory=memory)
        assert found.revision == expected.revision


def test_a_new_version_of_a_reader_reads_again(directory, monkeypatch):
    memory = Remembered()
    directory_of(directory, memory=memory)
    monkeypatch.setattr(facts, "VERSION", facts.VERSION + 1)
    assert all(file.was_read for file in directory_of(directory, memory=memory).files)


def test_the_revision_depends_on_paths_and_bytes_and_on_nothing_else(directory, tmp_path):
    there = Path(shutil.copytree(directory, tmp_path / "elsewhere" / "other-name"))
    os.utime(there / "model.gguf", (1, 1))
    assert directory_of(there).revision == directory_of(directory).revision

    with (there / "model.gguf").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert directory_of(there).revision != directory_of(directory).revision


def test_progress_ends_at_all_bytes_whether_read_or_remembered(directory):
    memory = Remembered()
    for _ in range(2):
        steps: list[tuple[int, int]] = []
        directory_of(directory, memory=memory, progress=lambda done, total, steps=steps: steps.append((done, total)))
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
    (directory / "config.json").write_text("no JSON, and llama.cpp does not read it")

    contents = directory_of(directory, exclude=["original/*", "*.xyz"])

    assert len(contents.files) == 2
    assert [(one.path, one.code) for one in contents.left_out] == [
        (".git/", "hidden"),
        (".gitattributes", "hidden"),
        ("config.json", "unread"),
        ("notes.xyz", "excluded"),
        ("original/weights.pth", "excluded"),
    ]


def test_everything_wrong_is_told_at_once_with_what_to_do(directory, tmp_path):
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"GGUF")
    (directory / "link.gguf").symlink_to(outside)
    (directory / "loop").symlink_to(directory)
    (directory / "code.so").write_text("x")
    (directory / "old.zip").write_bytes(b"x")
    (directory / "a b.jinja").write_text("{}")
    (directory / "nul.md").write_text("{}")
    (directory / "MODEL.gguf.md").write_text("")
    (directory / "model.GGUF.md").write_text("")
    os.mkfifo(directory / "pipe.json")
    os.link(outside, directory / "linked.json")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(directory / "socket.json"))

    found = refusals(directory)
    listening.close()

    assert set(found) == {
        "link.gguf",
        "loop",
        "code.so",
        "old.zip",
        "a b.jinja",
        "nul.md",
        "pipe.json",
        "socket.json",
        "linked.json",
        "model.GGUF.md",
    }
    assert "symbolic link" in found["link.gguf"]
    assert "symbolic link" in found["loop"]
    assert "no regular file" in found["pipe.json"]
    assert "--hard-links" in found["linked.json"]
    assert "differs from MODEL.gguf.md only in case" in found["model.GGUF.md"]
    assert "--exclude" in found["code.so"]


def test_what_the_engine_does_not_read_is_not_even_opened(directory):
    for name in ("config.json", "convert.py", "pytorch_model.bin", "image.png", "other.xyz"):
        (directory / name).write_bytes(b"\x80\x04 anything")
    with opened_under(directory) as opened:
        contents = directory_of(directory)
    assert sorted(opened) == ["chat_template.jinja", "model.gguf"]
    assert {one.path: one.code for one in contents.left_out} == {
        "config.json": "unread",
        "convert.py": "code",
        "image.png": "media",
        "other.xyz": "unknown",
        "pytorch_model.bin": "pickled",
    }


def test_a_file_with_another_name_elsewhere_is_taken_when_somebody_says_so(directory, tmp_path):
    os.link(directory / "model.gguf", tmp_path / "other")
    assert "--hard-links" in refusals(directory)["model.gguf"]
    assert len(directory_of(directory, hard_links=True).files) == 2


def test_a_role_is_given_where_the_name_does_not_tell_it(directory):
    (directory / "words.list").write_text("pieces")
    assert [one.path for one in directory_of(directory).left_out] == ["words.list"]

    contents = directory_of(directory, roles={"words.list": Role.TOKENIZER})

    assert [f.path for f in contents.with_role(Role.TOKENIZER)] == ["words.list"]
    assert "not in the directory" in refusals(directory, roles={"words.mod": Role.TOKENIZER})["words.mod"]


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("model.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ("model.gguf", b"GGUF" + b"\0" * 20, "version 0"),
        ("config.json", b"\x80\x04\x95", "pickle"),
        ("config.json", b'{"a": 1, "a": 2}', "twice"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"", "is empty"),
        ("tokenizer.model", b"<html>", "web page"),
        ("tokenizer.json", b'{"a": "\\ud800"}', "half a character"),
        ("model.safetensors", b"<!DOCTYPE html>", "web page"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}', "no plain name"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "/etc/passwd"}}', "no plain name"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model.bin"}}', "no plain name"),
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
    if not name.endswith(".gguf"):
        (directory / "model.gguf").unlink()
        (directory / "model.safetensors").touch()
    if name != "model.safetensors" and not name.endswith(".gguf"):
        (directory / "model.safetensors").write_bytes(safetensors({}))
    assert said in refusals(directory, LLAMACPP if name.endswith(".gguf") else VLLM)[name]


def test_an_archive_at_the_end_of_weights_is_refused(directory):
    (directory / "model.gguf").unlink()
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n.")
    raw = held.getvalue()
    body = {"a": {"dtype": "U8", "shape": [len(raw)], "data_offsets": [0, len(raw)]}}
    (directory / "model.safetensors").write_bytes(safetensors(body, raw))
    assert "ends in a ZIP archive" in refusals(directory, VLLM)["model.safetensors"]

    (directory / "model.safetensors").write_bytes(
        safetensors(body, b"PK\x05\x06" * (len(raw) // 4) + raw[: len(raw) % 4])
    )
    assert directory_of(directory, VLLM).files


def test_a_file_that_changes_while_it_is_read_is_refused(directory):
    def change(done: int, total: int) -> None:
        with (directory / "model.gguf").open("ab") as file:
            file.write(b"\0")

    # Its reader may be about to open it when the reader of a smaller file is told of progress first.
    assert "changed while" in refusals(directory, progress=change)["model.gguf"]


@pytest.fixture
def meanwhile(directory, monkeypatch):
    """Folders `a` and `b`, and what lets an act happen when the first has been listed and the second has not."""
    (directory / "a").mkdir()
    (directory / "b").mkdir()
    (directory / "b" / "adapter_config.json").write_text("{}")
    scandir, inode = os.scandir, (directory / "a").stat().st_ino

    def happens(act):
        def scan(folder):
            if os.fstat(folder).st_ino == inode:
                act(directory / "b")
            return scandir(folder)

        monkeypatch.setattr(os, "scandir", scan)

    return happens


def test_a_folder_that_a_link_takes_the_place_of_while_the_directory_is_read_is_not_gone_into(
    directory, meanwhile, tmp_path
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')

    def swap(folder):
        shutil.rmtree(folder)
        folder.symlink_to(elsewhere)

    meanwhile(swap)
    assert set(refusals(directory)) == {"b"}


def test_a_folder_that_goes_while_the_directory_is_read_is_told_by_its_name(directory, meanwhile):
    meanwhile(shutil.rmtree)
    assert refusals(directory) == {"b": "was a folder, and is none any more; None"}


def test_folders_whose_path_is_longer_than_a_path_may_be_are_read(directory):
    folder = os.open(directory, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=folder)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(os.open("config.json", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
    os.close(folder)
    assert [file.path for file in directory_of(directory).files] == ["chat_template.jinja", "model.gguf"]


def test_what_is_no_directory_is_said_plainly(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in refusals(tmp_path / "file")[""]
    assert "there is no directory" in refusals(tmp_path / "missing")[""]
    (tmp_path / "empty").mkdir()
    assert "holds no weights" in refusals(tmp_path / "empty")[""]


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
    (blobs / ("cd" * 20)).write_bytes(gguf())
    (snapshot / "sub" / "mmproj-F16.gguf").symlink_to(f"../../../blobs/{'cd' * 20}")
    return snapshot


def test_the_hub_cache_is_read_through_its_own_links(snapshot, directory):
    contents = directory_of(snapshot)
    (directory / "sub").mkdir()
    (directory / "sub" / "mmproj-F16.gguf").write_bytes(gguf())
    assert contents.revision == directory_of(directory).revision
    assert all(file.place.is_file() and not file.place.is_symlink() for file in contents.files)


@pytest.mark.parametrize(
    "target", ["../../blobs/../../secret", "../../../blobs/{}", "/etc/passwd", "model.gguf", "../../blobs/x"]
)
def test_any_other_link_in_a_snapshot_is_refused(snapshot, target):
    (snapshot / "config.json").symlink_to(target.format("cd" * 20))
    assert "symbolic link" in refusals(snapshot)["config.json"]


def test_a_snapshot_whose_blob_is_a_link_missing_or_altered_is_refused(snapshot):
    blobs = snapshot.parent.parent / "blobs"
    (blobs / ("ef" * 20)).symlink_to("/etc/passwd")
    (snapshot / "config.json").symlink_to("../../blobs/" + "ef" * 20)
    (snapshot / "merges.txt").symlink_to("../../blobs/" + "01" * 20)
    found = refusals(snapshot)
    assert "no regular file" in found["config.json"]
    assert "not there" in found["merges.txt"]

    (snapshot / "config.json").unlink()
    (snapshot / "merges.txt").unlink()
    template = blobs / (snapshot / "chat_template.jinja").readlink().name
    template.write_text("altered")
    assert "lies in the Hub cache as" in refusals(snapshot)["chat_template.jinja"]


def test_links_of_the_cache_form_elsewhere_are_refused(snapshot, tmp_path):
    moved = tmp_path / "elsewhere" / "plain"
    shutil.copytree(snapshot, moved, symlinks=True)
    assert set(refusals(moved)) == {"chat_template.jinja", "model.gguf", "sub/mmproj-F16.gguf"}


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
    assert len(directory_of(directory).files) == 302
    assert time.perf_counter() - started < 10
