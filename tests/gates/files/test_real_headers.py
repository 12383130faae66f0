"""Headers in the shapes that published models have are read, and fast."""

import io
import struct
import time

import pytest

from gates.files.weights import header, read
from tests.support.headers import gguf, info, numbers, pair, safetensors, sparse_safetensors, text, texts

SECONDS = 1.0


def dense(layers: int, hidden: int, inner: int, kv: int, vocabulary: int) -> dict[str, tuple[str, list[int], int]]:
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [vocabulary, hidden]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = [hidden]
        shapes[at + "mlp.down_proj.weight"] = [hidden, inner]
        shapes[at + "mlp.gate_proj.weight"] = [inner, hidden]
        shapes[at + "mlp.up_proj.weight"] = [inner, hidden]
        shapes[at + "post_attention_layernorm.weight"] = [hidden]
        shapes[at + "self_attn.k_proj.weight"] = [kv, hidden]
        shapes[at + "self_attn.o_proj.weight"] = [hidden, hidden]
        shapes[at + "self_attn.q_proj.weight"] = [hidden, hidden]
        shapes[at + "self_attn.v_proj.weight"] = [kv, hidden]
    shapes["model.norm.weight"] = [hidden]
    return {name: ("BF16", shape, 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)) for name, shape in shapes.items()}


def test_a_shard_of_a_dense_model_in_bf16(tmp_path):
    path = sparse_safetensors(
        tmp_path / "model-00001-of-00004.safetensors", dense(32, 4096, 14336, 1024, 128256), {"format": "pt"}
    )
    found = header(path)
    assert found.metadata == {"format": "pt"}
    assert len(found.tensors) == 290
    assert found.dtypes().keys() == {"BF16"}
    assert found.tensors[0].name == "model.embed_tokens.weight"


def test_mxfp4_blocks_as_gpt_oss_has_them(tmp_path):
    at = "model.layers.{}.mlp.experts."
    tensors: dict[str, tuple[str, list[int], int]] = {}
    for layer in range(24):
        for part, rows in (("down_proj", 2880), ("gate_up_proj", 5760)):
            tensors[at.format(layer) + part + "_bias"] = ("BF16", [32, rows], 32 * rows * 2)
            tensors[at.format(layer) + part + "_blocks"] = ("U8", [32, rows, 90, 16], 32 * rows * 90 * 16)
            tensors[at.format(layer) + part + "_scales"] = ("U8", [32, rows, 90], 32 * rows * 90)
        tensors[f"model.layers.{layer}.self_attn.sinks"] = ("BF16", [64], 128)
    found = header(sparse_safetensors(tmp_path / "model-00000-of-00002.safetensors", tensors))
    assert found.dtypes().keys() == {"U8", "BF16"}
    assert len(found.tensors) == 168


@pytest.mark.parametrize(
    ("dtype", "scale", "shape"),
    [("F8_E4M3", "F32", [2, 3]), ("F8_E4M3", "BF16", [2, 1]), ("F8_E5M2", "F32", [])],
)
def test_fp8_with_its_scales(tmp_path, dtype, scale, shape):
    width, count = {"F32": 4, "BF16": 2}[scale], (shape[0] * shape[1] if shape else 1)
    tensors = {
        "model.layers.0.mlp.down_proj.weight": (dtype, [256, 384], 256 * 384),
        "model.layers.0.mlp.down_proj.weight_scale_inv": (scale, shape, count * width),
        "model.layers.0.mlp.down_proj.input_scale": ("F32", [], 4),
    }
    # The library puts the widest types first, so that all are aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: -{"F32": 4, "BF16": 2}.get(item[1][0], 1)))
    assert header(sparse_safetensors(tmp_path / "m.safetensors", ordered)).parameters == 256 * 384 + count + 1


def test_nvfp4_and_microscaled_types(tmp_path):
    tensors = {
        "w.weight_packed": ("U8", [64, 32], 2048),
        "w.weight_scale": ("F8_E4M3", [64, 4], 256),
        "m.weight": ("F4", [64, 32], 1024),
        "m.weight_scale": ("F8_E8M0", [64, 1], 64),
    }
    assert len(header(sparse_safetensors(tmp_path / "m.safetensors", tensors)).tensors) == 4


