"""What a configuration says about the language model inside it, whatever its family calls things.

Source: the configuration classes of transformers 4.57 and 5.24, and the published config.json of each family.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_HEADS = re.compile(r"(?i)eagle|medusa|hydra|speculator|nextn|mtp|dflash")
_HEADLESS = re.compile(
    r".*(Model|ModelWithProjection|Embedding|For(Sequence|Token|Image|Audio)Classification"
    r"|For(QuestionAnswering|MaskedLM|TextEncoding|Embedding|Retrieval|Ranking))"
)
_CALLED_MODEL = re.compile(r"(.*Chat|.*LMHead|.*Omni|ChatGLM|Ultravox|NVLM_D_|MiDashengLM)Model")
"""How classes are called that generate, although they are called models. Source: vLLM's models/registry.py."""
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
MOST = {"layers": 4096, "heads": 65_536, "kv_heads": 65_536, "experts": 65_536}
_FOUR_TIMES = frozenset({"gpt2", "gpt_bigcode", "gptj", "codegen", "falcon", "bloom", "mpt"})
"""Families whose inner size is four times the hidden one unless something says otherwise."""
_FOUR_TIMES_MOST = 64
_NEVER_NONE = frozenset({"hidden", "layers", "heads", "vocabulary", "context"})
_COUNTED = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary")
"""Sizes of which every library wants a whole number; of some, a list of one for each layer."""
MOST_EXPERTS = 100_000
"""Experts of all layers together; the largest published models have a quarter of that."""
MOST_OF_ALL = 2**31
"""No model has more of anything; a configuration that says so is not counted through."""
KEYS = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "n_kv_heads",
        "num_attention_groups",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "moe_intermediate": ("moe_intermediate_size", "expert_intermediate_size"),
    "shared_intermediate": ("shared_expert_intermediate_size",),
    "query_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "value_dim": ("v_head_dim",),
    "sliding_window": ("sliding_window",),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a language model; None where neither the configuration nor its family's defaults say one.

    `absurd` has what the configuration says and no model can be, by key, and `mistyped` what is no whole number;
    such a size is None.
    """

    model_type: str
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    pointer: str
    family: Mapping[str, Any]
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    experts: int | None = None
    moe_intermediate: int | None = None
    shared_intermediate: int | None = None
    query_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    nope_dim: int | None = None
    value_dim: int | None = None
    sliding_window: int | None = None
    is_tied: bool | None = None
    architecture: str = ""
    absurd: tuple[tuple[str, int], ...] = ()
    mistyped: tuple[tuple[str, object], ...] = ()

    @property
    def is_mla(self) -> bool:
        """Whether keys and values are kept compressed (multi-head latent attention)."""
        return self.kv_rank is not None

    @property
    def is_generator(self) -> bool:
        """Whether the class that the configuration names has a language-model head."""
        return _CALLED_MODEL.fullmatch(self.architecture) is not None or not _HEADLESS.fullmatch(self.architecture)

    @property
    def is_head(self) -> bool:
        """Whether the class is a head that drafts for another model, and reads that model's embedding and states."""
        return _HEADS.search(self.architecture) is not None or isinstance(self.config.get("speculators_config"), dict)

    def at(self, name: str) -> str:
        """Return the JSON Pointer of one of the text configuration's values."""
        return f"{self.pointer}/{name}"


