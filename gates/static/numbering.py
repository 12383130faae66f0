"""Checks of how tokens are numbered: a tokenizer's library loads its file, and each token has one id everywhere."""

from collections.abc import Iterator
from typing import Final

from gates.files.refusal import shown
from gates.static import loadable, tekken
from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.words import Tokenizer
from schemas.bundle import Feature
from schemas.result import Severity
from schemas.short import many

RANKS: Final = ("tiktoken.model", "qwen.tiktoken")
"""Files with a token in base 64 and its id on each line."""
_OF_MEDIA: Final = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))
_OVERRIDE: Final = "--override-generation-config"
_MOST_BYTES: Final = 32 * 1024 * 1024


def check(c: Composition, rows: int | None) -> Iterator[Flaw]:
    """Check the model's tokenizer files.

    Args:
        c: the composition.
        rows: of the embedding.
    """
    part = c.model
    if part.gguf is not None:
        return
    yield from _unloadable(part)
    words = part.tokenizer
    if words is not None:
        yield from _renumbered(part, words)
        yield from _processor(part, words)
        yield from _after(c, words)
        if rows is not None and len(words.ids) > rows // 2:  # else the vocabulary is there in part alone
            yield from _media(part, words)
    yield from _two(part)
    if rows is not None:
        yield from _ranks(part, rows)
    yield from _mode(c)
    if rows is not None:
        yield from _overridden(c, rows)


def _overridden(c: Composition, rows: int) -> Iterator[Flaw]:
    """Find ids of tokens that there are not in what the launch arguments put over the generation config."""
    told = c.declared.arguments.json(_OVERRIDE) or {}
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = told.get(key)
        for number in value if isinstance(value, list) else [value]:
            if number is None or (type(number) is int and -1 <= number < rows):
                continue
            yield flaw(
                "token-id-out-of-range",
                f"{_OVERRIDE} says {key} {shown(number)}, and there are {rows} tokens.",
                pointer=_OVERRIDE,
                found=number if isinstance(number, int | float | str) else shown(number),
                expected={"below": rows},
            )


def _unloadable(part: Part) -> Iterator[Flaw]:
    whole, mistral = part.object("tokenizer.json"), part.object(tekken.FILE)
    found = [("tokenizer.json", one) for one in loadable.reasons(whole)] if whole else []
    found += [(tekken.FILE, one) for one in loadable.of_tekken(mistral)] if mistral else []
    for name, one in found:
        yield flaw(
            "tokenizer-unloadable",
            f"{part.path(name)} {one.said}; its library does not load it.",
            file=part.path(name),
            pointer=one.pointer,
            found=one.found if one.found is not None else "nothing",
            expected=one.expected if one.expected is not None else "a token of the vocabulary",
        )


def _renumbered(part: Part, words: Tokenizer) -> Iterator[Flaw]:
    for number, first, second in words.twins[:MAX_ITEMS]:
        yield flaw(
            "token-ids-differ",
            f"{part.tokenizer_file} gives the id {number} to both {first!r} and {second!r}.",
            file=part.tokenizer_file,
            pointer="/model/vocab",
            found={"id": number, "tokens": [first, second]},
            expected="each id once",
        )
    for text, says in list(words.renumbered.items())[:MAX_ITEMS]:
        gets = words.added[text].id
        other = words.vocabulary.get(text)
        reason = "has in the vocabulary" if other is not None else "gets, since that one is another token's"
        yield flaw(
            "token-ids-differ",
            f"{part.tokenizer_file} says among its added tokens that {text!r} has the id {says}; {gets} is the one "
            f"that it {reason}.",
            file=part.tokenizer_file,
            pointer="/added_tokens",
            found={"token": text, "says": says, "id": gets},
            expected={"id": says},
        )


def _processor(part: Part, words: Tokenizer) -> Iterator[Flaw]:
    """Find ids that a post-processor writes for tokens that have others."""
    for pointer, text, ids in _written(words.document.get("post_processor"), "/post_processor"):
        own = words.ids.get(text)
        if own is None or ids == [own]:
            continue
        yield flaw(
            "token-ids-differ",
            f"{part.tokenizer_file} writes {text!r} beside each text as {listed([str(one) for one in ids])}, and the "
            f"token has the id {own}.",
            file=part.tokenizer_file,
            pointer=pointer,
            found={"token": text, "ids": ids[:MAX_ITEMS]},
            expected={"ids": [own]},
        )


def _written(processor: object, pointer: str) -> Iterator[tuple[str, str, list[int]]]:
    if not isinstance(processor, dict):
        return
    steps = processor.get("processors")
    for place, one in enumerate(steps if isinstance(steps, list) else []):
        yield from _written(one, f"{pointer}/processors/{place}")
    told = processor.get("special_tokens")
    for text, one in told.items() if isinstance(told, dict) else ():
        ids = one.get("ids") if isinstance(one, dict) else None
        if isinstance(ids, list) and all(type(number) is int for number in ids):
            yield f"{pointer}/special_tokens/{text}/ids", text, ids
    for name in ("cls", "sep"):
        pair = processor.get(name)
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int:
            yield f"{pointer}/{name}", pair[0], [pair[1]]


