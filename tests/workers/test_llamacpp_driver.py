import re
import sys
from pathlib import Path

import pytest

from schemas.bundle import Bundle
from tests.support import chain
from tests.support.engine import UNIDENTIFIED
from workers.engines.base import Launch
from workers.engines.llamacpp import LLAMACPP, llamacpp_arguments
from workers.engines.table import DRIVERS


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    root = chain.write_bundle_directory(tmp_path_factory.mktemp("bundle"))
    return chain.describe(root, environment=UNIDENTIFIED).model_dump(mode="json", by_alias=True, exclude_none=True)


def bundle(body, **sections):
    merged = {**body, **{name: {**body[name], **change} for name, change in sections.items()}}
    return Bundle.model_validate(merged)


def problems(body, **sections):
    return " | ".join(LLAMACPP.check_bundle(bundle(body, **sections)))


def test_the_command_line_is_complete_and_in_order(body):
    launch = Launch(root=Path("/root/b"), port_file=Path("/run/port.json"), drain_seconds=12.5, parent_pid=77)
    command = LLAMACPP.command(bundle(body), launch)
    assert command.argv[:2] == (sys.executable, "-I")
    assert command.argv[2].endswith("workers/engines/llamacpp_server.py")
    assert " ".join(command.argv[3:]) == (
        "--model /root/b/model.gguf --alias chain --host 127.0.0.1 --port 0 --port-file /run/port.json"
        " --drain-seconds 12.5 --chat-template-file /root/b/chat_template.jinja --die-with-parent 77"
        " --threads 1 --poll 0 --no-warmup --parallel 4 --ctx-size 2048"
    )
    assert command.variables == {"GGML_NO_BACKTRACE": "1"}


def adapted(body, *files, role="adapter"):
    """Return the document with adapters of one file each, named in order."""
    made = [{**body["files"][-1], "path": path, "role": role} for path in files]
    told = {**body, "files": sorted(body["files"] + made, key=lambda file: file["path"])}
    names = [{"name": name, "files": [path], "rank": 8} for name, path in zip("ab", files, strict=False)]
    return {**told, "adapters": [one | {"target_modules": ["attn_q"]} for one in names]}


def test_adapters_are_loaded_in_the_document_s_order(body):
    chosen = bundle(adapted(body, "adapters/a/x.gguf", "adapters/b/w.gguf"))
    assert LLAMACPP.check_bundle(chosen) == []
    argv = " ".join(LLAMACPP.command(chosen, Launch(root=Path("/b"), port_file=Path("/p"))).argv)
    assert "--adapter a=/b/adapters/a/x.gguf --adapter b=/b/adapters/b/w.gguf --threads" in argv


def test_an_adapter_that_the_engine_cannot_load_is_a_problem(body):
    peft = LLAMACPP.check_bundle(bundle(adapted(body, "adapters/a/adapter_model.safetensors")))
    assert peft == ["adapter a is not one .gguf file; convert it with convert_lora_to_gguf.py"]
    two = adapted(body, "adapters/a/x.gguf", "adapters/a/y.gguf")
    two["adapters"] = [two["adapters"][0] | {"files": ["adapters/a/x.gguf", "adapters/a/y.gguf"]}]
    assert LLAMACPP.check_bundle(bundle(two)) == peft
    unnamed = adapted(body, "adapters/a/x.gguf") | {"adapters": None}
    assert LLAMACPP.check_bundle(bundle(unnamed)) == ["adapters/a/x.gguf has the role adapter, and no adapter names it"]


@pytest.mark.parametrize("word", ["load", "apply"])
def test_a_boot_that_an_adapter_ends_is_told_as_files_that_cannot_be_read(word):
    line = f"llama_adapter_lora_init: failed to {word} lora adapter 'x'"
    assert [cause for pattern, cause in LLAMACPP.failure_patterns if re.search(pattern, line)] == ["weights_unreadable"]


def test_what_the_document_declares_the_engine_is_told(body):
    told = llamacpp_arguments(
        bundle(
            body,
            engine={"arguments": ["--kv-unified"]},
            template={"arguments": {"enable_thinking": False}, "reasoning_parser": "none"},
            runtime={
                "max_batch_tokens": 256,
                "prefix_caching": False,
                "sampling": {"temperature": "0.7", "top_k": 20, "repetition_penalty": "1.1"},
            },
        )
    )
    assert " ".join(told) == (
        '--kv-unified --parallel 4 --ctx-size 512 --batch-size 256 --chat-template-kwargs {"enable_thinking": false}'
        " --reasoning-format none --temp 0.7 --top-k 20 --repeat-penalty 1.1 --no-cache-prompt"
    )


