import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from tests.support import chain
from tests.support.engine import chain_engine
from workers.engines import llamacpp_server
from workers.engines.llamacpp_server import ARGUMENTS, MANAGED, UsageError, read_arguments, read_settings
from workers.launchers.process import Condition, start_time

SCRIPT = Path(llamacpp_server.__file__)
REQUIRED = ["--model", "m.gguf", "--alias", "a"]
SAMPLE_VALUES = {
    "--flash-attn": "off",
    "--cache-type-k": "q8_0",
    "--cache-type-v": "f16",
    "--chat-template-kwargs": '{"a": true}',
    "--reasoning-format": "none",
    "--rope-scaling": "none",
}


def run(*arguments, timeout=30):
    return subprocess.run(
        [sys.executable, "-I", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def endless_engine(tmp_path, **options):
    return chain_engine(tmp_path, extra=chain.endless(), template=chain.SELECTING_TEMPLATE, **options)


async def endless(endpoint, max_tokens):
    return await endpoint.chat(chain.PROMPT, max_tokens=max_tokens, template_arguments={"sel": "E"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus", "1"], "unknown argument --bogus"),
        (["--ctx-size=512"], "unknown argument --ctx-size=512"),
        (["-x", "512"], "unknown argument -x"),
        (["512"], "unknown argument 512"),
        (["--ctx-size"], "--ctx-size needs a value"),
        (["--ctx-size", "many"], "--ctx-size many: must be a whole number"),
        (["--threads", "1.5"], "--threads 1.5: must be a whole number"),
        (["--top-p", "high"], "--top-p high: must be a number"),
        (["--ctx-size", "-1"], "must be 0 to"),
        (["--top-p", "nan"], "must be 0.0 to 1.0"),
        (["--flash-attn", "maybe"], "must be one of on, off, auto"),
        (["--chat-template-kwargs", "[]"], "must be a JSON object"),
        (["--seed", "1", "--seed", "2"], "repeats or contradicts"),
        (["--kv-unified", "--no-kv-unified"], "repeats or contradicts"),
        (["--model", "other.gguf"], "given twice"),
        (["--port", "http"], "invalid literal"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, says):
    with pytest.raises(UsageError, match=says.replace("(", r"\(")):
        read_settings([*REQUIRED, *arguments])


def test_a_wrong_argument_ends_the_process_with_status_2_and_one_line():
    ended = run(*REQUIRED, "--bogus", "1")
    assert ended.returncode == 2
    assert ended.stderr == "launcher: error: unknown argument --bogus\n"


def test_model_and_alias_are_required():
    with pytest.raises(UsageError, match="--alias is required"):
        read_settings(["--model", "m.gguf"])


@pytest.mark.parametrize("name", sorted(MANAGED))
def test_a_bundle_may_not_set_what_the_runner_decides(name):
    with pytest.raises(UsageError, match="set by the runner"):
        read_arguments([name, "1"])


def test_adapters_are_loaded_in_order_and_in_force_for_nobody_who_does_not_ask():
    words = ["--adapter", "x=b.gguf", "--adapter", "y=a=.gguf", "--port", "80", "--host", "0.0.0.0"]
    params = llamacpp_server.common_params(read_settings([*REQUIRED, *words]))
    assert [(one.path, one.scale) for one in params.lora_adapters] == [("b.gguf", 0.0), ("a=.gguf", 0.0)]
    assert params.lora_init_without_apply
    assert (params.hostnames, params.port) == (["127.0.0.1"], 0)
    for wrong in ("x", "x=", "=b.gguf"):
        with pytest.raises(UsageError, match="must be NAME=PATH"):
            read_settings([*REQUIRED, "--adapter", wrong])
    with pytest.raises(UsageError, match="each name once"):
        read_settings([*REQUIRED, "--adapter", "x=b.gguf", "--adapter", "x=a.gguf"])


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_every_listed_argument_has_its_field_in_the_engine(name):
    argument = ARGUMENTS[name]
    words = [name] if argument.read is None else [name, SAMPLE_VALUES.get(name, "1")]
    params = llamacpp_server.common_params(read_settings([*REQUIRED, *words]))
    value = params
    for step in argument.field.split("."):
        value = getattr(value, step)
    fields, _ = read_arguments(words)
    wanted = fields[argument.field]
    assert value.name == wanted.member if isinstance(wanted, llamacpp_server.Member) else value == wanted


def test_sampling_that_was_asked_for_wins_over_the_files_own(tmp_path):
    chain.write_chain(tmp_path / "model.gguf", metadata={"general.sampling.temp": 1.5, "general.sampling.top_k": 7})
    port_file = tmp_path / "port.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", str(SCRIPT), "--model", str(tmp_path / "model.gguf"), "--alias", "a"),
            *("--temp", "0.25", "--threads", "1", "--no-warmup", "--port-file", str(port_file)),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while not port_file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

        async def props():
            port = json.loads(port_file.read_text())["port"]
            async with Endpoint(f"http://127.0.0.1:{port}", "a", LLAMACPP) as endpoint:
                return (await endpoint.get_json("/props"))["default_generation_settings"]["params"]

        params = asyncio.run(props())
    finally:
        process.kill()
        process.wait()
    assert (params["temperature"], params["top_k"]) == (0.25, 7)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda d: chain.write_bundle_directory(d, truncated_bytes=900_000), "corrupted or incomplete"),
        (lambda d: chain.write_bundle_directory(d, lfs_pointer=True), "invalid magic"),
        (lambda d: chain.write_bundle_directory(d, truncated_bytes=0), "failed to load model"),
    ],
)
def test_weights_that_cannot_be_read_end_the_process_with_status_1(tmp_path, write, says):
    root = write(tmp_path)
    ended = run("--model", str(root / "model.gguf"), "--alias", "a", "--port-file", str(tmp_path / "port.json"))
    assert ended.returncode == 1
    assert says in ended.stderr
    assert not (tmp_path / "port.json").exists()


