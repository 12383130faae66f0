"""The load gate: open-loop requests at planned instants, and what their latencies prove.

Requests are sent from the suite's stored plan whether or not earlier ones have ended, and latencies count from the
planned instant: one stall then shows in every request that it delayed, where a closed loop would have sent, and
counted, none of them. The warm-up goes over into the measured window without a pause.

The generator is a process of its own. Measured on two cores against llama.cpp, 50 requests of 32 tokens a second: in
a thread beside one other busy Python thread it sent p99 86 ms late and made a TTFT p90 of 100 ms out of 11 ms, since
both share one interpreter lock; as a process, with the same busy thread in the parent, p99 14 ms and TTFT p90 16 ms.
A runner has such threads: it renews leases, hashes files and reports.

`measure` returns `{"columns", "warmup", "requests", "harness", "engine_pids"}`: rows of `gates.load_records.COLUMNS`,
and what the generator says about itself. `gates.load_judgement` turns them into a verdict.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from gates import load_client
from gates.endpoint import Endpoint
from gates.errors import InstrumentError
from gates.gate import Gate, GateContext, Records
from gates.load_judgement import judge
from gates.stats import percentile_label
from schemas.bundle import COMPONENTS
from schemas.policy import LoadRule
from schemas.suite import Arrival, LoadSuite

CAP: Final = 4096
"""Requests in flight beyond which the generator drops one, which counts as failed."""
START_SECONDS: Final = 60.0
"""Given to the generator to start and to write its records, beyond the plan."""
SILENCE_SECONDS: Final = 45.0
"""It reports every second; after so long without a word it is taken for dead."""


def measure(context: GateContext) -> Records:
    """Run the suite's plan against the engine.

    Raises:
        InstrumentError: no load rule, suite or endpoint was given, or the generator did not run to its end.
    """
    rule, suite, endpoint = context.rule, context.suite, context.endpoint
    if not isinstance(rule, LoadRule) or not isinstance(suite, LoadSuite):
        raise InstrumentError("The load gate needs a load rule and a load suite.")
    if not isinstance(endpoint, Endpoint):
        raise InstrumentError("The load gate needs a running engine.")
    before = context.process_id()
    label = percentile_label(rule.percentile)
    work = job(endpoint, suite, percentile=float(rule.percentile), engine_pid=before)
    records = _run(work, lambda line: context.progress(_progress(line, label)))
    return {**records, "engine_pids": [before, context.process_id()]}


def job(endpoint: Endpoint, suite: LoadSuite, *, percentile: float, engine_pid: int | None = None) -> dict[str, Any]:
    """Return what `gates.load_client` is told: where, what and when."""
    return {
        "base_url": endpoint.base_url,
        "model": endpoint.model,
        "dialect": endpoint.dialect.name,
        "headers": endpoint.headers,
        "request_seconds": float(suite.request_seconds),
        "cap": CAP,
        "salt": suite.salt,
        "percentile": percentile,
        "engine_pid": engine_pid,
        "prompts": {
            prompt.id: {
                "messages": [message.model_dump(mode="json") for message in prompt.messages],
                "max_tokens": prompt.max_tokens,
            }
            for prompt in suite.prompts
        },
        "warmup": _pairs(suite.warmup),
        "plan": _pairs(suite.plan),
    }


def _pairs(arrivals: list[Arrival]) -> list[list[int | str]]:
    return [[arrival.at_us, arrival.prompt] for arrival in arrivals]


def _run(work: Mapping[str, Any], progress: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Run the generator and return its records; it never outlives this call, whatever `progress` raises."""
    planned = (work["warmup"][-1][0] + work["plan"][-1][0]) / 1e6
    deadline = time.monotonic() + planned + work["request_seconds"] + START_SECONDS
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
        told.write(json.dumps(work).encode())
        told.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", load_client.__name__, str(os.getpid())],
            stdin=told,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=Path(__file__).parents[1],  # where `gates` is found, installed or not
            start_new_session=True,  # Ctrl-C is for the runner, which ends it
        )
        try:
            for line in _lines(process, deadline):
                if "records" in line:
                    return dict(line["records"])
                progress(line["progress"])
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        said.seek(0, os.SEEK_END)
        said.seek(max(0, said.tell() - 2000))
        last = said.read().decode("utf-8", "replace").strip().splitlines()
    raise InstrumentError(f"The load generator ended without records: {last[-1] if last else 'it said nothing'}.")


def _lines(process: "subprocess.Popen[bytes]", deadline: float) -> Iterator[dict[str, Any]]:
    """Yield what the generator writes, until it ends.

    Raises:
        InstrumentError: it is silent for too long, or runs beyond the deadline.
    """
    pipe: IO[bytes] | None = process.stdout
    if pipe is None:
        return
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(min(left, SILENCE_SECONDS)):
                raise InstrumentError("The load generator hung; run the gate again on a machine with a free core.")
            chunk = os.read(pipe.fileno(), 1 << 20)
            if not chunk:
                return
            *ended, rest = chunk.split(b"\n")
            for piece in ended:
                yield json.loads(b"".join([*parts, piece]))
                parts = []
            parts.append(rest)


def _progress(line: Mapping[str, Any], label: str) -> str:
    text = f"load {line['finished']}/{line['of']}"
    if line["ttft_us"] is not None:
        text += f", {label} TTFT {line['ttft_us'] / 1000:.0f} ms"
    return f"{text}, {line['failed']} failed" if line["failed"] else text


GATE = Gate("load", version=1, depends_on=tuple(COMPONENTS), measure=measure, judge=judge)