def test_a_good_bundle_has_no_problems(body):
    assert problems(body) == ""


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"engine": {"arguments": ["--bogus"]}}, "unknown argument --bogus"),
        ({"engine": {"arguments": ["--port", "1"]}}, "--port is set by the runner"),
        ({"engine": {"arguments": ["--parallel"]}}, "--parallel needs a value"),
        ({"engine": {"arguments": ["--parallel", "8"]}}, "--parallel 8 contradicts runtime.max_sequences 4"),
        ({"engine": {"arguments": ["--ctx-size", "512"]}}, "contradicts runtime.context_tokens 512"),
        ({"engine": {"arguments": ["--batch-size", "2"]}}, "smaller than 4 slots"),
        (
            {"engine": {"arguments": ["--cache-prompt"]}, "runtime": {"prefix_caching": False}},
            "--cache-prompt contradicts runtime.prefix_caching",
        ),
        (
            {"engine": {"arguments": ["--temp", "1"]}, "runtime": {"sampling": {"temperature": "0.5"}}},
            "--temp 1 contradicts runtime.sampling.temperature 0.5",
        ),
        ({"engine": {"variables": {"LD_PRELOAD": "/x.so"}}}, "variable LD_PRELOAD"),
        ({"engine": {"variables": {"PYTHONPATH": "/x"}}}, "variable PYTHONPATH"),
        ({"model": {"format": "safetensors"}}, "reads gguf, not safetensors"),
        ({"template": {"tool_parser": "hermes"}}, "tool parser"),
        ({"topology": {"tensor_parallel": 2}}, "tensor_parallel 1, not 2"),
        ({"template": {"reasoning_parser": "qwen3"}}, "--reasoning-format qwen3"),
    ],
)
def test_what_the_engine_cannot_do_is_a_problem_before_anything_starts(body, sections, says):
    assert says in problems(body, **sections)


def test_equal_sampling_written_another_way_is_no_contradiction(body):
    sections = {
        "engine": {"arguments": ["--temp", "0.50"]},
        "runtime": {"sampling": {"temperature": "0.5"}},
    }
    assert problems(body, **sections) == ""


def test_variables_of_the_kernels_are_passed_on(body):
    chosen = bundle(body, engine={"variables": {"OMP_NUM_THREADS": "2"}})
    assert LLAMACPP.check_bundle(chosen) == []
    launch = Launch(root=Path("/b"), port_file=Path("/p"))
    assert LLAMACPP.command(chosen, launch).variables["OMP_NUM_THREADS"] == "2"


def weights(body, *paths):
    files = [{**body["files"][-1], "path": path} for path in paths]
    others = [file for file in body["files"] if file["role"] != "weights"]
    return Bundle.model_validate({**body, "files": sorted(others + files, key=lambda file: file["path"])})


def test_a_complete_set_of_shards_is_loaded_by_its_first(body):
    complete = weights(body, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert LLAMACPP.check_bundle(complete) == []
    argv = LLAMACPP.command(complete, Launch(root=Path("/b"), port_file=Path("/p"))).argv
    assert argv[argv.index("--model") + 1] == "/b/m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    "paths",
    [
        ("m-00001-of-00003.gguf", "m-00002-of-00003.gguf"),
        ("m-00002-of-00002.gguf", "n-00002-of-00002.gguf"),
        ("a.gguf", "b.gguf"),
        ("a.bin",),
    ],
)
def test_weights_that_are_no_complete_set_are_a_problem(body, paths):
    assert "neither one .gguf file nor a complete set" in " ".join(LLAMACPP.check_bundle(weights(body, *paths)))


def test_the_environment_is_named_by_what_is_installed():
    identity = LLAMACPP.identity()
    assert identity == LLAMACPP.identity()
    assert identity.distributions == (f"xllamacpp=={identity.version}",)
    assert identity.files >= 5


def test_every_driver_is_listed_under_its_own_name():
    assert {name: driver.name for name, driver in DRIVERS.items()} == {name: name for name in DRIVERS}
