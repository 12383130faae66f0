"""Writes the checkpoints of the incident cases: MICRO, MICRO-2SHARD, TOK, T0 and ADAPT, byte by byte."""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gates.static.composition import of_directory
from gates.static.declared import read_declared
from gates.static.examine import Examined, examine
from gates.static.flaw import Flaw

WIDTHS = {
    "F64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
}

T0 = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TOOL_CALL = '<tool_call>{"name":"get_time","arguments":{}}</tool_call>'
PLAIN = ("</think>", TOOL_CALL, "<spare>")


class T(NamedTuple):
    """A tensor to write: name, type, shape, and its bytes (zeros by default)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


def write_safetensors(path: Path, tensors: Sequence[T], *, sparse: bool = False) -> Path:
    """Write a safetensors file; `sparse` leaves holes where no data is given, whatever the size."""
    header: dict[str, Any] = {}
    place = 0
    for one in tensors:
        header[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [place, place + one.size]}
        place += one.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        begin = file.tell()
        if sparse:
            file.truncate(begin + place)
        at = begin
        for one in tensors:
            if one.data is not None:
                file.seek(at)
                file.write(one.data)
            elif not sparse:
                file.write(b"\0" * one.size)
            at += one.size
    return path


def micro_config(**changes: Any) -> dict[str, Any]:
    """Return MICRO's config.json; a change to None takes a key out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 264,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 4],
        "pad_token_id": 0,
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def micro_tensors(prefix: str = "model.") -> list[T]:
    """Return MICRO's 12 tensors in order."""
    layer = f"{prefix}layers.0."
    told = [
        (f"{prefix}embed_tokens", (264, 8)),
        (f"{layer}input_layernorm", (8,)),
        (f"{layer}self_attn.q_proj", (8, 8)),
        (f"{layer}self_attn.k_proj", (4, 8)),
        (f"{layer}self_attn.v_proj", (4, 8)),
        (f"{layer}self_attn.o_proj", (8, 8)),
        (f"{layer}post_attention_layernorm", (8,)),
        (f"{layer}mlp.gate_proj", (16, 8)),
        (f"{layer}mlp.up_proj", (16, 8)),
        (f"{layer}mlp.down_proj", (8, 16)),
        (f"{prefix}norm", (8,)),
        ("lm_head", (264, 8)),
    ]
    return [T(f"{name}.weight", "BF16", shape) for name, shape in told]


def write_json(path: Path, value: Any) -> Path:
    """Write a JSON file."""
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def micro(root: Path, *, tensors: Sequence[T] | None = None, **changes: Any) -> Path:
    """Write MICRO into a folder, which is made."""
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "config.json", micro_config(**changes))
    write_safetensors(root / "model.safetensors", micro_tensors() if tensors is None else tensors)
    return root


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def micro_sharded(root: Path, *, names: Sequence[str] = SHARDS, total: int = 9648, **changes: Any) -> Path:
    """Write MICRO-2SHARD into a folder, which is made."""
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "config.json", micro_config(**changes))
    tensors = micro_tensors()
    for name, part in zip(names, (tensors[:7], tensors[7:]), strict=True):
        write_safetensors(root / name, part)
    places = {one.name: names[0 if place < 7 else 1] for place, one in enumerate(tensors)}
    write_json(root / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    return root


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Read a JSON object, change it in place, and write it back."""
    value = json.loads(path.read_text("utf-8"))
    change(value)
    write_json(path, value)


# ----------------------------------------------------------------------------------------------------- tokenizer


def byte_alphabet() -> list[str]:
    """Return how byte-level vocabularies write each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def added_token(number: int, text: str, *, special: bool) -> dict[str, Any]:
    """Return an entry of added_tokens."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}


def tok(
    *,
    names: Sequence[str] = SPECIALS,
    bos: bool = False,
    more: Sequence[str] = (),
    without_added: Sequence[str] = (),
    swap: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return TOK as tokenizer.json.

    Args:
        names: of the ids 0 to 4.
        bos: let the post-processor put the token of id 1 before each text.
        more: further added tokens, from id 264 on.
        without_added: tokens that are in the vocabulary only.
        swap: two ids whose tokens change places.
    """
    texts = [*names, *byte_alphabet(), *PLAIN, *more]
    if swap is not None:
        texts[swap[0]], texts[swap[1]] = texts[swap[1]], texts[swap[0]]
    whole = {*names, *PLAIN, *more} - set(without_added)
    added = [added_token(n, text, special=text in names) for n, text in enumerate(texts) if text in whole]
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": names[1], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {names[1]: {"id": names[1], "ids": [1], "tokens": [names[1]]}},
    }
    steps = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": steps,
        "post_processor": processor if bos else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "byte_fallback": False,
            "vocab": {text: number for number, text in enumerate(texts)},
            "merges": [],
        },
    }


