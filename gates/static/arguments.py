"""Checks the launch arguments of an engine whose arguments are listed here, before anything is booted.

Source: the `source` of the data file; the driver's own reader says the same (tests/gates/test_static_arguments.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gates.static import earlier, flexible
from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.rules import table
from gates.static.spellings import elsewhere
from schemas.faults import near
from schemas.result import Severity

TABLES: Final = ("llamacpp",)
"""Engines whose driver takes a list of them, each in a data file of its name; of others their parser's is held."""


_TOOL_PARSER: Final = {"vllm": "--tool-call-parser", "sglang": "--tool-call-parser", "trtllm": "--tool_parser"}
_REASONING_PARSER: Final = {
    "vllm": "--reasoning-parser",
    "sglang": "--reasoning-parser",
    "trtllm": "--reasoning_parser",
}
"""Engine → the argument that a section of the document becomes."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check that each word is an argument that the engine takes, with a value in its range."""
    if c.engine in TABLES:
        yield from check_words(c.engine, c.declared.arguments.words)
    if c.engine == "vllm":
        yield from earlier.check_words(c.declared.arguments.words, c.declared.version)
    if c.engine in flexible.TABLES:
        yield from flexible.check_words(c.engine, c.declared.arguments.words, c.declared.version)
        for pointer, value, names, plugin in (
            ("/template/tool_parser", c.declared.tool_parser, _TOOL_PARSER, "--tool-parser-plugin"),
            ("/template/reasoning_parser", c.declared.reasoning_parser, _REASONING_PARSER, "--reasoning-parser-plugin"),
        ):
            # A plugin, which is refused elsewhere, would bring names of its own.
            if value is not None and c.engine in names and not c.declared.arguments.has(plugin):
                yield from flexible.check_value(c.engine, names[c.engine], value, c.declared.version, pointer)


def check_words(engine: str, words: Sequence[str]) -> Iterator[Flaw]:
    """Check a command line against an engine's list.

    Args:
        engine: one of TABLES.
        words: of the command line, without the program.
    """
    known = table(engine)
    taken: Mapping[str, Mapping[str, Any]] = known["arguments"]
    seen: dict[str, str] = {}
    place = 0
    while place < len(words):
        name, where = known["shorter"].get(words[place], words[place]), f"/engine/arguments/{place}"
        place += 1
        if name not in taken:
            yield _unknown(engine, known, name, where)
            # What follows an argument that is not known is taken for its value, unless it looks like another one.
            if place < len(words) and not words[place].startswith("-"):
                place += 1
            continue
        meant = "--" + name.removeprefix("--no-").removeprefix("--")
        if meant in seen:
            said = f"{name} is there twice" if seen[meant] == name else f"{name} contradicts {seen[meant]}"
            yield flaw("argument-value", f"{said}.", pointer=where, found=name, expected="one of them, once")
        seen[meant] = name
        if taken[name]["type"] == "flag":
            continue
        if place == len(words):
            yield flaw(
                "argument-value", f"{name} needs a value.", pointer=where, found=None, expected=_range(taken[name])
            )
            return
        if not _fits(words[place], taken[name]):
            message = f"{name} is {_short(words[place])}, and may be {_range(taken[name])}."
            yield flaw(
                "argument-value",
                message,
                pointer=f"/engine/arguments/{place}",
                found=words[place],
                expected=_range(taken[name]),
            )
        place += 1


def _unknown(engine: str, known: Mapping[str, Any], name: str, where: str) -> Flaw:
    whole, equals, _ = name.partition("=")
    plain = "--" + whole.lstrip("-").replace("_", "-")
    advice, severity = None, Severity.WARN
    if name in known["managed"] or whole in known["managed"]:
        message = f"{_short(name)} is set by the runner, from the rest of the document."
        advice = "Leave it out."
    elif equals and (whole in known["arguments"] or whole in known["shorter"]):
        message = f"{_short(name)} is one word, and the driver takes name and value as two."
        advice, severity = f"Write {whole} and its value as two words.", Severity.BLOCK
    elif whole in known["other_options"]:
        message = f"The driver of {engine} does not take {_short(name)}, which the engine has."
        advice = "Leave it out."
    elif same := elsewhere(engine, whole)[1]:
        message = f"{engine} has no argument {_short(name)}, which is {elsewhere(engine, whole)[0]}'s; write {same}."
        severity = Severity.BLOCK
    elif meant := near(plain, list(known["arguments"])):
        message, severity = f"{engine} has no argument {_short(name)}; {meant}", Severity.BLOCK
    else:
        # Other versions of the engine may have it, and short names of what its driver does not take are in no list.
        message = f"The driver of {engine} does not know the argument {_short(name)}."
    return flaw(
        "argument-unknown",
        message,
        severity=severity,
        pointer=where,
        found=name,
        expected=_meant(known, whole, plain),
        advice=advice,
    )


def _meant(known: Mapping[str, Any], whole: str, plain: str) -> str | None:
    """Return the argument that was meant, where that can be told."""
    if whole in known["arguments"]:
        return whole
    if whole in known["shorter"]:
        return str(known["shorter"][whole])
    if whole in known["managed"] or whole in known["other_options"]:
        return None
    if same := elsewhere("llamacpp", whole)[1]:
        return same
    return near(plain, list(known["arguments"])).removeprefix("did you mean ").removesuffix("?") or None


def _fits(text: str, argument: Mapping[str, Any]) -> bool:
    try:
        match argument["type"]:
            case "integer":
                return bool(argument["least"] <= int(text) <= argument["most"])
            case "number":
                return bool(argument["least"] <= float(text) <= argument["most"])
            case "choice":
                return text in argument["choices"]
            case _:
                return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _range(argument: Mapping[str, Any]) -> str:
    match argument["type"]:
        case "integer":
            return f"a whole number from {argument['least']} to {argument['most']}"
        case "number":
            return f"a number from {argument['least']:g} to {argument['most']:g}"
        case "choice":
            return f"one of {', '.join(argument['choices'])}"
        case _:
            return "a JSON object"


def _short(word: str) -> str:
    return word if len(word) <= 80 else f"{word[:80]}…"
