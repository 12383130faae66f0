"""Incident cases of weights and files, in their named forms, with controls and neighbours."""

import hashlib
import json
import os
import threading
import time

import pytest

from gates import integrity
from gates.directory import DirectoryRefused, read_directory
from gates.files.contents import Reader
from gates.static.composition import of_directory
from gates.static.declared import Declared
from gates.static.examine import examine
from tests.support import chain
from tests.support.checkpoints import (
    SHARDS,
    T,
    alarms,
    codes,
    edit_json,
    micro,
    micro_config,
    micro_sharded,
    micro_tensors,
    only,
    speak,
    validate,
    write_json,
    write_safetensors,
)

VLLM = Reader("vllm")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4976698672\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_c001_a_pointer_in_place_of_a_file_is_named_with_both_sizes(tmp_path, name, end):
    root = speak(micro(tmp_path / "m"))
    text = POINTER.replace("\n", end)
    (root / name).write_bytes(text.encode())
    found = validate(root)
    flaw = only(found, "lfs-pointer")
    assert (flaw.file, flaw.found["size"], flaw.expected["size"]) == (name, len(text), 4976698672)
    assert len(POINTER) == 135
    assert not codes(found) & {"header-invalid", "config-unparseable"}
    assert found.verdict == "failed"


def test_c001_every_stub_of_a_clone_is_named(tmp_path):
    root = micro_sharded(tmp_path / "m")
    for name in SHARDS:
        (root / name).write_text(POINTER)
    assert [one.file for one in validate(root).flaws if one.code == "lfs-pointer"] == list(SHARDS)


def test_c006_an_index_entry_whose_file_lacks_the_tensor_is_named(tmp_path):
    root = micro_sharded(tmp_path / "m")
    write_safetensors(root / SHARDS[1], [one for one in micro_tensors()[7:] if one.name != "model.norm.weight"])
    found = validate(root)
    flaw = only(found, "index-tensor-absent")
    assert flaw.found == {"tensor": "model.norm.weight", "shard": SHARDS[1], "held_by": []}
    assert flaw.pointer == "/weight_map/model.norm.weight"
    assert codes(found, "block") == {"index-tensor-absent"}


def test_c006_an_index_entry_says_where_the_tensor_really_is(tmp_path):
    root = micro_sharded(tmp_path / "m")
    edit_json(
        root / "model.safetensors.index.json", lambda told: told["weight_map"].update({"model.norm.weight": SHARDS[0]})
    )
    assert only(validate(root), "index-tensor-absent").found["held_by"] == [SHARDS[1]]


def test_c006_a_wrong_total_alone_warns_with_both_sums(tmp_path):
    found = validate(micro_sharded(tmp_path / "m", total=9680))
    assert only(found, "total-size-wrong").found == {"declared": 9680, "summed": 9648}
    assert alarms(found) == {"total-size-wrong"}
    assert found.verdict == "passed"


def test_c007_tensors_that_the_index_does_not_reach_are_counted(tmp_path):
    root = micro_sharded(tmp_path / "m")
    lost = {one.name for one in micro_tensors()[7:]}
    edit_json(root / "model.safetensors.index.json", lambda told: [told["weight_map"].pop(name) for name in lost])
    flaw = only(validate(root), "tensors-unreachable")
    assert flaw.found["count"] == 5
    assert set(flaw.found["tensors"]) == lost
    assert flaw.found["orphans"] == [SHARDS[1]]
    assert "LlamaForCausalLM" in flaw.message


def test_c007_tensors_that_are_in_no_file_at_all_are_another_reason(tmp_path):
    root = micro(tmp_path / "m", tensors=[one for one in micro_tensors() if "mlp.up" not in one.name])
    found = validate(root)
    assert only(found, "tensor-missing").found["missing"] == ["model.layers.0.mlp.up_proj.weight"]
    assert codes(found, "block") == {"tensor-missing"}


def test_c007_a_file_that_the_index_names_and_that_is_missing_is_named(tmp_path):
    root = micro_sharded(tmp_path / "m")
    (root / SHARDS[1]).unlink()
    found = validate(root)
    assert only(found, "shard-missing").expected == SHARDS[1]
    assert only(found, "shard-missing").found["count"] == 5
    assert codes(found, "block") == {"shard-missing"}


