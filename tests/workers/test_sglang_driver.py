from dataclasses import replace
from pathlib import Path

import pytest

from gates.environment import NotInstalled
from tests.support.folder_bundles import GENERATION_CONFIG, TEMPLATE, bundle, file, flaws_of
from workers.engines.base import Launch
from workers.engines.sglang import SGLANG

LAUNCH = Launch(root=Path("/model"), port_file=Path("/run/port.json"), host="0.0.0.0", port=8000)
PLAIN = (
    "python3 -m sglang.launch_server --model-path /model --served-model-name chain --host 0.0.0.0 --port 8000"
    " --enable-metrics --enable-cache-report"
)
DRAFT = file("draft/model.safetensors", "draft")
ADAPTER = [file("adapters/de/adapter_config.json", "adapter"), file("adapters/de/adapter_model.safetensors", "adapter")]
LORA = {"name": "de", "files": [one["path"] for one in ADAPTER], "rank": 16, "target_modules": ["q_proj"]}


def line(**sections):
    chosen = bundle("sglang", **sections)
    assert SGLANG.check_bundle(chosen) == []
    argv = SGLANG.command(chosen, LAUNCH).argv
    assert flaws_of(chosen, argv, "sglang.launch_server") == []
    return " ".join(argv)


def problems(**sections):
    return " | ".join(SGLANG.check_bundle(bundle("sglang", **sections)))


LIMITS = "--context-length 4096 --max-running-requests 8"
ONE = "--tp-size 1 --pp-size 1 --dp-size 1 --ep-size 1"
OPENAI = "--sampling-defaults openai"
PARSERS = {"origin": "file", "file": "chat_template.jinja", "tool_parser": "qwen25", "reasoning_parser": "qwen3"}
EAGLE = {"method": "eagle", "files": ["draft/model.safetensors"], "tokens": 4}
GIVEN = {"arguments": ["--context-length", "4096", "--mem-fraction-static", "0.8"], "attention_backend": "fa3"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, [LIMITS, ONE, OPENAI]),
        (
            {"topology": {"tensor_parallel": 8, "pipeline_parallel": 2, "expert_parallel": 8}},
            [LIMITS, "--tp-size 8 --pp-size 2 --dp-size 1 --ep-size 8", OPENAI],
        ),
        (
            {"quantization": {"method": "fp8", "kv_cache": "fp8_e4m3"}, "files": [GENERATION_CONFIG]},
            [LIMITS, ONE, "--quantization fp8 --kv-cache-dtype fp8_e4m3 --sampling-defaults model"],
        ),
        (
            {"adapters": [LORA], "files": ADAPTER},
            ["--enable-lora --lora-paths de=/model/adapters/de", LIMITS, ONE, "--max-lora-rank 16", OPENAI],
        ),
        (
            {"template": PARSERS, "files": [TEMPLATE]},
            [
                *("--chat-template /model/chat_template.jinja", LIMITS, ONE),
                *("--tool-call-parser qwen25 --reasoning-parser qwen3", OPENAI),
            ],
        ),
        (
            {"draft": EAGLE, "files": [DRAFT]},
            [
                *("--speculative-draft-model-path /model/draft", LIMITS, ONE),
                *("--speculative-algorithm EAGLE --speculative-num-draft-tokens 4", OPENAI),
            ],
        ),
        (
            {"runtime": {"max_batch_tokens": 2048, "prefix_caching": False}, "engine": GIVEN},
            [
                "--context-length 4096 --mem-fraction-static 0.8 --max-running-requests 8 --chunked-prefill-size 2048",
                *(ONE, "--attention-backend fa3", OPENAI, "--disable-radix-cache"),
            ],
        ),
        ({"version": "0.4.9"}, [LIMITS, ONE]),
    ],
)
def test_the_command_line_says_what_the_bundle_says(sections, said):
    assert line(**sections) == " ".join([PLAIN, *said])


@pytest.mark.parametrize(
    ("changes", "is_guarded"),
    [({"environment": "sha256:" + "e" * 64}, True), ({"image": "registry.example/sglang@sha256:" + "e" * 64}, False)],
)
def test_a_process_that_must_end_with_its_worker_is_guarded_and_a_container_is_its_own_end(changes, is_guarded):
    chosen = bundle("sglang")
    engine = chosen.engine.model_copy(update={"image": None, "environment": None, **changes})
    argv = SGLANG.command(chosen.model_copy(update={"engine": engine}), replace(LAUNCH, parent_pid=7)).argv
    assert any(word.endswith("workers/engines/guarded.py") for word in argv) == is_guarded


def test_a_process_runs_in_the_environment_of_the_engine_and_not_in_the_runner_s(monkeypatch):
    monkeypatch.setattr("gates.environment._places", {"sglang": Path("/opt/sglang")})
    chosen = bundle("sglang")
    engine = chosen.engine.model_copy(update={"image": None, "environment": "sha256:" + "e" * 64})
    argv = SGLANG.command(chosen.model_copy(update={"engine": engine}), LAUNCH).argv
    assert argv[:4] == ("/opt/sglang/bin/python", "-I", "-m", "sglang.launch_server")
    with pytest.raises(NotInstalled, match="/opt/sglang holds no Python environment"):
        SGLANG.identity()


