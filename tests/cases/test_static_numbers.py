"""Neighbours of the incident cases of numbers, transfers and tools: GGUF, other transfers, other schemas."""

import gguf
import numpy as np
import pytest

from gates.directory import DirectoryRefused, read_directory
from gates.files.contents import Reader
from gates.files.gguf_types import BLOCKS
from gates.static.gguf_values import FIELDS
from tests.support import chain
from tests.support.checkpoints import T0, alarms, codes, micro, only, speak, validate

NAN = {"<u2": b"\xff\x7f", "<u4": b"\x00\x00\xc0\x7f", "<u8": b"\x00" * 6 + b"\xf8\x7f", "u1": b"\xff"}
SIZES = {name: (values, size) for name, values, size in BLOCKS.values()}


def one_tensor(path, dtype, raw):
    """Write a GGUF file with one tensor of raw blocks beside an embedding."""
    writer = gguf.GGUFWriter(path, "other")
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    kind = getattr(gguf.GGMLQuantizationType, dtype)
    values, size = SIZES[dtype]
    count = len(raw) // size
    if values == 1:
        wide = {"F64": np.float64, "F32": np.float32, "F16": np.float16}.get(dtype)
        data = np.frombuffer(raw, dtype=wide or np.uint8)
        writer.add_tensor("x.weight", data if wide else data.reshape(1, -1), raw_dtype=None if wide else kind)
    else:
        writer.add_tensor("x.weight", np.frombuffer(raw, np.uint8).reshape(1, count * size), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", FIELDS)
def test_c019_a_scale_of_a_gguf_file_that_is_no_number_is_found_in_every_type(tmp_path, dtype):
    values, size = SIZES[dtype]
    for place, (code, _) in FIELDS[dtype]:
        root = tmp_path / str(place)
        root.mkdir()
        raw = bytearray(size * 6)
        one_tensor(root / "model.gguf", dtype, bytes(raw))
        assert "non-finite-weight" not in codes(validate(root))
        raw[4 * size + place : 4 * size + place + len(NAN[code])] = NAN[code]
        one_tensor(root / "model.gguf", dtype, bytes(raw))
        flaw = only(validate(root), "non-finite-weight")
        assert (flaw.found["tensor"], flaw.found["count"], flaw.found["first_index"]) == ("x.weight", 1, 4 * values)
        assert (flaw.severity, flaw.found["looked_at"]) == ("block", 6 * values)


def test_c019_a_large_gguf_file_is_looked_at_in_slices_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr("gates.static.values.BUDGET_BYTES", 64 * 1024)
    root = tmp_path / "m"
    root.mkdir()
    blocks, size = 60_000, SIZES["Q8_0"][1]
    raw = np.zeros((blocks, size), np.uint8)
    raw[blocks - 1, :2] = [0, 0x7C]  # the last scale is infinite
    one_tensor(root / "model.gguf", "Q8_0", raw.tobytes())
    flaw = only(validate(root), "non-finite-weight")
    assert flaw.found["first_index"] == (blocks - 1) * 32
    assert flaw.found["looked_at"] < blocks * 32 / 10


# ---------------------------------------------------------------------------------------------------- GGUF tensors


def without(path, monkeypatch, *names, arch="llama"):
    made = chain.tensors
    monkeypatch.setattr(chain, "tensors", lambda *told: {k: v for k, v in made(*told).items() if k not in names})
    path.parent.mkdir(parents=True, exist_ok=True)
    chain.write_chain(path)
    return path.parent


@pytest.mark.parametrize(
    "name",
    [
        *("output_norm", "blk.0.attn_norm", "blk.0.attn_q", "blk.0.attn_v", "blk.0.attn_output"),
        *("blk.0.ffn_norm", "blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down"),
    ],
)
def test_c013_a_gguf_file_without_a_tensor_that_its_architecture_needs_blocks(tmp_path, monkeypatch, name):
    found = validate(without(tmp_path / "m" / "model.gguf", monkeypatch, name))
    assert only(found, "tensor-missing").found["missing"] == [f"{name}.weight"]


def test_c013_a_whole_gguf_file_or_one_without_a_head_of_its_own_is_sound(tmp_path, monkeypatch):
    for place, names in enumerate(((), ("output",))):
        found = validate(without(tmp_path / str(place) / "model.gguf", monkeypatch, *names))
        assert "tensor-missing" not in codes(found)


# -------------------------------------------------------------------------------------------------------- transfers


@pytest.mark.parametrize(
    ("left", "whole", "is_fault"),
    [
        ("model-00002-of-00002.safetensors.tmp", None, True),
        ("generation_config.json.part", None, True),
        ("sub/model.gguf.incomplete", None, True),
        ("model.safetensors.aria2", "model.safetensors", True),
        ("model.safetensors.part", "model.safetensors", False),
        ("model.safetensors.crdownload", "model.safetensors", False),
        ("notes.part", None, False),
    ],
)
def test_c021_a_transfer_that_has_not_ended_is_seen_by_what_it_left(tmp_path, left, whole, is_fault):
    root = speak(micro(tmp_path / "m"))
    (root / left).parent.mkdir(exist_ok=True)
    (root / left).write_bytes(b"x" * 64)
    found = validate(root)
    assert ("source-unstable" in codes(found, "block")) is is_fault
    if is_fault:
        flaw = only(found, "source-unstable")
        assert (flaw.file, flaw.found) == (whole or left.rpartition(".")[0], left)
        with pytest.raises(DirectoryRefused, match="is not finished"):
            read_directory(root, Reader("vllm"))
    else:
        assert alarms(found) == set()
        assert left in {one.path for one in read_directory(root, Reader("vllm")).left_out}


# ------------------------------------------------------------------------------------------------------------ tools


def tools(line):
    return (
        "{% if tools %}{% for t in tools %}{{ t['function']['name'] }}"
        "{% for n, p in t['function']['parameters']['properties'].items() %}"
        + line
        + "{% endfor %}{% endfor %}{% endif %}"
        + T0
    )


@pytest.mark.parametrize(
    ("line", "parameter", "severity"),
    [
        ("{% if p.type == 'array' %}{{ p['items']['type'] + ';' }}{% endif %}", "a list of $ref", "block"),
        ("{% if p.type == 'array' %}{{ p['items']['type'] }}{% endif %}", "a list of $ref", "block"),
        ("{% if p.anyOf %}{{ p.anyOf[0].type | upper }}{% endif %}", "anyOf with a $ref", "block"),
        (
            "{% if p.type == 'object' %}{% for v in p.properties.values() %}{{ v.type }}{% endfor %}{% endif %}",
            "an object with a $ref",
            "block",
        ),
        ("{{ (p.type | default('any')) + ';' }}", "several types", "block"),
        ("{% if p.type is defined %}{{ {'string': 'str'}.get(p.type) + ';' }}{% endif %}", "a list", "block"),
    ],
)
def test_c033_what_clients_write_of_types_is_tried_in_every_form(tmp_path, line, parameter, severity):
    found = validate(speak(micro(tmp_path / "m"), template=tools(line)))
    told = {one.found["parameter"]: one.severity.value for one in found.flaws if one.code == "template-tool-schema"}
    assert told[parameter] == severity


WALKING = (
    "{% macro kind(p) %}{% if p.type is string %}"
    "{% if p.type == 'array' and p['items'] is defined %}list[{{ kind(p['items']) }}]"
    "{% elif p.type == 'object' and p.properties is defined %}{% for k, v in p.properties.items() %}"
    "{{ k }}: {{ kind(v) }},{% endfor %}{% else %}{{ p.type }}{% endif %}"
    "{% elif p.type is defined %}{{ p.type | join('|') }}{% else %}any{% endif %}{% endmacro %}"
)


@pytest.mark.parametrize("line", ["{{ kind(p) }}", "{{ p | tojson }}", "{{ n }}"])
def test_c033_a_template_that_walks_schemas_or_prints_them_whole_is_sound(tmp_path, line):
    root = speak(micro(tmp_path / "m"), template=WALKING + tools(line))
    assert alarms(validate(root, {"serving": {"features": ["chat", "tools"]}})) == set()
