import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.files.listing import list_directory
from gates.files.names import collisions, refuse_hostile, refuse_name
from gates.files.refusal import FileRefused
from schemas.common import check_path


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("", "name-path"),
        ("/etc/passwd", "name-path"),
        ("../x", "name-path"),
        ("a/../b", "name-path"),
        ("a//b", "name-path"),
        ("a/./b", "name-path"),
        ("a\\b", "name-path"),
        ("..\\x", "name-path"),
        ("C:x", "name-path"),
        ("a\nb", "name-control"),
        ("a\0b", "name-control"),
        ("a\x7f", "name-control"),
        ("a\u202ebin.json", "name-control"),
        ("a\u200bb", "name-control"),
        ("a\ufeffb", "name-control"),
        ("a\udcffb", "name-control"),
        ("x" * 121, "name-length"),
        ("/".join(["x" * 100] * 3), "name-length"),
        ("a/b/c/d/e/f/g", "name-depth"),
        ("nul", "name-reserved"),
        ("aux/x.json", "name-reserved"),
        ("CON.json", "name-reserved"),
        ("com1.tar.json", "name-reserved"),
        ("LPT0", "name-reserved"),
        ("com¹", "name-reserved"),
        ("CONIN$", "name-reserved"),
        ("conout$.txt", "name-reserved"),
        (".hidden", "name-start"),
        ("-rf", "name-start"),
        ("a/.git/hooks", "name-start"),
        ("a.", "name-ending"),
        ("a /b", "name-ending"),
        ("e\u0301.json", "name-unicode"),
        ("é.json", "name-characters"),
        ("a b.json", "name-characters"),
        ("ab:c", "name-characters"),
        ("a?b", "name-characters"),
        ("a*b", "name-characters"),
        ("ﬁ.json", "name-characters"),
    ],
)
def test_a_name_that_some_system_reads_otherwise_is_refused_for_its_reason(path, code):
    refused = refuse_name(path)
    assert refused is not None
    assert refused.code == code
    assert refused.advice
    assert str(refused).isprintable()


@pytest.mark.parametrize(
    "path",
    [
        "model-00001-of-00002.safetensors",
        "model.safetensors-00001-of-00002.safetensors",
        "a/b/c/d/e/f",
        "x" * 120,
        "_a",
        "console.json",
        "command.txt",
        "c++.md",
        "auxiliary",
    ],
)
def test_a_plain_name_is_taken(path):
    assert refuse_name(path) is None


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from("aA.-_+ /\\é\u0301\u202e\0c:on1"), max_size=12) | st.text(max_size=8))
def test_the_reasons_are_for_exactly_the_names_that_bundles_refuse(path):
    try:
        check_path(path)
    except ValueError:
        assert refuse_name(path) is not None
    else:
        assert refuse_name(path) is None


def test_a_name_with_letters_of_any_language_is_not_hostile():
    for path in ("图片.png", "Größe 1.png", "assets/модель.jpg", "a (1).png", "naïve.txt"):
        assert refuse_hostile(path) is None
        assert refuse_name(path) is not None


@pytest.mark.parametrize(
    ("paths", "code", "refused"),
    [
        (["model.safetensors", "Model.safetensors"], "case-collision", "model.safetensors"),
        (["a/x", "A/x"], "case-collision", "a/x"),
        (["ss.json", "ß.json"], "case-collision", "ß.json"),
        (["fi.json", "ﬁ.json"], "case-collision", "ﬁ.json"),
        (["é.json", "e\u0301.json"], "case-collision", None),
        (["K.json", "\u212a.json"], "case-collision", "\u212a.json"),
        (["a", "a/b"], "name-is-folder", "a/b"),
        (["A", "a/b/c"], "name-is-folder", "a/b/c"),
    ],
)
def test_names_that_a_file_system_takes_for_one_are_refused(paths, code, refused):
    (found,) = collisions(paths)
    assert found.code == code
    assert refused is None or found.file == refused


def test_names_that_differ_do_not_collide():
    assert list(collisions(["a", "b", "a.b", "c/a", "c/b", "ab"])) == []


# -------------------------------------------------------------------------------------------------- in a directory


def codes(tmp_path, **options) -> dict[str, str]:
    return {refused.file: refused.code for refused in list_directory(tmp_path, **options).refused}


def test_what_is_no_regular_file_of_one_name_is_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file.json").write_text("{}")
    (root / "inside").symlink_to("file.json")
    (root / "gone").symlink_to("missing.json")
    (root / "out").symlink_to("/etc/hostname")
    (root / "up").symlink_to("../root/file.json")
    (root / "loop").symlink_to("loop")
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    (tmp_path / "elsewhere").write_text("x")
    os.link(tmp_path / "elsewhere", root / "linked.json")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(root / "socket"))
    found = codes(root)
    listening.close()

    assert found == {
        "inside": "symbolic-link",
        "gone": "dangling-link",
        "out": "link-escapes-root",
        "up": "symbolic-link",
        "loop": "symbolic-link",
        "folder": "link-escapes-root",
        "pipe": "file-irregular",
        "linked.json": "hard-link",
        "socket": "file-irregular",
    }
    assert "linked.json" not in codes(root, hard_links=True)
    assert [entry.path for entry in list_directory(root, hard_links=True).entries] == ["file.json", "linked.json"]


def test_hostile_names_are_refused_even_of_files_that_nothing_reads(tmp_path):
    for name in ("a\nb.png", "evil\u202egnp.exe", "back\\slash.png", "图片.png", "two words.png"):
        (tmp_path / name).write_text("x")
    (tmp_path / os.fsdecode(b"raw\xff.png")).write_text("x")
    assert sorted(codes(tmp_path).values()) == ["name-control"] * 3 + ["name-path"]


def test_hidden_and_excluded_files_and_folders_are_left_out_with_their_reason(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "bad\nname").write_text("x")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "params.json").write_text("{}")
    (tmp_path / "link").symlink_to("nowhere")
    found = list_directory(tmp_path, exclude=["original/*", "link"])
    assert [(one.path, one.code) for one in found.left_out] == [
        (".git/", "hidden"),
        ("link", "excluded"),
        ("original/params.json", "excluded"),
    ]
    assert (found.entries, found.refused) == ((), ())


def test_folders_without_end_are_refused(tmp_path):
    folder = tmp_path
    for _ in range(40):
        folder = folder / "d"
    folder.mkdir(parents=True)
    (found,) = codes(tmp_path).values()
    assert found == "name-depth"


def test_a_directory_that_is_not_there_is_said_plainly(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, said in (("file", "is not a directory"), ("missing", "there is no directory missing")):
        with pytest.raises(FileRefused, match=said):
            list_directory(tmp_path / name)
