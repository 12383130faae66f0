"""The generator of an open-loop load: one event loop owns the schedule. A job comes on stdin, records go to stdout.

    python -m gates.load_client [PARENT_PID] < job.json

It runs as a process of its own; `gates.load` says why. Every output line is a JSON object: `{"progress": …}` about
once a second, at the end `{"records": …}`. With PARENT_PID it ends as soon as that process does.

How it keeps itself out of what it measures:

- Arrivals are absolute monotonic instants, so that a late one delays none after it. Nothing limits concurrency but
  a cap that drops and counts.
- A request is built before its instant; its answer is read when it is over, from instants taken as bytes arrived.
- The garbage collector rests while requests are in flight.
- Where the system allows it (root, CAP_SYS_NICE or RLIMIT_RTPRIO), the process runs under SCHED_RR, so that a machine
  full of other work does not hold it up. Measured with 15 runnable processes on two cores, an overloaded llama.cpp
  among them: sent p99 1.2–3.7 ms late, as against 44–4261 ms without and 35–1713 ms with a nice value of −15. It
  takes a quarter of a core from the engine at most, as a client on the same machine does; it says which it had.

All times are whole microseconds from the start of the measured window; the warm-up lies before 0.
"""

import asyncio
import gc
import hashlib
import json
import math
import os
import resource
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import aiohttp

from gates.answers import Answer
from gates.dialects.base import Request
from gates.dialects.table import DIALECTS
from gates.endpoint import Endpoint
from gates.machine import Processors

LEAD_SECONDS: Final = 0.1
"""Between being ready and the first arrival."""
LAG_INTERVAL_SECONDS: Final = 0.02
MAX_LAG_SAMPLES: Final = 20_000
PROGRESS_SECONDS: Final = 1.0
RECENT: Final = 1_000
"""Finished requests that a progress line looks at."""
SPARE_FILES: Final = 64
"""Open files that the process needs besides its connections."""
DETAIL: Final = 200


@dataclass(slots=True)
class Shot:
    """One request. Instants are in microseconds, see the module, and None when they never came.

    `at_us` planned; `sent_us` taken up by the schedule and handed to the socket; `headers_us` answer begun;
    `event_us` first event; `token_us` and `last_us` first and last event with output; `finish_us` the event with
    the finish reason; `done_us` the end, good or bad. `outcome` is that of `gates.answers`, or `dropped`. `events`
    counts events with output; `output` is the SHA-256 of everything generated.
    """

    number: int
    prompt: str
    at_us: int
    sent_us: int | None = None
    headers_us: int | None = None
    event_us: int | None = None
    token_us: int | None = None
    last_us: int | None = None
    finish_us: int | None = None
    done_us: int | None = None
    status: int | None = None
    outcome: str | None = None
    detail: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    events: int = 0
    output: str | None = None


COLUMNS: Final = tuple(column.name for column in fields(Shot))
"""A row of the records; `gates.load_records.COLUMNS` is the same."""


def salted(salt: str, number: int) -> str:
    """Return the text before a request's prompt: no two requests share more than its first characters."""
    mark = hashlib.sha256(f"{salt} {number}".encode()).hexdigest()[:12]
    return f"{mark} {salt} {number}\n"


