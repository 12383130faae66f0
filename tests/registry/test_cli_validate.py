"""`sluicegate bundle validate` runs here, without a service, and says what it found to people and to programs."""

import json
from xml.etree import ElementTree as ET

import pytest

from registry.cli import main
from registry.cli.yaml_files import NotPlainYaml, read_yaml
from tests.support.checkpoints import adapt, micro, micro_tensors, speak


@pytest.fixture
def sound(tmp_path):
    return speak(micro(tmp_path / "m"))


@pytest.fixture
def headless(tmp_path):
    return micro(tmp_path / "headless", tensors=micro_tensors()[:11])


def run(capsys, *words):
    status = main(["bundle", "validate", *map(str, words)])
    return status, capsys.readouterr()


def test_a_sound_directory_is_said_to_be_so(capsys, sound):
    status, said = run(capsys, sound)
    assert status == 0
    assert "passed: nothing to tell" in said.out
    status, said = run(capsys, sound, "--json")
    told = json.loads(said.out)
    assert (status, told["verdict"], told["findings"]) == (0, "passed", [])
    assert told["inferred"]["architecture"] == "LlamaForCausalLM"


def test_what_blocks_is_said_with_its_values(capsys, headless):
    status, said = run(capsys, headless, "--json")
    (found,) = json.loads(said.out)["findings"]
    assert status == 1
    assert {"code", "severity", "file", "pointer", "found", "expected", "advice"} <= found.keys()
    assert (found["code"], found["severity"], found["pointer"]) == ("head-missing", "block", "/tie_word_embeddings")
    status, said = run(capsys, headless)
    assert status == 1
    assert "head-missing" in said.out
    assert "failed: 1 finding blocks" in said.out