def bounds_of(shape: Shape, key: str) -> tuple[int, int]:
    """Return the least and the most that a key of sizes can say; 0 and −1 say of some that there is none."""
    name = next(name for name, keys in KEYS.items() if key in keys)
    most = MOST.get(name, MOST_OF_ALL)
    if name == "experts" and shape.layers:
        most = min(most, MOST_EXPERTS // shape.layers)
    return 1 if name in _NEVER_NONE else -1, most


@cache
def families() -> dict[str, Any]:
    """Return the table of families: model type → defaults, tied head, and names of tensors."""
    text = resources.files("gates.static").joinpath("architectures.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape that a config.json describes. What it does not hold is None, never guessed."""
    inner = next((name for name in _INNER if isinstance(config.get(name), dict)), None)
    text, pointer = (config[inner], f"/{inner}") if inner else (config, "")
    if inner == "thinker_config" and isinstance(text.get("text_config"), dict):
        text, pointer = text["text_config"], f"{pointer}/text_config"
    types = [one for one in (text.get("model_type"), config.get("model_type")) if isinstance(one, str)]
    known = families()["families"]
    model_type = next((one for one in types if one in known), types[0] if types else "")
    family = known.get(model_type, {})
    values = {name: _value(name, text, config, family) for name in KEYS}
    absurd = tuple(
        (key, text[key])
        for name, keys in KEYS.items()
        for key in keys
        if type(text.get(key)) is int
        and (not -1 <= text[key] <= MOST.get(name, MOST_OF_ALL) or (text[key] == 0 and name in _NEVER_NONE))
    )
    mistyped = tuple(
        (key, text[key]) for name in _COUNTED for key in KEYS[name] if isinstance(text.get(key), str | float | bool)
    )
    experts, layers = values["experts"], values["layers"]
    if experts and layers and experts * layers > MOST_EXPERTS:
        absurd += tuple((key, text[key]) for key in KEYS["experts"] if text.get(key) == experts)
        values["experts"] = None
    _derive(values, text, model_type)
    architectures = config.get("architectures")
    named = [one for one in architectures if isinstance(one, str)] if isinstance(architectures, list) else []
    return Shape(
        model_type=model_type,
        config=config,
        text=text,
        pointer=pointer,
        family=family,
        is_tied=_tied(text, config, family),
        architecture=named[0] if named else "",
        absurd=absurd,
        mistyped=mistyped,
        **values,
    )


def _value(name: str, text: Mapping[str, Any], config: Mapping[str, Any], family: Mapping[str, Any]) -> int | None:
    defaults = family.get("defaults", {})
    for source in (text, config, defaults):
        for key in KEYS[name]:
            value = source.get(key)
            if type(value) is int and 0 < value <= MOST.get(name, MOST_OF_ALL):
                return value
            if key in source and name in {"query_rank", "sliding_window"}:
                return None  # null says that there is none, whatever the default
    return _inside(name, text)


_INSIDE = {
    "kv_heads": ("attn_config", "kv_n_heads"),
    "experts": ("ffn_config", "moe_num_experts"),
    "moe_intermediate": ("ffn_config", "ffn_hidden_size"),
}
"""Sizes that DBRX and MPT say inside an object of their own."""


def _inside(name: str, text: Mapping[str, Any]) -> int | None:
    outer, key = _INSIDE.get(name, ("", ""))
    told = text.get(outer)
    value = told.get(key) if isinstance(told, dict) else None
    return value if type(value) is int and 0 < value <= MOST.get(name, MOST_OF_ALL) else None


def place_of(shape: Shape, name: str) -> str | None:
    """Return the JSON Pointer of the value that decides one of the sizes; None when none in the file does."""
    for source, place in ((shape.text, shape.pointer), (shape.config, "")):
        for key in KEYS[name]:
            value = source.get(key)
            if type(value) is int and 0 < value <= MOST.get(name, MOST_OF_ALL):
                return f"{place}/{key}"
            if key in source and name in {"query_rank", "sliding_window"}:
                return f"{place}/{key}"
    return None


def _derive(values: dict[str, int | None], text: Mapping[str, Any], model_type: str) -> None:
    heads, hidden = values["heads"], values["hidden"]
    # A configuration of Falcon's first decoder says how many heads there could be, and that all share one.
    attention = text.get("attn_config")
    is_shared = isinstance(attention, dict) and attention.get("attn_type") == "multiquery_attention"
    if is_shared or (text.get("multi_query") is True and text.get("new_decoder_architecture") is not True):
        values["kv_heads"] = 1
    elif values["kv_heads"] is None:
        values["kv_heads"] = heads
    if values["head_dim"] is None and heads and hidden and hidden % heads == 0:
        values["head_dim"] = hidden // heads
    if values["experts"] and values["moe_intermediate"] is None:
        values["moe_intermediate"] = values["intermediate"]
    if values["intermediate"] is None and hidden and model_type in _FOUR_TIMES:
        ratio = text.get("expansion_ratio")
        values["intermediate"] = (ratio if type(ratio) is int and 0 < ratio <= _FOUR_TIMES_MOST else 4) * hidden


def _tied(text: Mapping[str, Any], config: Mapping[str, Any], family: Mapping[str, Any]) -> bool | None:
    # The outer configuration is asked second: it inherits a default of its own that says nothing about the text model.
    # Where it ties what the inner one does not, libraries differ in which they follow.
    if text is not config and text.get("tie_word_embeddings") is False and config.get("tie_word_embeddings") is True:
        return None
    for source in (text, config, family.get("defaults", {})):
        value = source.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    return None


def rope_of(shape: Shape) -> dict[str, Any]:
    """Return the rotary settings in one form: `theta`, `type`, `factor`, `original`, and where each was found.

    `theta_top` is what stands at the top level (read before transformers 5) and `theta_new` what stands in
    `rope_parameters` (read since); for layers of several kinds it is that of full attention.
    """
    text = shape.text
    scaling = text.get("rope_scaling")
    parameters = text.get("rope_parameters")
    if isinstance(parameters, dict) and isinstance(parameters.get("full_attention"), dict):
        parameters = parameters["full_attention"]
    told = parameters if isinstance(parameters, dict) and parameters else scaling if isinstance(scaling, dict) else {}
    new = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    top = text.get("rope_theta")
    kind = told.get("rope_type", told.get("type", "default"))
    return {
        "theta_top": top if type(top) in (int, float) else None,
        "theta_new": new if type(new) in (int, float) else None,
        "theta": new if type(new) in (int, float) else top,
        "type": kind if isinstance(kind, str) else "default",
        "factor": told.get("factor") if type(told.get("factor")) in (int, float) else None,
        "original": told.get("original_max_position_embeddings"),
        "in_parameters": isinstance(parameters, dict) and bool(parameters),
    }


def moe_layers(shape: Shape) -> frozenset[int]:
    """Return the numbers of the layers that hold experts, by the family's rule."""
    layers, text = shape.layers or 0, shape.text
    rule = shape.family.get("moe")
    if not shape.experts or rule is None:
        return frozenset()
    if rule == "after_dense":
        first, every = text.get("first_k_dense_replace", 0), text.get("moe_layer_freq", 1)
        if type(first) is not int or type(every) is not int or every < 1:
            return frozenset()
        return frozenset(layer for layer in range(layers) if layer >= first and layer % every == 0)
    if rule == "sparse_step":
        step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers", [])
        if type(step) is not int or step < 1 or not isinstance(dense, list):
            return frozenset()
        return frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    if rule == "interleaved":
        step = text.get("interleave_moe_layer_step", 1)
        return frozenset(layer for layer in range(layers) if type(step) is int and step and (layer + 1) % step == 0)
    return frozenset(range(layers))
