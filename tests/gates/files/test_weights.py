import contextlib
import io

import gguf as reference_gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from gates.files import gguf_types
from gates.files.header import Array
from gates.files.refusal import FileRefused
from gates.files.safetensors import BITS, read_safetensors
from gates.files.weights import header, read, tensors
from tests.support.chain import TEMPLATE, write_chain
from tests.support.headers import gguf, info, numbers, pair, safetensors, tensor, text, texts


def of(raw: bytes, name: str = "model.safetensors", **options):
    return read(io.BytesIO(raw), len(raw), name, **options)


def test_a_safetensors_file_tells_its_tensors():
    raw = save({"b": np.zeros((2, 3), np.float16), "a": np.ones(5, np.float32)}, metadata={"format": "pt"})

    found = of(raw)

    assert [(t.name, t.dtype, t.shape, t.size, t.file) for t in found.tensors] == [
        ("a", "F32", (5,), 20, "model.safetensors"),
        ("b", "F16", (2, 3), 12, "model.safetensors"),
    ]
    assert found.metadata == {"format": "pt"}
    assert found.parameters == 11
    assert found.dtypes() == {"F32": 20, "F16": 12}


def test_the_offset_of_a_tensor_is_where_its_bytes_are(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({"a": np.arange(4, dtype=np.float32), "b": np.arange(3, dtype=np.float16)}))
    found = {t.name: path.read_bytes()[t.offset : t.offset + t.size] for t in tensors(path)}
    assert found == {"a": np.arange(4, dtype="<f4").tobytes(), "b": np.arange(3, dtype="<f2").tobytes()}

    chain = write_chain(tmp_path / "chain.gguf")
    one = next(t for t in tensors(chain) if t.name == "token_embd.weight")
    rows = np.frombuffer(chain.read_bytes()[one.offset : one.offset + one.size], "<f4").reshape(one.shape)
    assert one.shape == (264, 320)  # outermost first, as PyTorch has it
    assert (rows.argmax(axis=1) == np.arange(264)).all()


@pytest.mark.parametrize(
    "raw",
    [
        safetensors({}),
        safetensors({"empty": tensor(0, 0)}),
        safetensors({"scalar": tensor(0, 4, shape=[])}, b"\0" * 4),
        safetensors({"b": tensor(4, 8), "a": tensor(0, 4)}, b"\0" * 8),
        safetensors({"empty": tensor(4, 4), "a": tensor(0, 4), "e2": tensor(4, 4, shape=[0, 8])}, b"\0" * 4),
        safetensors({"ä": tensor(0, 0), "__metadata__": {"a": '"\\\n😀'}, "z\u00e9": tensor(0, 0)}),
        safetensors({"a": tensor(0, 3, dtype="F4", shape=[6])}, b"\0" * 3),
        safetensors({"a": tensor(0, 3, dtype="F6_E2M3", shape=[4])}, b"\0" * 3),
        # Not padded, with white space between tokens, and with the fields in the order of another writer.
        safetensors(b'{ "a" :\t{"data_offsets":[0 , 4],"dtype":"F32",\n"shape":[ 1 ] } }', b"\0" * 4, pad=b""),
        safetensors(b'{"a/b":{"shape":[1],"data_offsets":[0,4],"dtype":"I32"}}', b"\0" * 4, pad=b"   "),
    ],
    ids=range(10),
)
def test_what_the_format_allows_is_read(raw):
    assert of(raw).format == "safetensors"


def test_a_header_over_the_limit_is_refused_before_it_is_read():
    raw = safetensors({"a": tensor(0, 4)}, b"\0" * 4, pad=b"")
    file = io.BytesIO(raw)
    assert read_safetensors(file, len(raw), "x", max_header_bytes=len(raw) - 12).tensors
    with pytest.raises(FileRefused, match="at most"):
        read_safetensors(file, len(raw), "x", max_header_bytes=len(raw) - 13)


def test_only_the_header_is_read(tmp_path):
    class Counting(io.FileIO):
        count = 0

        def read(self, size=-1):
            raw = super().read(size)
            self.count += len(raw)
            return raw

    path = tmp_path / "large.safetensors"
    raw = safetensors({"a": tensor(0, 4 << 30, shape=[1 << 30])})
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + (4 << 30))
    with Counting(path) as file:
        assert read(file, path.stat().st_size, path.name).parameters == 1 << 30
        assert file.count < 4096


def test_what_is_no_weight_file_by_its_name_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(FileRefused) as refused:
        tensors(tmp_path / "weights.bin")
    assert (refused.value.code, refused.value.file) == ("weights-format", "weights.bin")
    (tmp_path / ("ab" * 32)).write_bytes(safetensors({}))
    assert tensors(tmp_path / ("ab" * 32), "model.safetensors") == ()


