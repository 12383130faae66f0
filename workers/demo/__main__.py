"""Runs the demonstration: `sluicegate demo`, which is `python -m workers.demo`.

A fresh stack in a directory of its own, a real model, live streams through the gateway, and four releases: the first
one, a good successor, one with a broken template, one that is slow where no suite looks. Exit status: 0 everything
came out as it should, 1 it did not, 2 usage, 4 not possible here.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from registry.cli.ending import ended, single
from registry.cli.failures import Exit
from registry.cli.options import examples
from registry.client import Client
from schemas.problems import NotPossibleHere, Problem, Usage
from workers.demo.bundles import ModelMissing, assemble
from workers.demo.follow import Stuck
from workers.demo.people import ActFailed
from workers.demo.report import Outcome, differences
from workers.demo.screen import Screen
from workers.demo.stack import Facts, Stack, StackFailed
from workers.demo.story import Story, Unexpected
from workers.demo.summary import summarise
from workers.demo.traffic import TrafficFailed

EXAMPLES: Final = examples("sluicegate demo", "sluicegate demo --keep", "sluicegate demo --json result.json")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a person asked for."""

    keep: bool
    data: Path | None
    port: int | None
    gateway_port: int | None
    model: Path | None
    file: Path | None


def main(arguments: list[str]) -> int:
    """Run the demonstration. Returns the exit status."""
    return ended(lambda: single(demo, EXAMPLES), arguments, "sluicegate demo", as_json=False)


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the stack up at the end, until Ctrl-C.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DIR", help="Directory for everything, and it stays; a temporary one when absent."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65_535, help="Port of the API; a free one when absent.")
    ] = None,
    gateway_port: Annotated[
        int | None,
        typer.Option("--gateway-port", min=1, max=65_535, help="Port of the gateway; a free one when absent."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="Another GGUF file; Gemma 3 270M of its package when absent."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was found to a file, as JSON.")
    ] = None,
) -> int:
    """Release a real model four times on a stack of its own, under live traffic.

    The first is promoted and replaced, the second promoted, the third rejected, the fourth rolled back.
    """
    chosen = Chosen(keep, data, port, gateway_port, model, file)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have had Ctrl-C ignored; both stop the stack too
        signal.signal(number, signal.default_int_handler)
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise Usage(f"--json: {file} cannot be written")  # said now, not after minutes
    root = Path(tempfile.mkdtemp(prefix="sluicegate-demo-")) if data is None else data.absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise Usage(f"{root} is not empty; name a new folder with --data")
    except OSError as error:
        raise NotPossibleHere(f"{root} cannot be used: {error.strerror}; name another folder with --data") from error
    with Screen() as screen:
        run = _Run(chosen, root, screen)
        status = run.guarded()
    if data is None:
        _clear(root, keep_logs=status not in (Exit.DONE, Exit.INTERRUPTED))
    return status


