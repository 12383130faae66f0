"""Arguments and variables by which an engine loads what is not in its bundle are refused, also when abbreviated."""

import pytest

from gates.files.document import refuse_document
from gates.files.launch import ORDINARY, REFUSED, refuse_launch
from gates.static.spellings import spellings
from schemas.bundle import Bundle
from tests.support.factories import bundle_body, file_entry

PATHS = ("config.json", "draft/config.json", "lora/de/adapter_config.json", "model.safetensors")


def refused(engine, *arguments, **variables):
    return [one.pointer for one in refuse_launch(engine, arguments, variables, PATHS)]


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("vllm", ["--middleware", "os.system"]),
        ("vllm", ["--middle=os.system"]),
        ("vllm", ["--worker-cls", "a.b"]),
        ("vllm", ["--worker_extension_cls=a.b"]),
        ("vllm", ["--tool-parser-plugin", "/x.py"]),
        ("vllm", ["--tool-p", "/x.py"]),
        ("vllm", ["--reasoning-parser-plugin", "/x.py"]),
        ("vllm", ["--logits-processors", "a:B"]),
        ("vllm", ["--distributed-executor-backend", "a.Executor"]),
        ("vllm", ["--kv-transfer-config", '{"kv_connector": "X", "kv_connector_module_path": "a.b"}']),
        ("vllm", ["--kv-transfer-config.kv_connector_module_path", "a.b"]),
        ("vllm", ["--config", "x.yaml"]),
        ("vllm", ["--tokenizer", "other/repo"]),
        ("vllm", ["--tokenizer"]),
        ("vllm", ["--tokenizer", "/etc"]),
        ("vllm", ["--tokenizer", "draft/.."]),
        ("vllm", ["--hf-config-p=other/repo"]),
        ("vllm", ["--download-dir", "/root"]),
        ("vllm", ["--lora-modules", "de=lora/de", "fr=other/repo"]),
        ("vllm", ["--lora-modules", '{"name": "fr", "path": "other/repo"}']),
        ("vllm", ["--lora-modules", "{"]),
        ("vllm", ["--load-format", "Dummy"]),
        ("vllm", ["--load-f=tensorizer"]),
        ("vllm", ["--speculative-config", '{"model": "other/repo", "num_speculative_tokens": 3}']),
        ("vllm", ["--spec", '{"model": "other/repo"}']),
        ("vllm", ["--speculative-config.model", "other/repo"]),
        ("vllm", ["--speculative-config", "[" * 4000]),
        ("vllm", ["--kv-transfer-config", '{"kv_connector_extra_config": {"spec_module_path": "a.b"}}']),
        ("vllm", ["--kv-transfer-config.kv_connector_extra_config.spec-module-path", "a.b"]),
        ("vllm", ["--ec-transfer-config", '{"ec_connector_module_path": "a.b"}']),
        ("vllm", ["--ec-manager-config.encoder_cache_manager_cls=a.B"]),
        ("vllm", ["--structured-outputs-config", '{"reasoning_parser_plugin": "/x.py"}']),
        ("vllm", ["--structured_outputs_config.reasoning_parser_plugin", "/x.py"]),
        ("vllm", ["-cc", '{"backend": "a.b"}']),
        ("vllm", ["-cc.backend", "a.b"]),
        ("vllm", ["--compilation-config", '{"inductor_passes": {"mine": "a.b"}}']),
        ("vllm", ["--spec-model", "other/repo"]),
        ("vllm", ["--generation-config", "/etc"]),
        ("sglang", ["--sidecar", "a.b"]),
        ("sglang", ["--hicache-storage-backend-extra-config", '{"module_path": "a.b"}']),
        ("sglang", ["--hicache-storage-backend-extra-config", "@x.toml"]),
        ("sglang", ["--unified-cache-external-linker-config", '{"linker": "L", "linker_module_path": "a.b"}']),
        ("sglang", ["--quantization-param-path", "/etc/scales.json"]),
        ("sglang", ["--config", "x.yaml"]),
        ("sglang", ["--model-path", "other/repo"]),
        ("sglang", ["--tokenizer-path=other/repo"]),
        ("sglang", ["--lora-paths", "fr=other/repo"]),
        ("sglang", ["--speculative-draft-model", "other/repo"]),
        ("sglang", ["--load-format", "remote"]),
        ("trtllm", ["--custom_module_dirs", "/x"]),
        ("trtllm", ["--config", "more.yaml"]),
        ("trtllm", ["--tokenizer=other/repo"]),
        ("trtllm", ["--set", "a.b=c"]),
        ("tgi", ["--model-id", "other/repo"]),
        ("tgi", ["--lora-adapters", "de=lora/de,fr=other/repo"]),
        ("tgi", ["--tokenizer-config-path", "/etc/x.json"]),
        ("tgi", ["--ngrok"]),
        ("transformers", ["--attn-implementation", "kernels-community/flash-attn"]),
        ("transformers", ["--decision-config=/etc/x.json"]),
    ],
)
def test_an_argument_that_leads_out_of_the_bundle_is_refused_at_its_place(engine, arguments):
    assert refused(engine, "--port", "8000", *arguments) == ["/engine/arguments/2"]