@dataclass(slots=True)
class Generator:
    """One run of a job.

    The job holds `base_url`, `model`, `dialect` (its name), `headers`, `request_seconds` (from the planned instant),
    `cap` (requests in flight beyond which one is dropped), `salt` or None, `percentile` (of progress lines),
    `engine_pid` or None (whose processor time is not foreign),
    `prompts` (id → {"messages", "max_tokens"}), `warmup` and `plan` (pairs of at_us and prompt id, in order; the
    warm-up has at least one).
    """

    job: Mapping[str, Any]
    emit: Callable[[dict[str, Any]], None]
    origin_ns: int = 0
    in_flight: int = 0
    in_flight_max: int = 0
    failed: int = 0
    finished: list[Shot] = field(default_factory=list)
    lags_us: list[int] = field(default_factory=list)

    async def run(self) -> dict[str, Any]:
        """Send the whole plan, wait for every end, and return the records."""
        warmup, plan = self.job["warmup"], self.job["plan"]
        start_us = warmup[-1][0]
        arrivals = [(at_us - start_us, prompt) for at_us, prompt in warmup] + [tuple(arrival) for arrival in plan]
        shots = [Shot(number, prompt, at_us) for number, (at_us, prompt) in enumerate(arrivals)]
        endpoint = Endpoint(
            self.job["base_url"], self.job["model"], DIALECTS[self.job["dialect"]], headers=self.job["headers"]
        )
        async with endpoint:
            processors = self._processors()
            self.origin_ns = time.perf_counter_ns() + int(LEAD_SECONDS * 1e9) + start_us * 1000
            origin_unix_us = (time.time_ns() + self.origin_ns - time.perf_counter_ns()) // 1000
            helpers = [asyncio.create_task(self._watch_lag(shots[-1].at_us)), asyncio.create_task(self._report(shots))]
            began, cpu = time.perf_counter(), time.process_time()
            await self._send_all(endpoint, shots)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            machine = self._processors().since(processors)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        rows = [[getattr(shot, column) for column in COLUMNS] for shot in shots]
        return {
            "columns": list(COLUMNS),
            "warmup": rows[: len(warmup)],
            "requests": rows[len(warmup) :],
            "harness": {
                "loop_lag_us": self.lags_us,
                "cpu_us": round(cpu * 1e6),
                "wall_us": round(wall * 1e6),
                "in_flight_max": self.in_flight_max,
                "cap": self.job["cap"],
                "has_precedence": os.sched_getscheduler(0) == os.SCHED_RR,
                "machine": machine,
                "origin_unix_us": origin_unix_us,
                "client": f"aiohttp {aiohttp.__version__}, Python {sys.version.split()[0]}",
            },
        }

    def _processors(self) -> Processors:
        # Who started this generator measures too; what else it started, it did not start for this run.
        return Processors.look(engines=(self.job["engine_pid"],), own=(os.getpid(), os.getppid()))

    def _since_us(self, instant_ns: int | None) -> int | None:
        return None if not instant_ns else (instant_ns - self.origin_ns) // 1000

    def _wait_seconds(self, shot: Shot) -> float:
        return shot.at_us / 1e6 - (time.perf_counter_ns() - self.origin_ns) / 1e9

    def request(self, endpoint: Endpoint, shot: Shot) -> Request:
        """Build a request: every sampling field named, no reuse of an earlier prompt asked for, salt in front."""
        prompt, salt = self.job["prompts"][shot.prompt], self.job["salt"]
        messages = prompt["messages"]
        if salt is not None:
            first = messages[0]
            messages = [{**first, "content": salted(salt, shot.number) + first["content"]}, *messages[1:]]
        return endpoint.dialect.chat(endpoint.model, messages, max_tokens=prompt["max_tokens"], stream=True)

    async def _send_all(self, endpoint: Endpoint, shots: list[Shot]) -> None:
        running: set[asyncio.Task[None]] = set()
        for shot in shots:
            request = self.request(endpoint, shot)
            # Sleeps even when it is late already: requests that were started must get their turn.
            await asyncio.sleep(max(0.0, self._wait_seconds(shot)))
            if self.in_flight >= self.job["cap"]:
                shot.outcome, shot.done_us = "dropped", self._since_us(time.perf_counter_ns())
                self._finish(shot)
                continue
            self.in_flight += 1
            self.in_flight_max = max(self.in_flight_max, self.in_flight)
            task = asyncio.create_task(self._send(endpoint, shot, request))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def _send(self, endpoint: Endpoint, shot: Shot, request: Request) -> None:
        left = self.job["request_seconds"] + self._wait_seconds(shot)
        answer = await endpoint.generate(request, timeout_seconds=max(0.001, left))
        self.in_flight -= 1
        self._note(shot, answer)
        self._finish(shot)

    def _note(self, shot: Shot, answer: Answer) -> None:
        shot.sent_us = self._since_us(answer.sent_ns)
        shot.headers_us = self._since_us(answer.headers_ns)
        shot.event_us = self._since_us(answer.first_event_ns)
        shot.token_us = self._since_us(answer.first_token_ns)
        shot.last_us = self._since_us(answer.last_token_ns)
        shot.finish_us = self._since_us(answer.finish_ns)
        shot.done_us = self._since_us(answer.done_ns)
        shot.status = answer.status
        shot.outcome = answer.outcome.value
        shot.detail = answer.detail[:DETAIL] or None
        shot.finish_reason = answer.finish_reason
        if answer.usage is not None:
            shot.prompt_tokens = answer.usage.prompt_tokens
            shot.completion_tokens = answer.usage.completion_tokens
            shot.cached_tokens = answer.usage.cached_tokens
        shot.events = len(answer.output_ns)
        shot.output = answer.digest

    def _finish(self, shot: Shot) -> None:
        self.failed += shot.outcome != "ok"
        self.finished.append(shot)

    async def _watch_lag(self, last_us: int) -> None:
        """Sample how much later than asked this loop wakes: what every instant may be off by."""
        duration = LEAD_SECONDS + last_us / 1e6 + self.job["request_seconds"]
        interval = max(LAG_INTERVAL_SECONDS, duration / MAX_LAG_SAMPLES)
        while True:
            due = time.perf_counter() + interval
            await asyncio.sleep(interval)
            self.lags_us.append(max(0, round((time.perf_counter() - due) * 1e6)))

    async def _report(self, shots: list[Shot]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            first = len(self.job["warmup"])
            recent = sorted(ttft_us(shot) for shot in self.finished[-RECENT:] if shot.number >= first)
            rank = max(0, math.ceil(self.job["percentile"] * len(recent)) - 1)
            value = recent[rank] if recent else math.inf
            line = {"finished": len(self.finished), "failed": self.failed, "of": len(shots)}
            self.emit({"progress": line | {"ttft_us": value if math.isfinite(value) else None}})


def ttft_us(shot: Shot) -> float:
    """Return the time from the planned instant to the first output, infinite for a failed request."""
    return math.inf if shot.outcome != "ok" or shot.token_us is None else shot.token_us - shot.at_us


def end_with(pid: int) -> None:
    """End this process as soon as another one does, so that no load outlives the run it belongs to."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def allow_open_files(wanted: int) -> bool:
    """Raise the limit on open files as far as needed; False when the system does not let it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return False
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


def take_precedence() -> bool:
    """Let this process run as soon as it can; False when the system does not let it."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def write(line: Mapping[str, Any]) -> None:
    """Write one line to stdout."""
    sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Read the job from stdin, run it, write the records."""
    if arguments:
        end_with(int(arguments[0]))
    job = json.load(sys.stdin)
    if not allow_open_files(job["cap"] + SPARE_FILES):
        sys.stderr.write(f"{job['cap'] + SPARE_FILES} open files are needed; raise the limit (ulimit -n)\n")
        return 1
    gc.collect()
    gc.freeze()
    gc.disable()
    has_precedence = take_precedence()
    records = asyncio.run(Generator(job, write).run())
    if has_precedence:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # writing is no measurement
    write({"records": records})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