def speak(root: Path, *, template: str | None = T0, config: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Give a folder TOK and a template."""
    names = options.get("names", SPECIALS)
    write_json(root / "tokenizer.json", tok(**options))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[1],
        "eos_token": names[2],
        "pad_token": names[0],
    }
    write_json(root / "tokenizer_config.json", told | dict(config or {}))
    if template is not None:
        (root / "chat_template.jinja").write_text(template, encoding="utf-8")
    return root


# ------------------------------------------------------------------------------------------------------ adapter


def adapt_config(**changes: Any) -> dict[str, Any]:
    """Return ADAPT's adapter_config.json."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": "micro",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "task_type": "CAUSAL_LM",
    }
    return config | changes


HALF = b"\x00\x3f"
"""0.5 in BF16."""


def adapt(
    root: Path,
    *,
    module: str = "model.layers.0.self_attn.q_proj",
    size: tuple[int, int] = (8, 8),
    more: Sequence[T] = (),
    zero_b: bool = False,
    **changes: Any,
) -> Path:
    """Write ADAPT into a folder, which is made.

    Args:
        root: of the adapter.
        module: that it changes.
        size: rows and columns of the base's matrix.
        more: further tensors.
        zero_b: leave B at zero.
        changes: of adapter_config.json.
    """
    root.mkdir(parents=True, exist_ok=True)
    config = adapt_config(**changes)
    write_json(root / "adapter_config.json", config)
    rank, stem = config["r"], f"base_model.model.{module}"
    a, b = (rank, size[1]), (size[0], rank)
    tensors = [
        T(f"{stem}.lora_A.weight", "BF16", a, HALF * math.prod(a)),
        T(f"{stem}.lora_B.weight", "BF16", b, None if zero_b else HALF * math.prod(b)),
        *more,
    ]
    write_safetensors(root / "adapter_model.safetensors", tensors)
    return root


# -------------------------------------------------------------------------------------------------------- asking


FINDS_NOTHING = frozenset(
    {
        "config-missing",
        "tokenizer-missing",
        "draft-incomplete",
        "adapter-incomplete",
        "argument-value",
        "drain-too-short",
    }
)
"""Codes of what is not there."""
ASKS_NOTHING = frozenset({"argument-unknown", "argument-value"})
"""Codes of words of which nobody can say what was meant: their advice is to leave them out."""
ONE_OF_MANY = re.compile(r"(?<![\w.,-])1 (?!is\b|has\b|was\b|does\b|bias\b|less\b|lacks\b|holds\b)[a-z-]+s\b")


def validate(root: Path, declared: Mapping[str, Any] | None = None, **options: Any) -> Examined:
    """Run the static gate over a folder. Whatever it finds must tell a program and a person all that it knows."""
    examined = examine(of_directory(root, read_declared(declared or {})), **options)
    for one in examined.flaws:
        assert one.expected is not None or one.code in ASKS_NOTHING, (
            f"{one.code} does not say what is expected: {one.message}"
        )
        assert one.found is not None or one.code in FINDS_NOTHING, f"{one.code} does not say what was found"
        assert not ONE_OF_MANY.search(one.message), f"a plural after 1: {one.message}"
        assert one.message.endswith((".", "?")), one.message
        assert one.advice.endswith("."), one.advice
    return examined


def only(examined: Examined, code: str) -> Flaw:
    """Return the one flaw of a code."""
    (found,) = [one for one in examined.flaws if one.code == code]
    return found


def codes(examined: Examined, *severities: str) -> set[str]:
    """Return the codes that were found, of some severities or of all."""
    return {one.code for one in examined.flaws if not severities or one.severity in severities}


def alarms(examined: Examined) -> set[str]:
    """Return the codes of everything that blocks or warns."""
    return codes(examined, "block", "warn")
