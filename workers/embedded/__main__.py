"""Runs the whole product on this machine: `sluicegate up`, which is `python -m workers.embedded`.

Everything lies in one data directory and listens on loopback. Ctrl-C stops it; the next start finds the same data,
ports and tokens. Exit status: 0 stopped as asked, 1 a part cannot be kept running, 2 usage, 3 not ready in time,
4 not possible here (in use by another process, a port is taken, a package is missing).
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from workers.embedded import gateway, parts, postgres, processes
from workers.embedded.layout import DataRefused, Layout, write_private
from workers.embedded.logs import CappedLog
from workers.embedded.parts import Options, Stack
from workers.embedded.ports import choose
from workers.embedded.supervisor import Ending, Outcome, Supervisor

STATUSES: Final = {Ending.ASKED: 0, Ending.CRASHING: 1, Ending.NOT_READY: 3}
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")

Say = Callable[[str], None]


def main(arguments: list[str]) -> int:
    """Run the stack until it is asked to stop. Returns the exit status."""
    began = time.monotonic()
    chosen = _parser().parse_args(arguments)
    # A shell without job control has SIGINT ignored in what a script starts with `&`; `kill -INT` still means this.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        layout = Layout(data_directory(chosen.data))
        layout.prepare()
        with layout.held():
            return run(layout, chosen, began=began)
    except DataRefused as refusal:
        _tell(f"sluicegate: {refusal}")
        return refusal.status
    except KeyboardInterrupt:
        return 0


def run(layout: Layout, chosen: argparse.Namespace, *, began: float) -> int:
    """Run the stack of a data directory that this process holds. Returns the exit status."""
    broker = parts.foreign_broker()
    log = CappedLog(layout.logs / "supervisor.log")
    one_at_a_time = threading.Lock()

    def say(text: str) -> None:
        with one_at_a_time:
            _tell(f"sluicegate: {text}")
            log.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {text}\n".encode())

    say(f"starts in {layout.root}")
    if broker is not None:
        say(f"uses the broker at {urlsplit(broker).hostname}, and starts none")
    processes.end_leftovers(layout.processes, say)
    postgres.prepare(layout, parts.program_environment(layout), say)
    ports = choose(layout.root / "ports.json", api=chosen.port, gateway=chosen.gateway_port)
    options = Options(
        runner_class=chosen.runner_class,
        project=chosen.project,
        is_with_runner=not chosen.no_runner,
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
    outcome = supervisor.run(
        lambda: _announce(stack, is_json=chosen.json, seconds=time.monotonic() - began),
        wait_seconds=chosen.wait_seconds,
    )
    _end_engines(layout, say)
    layout.clear()
    _report(outcome, say)
    log.close()
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
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(text, flush=True)


def _report(outcome: Outcome, say: Say) -> None:
    if outcome.ending is Ending.ASKED:
        say("stopped")
        return
    say(outcome.reason)
    if outcome.tail:
        _tell("\n".join(["Its last lines:", *(f"  {line}" for line in outcome.tail)]))


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone, and the stack must still stop in order
        print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluicegate up",
        description="Start everything on this machine from one directory, watch over it, and stop it on Ctrl-C: "
        "PostgreSQL, broker, API, workers, runner and Envoy.",
        add_help=False,
    )
    add = parser.add_argument_group("Options").add_argument
    add("--data", metavar="DIR", help="Data directory; $XDG_DATA_HOME/sluicegate when absent.")
    add("--port", type=_port, metavar="PORT", help="Port of the API; the one before, or a free one, when absent.")
    add("--gateway-port", type=_port, metavar="PORT", help="Port of the gateway; chosen as that of the API is.")
    add(
        "--runner-class",
        type=_name,
        default="cpu",
        metavar="NAME",
        help="Class that the runner takes jobs for.  [default: %(default)s]",
    )
    add("--no-runner", action="store_true", help="Start no runner: other machines run the models.")
    add(
        "--project",
        type=_name,
        default="default",
        metavar="NAME",
        help="Project that the token is for.  [default: %(default)s]",
    )
    add(
        "--wait-seconds",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="Longest time until everything is ready.  [default: %(default)g]",
    )
    add(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="Time for open streams to end, at Ctrl-C.  [default: %(default)g]",
    )
    add("--json", action="store_true", help="Print one JSON object when ready, and nothing else.")
    add("-h", "--help", action="help", help="Show this message and exit.")
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65_536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of small letters, digits, dots and dashes")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to a day")
    return value


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
