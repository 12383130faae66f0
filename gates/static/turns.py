"""Checks of a chat template over several turns: it renders them, keeps every message, and opens the right turn."""

import re
from collections.abc import Iterator
from typing import Final

from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.probes import ANSWER, MARKER, NAME, NEXT, QUESTION, RESULT, Renderings
from schemas.bundle import Feature

_SHOWN: Final = 60
_PLAIN: Final = re.compile(r"\w+")


def check(seen: Renderings, reasoning: re.Pattern[str]) -> Iterator[Flaw]:
    """Check what a template makes of a conversation that goes on.

    Args:
        seen: what the template makes of each probe.
        reasoning: what opens or closes the reasoning.
    """
    history = seen.by_name["history"]
    if history.refused is not None:
        yield flaw(
            "template-fails",
            f"{seen.file} cannot render a question after an answer: {history.refused}.",
            file=seen.file,
            pointer=None if history.refused.line is None else f"line {history.refused.line}",
            found={"reason": history.refused.code, "detail": history.refused.detail},
            expected="a rendered conversation",
            advice="Use the template that came with the weights: it fails on the second question of a conversation.",
        )
        return
    text = history.text or ""
    if QUESTION in (seen.text("plain") or "") and QUESTION not in text:
        yield _drops(seen, "does not write what the user said before an answer", text, QUESTION)
    if NEXT not in text:
        words = _PLAIN.findall(NEXT)
        changes = all(word in text for word in words)
        said = "changes what the user says" if changes else "does not write what the user says after an answer"
        yield _drops(seen, said, text, NEXT)
    yield from _opening(seen, text, reasoning)


def _drops(seen: Renderings, said: str, text: str, wanted: str) -> Flaw:
    return flaw("template-drops-message", f"{seen.file} {said}.", file=seen.file, found=text[-_SHOWN:], expected=wanted)


def _opening(seen: Renderings, history: str, reasoning: re.Pattern[str]) -> Iterator[Flaw]:
    """Find a generation prompt that opens another turn than those in which the assistant answered before."""
    plain, closed = seen.text("plain"), seen.text("closed")
    if plain is None or closed is None or not plain.startswith(closed) or ANSWER not in history:
        return
    opened = plain[len(closed) :]
    inside = reasoning.search(opened)
    opened = opened if inside is None else opened[: inside.start()]
    before = history.split(ANSWER, 1)[0].rpartition(QUESTION)[2]
    if not MARKER.search(opened) or not MARKER.search(before) or _squeezed(opened) in _squeezed(before):
        return
    yield flaw(
        "generation-prompt-missing",
        f"{seen.file} opens the turn in which the model shall answer with {opened.strip()!r}, and those of earlier "
        f"answers with {before.strip()!r}.",
        file=seen.file,
        found=opened,
        expected=before,
        advice="Write the same opening for both.",
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def check_tools(c: Composition, seen: Renderings) -> Iterator[Flaw]:
    """Find a template that writes tools and not what they answer, where tools are declared."""
    if not c.declared.has(Feature.TOOLS) or NAME not in (seen.text("tool") or ""):
        return  # that it writes no tools is told by itself
    answered = seen.by_name["tool-answered"]
    if answered.text is not None and (RESULT in answered.text or QUESTION not in answered.text):
        return  # one that writes no message at all is told by itself
    refused = answered.refused
    said = "does not write what a tool answered" if refused is None else f"refuses what a tool answered: {refused}"
    yield flaw(
        "template-tools-missing",
        f"The bundle declares tools, and {seen.file} {said}.",
        file=seen.file,
        pointer="/serving/features",
        found=(answered.text or "")[-_SHOWN:] if refused is None else refused.detail,
        expected=RESULT,
    )