def test_c007_without_an_index_the_names_say_how_many_there_must_be(tmp_path):
    root = micro_sharded(tmp_path / "m")
    (root / "model.safetensors.index.json").unlink()
    assert alarms(validate(root)) == set()
    (root / SHARDS[1]).unlink()
    assert only(validate(root), "shard-missing").expected == [SHARDS[1]]


def _consolidated(root):
    renamed = [
        one._replace(name=one.name.replace("model.", "").replace("self_attn", "attention")) for one in micro_tensors()
    ]
    write_safetensors(root / "consolidated.safetensors", renamed)
    return root


def test_c010_a_second_set_warns_and_does_not_count_twice(tmp_path):
    root = _consolidated(micro_sharded(tmp_path / "m"))
    found = validate(root, {"engine": {"name": "vllm", "version": "0.32.0"}})
    flaw = only(found, "duplicate-weight-sets")
    assert flaw.severity == "warn"
    assert (flaw.found["effective_bytes"], flaw.found["bytes_in_files"]) == (9648, 19296)
    assert found.inferred["weights"]["effective_bytes"] == 9648
    assert alarms(found) == {"duplicate-weight-sets"}


@pytest.mark.parametrize("words", [["--load-format", "runai_streamer"], ["--load-format=runai_streamer"]])
def test_c010_a_load_format_that_takes_every_file_blocks(tmp_path, words):
    root = _consolidated(micro_sharded(tmp_path / "m"))
    found = validate(root, {"engine": {"name": "vllm", "version": "0.19.1", "arguments": words}})
    assert only(found, "duplicate-weight-sets").severity == "block"


def test_c010_a_copy_in_another_precision_beside_the_model_is_a_second_set(tmp_path):
    root = micro(tmp_path / "m")
    write_safetensors(root / "model.fp16.safetensors", [one._replace(dtype="F16") for one in micro_tensors()])
    assert only(validate(root), "duplicate-weight-sets").found["files"] == ["model.fp16.safetensors"]


def _overlay(root, old=b"\x00\x00"):
    shard = [one._replace(data=old * 8) if one.name == "model.norm.weight" else one for one in micro_tensors()[7:]]
    write_safetensors(root / SHARDS[1], shard)
    name = "model-overlay-00001.safetensors"
    write_safetensors(root / name, [T("model.norm.weight", "BF16", (8,), b"\x00\x40" * 8)])
    edit_json(
        root / "model.safetensors.index.json", lambda told: told["weight_map"].update({"model.norm.weight": name})
    )
    return root


def test_c012_an_overlay_that_the_index_names_is_no_fault(tmp_path):
    found = validate(_overlay(micro_sharded(tmp_path / "m")))
    assert alarms(found) == set()
    assert only(found, "index-decides").found["superseded"] == 1


def test_c012_what_an_overlay_supersedes_changes_no_digest(tmp_path):
    told = [
        validate(_overlay(micro_sharded(tmp_path / name), old), with_digest=True).inferred["weights"]["digest"]
        for name, old in (("a", b"\x00\x00"), ("b", b"\x80\x3f"))
    ]
    assert told[0] == told[1]
    plain = validate(micro_sharded(tmp_path / "c"), with_digest=True).inferred["weights"]["digest"]
    assert plain != told[0]


def test_c012_a_superseded_copy_is_not_scanned(tmp_path):
    assert alarms(validate(_overlay(micro_sharded(tmp_path / "m"), b"\xc0\x7f"))) == set()


def test_c013_odd_names_follow_the_index(tmp_path):
    names = ("model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors")
    assert validate(micro_sharded(tmp_path / "m", names=names)).flaws == ()


def test_c015_an_untied_head_that_is_nowhere_offers_both_repairs(tmp_path):
    root = micro(tmp_path / "m", tensors=micro_tensors()[:11])
    found = validate(root)
    flaw = only(found, "head-missing")
    assert flaw.found["missing"] == ["lm_head.weight"]
    assert len(flaw.expected["repairs"]) == 2
    assert codes(found, "block") == {"head-missing"}


