"""One file of `-f` says to create, validate and plan what files cannot tell, in YAML, JSON and TOML."""

import json

import pytest

from registry.cli.declarations import as_patch
from registry.cli.strange import refuse_strange
from registry.cli.yaml_files import read_yaml
from schemas.bundle import Bundle
from schemas.common import MAX_DOCUMENT_BYTES, MAX_INTEGER, canonical_json
from schemas.problems import InvalidDocument
from tests.support.checkpoints import adapt, micro, speak
from tests.support.factories import bundle_body

YAML = """\
engine:
  family: vLLM
  version: 0.32.0
  args: [--max-model-len, 128, --enable-auto-tool-choice]
  image: vllm@sha256:{image}
  libraries: {{transformers: 5.19.0}}
  env: {{A: b}}
topology: {{tp: 2}}
hardware: {{gpu_arch: nvidia-h100, gpus: 2, memory_bytes: 80000000000}}
context_length: 64
adapters: {{support: lora}}
draft: {{directory: small, method: draft_model, tokens: 4}}
served_name: qwen
features: {{streaming: true, chat: true, tools: false}}
drain: {{termination_grace_seconds: 90, shutdown_seconds: 60}}
"""


@pytest.fixture
def folder(tmp_path):
    speak(micro(tmp_path / "m"))
    adapt(tmp_path / "lora")  # beside the file
    speak(micro(tmp_path / "m" / "small"))  # inside the directory
    (tmp_path / "bundle.yaml").write_text(YAML.format(image="1" * 64))
    return tmp_path


def create(command, folder, *words, file="bundle.yaml"):
    command.use("http://127.0.0.1:1", "token")
    return command("bundle", "create", folder / "m", "--name", "m", "-f", folder / file, *words, "--dry-run", "--json")


def test_create_takes_what_validate_and_plan_take(command, folder):
    made = create(command, folder)
    assert made.status == 0, made
    bundle = Bundle.model_validate(made.json)
    engine = bundle.engine
    assert (engine.name, engine.version) == ("vllm", "0.32.0")
    assert engine.arguments == ["--max-model-len", "128", "--enable-auto-tool-choice"]
    assert engine.build == {"transformers": "5.19.0"}
    assert engine.variables == {"A": "b"}
    assert bundle.topology.tensor_parallel == 2
    assert (bundle.hardware.accelerator, bundle.hardware.count) == ("nvidia-h100", 2)
    assert bundle.runtime.context_tokens == 64
    assert [(one.name, one.files) for one in bundle.adapters] == [
        ("support", ["adapters/support/adapter_config.json", "adapters/support/adapter_model.safetensors"])
    ]
    assert (bundle.draft.method, bundle.draft.tokens) == ("draft_model", 4)
    assert "draft/model.safetensors" in bundle.draft.files
    assert bundle.serving.served_name == "qwen"
    assert bundle.serving.features == ["chat", "streaming"]
    validated = command("bundle", "validate", folder / "m", "-f", folder / "bundle.yaml", "--json")
    assert validated.status == 0, validated
    assert validated.json["inferred"]["draft"] == "small"
    assert validated.json["inferred"]["adapters"] == ["support"]
    planned = command("bundle", "plan", folder / "m", "-f", folder / "bundle.yaml", "--device-memory", "80GB", "--json")
    assert planned.status == 0, planned
    assert planned.json["topology"]["tensor_parallel"] == 2
    assert planned.json["devices"][0]["draft_bytes"] > 0


