"""Checks of parsers against what they parse: the form that the template writes, and the tokens that they look for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.probes import QUESTION, Renderings
from gates.static.rules import table
from gates.static.vocabulary import embedding_rows
from schemas.bundle import Feature
from schemas.result import Severity

_FLAGS: Final = ("--tool-call-parser", "--reasoning-parser")


def check(c: Composition, seen: Renderings, opened: str | None) -> Iterator[Flaw]:
    """Check the parsers that are named.

    Args:
        c: the composition.
        seen: what the template makes of each probe.
        opened: how it opens the reasoning, if it does.
    """
    known: Mapping[str, Any] = table("parsers").get(c.engine or "", {})
    tools = c.declared.tool_parser or c.declared.arguments.get(_FLAGS[0])
    reasoning = c.declared.reasoning_parser or c.declared.arguments.get(_FLAGS[1])
    if tools is not None and c.declared.has(Feature.TOOLS):
        yield from _calls(seen, known.get("calls", {}), tools)
        yield from _tokens(c, known.get("call_tokens", {}), tools, _FLAGS[0])
    if reasoning is not None:
        # With Mistral's own tokenizer its parser also reads <think> as text.
        if c.model.tekken is None:
            yield from _tag(seen, known.get("reasoning", {}), reasoning, opened)
        yield from _tokens(c, known.get("reasoning_tokens", {}), reasoning, _FLAGS[1])


def _tag(seen: Renderings, known: Mapping[str, str], parser: str, opened: str | None) -> Iterator[Flaw]:
    reads = known.get(parser)
    if opened is None or reads is None or opened not in known.values() or opened == reads:
        return
    yield flaw(
        "parser-differs",
        f"{seen.file} opens the reasoning with {opened}, and the parser {parser} looks for {reads}: answers will begin "
        "with bare reasoning and a closing tag.",
        file=seen.file,
        pointer=_FLAGS[1],
        found={"opened": opened, "parser": parser, "reads": reads},
        expected={"parsers": sorted(name for name, tag in known.items() if tag == opened)},
    )


def _calls(seen: Renderings, known: Mapping[str, Sequence[str]], parser: str) -> Iterator[Flaw]:
    """Find a call that the template writes in the form of other parsers than the one that is named."""
    text = (seen.text("called") or "").rpartition(QUESTION)[2]
    reads = known.get(parser)
    if reads is None or not text or any(form in text for form in reads):
        return
    others = sorted(name for name, forms in known.items() if any(form in text for form in forms))
    if not others:
        return
    yield flaw(
        "parser-differs",
        f"{seen.file} writes a call as {text.strip()[:80]!r}, and the parser {parser} looks for {reads[0]!r}.",
        severity=Severity.WARN,
        file=seen.file,
        pointer=_FLAGS[0],
        found={"parser": parser, "reads": list(reads), "call": text.strip()[:200]},
        expected={"parsers": others},
    )


def _tokens(c: Composition, known: Mapping[str, Sequence[str]], parser: str, flag: str) -> Iterator[Flaw]:
    words, rows = c.model.tokenizer, embedding_rows(c.model)
    if words is not None and rows is not None and len(words.ids) < rows // 2:
        return  # the vocabulary is there in part alone
    lacking = [] if words is None else [one for one in known.get(parser, ()) if words.id_of(one) is None]
    if words is None or not lacking or set(lacking) <= set(words.added_file):
        return
    yield flaw(
        "parser-tokens-missing",
        f"The parser {parser} needs {', '.join(lacking)}, which the tokenizer does not have, and fails without.",
        file=c.model.tokenizer_file,
        pointer=flag,
        found={"parser": parser, "missing": lacking},
        expected={"tokens": list(known[parser])},
    )
