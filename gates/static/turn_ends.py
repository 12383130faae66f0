"""Checks of how turns end beside a plain answer: those that call tools, and those that the next turn alone ends."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.probes import ANSWER, MARKER, NAME, NEXT, QUESTION
from gates.static.words import Tokenizer
from schemas.bundle import Feature
from schemas.result import Severity


def check(c: Composition, stops: AbstractSet[int]) -> Iterator[Flaw]:
    """Check that a turn of each kind ends at a stop.

    Args:
        c: the composition.
        stops: all ids that any file names, or that the engine stops at.
    """
    words = c.model.tokenizer
    if not c.speaks or c.renderings is None or words is None:
        return
    yield from _call(c, words, stops)
    yield from _next(c, words, stops)


def _call(c: Composition, words: Tokenizer, stops: AbstractSet[int]) -> Iterator[Flaw]:
    """Find a marker that ends the turn of a call, as harmony has one, and at which nothing stops."""
    seen = c.renderings
    text = None if seen is None else seen.text("called")
    if seen is None or text is None or not c.declared.has(Feature.TOOLS):
        return
    call = text.rpartition(QUESTION)[2].rstrip()
    end = max((one for one in words.added if call.endswith(one)), key=len, default=None)
    if end is None or NAME not in call or not MARKER.fullmatch(end) or words.added[end].id in stops:
        return
    plain = (seen.text("answered") or "").rstrip()
    if plain.endswith(end):
        return  # that answers end there too is told by itself
    number = words.added[end].id
    yield flaw(
        "turn-end-not-a-stop",
        f"{seen.file} ends a call of a tool with {end!r} (id {number}), and no file names it as a stop.",
        file=seen.file,
        found={"token": end, "id": number, "stops": sorted(stops)},
        expected={"stops": sorted({*stops, number})},
    )


def _next(c: Composition, words: Tokenizer, stops: AbstractSet[int]) -> Iterator[Flaw]:
    """Find answers behind which the template writes nothing but the next turn, whose beginning is no stop.

    Models of that kind, such as GLM, are trained to write the next turn's first marker, and stop at it.
    """
    seen = c.renderings
    history = None if seen is None else seen.text("history")
    if seen is None or history is None or ANSWER not in history or NEXT not in history:
        return
    answered = (seen.text("answered") or "").split(ANSWER, 1)
    between = history.split(ANSWER, 1)[1].split(NEXT, 1)[0]
    if len(answered) < 2 or answered[1].strip():
        return  # something ends an answer
    here = [text for text in words.added if text in between]
    if not here or any(words.added[text].id in stops for text in here):
        return
    first = min(here, key=between.index)
    number = words.added[first].id
    if not MARKER.fullmatch(first):
        return
    yield flaw(
        "turn-end-not-a-stop",
        f"{seen.file} writes nothing behind an answer but {first!r} (id {number}) of the next turn, and no file names "
        "it as a stop.",
        severity=Severity.WARN,
        file=seen.file,
        found={"token": first, "id": number, "stops": sorted(stops)},
        expected={"stops": sorted({*stops, number})},
    )
