"""Checks of the tokenizer: its ids lie inside the embedding, and what must be one token is one."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gates.files.refusal import shown
from gates.static import names, numbering
from gates.static.composition import Composition, Part
from gates.static.encoder import touches
from gates.static.flaw import MAX_ITEMS, Flaw, Where, flaw, listed
from gates.static.gguf_words import ENDINGS, TYPES, stops_of
from gates.static.word_files import VOCABULARY
from gates.static.words import SPECIAL_KEYS, Tokenizer, special_texts
from schemas.bundle import Feature
from schemas.result import Severity
from schemas.short import agreeing, many

_MEDIA = re.compile(r"(?i)image|audio|video|vision|speech|media")
_MARK = re.compile(r"[<\[].{1,80}[>\]]|\]~.{1,20}[\]\[]|\[e~\[", re.DOTALL)
_TURN = re.compile(
    r"<[|｜].+[|｜]>|</?(start|end)_of_[a-z]+>|[<\[]/?[A-Z0-9_]+[>\]]|\[\|.+\|\]|\]~.+[\]\[]|\[e~\[", re.DOTALL
)
"""Markers that are written for models alone; the last ones are those of EXAONE and MiniMax."""
_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_OTHER_IDS = re.compile(r"[a-z0-9_]+_token_(id|index)")
"""How configurations call the ids of further tokens, such as the one that stands for a picture."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check the model's tokenizer, against the embedding, the configuration and the template."""
    yield from _presence(c)
    yield from _id_range(c.model)
    rows = embedding_rows(c.model)
    yield from numbering.check(c, rows)
    words = c.model.tokenizer
    if words is None:
        return
    if c.model.gguf is None:
        if rows is not None:
            yield from _beyond(c, words, rows)
        yield from _unknown(c.model, words, rows)
    yield from _split(c, words)
    yield from _bos(c, words)


def embedding_rows(part: Part) -> int | None:
    """Return how many tokens the embedding has a row for: by its tensor, or else by the configuration."""
    tensors = part.weights.effective
    start = names.embedding(tensors)
    if start is not None and len(tensors[start].tensor.shape) == 2:
        return tensors[start].tensor.shape[0]
    gguf = (tensor for header in part.gguf_files.values() for tensor in header.tensors)
    return next((one.shape[0] for one in gguf if one.name == "token_embd.weight"), part.shape.vocabulary)


def _presence(c: Composition) -> Iterator[Flaw]:
    part = c.model
    features = c.declared.features or frozenset()
    speaks = features & {Feature.CHAT.value, Feature.COMPLETIONS.value, Feature.STREAMING.value}
    known = {
        "tokenizer.json",
        "tokenizer.model",
        "tekken.json",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
        *numbering.RANKS,
    }
    alone = part.has(VOCABULARY) and not (known - {VOCABULARY, "vocab.txt"}) & set(part.entries)
    if speaks and alone and not part.has("merges.txt") and part.tokenizer is not None:
        yield flaw(
            "tokenizer-missing",
            "There is a vocabulary and no list of merges: no merges.txt, and no tokenizer.json.",
            file=part.path("merges.txt"),
            found=[VOCABULARY],
            expected=[VOCABULARY, "merges.txt"],
            advice="Fetch merges.txt or tokenizer.json from where the weights came from.",
        )
    if speaks and part.weights.shards and not known & set(part.entries):
        if any(name.startswith(("tokenizer", "tiktoken")) and not name.endswith(".json") for name in part.entries):
            return
        yield flaw(
            "tokenizer-missing",
            "There is no tokenizer: no tokenizer.json, tokenizer.model or vocabulary.",
            file=part.path("tokenizer.json"),
            found=None,
            expected=sorted(known),
        )


def _is_id(value: object, size: int) -> bool:
    """Say whether a value is an id of a token that there is not; other keys than those of stops hold much else."""
    return type(value) is int and value >= size


def _id_range(part: Part) -> Iterator[Flaw]:
    size, rows = part.shape.vocabulary, embedding_rows(part)
    if size is None:
        return
    for file in ("config.json", "generation_config.json"):
        told = part.object(file)
        sources: list[tuple[str, Mapping[str, Any]]] = [("", told)]
        if file == "config.json" and part.shape.pointer:
            sources.append((part.shape.pointer, part.shape.text))
        for pointer, source in sources:
            others = {key for key, value in source.items() if _OTHER_IDS.fullmatch(key) and _is_id(value, rows or size)}
            for key in (*_ID_KEYS, *sorted(others - {*_ID_KEYS})):
                values = source.get(key)
                for value in values if isinstance(values, list) else [values]:
                    if value is None or (type(value) is int and -1 <= value < size):  # −1 says that there is none
                        continue
                    yield flaw(
                        "token-id-out-of-range",
                        f"{part.path(file)} says {key} {value!r}, and there are {size} tokens.",
                        file=part.path(file),
                        pointer=f"{pointer}/{key}",
                        found=value if isinstance(value, int | float | str) else shown(value),
                        expected={"below": size},
                    )


