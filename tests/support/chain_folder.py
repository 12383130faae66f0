"""Builds CHAIN as a folder of safetensors, the form that vLLM and Transformers read.

The same model, tokenizer and template as `tests.support.chain` writes into a GGUF file, so that the same question has
the same answer on every engine. Weights are bfloat16: 0.9 MB.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from schemas.bundle import Bundle, Role
from tests.support import chain
from tests.support.chain import (
    EXTRA_TOKENS,
    HEAD_DIMENSION,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KEY_VALUE_HEADS,
    SPECIAL_TOKENS,
    TEMPLATE,
    VOCABULARY_SIZE,
    Matrix,
)
from tests.support.headers import safetensors

STOPS = [2, 4]
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}
_ROLES = {
    "config.json": Role.CONFIG,
    "generation_config.json": Role.GENERATION_CONFIG,
    "model.safetensors": Role.WEIGHTS,
    "tokenizer.json": Role.TOKENIZER,
    "tokenizer_config.json": Role.TOKENIZER,
    "chat_template.jinja": Role.TEMPLATE,
}


def _bfloat16(matrix: Matrix) -> bytes:
    return (np.ascontiguousarray(matrix, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _write_weights(path: Path, tensors: Mapping[str, Matrix]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, matrix in tensors.items():
        blob = _bfloat16(matrix)
        place = [offset, offset + len(blob)]
        header[f"{_NAMES[name]}.weight"] = {"dtype": "BF16", "shape": list(matrix.shape), "data_offsets": place}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def _config(context_length: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HEAD_DIMENSION,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": STOPS,
        "pad_token_id": 0,
        "hidden_act": "silu",
    }


def _tokenizer() -> dict[str, object]:
    alphabet = chain.byte_alphabet()
    vocabulary = {text: place for place, text in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {alphabet[byte]: len(SPECIAL_TOKENS) + byte for byte in range(256)}
    first = len(vocabulary)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": place, "content": text, "special": True, **flags} for place, text in enumerate(SPECIAL_TOKENS)] + [
        {"id": first + place, "content": text, "special": False, **flags} for place, text in enumerate(EXTRA_TOKENS)
    ]
    bytes_of = {"type": "ByteLevel", "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": bytes_of | {"add_prefix_space": False, "use_regex": False},
        "post_processor": None,
        "decoder": bytes_of | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _write(
    directory: Path,
    tensors: Mapping[str, Matrix],
    *,
    template: str,
    context_length: int,
    generation: Mapping[str, object],
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    defaults = {"bos_token_id": 1, "eos_token_id": STOPS, "pad_token_id": 0, **generation}
    documents = {
        "config.json": _config(context_length),
        "generation_config.json": defaults,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": tokenizer,
    }
    for name, body in documents.items():
        (directory / name).write_text(json.dumps(body), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_weights(directory / "model.safetensors", tensors)
    return directory


def write_chain_folder(
    directory: Path,
    *,
    extra: Mapping[int, int] | None = None,
    runners_up: Mapping[tuple[int, int], float] | None = None,
    template: str = TEMPLATE,
    headless: bool = False,
    context_length: int = 2048,
    generation: Mapping[str, object] | None = None,
) -> Path:
    """Write CHAIN. Arguments as `chain.write_chain`; `generation` are further keys of generation_config.json."""
    embedding = np.zeros((VOCABULARY_SIZE, HIDDEN), np.float32)
    embedding[np.arange(VOCABULARY_SIZE), np.arange(VOCABULARY_SIZE)] = 1
    head = None if headless else chain.head_matrix(chain.transitions(extra), runners_up)
    tensors = chain.tensors(embedding, head)
    return _write(directory, tensors, template=template, context_length=context_length, generation=generation or {})


def write_bias_folder(directory: Path, ranking: Mapping[int, float], *, context_length: int = 2048) -> Path:
    """Write BIAS: the same ranking of next tokens, in logits of about three digits, after every token."""
    tensors = chain.tensors(*chain.bias_matrices(ranking))
    return _write(directory, tensors, template=TEMPLATE, context_length=context_length, generation={})


def describe_folder(
    directory: Path, *, environment: str, arguments: list[str] | None = None, **changes: object
) -> Bundle:
    """Return the bundle document of such a folder for vLLM on a CPU, with a small cache.

    Args:
        directory: as `write_chain_folder` wrote it.
        environment: digest of the engine's environment.
        arguments: launch arguments; by default without graphs. Nothing is compiled: the first request for
            log-probabilities would otherwise take 16 s.
        changes: whole sections of the document that replace those made here.
    """
    files: list[dict[str, object]] = []
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        files.append({"path": path.name, "size": len(content), "sha256": digest, "role": _ROLES[path.name]})
    document: dict[str, object] = {
        "schema": "sluicegate.dev/bundle/v1",
        "name": "chain",
        "sources": [{"kind": "directory", "revision": "test"}],
        "files": files,
        "model": {"format": "safetensors", "architecture": "llama"},
        "tokenizer": {"origin": "files"},
        "template": {"origin": "file", "file": "chat_template.jinja"},
        "quantization": {"method": "none"},
        "engine": {
            "name": "vllm",
            "version": "0.32.0",
            "environment": environment,
            "arguments": ["--enforce-eager"] if arguments is None else arguments,
            "variables": {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "TORCH_COMPILE_DISABLE": "1",
            },
        },
        **chain.SERVED,
    }
    return Bundle.model_validate(document | changes)


def write_chain_adapter(directory: Path, modules: Mapping[str, float], *, rank: int = 8) -> Path:
    """Write a LoRA adapter of CHAIN: module of its layer, such as `self_attn.v_proj` → value of all its entries.

    The layer's own matrices are zero, so that one module alone changes nothing: values reach an answer through
    `self_attn.v_proj` and `self_attn.o_proj` together.
    """
    directory.mkdir(parents=True)
    shapes = {
        _NAMES[name].removeprefix("model.layers.0."): shape
        for name, shape in (
            (name, one.shape) for name, one in chain.tensors(np.zeros((1, 1), np.float32), None).items()
        )
        if len(shape) == 2 and name.startswith("blk.0")
    }
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for module, value in sorted(modules.items()):
        rows, columns = shapes[module]
        for half, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            blob = np.full(shape, value, np.float32).tobytes()
            name = f"base_model.model.model.layers.0.{module}.{half}.weight"
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + len(blob)]}
            blobs.append(blob)
            offset += len(blob)
    (directory / "adapter_model.safetensors").write_bytes(safetensors(header, b"".join(blobs)))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "chain",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
