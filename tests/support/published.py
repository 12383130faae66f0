"""Writes checkpoints in the shapes that families publish: real sizes in sparse files, their ways of naming and saying.

Configurations are the published ones as far as checks read them. Templates are our own, in each family's form.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.checkpoints import WIDTHS, T, added_token, byte_alphabet, write_json, write_safetensors

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Family:
    """One published layout.

    `specials` maps ids to tokens; `tokens` is how many the tokenizer has, of which all are written only for
    `has_whole_vocabulary`, since that takes a second.
    """

    config: Mapping[str, Any]
    tensors: Callable[[], Iterable[T]]
    specials: Mapping[int, str]
    tokens: int
    template: str
    bos: str | None = None
    eos: str = ""
    adds_bos: bool = False
    generation: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    in_config: bool = False
    has_whole_vocabulary: bool = False
    expected: frozenset[str] = frozenset()
    declared: Mapping[str, Any] = field(default_factory=dict)


def write(root: Path, family: Family) -> Path:
    """Write a layout into a folder, which is made."""
    root.mkdir(parents=True)
    write_json(root / "config.json", family.config)
    if family.generation is not None:
        write_json(root / "generation_config.json", family.generation)
    _write_weights(root, list(family.tensors()))
    write_json(root / "tokenizer.json", _tokenizer(family))
    write_json(root / "tokenizer_config.json", _tokenizer_config(family))
    if not family.in_config:
        (root / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    for path, content in family.files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    for name in ("README.md", "LICENSE", ".gitattributes"):
        (root / name).write_text("# A model\n", encoding="utf-8")
    return root


def _write_weights(root: Path, tensors: Sequence[T]) -> None:
    # As the library writes them: the widest types first, so that each is aligned.
    tensors = sorted(tensors, key=lambda one: -WIDTHS[one.dtype])
    shards: list[list[T]] = [[]]
    size = 0
    for one in tensors:
        if size + one.size > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.size
    if len(shards) == 1:
        write_safetensors(root / "model.safetensors", shards[0], sparse=True)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(root / name, shard, sparse=True)
        places |= {one.name: name for one in shard}
    total = sum(one.size for one in tensors)
    write_json(root / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _tokenizer(family: Family) -> dict[str, Any]:
    plain = iter([*byte_alphabet(), *(f"token{number}" for number in range(family.tokens))])
    vocabulary = {}
    for number in range(family.tokens if family.has_whole_vocabulary else 1000):
        if number not in family.specials:
            vocabulary[next(plain)] = number
    added = [added_token(number, text, special=True) for number, text in sorted(family.specials.items())]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    processor: dict[str, Any] = byte_level | {"trim_offsets": False}
    if family.adds_bos and family.bos is not None:
        single = [{"SpecialToken": {"id": family.bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
        processor = {"type": "Sequence", "processors": [processor, template]}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": processor,
        "decoder": byte_level,
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocabulary, "merges": []},
    }


def _tokenizer_config(family: Family) -> dict[str, Any]:
    decoder = {
        str(number): {key: value for key, value in added_token(number, text, special=True).items() if key != "id"}
        for number, text in family.specials.items()
    }
    told: dict[str, Any] = {
        "added_tokens_decoder": decoder,
        "bos_token": family.bos,
        "eos_token": family.eos,
        "model_max_length": 10**30,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return told | ({"chat_template": family.template} if family.in_config else {})


# ----------------------------------------------------------------------------------------------------- tensors


def decoder(
    *,
    layers: int,
    hidden: int,
    heads: int,
    keys: int,
    inner: int,
    rows: int,
    head: int | None = None,
    prefix: str = "model.",
    head_name: str | None = "lm_head",
    dtype: str = "BF16",
    bias: bool = False,
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
    head_norms: bool = False,
    wrap: Callable[[str, int, int], Iterator[T]] | None = None,
    feed: Callable[[int], Iterator[tuple[str, int, int]]] | None = None,
) -> Iterator[T]:
    """Yield the tensors of a decoder of Llama's kind.

    `wrap` makes a linear layer's tensors from its name, rows and columns; `feed` names a layer's other matrices than
    those of a gated MLP.
    """
    size = head or hidden // heads
    plain = wrap or (lambda name, out, into: iter([T(f"{name}.weight", dtype, (out, into))]))
    yield T(f"{prefix}embed_tokens.weight", dtype, (rows, hidden))
    for layer in range(layers):
        stem = f"{prefix}layers.{layer}."
        for name, out, into in (
            ("self_attn.q_proj", heads * size, hidden),
            ("self_attn.k_proj", keys * size, hidden),
            ("self_attn.v_proj", keys * size, hidden),
            ("self_attn.o_proj", hidden, heads * size),
        ):
            yield from plain(stem + name, out, into)
            if bias and "o_proj" not in name:
                yield T(f"{stem}{name}.bias", dtype, (out,))
        for name in norms:
            yield T(f"{stem}{name}.weight", dtype, (hidden,))
        if head_norms:
            yield T(f"{stem}self_attn.q_norm.weight", dtype, (size,))
            yield T(f"{stem}self_attn.k_norm.weight", dtype, (size,))
        if feed is not None:
            for name, out, into in feed(layer):
                yield T(f"{stem}{name}.weight", dtype, (out, into))
            continue
        for name, out, into in (
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield from plain(stem + name, out, into)
    yield T(f"{prefix}norm.weight", dtype, (hidden,))
    if head_name:
        yield T(f"{head_name}.weight", dtype, (rows, hidden))


def experts(
    count: int, inner: int, hidden: int, names: Sequence[str], gate: str
) -> Callable[[int], Iterator[tuple[str, int, int]]]:
    """Return the matrices of a layer of experts; the last of `names` is the one that leads back."""

    def feed(_layer: int) -> Iterator[tuple[str, int, int]]:
        yield gate, count, hidden
        stem = gate.rpartition(".")[0] + ".experts"
        for number in range(count):
            for name in names[:-1]:
                yield f"{stem}.{number}.{name}", inner, hidden
            yield f"{stem}.{number}.{names[-1]}", hidden, inner

    return feed


def gptq(group: int, *, has_order: bool = True, is_awq: bool = False) -> Callable[[str, int, int], Iterator[T]]:
    """Return how 4-bit GPTQ or AWQ stores a linear layer."""

    def wrap(name: str, out: int, into: int) -> Iterator[T]:
        groups = into // group
        if has_order:
            yield T(f"{name}.g_idx", "I32", (into,), b"".join(struct.pack("<i", one // group) for one in range(into)))
        packed = (into, out // 8) if is_awq else (into // 8, out)
        yield T(f"{name}.qweight", "I32", packed)
        yield T(f"{name}.qzeros", "I32", (groups, out // 8))
        yield T(f"{name}.scales", "F16", (groups, out))

    return wrap


def scaled(
    scale: str, *, blocks: int | None = None, dtype: str = "F8_E4M3", more: Sequence[str] = ()
) -> Callable[[str, int, int], Iterator[T]]:
    """Return how 8-bit formats store a linear layer: the weight and its scales."""

    def wrap(name: str, out: int, into: int) -> Iterator[T]:
        shape = (out, 1) if blocks is None else (-(-out // blocks), -(-into // blocks))
        yield T(f"{name}.{scale}", "F32", shape)
        for one in more:
            yield T(f"{name}.{one}", "F32", (1,))
        yield T(f"{name}.weight", dtype, (out, into))

    return wrap


def nvfp4(name: str, out: int, into: int) -> Iterator[T]:
    """Yield how NVFP4 stores a linear layer."""
    yield T(f"{name}.input_scale", "F32", (1,))
    yield T(f"{name}.weight_scale_2", "F32", (1,))
    yield T(f"{name}.weight", "U8", (out, into // 2))
    yield T(f"{name}.weight_scale", "F8_E4M3", (out, into // 16))


def packed_tensors(name: str, out: int, into: int) -> Iterator[T]:
    """Yield how compressed-tensors stores 4-bit weights in groups of 128."""
    yield T(f"{name}.weight_shape", "I64", (2,), struct.pack("<qq", out, into))
    yield T(f"{name}.weight_packed", "I32", (out, into // 8))
    yield T(f"{name}.weight_scale", "BF16", (out, into // 128))


def nf4(name: str, out: int, into: int) -> Iterator[T]:
    """Yield how bitsandbytes stores 4-bit weights."""
    yield T(f"{name}.weight.absmax", "U8", (out * into // 64,))
    yield T(f"{name}.weight.nested_absmax", "F32", (out * into // 64 // 256,))
    yield T(f"{name}.weight.nested_quant_map", "F32", (256,))
    yield T(f"{name}.weight.quant_map", "F32", (16,))
    yield T(f"{name}.weight.quant_state.bitsandbytes__nf4", "U8", (90,))
    yield T(f"{name}.weight", "U8", (out * into // 2, 1))


def deepseek(
    *,
    layers: int,
    hidden: int,
    heads: int,
    rank: int | None,
    inner: int,
    expert: int,
    count: int,
    shared: int,
    rows: int,
    dense: int,
    wrap: Callable[[str, int, int], Iterator[T]] | None = None,
    further: int = 0,
) -> Iterator[T]:
    """Yield the tensors of a DeepSeek decoder: latent attention, dense layers, then experts."""
    plain = wrap or (lambda name, out, into: iter([T(f"{name}.weight", "BF16", (out, into))]))
    yield T("model.embed_tokens.weight", "BF16", (rows, hidden))
    for layer in range(layers + further):
        stem = f"model.layers.{layer}."
        if rank is None:
            yield from plain(f"{stem}self_attn.q_proj", heads * 192, hidden)
        else:
            yield from plain(f"{stem}self_attn.q_a_proj", rank, hidden)
            yield T(f"{stem}self_attn.q_a_layernorm.weight", "BF16", (rank,))
            yield from plain(f"{stem}self_attn.q_b_proj", heads * 192, rank)
        yield from plain(f"{stem}self_attn.kv_a_proj_with_mqa", 576, hidden)
        yield T(f"{stem}self_attn.kv_a_layernorm.weight", "BF16", (512,))
        yield from plain(f"{stem}self_attn.kv_b_proj", heads * 256, 512)
        yield from plain(f"{stem}self_attn.o_proj", hidden, heads * 128)
        yield T(f"{stem}input_layernorm.weight", "BF16", (hidden,))
        yield T(f"{stem}post_attention_layernorm.weight", "BF16", (hidden,))
        mlps = [("mlp.", inner)] if layer < dense else [("mlp.shared_experts.", shared * expert)]
        if layer >= dense:
            yield T(f"{stem}mlp.gate.weight", "BF16", (count, hidden))
            yield T(f"{stem}mlp.gate.e_score_correction_bias", "F32", (count,))
            mlps += [(f"mlp.experts.{number}.", expert) for number in range(count)]
        for name, width in mlps:
            yield from plain(f"{stem}{name}gate_proj", width, hidden)
            yield from plain(f"{stem}{name}up_proj", width, hidden)
            yield from plain(f"{stem}{name}down_proj", hidden, width)
        if layer >= layers:  # the layers that predict a further token
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield T(f"{stem}{name}.weight", "BF16", (hidden,))
            yield T(f"{stem}eh_proj.weight", "BF16", (hidden, 2 * hidden))
            yield T(f"{stem}embed_tokens.weight", "BF16", (rows, hidden))
            yield T(f"{stem}shared_head.head.weight", "BF16", (rows, hidden))
    yield T("model.norm.weight", "BF16", (hidden,))
    yield T("lm_head.weight", "BF16", (rows, hidden))


def gpt_oss() -> Iterator[T]:
    """Yield the tensors of gpt-oss-20b: experts in MXFP4 blocks, the rest in BF16."""
    yield T("model.embed_tokens.weight", "BF16", (201088, 2880))
    for layer in range(24):
        stem = f"model.layers.{layer}."
        for name, out, into in (("q", 4096, 2880), ("k", 512, 2880), ("v", 512, 2880), ("o", 2880, 4096)):
            yield T(f"{stem}self_attn.{name}_proj.weight", "BF16", (out, into))
            yield T(f"{stem}self_attn.{name}_proj.bias", "BF16", (out,))
        yield T(f"{stem}self_attn.sinks", "BF16", (64,))
        yield T(f"{stem}mlp.router.weight", "BF16", (32, 2880))
        yield T(f"{stem}mlp.router.bias", "BF16", (32,))
        yield T(f"{stem}mlp.experts.gate_up_proj_blocks", "U8", (32, 5760, 90, 16))
        yield T(f"{stem}mlp.experts.gate_up_proj_scales", "U8", (32, 5760, 90))
        yield T(f"{stem}mlp.experts.gate_up_proj_bias", "BF16", (32, 5760))
        yield T(f"{stem}mlp.experts.down_proj_blocks", "U8", (32, 2880, 90, 16))
        yield T(f"{stem}mlp.experts.down_proj_scales", "U8", (32, 2880, 90))
        yield T(f"{stem}mlp.experts.down_proj_bias", "BF16", (32, 2880))
        yield T(f"{stem}input_layernorm.weight", "BF16", (2880,))
        yield T(f"{stem}post_attention_layernorm.weight", "BF16", (2880,))
    yield T("model.norm.weight", "BF16", (2880,))
    yield T("lm_head.weight", "BF16", (201088, 2880))


def phi3() -> Iterator[T]:
    """Yield the tensors of Phi-3-mini: fused projections."""
    yield T("model.embed_tokens.weight", "BF16", (32064, 3072))
    for layer in range(32):
        stem = f"model.layers.{layer}."
        yield T(f"{stem}self_attn.qkv_proj.weight", "BF16", (9216, 3072))
        yield T(f"{stem}self_attn.o_proj.weight", "BF16", (3072, 3072))
        yield T(f"{stem}mlp.gate_up_proj.weight", "BF16", (16384, 3072))
        yield T(f"{stem}mlp.down_proj.weight", "BF16", (3072, 8192))
        yield T(f"{stem}input_layernorm.weight", "BF16", (3072,))
        yield T(f"{stem}post_attention_layernorm.weight", "BF16", (3072,))
    yield T("model.norm.weight", "BF16", (3072,))
    yield T("lm_head.weight", "BF16", (32064, 3072))


def vision(prefix: str, layers: int, hidden: int) -> Iterator[T]:
    """Yield some tensors of a vision tower, whose layers have other sizes than the language model's."""
    yield T(f"{prefix}embeddings.patch_embedding.weight", "BF16", (hidden, 3, 14, 14))
    for layer in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield T(f"{prefix}encoder.layers.{layer}.self_attn.{name}.weight", "BF16", (hidden, hidden))
        yield T(f"{prefix}encoder.layers.{layer}.mlp.fc1.weight", "BF16", (4 * hidden, hidden))
        yield T(f"{prefix}encoder.layers.{layer}.mlp.fc2.weight", "BF16", (hidden, 4 * hidden))
