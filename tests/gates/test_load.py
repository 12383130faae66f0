import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gates import arrivals, catalog, crowding, load, load_client, load_records
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from gates.errors import InstrumentError
from gates.gate import GateContext
from schemas.policy import LoadRule
from schemas.result import Severity, Verdict
from tests.support import chain
from tests.support.engine import chain_engine
from tests.support.load_engine import load_engine
from tests.support.scripted_engine import DONE, Script, chat_event, chat_stream, usage_event

WARMUP = 4


def load_suite(**changes):
    spec = {
        "name": "chat",
        "prompts": [{"id": "ping", "messages": [{"role": "user", "content": "ping"}], "max_tokens": 400}],
        "rate_per_second": "30",
        "requests": 64,
        "warmup_requests": WARMUP,
        "distribution": "gamma",
        "shape": "1",
        "seed": 5,
        "request_seconds": "5",
    } | changes
    return arrivals.make_suite(arrivals.LoadSpec.model_validate(spec))


def load_rule(suite, **changes):
    # The machine that runs the tests is busy: latencies of a fault are far beyond these bounds, so is the lag.
    body = {
        "gate": "load",
        "suite": suite.digest,
        "percentile": "0.9",
        "confidence": "0.99",
        "requests": len(suite.plan),
        "ttft_ms": 600,
        "tpot_ms": 200,
        "e2e_ms": 2000,
        "attainment_min": "0.9",
        "error_max": "0.06",
        "send_lag_ms": 150,
    }
    return LoadRule.model_validate(body | changes)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    root = chain.write_bundle_directory(tmp_path_factory.mktemp("chain"))
    return chain.describe(root, environment="sha256:" + "0" * 64)


@pytest.fixture
def context(bundle, tmp_path):
    def make(base_url, suite=None, **rule):
        suite = suite or load_suite()
        return GateContext(
            bundle=bundle,
            root=tmp_path,
            rule=load_rule(suite, **rule),
            suite=suite,
            endpoint=Endpoint(base_url, "chain", LLAMACPP),
        )

    return make


def rows(raw):
    records = json.loads(raw)["records"]
    return [dict(zip(records["columns"], row, strict=True)) for row in records["requests"]]


def codes(result):
    return [each.code for each in result.findings if each.severity is not Severity.INFO]


def measured(result, name, statistic=None):
    return next(each for each in result.measurements if each.name == name and statistic in (None, each.statistic))


def decided(context):
    """Run the gate as a policy does: a run that errored because this machine was busy is repeated, twice at most."""
    for _ in range(3):
        result, raw = catalog.run("load", context)
        if result.verdict is not Verdict.ERRORED:
            break
    return result, raw


# ---------------------------------------------------------------------------------------- on the real engine


def test_a_good_bundle_passes_on_the_real_engine(context, tmp_path):
    said = []
    with chain_engine(tmp_path / "engine") as engine:
        given = replace(context(engine.base_url), progress=said.append, process_id=lambda: engine.pid)
        result, raw = decided(given)
    assert result.verdict is Verdict.PASSED, result.summary
    found = rows(raw)
    assert {row["outcome"] for row in found} == {"ok"}
    assert {row["completion_tokens"] for row in found} == {len(chain.ANSWER_IDS)}
    assert {row["prompt_tokens"] for row in found} == {chain.PROMPT_TOKENS}
    assert {row["cached_tokens"] for row in found} == {0}
    assert len({row["output"] for row in found}) == 1
    assert measured(result, "cached_prompt_tokens").value == 0
    assert any(line.startswith("load ") and "/68, p90 TTFT " in line for line in said)
    again = catalog.recompute(raw, given.suite, None, given.bundle)
    assert again == result


def test_a_model_that_no_longer_stops_overloads_the_real_engine_and_fails(context, tmp_path):
    # The end-of-turn token is lost from the chain, so each answer runs to its limit: the same load is too much.
    with chain_engine(
        tmp_path / "engine", extra=chain.endless(start="\n"), max_sequences=1, context_tokens=512
    ) as engine:
        result, raw = decided(context(engine.base_url))
    assert result.verdict is Verdict.FAILED, result.summary
    assert "ttft-over-bound" in codes(result)
    assert {row["completion_tokens"] for row in rows(raw) if row["outcome"] == "ok"} == {400}


