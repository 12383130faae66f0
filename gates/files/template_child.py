"""Renders chat templates inside limits. Runs as a process of its own; `gates.files.templates` starts it.

It is run by its path in an isolated interpreter, so that it imports nothing but the standard library and Jinja2. A
job comes on stdin, one JSON object; for each case a line of JSON goes to stdout. The limits are the kernel's, set
before a template is looked at: processor time, memory, no file longer than nothing, no core. A template that goes over
them ends this process, and what it had rendered before stands.

The environment is that of transformers' `apply_chat_template`: immutable and sandboxed, `trim_blocks`,
`lstrip_blocks`, loop controls, `tojson` that escapes nothing, `raise_exception`, `strftime_now`, and the tag
`generation` around what the assistant says.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from types import CodeType
from typing import Any, TextIO

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, Undefined, UndefinedError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, whose content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content of the tag as a block of its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Raised(TemplateError):
    """The template said `raise_exception`."""


class TooLong(Exception):
    """The text grew over its limit."""


def main() -> None:
    """Read the job, render its cases, and write a line for each."""
    job = json.load(sys.stdin)
    limits = job["limits"]
    _limit(limits)
    out = sys.stdout
    left = limits["all_characters"]
    compiled: list[CodeType] = []
    for case in job["cases"]:
        told = _render(job["template"], compiled, case, min(left, limits["characters"]))
        left -= len(told.get("text", ""))
        _tell(out, told)


def _limit(limits: dict[str, int]) -> None:
    for what, limit in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 8),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    # Ends this process even when the one that started it is no more.
    signal.setitimer(signal.ITIMER_REAL, limits["wall_seconds"])


def _tell(out: TextIO, told: dict[str, Any]) -> None:
    out.write(json.dumps(told) + "\n")
    out.flush()


def _render(source: str, compiled: list[CodeType], case: dict[str, Any], limit: int) -> dict[str, Any]:
    clock = Clock(case["now"])
    missing: list[str] = []
    printed: list[str] = []
    try:
        environment = _environment(clock, missing, printed, strict=case["strict"])
        template = _program(environment, source, compiled)
        pieces, length = list[str](), 0
        for piece in template.generate(**case["variables"]):
            length += len(piece)
            if length > limit:
                raise TooLong
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # half a character is no text
        told: dict[str, Any] = {"text": text}
    except TooLong:
        told = {"code": "template-too-long", "detail": f"the text is longer than {limit} characters"}
    except TemplateSyntaxError as error:
        told = {"code": "template-syntax", "detail": str(error.message), "line": error.lineno}
    except Raised as error:
        told = {"code": "template-raised", "detail": str(error.message)}
    except SecurityError as error:
        told = {"code": "template-unsafe", "detail": str(error)}
    except UndefinedError as error:
        told = {"code": "template-undefined", "detail": str(error.message)}
    except MemoryError:
        told = {"code": "template-memory", "detail": "it needs more memory than it is given"}
    except RecursionError:
        told = {"code": "template-too-deep", "detail": "it is nested deeper than can be read"}
    except Exception as error:  # edge: a template may raise whatever an operation on its values does
        told = {"code": "template-failed", "detail": f"{type(error).__name__}: {error}"}
    told |= {"clock": clock.was_read, "missing": sorted(set(missing))[:100], "printed": sorted(set(printed))[:100]}
    if "detail" in told:
        told["detail"] = told["detail"][:1000]
    return told


def _program(environment: ImmutableSandboxedEnvironment, source: str, compiled: list[CodeType]) -> Template:
    """Return the template. `compiled` keeps its code between cases, since that of a long one takes a tenth of a second.

    Nothing of an environment is in the code: it asks its own for filters, tests and what is undefined.
    """
    if not compiled:
        compiled.append(environment.compile(source))
    return Template.from_code(environment, compiled[0], environment.make_globals(None))


class Clock:
    """The instant that a template sees, and whether it looked."""

    def __init__(self, now: str) -> None:
        self.now = datetime.fromisoformat(now)
        self.was_read = False

    def strftime(self, form: str) -> str:
        """Return the instant in a form of `strftime`."""
        self.was_read = True
        return self.now.strftime(form)


def _environment(
    clock: Clock, missing: list[str], printed: list[str], *, strict: bool
) -> ImmutableSandboxedEnvironment:
    class Seen(Undefined):
        """An undefined value whose use is written down."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            if isinstance(self._undefined_name, str):
                missing.append(self._undefined_name[:200])

        def __str__(self) -> str:
            printed.append(str(self._undefined_name)[:200])
            return ""

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        undefined=StrictUndefined if strict else Seen,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = clock.strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> None:
    raise Raised(str(message))


if __name__ == "__main__":
    main()
