"""Runs the whole product on this machine: `sluicegate up`, which is `python -m workers.embedded`.

Everything lies in one data directory and listens on loopback. Ctrl-C stops it; the next start finds the same data,
ports and tokens. Exit status: 0 stopped as asked, 2 usage, 3 a part cannot be kept running or is not ready in time,
4 not possible here (in use by another process, a port is taken, a package is missing).
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from registry.cli.ending import ended, single
from registry.cli.failures import Exit
from registry.cli.options import examples, finite
from registry.cli.output import Output
from schemas.problems import InternalError, NotPossibleHere, Usage
from workers.embedded import gateway, parts, postgres, processes
from workers.embedded.layout import DataRefused, Layout, write_private
from workers.embedded.logs import CappedLog
from workers.embedded.parts import Options, Stack
from workers.embedded.ports import choose
from workers.embedded.supervisor import Ending, Outcome, Supervisor
from workers.embedded.terminal import Terminal

EXAMPLES: Final = examples("sluicegate up", "sluicegate up --data ./sluicegate-data --port 8080")
DAY: Final = 86_400
STATUSES: Final = {
    Ending.ASKED: Exit.DONE,
    Ending.CRASHING: Exit.UNDECIDED,
    Ending.NOT_READY: Exit.UNDECIDED,
}
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")

Say = Callable[[str], None]


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a name of small letters, digits, dots and dashes")
    return text


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a person asked for."""

    data: str | None
    port: int | None
    gateway_port: int | None
    runner_class: str
    is_with_runner: bool
    project: str
    wait_seconds: float
    drain_seconds: float
    as_json: bool


def main(arguments: list[str]) -> int:
    """Run the stack until it is asked to stop. Returns the exit status."""
    return ended(lambda: single(up, EXAMPLES), arguments, "sluicegate up", as_json="--json" in arguments)


def up(
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="Data directory; $XDG_DATA_HOME/sluicegate when absent.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65_535, help="Port of the API; the one before, or a free one, when absent."),
    ] = None,
    gateway_port: Annotated[
        int | None,
        typer.Option("--gateway-port", min=1, max=65_535, help="Port of the gateway; chosen as that of the API is."),
    ] = None,
    runner_class: Annotated[
        str, typer.Option("--runner-class", callback=_name, help="Class that the runner takes jobs for.")
    ] = "cpu",
    no_runner: Annotated[
        bool, typer.Option("--no-runner", help="Start no runner: other machines run the models.")
    ] = False,
    project: Annotated[
        str, typer.Option("--project", callback=_name, help="Project that the token is for.")
    ] = "default",
    wait_seconds: Annotated[
        float,
        typer.Option("--wait-seconds", min=0, max=DAY, callback=finite, help="Longest time until everything is ready."),
    ] = 120.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds", min=0, max=DAY, callback=finite, help="Time for open streams to end, at Ctrl-C."
        ),
    ] = 30.0,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object when ready; all else goes to standard error."),
    ] = False,
) -> int:
    """Start everything on this machine from one directory, watch over it, and stop it on Ctrl-C.

    PostgreSQL, broker, API, workers, runner and Envoy.
    """
    began = time.monotonic()
    chosen = Chosen(
        data, port, gateway_port, runner_class, not no_runner, project, wait_seconds, drain_seconds, as_json
    )
    # A shell without job control has SIGINT ignored in what a script starts with `&`; `kill -INT` still means this.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        layout = Layout(data_directory(chosen.data))
        layout.prepare()
        with layout.held():
            return run(layout, chosen, began=began)
    except DataRefused as refusal:
        raise (Usage if refusal.status == Exit.INVALID else NotPossibleHere)(str(refusal)) from None
    except KeyboardInterrupt:
        return 0


def run(layout: Layout, chosen: Chosen, *, began: float) -> int:
    """Run the stack of a data directory that this process holds. Returns the exit status."""
    broker = parts.foreign_broker()
    log = CappedLog(layout.logs / "supervisor.log")
    one_at_a_time, terminal = threading.Lock(), Terminal(sys.stderr)

    def say(text: str) -> None:
        with one_at_a_time:
            terminal.tell(f"sluicegate: {text}")
            log.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {text}\n".encode())

    say(f"starts in {layout.root}")
    try:
        return _run(layout, chosen, say, terminal, broker=broker, began=began)
    finally:
        terminal.close()
        log.close()


