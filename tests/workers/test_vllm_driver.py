import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.bundle import Bundle
from tests.support.chain_folder import describe_folder, write_chain_folder
from tests.support.engine import UNIDENTIFIED
from workers.engines.base import Launch
from workers.engines.vllm import TABLE, VLLM

LAUNCH = Launch(root=Path("/root/b"), port_file=Path("/run/p"), port=4711, drain_seconds=12.5, parent_pid=77)


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    root = write_chain_folder(tmp_path_factory.mktemp("bundle"))
    described = describe_folder(root, environment=UNIDENTIFIED)
    return described.model_dump(mode="json", by_alias=True, exclude_none=True)


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr("gates.environment._places", {"vllm": Path("/opt/vllm")})

    def build(bundle):
        assert VLLM.check_bundle(bundle) == []
        return VLLM.command(bundle, LAUNCH)

    return build


def bundle(body, **sections):
    merged = {**body}
    for name, change in sections.items():
        merged[name] = {**body.get(name, {}), **change} if isinstance(change, dict) else change
    return Bundle.model_validate(merged)


def problems(body, **sections):
    return " | ".join(VLLM.check_bundle(bundle(body, **sections)))


def words(command, first):
    argv = list(command.argv)
    return " ".join(argv[argv.index(first) :])


def test_the_command_line_is_complete_and_in_order(body, command):
    made = command(bundle(body))
    assert made.argv[:3] == (sys.executable, "-I", "-S")
    assert made.argv[3].endswith("workers/engines/guarded.py")
    assert " ".join(made.argv[4:]) == (
        "77 /opt/vllm/bin/python -I -m vllm.entrypoints.openai.api_server --model /root/b --served-model-name chain"
        " --host 127.0.0.1 --port 4711 --shutdown-timeout 13 --enable-prompt-tokens-details"
        " --enable-tokenizer-info-endpoint --disable-uvicorn-access-log --load-format safetensors"
        " --chat-template /root/b/chat_template.jinja"
        ' --enforce-eager --max-model-len 512 --max-num-seqs 4 --structured-outputs-config {"backend": "guidance"}'
    )
    assert made.port_file is None


def test_the_allocator_is_set_up_as_torch_spells_it(body, command):
    told = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512"}
    assert not VLLM.check_bundle(bundle(body, engine={"variables": told}))


def test_an_engine_that_may_outlive_its_worker_has_no_guard(body, command):
    made = VLLM.command(bundle(body), replace(LAUNCH, parent_pid=None))
    assert made.argv[:3] == ("/opt/vllm/bin/python", "-I", "-m")


def test_nothing_is_fetched_or_reported_whatever_the_bundle_says(body, command):
    assert command(bundle(body)).variables == {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",
        "NO_COLOR": "1",
        "VLLM_RPC_BASE_PATH": ".",
    }


def test_a_replica_s_folder_may_be_deeper_than_a_socket_s_path_may_be_long(body, command):
    """Its sockets lie in the folder that it runs in; a container has a short one for them, and a closed root."""
    engine = {name: value for name, value in body["engine"].items() if name != "environment"}
    image = f"vllm/vllm-openai@{body['engine']['environment']}"
    of_image = VLLM.command(bundle({**body, "engine": engine}, engine={"image": image}), LAUNCH)
    assert "VLLM_RPC_BASE_PATH" not in of_image.variables


def test_what_the_document_declares_the_engine_is_told(body, command):
    made = command(
        bundle(
            body,
            template={"arguments": {"enable_thinking": False}, "tool_parser": "hermes", "reasoning_parser": "qwen3"},
            quantization={"method": "fp8", "kv_cache": "fp8_e4m3"},
            topology={"tensor_parallel": 2, "pipeline_parallel": 3, "data_parallel": 4, "expert_parallel": 8},
            runtime={
                "max_batch_tokens": 2048,
                "prefix_caching": False,
                "sampling": {"temperature": "0.7", "top_k": 20},
            },
        )
    )
    assert words(made, "--tensor-parallel-size") == (
        "--tensor-parallel-size 2 --pipeline-parallel-size 3 --data-parallel-size 4"
        " --chat-template /root/b/chat_template.jinja"
        ' --default-chat-template-kwargs {"enable_thinking": false} --enforce-eager --max-model-len 512'
        ' --max-num-seqs 4 --structured-outputs-config {"backend": "guidance"} --max-num-batched-tokens 2048'
        " --no-enable-prefix-caching --generation-config vllm --override-generation-config"
        ' {"temperature": 0.7, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}'
        " --quantization fp8 --kv-cache-dtype fp8_e4m3 --enable-auto-tool-choice --tool-call-parser hermes"
        " --reasoning-parser qwen3 --enable-expert-parallel"
    )


