"""Files that are written to take time or memory, or to break the judge, are judged like any others."""

import json

import pytest

from gates.static import patterns
from tests.support.checkpoints import (
    SHARDS,
    T0,
    T,
    added_token,
    codes,
    edit_json,
    micro,
    micro_sharded,
    micro_tensors,
    only,
    speak,
    tok,
    validate,
    write_json,
)

SPECIAL = added_token(1, "<|x|>", special=True)
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}


@pytest.mark.parametrize("name", [{}, [], 1, None])
def test_a_class_of_tokenizer_that_is_no_name_is_none(tmp_path, name):
    assert "special-token-unknown" not in codes(
        validate(speak(micro(tmp_path / "m"), config={"tokenizer_class": name}))
    )


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "", "٣"])
def test_ids_that_are_no_numbers_are_none(tmp_path, number):
    told = {"eos_token": "<|x|>", "added_tokens_decoder": {number: SPECIAL}}
    found = validate(speak(micro(tmp_path / "m"), config=told))
    assert "special-token-unknown" in codes(found, "block")
    write_json(micro(tmp_path / "n") / "tokenizer_config.json", told)
    assert validate(tmp_path / "n").inferred["stops"]["tokenizer"] == []


def test_more_experts_than_any_model_has_are_not_counted_through(tmp_path):
    root = micro(tmp_path / "m", **MOE, num_hidden_layers=4096, num_experts=65_536)
    assert only(validate(root), "size-absurd").found == 65_536
    assert "size-absurd" not in codes(validate(micro(tmp_path / "n", **MOE, num_hidden_layers=4, num_experts=512)))


def test_a_pattern_of_many_stars_matches_nothing(tmp_path):
    told = GPTQ | {"modules_to_not_convert": ["*a" * 40], "group_size": 16}
    found = validate(micro(tmp_path / "m", quantization_config=told), {"topology": {"tp": 2}})
    assert "quant-group-tp" in codes(found, "block")


@pytest.mark.parametrize("pattern", ["re:.*a.*a.*a.*a.*a.*ab", "re:" + "a?" * 24 + "a" * 24 + "b", "*a*a*a*a*b"])
def test_a_pattern_that_could_be_read_in_very_many_ways_takes_no_time(tmp_path, pattern):
    tensors = [*micro_tensors(), T(f"model.layers.0.{'a' * 230}.weight", "BF16", (8, 8))]
    told = GPTQ | {"modules_to_not_convert": [pattern], "group_size": 16}
    root = micro(tmp_path / "m", tensors=tensors, quantization_config=told)
    assert "quant-group-tp" in codes(validate(root, {"topology": {"tp": 2}}), "block")


def test_patterns_that_take_long_together_are_ended_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(patterns, "MOST_SECONDS", 0.001)
    slow = [f"re:.*a.*a.*a{number}" for number in range(4000)]
    long = [T(f"model.layers.{layer}.{'a' * 200}.weight", "BF16", (8, 8)) for layer in range(2)]
    told = GPTQ | {"modules_to_not_convert": slow, "group_size": 16}
    root = micro(tmp_path / "m", tensors=[*micro_tensors(), *long], quantization_config=told)
    found = only(validate(root, {"topology": {"tp": 2}}), "quant-patterns-slow")
    assert (found.severity, found.found["count"], found.pointer) == ("block", 4000, "/quantization_config")


@pytest.mark.parametrize(
    ("pattern", "is_left"),
    [
        (r"re:.*model.layers.[0-9]+.self_attn.*|.*mlp.[a-z]+_proj", True),
        (r"re:model\.layers\.\d+\..*_proj$", True),
        ("model.layers.*.*_proj", True),
        ("*proj*", True),
        ("*_proj.*", False),
        ("layers.*_proj", False),
    ],
)
def test_patterns_of_what_is_left_as_it_was_are_read(tmp_path, pattern, is_left):
    told = GPTQ | {"modules_to_not_convert": [pattern], "group_size": 16}
    found = validate(micro(tmp_path / "m", quantization_config=told), {"topology": {"tp": 2}})
    assert ("quant-group-tp" not in codes(found)) is is_left