def _after(c: Composition, words: Tokenizer) -> Iterator[Flaw]:
    """Find a stop that is put after each text: what is asked to go on with a text begins behind its end."""
    features = c.declared.features
    writes = c.speaks if features is None else features & {Feature.CHAT.value, Feature.COMPLETIONS.value}
    # Where one half reads and another writes, the text ends in the first, and the answer begins in the second.
    has_halves = c.model.config.get("is_encoder_decoder") is True
    if not writes or not words.suffix or c.pools or has_halves or (features is None and c.model.has("modules.json")):
        return
    last = words.suffix[-1]
    if last != words.named("eos_token"):
        return
    is_chat_alone = features is not None and Feature.COMPLETIONS.value not in features
    proven = c.rules.get("chat_adds_special_tokens") is False and is_chat_alone
    yield flaw(
        "stop-after-prompt",
        f"{c.model.tokenizer_file} puts {last!r} after each text, and answers begin behind it.",
        severity=Severity.INFO if proven else Severity.WARN,
        file=c.model.tokenizer_file,
        pointer="/post_processor",
        found={"after": words.suffix},
        expected={"after": []},
    )


def _media(part: Part, words: Tokenizer) -> Iterator[Flaw]:
    """Find an id that the configuration gives to pictures or sounds, and that an ordinary piece of text has."""
    for key in _OF_MEDIA:
        number = part.config.get(key)
        text = words.texts.get(number) if type(number) is int else None
        if text is None or text in words.added or text in words.restored:
            continue
        yield flaw(
            "token-ids-differ",
            f"{part.path('config.json')} says {key} {number}, which is {text!r}, a piece of ordinary text.",
            file=part.path("config.json"),
            pointer=f"/{key}",
            found={"id": number, "token": text},
            expected="the id of an added token",
            advice="Use the config.json that belongs to this tokenizer.",
        )


def _two(part: Part) -> Iterator[Flaw]:
    """Find special tokens that tokenizer.json and tekken.json number otherwise: engines read one or the other."""
    ours, theirs = part.tokenizer, part.tekken
    if ours is None or theirs is None or ours is theirs:
        return
    differing = {text: (ours.ids[text], one.id) for text, one in theirs.added.items() if text in ours.ids}
    differing = {text: ids for text, ids in differing.items() if ids[0] != ids[1]}
    if not differing:
        return
    first = min(differing, key=lambda text: differing[text])
    yield flaw(
        "token-ids-differ",
        f"{part.path('tokenizer.json')} gives {first!r} the id {differing[first][0]}, and {part.path(tekken.FILE)} "
        f"gives it {differing[first][1]}"
        + (f"; {many(len(differing) - 1, 'more token', 'differs', 'differ')}." if len(differing) > 1 else "."),
        file=part.path(tekken.FILE),
        pointer="/special_tokens",
        found={text: ids[1] for text, ids in list(differing.items())[:MAX_ITEMS]},
        expected={text: ids[0] for text, ids in list(differing.items())[:MAX_ITEMS]},
    )


def _ranks(part: Part, rows: int) -> Iterator[Flaw]:
    """Find ids beyond the embedding in files that no other check reads: those of ranks, and a second tokenizer."""
    sizes = {name: size for name in RANKS if (size := _largest(part, name)) is not None}
    told = part.object(tekken.FILE).get("config")
    said = told.get("default_vocab_size") if isinstance(told, dict) else None
    if type(said) is int and (part.tekken is not part.tokenizer or part.tekken is None or part.tekken.size <= rows):
        sizes[tekken.FILE] = said
    for name, size in sizes.items():
        if size > rows:
            yield flaw(
                "vocabulary-exceeds-embedding",
                f"{part.path(name)} has ids up to {size - 1}, and there are {rows} rows.",
                file=part.path(name),
                found={"size": size},
                expected={"rows": rows},
            )


def _largest(part: Part, name: str) -> int | None:
    """Return one more than the largest id of a file of ranks; None without one that can be read as such."""
    entry = part.entries.get(name)
    if entry is None or entry.is_stub:
        return None
    try:
        with entry.place.open("rb") as file:
            lines = file.read(_MOST_BYTES).splitlines()
        return 1 + max((int(line.rsplit(b" ", 1)[1]) for line in lines if line.strip()), default=-1)
    except (OSError, ValueError, IndexError):
        return None


def _mode(c: Composition) -> Iterator[Flaw]:
    """Find an engine that is told to use Mistral's own tokenizer, where there is none.

    Source: vllm/tokenizers/mistral.py, which has mistral_common find one of its files.
    """
    names = c.model.entries
    if c.engine != "vllm" or c.declared.arguments.get("--tokenizer-mode") != "mistral" or tekken.FILE in names:
        return
    if any(name.startswith("tokenizer.model") for name in names):
        return
    yield flaw(
        "tokenizer-missing",
        "--tokenizer-mode mistral asks for Mistral's own tokenizer, and there is no tekken.json or tokenizer.model.",
        file=c.model.path(tekken.FILE),
        pointer="--tokenizer-mode",
        found=sorted(name for name in names if name.startswith("tokenizer"))[:MAX_ITEMS],
        expected=[tekken.FILE, "tokenizer.model.v3"],
        advice="Leave the argument out, or fetch Mistral's own tokenizer.",
    )
