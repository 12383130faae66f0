"""Neighbours of the incidents: faulty forms that were invented afterwards, each with a sound form beside it."""

import pytest

from tests.support.checkpoints import alarms, micro, speak, validate, write_json

VLLM = {"engine": {"name": "vllm", "version": "0.32.0"}}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}, None),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "rope-scaling-invalid"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4, "high_freq_factor": 4}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "rope-scaling-invalid"),
    ],
)
def test_a_rotary_scaling_that_gives_no_frequencies_blocks(tmp_path, changes, code):
    found = alarms(validate(speak(micro(tmp_path / "m", **changes)), VLLM))
    assert found == (set() if code is None else {code})


@pytest.mark.parametrize(("value", "is_sound"), [(-2, False), (-1, True), (0, True), (50, True), ("50", False)])
def test_candidates_kept_are_none_all_or_a_number(tmp_path, value, is_sound):
    root = speak(micro(tmp_path / "m"))
    write_json(root / "generation_config.json", {"eos_token_id": [2, 4], "top_k": value})
    assert alarms(validate(root, VLLM)) == (set() if is_sound else {"sampling-out-of-range"})


@pytest.mark.parametrize(
    ("asked", "is_sound"), [("awq", False), ("gptq_marlin", False), ("compressed-tensors", False), ("fp8", True)]
)
def test_a_method_that_reads_quantized_weights_needs_them(tmp_path, asked, is_sound):
    engine = VLLM["engine"] | {"arguments": ["--quantization", asked]}
    on = {"engine": engine, "hardware": {"accelerator": "nvidia-h100"}}
    assert alarms(validate(micro(tmp_path / "m"), on)) == (set() if is_sound else {"quant-argument-differs"})