def test_the_engine_fetches_nothing_and_gets_what_the_bundle_names():
    variables = SGLANG.command(bundle("sglang", engine={"variables": {"OMP_NUM_THREADS": "2"}}), LAUNCH).variables
    assert variables == {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"version": "0.3.6"}, "sglang 0.3.6 is not known here, only >=0.4.5"),
        ({"version": "main"}, "sglang main is not known here"),
        ({"topology": {"context_parallel": 2}}, "with context_parallel 1, not 2"),
        ({"topology": {"nodes": 2}}, "nodes 2 do not each have the same number of 1 ranks"),
        ({"template": {"arguments": {"enable_thinking": False}}}, "template arguments from requests only"),
        ({"runtime": {"sampling": {"temperature": "0.7"}}}, "from generation_config.json alone"),
        (
            {"runtime": {"sampling": {"temperature": "0.7"}}, "files": [GENERATION_CONFIG], "version": "0.5.3"},
            "from a file in versions >=0.5.4",
        ),
        ({"draft": {"method": "medusa", "tokens": 4}}, "knows no draft method medusa"),
        ({"draft": {"method": "eagle", "tokens": 4}}, "the draft's files do not go together"),
        ({"quantization": {"method": "q4_k_m"}}, "knows no quantization q4_k_m"),
        ({"quantization": {"method": "none", "kv_cache": "--trust-remote-code"}}, "cannot be said as --kv-cache-dtype"),
        ({"template": {"tool_parser": "../x.py"}}, "'../x.py' cannot be said as --tool-call-parser"),
        ({"adapters": [{**LORA, "files": LORA["files"][1:]}], "files": ADAPTER}, "adapter de is no folder of its own"),
    ],
)
def test_what_this_engine_cannot_do_is_a_problem_before_anything_starts(sections, says):
    assert says in problems(**sections)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "unknown argument --bogus"),
        (["--mem-frac", "0.8"], "unknown argument --mem-frac"),
        (["--mem-fraction-static", "1.5"], "must be 0.05 to 1, not 1.5"),
        (["--mem-fraction-static", "most"], "must be a number, not 'most'"),
        (["--mem-fraction-static"], "needs a value"),
        (["--disable-cuda-graph=1"], "takes no value"),
        (["--schedule-policy", "best"], "must be one of lpm"),
        (["--page-size", "0"], "must be 1 to 1024"),
        (["--page-size", "1", "--page-size", "2"], "--page-size is given twice"),
        (["--context-length", "8192"], "--context-length 8192 contradicts runtime.context_tokens, which asks for 4096"),
        (["--sampling-defaults", "model"], "contradicts the role generation_config of files, which asks for openai"),
        (["--tp-size", "2"], "--tp-size is said by topology.tensor_parallel"),
        (["--trust-remote-code"], "--trust-remote-code is set from engine.remote_code"),
        (["--tokenizer-path", "/etc"], "--tokenizer-path leads out of the bundle"),
        (["--config", "/x.yaml"], "--config reads arguments that the bundle does not show"),
        (["--custom-weight-loader", "a.b"], "loads code that is not in the bundle"),
        (["--tool-server", "http://10.0.0.1"], "--tool-server talks to another host"),
        (["--otlp-traces-endpoint", "10.0.0.1:4317"], "talks to another host"),
        (["--dist-init-addr", "10.0.0.1:1"], "--dist-init-addr is set by the runner"),
        (["--api-key", "s"], "is a secret, which a bundle cannot hold"),
        (["--preferred-sampling-params", "{}"], "would change what requests without sampling values get"),
        (["/etc/passwd"], "follows no argument that takes it"),
        (["-tp", "2"], "unknown argument -tp"),
    ],
)
def test_an_argument_that_is_not_allowed_is_refused(arguments, says):
    assert says in problems(engine={"arguments": arguments})


def test_an_argument_that_a_version_does_not_know_is_refused():
    said = problems(version="0.5.0", engine={"arguments": ["--enable-deterministic-inference"]})
    assert said == "--enable-deterministic-inference is known to sglang >=0.5.3, not to 0.5.0"
    said = problems(version="0.5.23", engine={"arguments": ["--cuda-graph-max-bs", "8"]})
    assert said == "--cuda-graph-max-bs is known to sglang <0.5.20, not to 0.5.23"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("LD_PRELOAD", "/x.so", "variable LD_PRELOAD loads code"),
        ("SGLANG_EXTERNAL_MODEL_PACKAGE", "evil", "loads code"),
        ("HF_ENDPOINT", "http://10.0.0.1", "variable HF_ENDPOINT loads weights or words"),
        ("NCCL_TUNER_PLUGIN", "/x.so", "variable NCCL_TUNER_PLUGIN is not one that an engine may be given"),
        ("OMP_NUM_THREADS", "many", "variable OMP_NUM_THREADS must be an integer"),
    ],
)
def test_a_variable_that_is_not_allowed_is_refused(name, value, says):
    assert says in problems(engine={"variables": {name: value}})


def test_code_of_the_model_runs_only_when_it_is_named():
    code = {"files": ["modeling.py"], "reason": "read by two people"}
    chosen = bundle("sglang", files=[file("modeling.py", "code")], engine={"remote_code": code})
    assert SGLANG.command(chosen, LAUNCH).argv[-1] == "--trust-remote-code"
    assert "--trust-remote-code" not in line()
