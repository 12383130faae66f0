"""Checks of what ends an answer: files agree, the engine reads the one that knows, and the template's end counts."""

from collections.abc import Iterator, Mapping
from typing import Final

from gates.static import turn_ends
from gates.static.composition import Composition, Part
from gates.static.encoder import Token
from gates.static.flaw import Flaw, Where, flaw
from gates.static.gguf_words import ENDINGS, stops_of
from gates.static.probes import ANSWER, MARKER
from gates.static.words import Tokenizer, decoded
from schemas.result import Severity

_ENDS_OF_TEXT: Final = frozenset(
    {"</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<EOS_TOKEN>", "<｜end▁of▁sentence｜>"}
)
"""Tokens that end a text, by which base models were trained."""
_MOST_CLOSING: Final = 4
"""Tokens behind an answer that are looked at: after them the next turn may begin."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check the stop ids of the model, where it generates anything."""
    part = c.model
    if c.pools:
        return
    if part.gguf is not None:
        yield from _gguf(c)
        yield from _turn_end(c, sources_of(part), _known_to_gguf(c))
        return
    sources = sources_of(part)
    unread = {one.file for one in part.flaws}
    if not unread.isdisjoint(part.path(name) for name in ("config.json", "generation_config.json")):
        return  # what it names is not known
    effective = effective_stops(c, sources)
    overridden = _override(c, sources) or _replaced(c, sources)
    if overridden is not None:
        yield overridden
    elif any(sources.values()):
        yield from _disagreement(c, sources, effective)
    yield from _turn_end(c, sources, effective)
    yield from turn_ends.check(c, {one for ids in sources.values() for one in ids} | set(effective or ()))


def sources_of(part: Part) -> dict[str, list[int]]:
    """Return the stop ids that each file names: config, generation, tokenizer."""
    if part.gguf is not None:
        return {"config": [], "generation": [], "tokenizer": stops_of(part.gguf.metadata)}
    words = part.tokenizer
    named = None
    if words is not None:
        named = words.id_of(words.named("eos_token"))
    elif isinstance(told := part.object("tokenizer_config.json").get("eos_token"), str | dict):
        text = told.get("content") if isinstance(told, dict) else told
        named = decoded(part.object("tokenizer_config.json"), text) if isinstance(text, str) else None
    config = _ids(part.shape.text.get("eos_token_id")) or _ids(part.config.get("eos_token_id"))
    return {
        "config": config,
        "generation": _ids(part.object("generation_config.json").get("eos_token_id")),
        "tokenizer": [] if named is None else [named],
    }


def _ids(value: object) -> list[int]:
    return sorted({one for one in (value if isinstance(value, list) else [value]) if type(one) is int and one >= 0})


def effective_stops(c: Composition, sources: dict[str, list[int]]) -> list[int] | None:
    """Return the ids at which the engine stops, or None when it is not known which files it reads."""
    rule = c.rules.get("stop_sources")
    if rule is None:
        return None
    if "tokenizer" in rule and not sources["tokenizer"] and not c.model.has("tokenizer.json", "tokenizer_config.json"):
        return None  # the tokenizer is in another form, or not here
    found: set[int] = set()
    has_generation = c.model.has("generation_config.json")
    if c.declared.arguments.get("--generation-config") == "vllm":
        rule = [name for name in rule if name != "generation_or_config"]
    for name in rule:
        if name == "generation_or_config":
            found |= set(sources["generation"] if has_generation else sources["config"])
        else:
            found |= set(sources[name])
    return sorted(found)


def _known_to_gguf(c: Composition) -> list[int]:
    """Return the ids at which llama.cpp stops: those of the header, and the tokens that it knows by their text."""
    part, words = c.model, c.model.tokenizer
    by_text = [number for text, number in ({} if words is None else words.ids).items() if text in ENDINGS]
    told = {} if part.gguf is None else part.gguf.metadata
    return sorted({*stops_of(told), *by_text})


