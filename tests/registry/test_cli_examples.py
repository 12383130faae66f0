"""Every example of a help text and of the README is a command line that the command understands."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

from registry.cli import program
from registry.cli.ending import single
from workers.demo import __main__ as demo
from workers.embedded import __main__ as embedded

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
ROOT = typer.main.get_command(program.app)
# What these two are started with is read by the program that they become.
STARTED = {"up": single(embedded.up, embedded.EXAMPLES), "demo": single(demo.demo, demo.EXAMPLES)}


def lines_of(text: str) -> list[str]:
    """Return the command lines of ours in a text: without comments, redirections and variables before them."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = []
    for line in joined.splitlines():
        plain = re.sub(r"\s+#\s.*$", "", line).strip()
        match = re.match(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(sluicegate .*)$", plain)
        if match:
            found.append(re.sub(r" [<>] ?\S+$", "", match[1]))
    return found


def blocks() -> list[str]:
    """Return the command lines of the README's shell blocks."""
    return [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in lines_of(block)]


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return every command with its path, groups too."""
    below = getattr(command, "commands", {})
    return [(path, command), *(found for name, one in below.items() for found in leaves(one, (*path, name)))]


def parse(line: str) -> None:
    """Read a command line as the program would, up to where it would begin to act."""
    words = shlex.split(line)[1:]
    command, context = ROOT, None
    while words and words[0] in getattr(command, "commands", {}):
        context = command.make_context(words[0], [], parent=context, resilient_parsing=True)
        command = command.commands[words.pop(0)]
        if command.name in STARTED and context.parent is None:
            command = STARTED[command.name]
            break
    if words in (["--help"], ["--version"], ["--install-completion"]):
        return
    command.make_context(str(command.name), words, parent=context)


@pytest.mark.parametrize("path", [path for path, _ in leaves(ROOT)], ids=lambda path: " ".join(path) or "all")
def test_the_examples_of_a_help_text_are_understood(path):
    command = STARTED[path[0]] if path and path[0] in STARTED else dict(leaves(ROOT))[path]
    shown = lines_of(command.epilog or "")
    assert shown or path == () or getattr(command, "commands", None)
    for line in shown:
        parse(line)


@pytest.mark.parametrize("path", [path for path, _ in leaves(ROOT)], ids=lambda path: " ".join(path) or "all")
def test_help_fits_eighty_columns_and_calls_values_by_what_they_are(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = program.command_line()
    command = STARTED[path[0]] if path and path[0] in STARTED else dict(leaves(told))[path]
    context = command.make_context(" ".join(("sluicegate", *path)), [], resilient_parsing=True)
    # Examples are one line each: they are there to be copied.
    shown = command.get_help(context).partition("Examples:")[0]
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert re.findall(r"<(?:str|int|float|path|list)\b.*?>|list\[", shown) == []
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    written = [one.metavar if one.required else f"[{one.metavar}]" for one in arguments]
    usage = " ".join(shown.partition("Usage:")[2].partition("\n\n")[0].split())
    assert usage == " ".join(["sluicegate", *path, *_options(command), *written, *_below(command)])
    listed = shown.partition("Arguments:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (\S+)(?:  |$)", listed, re.MULTILINE) == [one.metavar for one in arguments]


def _options(command: Any) -> list[str]:
    return ["[OPTIONS]"] if command.params or command.add_help_option else []


def _below(command: Any) -> list[str]:
    return ["COMMAND", "[ARGS]..."] if getattr(command, "commands", None) else []


def test_the_examples_of_the_readme_are_understood():
    shown = blocks()
    assert len(shown) > 40
    for line in shown:
        parse(line)


def test_an_example_that_is_wrong_is_not_understood():
    for line in ("sluicegate release list --nope", "sluicegate release approve", "sluicegate up --nope"):
        with pytest.raises((TyperException, SystemExit)):
            parse(line)