def test_thousands_of_findings_of_one_kind_are_counted(tmp_path):
    root = micro_sharded(tmp_path / "m")
    more = {f"model.layers.0.x{number}.weight": SHARDS[0] for number in range(5000)}
    edit_json(root / "model.safetensors.index.json", lambda told: told["weight_map"].update(more))
    flaws = [one for one in validate(root).flaws if one.code == "index-tensor-absent"]
    assert len(flaws) == 200
    assert flaws[-1].message.endswith(" 4800 more are like this.")


def test_a_set_of_very_many_files_lacks_the_first_that_are_not_there(tmp_path):
    root = micro_sharded(tmp_path / "m", names=("a-00001-of-99999.safetensors", "a-00002-of-99999.safetensors"))
    (root / "model.safetensors.index.json").unlink()
    flaw = only(validate(root), "shard-missing")
    assert flaw.message.startswith("99997 of 99999 files are not there")
    assert flaw.expected[0] == "a-00003-of-99999.safetensors"


def test_more_templates_than_a_model_has_are_not_all_rendered(tmp_path):
    named = [{"name": f"t{number}", "template": T0} for number in range(300)]
    root = speak(
        micro(tmp_path / "m"), template=None, config={"chat_template": [{"name": "default", "template": T0}, *named]}
    )
    assert only(validate(root), "template-fails").found == 300


def test_an_argument_of_thousands_of_keys_and_layers_that_are_all_different_end(tmp_path):
    words = ["--hf-overrides." + ".".join(["a"] * 3000), "1"]
    tensors = [T(f"model.layers.{number}.a{number}.weight", "U8", (0,)) for number in range(300)]
    root = micro(tmp_path / "m", tensors=tensors, model_type="strange", architectures=["S"], num_hidden_layers=300)
    assert codes(validate(root, {"engine": {"name": "vllm", "arguments": words}}), "block") == set()


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_numbers_of_an_argument_that_no_report_could_hold_stay_texts(tmp_path, number):
    words = ["--override-generation-config", f'{{"eos_token_id": [2, 4], "temperature": {number}}}']
    found = validate(micro(tmp_path / "m"), {"engine": {"name": "vllm", "arguments": words}})
    assert only(found, "sampling-out-of-range").found == number
    assert json.dumps([one.as_json() for one in found.flaws] + [found.inferred], allow_nan=False)


@pytest.mark.parametrize("kind", [[], {}, None])
def test_a_processor_of_no_kind_puts_nothing_before_a_text(tmp_path, kind):
    root = speak(micro(tmp_path / "m"), bos=True)
    edit_json(root / "tokenizer.json", lambda told: told["post_processor"].update(type=kind))
    assert validate(root).inferred["tokenizer"]["prefix"] == []


@pytest.mark.parametrize("factor", [1e308, -1e308])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_factor_beyond_all_lengths_is_judged(tmp_path, kind, factor):
    told = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 32}
    assert validate(micro(tmp_path / "m", rope_scaling=told)).inferred["rope"]["factor"] == factor


def test_merges_of_what_is_no_text_are_none(tmp_path):
    document = tok(without_added=["<|im_end|>"])
    document["model"]["merges"] = [[{}, "a"], [["<"], "|"], None, 1]
    root = speak(micro(tmp_path / "m"))
    write_json(root / "tokenizer.json", document)
    assert "marker-split" in codes(validate(root))


def test_a_piece_that_merges_would_take_long_for_is_not_counted(tmp_path):
    document = tok(without_added=["<|im_end|>"])
    document["model"]["merges"] = [["a" * 2**n, "a" * 2**n] for n in range(11)]
    document["model"]["vocab"] |= {"a" * 2**n: 500 + n for n in range(1, 12)}
    root = speak(micro(tmp_path / "m"), template="a" * 3000 + T0)
    write_json(root / "tokenizer.json", document)
    assert only(validate(root), "marker-split").found["prompt_tokens"] is None
