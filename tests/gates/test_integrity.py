"""The integrity gate finds every byte, file and link that is not the bundle's, and passes nothing unread."""

import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates import catalog, integrity
from gates.gate import EARLIER, GateContext, JudgeInput
from schemas.policy import IntegrityRule
from schemas.result import Verdict
from tests.support import chain

RULE = IntegrityRule(gate="integrity")


@pytest.fixture
def root(tmp_path):
    return chain.write_bundle_directory(tmp_path / "chain")


@pytest.fixture
def bundle(root):
    return chain.describe(root, environment="sha256:" + "0" * 64)


def judge(bundle, *passes):
    return integrity.judge(JudgeInput(RULE, {"passes": list(passes)}, bundle))


def codes(judged):
    return {finding.code for finding in judged.findings}


def test_the_right_files_pass_when_hashed_before_boot_and_at_the_end(root, bundle):
    before = integrity.observe(bundle, root)
    context = GateContext(bundle=bundle, root=root, rule=RULE, before_boot=before)
    result, raw = catalog.run("integrity", context)
    assert result.verdict is Verdict.PASSED, result
    assert result.measurements[0].value == 4
    assert catalog.recompute(raw, None, None, bundle) == result


def test_one_file_is_no_plural_and_what_earlier_versions_said_is_recomputed_so(root, bundle):
    before = integrity.observe(bundle, root)
    context = GateContext(bundle=bundle, root=root, rule=RULE, before_boot=before)
    result, raw = catalog.run("integrity", context)
    assert result.summary.startswith(f"All {len(bundle.files)} files (")
    assert all(catalog.recompute(raw, None, None, bundle, manner) == result for manner in EARLIER)
    (kept,) = (file for file in bundle.files if file.path == "model.gguf")
    for file in bundle.files:
        if file is not kept:
            (root / file.path).unlink()
    single = bundle.model_copy(update={"files": [kept]})
    context = GateContext(bundle=single, root=root, rule=RULE, before_boot=integrity.observe(single, root))
    result, raw = catalog.run("integrity", context)
    said = f"The one file ({kept.size:,} bytes) was right before boot and after the last gate."
    assert (result.verdict, result.summary) == (Verdict.PASSED, said)
    older = {catalog.recompute(raw, None, None, single, manner).summary for manner in EARLIER}
    assert older == {f"All 1 files ({kept.size:,} bytes) were right before boot and after the last gate."}


def test_hard_links_pass(root, bundle, tmp_path):
    os.link(root / "model.gguf", tmp_path / "store")
    before = integrity.observe(bundle, root)
    assert judge(bundle, before, before).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()),
        lambda path: path.write_bytes(b"x"),
        lambda path: os.utime(path, (1, 1)),
        lambda path: shutil.copy2(path, path.with_name("copy")) and path.with_name("copy").replace(path),
        lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")),
    ],
    ids=["removed", "written anew", "other bytes", "touched", "replaced by its copy", "replaced by a link"],
)
def test_what_became_other_since_a_pass_is_told_without_reading_it(root, bundle, tmp_path, harm):
    before = integrity.observe(bundle, root)
    os.link(root / "model.gguf", tmp_path / "of another bundle")
    assert integrity.touched(before, root) == []
    harm(root / "model.gguf")
    assert integrity.touched(before, root) == ["model.gguf"]


def test_one_clean_pass_alone_does_not_pass(root, bundle):
    result, _ = catalog.run("integrity", GateContext(bundle=bundle, root=root, rule=RULE))
    assert result.verdict is Verdict.INCONCLUSIVE