def test_an_image_brings_its_own_python_and_listens_on_the_port_that_it_is_given(body):
    image = bundle(body, engine={"environment": None, "image": "vllm/vllm-openai@sha256:" + "a" * 64})
    made = VLLM.command(image, Launch(root=Path("/b"), port_file=Path("/p"), host="0.0.0.0", port=8000))
    assert made.argv[:3] == ("python3", "-m", "vllm.entrypoints.openai.api_server")
    assert words(made, "--host").startswith("--host 0.0.0.0 --port 8000 --shutdown-timeout 30")
    assert made.port_file is None


def test_adapters_and_a_draft_model_are_loaded_from_the_bundles_folders(body, command):
    file = {"size": 3, "sha256": "sha256:" + "1" * 64}
    others = [
        {**file, "path": "de/adapter_config.json", "role": "adapter"},
        {**file, "path": "de/adapter_model.safetensors", "role": "adapter"},
        {**file, "path": "draft/config.json", "role": "draft"},
        {**file, "path": "draft/model.safetensors", "role": "draft"},
    ]
    adapter = {"name": "de", "files": [one["path"] for one in others[:2]], "rank": 20, "target_modules": ["q_proj"]}
    draft = {"method": "draft_model", "files": [one["path"] for one in others[2:]], "tokens": 3}
    files = sorted(body["files"] + others, key=lambda one: one["path"])
    made = command(bundle(body, files=files, adapters=[adapter], draft=draft))
    assert words(made, "--enable-lora").startswith(
        '--enable-lora --lora-modules {"name": "de", "path": "/root/b/de"} --speculative-config'
        ' {"method": "draft_model", "num_speculative_tokens": 3, "model": "/root/b/draft"} --enforce-eager'
    )
    assert words(made, "--max-loras") == "--max-loras 1 --max-lora-rank 32"