def _run(layout: Layout, chosen: Chosen, say: Say, terminal: Terminal, *, broker: str | None, began: float) -> int:
    if broker is not None:
        say(f"uses the broker at {urlsplit(broker).hostname}, and starts none")
    processes.end_leftovers(layout.processes, say)
    postgres.prepare(layout, parts.program_environment(layout), say)
    ports = choose(layout.root / "ports.json", api=chosen.port, gateway=chosen.gateway_port)
    options = Options(
        runner_class=chosen.runner_class,
        project=chosen.project,
        is_with_runner=chosen.is_with_runner,
        drain_seconds=chosen.drain_seconds,
        broker=broker,
    )
    stack = Stack(layout, ports, options)
    made = gateway.gateway(layout, ports.gateway)
    envoy = gateway.part(made, parts.program_environment(layout), drain_seconds=options.drain_seconds)
    table = parts.table(stack, envoy)
    write_private(layout.login, json.dumps({"url": stack.url, "token": stack.admin_token}, indent=1) + "\n")
    supervisor = Supervisor(table, logs=layout.logs, record=layout.processes, say=say)
    guard = threading.Thread(target=gateway.watch, args=(made, supervisor.stopping, say), name="guard", daemon=True)
    guard.start()
    told = threading.Event()

    def announce() -> None:
        told.set()
        _announce(stack, is_json=chosen.as_json, seconds=time.monotonic() - began)

    outcome = supervisor.run(announce, wait_seconds=chosen.wait_seconds)
    _end_engines(layout, say)
    layout.clear()
    _report(outcome, say, terminal)
    if chosen.as_json and outcome.ending is not Ending.ASKED and not told.is_set():
        Output(as_json=True).refuse(InternalError(outcome.reason, log_tail=list(outcome.tail)))
    return STATUSES[outcome.ending]


def data_directory(asked: str | None) -> Path:
    """Return the data directory that a person names, or that of one who names none.

    Raises:
        DataRefused: it lies in a home directory, and there is none.
    """
    home = Path(os.environ.get("XDG_DATA_HOME", ""))
    try:
        if asked is not None:
            return Path(asked).expanduser().resolve()
        return ((home if home.is_absolute() else Path("~/.local/share").expanduser()) / "sluicegate").resolve()
    except RuntimeError as error:
        raise DataRefused(f"{error} Name a data directory with --data", status=2) from error


def _end_engines(layout: Layout, say: Say) -> None:
    """End the engines; a person who is in a hurry ends them at once."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        processes.end_engines(layout.runner, say)
    except KeyboardInterrupt:
        processes.end_engines(layout.runner, say, grace_seconds=0.0)
    finally:
        signal.signal(signal.SIGTERM, before)


def _announce(stack: Stack, *, is_json: bool, seconds: float) -> None:
    layout = stack.layout
    if is_json:
        facts = {
            "url": stack.url,
            "token": stack.admin_token,
            "gateway_url": stack.gateway_url,
            "project": stack.options.project,
            "runner_class": stack.options.runner_class if stack.options.is_with_runner else None,
            "data": str(layout.root),
            "logs": str(layout.logs),
            "pid": os.getpid(),
            "ready_seconds": round(seconds, 3),
        }
        text = json.dumps(facts)
    else:
        text = (
            f"\nSluicegate is ready after {seconds:.1f} s.\n\n"
            f"  API      {stack.url}\n"
            f"  gateway  {stack.gateway_url}\n"
            f"  token    {stack.admin_token}\n"
            f"  data     {layout.root}\n"
            f"  logs     {layout.logs}\n\n"
            f"  export SLUICEGATE_URL={stack.url} SLUICEGATE_TOKEN={stack.admin_token}\n\n"
            "Ctrl-C stops it.\n"
        )
    answer = Terminal(sys.stdout)
    answer.tell(text)
    answer.close()


def _report(outcome: Outcome, say: Say, terminal: Terminal) -> None:
    if outcome.ending is Ending.ASKED:
        say("stopped")
        return
    say(outcome.reason)
    if outcome.tail:
        terminal.tell("\n".join(["Its last lines:", *(f"  {line}" for line in outcome.tail)]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