def test_an_engine_that_dies_during_the_load_fails(context, tmp_path):
    with chain_engine(tmp_path / "engine") as engine:
        given = replace(
            context(engine.base_url),
            progress=lambda _: kill(engine.pid),
            process_id=lambda: engine.pid if is_running(engine.pid) else None,
        )
        result, raw = decided(given)
    assert result.verdict is Verdict.FAILED, result.summary
    assert {"engine-died", "too-many-errors"} <= set(codes(result))
    assert "connect" in {row["outcome"] for row in rows(raw)}


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# --------------------------------------------------------------------------------- faults of engines, scripted

GOOD = Script(chunks=chat_stream("H", "i"))


def test_a_scripted_engine_without_a_fault_passes(context):
    with load_engine(lambda _: GOOD) as engine:
        result, _ = decided(context(engine.base_url))
    assert result.verdict is Verdict.PASSED, result.summary
    assert [each.code for each in result.findings] == ["cache-unknown"]


def test_the_first_token_is_not_the_role(context):
    # Class 7: role at once, text after 300 ms.
    events = chat_stream("H", "i")
    role_first = Script(chunks=[events[0], b"".join(events[1:])], pause_seconds=0.3)
    with load_engine(lambda _: role_first) as engine:
        result, raw = decided(context(engine.base_url, ttft_ms=250, send_lag_ms=100))
    assert result.verdict is Verdict.FAILED, result.summary
    assert codes(result)[0] == "ttft-over-bound"
    waits = sorted((row["token_us"] - row["sent_us"]) / 1000 for row in rows(raw))
    assert waits[0] >= 300
    assert all(row["event_us"] < row["token_us"] - 200_000 for row in rows(raw))


def test_failed_requests_are_infinite_and_fail(context):
    # Class 6: every third request is refused at once, the rest is fast.
    broken = Script.json({"error": {"message": "no memory"}}, 500)
    with load_engine(lambda number: broken if number % 3 == 0 else GOOD) as engine:
        result, raw = decided(context(engine.base_url))
    assert result.verdict is Verdict.FAILED
    assert "p90 TTFT is infinite" in result.summary
    assert measured(result, "ttft", "p90").infinite == sum(row["outcome"] == "http_5xx" for row in rows(raw))
    assert next(each for each in result.findings if each.code == "request-http-5xx").found == "500: no memory"


def test_a_run_that_others_kept_from_the_processors_does_not_fail_the_candidate(context):
    suite = load_suite(rate_per_second="60")
    # The scripted engine runs in this process; a process that does nothing stands for the engine's.
    idle = subprocess.Popen(["sleep", "60"])
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with load_engine(lambda _: replace(GOOD, delay_seconds=0.3)) as engine:
            given = replace(context(engine.base_url, suite, ttft_ms=100), process_id=lambda: idle.pid)
            result, raw = catalog.run("load", given)
    finally:
        for process in (idle, *hogs):
            process.kill()
            process.wait()
    assert result.verdict is Verdict.ERRORED
    assert measured(result, "foreign_cpu").value > crowding.MAX_FOREIGN_RATIO
    machine = json.loads(raw)["records"]["harness"]["machine"]
    assert machine["cores"] == os.cpu_count()
    assert machine["own_us"] > 0
    # Without the others the same records are those of a slow candidate; unless our generator was kept waiting too.
    if codes(result) == ["machine-busy"]:
        records = json.loads(raw)["records"]
        records["harness"]["machine"]["busy_us"] = machine["own_us"]
        again, _ = catalog.conclude("load", given, records, duration_ms=1)
        assert again.verdict is Verdict.FAILED