def flip(root):
    data = bytearray((root / "model.gguf").read_bytes())
    data[len(data) // 2] ^= 1
    (root / "model.gguf").write_bytes(data)


def truncate(root):
    with (root / "model.gguf").open("r+b") as file:
        file.truncate(1000)


def remove(root):
    (root / "chat_template.jinja").unlink()


def add(root):
    (root / "extra.bin").write_bytes(b"x")


def add_hidden(root):
    (root / ".hidden").mkdir()


def link(root):
    (root / "model.gguf").rename(root.parent / "elsewhere.gguf")
    (root / "model.gguf").symlink_to(root.parent / "elsewhere.gguf")


def add_link(root):
    (root / "link").symlink_to("/etc")


def folder(root):
    (root / "model.gguf").unlink()
    (root / "model.gguf").mkdir()


def pipe(root):
    (root / "model.gguf").unlink()
    os.mkfifo(root / "model.gguf")


def pipe_beside(root):
    os.mkfifo(root / "pipe")


@pytest.mark.parametrize(
    ("harm", "code", "file"),
    [
        (flip, "file-differs", "model.gguf"),
        (truncate, "file-differs", "model.gguf"),
        (remove, "file-missing", "chat_template.jinja"),
        (add, "file-extra", "extra.bin"),
        (add_hidden, "file-extra", ".hidden/"),
        (link, "file-not-a-regular-file", "model.gguf"),
        (add_link, "file-extra", "link"),
        (folder, "file-not-a-regular-file", "model.gguf"),
        (pipe, "file-not-a-regular-file", "model.gguf"),
        (pipe_beside, "file-extra", "pipe"),
    ],
)
@pytest.mark.parametrize("when", ["before boot", "after the last gate"])
def test_b25_a_tree_that_is_not_the_bundles_fails_and_is_named(root, bundle, *, harm, code, file, when):
    clean = integrity.observe(bundle, root)
    harm(root)
    harmed = integrity.observe(bundle, root)
    judged = judge(bundle, harmed) if when == "before boot" else judge(bundle, clean, harmed)
    assert judged.verdict is Verdict.FAILED
    assert (code, file) in {(finding.code, finding.file) for finding in judged.findings}
    assert file in judged.summary
    assert when in judged.summary


def test_a_wrong_byte_is_reported_with_both_digests(root, bundle):
    flip(root)
    judged = judge(bundle, integrity.observe(bundle, root))
    named = next(file.sha256 for file in bundle.files if file.path == "model.gguf")
    assert judged.findings[0].expected == named
    assert judged.findings[0].found.startswith("sha256:")
    assert judged.findings[0].found != named


def test_a_link_in_the_middle_of_a_path_is_not_followed(tmp_path):
    root = chain.write_bundle_directory(tmp_path / "chain")
    (root / "sub").mkdir()
    for name in ("model.gguf", "chat_template.jinja"):
        (root / name).rename(root / "sub" / name)
    flat = chain.describe(root / "sub", environment="sha256:" + "0" * 64)
    body = flat.model_dump(mode="json", by_alias=True, exclude_none=True)
    body["template"] = {"origin": "weights"}
    for file in body["files"]:
        file["path"] = "sub/" + file["path"]
    bundle = type(flat).model_validate(body)
    clean = integrity.observe(bundle, root)
    assert judge(bundle, clean, clean).verdict is Verdict.PASSED
    (root / "sub").rename(tmp_path / "away")
    (root / "sub").symlink_to(tmp_path / "away")
    judged = judge(bundle, integrity.observe(bundle, root))
    assert judged.verdict is Verdict.FAILED
    assert codes(judged) == {"file-not-a-regular-file", "file-extra"}


def test_equal_bytes_under_another_inode_are_errored(root, bundle):
    before = integrity.observe(bundle, root)
    shutil.copy2(root / "model.gguf", root / "copy")
    (root / "copy").rename(root / "model.gguf")
    judged = judge(bundle, before, integrity.observe(bundle, root))
    assert judged.verdict is Verdict.ERRORED
    assert codes(judged) == {"file-touched"}


def test_a_file_that_cannot_be_read_is_errored(root, bundle):
    before = integrity.observe(bundle, root)
    # Root reads every file whatever its mode, so the record of a failed read is written by hand.
    record = {"path": "model.gguf", "problem": integrity.UNREADABLE, "detail": "EIO: Input/output error"}
    files = [record if one["path"] == "model.gguf" else one for one in before["files"]]
    judged = judge(bundle, before, before | {"files": files})
    assert judged.verdict is Verdict.ERRORED
    assert judged.findings[0].found == "EIO: Input/output error"


def test_a_folder_that_is_not_there_is_errored(bundle, tmp_path):
    judged = judge(bundle, integrity.observe(bundle, tmp_path / "nothing"))
    assert judged.verdict is Verdict.ERRORED
    assert "ENOENT" in judged.summary


def test_a_file_written_while_it_is_read_is_errored(root, bundle, monkeypatch):
    read = os.read

    def read_and_append(descriptor, size):
        with (root / "model.gguf").open("ab") as file:
            file.write(b"x" * 8)
        monkeypatch.setattr(os, "read", read)
        return read(descriptor, size)

    monkeypatch.setattr(os, "read", read_and_append)
    judged = judge(bundle, integrity.observe(bundle, root))
    assert judged.verdict is not Verdict.PASSED
    assert codes(judged) & {"file-changed-while-read", "file-differs"}


@pytest.mark.parametrize("records", [{}, {"passes": []}, {"passes": None}, {"passes": [{}]}, {"passes": [{}, {}]}, []])
def test_empty_records_are_errored(root, bundle, records):
    context = GateContext(bundle=bundle, root=root, rule=RULE)
    result, _ = catalog.conclude("integrity", context, records, duration_ms=1)
    assert result.verdict is Verdict.ERRORED
    assert result.findings


@given(data=st.data())
def test_leaving_records_out_never_makes_a_pass(tmp_path_factory, data):
    root = chain.write_bundle_directory(tmp_path_factory.mktemp("case") / "chain")
    bundle = chain.describe(root, environment="sha256:" + "0" * 64)
    clean = integrity.observe(bundle, root)
    harm = data.draw(st.sampled_from([flip, remove, add, link, add_link, lambda _: None]))
    harm(root)
    passes = data.draw(st.sampled_from([[clean, integrity.observe(bundle, root)], [integrity.observe(bundle, root)]]))
    context = GateContext(bundle=bundle, root=root, rule=RULE)
    whole, _ = catalog.conclude("integrity", context, {"passes": passes}, duration_ms=1)
    place = data.draw(st.integers(0, len(passes) - 1))
    key = data.draw(st.sampled_from(["files", "extra", "problem", "entries", "seconds", None]))
    if key is None:
        thinned = [one for index, one in enumerate(passes) if index != place]
    elif key in {"files", "extra"} and passes[place][key] and data.draw(st.booleans()):
        left = data.draw(st.lists(st.sampled_from(passes[place][key]), max_size=len(passes[place][key]) - 1))
        thinned = [one | {key: left} if index == place else one for index, one in enumerate(passes)]
    else:
        thinned = [
            {name: value for name, value in one.items() if name != key} if index == place else one
            for index, one in enumerate(passes)
        ]
    result, _ = catalog.conclude("integrity", context, {"passes": thinned}, duration_ms=1)
    assert result.verdict is not Verdict.PASSED
    assert whole.verdict is not Verdict.PASSED or harm.__name__ == "<lambda>"
