"""Checks of the chat template, by rendering it: it renders, it says what it was told, and it says it alike."""

import dataclasses
import re
from collections.abc import Iterator

from gates.facts import is_pooled
from gates.files.templates import TemplateRefused
from gates.static import parsers, stops, turns
from gates.static.composition import MOST_TEMPLATES, TOOL_TEMPLATE, Composition
from gates.static.flaw import Flaw, flaw
from gates.static.probes import ANSWER, FURTHER, MARKER, QUESTION, SYSTEM, Renderings
from schemas.bundle import Feature
from schemas.result import Severity

_TAGS = "think|thinking|thought|thoughts|reasoning|reason|scratchpad|reflection|analysis|[a-z]+[:_]think"
_OPENING = re.compile(
    rf"(?i:<({_TAGS})>)|\[THINK\]|◁think▷"
    r"|<[|｜](begin_of_thought|START_THINKING|think|thinking|thought|reasoning|inner_prefix)[|｜]>"
    r"|<\|channel\|?>(analysis|thought)|<unused94>thought"
)
_CLOSING = re.compile(
    rf"(?i:</({_TAGS})>)|\[/THINK\]|◁/think▷|<channel\|>|<unused95>"
    r"|<[|｜](end_of_thought|END_THINKING|/think|/thinking|/thought|/reasoning|inner_suffix)[|｜]>"
)
"""How families open their reasoning, and how they close it.

Source: the parsers of vLLM's reasoning/ and SGLang's reasoning_parser.py, and the templates of Kimi, Command A,
Gemma 4, LongCat, MedGemma and gpt-oss.
"""


_ANY_REASONING = re.compile(f"{_OPENING.pattern}|{_CLOSING.pattern}")

_BOUNDED = frozenset({"template-time", "template-memory", "template-too-large", "template-crashed"})
"""What a template takes more of than its process is given."""
_BROKEN = frozenset({"template-syntax", *_BOUNDED})
"""What is wrong with a template whatever it is given."""
_SHOWN = 60
"""Characters of a rendering's end that a finding holds."""


_DAYS = (
    ("plain", "later", "question"),
    ("dressed", "dressed-later", "question with tools"),
    ("system", "system-later", "question with a system's message"),
    ("tool", "tool-later", "question with tools and no system's message"),
    ("history", "history-later", "question after an answer"),
)
"""Conversations that are rendered on two days, and what each is called."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check the template in force, and the further ones that requests can choose by name."""
    if not c.speaks:
        return  # nothing renders a template
    yield from _sources(c)
    own = list(_check(c))
    yield from own
    if len(names := c.model.named_templates(c.listing.entries)) > MOST_TEMPLATES and c.others:
        file = next(iter(names.values()))[1]
        said = f"{file} holds {len(names)} further templates, of which {MOST_TEMPLATES} are tried."
        yield flaw("template-fails", said, file=file, found=len(names), expected={"at_most": MOST_TEMPLATES})
    for name, other in c.others.items():
        if name == TOOL_TEMPLATE:
            found = [*_check(other), *stops.check(other)]
            known = {*map(str, own), *map(str, stops.check(c))}
            found = [one for one in found if str(one) not in known]
        else:
            found = list(_other(other))
        for one in found:
            yield dataclasses.replace(one, message=f"The template {name}: {one.message}")


def _other(c: Composition) -> Iterator[Flaw]:
    """Check a template that is only used where it is named: it may need what no probe gives it."""
    seen = c.renderings
    refused = None if seen is None else seen.by_name["plain"].refused
    if seen is None or (refused is not None and refused.code not in _BROKEN):
        return
    if refused is not None:
        yield _fails(seen, refused)
    else:
        yield from _clock(seen)


def _check(c: Composition) -> Iterator[Flaw]:
    seen = c.renderings
    if seen is None:
        yield from _absent(c)
        return
    refused = seen.by_name["plain"].refused
    if refused is not None:
        yield _fails(seen, refused)
        return
    yield from _clock(seen)
    yield from _content(c, seen)
    yield from _generation(seen)
    yield from turns.check(seen, _ANY_REASONING)
    if TOOL_TEMPLATE not in c.others:  # else that one is given the tools
        yield from _tools(c, seen)
        yield from turns.check_tools(c, seen)
    yield from _reasoning(c, seen)
    yield from parsers.check(c, seen, _opened(seen))


def _fails(seen: Renderings, refused: TemplateRefused) -> Flaw:
    return flaw(
        "template-fails",
        f"{seen.file} cannot render a question: {refused}.",
        file=seen.file,
        pointer=None if refused.line is None else f"line {refused.line}",
        found={"reason": refused.code, "detail": refused.detail},
        expected="a rendered question",
        advice=_advice(seen.file, refused),
    )


def _advice(file: str, refused: TemplateRefused) -> str | None:
    """Return what to do about a template that fails: at its place, where one is known."""
    if refused.code in _BOUNDED:
        return f"Use the template that the model's publisher gives: no sound one takes so much ({refused.code})."
    if refused.line is None:
        return f"Mend {file}, or use the template that came with the weights: it fails on one user message alone."
    return f"Mend line {refused.line} of {file}, or use the template that came with the weights."