@pytest.mark.parametrize(
    ("model_type", "said", "is_fault"),
    [
        ("llama", True, False),
        ("llama", None, True),
        ("mistral", None, True),
        ("qwen2", None, True),
        ("gemma", None, False),
        ("gemma", False, True),
        ("llama", False, True),
    ],
)
def test_c015_whether_a_head_is_needed_follows_the_family(tmp_path, model_type, said, is_fault):
    root = micro(tmp_path / "m", tensors=micro_tensors()[:11], model_type=model_type, tie_word_embeddings=said)
    assert ("head-missing" in codes(validate(root))) is is_fault


def test_c015_a_head_in_the_text_configuration_of_another_model_counts(tmp_path):
    inner = micro_config(architectures=None, tie_word_embeddings=None)
    root = micro(tmp_path / "m", tensors=micro_tensors("model.language_model.")[:11])
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": inner}
    write_json(root / "config.json", outer | {"tie_word_embeddings": False})
    assert "head-missing" in codes(validate(root))
    write_json(root / "config.json", outer | {"tie_word_embeddings": True})
    assert "head-missing" not in codes(validate(root))


def test_c015_a_class_without_a_head_needs_none(tmp_path):
    root = micro(tmp_path / "m", tensors=micro_tensors()[:11], architectures=["LlamaModel"])
    assert "head-missing" not in codes(validate(root))


def _with(data, dtype="BF16", index=5, name="model.layers.0.mlp.down_proj.weight"):
    def changed(one):
        typed = one._replace(dtype=dtype)
        raw = bytearray(typed.size)
        raw[index * len(data) : (index + 1) * len(data)] = data
        return typed._replace(data=bytes(raw))

    return [changed(one) if one.name == name else one for one in micro_tensors()]


@pytest.mark.parametrize(
    ("dtype", "data", "kind"),
    [
        ("BF16", b"\xc0\x7f", "nan"),
        ("BF16", b"\x80\x7f", "inf"),
        ("BF16", b"\x80\xff", "inf"),
        ("F16", b"\x00\x7e", "nan"),
        ("F16", b"\x00\xfc", "inf"),
        ("F32", b"\x00\x00\xc0\x7f", "nan"),
        ("F32", b"\x00\x00\x80\xff", "inf"),
        ("F8_E4M3", b"\x7f", "nan"),
        ("F8_E4M3", b"\xff", "nan"),
        ("F8_E5M2", b"\x7c", "inf"),
        ("F8_E5M2", b"\x7f", "nan"),
    ],
)
def test_c019_one_value_that_is_no_number_is_found_in_every_type(tmp_path, dtype, data, kind):
    root = micro(tmp_path / "m", tensors=_with(data, dtype))
    flaw = only(validate(root), "non-finite-weight")
    assert flaw.found["tensor"] == "model.layers.0.mlp.down_proj.weight"
    assert (flaw.found["count"], flaw.found["first_index"], flaw.found["kind"]) == (1, 5, kind)


@pytest.mark.parametrize(
    ("dtype", "data"), [("BF16", b"\x7f\x7f"), ("F16", b"\xff\x7b"), ("F8_E4M3", b"\x7e"), ("F8_E5M2", b"\x7b")]
)
def test_c019_the_largest_number_of_a_type_is_one(tmp_path, dtype, data):
    assert "non-finite-weight" not in codes(validate(micro(tmp_path / "m", tensors=_with(data, dtype))))