def test_a_template_that_cannot_be_read_ends_the_process_with_status_1(tmp_path):
    chain.write_chain(tmp_path / "model.gguf")
    base = ["--model", str(tmp_path / "model.gguf"), "--alias", "a", "--chat-template-file"]
    assert run(*base, str(tmp_path / "absent.jinja")).returncode == 1
    (tmp_path / "broken.jinja").write_text("{% for m in %}")
    ended = run(*base, str(tmp_path / "broken.jinja"))
    assert ended.returncode == 1
    assert "chat template parsing error" in ended.stderr


def test_a_taken_port_ends_the_process_with_status_1(tmp_path):
    with chain_engine(tmp_path) as engine:
        port = engine.base_url.rsplit(":", 1)[1]
        ended = run("--model", str(engine.root / "model.gguf"), "--alias", "a", "--port", port)
    assert ended.returncode == 1
    assert "couldn't bind HTTP server socket" in ended.stderr


def test_an_idle_engine_ends_with_status_0_and_frees_its_port(tmp_path):
    with chain_engine(tmp_path) as engine:
        state = engine.launcher.stop(engine.launched, grace_seconds=10)
        assert state.code == llamacpp_server.EXIT_DRAINED

        async def ask():
            async with Endpoint(engine.base_url, "chain", LLAMACPP) as endpoint:
                return await endpoint.chat(chain.PROMPT, max_tokens=1)

        assert asyncio.run(ask()).outcome == "connect"


def test_c126_twenty_streams_that_run_or_wait_when_an_engine_is_asked_to_end_end_whole(tmp_path):
    async def streams(engine):
        async with Endpoint(engine.base_url, "chain", LLAMACPP) as endpoint:
            asked = [asyncio.create_task(endless(endpoint, 300)) for _ in range(20)]
            while (await endpoint.metrics())[LLAMACPP.metrics.running] < 10:  # noqa: ASYNC110 - a test waits
                await asyncio.sleep(0.02)
            os.kill(engine.pid, signal.SIGTERM)
            return await asyncio.gather(*asked)

    with endless_engine(tmp_path, context_tokens=1024, max_sequences=10) as engine:
        answers = asyncio.run(streams(engine))
        state = engine.launcher.wait(engine.launched, 10)
    assert [(answer.outcome, answer.usage.completion_tokens) for answer in answers] == [("ok", 300)] * 20
    assert (state.condition, state.code) == (Condition.EXITED, llamacpp_server.EXIT_DRAINED)


