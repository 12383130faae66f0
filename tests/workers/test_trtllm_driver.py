from pathlib import Path

import pytest

from tests.support.folder_bundles import DIGEST, TEMPLATE, bundle, file, flaws_of
from workers.engines.base import Launch
from workers.engines.trtllm import TRTLLM

LAUNCH = Launch(root=Path("/bundle"), port_file=Path("/run/port.json"), host="0.0.0.0", port=8000)


def line(**sections):
    chosen = bundle("trtllm", **sections)
    assert TRTLLM.check_bundle(chosen) == []
    argv = TRTLLM.command(chosen, LAUNCH).argv
    assert argv[:2] == ("/bin/sh", "-ec")
    assert flaws_of(chosen, argv, "trtllm-serve") == []
    return " ".join(argv[4:])


def problems(**sections):
    return " | ".join(TRTLLM.check_bundle(bundle("trtllm", **sections)))


SERVE = "trtllm-serve serve chain --host 0.0.0.0 --port 8000"
LIMITS = "--max_seq_len 4096 --max_batch_size 8"
OPTIONS = "--extra_llm_api_options ../options.json"
PYTORCH = '{"enable_iter_perf_stats": true, "return_perf_metrics": true}'
PARSERS = {"origin": "file", "file": "chat_template.jinja", "tool_parser": "qwen3", "reasoning_parser": "deepseek-r1"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {},
            [
                *("chain /bundle", PYTORCH, SERVE, "--served_model_name chain", OPTIONS, "--backend pytorch"),
                *(LIMITS, "--tp_size 1 --pp_size 1"),
            ],
        ),
        (
            {
                "version": "1.1.0",
                "engine": {"arguments": ["--backend", "tensorrt"]},
                "topology": {"tensor_parallel": 4, "pipeline_parallel": 2, "expert_parallel": 4},
            },
            [
                *("chain /bundle", '{"return_perf_metrics": true}', SERVE, OPTIONS, "--backend tensorrt", LIMITS),
                "--tp_size 4 --pp_size 2 --ep_size 4",
            ],
        ),
        (
            {
                "quantization": {"method": "fp8", "kv_cache": "fp8"},
                "runtime": {"prefix_caching": False, "max_batch_tokens": 2048},
                "engine": {"arguments": ["--kv_cache_free_gpu_memory_fraction", "0.8"], "attention_backend": "TRTLLM"},
                "serving": {"features": ["chat", "json_schema"]},
            },
            [
                'chain /bundle {"attn_backend": "TRTLLM", "enable_iter_perf_stats": true,',
                '"guided_decoding_backend": "xgrammar", "kv_cache_config": {"dtype": "fp8",',
                '"enable_block_reuse": false, "free_gpu_memory_fraction": 0.8}, "return_perf_metrics": true}',
                *(SERVE, "--served_model_name chain", OPTIONS, "--backend pytorch"),
                "--kv_cache_free_gpu_memory_fraction 0.8",
                *(LIMITS, "--max_num_tokens 2048 --tp_size 1 --pp_size 1"),
            ],
        ),
        (
            {"template": PARSERS, "files": [TEMPLATE]},
            [
                *("chain /bundle", PYTORCH, SERVE, "--served_model_name chain"),
                *("--chat_template /bundle/chat_template.jinja", OPTIONS, "--backend pytorch", LIMITS),
                "--tp_size 1 --pp_size 1 --tool_parser qwen3 --reasoning_parser deepseek-r1",
            ],
        ),
    ],
)
def test_the_command_line_says_what_the_bundle_says(sections, said):
    assert line(**sections) == " ".join(said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "unknown argument --bogus"),
        (["--backend", "_autodeploy"], "must be one of pytorch, tensorrt"),
        (["--max_batch_size", "0"], "must be 1 to 65536"),
        (["--max_seq_len", "8192"], "contradicts runtime.context_tokens"),
        (["--tp_size", "2"], "--tp_size is said by topology.tensor_parallel"),
        (["--trust_remote_code"], "is set from engine.remote_code"),
        (["--extra_llm_api_options", "/x.yaml"], "reads options that the bundle does not show"),
        (["--config", "/x.yaml"], "reads options that the bundle does not show"),
        (["--custom_module_dirs", "/x"], "loads code that is not in the bundle"),
        (["--custom_tokenizer", "a.b.C"], "loads code that is not in the bundle"),
        (["--tokenizer", "/etc"], "leads out of the bundle"),
        (["--otlp_traces_endpoint", "10.0.0.1:1"], "talks to another host"),
        (["--disagg_cluster_uri", "http://10.0.0.1"], "talks to another host"),
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
        ({"version": "0.21.0"}, "trtllm 0.21.0 is not known here, only >=1.0"),
        ({"engine": {"image": None, "environment": DIGEST}}, "is started from an image here"),
        ({"topology": {"data_parallel": 2}}, "with data_parallel 1, not 2"),
        ({"topology": {"nodes": 2}}, "with nodes 1, not 2"),
        ({"serving": {"served_name": "org/chain"}, "version": "1.2.0"}, "a name with a slash in versions >=1.3.0rc7"),
        ({"serving": {"served_name": "a/../b"}}, "names no folder"),
        ({"template": {"tool_parser": "qwen3"}, "version": "1.1.0"}, "parses tool calls in versions >=1.2"),
        ({"template": {"arguments": {"enable_thinking": False}}}, "template arguments from requests only"),
        ({"runtime": {"sampling": {"temperature": "0.7"}}}, "leave runtime.sampling out"),
        ({"draft": {"method": "ngram", "tokens": 2}}, "does not load a draft model"),
        (
            {
                "adapters": [{"name": "de", "files": ["a/x.bin"], "rank": 8, "target_modules": ["q_proj"]}],
                "files": [file("a/x.bin", "adapter")],
            },
            "none can be served under a name",
        ),
    ],
)
def test_what_this_engine_cannot_do_is_a_problem_before_anything_starts(sections, says):
    assert says in problems(**sections)