def test_one_stall_shows_in_every_request_that_it_delayed(context):
    # Class 1, coordinated omission: a closed loop would have sent one request into the stall.
    began = []

    def stalled(number):
        now = time.monotonic()
        if number == WARMUP + 5:
            began.append(now)
        left = began[0] + 1.0 - now if began else 0.0
        return replace(GOOD, delay_seconds=max(0.0, left))

    with load_engine(stalled) as engine:
        result, raw = decided(context(engine.base_url, ttft_ms=300, send_lag_ms=100))
    delayed = [row for row in rows(raw) if row["token_us"] - row["at_us"] > 300_000]
    assert result.verdict is Verdict.FAILED, result.summary
    assert "ttft-over-bound" in codes(result)
    assert len(delayed) >= 12
    assert measured(result, "send_lag", "p99").value < 100


def test_a_stream_that_falls_silent_fails_at_the_planned_time_out(context):
    # Class 17: three tokens, then nothing.
    silent = Script(chunks=[chat_event(text) for text in "abc"], ending="hang")
    suite = load_suite(request_seconds="1", requests=64)
    with load_engine(lambda _: silent) as engine:
        result, raw = decided(context(engine.base_url, suite, ttft_ms=600, e2e_ms=1000, tpot_ms=500))
    assert result.verdict is Verdict.FAILED
    assert {row["outcome"] for row in rows(raw)} == {"timeout"}
    assert all(0.9e6 < row["done_us"] - row["at_us"] < 2.5e6 for row in rows(raw))


def test_a_broken_stream_is_a_failed_request_of_its_kind(context):
    healthy = chat_stream("H", "i")
    broken = {
        "truncated": [Script(chunks=healthy[:2], ending="cut"), Script(chunks=healthy[:-1])],
        "empty": [Script(chunks=[chat_event(finish_reason="stop"), usage_event(), DONE])],
        "error_event": [Script(chunks=[b'data: {"error": {"message": "out of memory"}}\n\n', DONE])],
        "malformed": [Script(chunks=[b"data: {\n\n"]), Script(chunks=[*healthy[:-2], chat_event("!"), DONE])],
        "http_4xx": [Script.json({"error": {"message": "no"}}, 404)],
    }
    scripts = [GOOD, *(script for group in broken.values() for script in group)]
    with load_engine(lambda number: scripts[number % 8]) as engine:
        result, raw = decided(context(engine.base_url, load_suite(rate_per_second="60")))
    assert result.verdict is Verdict.FAILED
    counted = Counter(row["outcome"] for row in rows(raw))
    assert counted == {"ok": 8} | {outcome: 8 * len(group) for outcome, group in broken.items()}
    assert measured(result, "error_ratio").k == 56
    assert {f"request-{outcome.replace('_', '-')}" for outcome in broken} <= {each.code for each in result.findings}


def test_answers_without_a_token_count_are_an_error(context):
    # Class 10.
    uncounted = Script(chunks=[chat_event("H"), chat_event("i", finish_reason="stop"), DONE])
    with load_engine(lambda _: uncounted) as engine:
        result, _ = catalog.run("load", context(engine.base_url, load_suite(rate_per_second="60")))
    assert result.verdict is Verdict.ERRORED
    assert "usage-missing" in codes(result)


def test_too_few_samples_are_inconclusive(context):
    # Class 13.
    suite = load_suite(rate_per_second="60", requests=40)
    with load_engine(lambda _: GOOD) as engine:
        result, _ = decided(context(engine.base_url, suite))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert codes(result)[0] == "too-few-samples"


def test_an_engine_that_does_not_listen_fails_every_request(context):
    result, raw = decided(context("http://127.0.0.1:9", load_suite(rate_per_second="60")))
    assert result.verdict is Verdict.FAILED
    assert {row["outcome"] for row in rows(raw)} == {"connect"}


# ---------------------------------------------------------------------------------- faults of the generator


def generator():
    """The generator that this process has started, once it runs."""
    for _ in range(500):
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if "gates.load_client" in child.cmdline():
                    return child
        time.sleep(0.01)
    raise AssertionError("no generator was started")


def test_a_generator_that_was_held_up_is_an_error_and_not_the_engines_fault(context):
    # Class 2: the client, not the engine, stands still for a second.
    with load_engine(lambda _: GOOD) as engine:
        paused = []

        def pause(line):
            if paused:
                return
            child = generator()
            paused.append(line)
            child.suspend()
            threading.Timer(1.0, child.resume).start()

        result, _ = catalog.run("load", replace(context(engine.base_url), progress=pause))
    assert paused
    assert result.verdict is Verdict.ERRORED, result.summary
    assert "send-lag" in codes(result)
    assert measured(result, "send_lag", "max").value > 500