def test_json_and_toml_say_the_same(command, folder):
    by_yaml = create(command, folder).json
    told = {
        "engine": {
            "name": "vllm",
            "version": "0.32.0",
            "image": "vllm@sha256:" + "1" * 64,
            "variables": {"A": "b"},
            "arguments": ["--max-model-len", "128", "--enable-auto-tool-choice"],
            "build": {"transformers": "5.19.0"},
        },
        "topology": {"tensor_parallel": 2},
        "hardware": {"accelerator": "nvidia-h100", "count": 2, "memory_bytes": 80_000_000_000},
        "runtime": {"context_tokens": 64},
        "adapters": [{"name": "support", "directory": "lora"}],
        "draft_model": {"folder": "small", "method": "draft_model", "tokens": 4},
        "serving": {"served_name": "qwen", "features": ["streaming", "chat"]},
    }
    (folder / "bundle.json").write_text(json.dumps(told))
    assert create(command, folder, file="bundle.json").json == by_yaml
    lines = [
        'served_name = "qwen"',
        'features = ["chat", "streaming"]',
        "context_length = 64",
        "[engine]",
        *(f"{key} = {json.dumps(value)}" for key, value in told["engine"].items() if isinstance(value, str | list)),
        '[engine.build]\ntransformers = "5.19.0"\n[engine.variables]\nA = "b"',
        "[topology]\ntp = 2",
        '[hardware]\naccelerator = "nvidia-h100"\ncount = 2\nmemory_bytes = 80000000000',
        '[adapters]\nsupport = "lora"',
        '[draft]\ndirectory = "small"\nmethod = "draft_model"\ntokens = 4',
    ]
    (folder / "bundle.toml").write_text("\n".join(lines))
    assert create(command, folder, file="bundle.toml").json == by_yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engine: {name: vllm}\nengine: {name: sglang}\n", "twice"),
        ("engine: &a {name: vllm}\n", "anchor"),
        ("engine: *a\n", "alias"),
        ("engine: !!python/object:os.system {}\n", "tag"),
        ("engine: {name: vllm, family: sglang}\n", "/engine/family"),
        ("served_name: a\nserving: {name: b}\n", "/serving/name"),
        ("adapters: {support: nowhere}\n", "no directory nowhere"),
        ("adapters: {support: 3}\n", "/adapters/support"),
        ("adapters: {Bad Name: lora}\n", "/from/adapter:Bad Name"),
        ("draft: nowhere\n", "no directory nowhere"),
        ("engine: {verison: 1}\n", "verison"),
        ("servd_name: a\n", "servd_name"),
        ("a: [" * 40, "nested"),
        ("# " + "x" * MAX_DOCUMENT_BYTES, "larger"),
    ],
)
def test_what_is_not_understood_is_named(command, folder, text, said):
    (folder / "bundle.yaml").write_text(text)
    image = ("--engine-image", "vllm@sha256:" + "1" * 64, "--engine-version", "1")
    ran = create(command, folder, "--engine", "vllm", *image)
    assert ran.status == 2, ran
    assert said in json.dumps(ran.json) + ran.err


def test_a_document_s_own_names_stay_as_they_are(tmp_path):
    engine = {"environment": "x", "remote_code": {"files": []}}
    document = {"engine": engine, "licence": {"identifier": "MIT"}, "labels": {}}
    assert as_patch(document, [tmp_path]) == document
    assert as_patch({"engine": None, "adapters": None}, [tmp_path]) == {"engine": None, "adapters": None}
    assert as_patch({"adapters": [{"name": "a", "files": ["x"]}]}, []) == {"adapters": [{"name": "a", "files": ["x"]}]}
    assert as_patch({"draft": {"method": "ngram", "tokens": 2}}, []) == {"draft": {"method": "ngram", "tokens": 2}}
    assert as_patch({"draft": "hf:a/b@c"}, []) == {"from": {"draft": "hf:a/b@c"}}
    with pytest.raises(InvalidDocument):
        as_patch({"draft": ""}, [tmp_path])


STRANGE = {
    "foo": 3,
    "engin": "vllm",
    "runtime": {"contxt_tokens": 5, "sampling": {"temprature": "0.1"}},
    "engine": {"name": "vllm", "verison": "1", "compressed_tensors": "0.16.0"},
    "topology": {"tp": 1, "tensor_paralel": 2},
    "adapters": [{"name": "support", "directory": "lora", "rnk": 8}],
    "draft": {"directory": "small", "tokns": 4},
    "drain": {"shutdown_secnds": 60},
    "sources": [{"kind": "local", "note": "x"}],
}


def test_create_validate_and_plan_refuse_alike_what_nothing_reads(command, folder):
    (folder / "strange.json").write_text(json.dumps(STRANGE))
    ran = [
        create(command, folder, file="strange.json"),
        command("bundle", "validate", folder / "m", "-f", folder / "strange.json", "--json"),
        command("bundle", "plan", folder / "m", "-f", folder / "strange.json", "--device-memory", "80GB", "--json"),
    ]
    assert [one.status for one in ran] == [2, 2, 2], ran
    first, *others = (one.json["errors"] for one in ran)
    assert others == [first, first]
    said = {one["pointer"]: one["detail"] for one in first}
    assert set(said) == {
        *("/foo", "/engin", "/runtime/contxt_tokens", "/runtime/sampling/temprature", "/engine/verison"),
        *("/topology/tensor_paralel", "/adapters/0/rnk", "/draft/tokns", "/drain/shutdown_secnds", "/sources/0/note"),
    }
    assert said["/runtime/contxt_tokens"] == "is no field here; did you mean context_tokens?"
    assert said["/engin"] == "is no field here; did you mean engine?"


