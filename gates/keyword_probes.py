"""Does an engine enforce a keyword of JSON Schema? One small schema each, and a model pushed to break it.

An engine may take a schema that it does not enforce and answer 200 [C103]. Whether it does shows only when the model
wants what the schema forbids, so every probe adds to the scores of a few characters: the best-ranked breaks the
schema wherever the grammar lets it. White space is pushed away, since the grammar of most engines allows it without
end. An enforced answer is short: one that is cut has run past its bound [C104].

Source: verified with xllamacpp 2026.10.11549 (llama.cpp), which enforces or ignores each as tests/gates/test_structured
says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 48
"""More than any answer that keeps to its probe's schema needs."""
PUSH, STEP, AVOID = 1000.0, 50.0, -1000.0
WHITE_SPACE = " \n\t\r"
_OPENERS = '{[":'


def pushes(limit: float | None) -> tuple[float, float, float]:
    """Return what is added to the best character, by how much less to each next one, and to what is avoided.

    Args:
        limit: most that the engine adds. Beyond it all would be pushed alike, and the order, which is what breaks the
            schema, would be lost.
    """
    share = 1.0 if limit is None else min(1.0, limit / PUSH)
    return PUSH * share, STEP * share, AVOID * share


@dataclass(frozen=True, slots=True)
class KeywordProbe:
    """A schema in which the keyword forbids what `ranking`, best first, makes the model want."""

    schema: Mapping[str, Any]
    ranking: str

    def characters(self) -> str:
        """Return the characters to push, best first."""
        return self.ranking + "".join(one for one in _OPENERS if one not in self.ranking)


def _field(rule: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"n": rule}, "required": ["n"], **more}


_INTEGER = {"type": "integer"}
_INTEGERS = {"type": "array", "items": _INTEGER}
_ANY_KEY = {"type": "object", "additionalProperties": _INTEGER}
_A_AND_B = {"type": "object", "properties": {"a": _INTEGER, "b": _INTEGER}, "required": ["a"]}

PROBES: dict[str, KeywordProbe] = {
    "type": KeywordProbe(_field(_INTEGER), '"}1'),
    "properties": KeywordProbe(_field(_INTEGER), '"}1'),
    "required": KeywordProbe(_field(_INTEGER), '}"1'),
    "additionalProperties": KeywordProbe(_field(_INTEGER, additionalProperties=False), ',}"1'),
    "enum": KeywordProbe(_field({"enum": ["a", "aa"]}), '"}x'),
    "const": KeywordProbe(_field({"const": "a"}), '"}x'),
    "anyOf": KeywordProbe(_field({"anyOf": [{"const": 7}, {"const": 77}]}), "}17"),
    "$ref": KeywordProbe(_field({"$ref": "#/$defs/whole"}, **{"$defs": {"whole": _INTEGER}}), '"}1'),
    "minimum": KeywordProbe(_field({**_INTEGER, "minimum": 50}), "}1"),
    "maximum": KeywordProbe(_field({**_INTEGER, "maximum": 5}), "7}"),
    "exclusiveMinimum": KeywordProbe(_field({**_INTEGER, "exclusiveMinimum": 1}), "}1"),
    "exclusiveMaximum": KeywordProbe(_field({**_INTEGER, "exclusiveMaximum": 7}), "7}"),
    "multipleOf": KeywordProbe(_field({**_INTEGER, "multipleOf": 7}), "}1"),
    "minLength": KeywordProbe(_field({"type": "string", "minLength": 4}), '"}a'),
    "maxLength": KeywordProbe(_field({"type": "string", "maxLength": 4}), 'a"}'),
    "pattern": KeywordProbe(_field({"type": "string", "pattern": "^[a-c]+$"}), '"}a'),
    "pattern+maxLength": KeywordProbe(_field({"type": "string", "pattern": "^[a-z]+$", "maxLength": 8}), 'a"}'),
    "pattern+minLength": KeywordProbe(_field({"type": "string", "pattern": "^[a-z]+$", "minLength": 4}), '"}a'),
    "format": KeywordProbe(_field({"type": "string", "format": "date"}), '"}1-'),
    "items": KeywordProbe({**_INTEGERS, "minItems": 1}, '"]1'),
    "minItems": KeywordProbe({**_INTEGERS, "minItems": 3}, "],7"),
    "maxItems": KeywordProbe({**_INTEGERS, "minItems": 1, "maxItems": 2}, ",]7"),
    "uniqueItems": KeywordProbe({**_INTEGERS, "minItems": 2, "maxItems": 2, "uniqueItems": True}, "],7"),
    "contains": KeywordProbe({**_INTEGERS, "contains": {"const": 5}, "maxItems": 3}, "],7"),
    "minProperties": KeywordProbe({**_ANY_KEY, "minProperties": 1}, '}"1'),
    "propertyNames": KeywordProbe({**_ANY_KEY, "propertyNames": {"pattern": "^x"}, "minProperties": 1}, '"}1'),
    "dependentRequired": KeywordProbe({**_A_AND_B, "dependentRequired": {"a": ["b"]}}, "}1"),
    "not": KeywordProbe(_field({**_INTEGER, "not": {"const": 1}}), "}1"),
}
"""Keyword, or pair of them → its probe."""