def test_a_rate_that_one_generator_cannot_reach_is_an_error(context):
    # Class 5.
    suite = load_suite(rate_per_second="20000", requests=1000)
    with load_engine(lambda _: GOOD) as engine:
        result, _ = catalog.run("load", context(engine.base_url, suite, ttft_ms=600, send_lag_ms=20))
    assert result.verdict is Verdict.ERRORED
    assert {"send-lag", "rate-not-reached", "gaps-not-as-declared"} & set(codes(result))


async def test_a_generator_slowed_by_a_busy_loop_says_so(context):
    # Class 2 as it is written: 30 ms of work on the loop every 100 ms.
    suite = load_suite()

    async def hog():
        while True:
            until = time.perf_counter() + 0.03
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0.07)

    with load_engine(lambda _: GOOD) as engine:
        given = context(engine.base_url, suite, ttft_ms=100, send_lag_ms=10)
        busy = asyncio.create_task(hog())
        work = json.loads(json.dumps(load.job(given.endpoint, suite, percentile=0.9)))
        records = await load_client.Generator(work, lambda _: None).run()
        busy.cancel()
    result, _ = catalog.conclude("load", given, {**records, "engine_pids": [None, None]}, duration_ms=1)
    assert result.verdict is Verdict.ERRORED
    assert {"send-lag", "loop-lag"} <= set(codes(result))


def test_a_generator_that_is_killed_is_an_error_that_says_so(context):
    with load_engine(lambda _: GOOD) as engine:
        given = replace(context(engine.base_url), progress=lambda _: generator().kill())
        result, raw = catalog.run("load", given)
    assert result.verdict is Verdict.ERRORED
    assert result.summary == "The load generator ended without records: it said nothing."
    assert json.loads(raw)["records"] == {"instrument": result.summary}


def test_the_generator_ends_when_the_run_is_given_up(context):
    class LeaseLost(Exception):
        pass

    found = []

    def give_up(_):
        found.append(generator())
        raise LeaseLost

    with load_engine(lambda _: GOOD) as engine, pytest.raises(LeaseLost):
        load.measure(replace(context(engine.base_url), progress=give_up))
    assert not found[0].is_running()


def test_the_generator_ends_when_its_parent_is_killed(context, tmp_path):
    suite = load_suite(rate_per_second="1", requests=30)
    given = context("http://127.0.0.1:9", suite)
    told = tmp_path / "job.json"
    told.write_text(json.dumps(load.job(given.endpoint, suite, percentile=0.9)))
    with subprocess.Popen(["sleep", "60"]) as parent, told.open("rb") as job:
        arguments = [sys.executable, "-m", "gates.load_client", str(parent.pid)]
        with subprocess.Popen(arguments, stdin=job, stdout=subprocess.PIPE, cwd=load_root()) as child:
            assert child.stdout.readline().startswith(b'{"progress"')
            parent.kill()
            assert child.wait(5) == 1


def load_root():
    return Path(load.__file__).parents[1]


@pytest.mark.parametrize("missing", ["rule", "suite", "endpoint"])
def test_without_a_rule_a_suite_or_an_engine_nothing_is_measured(context, missing):
    with pytest.raises(InstrumentError):
        load.measure(replace(context("http://127.0.0.1:9"), **{missing: None}))


# ---------------------------------------------------------------------------------------------- the generator


def generate(base_url, suite, **changes):
    endpoint = Endpoint(base_url, "chain", LLAMACPP, headers={"Authorization": "Bearer abc"})
    work = json.loads(json.dumps(load.job(endpoint, suite, percentile=0.9))) | changes
    records = asyncio.run(load_client.Generator(work, lambda _: None).run())
    return records, [dict(zip(records["columns"], row, strict=True)) for row in records["requests"]]