def test_a_warning_alone_passes(capsys, tmp_path):
    root = speak(micro(tmp_path / "m"), template="{{ strftime_now('%d') }}x", config={"bos_token": None})
    (root / "chat_template.jinja").write_text(
        "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    status, said = run(capsys, root, "--json")
    assert status == 0
    assert {one["severity"] for one in json.loads(said.out)["findings"]} == {"warn"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bundle.yaml", "engine:\n  name: vllm\n  version: 0.10\n  arguments: [--max-model-len, 512]\n"),
        ("bundle.json", '{"engine": {"name": "vllm", "version": "0.10", "arguments": ["--max-model-len", "512"]}}'),
        ("bundle.toml", '[engine]\nname = "vllm"\nversion = "0.10"\narguments = ["--max-model-len", "512"]\n'),
    ],
)
def test_what_files_cannot_tell_is_read_from_any_of_three_forms(capsys, sound, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    status, said = run(capsys, sound, "-f", tmp_path / name, "--json")
    told = json.loads(said.out)
    assert status == 1
    assert [one["code"] for one in told["findings"]] == ["context-too-long", "engine-version-untried"]
    assert told["inferred"]["engine"] == {"name": "vllm", "version": "0.10"}


def test_options_say_what_engine_it_is_and_add_to_its_arguments(capsys, sound, tmp_path):
    (tmp_path / "bundle.yaml").write_text("engine: {name: sglang, version: 0.5.4, arguments: [--context-length, 64]}\n")
    options = ("--engine", "vllm", "--arg", "--max-model-len", "--arg", 512, "--json")
    status, said = run(capsys, sound, "-f", tmp_path / "bundle.yaml", *options)
    told = json.loads(said.out)
    assert (status, [one["code"] for one in told["findings"]]) == (1, ["context-too-long", "argument-unknown"])
    assert told["findings"][1]["expected"] == "--max-model-len"
    assert told["inferred"]["engine"] == {"name": "vllm", "version": None}
    status, said = run(capsys, sound, "-f", tmp_path / "bundle.yaml", "--engine-version", "0.5.5", "--json")
    assert (status, json.loads(said.out)["inferred"]["engine"]) == (0, {"name": "sglang", "version": "0.5.5"})


def test_a_truncated_file_is_a_finding_whatever_was_asked_for(capsys, tmp_path):
    (tmp_path / "m").mkdir()
    for name in ("m-q4_0.gguf", "m-q8_0.gguf"):
        (tmp_path / "m" / name).write_bytes(b"GGUF\x03\0\0\0\x05")
    for words in ((tmp_path / "m",), (tmp_path / "m", "--weights", "q8_0"), (tmp_path / "m" / "m-q8_0.gguf",)):
        status, said = run(capsys, *words, "--json")
        told = json.loads(said.out)
        assert (status, told["verdict"]) == (1, "failed")
        assert "header-invalid" in {one["code"] for one in told["findings"]}
    status, said = run(capsys, tmp_path / "m", "--weights", "q2_k")
    assert (status, "q2_k" in said.err) == (2, True)
    (tmp_path / "m" / "nothing.txt").touch()
    status, said = run(capsys, tmp_path / "m" / "nothing.txt")
    assert (status, "neither a directory nor a file" in said.err) == (2, True)


def test_an_engine_or_accelerator_that_nothing_knows_is_said(capsys, sound, tmp_path):
    (tmp_path / "bundle.yaml").write_text("engine: vlm\nserving: {served_name: m}\n")
    status, said = run(capsys, sound, "-f", tmp_path / "bundle.yaml", "--json")
    (found,) = json.loads(said.out)["findings"]
    assert (status, found["code"], found["severity"], found["file"]) == (1, "engine-unknown", "block", None)
    assert found["message"].endswith("engine vlm; did you mean vllm?")
    (tmp_path / "bundle.yaml").write_text("engine: custom\nhardware: {accelerator: nvidia-h1000}\n")
    status, said = run(capsys, sound, "-f", tmp_path / "bundle.yaml", "--json")
    found = {one["code"]: one for one in json.loads(said.out)["findings"]}
    assert (status, found.keys()) == (0, {"engine-unknown", "accelerator-unknown"})
    assert (found["engine-unknown"]["severity"], found["engine-unknown"]["pointer"]) == ("warn", "/engine/name")
    assert found["accelerator-unknown"]["message"].endswith("did you mean h100?")
    (tmp_path / "bundle.yaml").write_text("engine: llama_cpp\n")
    status, said = run(capsys, sound, "-f", tmp_path / "bundle.yaml", "--json")
    assert (status, said.err) == (1, "")


@pytest.mark.parametrize(
    ("name", "raw"),
    [("chat_template.jinja", b"\xff\xfe{{ x }}"), ("config.json", b"\xef\xbb\xbf{}"), ("config.json", b'{"a": NaN}')],
)
def test_what_cannot_be_read_is_the_one_finding(capsys, sound, name, raw):
    (sound / name).write_bytes(raw)
    status, said = run(capsys, sound, "--json")
    assert (status, [one["code"] for one in json.loads(said.out)["findings"]]) == (1, ["config-unparseable"])


def test_a_repository_in_the_hub_s_cache_is_told_where_its_files_are(capsys, tmp_path):
    snapshot = micro(tmp_path / "models--org--m" / "snapshots" / ("a" * 40))
    (tmp_path / "models--org--m" / "blobs").mkdir()
    status, said = run(capsys, tmp_path / "models--org--m")
    assert (status, str(snapshot) in said.err) == (2, True)
    assert run(capsys, snapshot)[0] == 0


def test_adapters_are_directories_beside_the_model_or_the_file(capsys, sound, tmp_path):
    adapt(tmp_path / "elsewhere", lora_alpha=0)
    (tmp_path / "bundle.yaml").write_text("adapters:\n  adpt: elsewhere\n")
    status, said = run(capsys, sound, "-f", tmp_path / "bundle.yaml", "--json")
    (found,) = json.loads(said.out)["findings"]
    assert (status, found["code"], found["file"]) == (1, "adapter-no-effect", "elsewhere/adapter_config.json")


def test_what_is_wrong_with_an_adapter_elsewhere_is_told_by_its_place(capsys, sound, tmp_path):
    adapt(tmp_path / "lora", size=(8, 16))
    (tmp_path / "lora" / "adapter_notes.json").write_text("")
    (tmp_path / "bundle.json").write_text('{"adapters": {"de": "lora"}}')
    status, said = run(capsys, sound, "-f", tmp_path / "bundle.json", "--json")
    found = {one["code"]: one["file"] for one in json.loads(said.out)["findings"]}
    assert status == 1
    assert found["lora-shape"] == "lora/adapter_model.safetensors"
    assert found["empty-file"] == "lora/adapter_notes.json"


def test_reports_for_other_programs_are_written_beside(capsys, headless, tmp_path):
    junit, sarif = tmp_path / "report.xml", tmp_path / "report.sarif"
    status, _ = run(capsys, headless, "--junit", junit, "--sarif", sarif)
    assert status == 1
    suite = ET.parse(junit).getroot().find("testsuite")
    assert (suite.get("failures"), suite.get("tests")) == ("1", str(len(suite)))
    (failure,) = suite.iter("failure")
    assert failure.get("type") == "head-missing"
    log = json.loads(sarif.read_text())
    (result,) = log["runs"][0]["results"]
    assert (log["version"], result["ruleId"], result["level"]) == ("2.1.0", "head-missing", "error")
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "config.json"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("engine: [1]\n", "/engine"),
        ("topology: {tensor_parallel: many}\n", "/topology/tensor_parallel"),
        ("adapters: {a: 3}\n", "/adapters/a"),
        ("engine: {arguments: {}, name: {}}\n", "/engine/name"),
        ("- a\n", ""),
        ("a: &x 1\nb: *x\n", ""),
        ("a: 1\na: 2\n", ""),
        ("a: !!python/object:os.system {}\n", ""),
        ("a: [\n", ""),
        ("adapters: {a: nowhere}\n", "nowhere"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_a_usage_error(capsys, sound, tmp_path, text, place):
    (tmp_path / "bundle.yaml").write_text(text)
    status, said = run(capsys, sound, "-f", tmp_path / "bundle.yaml")
    assert status == 2
    assert place in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("words", [["nowhere"], [], [".", "-f", "nowhere.yaml"], [".", "--junit"]])
def test_usage_is_status_two(capsys, words):
    assert run(capsys, *words)[0] == 2


def test_a_report_that_cannot_be_written_is_a_usage_error(capsys, sound, tmp_path):
    assert run(capsys, sound, "--junit", tmp_path / "no" / "report.xml")[0] == 2


def test_the_digest_of_what_is_loaded_is_told_when_asked_for(capsys, sound):
    _, said = run(capsys, sound, "--digest", "--json")
    assert json.loads(said.out)["inferred"]["weights"]["digest"].startswith("sha256:")
    _, said = run(capsys, sound, "--json")
    assert "digest" not in json.loads(said.out)["inferred"]["weights"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 0.10", {"a": "0.10"}),
        ("a: yes", {"a": "yes"}),
        ("a: true", {"a": True}),
        ("a: 2026-11-29", {"a": "2026-11-29"}),
        ("a: 010", {"a": "010"}),
        ("a: 8", {"a": 8}),
        ("a: null\nb: ~\nc:", {"a": None, "b": None, "c": None}),
        ("a: [1, b, {c: d}]", {"a": [1, "b", {"c": "d"}]}),
        ("1: a", {"1": "a"}),
    ],
)
def test_yaml_says_what_json_could(text, expected):
    assert read_yaml(text.encode(), limit=1000) == expected


@pytest.mark.parametrize("text", ["a: " + "[" * 200, "[a]: b", "a: b: c", "\xff", "<<: {a: 1}\n<<: {b: 2}", "x" * 2000])
def test_yaml_that_says_more_is_refused(text):
    with pytest.raises(NotPlainYaml):
        read_yaml(text.encode("latin-1"), limit=1000)