def test_kernels_that_vllm_chooses_better_by_itself_are_not_named(body, command):
    assert "--quantization" not in command(bundle(body, quantization={"method": "awq"})).argv


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"engine": {"arguments": ["--bogus"]}}, "unknown argument --bogus"),
        ({"engine": {"arguments": ["--max_num_seqs", "4"]}}, "unknown argument --max_num_seqs; write --max-num-seqs"),
        ({"engine": {"arguments": ["--max-num", "4"]}}, "unknown argument --max-num;"),
        ({"engine": {"arguments": ["stray"]}}, "'stray' follows no argument that takes it"),
        ({"engine": {"arguments": ["--port", "1"]}}, "--port is set by the runner"),
        ({"engine": {"arguments": ["--host=0.0.0.0"]}}, "--host is set by the runner"),
        ({"engine": {"arguments": ["--model", "other/model"]}}, "--model is set by the runner"),
        ({"engine": {"arguments": ["--trust-remote-code"]}}, "--trust-remote-code is set from engine.remote_code"),
        ({"engine": {"arguments": ["--hf-token", "x"]}}, "--hf-token is a secret"),
        ({"engine": {"arguments": ["--middleware", "os.system"]}}, "--middleware loads code that is not in the bundle"),
        ({"engine": {"arguments": ["--tokenizer", "/etc"]}}, "--tokenizer loads weights or words that are not in"),
        ({"engine": {"arguments": ["--load-format", "dummy"]}}, "--load-format must be one of safetensors"),
        ({"engine": {"arguments": ["--kv-transfer-config", "{}"]}}, "--kv-transfer-config names other hosts"),
        ({"engine": {"arguments": ["--otlp-traces-endpoint", "http://x"]}}, "sends what the engine sees to another"),
        ({"engine": {"arguments": ["--max-num-seqs"]}}, "--max-num-seqs needs a value"),
        ({"engine": {"arguments": ["--max-num-seqs", "four"]}}, "--max-num-seqs must be an integer, not 'four'"),
        ({"engine": {"arguments": ["--max-num-seqs", "0"]}}, "--max-num-seqs must be 1 to 65536, not 0"),
        ({"engine": {"arguments": ["--enforce-eager=1"]}}, "--enforce-eager takes no value"),
        ({"engine": {"arguments": ["--enforce-eager", "--no-enforce-eager"]}}, "--no-enforce-eager is given twice"),
        ({"engine": {"arguments": ["--compilation-config", "3"]}}, "--compilation-config must be a JSON object, not 3"),
        (
            {"engine": {"arguments": ["--compilation-config", '{"backend": "os.system"}']}},
            "--compilation-config may not have the key backend",
        ),
        (
            {"engine": {"arguments": ["--compilation-config", '{"mode": true}']}},
            "--compilation-config has mode, which must be a number, not true",
        ),
        ({"engine": {"arguments": ["--max-num-seqs", "8"]}}, "contradicts runtime.max_sequences, which asks for 4"),
        (
            {"engine": {"arguments": ["--max-model-len", "1024"]}},
            "--max-model-len 1024 contradicts runtime.context_tok",
        ),
        (
            {"engine": {"arguments": ["--enable-prefix-caching"]}, "runtime": {"prefix_caching": False}},
            "--enable-prefix-caching contradicts runtime.prefix_caching",
        ),
        (
            {"engine": {"arguments": ["--generation-config", "auto"]}, "runtime": {"sampling": {"top_k": 1}}},
            "--generation-config auto contradicts runtime.sampling",
        ),
        (
            {"engine": {"arguments": ["--quantization", "fp8"]}},
            "--quantization fp8 contradicts quantization.method none",
        ),
        ({"quantization": {"method": "q4_k_m"}}, "--quantization must be one of awq"),
        ({"quantization": {"method": "none", "kv_cache": "int3"}}, "--kv-cache-dtype must be one of"),
        (
            {"engine": {"arguments": ["--structured-outputs-config", "{}"]}},
            "--structured-outputs-config names no backend",
        ),
        (
            {"engine": {"arguments": ["--structured-outputs-config", '{"backend": "auto"}']}},
            "has backend, which must be one of guidance",
        ),
        ({"engine": {"version": "0.31.1"}}, "vllm 0.31.1 is not known here, only <0.34,>=0.32"),
        ({"engine": {"version": "nightly"}}, "vllm nightly is not known here"),
        (
            {"engine": {"version": "0.33.0"}, "draft": {"method": "medusa", "tokens": 3}},
            "vLLM has the draft method medusa in versions <0.33",
        ),
        ({"engine": {"variables": {"LD_PRELOAD": "/x.so"}}}, "variable LD_PRELOAD loads code"),
        ({"engine": {"variables": {"HTTPS_PROXY": "http://x"}}}, "variable HTTPS_PROXY takes the engine out of"),
        ({"engine": {"variables": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}}, "answer wrongly past the model's last"),
        ({"engine": {"variables": {"HOME": "/root"}}}, "variable HOME is not one that an engine may be given"),
        ({"engine": {"variables": {"OMP_NUM_THREADS": "many"}}}, "variable OMP_NUM_THREADS must be an integer"),
        ({"model": {"format": "gguf"}}, "serves safetensors, not gguf"),
        ({"topology": {"nodes": 2}}, "a process on one machine has nodes 1, not 2"),
        ({"topology": {"nodes": 2, "tensor_parallel": 3}}, "nodes 2 do not each have the same number of 3 ranks"),
        ({"topology": {"nodes": 2, "data_parallel": 2}}, "and data_parallel 1, not 2"),
        (
            {"topology": {"nodes": 2}, "engine": {"arguments": ["--distributed-executor-backend", "ray"]}},
            "--distributed-executor-backend ray does not span nodes; mp does",
        ),
        ({"template": {"tool_parser": "nobody"}}, "--tool-call-parser must be one of"),
        ({"serving": {"features": ["chat", "tools"]}}, "vLLM answers 400 to tools"),
    ],
)
def test_what_the_engine_cannot_or_may_not_do_is_a_problem_before_anything_starts(body, sections, says):
    assert says in problems(body, **sections)


def test_equal_values_written_another_way_are_no_contradiction(body):
    sections = {
        "engine": {
            "arguments": [
                "--max-num-seqs=4",
                "--override-generation-config",
                json.dumps({"min_p": 0, "repetition_penalty": 1, "temperature": 0.5, "top_k": 0, "top_p": 1}),
            ]
        },
        "runtime": {"sampling": {"temperature": "0.50"}},
    }
    assert problems(body, **sections) == ""


def test_without_a_configuration_there_is_nothing_to_begin_with(body):
    files = [one for one in body["files"] if one["role"] != "config"]
    assert "there is no config.json" in problems(body, files=files)


def test_no_argument_is_both_allowed_and_refused():
    assert not set(TABLE.arguments) & set(TABLE.refused)
