"""What is declared by name and known to nothing here is told: versions that no driver starts, and draft methods."""

import pytest

from gates.dialects import releases
from tests.support.checkpoints import codes, micro, only, validate
from workers.engines.sglang import _ALGORITHMS


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return micro(tmp_path_factory.mktemp("known") / "m")


@pytest.mark.parametrize(
    ("name", "version", "is_told"),
    [
        ("vllm", "0.32.0", False),
        ("vllm", "0.33.0rc1", False),
        ("vllm", "0.31.9", True),
        ("vllm", "newest", True),
        ("sglang", "0.4.4", True),
        ("sglang", "0.5.23.post1", False),
        ("text-generation-inference", "1.4", True),
        ("transformers", "4.57.0", True),
        ("trtllm", "0.21.0", True),
        ("vllm", None, False),
        ("external", "1", False),
        ("llamacpp", "2026.10.11549", False),
    ],
)
def test_a_version_that_its_driver_does_not_start_warns(root, name, version, is_told):
    engine = {"name": name} | ({"version": version} if version else {})
    found = validate(root, {"engine": engine})
    assert ("engine-version-untried" in codes(found, "warn")) is is_told
    if is_told:
        told = only(found, "engine-version-untried")
        assert (told.pointer, told.found) == ("/engine/version", version)
        assert told.expected in {releases.supported(one) for one in releases.recorded()}


@pytest.mark.parametrize(
    ("name", "told", "words", "pointer", "asked"),
    [
        ("vllm", "eagle99", [], "/draft/method", "vllm is not known to draft by eagle99; did you mean eagle?"),
        ("vllm", None, ["--speculative-config", '{"method": "ngrams"}'], "--speculative-config", None),
        ("sglang", "eagle99", [], "/draft/method", "sglang is not known to draft by eagle99; did you mean eagle?"),
        ("sglang", None, ["--speculative-algorithm", "EAGEL3"], "--speculative-algorithm", None),
        ("sglang", "medusa", [], "/draft/method", None),
        ("vllm", "eagle3", ["--speculative-config.method=ngram"], None, None),
        ("sglang", "EAGLE3", ["--speculative-algorithm", "NEXTN"], None, None),
        ("trtllm", "user_provided", [], None, None),
        (None, "eagle99", [], None, None),
    ],
)
def test_a_draft_method_that_the_engine_is_not_known_to_have_warns(root, name, told, words, pointer, asked):
    declared = {"engine": {"arguments": words} | ({"name": name} if name else {})}
    found = validate(root, declared | ({"draft": {"method": told}} if told else {}))
    assert ("draft-method-unknown" in codes(found, "warn")) is (pointer is not None)
    if pointer is not None:
        one = only(found, "draft-method-unknown")
        assert one.pointer == pointer
        assert asked in {None, one.message}


def test_every_method_that_sglang_s_driver_starts_is_known(root):
    for method in _ALGORITHMS:
        assert "draft-method-unknown" not in codes(
            validate(root, {"engine": {"name": "sglang"}, "draft": {"method": method}})
        )


@pytest.mark.parametrize(
    ("name", "version", "served", "words", "pointer"),
    [
        ("sglang", "0.5.23", "qwen:7b", [], "/serving/served_name"),
        ("sglang", None, "qwen:7b", [], "/serving/served_name"),
        ("sglang", "0.5.9", None, ["--served-model-name", "qwen:7b"], "--served-model-name"),
        ("sglang", "0.5.4", "qwen:7b", [], None),
        ("vllm", "0.32.0", "qwen:7b", [], None),
        ("sglang", "0.5.23", "org/qwen-7b", [], None),
    ],
)
def test_a_served_name_that_the_engine_refuses_blocks(root, name, version, served, words, pointer):
    engine = {"name": name, "arguments": words} | ({"version": version} if version else {})
    found = validate(root, {"engine": engine} | ({"serving": {"served_name": served}} if served else {}))
    told = [one.pointer for one in found.flaws if (one.code, one.severity) == ("served-name-refused", "block")]
    assert told == ([pointer] if pointer else [])


@pytest.mark.parametrize(
    ("name", "version", "template", "severity"),
    [
        ("vllm", "0.32.0", {"tool_parser": "hermess"}, "block"),
        ("vllm", "0.32.0", {"reasoning_parser": "deepseek"}, "block"),
        ("vllm", None, {"tool_parser": "hermess"}, "warn"),
        ("sglang", "0.5.23", {"tool_parser": "hermess"}, "block"),
        ("trtllm", "1.3.0", {"tool_parser": "qwen9"}, "warn"),
        ("vllm", "0.32.0", {"tool_parser": "hermes", "reasoning_parser": "qwen3"}, None),
        ("sglang", "0.5.23", {"tool_parser": "qwen25", "reasoning_parser": "auto"}, None),
        ("vllm", "0.20.0", {"tool_parser": "hermess"}, None),
        ("tgi", "3.3.6", {"tool_parser": "hermess"}, None),
    ],
)
def test_a_parser_that_the_document_names_is_one_of_the_engine_s(root, name, version, template, severity):
    engine = {"name": name} | ({"version": version} if version else {})
    found = validate(root, {"engine": engine, "template": template})
    told = [(one.pointer, one.severity, one.found) for one in found.flaws if one.code == "argument-value"]
    (at,) = [(f"/template/{key}", severity, value) for key, value in template.items()][:1]
    assert told == ([at] if severity else [])