@pytest.mark.parametrize("is_shared", [False, True])
def test_c074_a_burst_that_shares_one_context_is_told_as_errors_and_slots_of_their_own_serve_it(tmp_path, is_shared):
    """Four requests of which each fits into what is promised, and all together only into a context for each."""
    question = [{"role": "user", "content": "x" * 240}]

    async def burst(engine):
        async with Endpoint(engine.base_url, "chain", LLAMACPP) as endpoint:
            (model,) = await endpoint.models()
            asked = (endpoint.chat(question, max_tokens=200, template_arguments={"sel": "E"}) for _ in range(4))
            return model.context_tokens, await asyncio.gather(*asked)

    arguments = ["--threads", "1", *(["--kv-unified"] if is_shared else [])]
    with endless_engine(tmp_path, arguments=arguments, context_tokens=512, max_sequences=4) as engine:
        context, answers = asyncio.run(burst(engine))
    assert context == 512
    if is_shared:
        # Each began with 200 and was cut by an error: none of them may count as answered.
        assert {answer.outcome for answer in answers} & {"ok"} == set()
        assert any("Context size" in answer.detail for answer in answers)
    else:
        assert [(answer.outcome, answer.finish_reason) for answer in answers] == [("ok", "length")] * 4


@pytest.mark.parametrize("second_signal", [True, False])
def test_c126_a_stream_that_outlasts_the_drain_is_cut_with_status_3(tmp_path, second_signal):
    async def stream(engine):
        async with Endpoint(engine.base_url, "chain", LLAMACPP) as endpoint:
            asked = asyncio.create_task(endless(endpoint, 60_000))
            while (await endpoint.metrics())[LLAMACPP.metrics.running] < 1:  # noqa: ASYNC110 - a test waits
                await asyncio.sleep(0.02)
            os.kill(engine.pid, signal.SIGTERM)
            if second_signal:
                await asyncio.sleep(0.3)
                os.kill(engine.pid, signal.SIGTERM)
            started = time.monotonic()
            return await asked, time.monotonic() - started

    drain_seconds = 60.0 if second_signal else 0.5
    with endless_engine(tmp_path, context_tokens=65_536, max_sequences=1, drain_seconds=drain_seconds) as engine:
        answer, waited_seconds = asyncio.run(stream(engine))
        state = engine.launcher.wait(engine.launched, 10)
    assert answer.outcome == "truncated"
    assert state.code == llamacpp_server.EXIT_CUT
    assert waited_seconds < 3


def test_an_engine_tied_to_a_worker_ends_with_it_but_not_with_the_thread_that_started_it(tmp_path):
    chain.write_chain(tmp_path / "model.gguf")
    port_file = tmp_path / "port.json"
    worker = (
        "import os, subprocess, sys, threading, time\n"
        "def start():\n"
        "    argv = [*sys.argv[1:], '--die-with-parent', str(os.getpid())]\n"
        "    print(subprocess.Popen(argv, stderr=subprocess.DEVNULL).pid, flush=True)\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start()\n"
        "thread.join()\n"
        "time.sleep(60)\n"
    )
    engine = [sys.executable, "-I", str(SCRIPT), "--model", str(tmp_path / "model.gguf"), "--alias", "a"]
    argv = [sys.executable, "-c", worker, *engine, "--port-file", str(port_file), "--no-warmup"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        deadline = time.monotonic() + 20
        while not port_file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert start_time(pid) is not None
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while start_time(pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert start_time(pid) is None


def test_health_answers_while_far_more_requests_wait_than_there_are_slots(tmp_path):
    async def crowd(engine):
        async with Endpoint(engine.base_url, "chain", LLAMACPP) as endpoint:
            asked = [asyncio.create_task(endless(endpoint, 80)) for _ in range(60)]
            while (await endpoint.metrics())[LLAMACPP.metrics.waiting] < 40:  # noqa: ASYNC110 - a test waits
                await asyncio.sleep(0.02)
            is_healthy = await endpoint.is_healthy()
            return is_healthy, [answer.outcome for answer in await asyncio.gather(*asked)]

    with endless_engine(tmp_path, max_sequences=2) as engine:
        is_healthy, outcomes = asyncio.run(crowd(engine))
    assert is_healthy
    assert outcomes == ["ok"] * 60


def test_the_launcher_imports_nothing_of_ours_and_no_engine_before_it_serves():
    code = (
        "import runpy, sys\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='launcher')\n"
        "ours = {'schemas', 'gates', 'registry', 'workers', 'xllamacpp'}\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ours))\n"
    )
    ended = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