class _Run:
    def __init__(self, chosen: Chosen, root: Path, screen: Screen) -> None:
        self.chosen = chosen
        self.root = root
        self.screen = screen
        self.outcome = Outcome()
        ports = (("--port", chosen.port), ("--gateway-port", chosen.gateway_port))
        self.stack = Stack(root, *(word for name, value in ports if value is not None for word in (name, str(value))))

    def guarded(self) -> int:
        """Run, stop the stack whatever happened, and return the exit status."""
        try:
            return self._whole()
        except KeyboardInterrupt:
            return Exit.INTERRUPTED  # which is said where commands end
        except ModelMissing as missing:
            return self._failed(str(missing), Exit.REFUSED)
        except StackFailed as failed:
            return self._failed(str(failed), Exit.REFUSED)
        except (Stuck, ActFailed, TrafficFailed) as failed:
            return self._failed(f"{failed}\n{self.stack.last_words()}", Exit.FAILED)
        except Problem as problem:
            return self._failed(f"{problem.title}: {problem.detail}\n{self.stack.last_words()}", Exit.FAILED)
        finally:
            self.screen.now("stopping the stack")
            with suppress(KeyboardInterrupt):  # a second Ctrl-C; the first one is still being obeyed
                self.stack.stop()
            self.screen.rest()

    def _failed(self, why: str, status: int) -> int:
        self.screen.rest()
        self.screen.space()
        self.screen.line("the demonstration did not come to its end:", "bad")
        self.screen.text(why, "bad")
        self._advise()
        return status

    def _advise(self) -> None:
        """Say where to look on, and whether the machine itself may be the reason."""
        self.screen.line(f"logs are in {self.stack.logs} and {self.stack.said}", "warn")
        if (busy := load_of_machine()) is not None:
            self.screen.line(f"{busy}: a good bundle may be too slow then; run it again on a quieter one", "warn")

    def _whole(self) -> int:
        screen = self.screen
        screen.line("Sluicegate's demonstration: four releases of Gemma 3 270M under live traffic")
        if (busy := load_of_machine()) is not None:
            self.outcome.busy = busy
            screen.line(f"{busy}: everything takes longer", "warn")
        screen.chapter("A fresh stack, and the model")
        model, self.outcome.model_sha256 = assemble(self.root, self.chosen.model)
        screen.line(f"model of {model.stat().st_size / 1e6:,.0f} MB, SHA-256 {self.outcome.model_sha256}")
        facts = self.stack.start()
        screen.line(f"PostgreSQL, Valkey, API, workers, runner and Envoy are ready after {facts.ready_seconds:.1f} s")
        with Client(facts.url, facts.token) as client:
            story = Story(self.stack, facts, client, self.root, model, screen, self.outcome)
            try:
                self._tell(story)
            finally:
                story.end_traffic()
        return self._conclude(facts)

    def _tell(self, story: Story) -> None:
        chapters: tuple[tuple[str, Callable[[], None]], ...] = (
            ("Rules, a target, and the reference", story.prepare),
            ("(a) The first bundle", story.first),
            ("(b) A good successor", story.successor),
            ("(c) A broken template", story.broken),
            ("(d) Slow where no suite looks", story.slow),
        )
        try:
            for title, chapter in chapters:
                self.screen.chapter(title)
                chapter()
        except Unexpected as unexpected:
            self.screen.line(str(unexpected), "bad")
        self.screen.chapter("Evidence")
        story.finish()
        self.screen.end_chapter()

    def _conclude(self, facts: Facts) -> int:
        self.screen.rest()
        self.outcome.busy = load_of_machine() or self.outcome.busy
        different = differences(self.outcome)
        summarise(self.screen, self.outcome, different)
        if different:
            self._advise()
        if self.chosen.file is not None:
            self.chosen.file.write_text(json.dumps(self.outcome.document(), indent=2) + "\n", encoding="utf-8")
        if self.chosen.keep:
            self._keep(facts)
        return Exit.FAILED if different else Exit.DONE

    def _keep(self, facts: Facts) -> None:
        screen = self.screen
        screen.space()
        screen.text(f"The stack stays up. The last release: {facts.url}/releases/{self.outcome.releases[-1].id}")
        screen.text(f"Log in there with this token: {facts.token}")
        screen.text(f"On the command line: export SLUICEGATE_URL={facts.url} SLUICEGATE_TOKEN={facts.token}")
        screen.text("Ctrl-C ends it.")
        with suppress(KeyboardInterrupt):
            while True:
                self.stack.check()
                time.sleep(1.0)


def load_of_machine() -> str | None:
    """Say how busy this machine is when more than its processors can bear; None when it is not."""
    load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"this machine is busy (load {load:.1f} on {processors} processors)" if load > processors else None


def _clear(root: Path, *, keep_logs: bool) -> None:
    """Remove a temporary folder; after a failure its logs stay."""
    if not keep_logs:
        shutil.rmtree(root, ignore_errors=True)
        return
    for folder in (root / "bundles", root / "home"):
        shutil.rmtree(folder, ignore_errors=True)
    for path in [root / "model.gguf", *(root / "stack").glob("*")]:
        if path.name in ("logs", "runner"):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in (root / "stack" / "runner").rglob("*.gguf"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