def test_links_and_special_files_are_not_opened(tmp_path):
    (tmp_path / "sound.safetensors").write_bytes(safetensors({}))
    (tmp_path / "link.safetensors").symlink_to("sound.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, code in (("link", "file-irregular"), ("folder", "file-irregular"), ("missing", "file-unreadable")):
        with pytest.raises(FileRefused) as refused:
            tensors(tmp_path / f"{name}.safetensors")
        assert (refused.value.code, refused.value.file) == (code, f"{name}.safetensors")


def test_every_type_that_the_library_writes_is_known():
    ours = {np.dtype(t).name for t in (np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8)}
    for name in ours | {"uint8", "uint16", "uint32", "uint64", "bool", "complex64"}:
        (one,) = of(save({"a": np.zeros(4, name)})).tensors
        assert BITS[one.dtype] == np.dtype(name).itemsize * 8, name


# ------------------------------------------------------------------------------------------------------ GGUF


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> bytes:
    return write_chain(tmp_path_factory.mktemp("gguf") / "chain.gguf").read_bytes()


def test_a_gguf_file_tells_what_the_reference_reader_reads(chain, tmp_path):
    path = tmp_path / "chain.gguf"
    path.write_bytes(chain)
    reference = reference_gguf.GGUFReader(path)

    found = header(path)

    assert found.metadata["tokenizer.chat_template"] == TEMPLATE
    assert found.metadata["tokenizer.ggml.tokens"] == Array("string", 264)
    assert found.metadata["tokenizer.ggml.add_bos_token"] is False
    array = reference_gguf.GGUFValueType.ARRAY
    scalars = {k: f.contents() for k, f in reference.fields.items() if f.types and f.types[0] != array}
    ours = {k: v for k, v in found.metadata.items() if not isinstance(v, Array)}
    assert ours == {k: v for k, v in scalars.items() if not k.startswith("GGUF.")}
    assert {(t.name, t.offset, t.size, t.values) for t in found.tensors} == {
        (t.name, int(t.data_offset), int(t.n_bytes), int(t.n_elements)) for t in reference.tensors
    }
    assert found.parameters == sum(int(t.n_elements) for t in reference.tensors)


def test_arrays_are_kept_for_who_asks(chain):
    keep = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    found = of(chain, "chain.gguf", keep=keep).metadata
    tokens, kinds = (found[key] for key in keep)
    assert tokens.items[:5] == ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    assert list(kinds.items) == [3] * 5 + [1] * 256 + [4] * 3
    assert found["tokenizer.ggml.merges"].items is None


def test_a_text_that_lies_across_two_windows_is_read_whole():
    items = [b"x" * 4093] * 600 + ["é".encode() * 700_000, b"end"]
    found = of(gguf(texts(b"a", items)), "m.gguf", keep=["a"]).metadata["a"]
    assert found.items == [item.decode() for item in items]


def test_block_sizes_are_those_of_the_reference():
    for number, (name, values, size) in gguf_types.BLOCKS.items():
        assert reference_gguf.GGMLQuantizationType(number).name == name
        if name != "Q8_1":  # an activation's type: the reference counts its old, larger block
            known = reference_gguf.GGML_QUANT_SIZES[reference_gguf.GGMLQuantizationType(number)]
            assert known == (values, size), name
    assert {int(kind) for kind in reference_gguf.GGMLQuantizationType} == set(gguf_types.BLOCKS)
    assert not set(gguf_types.REMOVED) & set(gguf_types.BLOCKS)


@pytest.mark.parametrize(
    "raw",
    [
        gguf(),
        gguf(version=2),
        gguf(pair(b"a", 4, b"\7\0\0\0"), tensors=(info(b"t", (2,)),), data=b"\0" * 8),
        gguf(pair(b"a", 4, b"\7\0\0\0"), tensors=(info(b"t", (2,)),), data=b"\0" * 32),
        gguf(pair(b"general.alignment", 4, b"\x40\0\0\0"), tensors=(info(b"t", (1,)),), data=b"\0" * 4, alignment=64),
        gguf(numbers(b"a", 7, 3, b"\0\1\1"), numbers(b"b", 6, 0, b""), texts(b"c", [])),
        gguf(tensors=(info(b"t", (256, 3), kind=12), info(b"u", (32,), 448, kind=39)), data=b"\0" * 465),
        # A first shard that holds nothing but keys, without padding at its end.
        gguf(
            *(pair(b"split." + key, kind, value) for key, kind, value in (
                (b"no", 2, b"\0\0"), (b"count", 2, b"\3\0"), (b"tensors.count", 5, b"\7\0\0\0"),
            ))
        ).rstrip(b"\0") + b"\0\0\0",
    ],
    ids=range(8),
)  # fmt: skip
def test_what_gguf_allows_is_read(raw):
    assert of(raw, "m.gguf").format == "gguf"


def test_a_cut_at_every_place_of_the_header_is_seen(chain):
    data_start = of(chain, "chain.gguf").data_offset
    for length in {*range(0, 400, 7), *range(400, data_start, 97), len(chain) - 1}:
        with pytest.raises(FileRefused) as refused:
            of(chain[:length], "chain.gguf")
        assert refused.value.code in {"header-truncated", "data-truncated", "array-length", "empty-file"}, length


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 8000), value=st.integers(0, 255))
def test_one_changed_byte_never_leads_to_another_error(chain, place, value):
    raw = bytearray(chain)
    raw[place] = value
    with contextlib.suppress(FileRefused):
        of(bytes(raw), "chain.gguf")


def test_a_text_key_is_a_text():
    raw = gguf(pair(b"tokenizer.chat_template", 8, text(TEMPLATE.encode())))
    assert of(raw, "m.gguf").metadata == {"tokenizer.chat_template": TEMPLATE}
