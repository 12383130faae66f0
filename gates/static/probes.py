"""The conversations that a chat template is tried with, and what became of each."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from gates.files.templates import Case, Rendering, render_all
from gates.recent import Recent

QUESTION: Final = "ping"
ANSWER: Final = "Sluicegate answers"
NEXT: Final = 'pong <i> & "it\'s"'
"""A second question, with what templates of pages would change."""
RESULT: Final = "Sluicegate finds"
NAME: Final = "find"
"""The tool that is there, and that is called."""
SYSTEM: Final = "Sluicegate instructs"
MARKER: Final = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|<[｜][^<>\n]{1,40}[｜]>|</?(?:start|end)_of_turn>|\[/?INST\]"
    r"|\[\|[a-z]{1,20}\|\]|\]~!?b[\]\[]|\[e~\["
)
"""How families write where a turn begins and ends."""
_LATER: Final = datetime(2031, 2, 3, 4, 5, 6)  # noqa: DTZ001 - a template prints a clock on the wall
_USER: Final = {"role": "user", "content": QUESTION}
_ASSISTANT: Final = {"role": "assistant", "content": ANSWER}


def _tool(properties: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    if definitions is not None:
        parameters = {"$defs": definitions, **parameters}
    function = {"name": NAME, "description": "Finds things.", "parameters": parameters}
    return {"type": "function", "function": function}


_FLAT: Final = _tool({"filter": {"type": "string", "description": "What to find."}})
_BARE: Final = _tool({"filter": {"type": "string"}})
_REFERENCE: Final = _tool(
    {"filter": {"$ref": "#/$defs/F"}}, {"F": {"type": "object", "properties": {"name": {"type": "string"}}}}
)
_CHOICE: Final = _tool({"filter": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "What to find."}})
_CLASS: Final = {"type": "object", "properties": {"name": {"type": "string", "description": "Its name."}}}
_INNER: Final = {"type": "object", "description": "What to find.", "properties": {"name": {"$ref": "#/$defs/F"}}}
FURTHER: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "tool-reference": ("$ref", _REFERENCE),
    "tool-choice": ("anyOf", _CHOICE),
    "tool-list": (
        "a list",
        _tool({"filter": {"type": "array", "items": {"type": "string"}, "description": "What to find."}}),
    ),
    "tool-list-reference": (
        "a list of $ref",
        _tool({"filter": {"type": "array", "items": {"$ref": "#/$defs/F"}, "description": "x"}}, {"F": _CLASS}),
    ),
    "tool-choice-reference": (
        "anyOf with a $ref",
        _tool({"filter": {"anyOf": [{"$ref": "#/$defs/F"}, {"type": "null"}], "description": "x"}}, {"F": _CLASS}),
    ),
    "tool-inner-reference": ("an object with a $ref", _tool({"filter": _INNER}, {"F": _CLASS})),
    "tool-types": ("several types", _tool({"filter": {"type": ["string", "null"], "description": "What to find."}})),
}
"""Conversation of CASES → what a tool's parameter is there, and the tool. Clients write each of them by themselves."""

_CALL: Final[dict[str, Any]] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": NAME, "arguments": {"filter": "x"}}}],
}
_RESULT: Final = {"role": "tool", "tool_call_id": "call00001", "name": NAME, "content": RESULT}

CASES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"messages": [_USER]},
    "closed": {"messages": [_USER], "add_generation_prompt": False},
    "answered": {"messages": [_USER, _ASSISTANT], "add_generation_prompt": False},
    "history": {"messages": [_USER, _ASSISTANT, {"role": "user", "content": NEXT}]},
    "system": {"messages": [{"role": "system", "content": SYSTEM}, _USER]},
    "later": {"messages": [_USER], "now": _LATER},
    "tool": {"messages": [_USER], "tools": [_FLAT]},
    "tool-bare": {"messages": [_USER], "tools": [_BARE]},
    "dressed": {"messages": [{"role": "system", "content": SYSTEM}, _USER], "tools": [_FLAT]},
    "dressed-later": {"messages": [{"role": "system", "content": SYSTEM}, _USER], "tools": [_FLAT], "now": _LATER},
    "system-later": {"messages": [{"role": "system", "content": SYSTEM}, _USER], "now": _LATER},
    "tool-later": {"messages": [_USER], "tools": [_FLAT], "now": _LATER},
    "history-later": {"messages": [_USER, _ASSISTANT, {"role": "user", "content": NEXT}], "now": _LATER},
    **{name: {"messages": [_USER], "tools": [tool]} for name, (_, tool) in FURTHER.items()},
    "called": {"messages": [_USER, _CALL], "tools": [_FLAT], "add_generation_prompt": False},
    "tool-answered": {"messages": [_USER, _CALL, _RESULT], "tools": [_FLAT]},
}


@dataclass(frozen=True, slots=True)
class Renderings:
    """What became of each conversation of CASES, by its name."""

    source: str
    file: str
    by_name: Mapping[str, Rendering]

    def text(self, name: str) -> str | None:
        """Return a rendered text, or None."""
        return self.by_name[name].text


MOST_KEPT: Final = 64
"""Templates whose renderings are kept, with one set of names each: the bundles of one model share its template."""
MOST_KEPT_CHARACTERS: Final = 1024 * 1024
"""Of the texts of one template; what is longer is not kept."""
_CHANCE: Final = frozenset({"template-time", "template-memory", "template-crashed", "template-too-deep"})
"""Refusals that may come of the machine, which had no time or no memory just then: nothing with one is kept."""


_KEPT: Final[Recent[bytes, tuple[Rendering, ...]]] = Recent(MOST_KEPT)
"""What became of the latest templates, by all that they were rendered with."""


def _may_be_kept(found: tuple[Rendering, ...]) -> bool:
    if any(one.refused and one.refused.code in _CHANCE for one in found):
        return False
    return sum(len(one.text or "") for one in found) <= MOST_KEPT_CHARACTERS


def render(source: str, file: str, variables: Mapping[str, Any], *, with_tools: bool = False) -> Renderings:
    """Render every conversation with one template, in one child process.

    What a template makes of them depends on nothing else, so that the same one is not rendered twice.

    Args:
        source: the template.
        file: that it comes from.
        variables: further names that it may use.
        with_tools: give a tool to conversations that have none, for a template that is used with tools alone.
    """
    key = sha256(json.dumps([source, variables, with_tools]).encode()).digest()
    found = _KEPT.get(key)
    if found is None:
        always = {"tools": [_FLAT]} if with_tools else {}
        found = tuple(
            render_all(source, [Case(**{"variables": variables, **always, **told}) for told in CASES.values()])
        )
        if _may_be_kept(found):
            _KEPT.put(key, found)
    return Renderings(source, file, dict(zip(CASES, found, strict=True)))
