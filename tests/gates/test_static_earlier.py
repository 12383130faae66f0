"""What the static gate says of the names of launch arguments in older versions of vLLM."""

import pytest

from gates.static import rules
from gates.static.earlier import check_words
from gates.static.spellings import spellings
from schemas.result import Severity
from tests.support.checkpoints import micro, only, validate


def found(words, version):
    return [(one.severity, one.message) for one in check_words(words.split(), version)]


@pytest.mark.parametrize(
    ("version", "words", "message"),
    [
        ("0.9.2", "--enable-reasonin-parser x", None),
        (
            "0.9.1",
            "--async-scheduling",
            "vllm 0.9.1 has no argument --async-scheduling: the versions >=0.10.0 have it.",
        ),
        ("0.13.0", "--task embed", "vllm 0.13.0 has no argument --task: the versions <0.13.0 have it."),
        ("0.31.0", "--monokernel", "vllm 0.31.0 has no argument --monokernel: the versions >=0.33 have it."),
        (
            "0.11.0",
            "--ctx-size 8",
            "vllm 0.11.0 has no argument --ctx-size, which is llamacpp's; write --max-model-len.",
        ),
        ("0.11.0", "--max-modl-len 8", "vllm 0.11.0 has no argument --max-modl-len; did you mean --max-model-len?"),
        ("0.20.0", "--wholly=other", "vllm 0.20.0 has no argument --wholly."),
    ],
)
def test_a_name_that_a_version_has_not_blocks_once(version, words, message):
    ((severity, said),) = found(words, version)
    assert severity is Severity.BLOCK
    assert message in {None, said}


def names_of(version):
    rows = rules.table("vllm_earlier")["names"]
    return {name for row in rows for name in row["names"] if not row["in"] or rules.is_within(version, row["in"])}


@pytest.mark.parametrize("version", ["0.8.5", "0.9.2", "0.11.0", "0.15.1", "0.20.0", "0.31.0"])
@pytest.mark.parametrize(
    "words",
    [
        "--max-model-len 32768 --max_num_seqs=256 --tensor-parallel-size 2 -tp 4 -tp=2 --seed -1 -O3",
        "--served-model-name a b --no-enable-prefix-caching --gpu-memory-util 0.9 --max-model-len -1",
        "--compilation-config.level 3 --hf-overrides {} --override-generation-config {} --quantization fp8 -q awq",
        "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 -h",
    ],
)
def test_names_that_every_version_has_are_taken_in_each_form(version, words):
    assert found(words, version) == []


def test_versions_that_nobody_read_warn_and_others_are_left_alone(tmp_path):
    assert [one for one, _ in found("--wholly", "0.9.0")] == [Severity.WARN]
    for version in ("0.8.4", "0.32.0", None):
        assert found("--wholly", version) == []
    root = micro(tmp_path / "m")
    declared = {"engine": {"name": "vllm", "version": "0.9.2", "arguments": ["--wholly", "x"]}}
    assert only(validate(root, declared), "argument-unknown").pointer == "/engine/arguments/0"


def test_the_names_of_the_version_before_the_list_are_nearly_those_of_the_list():
    before, whole = names_of("0.31.0"), set(spellings("vllm", "0.32.0").names)
    assert len(before & whole) > 0.9 * len(before)
    assert {"--model", "--dtype", "-tp", "--speculative-config"} <= before
    assert "--enable-reasoning" in names_of("0.8.5") - before
