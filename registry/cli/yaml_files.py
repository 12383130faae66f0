"""Reads YAML as if it were JSON: no aliases, no tags, no key twice, and no word that means a truth value by chance."""

import re
from typing import Any

import yaml

_DEPTH = 32


class NotPlainYaml(ValueError):
    """The text is not YAML, or says something that JSON could not."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it ships no types
    """Resolves only what JSON knows. Decimal numbers stay texts, as documents write them: 0.10 is no 0.1."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as the base has it

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise NotPlainYaml(f"uses an alias in line {self.peek_event().start_mark.line + 1}")
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) not in (None, "!"):
            raise NotPlainYaml(f"uses an anchor or a tag in line {event.start_mark.line + 1}")
        self.level = getattr(self, "level", 0) + 1
        if self.level > _DEPTH:
            raise NotPlainYaml(f"is nested deeper than {_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9]{0,17})$", "-+0123456789"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def _mapping(loader: _Loader, node: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, list | dict):
            raise NotPlainYaml(f"has a key in line {key_node.start_mark.line + 1} that is no text")
        text = key_node.value
        if text in found:
            raise NotPlainYaml(f"has the key {text[:100]!r} twice, in line {key_node.start_mark.line + 1}")
        found[text] = loader.construct_object(value_node, deep=True)
    return found


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(raw: bytes, *, limit: int) -> Any:
    """Return what a YAML file says.

    Args:
        raw: its bytes, in UTF-8.
        limit: largest size, in bytes.

    Raises:
        NotPlainYaml: it is larger, no YAML, or says something that JSON could not.
    """
    if len(raw) > limit:
        raise NotPlainYaml(f"is larger than {limit} bytes")
    try:
        return yaml.load(raw.decode(), Loader=_Loader)  # noqa: S506 - a SafeLoader that knows less
    except UnicodeDecodeError as error:
        raise NotPlainYaml(f"is not UTF-8 at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise NotPlainYaml(f"is not YAML: {error.problem}{line}") from None
    except yaml.YAMLError as error:
        raise NotPlainYaml(f"is not YAML: {error}") from None
    except RecursionError:
        raise NotPlainYaml("is nested too deep") from None
