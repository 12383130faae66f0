"""What the load generator adds to what it measures: `python tests/bench/bench_load_client.py [RATE …]`.

A scripted engine in another process streams 32 events, 50 ms to the first and 10 ms apart, and writes into each event
the instant at which it sent it. Both processes read the same monotonic clock, so the difference to the generator's own
instant is the generator's error.
"""

import asyncio
import json
import math
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from gates import arrivals, load_client
from gates.answers import Answer
from tests.support.scripted_engine import DONE, chat_event, usage_event

EVENTS, FIRST_SECONDS, GAP_SECONDS = 32, 0.05, 0.01
RUN_SECONDS = 15


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    due = asyncio.get_running_loop().time() + FIRST_SECONDS
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    writer.write(chat_event(role="assistant", content=None))
    for _ in range(EVENTS):
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        due += GAP_SECONDS
        writer.write(chat_event(f"{time.perf_counter_ns()} "))
    writer.write(chat_event(finish_reason="length") + usage_event(completion_tokens=EVENTS) + DONE)
    await writer.drain()
    writer.close()


async def serve() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Compared(load_client.Generator):
    """A generator that also compares its instants with those that the engine wrote into its events."""

    def _note(self, shot: load_client.Shot, reply: Answer) -> None:
        super()._note(shot, reply)
        told = [int(word) for word in reply.text.split()]
        if len(told) == len(reply.output_ns):
            firsts.append((reply.output_ns[0] - told[0]) / 1e6)
            all_events.extend((seen - sent) / 1e6 for seen, sent in zip(reply.output_ns, told, strict=True))


firsts: list[float] = []
all_events: list[float] = []


def rank(values: list[float], percentile: float) -> float:
    return sorted(values)[max(0, math.ceil(percentile * len(values)) - 1)]


def run(rate: float, port: int) -> str:
    firsts.clear()
    all_events.clear()
    spec = {
        "name": "bench",
        "prompts": [{"id": "one", "messages": [{"role": "user", "content": "ping"}], "max_tokens": EVENTS}],
        "rate_per_second": f"{rate:g}",
        "requests": int(rate * RUN_SECONDS),
        "warmup_requests": int(rate),
        "distribution": "gamma",
        "shape": "1",
        "seed": 11,
        "request_seconds": "30",
    }
    suite = arrivals.make_suite(arrivals.LoadSpec.model_validate(spec))
    job = {
        "base_url": f"http://127.0.0.1:{port}",
        "model": "scripted",
        "dialect": "llamacpp",
        "headers": {},
        "request_seconds": 30.0,
        "cap": 4096,
        "salt": None,
        "percentile": 0.99,
        "prompts": {"one": {"messages": [{"role": "user", "content": "ping"}], "max_tokens": EVENTS}},
        "warmup": [[arrival.at_us, arrival.prompt] for arrival in suite.warmup],
        "plan": [[arrival.at_us, arrival.prompt] for arrival in suite.plan],
    }
    records = asyncio.run(Compared(json.loads(json.dumps(job)), lambda _: None).run())
    rows = [dict(zip(records["columns"], row, strict=True)) for row in records["requests"]]
    lags = [(row["sent_us"] - row["at_us"]) / 1000 for row in rows]
    harness = records["harness"]
    numbers = (
        *(rank(lags, p) for p in (0.5, 0.99, 1.0)),
        *(rank(firsts, p) for p in (0.5, 0.99)),
        rank(all_events, 0.99),
        rank([lag / 1000 for lag in harness["loop_lag_us"]], 0.99),
        harness["cpu_us"] / harness["wall_us"],
    )
    good = sum(row["outcome"] == "ok" for row in rows)
    return f"| {rate:g} | {good}/{len(rows)} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |"


def main(rates: list[float]) -> None:
    load_client.allow_open_files(10_000)
    with subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE) as engine:
        try:
            port = int(engine.stdout.readline()) if engine.stdout else 0
            print(f"precedence: {load_client.take_precedence()}")
            print("| rps | good | lag p50 | lag p99 | lag max | TTFT error p50 | p99 | event p99 | loop p99 | cpu |")
            print("|---|---|---|---|---|---|---|---|---|---|")
            for rate in rates:
                print(run(rate, port), flush=True)
        finally:
            engine.kill()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    else:
        main([float(rate) for rate in sys.argv[1:]] or [20, 50, 100])
