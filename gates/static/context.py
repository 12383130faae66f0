"""Checks of the context: what is asked for is what the model has positions for and what each request gets."""

from collections.abc import Iterator, Mapping
from typing import Any

from gates.static import rotary
from gates.static.composition import Composition, Part
from gates.static.declared import Arguments
from gates.static.flaw import Flaw, flaw
from gates.static.shape import Shape, rope_of
from gates.static.tensors import CONSOLIDATED
from schemas.result import Severity
from schemas.short import many

MISTRAL_DEFAULT = 128_000
"""Positions that a params.json without a length means. Source: vllm-project/vllm#17747."""
_PARAMS_KEYS = ("max_position_embeddings", "max_seq_len", "model_max_length", "max_context_len")
_ASKED = "--config-format mistral"
_ORIGINAL = "original_max_position_embeddings"
_LENGTH = ("--max-model-len", "--context-length", "--max-context-length", "--max-seq-len", "--max-total-tokens")


def check(c: Composition) -> Iterator[Flaw]:
    """Check lengths and rotary settings."""
    yield from _slots(c)
    if c.model.config:
        yield from rotary.check(c)
    asked = requested(c)
    yield from _length(c, asked)


def requested(c: Composition) -> int | None:
    """Return the context that the launch arguments ask for, of one request."""
    names = _LENGTH if c.engine in (None, "tgi") else [one for one in _LENGTH if one != "--max-total-tokens"]
    return c.declared.arguments.number(*names)


def derived(shape: Shape) -> int | None:
    """Return the context that a configuration allows, with its rotary scaling.

    Source: vLLM's `_get_and_verify_max_len`: llama3 and longrope state the scaled length already, yarn scales its
    original one, and the others multiply.
    """
    length = shape.context
    if length is None:
        return None
    rope = rope_of(shape)
    kind, factor = rope["type"], rope["factor"]
    if kind in {"default", "su", "longrope", "llama3", "mrope", "proportional"} or factor is None:
        return length
    if kind == "yarn" and type(rope["original"]) is int:
        return max(length, _scaled(rope["original"], factor)) if rope["original"] != length else _scaled(length, factor)
    if shape.model_type.startswith("gemma3"):
        return length
    return _scaled(length, factor)


def _scaled(length: int, factor: float) -> int:
    """Return a length times a factor, which may be any number that JSON holds."""
    return int(max(0.0, min(length * factor, 2.0**63)))


def _length(c: Composition, asked: int | None) -> Iterator[Flaw]:
    longest, source = derived(c.model.shape), "config.json"
    if (why := reads_params(c)) is not None:
        told = c.model.object("params.json")
        said = next((told[key] for key in _PARAMS_KEYS if type(told.get(key)) is int), None)
        said = _stretched(told, said)
        by_config = derived(c.model.shape)
        usual = MISTRAL_DEFAULT if why == _ASKED else by_config
        longest, source = said or usual or MISTRAL_DEFAULT, "params.json"
        wanted = asked or c.declared.context_tokens
        if wanted is not None and wanted > longest and by_config is not None and by_config >= wanted:
            borrows = c.rules.get("params_length_elsewhere") is True
            yield flaw(
                "config-sources-disagree",
                f"{why} reads params.json, which {'says' if said else 'has no length and means'} "
                f"{longest}; {wanted} are asked for, as config.json allows ({by_config})"
                + (f", which {c.engine} takes where it can read it." if not said and borrows else "."),
                pointer="--max-model-len",
                found={"requested": wanted, "effective": longest, "source": source, "config": by_config},
                expected={"at_most": longest},
                advice=None if said else f"Say max_position_embeddings in params.json, or ask for at most {longest}.",
            )
            return
    if c.declared.arguments.has("--disable-sliding-window") and longest is not None:
        longest = min(longest, c.model.shape.sliding_window or longest)
    promised = c.declared.context_tokens
    if asked is not None and promised is not None and asked < promised:
        yield flaw(
            "context-too-long",
            f"{promised} tokens of context are promised, and the launch arguments allow {asked}.",
            pointer="/runtime/context_tokens",
            found={"requested": promised, "derived": asked},
            expected={"at_most": asked},
        )
        return
    yield from _too_long(c, asked, longest, source)


def _stretched(told: Mapping[str, Any], said: int | None) -> int | None:
    """Return the length that a params.json says, or what its YaRN makes of the original one where that is more.

    Source: `_remap_mistral_yarn_args` of vLLM's transformers_utils/configs/mistral.py.
    """
    yarn = told.get("yarn")
    factor, original = (yarn.get("factor"), yarn.get(_ORIGINAL)) if isinstance(yarn, dict) else (None, None)
    if not isinstance(factor, int | float) or type(original) is not int:
        return said
    return max(said or 0, _scaled(original, factor))