def test_every_key_of_a_bundle_document_and_every_short_name_is_taken(tmp_path):
    body = bundle_body()
    refuse_strange(body, "bundle.json")
    refuse_strange(dict.fromkeys((field.alias or name for name, field in Bundle.model_fields.items())), "all.json")
    told = {"engine": {"name": "vllm", "kv_replication": False}, "topology": {"arch": "sm_90"}}
    told |= {"libraries": {"transformers": "5.1"}, "labels": {"team": "search"}, "drain": {"pre_stop": 3}}
    told |= {"adapters": {"de": str(tmp_path)}, "template": {"arguments": {"think": True}}}
    refuse_strange(told, "told.json")
    patch = as_patch(told, [tmp_path])
    assert patch["engine"] == {"name": "vllm", "build": {"kv_replication": "false", "transformers": "5.1"}}
    assert (patch["topology"], patch["hardware"]) == ({}, {"accelerator": "sm_90"})


@pytest.mark.parametrize("form", ["serving: {features: [chat, chatt]}", "features: {chatt: true}"])
def test_a_feature_that_is_none_is_refused_with_the_one_that_was_meant(form):
    document = read_yaml(form.encode(), limit=MAX_DOCUMENT_BYTES)
    with pytest.raises(InvalidDocument) as caught:
        refuse_strange(document, "x.yaml")
    (error,) = caught.value.members["errors"]
    assert error["detail"] == "is no feature; did you mean chat?"
    assert error["pointer"].startswith(("/serving/features/1", "/features/chatt"))
    refuse_strange({"serving": {"features": {"chat": True, "tools": False}}, "capabilities": ["json_schema"]}, "x.yaml")


WRONG = """\
topology: {tp: 0, pp: two}
hardware: {count: -1}
context_length: 100000000000000000000000
max_sequences: 3
drain: {pre_stop: -5}
adapters: {de: 7}
serving: lots
"""


@pytest.mark.parametrize("words", [["validate"], ["plan", "--device-memory", "80GB"]])
def test_every_wrong_value_and_key_is_told_at_once_with_what_it_has_to_be(command, folder, words):
    (folder / "wrong.yaml").write_text(WRONG)
    verb, *options = words
    ran = command("bundle", verb, folder / "m", "-f", folder / "wrong.yaml", *options, "--json")
    assert (ran.status, ran.json["detail"]) == (2, f"{folder / 'wrong.yaml'}: 8 places are wrong")
    said = {one["pointer"]: one["detail"] for one in ran.json["errors"]}
    assert said == {
        "/max_sequences": said["/max_sequences"],
        "/topology/tp": f"is 0, and has to be a whole number from 1 to {MAX_INTEGER}",
        "/topology/pp": f'is "two", and has to be a whole number from 1 to {MAX_INTEGER}',
        "/hardware/count": f"is -1, and has to be a whole number from 0 to {MAX_INTEGER}",
        "/context_length": f'is "{10**23}", which is too large: it has to be a whole number from 1 to {MAX_INTEGER}',
        "/drain/pre_stop": "is -5, and has to be a number from 0 to 1000000000",
        "/adapters/de": "is 7, and has to be a directory",
        "/serving": 'is "lots", and has to be an object',
    }
    assert said["/max_sequences"].startswith("is no field here")


def test_the_least_number_that_no_document_can_have_is_refused_as_such(command, folder):
    (folder / "wrong.json").write_text(json.dumps({"context_length": MAX_INTEGER + 1}))
    ran = command("bundle", "validate", folder / "m", "-f", folder / "wrong.json", "--json")
    assert (ran.status, [one["pointer"] for one in ran.json["errors"]]) == (2, ["/context_length"])
    assert canonical_json(MAX_INTEGER) == str(MAX_INTEGER).encode()
    with pytest.raises(ValueError, match="canonical"):
        canonical_json(MAX_INTEGER + 1)


def test_a_number_that_is_too_large_for_a_document_is_told_with_its_range(command, folder):
    engine = f'{{name: vllm, version: 0.32.0, image: "vllm@sha256:{"1" * 64}"}}'
    runtime = f"{{context_tokens: {10**23}, max_sequences: 0}}"
    (folder / "large.yaml").write_text(f"engine: {engine}\nruntime: {runtime}\n")
    made = create(command, folder, file="large.yaml")
    said = {one["pointer"]: one["detail"] for one in made.json["errors"]}
    assert made.status == 2
    assert said["/runtime/context_tokens"].endswith(f"too large: it has to be a whole number of at most {MAX_INTEGER}")
    assert "at least 1" in said["/runtime/max_sequences"]
