"""One JSON Schema of a contract with callers, and two independent judges of what an engine answers to it.

`jsonschema` is written in Python, `jsonschema-rs` in Rust; an answer counts as valid or invalid only when both say
so. Patterns are matched in linear time by the second alone: Python's matching may take for ever, and an answer
comes from outside. Nothing is ever fetched: a `$ref` that leaves the schema is refused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import jsonschema
import jsonschema_rs
import referencing
from jsonschema.exceptions import SchemaError

from schemas.common import strict_json
from schemas.suite import StructuredSuite

MAX_ANSWER_BYTES = 1024 * 1024
MAX_DEPTH = 64
_OURS = frozenset({"date", "email", "ipv4", "ipv6", "uuid"})
"""Formats that both judges check, each by itself; all others are the second's."""
_FORMATS = ("date-time", "duration", "hostname", "json-pointer", "time", "uri", "uri-reference")
_HOLD_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_HOLD_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_HOLD_MAP = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_UNJUDGED = frozenset({"unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"})
ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly"),
    }
)
"""Keywords that constrain nothing."""
PAIRS = (("pattern", "maxLength"), ("pattern", "minLength"))
"""Keywords of which an engine may enforce each alone, and only one where both stand [C104]."""


class ContractError(ValueError):
    """The schema cannot be judged by. The message says why, in half a sentence."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the judges say of one text. `is_valid` is None when they do not agree."""

    is_valid: bool | None
    reason: str = ""
    keywords: frozenset[str] = frozenset()
    is_json: bool = True


class Contract:
    """A schema, ready to judge answers.

    Raises:
        ContractError: not strict JSON, no object, no valid schema, a reference that leaves it, a pattern that cannot
            be matched in linear time, or a keyword that the two judges do not read alike.
    """

    def __init__(self, text: str) -> None:
        try:
            self.schema = strict_json(text.encode(), limit=MAX_ANSWER_BYTES, depth=MAX_DEPTH)
        except ValueError as error:
            raise ContractError(str(error)) from None
        if not isinstance(self.schema, dict):
            raise ContractError("is no object")
        self.keywords = frozenset(_keywords(self.schema))
        if unjudged := sorted(self.keywords & _UNJUDGED):
            raise ContractError(f"uses {', '.join(unjudged)}, which this gate does not judge")
        try:
            self._second = _compiled(self.schema)
            found = jsonschema.validators.validator_for(self.schema, default=jsonschema.Draft202012Validator)
            found.check_schema(self.schema)
        except (ValueError, SchemaError) as error:
            raise ContractError(f"is no usable schema: {str(error).splitlines()[0]}") from None
        rules = {"pattern": _pattern, "patternProperties": _pattern_properties, "multipleOf": _multiple_of}
        rules["additionalProperties"] = _additional_properties
        ours = jsonschema.validators.extend(found, rules)
        self._first = ours(self.schema, format_checker=_format_checker(), registry=referencing.Registry())

    def check(self, text: str) -> Checked:
        """Judge one answer: strict JSON (no duplicate key, no NaN, no half character), then both judges."""
        try:
            value = strict_json(text.encode(), limit=MAX_ANSWER_BYTES, depth=MAX_DEPTH)
        except ValueError as error:
            return Checked(is_valid=False, reason=f"the answer {error}", is_json=False)
        second = next(self._second.iter_errors(value), None)
        errors = list(self._first.iter_errors(value))
        if (second is None) != (not errors):
            says = f"jsonschema says {errors[0].message!r}" if errors else f"jsonschema-rs says {second}"
            return Checked(None, says.split("\n", 1)[0])
        if not errors:
            return Checked(is_valid=True)
        keywords = frozenset(str(error.validator) for error in errors)
        worst = errors[0]
        at = "/".join(str(part) for part in worst.absolute_path)
        reason = f"/{at}: {worst.message}" if at else worst.message
        return Checked(is_valid=False, reason=reason, keywords=keywords)


def suite_faults(suite: StructuredSuite) -> Iterator[tuple[str, str]]:
    """Yield what makes a suite unfit to judge by, as (item, sentence without full stop).

    Each schema must be usable, both judges must accept each of its valid instances and refuse each invalid one.
    """
    for item in suite.items:
        try:
            contract = Contract(item.json_schema)
        except ContractError as error:
            yield item.id, f"the schema of {item.id} {error}"
            continue
        for instances, wanted in ((item.valid, True), (item.invalid, False)):
            for place, text in enumerate(instances):
                checked = contract.check(text)
                if checked.is_valid is not wanted:
                    name = f"{'valid' if wanted else 'invalid'} instance {place} of {item.id}"
                    if checked.is_valid is None:
                        yield item.id, f"{name} divides the judges: {checked.reason}"
                    else:
                        yield item.id, f"{name} is {'refused: ' + checked.reason if wanted else 'accepted'}"


def _keywords(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    yield from (name for name in schema if name not in ANNOTATIONS)
    yield from ("+".join(pair) for pair in PAIRS if all(name in schema for name in pair))
    for name, value in schema.items():
        if name in _HOLD_ONE:
            yield from _keywords(value)
        elif name in _HOLD_LIST and isinstance(value, list):
            for inner in value:
                yield from _keywords(inner)
        elif name in _HOLD_MAP and isinstance(value, Mapping):
            for inner in value.values():
                yield from _keywords(inner)


# ---------------------------------------------------------------------------- what the first judge leaves to the second


def _compiled(schema: Any) -> Any:
    linear = jsonschema_rs.RegexOptions()
    return jsonschema_rs.validator_for(schema, validate_formats=True, pattern_options=linear, offline=True)


def _matches(pattern: str, text: str) -> bool:
    return bool(_compiled({"pattern": pattern}).is_valid(text))


def _format_checker() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(formats=tuple(_OURS & jsonschema.FormatChecker.checkers.keys()))
    for name in _FORMATS:
        check = _compiled({"format": name})
        checker.checkers = {**checker.checkers, name: (check.is_valid, ())}
    return checker


def _pattern(_: Any, pattern: str, instance: object, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(judge: Any, rules: Mapping[str, Any], instance: object, _: Any) -> Iterator[Any]:
    if isinstance(instance, Mapping):
        for pattern, rule in rules.items():
            for name, value in instance.items():
                if _matches(pattern, name):
                    yield from judge.descend(value, rule, path=name, schema_path=pattern)


def _additional_properties(judge: Any, rule: Any, instance: object, schema: Mapping[str, Any]) -> Iterator[Any]:
    if not isinstance(instance, Mapping):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in instance.items():
        if name in known or any(_matches(pattern, name) for pattern in patterns):
            continue
        if rule is False:
            yield jsonschema.ValidationError(f"the property {name!r} is not allowed")
        else:
            yield from judge.descend(value, rule, path=name)


def _multiple_of(_: Any, divisor: float, instance: object, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, bool) or not isinstance(instance, int | float):
        return
    # As written in decimal: 0.07 is a multiple of 0.01.
    value, by = Decimal(str(instance)), Decimal(str(divisor))
    if (value / by) != (value / by).to_integral_value():
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {divisor}")


def readable(schema: Mapping[str, Any]) -> str:
    """Return a schema as text, in the order in which it was written."""
    return json.dumps(schema, ensure_ascii=False)
