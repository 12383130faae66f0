"""Writes LoRA adapters of CHAIN in GGUF, as llama.cpp's converter does: whole, or with one thing wrong."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from schemas.bundle import Bundle
from tests.support import chain
from tests.support.chain import Matrix

LOUD = {"attn_v": 0.05, "attn_output": 0.05}
"""Changes answers: the layer's own matrices are zero, and values get out through these two together."""
MUTE = {"attn_q": 0.05}
"""Changes nothing."""


def matrices(modules: Mapping[str, float], *, rank: int = 8) -> dict[str, Matrix]:
    """Return the pairs of an adapter: module of CHAIN's one layer → value of all entries of its two matrices."""
    shapes = {name: one.shape for name, one in chain.tensors(np.zeros((1, 1), np.float32), None).items()}
    found: dict[str, Matrix] = {}
    for module, value in modules.items():
        rows, columns = shapes[f"blk.0.{module}"]
        found[f"blk.0.{module}.weight.lora_a"] = np.full((rank, columns), value, np.float32)
        found[f"blk.0.{module}.weight.lora_b"] = np.full((rows, rank), value, np.float32)
    return found


def write_adapter(
    path: Path,
    pairs: Mapping[str, Matrix],
    *,
    alpha: float | None = 16.0,
    architecture: str = "llama",
    kind: str | None = "adapter",
    adapter_type: str | None = "lora",
    invocation: tuple[int, ...] = (),
) -> Path:
    """Write an adapter; None leaves a key out.

    Args:
        path: of the file, whose folders are made.
        pairs: names of tensors → values, as `matrices` returns them.
        alpha: by which, over the rank, the engine scales.
        architecture: of the base.
        kind: what the file says it is.
        adapter_type: of which kind of adapters it says it is.
        invocation: tokens after which alone it is in force; with one below 0 they are written in another type.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_string("general.type", kind)
    if adapter_type is not None:
        writer.add_string("adapter.type", adapter_type)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if invocation:
        value = gguf.GGUFValueType
        key, tokens = "adapter.alora.invocation_tokens", list(invocation)
        writer.add_key_value(key, tokens, value.ARRAY, sub_type=value.UINT32 if min(tokens) >= 0 else value.INT32)
    for name, matrix in pairs.items():
        writer.add_tensor(name, matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_adapters(bundle: Bundle, root: Path, adapters: Mapping[str, Mapping[str, float]]) -> Bundle:
    """Write adapters into a bundle's directory and return its document with them.

    Args:
        bundle: without any.
        root: of its files.
        adapters: name → modules, as `matrices` takes them.
    """
    document = bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["adapters"] = []
    for name, modules in sorted(adapters.items()):
        path = f"adapters/{name}/{name}.gguf"
        raw = write_adapter(root / path, matrices(modules)).read_bytes()
        digest = "sha256:" + hashlib.sha256(raw).hexdigest()
        document["files"].append({"path": path, "size": len(raw), "sha256": digest, "role": "adapter"})
        document["adapters"].append({"name": name, "files": [path], "rank": 8, "target_modules": sorted(modules)})
    document["files"].sort(key=lambda file: file["path"])
    return Bundle.model_validate(document)
