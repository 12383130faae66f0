"""The configuration that a GGUF file's metadata stand for, in the words of config.json.

Source: gguf-py's constants.py and llama-hparams.cpp of llama.cpp.
"""

from collections.abc import Mapping
from typing import Any

from gates.files.header import Array, Header
from gates.files.weights import header as read_header
from gates.placement import PlacementUnknown
from gates.static.listing import Entry

# Architecture in a GGUF file → model type in config.json, where what layers keep depends on it.
_TYPES = {
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "deepseek2": "deepseek_v2",
}
_KNOWN = frozenset(
    {
        *("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "gpt-oss", "cohere2"),
        *("phi2", "phi3", "starcoder2", "mistral3", "olmo2", "granite", "smollm3", "stablelm", "gpt2", "deepseek2"),
        *("command-r", "internlm2", "glm4", "exaone", "minicpm", "falcon", "gptneox", "bloom", "mpt", "nemotron"),
    }
)
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
}
_WINDOWLESS = frozenset({"phi3", "llama", "starcoder2"})
"""Architectures whose window llama.cpp does not apply, or that have none there."""


def config_of(header: Header, entry: Entry) -> dict[str, Any]:
    """Return the configuration that a GGUF header stands for.

    Args:
        header: of the file that holds the metadata.
        entry: that file, read again where sizes differ from layer to layer.

    Raises:
        PlacementUnknown: what layers of the architecture keep is not known, or the file has no architecture.
        FileRefused: the file is not sound any more.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _KNOWN:
        raise PlacementUnknown("general.architecture", f"what layers of {name!r} keep is not known for GGUF files")
    told: dict[str, object] = {key: header.metadata.get(f"{name}.{key}") for key in _KEYS}
    arrays = [f"{name}.{key}" for key, value in told.items() if isinstance(value, Array)]
    if arrays:
        again = read_header(entry.place, entry.path, keep=arrays).metadata
        told |= {key: _items(again.get(f"{name}.{key}")) for key in told if f"{name}.{key}" in arrays}
    found: dict[str, Any] = {_KEYS[key]: value for key, value in told.items() if isinstance(value, int | list)}
    if name in _WINDOWLESS:
        found.pop("sliding_window", None)
    found |= {"model_type": _TYPES.get(name, name), "torch_dtype": "float16"}
    _latent(name, header.metadata, found)
    heads = found.get("num_attention_heads")
    if isinstance(heads, list):  # the most of any layer, by which nothing is divided: GGUF files are cut by layers
        found["num_attention_heads"] = max((one for one in heads if isinstance(one, int)), default=0)
    return found


def _latent(name: str, metadata: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Take latent attention as the file stores it: one head of rank and rotary part, and values of the rank."""
    rank = metadata.get(f"{name}.attention.kv_lora_rank")
    if type(rank) is int and f"{name}.attention.key_length_mla" not in metadata:
        # A file from before latents were kept compressed: keys and values of every head are kept.
        found.setdefault("num_key_value_heads", found.get("num_attention_heads"))


def _items(value: object) -> list[Any] | None:
    return list(value.items) if isinstance(value, Array) and value.items is not None else None