def test_requests_leave_at_their_planned_instants_whatever_the_answers_do(context):
    slow = replace(GOOD, delay_seconds=1.0)
    suite = load_suite(rate_per_second="60")
    with load_engine(lambda _: slow) as engine:
        records, found = generate(engine.base_url, suite)
    assert [row["at_us"] for row in found] == [arrival.at_us for arrival in suite.plan]
    lags = sorted(row["sent_us"] - row["at_us"] for row in found)
    assert lags[0] >= 0
    assert lags[len(lags) // 2] < 20_000
    assert records["harness"]["in_flight_max"] > 30


def test_the_warm_up_is_sent_first_and_not_waited_for(context):
    suite = load_suite(rate_per_second="60", request_seconds="3")
    with load_engine(lambda number: replace(GOOD, delay_seconds=1.5) if number < WARMUP else GOOD) as engine:
        records, found = generate(engine.base_url, suite)
    warmup = [dict(zip(records["columns"], row, strict=True)) for row in records["warmup"]]
    assert [row["at_us"] for row in warmup] == [each.at_us - suite.warmup[-1].at_us for each in suite.warmup]
    assert all(row["at_us"] <= 0 for row in warmup)
    assert min(row["done_us"] for row in warmup) > 1_000_000
    assert sorted(row["token_us"] - row["at_us"] for row in found)[32] < 100_000


def test_every_sampling_field_is_named_and_no_cache_is_asked_for(context):
    suite = load_suite(rate_per_second="60", requests=3)
    with load_engine(lambda _: GOOD) as engine:
        generate(engine.base_url, suite)
        body = json.loads(engine.log[-1].body)
        headers = engine.log[-1].headers
    for field in LLAMACPP.sampling_fields.values():
        assert field in body
    assert body["temperature"] == 0
    assert body["cache_prompt"] is False
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 400
    assert body["messages"] == [{"role": "user", "content": "ping"}]
    assert headers["authorization"] == "Bearer abc"


def test_a_salt_makes_every_prompt_differ_from_its_first_characters(context):
    suite = load_suite(rate_per_second="60", requests=20, salt='run "7"')
    with load_engine(lambda _: GOOD) as engine:
        generate(engine.base_url, suite)
        contents = [json.loads(asked.body)["messages"][0]["content"] for asked in engine.log]
    assert len(contents) == 24
    assert len({content[:8] for content in contents}) == 24
    assert all('run "7"' in content and content.endswith("\nping") for content in contents)


def test_beyond_the_cap_a_request_is_dropped_and_counted(context):
    suite = load_suite(rate_per_second="60")
    with load_engine(lambda _: replace(GOOD, delay_seconds=0.5)) as engine:
        records, found = generate(engine.base_url, suite, cap=8)
        given = context(engine.base_url, suite)
    dropped = [row for row in found if row["outcome"] == "dropped"]
    assert len(dropped) > 20
    assert all(row["sent_us"] is None for row in dropped)
    assert records["harness"]["in_flight_max"] == 8
    result, _ = catalog.conclude("load", given, {**records, "engine_pids": [None, None]}, duration_ms=1)
    assert result.verdict is Verdict.FAILED
    assert measured(result, "error_ratio").k == len(dropped)


def test_a_machine_that_allows_too_few_open_files_is_an_error(context, tmp_path):
    suite = load_suite(requests=3)
    told = tmp_path / "job.json"
    told.write_text(json.dumps(load.job(Endpoint("http://127.0.0.1:9", "chain", LLAMACPP), suite, percentile=0.9)))
    limited = f"ulimit -n 1000; exec {sys.executable} -m gates.load_client < {told}"
    ended = subprocess.run(["sh", "-c", limited], cwd=load_root(), capture_output=True, check=False)
    assert ended.returncode == 1
    assert b"open files are needed; raise the limit" in ended.stderr
    assert ended.stdout == b""


def test_the_records_have_the_columns_that_the_judge_reads(context):
    records, _ = generate("http://127.0.0.1:9", load_suite(rate_per_second="60", requests=2))
    assert tuple(records["columns"]) == load_records.COLUMNS
    assert records["harness"]["loop_lag_us"]
    assert len(records["warmup"]) == WARMUP
