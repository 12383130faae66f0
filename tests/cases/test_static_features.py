"""Neighbours of the incident cases of declared features: what an argument takes away, and templates of processors."""

import pytest

from tests.support.checkpoints import T0, alarms, micro, micro_tensors, only, speak, validate, write_json

VLLM, SGLANG, TGI = ("vllm", "0.32.0"), ("sglang", "0.5.15"), ("tgi", "3.3.6")


@pytest.mark.parametrize(
    ("engine", "words", "features", "is_fault"),
    [
        (VLLM, "", ["embeddings"], True),
        (VLLM, "--runner generate", ["embeddings"], True),
        (VLLM, "--runner pooling", ["embeddings"], False),
        (VLLM, "--runner pooling", ["completions"], True),
        (VLLM, "--runner auto", ["completions"], False),
        (("vllm", "0.9.2"), "--task embed", ["embeddings"], False),
        (("vllm", "0.9.2"), "--task embed", ["completions"], True),
        (VLLM, "--max-logprobs 0", ["completions", "logprobs"], True),
        (VLLM, "--max-logprobs 5", ["completions", "logprobs"], False),
        (SGLANG, "--grammar-backend none", ["completions", "json_schema"], True),
        (SGLANG, "--grammar-backend none", ["completions"], False),
        (SGLANG, "--grammar-backend xgrammar", ["completions", "json_schema"], False),
        (TGI, "--disable-grammar-support", ["completions", "json_schema"], True),
        (TGI, "--disable-grammar-support", ["completions"], False),
    ],
)
def test_c112_a_feature_that_an_argument_takes_away_is_not_served(tmp_path, engine, words, features, is_fault):
    root = speak(micro(tmp_path / "m", eos_token_id=2), template=T0.replace("<|im_end|>", "</s>"))
    told = {"name": engine[0], "version": engine[1], "arguments": words.split()}
    found = validate(root, {"engine": told, "features": features})
    assert ("feature-not-served" in alarms(found)) is is_fault
    assert alarms(found) <= {"feature-not-served", "engine-version-untried"}


def test_c015_what_pools_by_itself_needs_no_argument_for_embeddings(tmp_path):
    declared = {"engine": {"name": "vllm", "version": "0.32.0"}, "features": ["embeddings"]}
    headless = micro(tmp_path / "m", tensors=micro_tensors()[:-1], architectures=["LlamaModel"])
    assert "feature-not-served" not in alarms(validate(headless, declared))
    root = micro(tmp_path / "n")
    assert only(validate(root, declared), "feature-not-served").expected == {"argument": "--runner pooling"}
    write_json(root / "modules.json", [{"idx": 1, "type": "sentence_transformers.models.Pooling"}])
    assert "feature-not-served" not in alarms(validate(root, declared))


@pytest.mark.parametrize(("text", "is_fault"), [(T0, False), ("x" + T0, True)])
def test_c034_a_template_of_the_processor_is_the_tokenizer_s(tmp_path, text, is_fault):
    root = speak(micro(tmp_path / "m"), template=None, config={"chat_template": T0})
    write_json(root / "processor_config.json", {"processor_class": "X", "chat_template": text})
    assert alarms(validate(root)) == ({"template-sources-disagree"} if is_fault else set())