def _disagreement(c: Composition, sources: dict[str, list[int]], effective: list[int] | None) -> Iterator[Flaw]:
    wanted = set(sources["config"]) | set(sources["generation"]) | set(sources["tokenizer"])
    lost = sorted(wanted - set(effective)) if effective is not None else []
    if len(lost) == 1 and not sources["tokenizer"] and c.model.tokenizer is None:
        lost = []  # it may be the one of a tokenizer whose ids are not told
    disagree = c.model.has("generation_config.json") and sorted(
        (set(sources["config"]) | set(sources["tokenizer"])) - set(sources["generation"])
    )
    # The tokenizer's own is read by most engines beside the others, so that alone is no disagreement; two files that
    # have no id in common are one.
    told, generated = set(sources["config"]), set(sources["generation"])
    has_common = not told or not generated or not told.isdisjoint(generated)
    if disagree and set(disagree) <= set(sources["tokenizer"]) and not lost and has_common:
        disagree = []
    if not lost and not disagree:
        return
    message = (
        f"The files name different stop ids: config.json {_braced(sources['config'])}, generation_config.json "
        f"{_braced(sources['generation'])}, tokenizer {_braced(sources['tokenizer'])}"
    )
    if effective is not None:
        message += f"; {c.engine} stops at {_braced(effective)}"
    if lost:
        message += f" and so never at {_braced(lost)}"
    yield flaw(
        "eos-sources-disagree",
        message + ".",
        severity=Severity.BLOCK if lost and not _ends_otherwise(c, lost, effective or []) else Severity.WARN,
        **_place(c.model, sources),
        found={
            "config": sources["config"],
            "generation_config": sources["generation"],
            "tokenizer": sources["tokenizer"],
            "effective": effective,
            "engine": c.engine,
        },
        expected={"stops": sorted(wanted)},
    )


def _place(part: Part, sources: dict[str, list[int]]) -> Where:
    """Return the file and the place in it that names stop ids: the generation config, or else config.json."""
    if sources["generation"]:
        return {"file": part.path("generation_config.json"), "pointer": "/eos_token_id"}
    if sources["config"]:
        is_inner = bool(_ids(part.shape.text.get("eos_token_id")))
        pointer = part.shape.at("eos_token_id") if is_inner else "/eos_token_id"
        return {"file": part.path("config.json"), "pointer": pointer}
    name = "generation_config.json" if part.has("generation_config.json") else "config.json"
    return {"file": part.path(name), "pointer": None}


def _ends_otherwise(c: Composition, lost: list[int], effective: list[int]) -> bool:
    """Say whether the engine knows the end of a turn, and only lacks the one that ended a text before there were turns.

    Families leave the base model's end in config.json, and name the one of the turn in generation_config.json.
    """
    seen, words = c.renderings if c.speaks else None, c.model.tokenizer
    text = None if seen is None else seen.text("answered")
    if words is None or text is None or ANSWER not in text:
        return False
    ends = _closing(text.split(ANSWER, 1)[1].lstrip(), words.added)
    is_known = any(words.added[end].id in effective for end in ends)
    return is_known and all(words.texts.get(number) in _ENDS_OF_TEXT for number in lost)


def _braced(ids: list[int]) -> str:
    return "{" + ", ".join(str(one) for one in ids) + "}"


def _override(c: Composition, sources: dict[str, list[int]]) -> Flaw | None:
    """Find a launch override that takes the generation config's stop ids away, or names fewer of them."""
    name = "--override-generation-config"
    override = c.declared.arguments.json(name)
    if not override:
        return None
    names_some = override.get("eos_token_id") is not None
    if "eos_token_id" not in override and not c.rules.get("override_drops_stops"):
        return None
    kept = {*sources["tokenizer"], *_ids(override.get("eos_token_id"))}
    lost = sorted(set(sources["generation"] or sources["config"]) - kept)
    if not lost:
        return None
    said = f"names {_braced(_ids(override['eos_token_id']))}" if names_some else "names no stop id"
    return flaw(
        "stop-set-overridden",
        f"{name} takes the place of the whole generation config and {said}: the stop ids {_braced(lost)} are lost.",
        pointer=name,
        found={"override": override, "effective": sorted(kept)},
        expected={"stops": sorted(kept | set(lost))},
        advice=f"Say eos_token_id {sorted(kept | set(lost))} in the override too.",
    )