def test_gptq_and_awq_with_an_empty_group_index(tmp_path):
    at = "model.layers.0.self_attn.q_proj."
    tensors = {
        at + "qweight": ("I32", [512, 4096], 512 * 4096 * 4),
        at + "qzeros": ("I32", [32, 512], 32 * 512 * 4),
        at + "g_idx": ("I32", [0], 0),
        at + "bias": ("F16", [0], 0),
        at + "scales": ("F16", [32, 4096], 32 * 4096 * 2),
    }
    found = header(sparse_safetensors(tmp_path / "model.safetensors", tensors, {"format": "pt"}))
    assert [t.size for t in found.tensors if t.name.endswith(("g_idx", "bias"))] == [0, 0]


def test_a_header_that_was_not_padded_as_early_files_were_not():
    raw = b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}'
    assert (8 + len(raw)) % 8
    assert read(io.BytesIO(safetensors(raw, b"\0" * 4, pad=b"")), 12 + len(raw), "m.safetensors").parameters == 2


def test_a_large_mixture_of_experts_in_one_shard_is_read_fast(tmp_path):
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{kind}": (dtype, shape, size)
        for layer in range(8)
        for expert in range(384)
        for part in ("gate", "up", "down")
        for kind, dtype, shape, size in (
            ("weight_scale_inv", "F32", [16, 56], 3584),
            ("weight", "F8_E4M3", [2048, 7168], 2048 * 7168),
        )
    }
    path = sparse_safetensors(tmp_path / "model-00001-of-00061.safetensors", tensors)
    started = time.process_time()
    assert len(header(path).tensors) == 18_432
    assert time.process_time() - started < SECONDS


@pytest.fixture(scope="module")
def large_vocabulary() -> tuple[bytes, int]:
    """A header as a 4-bit model with 262,144 tokens has it."""
    count = 262_144
    pairs = [
        pair(b"general.architecture", 8, text(b"gemma3")),
        pair(b"general.file_type", 4, struct.pack("<I", 15)),
        pair(b"gemma3.context_length", 4, struct.pack("<I", 131_072)),
        pair(b"gemma3.rope.freq_base", 6, struct.pack("<f", 1_000_000)),
        pair(b"tokenizer.ggml.model", 8, text(b"llama")),
        texts(b"tokenizer.ggml.tokens", (f"▁word{n}".encode() for n in range(count))),
        numbers(b"tokenizer.ggml.scores", 6, count, b"\0" * 4 * count),
        numbers(b"tokenizer.ggml.token_type", 5, count, b"\1\0\0\0" * count),
        texts(b"tokenizer.ggml.merges", (f"▁w ord{n}".encode() for n in range(2 * count))),
        pair(b"tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 106)),
        pair(b"tokenizer.ggml.add_bos_token", 7, b"\1"),
        pair(b"tokenizer.chat_template", 8, text(b"{{ bos_token }}{% for m in messages %}{{ m }}{% endfor %}")),
    ]
    infos, position = [], 0
    for layer in range(34):
        for name, shape, kind, block, size in (
            ("attn_norm", (2560,), 0, 1, 4),
            ("attn_q", (2560, 2048), 12, 256, 144),
            ("attn_v", (2560, 1024), 14, 256, 210),
            ("ffn_down", (10240, 2560), 14, 256, 210),
        ):
            infos.append(info(f"blk.{layer}.{name}.weight".encode(), shape, position, kind))
            values = shape[0] * (shape[1] if len(shape) > 1 else 1)
            position += -(-values // block * size // 32) * 32
    return gguf(*pairs, tensors=tuple(infos)), position


@pytest.mark.parametrize("keep", [(), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")])
def test_a_gguf_with_a_large_vocabulary_is_read_fast(large_vocabulary, tmp_path, keep):
    raw, size = large_vocabulary
    path = tmp_path / "model-Q4_K_M.gguf"
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + size)
    started = time.process_time()
    found = header(path, keep=keep)
    assert time.process_time() - started < SECONDS
    assert found.dtypes().keys() == {"Q4_K", "Q6_K", "F32"}
    assert found.metadata["tokenizer.ggml.tokens"].count == 262_144
    if keep:
        assert found.metadata["tokenizer.ggml.tokens"].items[7] == "▁word7"
        assert found.metadata["tokenizer.ggml.token_type"].items[-1] == 1