def _absent(c: Composition) -> Iterator[Flaw]:
    # Who says nothing of what a bundle serves is given chat, and llama.cpp makes up a template in silence.
    # Of loose files for other engines nothing is supposed, nor of what is pooled: nobody chats with that.
    is_undeclared = c.declared.features is None and c.engine == "llamacpp" and not c.pools
    if not c.declared.has(Feature.CHAT) and not is_undeclared:
        return
    if c.declared.arguments.has("--chat-template"):
        return  # it lies elsewhere, and cannot be looked at
    if is_undeclared and _embeds(c):
        return
    if c.model.has("tekken.json") or any(name.startswith("tokenizer.model.v") for name in c.model.entries):
        return  # Mistral's own tokenizers hold the format of a conversation
    unread = {one.file for one in c.model.flaws}
    has_unread = c.model.gguf is None and any(name.endswith(".gguf") for name in c.model.entries)
    if has_unread or c.model.path("tokenizer_config.json") in unread:
        return  # what they hold is not known, and that is told already
    names = ", ".join(c.others)
    reason = f"the templates are called {names}, and none default" if names else "no file holds a chat template"
    instead = c.rules.get("default_template")
    silent = f"; {c.engine} would serve it with {instead}, and not say so" if isinstance(instead, str) else ""
    yield flaw(
        "template-missing",
        f"The bundle serves chat, as one does unless it names other features, and {reason}{silent}.",
        pointer="/serving/features",
        found=sorted(c.others),
        expected="tokenizer.chat_template in the GGUF, or chat_template.jinja"
        if c.model.gguf is not None
        else "chat_template.jinja, or chat_template in tokenizer_config.json",
    )


def _embeds(c: Composition) -> bool:
    """Say whether a GGUF header is that of a model whose output is pooled: nobody chats with it."""
    return c.model.gguf is not None and is_pooled(c.model.gguf)


def _sources(c: Composition) -> Iterator[Flaw]:
    templates = c.model.templates
    if len(templates) > 1 and c.declared.template_file is None:
        first, file = templates[0]
        for text, other in templates[1:]:
            if text.strip() != first.strip():
                yield flaw(
                    "template-sources-disagree",
                    f"{file} and {other} hold different templates; newer engines read the first.",
                    file=other,
                    found=[file, other],
                    expected=[file],
                )


def _clock(seen: Renderings) -> Iterator[Flaw]:
    for today, after, what in _DAYS:
        now, later = seen.text(today), seen.text(after)
        if now is None or later is None or now == later:
            continue
        pairs = enumerate(zip(now, later, strict=False))
        place = next((at for at, (a, b) in pairs if a != b), min(len(now), len(later)))
        yield flaw(
            "template-clock",
            f"{seen.file} writes the date: on another day a {what} is rendered otherwise from character {place} on.",
            file=seen.file,
            found={
                "character": place,
                "now": now[max(0, place - 20) : place + 20],
                "later": later[max(0, place - 20) : place + 20],
            },
            expected={"later": now[max(0, place - 20) : place + 20]},
        )
        return


def _content(c: Composition, seen: Renderings) -> Iterator[Flaw]:
    if QUESTION not in (seen.text("plain") or ""):
        yield _drops(seen, "the user says", "plain", QUESTION)
    answered = seen.by_name["answered"]
    if answered.text is not None and ANSWER not in answered.text:
        yield _drops(seen, "the assistant said", "answered", ANSWER)
    if not c.declared.has(Feature.SYSTEM_ROLE):
        return
    system = seen.by_name["system"]
    if system.text is None or SYSTEM not in system.text:
        reason = "drops what it says" if system.refused is None else f"refuses it: {system.refused.detail}"
        yield flaw(
            "system-role-unsupported",
            f"The bundle declares system_role, and {seen.file} {reason}.",
            file=seen.file,
            pointer="/serving/features",
            found=(system.text or "")[-_SHOWN:] if system.refused is None else system.refused.detail,
            expected=SYSTEM,
        )


def _drops(seen: Renderings, what: str, probe: str, text: str) -> Flaw:
    said = f"{seen.file} does not write what {what}."
    return flaw("template-drops-message", said, file=seen.file, found=(seen.text(probe) or "")[-_SHOWN:], expected=text)


def _generation(seen: Renderings) -> Iterator[Flaw]:
    """Find a template that opens the assistant's turn in a conversation, but not where the model shall begin."""
    history, plain = seen.text("history"), seen.text("plain")
    if history is None or plain is None or ANSWER not in history or QUESTION not in history or QUESTION not in plain:
        return
    before = history.split(ANSWER, 1)[0].rpartition(QUESTION)[2]
    tail = plain.rpartition(QUESTION)[2]
    opening = MARKER.findall(before)
    begun = "".join(tail.split())
    if len(MARKER.findall(tail)) > 1 and "".join(before.split()).startswith(begun):
        return  # the turn is opened, and what stands before an answer in it is the model's to write
    # A template that writes anything for add_generation_prompt knows where the model begins.
    if opening and len(MARKER.findall(tail)) < len(opening) and plain == seen.text("closed"):
        yield flaw(
            "generation-prompt-missing",
            f"{seen.file} opens the assistant's turn with {before.strip()!r} in a conversation, and ends a question "
            f"with {tail.strip()!r}.",
            file=seen.file,
            found=tail,
            expected=before,
        )


