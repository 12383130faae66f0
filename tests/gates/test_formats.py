import contextlib
import io
import json
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from gates.formats import Array, FormatError, foreign_magic, read_gguf, read_safetensors
from tests.support.chain import TEMPLATE, write_chain


def safetensors(header: object, data: bytes = b"", *, pad: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw + pad)) + raw + pad + data


def tensor(start: int, end: int, *, dtype: object = "F32", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def read(raw: bytes, **limits: int):
    return read_safetensors(io.BytesIO(raw), len(raw), **limits)


def test_a_safetensors_file_tells_its_tensors():
    raw = save({"b": np.zeros((2, 3), np.float16), "a": np.ones(5, np.float32)}, metadata={"format": "pt"})

    header = read(raw)

    assert [(t.name, t.kind, t.shape) for t in header.tensors] == [("a", "F32", (5,)), ("b", "F16", (2, 3))]
    assert header.metadata == {"format": "pt"}
    assert header.parameters == 11
    assert header.kinds() == {"F32": 20, "F16": 12}


def test_a_file_without_data_in_its_tensors_is_read():
    assert read(safetensors({"empty": tensor(0, 0)})).parameters == 0


FOUR = b"\0\0\0\0"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "shorter than the 8 bytes"),
        (b"\0" * 7, "shorter than the 8 bytes"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "at most"),
        (struct.pack("<Q", 3) + b"{}", "truncated"),
        (safetensors(b" {}"), "does not start with"),
        (safetensors(b"\xef\xbb\xbf{}"), "does not start with"),
        (safetensors(b"[]"), "does not start with"),
        (safetensors({}, pad=b"\n"), "something else than spaces"),
        (safetensors(b"{}\0"), "something else than spaces"),
        (safetensors(b"{} {}"), "is not JSON"),
        (safetensors(b'{"a": NaN}'), "NaN"),
        (safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"\\u0061":1}', FOUR), "twice"),
        (safetensors({"__metadata__": None}), "__metadata__"),
        (safetensors({"__metadata__": {"a": 1}}), "__metadata__"),
        (safetensors({"a": 1}), "other fields"),
        (safetensors({"a": tensor(0, 4) | {"extra": 1}}, FOUR), "other fields"),
        (safetensors({"a": tensor(0, 4, dtype="f32")}, FOUR), "unknown type"),
        (safetensors({"a": tensor(0, 4, dtype=None)}, FOUR), "unknown type"),
        (safetensors({"a": tensor(0, 4, dtype=["F32"])}, FOUR), "unknown type"),
        (safetensors({"a": tensor(0, 4, shape=[True])}, FOUR), "whole numbers"),
        (safetensors({"a": tensor(0, 4, shape=[-1, -1])}, FOUR), "whole numbers"),
        (safetensors({"a": tensor(0, 4, shape=[2**63, 0])}, FOUR), "whole numbers"),
        (safetensors({"a": tensor(0, 4, shape=[1] * 9)}, FOUR), "at most 8"),
        (safetensors({"a": tensor(0, 4, shape=[2])}, FOUR), "do not fill"),
        (safetensors({"a": tensor(0, 4) | {"data_offsets": [4, 0]}}, FOUR), "do not fill"),
        (safetensors({"a": tensor(0, 4) | {"data_offsets": [0, 4, 8]}}, FOUR), "two whole numbers"),
        (safetensors({"a": tensor(0, 4) | {"data_offsets": [0.0, 4.0]}}, FOUR), "two whole numbers"),
        (safetensors({"a": tensor(0, 2, dtype="F4", shape=[3])}, b"\0\0"), "do not fill"),
        (safetensors({"a": tensor(0, 1, dtype="I8", shape=[1]), "b": tensor(1, 5)}, b"\0" * 5), "not aligned"),
        (safetensors({"a": tensor(0, 4), "b": tensor(0, 4)}, FOUR), "overlaps"),
        (safetensors({"a": tensor(4, 8)}, FOUR * 2), "no tensor covers"),
        (safetensors({"a": tensor(0, 4)}, FOUR + b"PK"), "has 6 bytes of data where its tensors need 4"),
        (safetensors({"a": tensor(0, 8)}, FOUR), "has 4 bytes of data where its tensors need 8"),
        (safetensors({"": tensor(0, 0)}), "empty, too long or not plain"),
        (safetensors({"a\n": tensor(0, 0)}), "empty, too long or not plain"),
        (safetensors({"a\u202e": tensor(0, 0)}), "empty, too long or not plain"),
        (safetensors({"e\u0301": tensor(0, 0)}), "empty, too long or not plain"),
        (safetensors(b'{"a":' + b"[" * 50 + b"]" * 50 + b"}"), "nested deeper"),
        (safetensors(b'{"a":' + b"1" * 10_000 + b"}"), "header"),
    ],
)
def test_a_safetensors_file_that_two_readers_could_read_differently_is_refused(raw, said):
    with pytest.raises(FormatError, match=said):
        read(raw)


def test_a_header_over_the_limit_is_refused_before_it_is_read():
    raw = safetensors({"a": tensor(0, 4)}, FOUR)
    assert read(raw, max_header_bytes=len(raw) - 12).tensors
    with pytest.raises(FormatError, match="at most"):
        read(raw, max_header_bytes=len(raw) - 13)


# ------------------------------------------------------------------------------------------------------ GGUF


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> bytes:
    return write_chain(tmp_path_factory.mktemp("gguf") / "chain.gguf").read_bytes()