def _replaced(c: Composition, sources: dict[str, list[int]]) -> Flaw | None:
    """Find a launch argument that replaces the stop ids of config.json by fewer, where the engine reads them there.

    Source: sglang/srt/configs/model_config.py, which takes them from the configuration that the argument has changed.
    """
    name = "--json-model-override-args"
    override = c.declared.arguments.json(name) or {}
    if c.engine != "sglang" or "eos_token_id" not in override:
        return None
    kept = {*sources["tokenizer"], *sources["generation"], *_ids(override["eos_token_id"])}
    lost = sorted(set(sources["config"]) - kept)
    if not lost:
        return None
    return flaw(
        "stop-set-overridden",
        f"{name} takes the place of config.json's stop ids and names {_braced(_ids(override['eos_token_id']))}: the "
        f"stop ids {_braced(lost)} are lost.",
        pointer=name,
        found={"override": override, "effective": sorted(kept)},
        expected={"stops": sorted(kept | set(lost))},
        advice=f"Say eos_token_id {sorted(kept | set(lost))} in the override too.",
    )


def _turn_end(c: Composition, sources: dict[str, list[int]], effective: list[int] | None) -> Iterator[Flaw]:
    """Find a token that the template ends an answer with, and at which nothing stops."""
    seen, words = c.renderings if c.speaks else None, c.model.tokenizer
    text = None if seen is None else seen.text("answered")
    if seen is None or words is None or text is None or ANSWER not in text:
        return
    after = text.split(ANSWER, 1)[1].lstrip()
    ends = _closing(after, words.added)
    if not ends:
        yield from _strange_end(seen.file, words, after, sources, effective)
        return
    everywhere = {one for ids in sources.values() for one in ids}
    stops = everywhere if effective is None else set(effective)
    if any(words.added[end].id in everywhere | stops for end in ends):
        return  # a stop that only some files know is told by itself
    end, number = ends[-1], words.added[ends[-1]].id
    is_base = c.declared.features is None and _is_of_base(c.model)
    yield flaw(
        "turn-end-not-a-stop",
        f"{seen.file} ends an answer with {end!r} (id {number}), and no file names it as a stop"
        + (", as of models that were not trained to chat." if is_base else "."),
        severity=Severity.WARN if is_base else Severity.BLOCK,
        file=seen.file,
        found={"token": end, "id": number, "stops": sorted(everywhere)},
        expected={"stops": sorted(everywhere | {number})},
    )


def _strange_end(
    file: str, words: Tokenizer, after: str, sources: dict[str, list[int]], effective: list[int] | None
) -> Iterator[Flaw]:
    """Find a marker that a template ends an answer with, and that no token is: a model never learnt to stop there.

    Where a stop follows it, the answer ends at that one, and the marker is plain text.
    """
    marker = MARKER.match(after)
    if marker is None or words.id_of(marker[0]) is not None or marker[0] in words.added_file:
        return
    everywhere = {one for ids in sources.values() for one in ids} | set(effective or ())
    if any(words.texts.get(number, "\0") in after for number in everywhere):
        return
    yield flaw(
        "turn-end-not-a-stop",
        f"{file} ends an answer with {marker[0]!r}, which is no token of the tokenizer, so that nothing stops there.",
        file=file,
        found={"token": marker[0], "id": None, "stops": sorted(everywhere)},
        expected="a token at which the engine stops",
        advice="Use the template that belongs to this tokenizer, or the tokenizer that has the token.",
    )


def _is_of_base(part: Part) -> bool:
    """Say whether generation defaults are those of a base model, which families publish with the template of another.

    Source: generation_config.json of Qwen2.5, Qwen3 and their base models: greedy, and up to a number of tokens.
    """
    told = part.object("generation_config.json")
    return told.get("do_sample") is False and type(told.get("max_new_tokens")) is int


def _closing(after: str, added: Mapping[str, Token]) -> list[str]:
    """Return the tokens right behind an answer: some models close the answer before they close the turn."""
    found, rest = list[str](), after
    while len(found) < _MOST_CLOSING and (here := [token for token in added if rest.startswith(token)]):
        found.append(max(here, key=len))
        rest = rest[len(found[-1]) :].lstrip()
    return found


def _gguf(c: Composition) -> Iterator[Flaw]:
    header = c.model.gguf
    if header is None:
        return
    tokens = getattr(header.metadata.get("tokenizer.ggml.tokens"), "count", None)
    file = c.model.path(next(iter(c.model.gguf_files)))
    for name in ("bos", "eos", "eot", "eom", "padding", "unknown"):
        key = f"tokenizer.ggml.{name}_token_id"
        value = header.metadata.get(key)
        if type(value) is int and isinstance(tokens, int) and value >= tokens:
            yield flaw(
                "token-id-out-of-range",
                f"{file} says {key} {value}, and there are {tokens} tokens.",
                file=file,
                pointer=key,
                found=value,
                expected={"below": tokens},
            )