def reads_params(c: Composition) -> str | None:
    """Return why the engine reads params.json instead of config.json; None when it does not."""
    asked = c.declared.arguments.get("--config-format")
    if not c.model.has("params.json"):
        return None
    if asked == "mistral":
        return _ASKED
    has_both = any(CONSOLIDATED.fullmatch(name) for name in c.model.entries)
    if asked in (None, "auto") and has_both and c.rules.get("mistral_files_first") is True:
        return f"{c.engine} with consolidated weights"
    return None


def _too_long(c: Composition, asked: int | None, longest: int | None, source: str) -> Iterator[Flaw]:
    header = c.model.gguf
    if header is not None:
        architecture = header.metadata.get("general.architecture")
        trained = header.metadata.get(f"{architecture}.context_length")
        longest, source = (trained if type(trained) is int else None), "the GGUF header"
    if longest is None:
        return
    promised = c.declared.context_tokens
    each, slots = _each(c)
    for wanted, pointer in (
        (asked, "--max-model-len"),
        (promised, "/runtime/context_tokens"),
        (each if promised is None else None, "--ctx-size"),
    ):
        if wanted is not None and wanted > longest:
            scaled = rescaled(c)
            if scaled is not None and wanted <= scaled:
                continue
            switch = c.declared.variables.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
            also = (
                "; VLLM_ALLOW_LONG_MAX_MODEL_LEN turns the engine's refusal off and adds no positions" if switch else ""
            )
            also += f"; {c.engine} gives each slot no more, and says so only in its log" if wanted is each else ""
            yield flaw(
                "context-too-long",
                f"{wanted} tokens of context are asked for, and {source} has positions for {longest}{also}.",
                # Slots that nobody has counted may still divide what is asked for.
                severity=Severity.WARN if pointer == "--ctx-size" and slots is None else Severity.BLOCK,
                pointer=pointer,
                found={"requested": wanted, "derived": longest},
                expected={"at_most": longest},
            )
            return


def rescaled(c: Composition) -> int | None:
    """Return the context that rotary settings in the launch arguments make, or None."""
    arguments = c.declared.arguments
    over: dict[str, Any] = arguments.json("--hf-overrides", "--json-model-override-args") or {}
    inner = over.get(c.model.shape.pointer.removeprefix("/"))
    over |= inner if isinstance(inner, dict) else {}
    told = arguments.json("--rope-scaling") or over.get("rope_scaling") or over.get("rope_parameters")
    if isinstance(told, dict) and type(told.get("factor")) in (int, float):
        original = told.get("original_max_position_embeddings")
        base = original if type(original) is int else c.model.shape.context
        return None if base is None else int(base * told["factor"])
    if type(over.get("max_position_embeddings")) is int:
        return int(over["max_position_embeddings"])
    scale = arguments.number("--rope-scale")
    trained = None if c.model.gguf is None else derived_of_gguf(c.model)
    return None if scale is None or trained is None else trained * scale


def derived_of_gguf(part: Part) -> int | None:
    """Return the positions that a GGUF header says."""
    header = part.gguf
    if header is None:
        return None
    value = header.metadata.get(f"{header.metadata.get('general.architecture')}.context_length")
    return value if type(value) is int else None


def _pool(c: Composition) -> tuple[int | None, int | None, bool]:
    """Return the context that all slots share, how many they are told to be, and whether one may take all of it."""
    if not c.rules.get("context_is_shared"):
        return None, None, False
    arguments = c.declared.arguments
    variables = Arguments(tuple(f"{name}={value}" for name, value in c.declared.variables.items()))
    total = arguments.number("-c", "--ctx-size") or variables.number("LLAMA_ARG_CTX_SIZE")
    slots = arguments.number("-np", "--parallel") or variables.number("LLAMA_ARG_N_PARALLEL")
    return total, slots, arguments.has("--kv-unified", "-kvu") or variables.has("LLAMA_ARG_KV_UNIFIED")


def _each(c: Composition) -> tuple[int | None, int | None]:
    """Return what is asked for of each slot, or None, and the number of slots, or None where nobody says it."""
    total, told, _ = _pool(c)
    slots = told or c.declared.max_sequences
    return (total // (slots or 1) if total else None), slots


def _slots(c: Composition) -> Iterator[Flaw]:
    """Check that a context which is shared by slots leaves each what is promised."""
    total, told, is_unified = _pool(c)
    promised = c.declared.context_tokens
    if not total or promised is None:
        return
    slots = 1 if is_unified else told or 1
    each = total // slots
    if each < promised:
        yield flaw(
            "context-per-slot",
            f"{total} tokens over {many(slots, 'slot', 'are', 'are')} {each} each, and {promised} are promised.",
            pointer="--ctx-size",
            found={"per_slot": each, "total": total, "slots": slots},
            expected={"per_slot": promised},
            advice=f"Give the engine --ctx-size {promised * slots}.",
        )
