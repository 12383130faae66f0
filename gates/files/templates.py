"""Renders chat templates, which are programs of whoever published the model, only in a child process with limits.

Nothing else in the product renders one. The child has no environment, no open file but its pipes, and the kernel ends
it when it takes too long or too much; what it says is read up to a limit. Rendering depends on its arguments alone:
the clock that a template sees is one of them.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

CPU_SECONDS: Final = 3
WALL_SECONDS: Final = 10
MEMORY_BYTES: Final = 256 * 1024 * 1024
MAX_CHARACTERS: Final = 4 * 1024 * 1024
"""Longest text of one rendering."""
MAX_TEMPLATE_BYTES: Final = 1024 * 1024
MAX_INPUT_BYTES: Final = 16 * 1024 * 1024
MOST_LOST: Final = 2
"""Cases of a template that may kill their child: the rest would take as long each."""
NOON: Final = datetime(2024, 7, 26, 12)  # noqa: DTZ001 - a template prints a clock on the wall
"""What a template's clock says when nobody sets it."""

_CHILD: Final = Path(__file__).with_name("template_child.py")
_LOST: Final = {-9: "template-time", -14: "template-time", -24: "template-time", -25: "template-unsafe"}


class TemplateRefused(ValueError):
    """A rendering that gave no text.

    `code` is one of `template-syntax` (with its line), `template-raised` (the template's own `raise_exception`),
    `template-undefined`, `template-unsafe`, `template-failed` (an operation on a value), `template-time`,
    `template-memory`, `template-too-long`, `template-too-deep`, `template-too-large` and `template-crashed`.
    """

    def __init__(self, code: str, detail: str, line: int | None = None) -> None:
        at = "" if line is None else f" (line {line})"
        super().__init__(f"{detail}{at}")
        self.code, self.detail, self.line = code, detail, line


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation to render.

    `variables` are further names, such as `bos_token`. `strict` refuses every use of an undefined name, as some
    engines do. `now` is what `strftime_now` prints.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    now: datetime = NOON


@dataclass(frozen=True, slots=True)
class Rendering:
    """What became of one case: a text, or why there is none.

    `missing` names what was used and not defined, and `printed` what of that went into the text, as nothing.
    """

    text: str | None
    refused: TemplateRefused | None
    reads_clock: bool = False
    missing: tuple[str, ...] = ()
    printed: tuple[str, ...] = ()


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    strict: bool = False,
    now: datetime = NOON,
) -> str:
    """Return what a chat template makes of a conversation.

    Args:
        template: its source.
        messages: of the conversation.
        tools: as in a chat request.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: further names that the template sees, such as `bos_token`.
        strict: refuse the use of undefined names.
        now: what `strftime_now` prints.

    Raises:
        TemplateRefused: there is no text.
    """
    case = Case(messages, tools, None, add_generation_prompt, variables or {}, strict, now)
    (rendering,) = render_all(template, [case])
    if rendering.text is None:
        raise rendering.refused or TemplateRefused("template-crashed", "it gave no text")
    return rendering.text


def render_all(
    template: str,
    cases: Sequence[Case],
    *,
    cpu_seconds: int = CPU_SECONDS,
    wall_seconds: float = WALL_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    characters: int = MAX_CHARACTERS,
) -> list[Rendering]:
    """Render several conversations with one template, in one child process; a start takes a tenth of a second.

    Args:
        template: its source.
        cases: to render, in order. One that kills the child is refused, and the rest go to a new one; after
            `MOST_LOST` of them the rest are refused alike, untried.
        cpu_seconds: processor time of a child.
        wall_seconds: time of a child by the clock.
        memory_bytes: address space of a child.
        characters: longest text of one rendering; all together may be four times as long.

    Returns:
        One rendering for each case.
    """
    if len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
        refused = TemplateRefused("template-too-large", f"it has more than {MAX_TEMPLATE_BYTES} bytes")
        return [Rendering(None, refused) for _ in cases]
    limits = {
        "cpu_seconds": cpu_seconds,
        "wall_seconds": wall_seconds,
        "memory_bytes": memory_bytes,
        "characters": characters,
        "all_characters": 4 * characters,
    }
    done: list[Rendering] = []
    lost = 0
    while len(done) < len(cases):
        if lost == MOST_LOST:
            return done + done[-1:] * (len(cases) - len(done))
        job = {"template": template, "cases": [_told(case) for case in cases[len(done) :]], "limits": limits}
        done += _run(json.dumps(job).encode(), limits, len(cases) - len(done))
        lost += 1
    return done


def _told(case: Case) -> dict[str, Any]:
    variables = dict(case.variables) | {"messages": case.messages, "add_generation_prompt": case.add_generation_prompt}
    # transformers passes both whether there are any or not.
    variables |= {"tools": case.tools, "documents": case.documents}
    return {"variables": variables, "strict": case.strict, "now": case.now.isoformat()}


def _run(job: bytes, limits: Mapping[str, float], count: int) -> list[Rendering]:
    """Run one child, and return at least one rendering: what it finished, and the refusal of what ended it."""
    if len(job) > MAX_INPUT_BYTES:
        refused = TemplateRefused("template-too-large", f"template and messages have over {MAX_INPUT_BYTES} bytes")
        return [Rendering(None, refused)] * count
    with subprocess.Popen(
        [sys.executable, "-I", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        close_fds=True,
        start_new_session=True,
    ) as child:
        try:
            said, _ = child.communicate(job, timeout=limits["wall_seconds"] + 5)
        except subprocess.TimeoutExpired:
            child.kill()
            said, _ = child.communicate()
        except BaseException:
            child.kill()
            raise
    done = [_rendering(json.loads(line)) for line in said.splitlines() if line.endswith(b"}")][:count]
    if len(done) < count and (child.returncode or not done):
        code = _LOST.get(child.returncode, "template-crashed")
        detail = (
            f"it took longer than {limits['cpu_seconds']} s of processor time or {limits['wall_seconds']} s"
            if code == "template-time"
            else f"its process ended with status {child.returncode}"
        )
        done.append(Rendering(None, TemplateRefused(code, detail)))
    return done


def _rendering(told: Mapping[str, Any]) -> Rendering:
    refused = None
    if "code" in told:
        refused = TemplateRefused(told["code"], told["detail"], told.get("line"))
    return Rendering(told.get("text"), refused, told["clock"], tuple(told["missing"]), tuple(told["printed"]))