def _beyond(c: Composition, words: Tokenizer, rows: int) -> Iterator[Flaw]:
    beyond = {text: number for text, number in words.ids.items() if number >= rows}
    if not beyond:
        return
    texts = sorted(beyond, key=lambda text: beyond[text])
    harmless = all(text in words.added and _MEDIA.search(text) for text in texts) and not c.model.config.get(
        "vision_config"
    )
    yield flaw(
        "vocabulary-exceeds-embedding",
        f"{many(len(beyond), 'token', 'has the id', 'have ids from')} {beyond[texts[0]]}"
        f"{agreeing(len(beyond), '', ' on')}, and there are {rows} rows: {listed(texts)}.",
        severity=Severity.INFO if harmless else Severity.BLOCK,
        file=c.model.tokenizer_file,
        found={"tokens": {text: beyond[text] for text in texts[:MAX_ITEMS]}, "count": len(beyond), "size": words.size},
        expected={"rows": rows},
        advice="The model has no media; keep this text out of prompts." if harmless else None,
    )


def _unknown(part: Part, words: Tokenizer, rows: int | None) -> Iterator[Flaw]:
    """Find special tokens that loading would append after the last id."""
    yield from _decoded(part, words, rows)
    following = words.size + len(words.only_decoded)
    for file, told in (("special_tokens_map.json", words.special_map), ("tokenizer_config.json", words.config)):
        for text in special_texts(told):
            if words.id_of(text) is not None or text in words.added_file:
                continue
            number = following
            following += 1
            outside = rows is not None and number >= rows
            unused = text not in special_texts({key: told.get(key) for key in SPECIAL_KEYS[:2]})
            yield flaw(
                "special-token-unknown",
                f"{part.path(file)} lists {text!r}, which the tokenizer lacks; loading would append it as id {number}"
                + (f", and {number} >= {rows}." if outside else ", for which the model was not trained."),
                severity=Severity.BLOCK if outside or not unused else Severity.WARN,
                file=part.path(file),
                found={"token": text, "id": number},
                expected={"rows": rows},
            )
    for text, number in words.added_file.items():
        is_told = words.id_of(text) == number  # the tokenizer itself has it there, and was told of
        if type(number) is int and rows is not None and number >= rows and not is_told:
            yield flaw(
                "special-token-unknown",
                f"{part.path('added_tokens.json')} gives {text!r} the id {number}, and the embedding has {rows} rows.",
                file=part.path("added_tokens.json"),
                found={"token": text, "id": number},
                expected={"rows": rows},
            )


def _decoded(part: Part, words: Tokenizer, rows: int | None) -> Iterator[Flaw]:
    """Find tokens of tokenizer_config.json alone: loading appends them in order, whatever ids they have there."""
    for number, (text, told) in enumerate(sorted(words.only_decoded.items(), key=lambda one: one[1]), words.size):
        outside = rows is not None and number >= rows
        if not outside and number == told:
            continue
        yield flaw(
            "special-token-unknown",
            f"{part.path('tokenizer_config.json')} gives {text!r} the id {told}, and tokenizer.json lacks it; loading "
            f"would append it as id {number}" + (f", and {number} >= {rows}." if outside else "."),
            file=part.path("tokenizer_config.json"),
            pointer=f"/added_tokens_decoder/{told}",
            found={"token": text, "id": number, "says": told},
            expected={"rows": rows},
        )


# ------------------------------------------------------------------------------------------------- one token