@pytest.mark.parametrize("engine", REFUSED)
@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "HF_ENDPOINT", "https_proxy"])
def test_a_variable_that_leads_out_of_the_bundle_is_refused_at_its_place(engine, name):
    assert refused(engine, **{name: "/x", "OMP_NUM_THREADS": "2"}) == [f"/engine/variables/{name}"]


def test_plugins_of_vllm_are_refused():
    assert refused("vllm", VLLM_PLUGINS="x") == ["/engine/variables/VLLM_PLUGINS"]


VLLM = [
    *("--tensor-parallel-size", "2", "-tp", "2", "--max-model-len", "32k", "--gpu-memory-utilization=0.9"),
    *("--enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--reasoning-parser", "qwen3", "--tokenizer", "./draft/", "-O3", "--tokenizer-mode", "auto"),
    *("--config-format", "mistral", "--load-format", "mistral", "--model-impl", "auto", "--model-loader-extra-config"),
    *('{"enable_multithread_load": true}', "--lora-modules", "de=lora/de", "--max-loras", "2", "--seed", "-1"),
    *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}', "--chat-template", "x.jinja"),
    *("--distributed-executor-backend", "mp", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'),
    *("--served-model-name", "other/name", "--generation-config", "vllm", "--hf-overrides", '{"a": 1}'),
    *(
        "--structured-outputs-config",
        '{"backend": "guidance", "reasoning_parser_plugin": ""}',
        "--spec-method",
        "ngram",
    ),
    *("-cc.mode", "3", "--compilation-config", '{"backend": "inductor"}', "--kv-transfer-config.kv_role", "kv_both"),
]
SGLANG = [
    *("--tp-size", "2", "--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3", "--mem-fraction-static", "0.8"),
    *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "draft", "--tokenizer-mode", "auto"),
    *("--lora-paths", "de=lora/de", "lora/de", "--load-format", "safetensors", "--load-balance-method", "round_robin"),
    *("--quantization", "fp8", "--hicache-storage-backend", "file", "--quantization-param-path", "config.json"),
    *("--context-length", "8192", "--json-model-override-args", "{}", "--model-loader-extra-config", "{}"),
]


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        ("vllm", VLLM),
        ("vllm", ["--speculative-config", '{"model": "draft"}', "--worker-cls", "auto", "--compilation-config", "3"]),
        ("sglang", SGLANG),
        ("trtllm", ["--tp_size", "2", "--backend", "tensorrt", "--tokenizer", ".", "--server_role", "CONTEXT"]),
        ("tgi", ["--lora-adapters", "de=lora/de", "--max-total-tokens", "8", "--model-id", "."]),
        ("transformers", ["--attn-implementation", "sdpa", "--dtype", "auto", "--reasoning", "on"]),
        ("llamacpp", ["--model", "other", "--middleware", "x"]),
    ],
)
def test_ordinary_arguments_and_those_of_engines_without_a_table_are_not_refused(engine, arguments):
    assert refused(engine, *arguments, OMP_NUM_THREADS="2", VLLM_USE_V1="1", CUDA_VISIBLE_DEVICES="0") == []


@pytest.mark.parametrize("engine", REFUSED)
def test_no_argument_of_an_engine_is_taken_for_the_beginning_of_a_refused_one(engine):
    beginnings = [
        name
        for name in (one.replace("_", "-") for one in spellings(engine, None).names)
        if name not in REFUSED[engine] and name not in ORDINARY and any(one.startswith(name) for one in REFUSED[engine])
    ]
    assert beginnings == []


def test_a_document_is_refused_with_what_was_found_and_what_helps():
    files = [
        file_entry(path, path.encode(), role)
        for path, role in (("config.json", "config"), ("m.safetensors", "weights"))
    ]
    engine = {
        "name": "vllm", "version": "0.32.0", "image": "vllm@sha256:" + "1" * 64,
        "arguments": ["--middleware", "x"], "variables": {"HTTP_PROXY": "http://x"},
    }  # fmt: skip
    body = bundle_body(files=files, engine=engine, model={"format": "safetensors", "architecture": "llama"})
    told = [(place, one.code, one.found) for place, one in refuse_document(Bundle.model_validate(body)) if one.advice]
    assert told == [
        ("/engine/arguments/0", "launch-refused", "--middleware"),
        ("/engine/variables/HTTP_PROXY", "launch-refused", "http://x"),
    ]