def read_bytes(raw: bytes):
    return read_gguf(io.BytesIO(raw), len(raw))


def test_a_gguf_file_tells_what_the_reference_reader_reads(chain, tmp_path):
    path = tmp_path / "chain.gguf"
    path.write_bytes(chain)
    reference = gguf.GGUFReader(path)

    header = read_bytes(chain)

    assert header.metadata["tokenizer.chat_template"] == TEMPLATE
    assert header.metadata["tokenizer.ggml.tokens"] == Array("string", 264)
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    scalars = {
        k: f.contents() for k, f in reference.fields.items() if f.types and f.types[0] != gguf.GGUFValueType.ARRAY
    }
    ours = {k: v for k, v in header.metadata.items() if not isinstance(v, Array)}
    assert ours == {k: v for k, v in scalars.items() if not k.startswith("GGUF.")}
    assert {t.name: t.values for t in header.tensors} == {t.name: t.n_elements for t in reference.tensors}
    assert header.parameters == sum(int(t.n_elements) for t in reference.tensors)


def test_block_sizes_are_those_of_the_reference():
    from gates import formats  # a private table, compared with the reference's

    for number, (name, values, size) in formats._GGML_TYPES.items():
        if name != "Q8_1":  # an activation's type: the reference counts its old, larger block
            assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (values, size), name
        assert gguf.GGMLQuantizationType(number).name == name


def written(*pairs: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, data: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: bytes, shape: tuple[int, ...], start: int = 0, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def test_the_smallest_gguf_is_read():
    header = read_bytes(written(pair(b"a", 4, struct.pack("<I", 7)), tensors=(info(b"t", (2,)),), data=b"\0" * 8))
    assert header.metadata == {"a": 7}
    assert header.parameters == 2


A = pair(b"a", 4, struct.pack("<I", 7))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "does not start"),
        (b"GGML" + b"\0" * 40, "does not start"),
        (b"GGUF", "truncated"),
        (written(version=1), "version 1"),
        (written(version=0x03000000), "versions 2 and 3, little endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0), "at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 3), "truncated"),
        (written(A, A), "twice"),
        (written(pair(b"a b", 4, struct.pack("<I", 7))), "not plain text"),
        (written(pair(b"a", 13, b"")), "unknown type 13"),
        (written(pair(b"a", 7, b"\2")), "truth value 2"),
        (written(pair(b"a", 8, struct.pack("<Q", 2**63))), "at most"),
        (written(pair(b"a", 8, text(b"\xff"))), "not UTF-8"),
        (written(pair(b"a", 9, struct.pack("<IQ", 4, 10**9))), "more than its bytes can hold"),
        (written(pair(b"a", 9, struct.pack("<IQ", 8, 2**61))), "more than its bytes can hold"),
        (written(pair(b"a", 9, struct.pack("<IQ", 9, 1))), "unknown or nested"),
        (written(pair(b"general.alignment", 4, struct.pack("<I", 48))), "power of two"),
        (written(pair(b"general.alignment", 8, text(b"32"))), "power of two"),
        (written(tensors=(info(b"t", ()),)), "0 dimensions"),
        (written(tensors=(info(b"t", (1,) * 9),)), "9 dimensions"),
        (written(tensors=(info(b"t", (0,)),)), "empty, too large"),
        (written(tensors=(info(b"t", (2**40, 2**40)),)), "empty, too large"),
        (written(tensors=(info(b"t", (31,), kind=8),)), "splits a block"),
        (written(tensors=(info(b"t", (1,), kind=5),)), "unknown type 5"),
        (written(tensors=(info(b"t", (1,), start=2**64 - 32),), data=FOUR), "not at 0"),
        (written(tensors=(info(b"t", (1,)), info(b"u", (1,))), data=b"\0" * 64), "not at 32"),
        (written(tensors=(info(b"t", (1,)), info(b"t", (1,), start=32)), data=b"\0" * 64), "two tensors alike"),
        (written(tensors=(info(b"t", (2,)),), data=FOUR), "truncated"),
        (written(tensors=(info(b"t", (8,)),), data=b"\0" * 32 + b"PK\x03\x04"), "something is appended"),
    ],
)
def test_a_gguf_file_that_two_readers_could_read_differently_is_refused(raw, said):
    with pytest.raises(FormatError, match=said):
        read_bytes(raw)


def test_a_cut_at_every_place_of_the_header_is_seen(chain):
    data_start = len(chain) - sum(t.end - t.start for t in read_bytes(chain).tensors)
    for length in {*range(0, 400, 7), *range(400, data_start, 97), len(chain) - 1}:
        with pytest.raises(FormatError):
            read_bytes(chain[:length])


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 8000), value=st.integers(0, 255))
def test_one_changed_byte_never_leads_to_another_error(chain, place, value):
    raw = bytearray(chain)
    raw[place] = value
    with contextlib.suppress(FormatError):
        read_bytes(bytes(raw))


# ----------------------------------------------------------------------------------------------------- magic


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"\x80\x04\x95", "pickle"),
        (b"PK\x03\x04", "ZIP"),
        (b"\x7fELF\x02", "ELF"),
        (b"#!/bin/sh\n", "script"),
        (b"\0" * 257 + b"ustar\x0000", "tar"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    ],
)
def test_what_no_text_starts_with_is_named(head, said):
    assert said in foreign_magic(head)


@pytest.mark.parametrize("head", [b"", b"{", b"# A model\n", b"\x80", b"{% for"])
def test_text_is_not_taken_for_a_program(head):
    assert foreign_magic(head) is None