def test_c019_a_matrix_that_was_never_written_stands_out_among_its_layers(tmp_path):
    written = [one._replace(data=bytes(range(16)) * (one.size // 16)) for one in micro_tensors()]
    tensors = [one for one in written if "layers" not in one.name]
    for layer in range(5):
        for one in micro_tensors()[1:10]:
            data = None if layer == 3 and "down" in one.name else bytes(range(16)) * (one.size // 16)
            tensors.insert(-2, one._replace(name=one.name.replace("layers.0", f"layers.{layer}"), data=data))
    found = validate(micro(tmp_path / "m", tensors=tensors, num_hidden_layers=5))
    assert only(found, "constant-weight").found["tensors"] == ["model.layers.3.mlp.down_proj.weight"]
    assert found.verdict == "passed"


def test_c020_one_flipped_bit_in_the_served_copy_is_another_digest(tmp_path):
    root = chain.write_bundle_directory(tmp_path / "m")
    bundle = chain.describe(root, environment="sha256:" + "0" * 64)
    before = {record["path"]: record["sha256"] for record in integrity.observe(bundle, root)["files"]}
    with (root / "model.gguf").open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    after = {record["path"]: record["sha256"] for record in integrity.observe(bundle, root)["files"]}
    assert {path for path in before if before[path] != after[path]} == {"model.gguf"}


def test_c020_a_digest_that_the_source_says_is_held_against_the_bytes(tmp_path):
    root, raw = _snapshot(tmp_path, "a"), (tmp_path / "plain" / "model.safetensors").read_bytes()
    blob = root.parents[1] / "blobs" / hashlib.sha256(raw).hexdigest()
    blob.write_bytes(raw[:-1] + b"\x01")
    with pytest.raises(DirectoryRefused, match="SHA-256"):
        read_directory(root, VLLM)


def test_c021_a_file_that_grows_while_it_is_read_is_refused(tmp_path):
    root = micro(tmp_path / "m")
    stop = threading.Event()

    def append():
        while not stop.is_set():
            with (root / "model.safetensors").open("ab") as file:
                file.write(b"\0" * 64)
            time.sleep(0.001)

    writer = threading.Thread(target=append)
    writer.start()
    try:
        with pytest.raises(DirectoryRefused):
            read_directory(root, VLLM)
    finally:
        stop.set()
        writer.join()


def test_c021_a_file_that_changed_after_it_was_listed_blocks(tmp_path):
    root = micro(tmp_path / "m")
    composition = of_directory(root, Declared())
    with (root / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert only(examine(composition), "source-unstable").found == {"size": (root / "model.safetensors").stat().st_size}


def test_c021_an_empty_file_is_said_to_be_empty(tmp_path):
    root = speak(micro(tmp_path / "m"))
    (root / "tokenizer.json").write_bytes(b"")
    found = validate(root)
    assert only(found, "empty-file").file == "tokenizer.json"
    assert codes(found, "block") == {"empty-file"}


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama", "hid', "", '{"a": 1, "a": 2}', "[]", '{"a": NaN}', "<!doctype html><html>"]
)
def test_c021_a_configuration_that_cannot_be_read_is_named(tmp_path, text):
    root = micro(tmp_path / "m")
    (root / "config.json").write_text(text)
    found = validate(root)
    if not text:
        assert "empty-file" in codes(found)
    else:
        flaw = only(found, "config-unparseable")
        assert flaw.file == "config.json"
        assert ("is what a server answered in place of the file; fetch it again." in flaw.advice) is ("<" in text)
    assert found.verdict == "failed"


def _snapshot(tmp_path, form):
    plain = micro(tmp_path / "plain")
    root = tmp_path / "models--x" / "snapshots" / ("a" * 40)
    root.mkdir(parents=True)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for file in plain.iterdir():
        name = hashlib.sha256(file.read_bytes()).hexdigest()
        if form != "b":
            (blobs / name).write_bytes(file.read_bytes())
        (root / file.name).symlink_to(f"../../blobs/{name}")
    return root


def test_c022_links_to_their_blobs_are_the_files(tmp_path):
    root = _snapshot(tmp_path, "a")
    assert validate(root).flaws == ()
    assert read_directory(root, VLLM).revision == read_directory(tmp_path / "plain", VLLM).revision


def test_c022_links_without_their_blobs_are_all_listed(tmp_path):
    found = validate(_snapshot(tmp_path, "b"))
    assert only(found, "dangling-link").found == ["config.json", "model.safetensors"]
    assert found.verdict == "failed"


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../../../etc/hostname"])
def test_c022_a_link_out_of_the_directory_is_refused(tmp_path, target):
    root = _snapshot(tmp_path, "a")
    (root / "model.safetensors").unlink()
    (root / "model.safetensors").symlink_to(target)
    assert only(validate(root), "link-escapes-root").file == "model.safetensors"


def test_c024_names_that_differ_by_case_are_both_listed(tmp_path):
    root = micro(tmp_path / "m")
    write_safetensors(
        root / "Model.safetensors", [one._replace(data=b"\x00\x3f" * (one.size // 2)) for one in micro_tensors()]
    )
    assert only(validate(root), "case-collision").found == ["Model.safetensors", "model.safetensors"]
    with pytest.raises(DirectoryRefused, match="differs from"):
        read_directory(root, VLLM)


def test_c024_an_index_in_capitals_is_the_index_under_the_wrong_name(tmp_path):
    root = micro_sharded(tmp_path / "m")
    (root / "model.safetensors.index.json").rename(root / "MODEL.SAFETENSORS.INDEX.JSON")
    found = validate(root)
    assert only(found, "case-collision").expected == "model.safetensors.index.json"
    assert codes(found, "block") == {"case-collision"}


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin"])
def test_an_index_names_files_beside_it_only(tmp_path, shard):
    root = micro_sharded(tmp_path / "m")
    edit_json(
        root / "model.safetensors.index.json", lambda told: told["weight_map"].update({"model.norm.weight": shard})
    )
    assert "index-invalid" in codes(validate(root), "block")


def test_a_size_that_is_wrong_everywhere_is_told_once_with_its_key_and_how_often(tmp_path):
    flaw = only(validate(micro(tmp_path / "m", hidden_size=16)), "shape-mismatch")
    assert (flaw.found["shape"], flaw.found["count"], flaw.expected) == ([264, 8], 11, {"shape": [264, 16]})
    assert flaw.found["tensors"][:2] == ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    assert flaw.message == (
        "model.embed_tokens.weight has the shape [264, 8], and config.json makes it [264, 16] (hidden_size 16, "
        "intermediate_size 16); 10 other tensors differ in the same way."
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"vocab_size": 300}, "embedding-rows"),
        ({"hidden_size": 16}, "shape-mismatch"),
        ({"num_key_value_heads": 2}, "shape-mismatch"),
        ({"num_hidden_layers": 2}, "tensor-missing"),
        ({"head_dim": 8}, "shape-mismatch"),
    ],
)
def test_a_configuration_of_another_model_does_not_fit(tmp_path, change, code):
    assert code in codes(validate(micro(tmp_path / "m", **change)), "block")


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size"])
@pytest.mark.parametrize("value", [2**70, 2**40, -5])
def test_a_size_that_no_model_has_blocks_at_once(tmp_path, key, value):
    asked = {"topology": {"tp": 2, "pp": 2, "ep": 2}}
    found = validate(micro(tmp_path / "m", **{key: value}), asked)
    assert only(found, "size-absurd").pointer == f"/{key}"


def test_pickles_block_where_they_are_the_only_weights_and_not_beside_others(tmp_path):
    root = micro(tmp_path / "m")
    (root / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert codes(validate(root)) == {"pickle-weights"}
    assert validate(root).verdict == "passed"
    (root / "model.safetensors").unlink()
    assert "pickle-weights" in codes(validate(root), "block")


def test_code_is_refused_where_it_would_run(tmp_path):
    root = micro(tmp_path / "m", model_type="baichuan", auto_map={"AutoModel": "modeling.Model"})
    (root / "modeling.py").write_text("print()")
    assert codes(validate(root)) == {"code-left-out"}
    asked = {"name": "vllm", "arguments": ["--trust-remote-code"]}
    assert "remote-code" in codes(validate(root, {"engine": asked}), "block")
    named = {"remote_code": {"files": ["modeling.py"], "reason": "read by two people"}}
    assert codes(validate(root, {"engine": asked | named})) == set()
    assert "remote-code" in codes(
        validate(micro(tmp_path / "n", model_type="own", auto_map={"AutoModel": "a.B"})), "block"
    )


def test_a_directory_without_weights_blocks_and_a_lone_configuration_says_so(tmp_path):
    root = tmp_path / "m"
    root.mkdir()
    write_json(root / "config.json", micro_config())
    found = validate(root)
    assert (found.verdict, codes(found)) == ("passed", {"weights-absent"})
    speak(root)
    assert "weights-absent" in codes(validate(root), "block")


def test_findings_are_plain_json(tmp_path):
    found = validate(_consolidated(micro_sharded(tmp_path / "m", total=1)))
    assert json.loads(json.dumps([one.as_json() for one in found.flaws] + [found.inferred]))
