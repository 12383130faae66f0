from pathlib import Path

import pytest

from tests.support.folder_bundles import DIGEST, TEMPLATE, bundle, file, flaws_of
from workers.engines.base import Launch
from workers.engines.tgi import TGI

LAUNCH = Launch(root=Path("/bundle"), port_file=Path("/run/port.json"), host="0.0.0.0", port=8000)


def line(**sections):
    chosen = bundle("tgi", **sections)
    assert TGI.check_bundle(chosen) == []
    argv = TGI.command(chosen, LAUNCH).argv
    assert argv[:2] == ("/bin/sh", "-ec")
    assert flaws_of(chosen, argv, "text-generation-launcher") == []
    return " ".join(argv[4:])


def problems(**sections):
    return " | ".join(TGI.check_bundle(bundle("tgi", **sections)))


LAUNCHER = "chain /bundle {} text-generation-launcher --model-id chain --hostname 0.0.0.0 --port 8000"
LIMITS = "--max-total-tokens 4096 --max-input-tokens 4095 --max-concurrent-requests 8"
ADAPTER = [file("adapters/de/adapter_config.json", "adapter"), file("adapters/de/adapter_model.safetensors", "adapter")]
LORA = {"name": "de", "files": [one["path"] for one in ADAPTER], "rank": 16, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, [LAUNCHER, "--json-output", LIMITS, "--num-shard 1"]),
        (
            {
                "topology": {"tensor_parallel": 4},
                "quantization": {"method": "gptq", "kv_cache": "fp8_e5m2"},
                "runtime": {"max_batch_tokens": 2048},
                "engine": {"arguments": ["--cuda-graphs", "1,2,4"]},
                "draft": {"method": "ngram", "tokens": 3},
            },
            [
                *(LAUNCHER, "--json-output --cuda-graphs 1,2,4", LIMITS, "--max-batch-prefill-tokens 2048"),
                "--num-shard 4 --quantize gptq --kv-cache-dtype fp8_e5m2 --speculate 3",
            ],
        ),
        (
            {"adapters": [LORA], "files": ADAPTER},
            [LAUNCHER, "--lora-adapters de=/bundle/adapters/de --json-output", LIMITS, "--num-shard 1"],
        ),
    ],
)
def test_the_command_line_says_what_the_bundle_says(sections, said):
    assert line(**sections) == " ".join(said)


def test_its_makers_are_told_nothing_and_the_cache_is_as_declared():
    variables = TGI.command(bundle("tgi", runtime={"prefix_caching": False}), LAUNCH).variables
    assert (variables["USAGE_STATS"], variables["HF_HUB_OFFLINE"]) == ("off", "1")
    assert (variables["PREFIX_CACHING"], variables["USE_PREFIX_CACHING"]) == ("0", "0")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "unknown argument --bogus"),
        (["--max-best-of", "0"], "must be 1 to 64"),
        (["--cuda-graphs", "a"], "--cuda-graphs cannot be 'a'"),
        (["--max-total-tokens", "8192"], "contradicts runtime.context_tokens"),
        (["--num-shard", "2"], "is said by topology.tensor_parallel"),
        (["--trust-remote-code"], "is set from engine.remote_code"),
        (["--tokenizer-config-path", "/x"], "leads out of the bundle"),
        (["--weights-cache-override", "/x"], "leads out of the bundle"),
        (["--otlp-endpoint", "10.0.0.1:1"], "talks to another host"),
        (["--ngrok"], "opens the engine to the Internet"),
        (["--usage-stats", "on"], "which switches it off"),
        (["--api-key", "s"], "is a secret"),
        (["-p", "80"], "-p is set by the runner"),
    ],
)
def test_an_argument_that_is_not_allowed_is_refused(arguments, says):
    assert says in problems(engine={"arguments": arguments})


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "HF_ENDPOINT", "NCCL_NET_PLUGIN"])
def test_a_variable_that_is_not_allowed_is_refused(name):
    assert f"variable {name} " in problems(engine={"variables": {name: "x"}})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"version": "1.4.0"}, "tgi 1.4.0 is not known here, only >=2.3,<4"),
        ({"engine": {"image": None, "environment": DIGEST}}, "is started from an image here"),
        ({"topology": {"pipeline_parallel": 2}}, "with pipeline_parallel 1, not 2"),
        ({"quantization": {"method": "q4_k_m"}}, "tgi knows no quantization q4_k_m"),
        (
            {"template": {"origin": "file", "file": "chat_template.jinja"}, "files": [TEMPLATE]},
            "from tokenizer_config.json",
        ),
        ({"template": {"tool_parser": "hermes"}}, "no parsers that can be named"),
        ({"template": {"arguments": {"x": True}}}, "takes no template arguments"),
        ({"runtime": {"sampling": {"temperature": "0.7"}}}, "leave runtime.sampling out"),
        ({"draft": {"method": "eagle", "tokens": 2}}, "drafts by ngram alone"),
        ({"engine": {"attention_backend": "paged"}}, "leave engine.attention_backend out"),
    ],
)
def test_what_this_engine_cannot_do_is_a_problem_before_anything_starts(sections, says):
    assert says in problems(**sections)