def _tools(c: Composition, seen: Renderings) -> Iterator[Flaw]:
    features = c.declared.features
    wants = features is None or Feature.TOOLS.value in features
    writes = "tools" in seen.source
    flat = seen.by_name["tool"]
    if features is not None and wants and not (writes and _names_tool(seen)):
        yield from _no_tools(c, seen)
    if not writes:
        return
    if flat.refused is not None:
        if wants and features is not None:
            yield flaw(
                "template-tool-schema",
                f"{seen.file} cannot render a tool: {flat.refused}.",
                file=seen.file,
                found=flat.refused.detail,
                expected="a tool with plain parameters renders",
            )
        return
    # What a plain parameter may lack too, such as its description, is no fault of a reference.
    usual = {*flat.printed, *seen.by_name["tool-bare"].printed}
    for name, (what, _) in FURTHER.items():
        nested = seen.by_name[name]
        lost = sorted(set(nested.printed) - usual)
        if nested.refused is None and not lost:
            continue
        reason = (
            f"fails: {nested.refused}"
            if nested.refused is not None
            else f"prints nothing in place of {', '.join(lost)}, and fails under strict undefined"
        )
        is_mild = nested.refused is None and "$ref" not in what
        yield flaw(
            "template-tool-schema",
            f"For a tool whose parameter is {what}, {seen.file} {reason}.",
            severity=Severity.BLOCK if wants and not is_mild else Severity.WARN,
            file=seen.file,
            found={
                "reason": None if nested.refused is None else nested.refused.code,
                "error": None if nested.refused is None else nested.refused.detail,
                "undefined": lost,
                "parameter": what,
            },
            expected="a tool with plain parameters renders",
        )


def _names_tool(seen: Renderings) -> bool:
    text = seen.text("tool")
    return text is None or "find" in text


def _no_tools(c: Composition, seen: Renderings) -> Iterator[Flaw]:
    yield flaw(
        "tool-parser-missing" if c.rules.get("template_tools") else "template-tools-missing",
        f"The bundle declares tools, and {seen.file} does not write them.",
        file=seen.file,
        pointer="/serving/features",
        found={"tools": False},
        expected={"tools": True},
    )


def _opened(seen: Renderings) -> str | None:
    """Return what opens the reasoning at the end of a question; None where nothing does, or it is closed at once."""
    tail = (seen.text("plain") or "").rpartition(QUESTION)[2]
    opened = max(_OPENING.finditer(tail), key=lambda one: one.start(), default=None)
    return None if opened is None or _CLOSING.search(tail, opened.end()) else opened[0]


def _reasoning(c: Composition, seen: Renderings) -> Iterator[Flaw]:
    text = seen.text("plain") or ""
    tag = _opened(seen)
    if tag is None and not c.declared.has(Feature.REASONING):
        return
    flag, also, off = (c.rules.get(f"reasoning_{name}") for name in ("flag", "also", "off"))
    arguments = c.declared.arguments
    is_off = bool(off) and arguments.get(off[0]) == off[1]
    named = c.declared.reasoning_parser or (flag and arguments.get(flag))
    if not is_off and ((named and (not also or arguments.has(also))) or (flag is None and c.engine is not None)):
        return  # it is named, or the engine finds the reasoning by the template itself, or nothing is known of it
    wanted = also if named and also else flag
    if tag is None:
        if not isinstance(flag, str):
            return  # the engine has no parser, so that nobody can ask for one
        unused = f"without {also} the parser {named} is not used" if named else "no reasoning parser is named"
        yield flaw(
            "reasoning-parser-missing",
            f"The bundle declares reasoning, and {unused}: answers would hold it as text.",
            pointer="/serving/features",
            found={"parser": named or None},
            expected={"argument": wanted},
        )
        return
    lack = f"{c.engine} in this version has none" if flag is False else "no reasoning parser is named"
    if is_off:
        wanted, lack = off[0], f"{off[0]} {off[1]} leaves it in the answer"
    elif named and also:
        lack = f"without {also} the parser {named} is not used"
    yield flaw(
        "reasoning-parser-missing",
        f"{seen.file} ends a question inside an open {tag}, and {lack}: answers will begin with bare reasoning and a "
        "closing tag.",
        severity=Severity.INFO if c.engine is None else Severity.BLOCK,
        file=seen.file,
        pointer=wanted or None,
        found={"generation_prompt": text[-60:], "parser": named or None},
        expected={"argument": wanted or None},
    )
