"""What each layer of a model keeps of a sequence, read from its configuration.

Source: the configuration classes of transformers 4.57 and 5.24, and the cache specifications of vLLM and SGLang.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gates.placement import PlacementUnknown
from gates.placement.cache import Cache, Kept
from gates.placement.dtypes import Numbers
from gates.static.shape import Shape
from schemas.short import many

# What `layer_types` may say → kind of layer here.
_WORDS = {
    **dict.fromkeys(("full_attention", "attention", "global", "global_attention", "full", "indexed_attention"), "full"),
    "deepseek_sparse_attention": "full",
    **dict.fromkeys(("sliding_attention", "sliding_window", "local", "local_attention", "chunked_attention"), "window"),
    **dict.fromkeys(("linear_attention", "gated_delta_net"), "linear"),
    **dict.fromkeys(("mamba", "mamba2", "ssm"), "mamba"),
    **dict.fromkeys(("mlp", "moe", "none"), "none"),
    "conv": "conv",
    "hybrid": "both",
}
_LETTERS = {"M": "mamba", "*": "full", "-": "none", "E": "none"}
# Families that alternate and say it by a number, or by their class alone: every n-th layer attends to everything.
_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "olmo3": 4}
_ALL_WINDOWS = frozenset({"mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"})
_SWITCHED = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text"})
_RECURRENT = frozenset({"mamba", "mamba2", "falcon_mamba"})
_ALIKE = {**dict.fromkeys(_RECURRENT, "mamba"), "falcon_h1": "both"}
# A list of ones and zeros by layer → the kind of a layer with a one, and of the others: MiniMax's, and MiMo's.
_MARKED = {"attn_type_list": ("full", "lightning"), "hybrid_layer_pattern": ("window", "full")}
SCALE_BYTES = 4
_INDEX_GROUP = 128


@dataclass(frozen=True, slots=True)
class Reading:
    """How the engine reads the configuration.

    Whether it frees what leaves a window, keeps latents compressed, and where it does not, pads values to keys.
    """

    frees_windows: bool = True
    keeps_latents: bool = True
    pads_values: bool = False


def cache_of(shape: Shape, numbers: Numbers, reading: Reading | None = None) -> Cache:
    """Return what each layer keeps.

    Raises:
        PlacementUnknown: a size that is needed is missing, or a kind of layer is not known.
    """
    reading = Reading() if reading is None else reading
    if shape.text.get("is_encoder_decoder") is True or shape.text.get("cross_attention_layers"):
        raise PlacementUnknown(shape.at("cross_attention_layers"), "cross attention keeps what no rule here counts")
    kinds, assumed = _kinds(shape)
    shared = _count(shape, "num_kv_shared_layers") or 0  # the last ones read what earlier layers keep
    kinds = [kind if layer < len(kinds) - shared else "none" for layer, kind in enumerate(kinds)]
    if "window" in kinds:
        if shape.sliding_window is None and _count(shape, "attention_chunk_size") is None:
            assumed.append("The width of the windows is not told: windowed layers are counted as full ones.")
        elif not reading.frees_windows:
            assumed.append("The engine frees nothing that leaves a window: windowed layers are counted as full ones.")
        else:
            assumed.append("A window is counted at its width; while a prompt is read, engines keep up to a batch more.")
    if shape.text.get("use_cla") is True:
        # vLLM and SGLang write what a follower reads into its own place again.
        assumed.append("Layers that share keys and values with the one before are counted: engines store them in each.")
    layers = tuple(_MAKERS[kind](shape, numbers, reading, layer) for layer, kind in enumerate(kinds))
    return Cache(layers, numbers.name, tuple(assumed))


# ------------------------------------------------------------------------------------------------- kinds of layers


def _kinds(shape: Shape) -> tuple[list[str], list[str]]:
    """Return the kind of each layer, and what had to be assumed."""
    text, count = shape.text, shape.layers
    if count is None:
        raise PlacementUnknown(shape.at("num_hidden_layers"), "is missing, so nothing can be counted")
    if isinstance(told := text.get("linear_attn_config"), dict):
        return _delta(shape, told, count), []
    for key in ("layer_types", "layers_block_type"):
        if isinstance(told := text.get(key), list) and told:
            return _named(shape, key, told, count), []
    if isinstance(letters := text.get("hybrid_override_pattern"), str):
        found = [_LETTERS.get(one, "") for one in letters]
        if len(found) != count or "" in found:
            raise PlacementUnknown(
                shape.at("hybrid_override_pattern"), f"does not name {many(count, 'layer')} by M, *, - and E"
            )
        return found, []
    every = _count(shape, "full_attention_interval")
    if every is not None:
        return ["full" if (layer + 1) % every == 0 else "linear" for layer in range(count)], []
    if (marked := _marked(text, count)) is not None:
        return marked, []
    if (period := _count(shape, "attn_layer_period")) is not None:
        offset = text.get("attn_layer_offset", 0)
        return ["full" if layer % period == offset else "mamba" for layer in range(count)], []
    if isinstance(told := text.get("attn_layer_indices"), list):
        return ["full" if layer in told else "mamba" for layer in range(count)], []
    if shape.model_type in _ALIKE:
        return [_ALIKE[shape.model_type]] * count, []
    searched = _searched(shape, count)
    return _attending(shape, count) if searched is None else (searched, [])


def _marked(text: Mapping[str, Any], count: int) -> list[str] | None:
    """Return the kinds of layers that a list of ones and zeros tells apart; None without one."""
    for key, (one, other) in _MARKED.items():
        if isinstance(told := text.get(key), list) and len(told) == count:
            return [one if mark == 1 else other for mark in told]
    return None


def _delta(shape: Shape, told: Mapping[str, Any], count: int) -> list[str]:
    """Return the kinds of layers where Kimi's delta attention and full attention take turns, numbered from 1.

    Source: the configuration of Kimi Linear, and `is_kda_layer` in vLLM's and transformers' classes for it.
    """
    kinds: list[str] = []
    full = "latent" if shape.is_mla else "full"
    for number in range(1, count + 1):
        said = [
            kind
            for key, kind in (("kda_layers", "kda"), ("full_attn_layers", full))
            if isinstance(told.get(key), list) and number in told[key]
        ]
        if len(said) != 1:
            raise PlacementUnknown(shape.at("linear_attn_config"), f"does not say once what layer {number} is")
        kinds += said
    return kinds


def _named(shape: Shape, key: str, told: list[Any], count: int) -> list[str]:
    if len(told) < count:
        raise PlacementUnknown(shape.at(key), f"names {len(told)} of {many(count, 'layer')}")
    found = []
    for layer, name in enumerate(told[:count]):
        kind = _WORDS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise PlacementUnknown(f"{shape.at(key)}/{layer}", f"what a layer of the kind {name!r} keeps is not known")
        if kind == "linear" and _count(shape, "mamba_d_state", "ssm_state_size") is not None:
            kind = "mamba"  # transformers 5 calls every recurrent layer linear_attention
        found.append("latent" if kind == "full" and shape.is_mla else kind)
    return found


def _searched(shape: Shape, count: int) -> list[str] | None:
    """Return the kinds of layers of an architecture that was searched for block by block; None for any other."""
    blocks = shape.text.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != count:
        return None
    told = [one.get("attention") if isinstance(one, dict) else None for one in blocks]
    attention = [one if isinstance(one, dict) else {} for one in told]
    return [
        "none" if one.get("no_op") is True or one.get("replace_with_linear") is True else "full" for one in attention
    ]


def _attending(shape: Shape, count: int) -> tuple[list[str], list[str]]:
    if shape.is_mla:
        return ["latent"] * count, []
    if (chunk := _count(shape, "attention_chunk_size")) is not None and shape.model_type.startswith("llama4"):
        flags = shape.text.get("no_rope_layers")
        step = _count(shape, "no_rope_layer_interval") or 4
        marks = flags if isinstance(flags, list) and len(flags) == count else [(n + 1) % step for n in range(count)]
        return ["window" if mark else "full" for mark in marks], [f"Chunks of {chunk} tokens are counted as windows."]
    window = shape.sliding_window
    if window is None:
        return ["full"] * count, []
    letters = shape.text.get("sliding_window_pattern")
    if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:
        return ["full" if letters[layer % len(letters)] == "G" else "window" for layer in range(count)], []
    if shape.model_type in _EVERY:
        told = shape.text.get("sliding_window_pattern", shape.text.get("_sliding_window_pattern"))
        every = told if type(told) is int and told > 0 else _EVERY[shape.model_type]
        return ["full" if (layer + 1) % every == 0 else "window" for layer in range(count)], []
    if shape.model_type in _ALL_WINDOWS:
        return ["window"] * count, []
    if shape.model_type in _SWITCHED or "use_sliding_window" in shape.text:
        if shape.text.get("use_sliding_window") is not True:
            return ["full"] * count, []
        first = shape.text.get("max_window_layers")
        return ["window" if type(first) is int and layer >= first else "full" for layer in range(count)], []
    family = shape.model_type or "this family"
    said = f"Which layers of {family} have the window of {window} is not known: all are counted as full ones."
    return ["full"] * count, [said]


# ---------------------------------------------------------------------------------------------- what each one keeps

_Maker = Callable[[Shape, Numbers, Reading, int], tuple[Kept, ...]]


def _full(shape: Shape, numbers: Numbers, _reading: Reading, layer: int) -> tuple[Kept, ...]:
    head = _count(shape, "global_head_dim") or _size(shape, "head_dim", shape.head_dim)
    heads = _count(shape, "num_global_key_value_heads") or _key_heads(shape, layer)
    if heads == 0:
        return ()
    return (Kept("full", heads, head * numbers.key + (shape.value_dim or head) * numbers.value),)


def _window(shape: Shape, numbers: Numbers, reading: Reading, layer: int) -> tuple[Kept, ...]:
    width = shape.sliding_window or _count(shape, "attention_chunk_size")
    if width is None or not reading.frees_windows:
        width = None
    head = _count(shape, "swa_head_dim") or _size(shape, "head_dim", shape.head_dim)
    heads = _count(shape, "swa_num_key_value_heads") or _key_heads(shape, layer)
    if heads == 0:
        return ()
    token = head * numbers.key + (_count(shape, "swa_v_head_dim") or shape.value_dim or head) * numbers.value
    return (Kept("window" if width else "full", heads, token, window=width),)


def _latent(shape: Shape, numbers: Numbers, reading: Reading, _layer: int) -> tuple[Kept, ...]:
    rank = _size(shape, "kv_lora_rank", shape.kv_rank)
    rope = _size(shape, "qk_rope_head_dim", shape.rope_dim)
    if not reading.keeps_latents:
        key = _size(shape, "qk_nope_head_dim", shape.nope_dim) + rope
        value = key if reading.pads_values else _size(shape, "v_head_dim", shape.value_dim)
        heads = _size(shape, "num_attention_heads", shape.heads)
        return (Kept("full", heads, key * numbers.key + value * numbers.value),)
    index = _count(shape, "index_head_dim")
    if index is None:
        return (Kept("latent", 0, (rank + rope) * numbers.key),)
    # Sparse attention keeps 8-bit keys for its index; 8-bit latents have scales, and their rotary part keeps 16 bits.
    scales = -(-index // _INDEX_GROUP) * SCALE_BYTES
    row = (rank + rope) * numbers.key
    if numbers.is_eight_bit:
        row = rank * numbers.key + -(-rank // _INDEX_GROUP) * SCALE_BYTES + rope * 2
    return (Kept("latent", 0, row + index + scales),)


def _mamba(shape: Shape, numbers: Numbers, _reading: Reading, _layer: int) -> tuple[Kept, ...]:
    hidden = _size(shape, "hidden_size", shape.hidden)
    expand = _count(shape, "mamba_expand", "expand") or 2
    state = _need(shape, "mamba_d_state", "ssm_state_size", "state_size")
    taps = _need(shape, "mamba_d_conv", "conv_kernel") - 1
    names = ("mamba_n_heads", "mamba_num_heads", *(("num_heads",) if shape.model_type == "mamba2" else ()))
    heads = _count(shape, *names)
    if heads is None:
        inner = (shape.intermediate if shape.model_type in _RECURRENT else None) or expand * hidden
        return (Kept("state", inner, state_bytes=state * numbers.state + taps * numbers.model),)
    width = _count(shape, "mamba_d_head", "mamba_head_dim", *(("head_dim",) if shape.model_type == "mamba2" else ()))
    width = width or -(-expand * hidden // heads)
    groups = _count(shape, "mamba_n_groups", "n_groups") or 1
    own = Kept("state", heads, state_bytes=width * (state * numbers.state + taps * numbers.model))
    return own, Kept("state", groups, state_bytes=2 * state * taps * numbers.model)


def _linear(shape: Shape, numbers: Numbers, _reading: Reading, _layer: int) -> tuple[Kept, ...]:
    keys, values = _need(shape, "linear_num_key_heads"), _need(shape, "linear_num_value_heads")
    key, value = _need(shape, "linear_key_head_dim"), _need(shape, "linear_value_head_dim")
    taps = _need(shape, "linear_conv_kernel_dim") - 1
    own = Kept("state", values, state_bytes=value * (key * numbers.state + taps * numbers.model))
    return own, Kept("state", keys, state_bytes=2 * key * taps * numbers.model)


def _kda(shape: Shape, numbers: Numbers, _reading: Reading, _layer: int) -> tuple[Kept, ...]:
    """Return what a layer of Kimi's delta attention keeps: a matrix a head, and the last inputs of three convolutions.

    Source: vLLM 0.32, mamba_utils.py: `kda_state_shape`; the matrix has 32 bits unless an argument says otherwise.
    """
    told: Mapping[str, Any] = shape.text["linear_attn_config"]
    place = shape.at("linear_attn_config")
    sizes = {key: told.get(key) for key in ("num_heads", "head_dim", "short_conv_kernel_size")}
    for key, value in sizes.items():
        if type(value) is not int or value <= 0:
            raise PlacementUnknown(f"{place}/{key}", "is missing, so what a sequence takes cannot be counted")
    heads, head, taps = (int(value) for value in sizes.values() if value is not None)
    state = head * head * numbers.state + 3 * head * (taps - 1) * numbers.model
    return (Kept("state", heads, state_bytes=state),)


def _lightning(shape: Shape, numbers: Numbers, _reading: Reading, _layer: int) -> tuple[Kept, ...]:
    head = _size(shape, "head_dim", shape.head_dim)
    heads = _size(shape, "num_attention_heads", shape.heads)
    return (Kept("state", heads, state_bytes=head * head * numbers.state),)


def _conv(shape: Shape, numbers: Numbers, _reading: Reading, _layer: int) -> tuple[Kept, ...]:
    hidden = _size(shape, "hidden_size", shape.hidden)
    return (Kept("state", hidden, state_bytes=(_need(shape, "conv_L_cache") - 1) * numbers.model),)


def _both(shape: Shape, numbers: Numbers, reading: Reading, layer: int) -> tuple[Kept, ...]:
    return _full(shape, numbers, reading, layer) + _mamba(shape, numbers, reading, layer)


def _none(_shape: Shape, _numbers: Numbers, _reading: Reading, _layer: int) -> tuple[Kept, ...]:
    return ()


_MAKERS: Mapping[str, _Maker] = {
    "full": _full,
    "window": _window,
    "latent": _latent,
    "mamba": _mamba,
    "linear": _linear,
    "lightning": _lightning,
    "kda": _kda,
    "conv": _conv,
    "both": _both,
    "none": _none,
}


def _key_heads(shape: Shape, layer: int) -> int:
    for key in ("num_key_value_heads", "num_kv_heads"):
        told = shape.text.get(key)
        if isinstance(told, list):
            if layer >= len(told) or type(told[layer]) is not int or told[layer] < 0:
                raise PlacementUnknown(f"{shape.at(key)}/{layer}", "is no number of key-value heads")
            return int(told[layer])
    blocks = shape.text.get("block_configs")
    block = blocks[layer] if isinstance(blocks, list) and layer < len(blocks) else None
    told = block.get("attention") if isinstance(block, dict) else None
    shared = told.get("n_heads_in_group") if isinstance(told, dict) else None
    if type(shared) is int and shared > 0:  # how many query heads read one key head
        return _size(shape, "num_attention_heads", shape.heads) // shared
    return _size(shape, "num_key_value_heads", shape.kv_heads)


def _count(shape: Shape, *keys: str) -> int | None:
    return next((value for key in keys if type(value := shape.text.get(key)) is int and value > 0), None)


def _need(shape: Shape, *keys: str) -> int:
    return _size(shape, keys[0], _count(shape, *keys))


def _size(shape: Shape, key: str, value: int | None) -> int:
    if value is None:
        raise PlacementUnknown(shape.at(key), "is missing, so what a sequence takes cannot be counted")
    return value