def _split(c: Composition, words: Tokenizer) -> Iterator[Flaw]:
    """Find turn markers and special tokens that are in the vocabulary and would be split into pieces all the same."""
    rendered = _rendered(c)
    wanted = {text for text in words.vocabulary if text not in words.added and _MARK.fullmatch(text)}
    used = {text for text in wanted if text in rendered}
    named = {text for key in SPECIAL_KEYS if (text := words.named(key)) and _MARK.fullmatch(text)}
    used |= {text for key in SPECIAL_KEYS if (text := words.named(key)) in words.vocabulary and text not in words.added}
    stops = _stop_ids(c.model)
    used |= {text for text, number in words.vocabulary.items() if number in stops and words.texts.get(number) == text}
    used -= set(words.added)
    touched = {one.text for one in words.added.values() if one.stands_alone and touches(one.text, rendered)}
    for text in sorted(used | touched):
        pieces = words.encoder.ids(text, without=frozenset(touched))
        number = words.ids[text]
        is_told = number in stops or text in touched or text in named
        if pieces == [number] or (pieces is None and not (is_told or _TURN.fullmatch(text))):
            continue  # a tag of HTML, say, that the vocabulary happens to have, and merges may well reach
        is_gguf = c.model.gguf is not None
        mended = is_gguf and text in ENDINGS
        restored = None if is_gguf else words.restored.get(text)
        counts = _counts(c, words, text)
        lack = "counts only where it stands alone" if text in touched else "is no added token"
        said = "pieces" if pieces is None else f"{len(pieces)} tokens"
        yield flaw(
            "marker-split",
            f"{text!r} has the id {number} and {lack}, so that it becomes {said}"
            + (f"; the prompt grows from {counts[0]} to {counts[1]} tokens" if counts else "")
            + (
                ". Only llama.cpp mends that, by its text."
                if mended
                else f". Only {restored} names it, which some engines do not read."
                if restored
                else "."
            ),
            severity=Severity.WARN if restored or mended else Severity.BLOCK,
            **_of_added(c.model),
            found={
                "token": text,
                "id": number,
                "pieces": None if pieces is None else len(pieces),
                "prompt_tokens": counts[1] if counts else None,
                "is_stop": number in stops,
            },
            expected={"pieces": 1, "prompt_tokens": counts[0] if counts else None},
        )


def _of_added(part: Part) -> Where:
    """Return where a part says which tokens are never split."""
    if part.gguf is not None:
        return {"file": part.path(next(iter(part.gguf_files))), "pointer": TYPES}
    is_whole = part.has("tokenizer.json")
    return {"file": part.tokenizer_file, "pointer": "/added_tokens" if is_whole else None}


def _rendered(c: Composition) -> str:
    if c.renderings is None:
        return ""
    return "\n".join(one.text or "" for one in c.renderings.by_name.values())


def _counts(c: Composition, words: Tokenizer, text: str) -> tuple[int, int] | None:
    """Return the prompt's tokens with the marker whole and with it split."""
    prompt = None if c.renderings is None else c.renderings.text("plain")
    if prompt is None or text not in prompt:
        return None
    split = words.encoder.ids(prompt)
    whole = words.encoder.ids(prompt, more={text: words.ids[text]})
    return None if split is None or whole is None else (len(whole), len(split))


def _stop_ids(part: Part) -> set[int]:
    if part.gguf is not None:
        return set(stops_of(part.gguf.metadata))
    found: set[int] = set()
    for told in (part.config, part.shape.text, part.object("generation_config.json")):
        value = told.get("eos_token_id")
        found |= {one for one in (value if isinstance(value, list) else [value]) if type(one) is int}
    return found


# -------------------------------------------------------------------------------------------------------- BOS


def _bos(c: Composition, words: Tokenizer) -> Iterator[Flaw]:
    """Find a BOS that template and tokenizer both write, so that it is there twice on some path."""
    seen = c.renderings if c.speaks else None
    prompt = None if seen is None else seen.text("plain")
    if seen is None or prompt is None or not words.prefix:
        return
    first = words.texts.get(words.prefix[0])
    if first is None or not prompt.startswith(first):
        return
    plain = words.encoder.ids(prompt)
    twice = None if plain is None else words.prefix + plain
    features = c.declared.features
    # What is posted to completions is not rendered by the engine; whoever renders it there may be told to leave it out.
    is_chat_alone = features is not None and Feature.COMPLETIONS.value not in features
    proven = c.rules.get("chat_adds_special_tokens") is False and is_chat_alone
    quiet = proven or c.rules.get("chat_strips_bos") is True
    yield flaw(
        "double-bos",
        f"{seen.file} writes {first!r}, and the tokenizer puts it before every text"
        + (
            f": the question has {len(plain)} tokens, and {len(twice)} when its text is tokenized again."
            if plain and twice
            else "."
        ),
        severity=Severity.INFO if quiet else Severity.WARN,
        file=seen.file,
        found=_tokens(twice) or {"start": [*words.prefix, words.prefix[0]][:3]},
        expected=_tokens(plain) or {"start": words.prefix[:3]},
    )


def _tokens(ids: list[int] | None) -> Mapping[str, Any] | None:
    return None if ids is None else {"tokens": len(ids), "start": ids[:3]}
