"""What the static gate says of launch arguments is what each engine's parser would say, by the table of its arguments.

The parsers are built from the tables with the libraries that the engines use, so that a form that our reader takes in
another way than they do is found.
"""

import argparse
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.static import rules
from gates.static.flexible import check_words
from gates.static.spellings import TABLES, spellings
from schemas.result import Severity
from tests.support.checkpoints import micro, validate
from workers.engines.arguments import Table

NEWEST = {"external": "1", "sglang": "0.5.23", "tgi": "3.3.7", "transformers": "5.24.0", "trtllm": "1.2.0"}
RELEASES = {
    "external": [],
    "sglang": ["0.4.5", "0.5.1", "0.5.4", "0.5.9", "0.5.14", "0.5.20"],
    "tgi": ["2.3.0", "3.0.0"],
    "transformers": ["5.19.0"],
    "trtllm": ["1.0.0", "1.1.0", "1.3.0"],
}
NO_FLAGS: dict[str, set[str]] = {
    "sglang": {"--tp", "--tool-parser-plugin", "--reasoning-parser-plugin"},
    "trtllm": {"--generation_config"},
    "external": {"--token", "--api-key", "--allow-host"},
}
"""What a driver refuses by name although the engine has no such argument: beginnings, and other engines'."""
VALUES = [
    "0",
    "1",
    "-1",
    "2.5",
    "nan",
    "true",
    "auto",
    "none",
    "fp8",
    "{}",
    "[1]",
    "a=b",
    "x",
    "",
    "32k",
    "1Ki",
    "-x",
    "--",
]


def said(engine: str, words: str, version: str | None = None) -> list[tuple[str, str, str]]:
    """Return code, severity and message of what is found in a line."""
    found = check_words(engine, words.split(), version or NEWEST[engine])
    return [(one.code, one.severity.value, one.message) for one in found]


@pytest.mark.parametrize("engine", sorted(NEWEST))
def test_every_argument_that_the_driver_takes_or_sets_is_in_the_table_in_its_versions(engine):
    """A flag of the driver's that the table lacks, in a version in which the driver has it, would be a false alarm."""
    assert rules.table(engine)["source"]
    table, missing = Table.load(engine), []
    for version in [*RELEASES[engine], NEWEST[engine]]:
        there = spellings(engine, version)
        for name, one in table.arguments.items():
            if not rules.is_within(version, one.versions or ""):
                continue
            argument = there.arguments.get(there.names.get(name, ""), {})
            choices = argument.get("choices")
            judged = choices is not None and version == NEWEST[engine]
            bad = [choice for choice in one.choices if judged and choice not in choices]
            if not argument or bad or (one.type == "flag") != (argument["takes"] in {"none", "switch"}):
                missing.append((version, name, bad))
    assert missing == []
    ever = {one for name in spellings(engine, None).names for one in (name, name.replace("_", "-"))}
    assert [name for name in table.refused if name not in ever and name not in NO_FLAGS.get(engine, ())] == []


# ------------------------------------------------------------------------------------------- the parsers' own word


class Refused(Exception):
    """The parser ends with a usage error."""


class Strict(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> Any:
        raise Refused(message)


def argparse_of(engine: str) -> Strict:
    """Return a parser of Python's own with a table's arguments, in the newest version."""
    there = spellings(engine, NEWEST[engine])
    parser = Strict(prog=engine, add_help=False)
    types = {"integer": int, "number": float, "json": json.loads, "object": json.loads}
    for name, argument in there.arguments.items():
        names = [one for one, owner in there.names.items() if owner == name and not one.startswith("--no-")]
        if argument["takes"] in {"none", "switch"}:
            action: Any = "store_true" if argument["takes"] == "none" else argparse.BooleanOptionalAction
            parser.add_argument(*names, action=action)
            continue
        if argument.get("type") == "suffixed" or "least" in argument or "above" in argument:
            continue
        counts = {"one": None, "many": "+", "any": "*", "optional": "?"}
        parser.add_argument(
            *names,
            nargs=counts[argument["takes"]],
            type=types.get(argument["type"], str),
            choices=argument.get("choices"),
        )
    return parser


PLAIN = [
    name
    for name in spellings("sglang", NEWEST["sglang"]).names
    if spellings("sglang", NEWEST["sglang"]).arguments[spellings("sglang", NEWEST["sglang"]).names[name]].get("type")
    not in {"suffixed", "object"}
]


@settings(max_examples=150)
@given(
    st.lists(
        st.sampled_from([*PLAIN, "--enable-lora", "--no-such", "--lora-paths", "--model-checksum"]).flatmap(
            lambda name: st.sampled_from([name, name[:-2], f"{name}=1", *VALUES])
        ),
        max_size=5,
    )
)
def test_a_line_is_sound_here_exactly_when_python_s_parser_takes_it(words):
    parser = PARSER
    known = {one for action in parser._actions for one in action.option_strings}
    bounded = set(spellings("sglang", NEWEST["sglang"]).names) - known
    # What the parser was not given, and beginnings of it, are not for it to judge.
    if any(one.startswith(word.partition("=")[0]) for word in words if word.startswith("--") for one in bounded):
        return
    blocking = [one for one in check_words("sglang", words, NEWEST["sglang"]) if one.severity is Severity.BLOCK]
    try:
        parser.parse_args(words)
        is_taken = True
    except Refused:
        is_taken = False
    assert (blocking == []) is is_taken


PARSER = argparse_of("sglang")


# --------------------------------------------------------------------------------------------------------- SGLang


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--tp-sise 2", "unknown", "sglang has no argument --tp-sise; did you mean --tp-size?"),
        ("--context_length 8", "unknown", "sglang has no argument --context_length; did you mean --context-length?"),
        (
            "--max-model-len 8",
            "unknown",
            "sglang has no argument --max-model-len, which is vllm's; write --context-length.",
        ),
        ("--gpu-memory-utilization 0.9", "unknown", None),
        ("--wholly-other", "unknown", "sglang has no argument --wholly-other."),
        ("--enable 1", "unknown", None),
        ("--dtype fp64", "value", None),
        ("--attention-backend flashinfr", "value", "--attention-backend is flashinfr; did you mean flashinfer?"),
        ("--tp-size two", "value", "--tp-size is two; it may be a whole number, at least 1."),
        ("--mem-fraction-static 90", "value", None),
        ("--context-length 8q", "value", None),
        ("--context-length", "value", None),
        ("--dtype --trust-remote-code", "value", "--dtype needs a value."),
        ("--trust-remote-code true", "value", "--trust-remote-code takes no value, and is given true."),
        ("--disable-radix-cache=1", "value", None),
        ("--preferred-sampling-params {", "value", None),
        ("stray", "value", "sglang takes no word without an argument's name here, and is given stray."),
        ("--port 99999", "value", None),
    ],
)
def test_each_mistake_of_sglang_s_line_blocks_once(words, code, message):
    ((found, severity, text),) = said("sglang", words)
    assert (found, severity) == (f"argument-{code}", "block")
    assert message in {None, text}


@pytest.mark.parametrize(
    ("version", "words", "severity", "says"),
    [
        ("0.5.23", "--cuda-graph-max-bs 8", "block", "the versions <0.5.20 have it; write --cuda-graph-max-bs-decode."),
        ("0.5.9", "--cuda-graph-max-bs-decode 8", "block", "the versions >=0.5.14 have it."),
        ("0.5.14", "--cuda-graph-max-bs 8", "warn", "calls it outdated; write --cuda-graph-max-bs-decode."),
        ("0.5.23", "--enable-dp-attention", "warn", "calls it outdated; write --attn-dp-size with the degree."),
        ("0.5.9", "--context-length 32k", "block", "it may be a whole number"),
        ("0.5.99", "--wholly-new 1", "warn", "sglang has no argument --wholly-new."),
        ("0.5.99", "--context-length x", "warn", "--context-length is x"),
        (None, "--wholly-new 1", "warn", "sglang has no argument --wholly-new."),
        ("0.5.23", "--tp-size 2 --tensor-parallel-size 4", "warn", "is there again, and the last one counts."),
    ],
)
def test_what_a_version_lacks_or_leaves_is_told_as_its_engine_would_take_it(version, words, severity, says):
    ((_, found, text),) = [
        (one.code, one.severity.value, one.message) for one in check_words("sglang", words.split(), version)
    ]
    assert found == severity
    assert says in text


@pytest.mark.parametrize(
    "words",
    [
        "--tp 2 --context-length 32Ki --mem-fraction-static=0.85 --chunked-prefill-size -1",
        "--lora-paths a=/x b=/y --cuda-graph-bs-decode 1 2 4 --log-level info",
        "--tensor-par 2 --no-enable-tf32-matmul --speculative-algorithm MINE",
        "",
    ],
)
def test_each_form_that_sglang_s_parser_takes_is_taken(words):
    assert said("sglang", words) == []


def test_every_name_of_an_equivalent_is_its_engine_s():
    for row in rules.table("equivalents")["rows"]:
        assert len(row) > 1
        assert [(engine, name) for engine, name in row.items() if name not in rules.table(engine)["arguments"]] == []


# ------------------------------------------------------------------------------- TGI, TensorRT-LLM, transformers


@pytest.mark.parametrize(
    ("engine", "words", "code", "message"),
    [
        (
            "tgi",
            "--max-totl-tokens 8",
            "unknown",
            "tgi has no argument --max-totl-tokens; did you mean --max-total-tokens?",
        ),
        ("tgi", "--max_total_tokens 8", "unknown", None),
        ("tgi", "--max-total 8", "unknown", None),
        ("tgi", "--tensor-parallel-size 2", "unknown", None),
        ("tgi", "--num-shard two", "value", "--num-shard is two; it may be a whole number."),
        ("tgi", "--num-shard -1", "value", None),
        ("tgi", "--num-shard", "value", None),
        ("tgi", "--num-shard --sharded=true", "value", "--num-shard needs a value."),
        ("tgi", "--sharded yes", "value", "--sharded is yes; it may be true or false."),
        ("tgi", "--quantize gptqq", "value", "--quantize is gptqq; did you mean gptq?"),
        ("tgi", "--cuda-graphs 1,two", "value", None),
        ("tgi", "--json-output true", "value", None),
        ("tgi", "--json-output --json-output", "value", "--json-output is there again, and tgi refuses that."),
        ("tgi", "-p 70000", "value", None),
        ("tgi", "stray", "value", None),
        ("trtllm", "--max_seq_lne 8", "unknown", "trtllm has no argument --max_seq_lne; did you mean --max_seq_len?"),
        ("trtllm", "--max-seq-len 8", "unknown", "trtllm has no argument --max-seq-len; did you mean --max_seq_len?"),
        ("trtllm", "--max_seq 8", "unknown", None),
        ("trtllm", "--tp 8", "unknown", None),
        ("trtllm", "--max-model-len 8", "unknown", None),
        ("trtllm", "--served_model_name m", "unknown", None),
        (
            "trtllm",
            "--backend vllm",
            "value",
            "--backend is vllm; it may be one of _autodeploy, pytorch, tensorrt, trt.",
        ),
        (
            "trtllm",
            "--tp_size --pp_size",
            "value",
            "--tensor_parallel_size is --pp_size; it may be a whole number, at least 1.",
        ),
        ("trtllm", "--log_level trace", "value", None),
        ("trtllm", "--trust_remote_code=1", "value", None),
        ("trtllm", "model serve again", "value", None),
        ("transformers", "--continous-batching", "unknown", None),
        ("transformers", "--cb_block_size 8", "unknown", None),
        ("transformers", "--load-in-4bit", "unknown", "transformers has no argument --load-in-4bit."),
        (
            "transformers",
            "--seed 4",
            "unknown",
            "transformers has no argument --seed, which is vllm's; write --default-seed.",
        ),
        ("transformers", "--reasoning ON", "value", "--reasoning is ON; did you mean on?"),
        ("transformers", "--port x", "value", None),
        ("transformers", "--chat-template-kwargs []", "value", None),
        ("transformers", "--device", "value", "--device needs a value."),
        ("transformers", "--compile yes", "value", None),
        (
            "external",
            "--endpont https://a.example",
            "unknown",
            "external has no argument --endpont; did you mean --endpoint?",
        ),
        ("external", "--endpoint a.example/v1", "value", None),
        ("external", "--token t", "unknown", "external has no argument --token."),
    ],
)
def test_each_mistake_of_another_engine_s_line_blocks_once(engine, words, code, message):
    ((found, severity, text),) = said(engine, words)
    assert (found, severity) == (f"argument-{code}", "block")
    assert message in {None, text}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("tgi", "--model-id m --num-shard 2 --sharded true --quantize bitsandbytes-nf4 -p 80 --json-output -e"),
        (
            "tgi",
            "--cuda-graphs 1,2,4 --cuda-graphs 8 --waiting-served-ratio 1.2 --cors-allow-origin a",
        ),
        ("tgi", "--max-image-fetch-size 1 --graceful-termination-timeout 9"),
        ("trtllm", "/model --backend trt --tp_size=2 --max_seq_len 8192 --trust_remote_code --log_level verbose"),
        (
            "trtllm",
            "serve m --custom_module_dirs a --custom_module_dirs b --tokenizer -x --reasoning_parser deepseek-r1",
        ),
        ("transformers", "m --continuous-batching --no-compile --device -1 --log-level INFO --decision-config d.json"),
    ],
)
def test_each_form_that_another_engine_s_parser_takes_is_taken(engine, words):
    assert said(engine, words) == []


@pytest.mark.parametrize(
    ("engine", "version", "words"),
    [
        ("trtllm", "1.3.0", "--served_model-name m"),
        ("trtllm", "1.3.0", "--moe_cluster_parallel_size 2"),
        ("trtllm", "1.2.0", "--tp_size 2 --tensor_parallel_size 4"),
        ("transformers", "5.25.0", "--quite-new"),
        ("transformers", "5.24.0", "--compile --no-compile"),
        ("tgi", "3.3.6", "--max-input-length 8"),
    ],
)
def test_what_may_be_so_in_a_version_or_is_to_go_warns(engine, version, words):
    assert [one.severity for one in check_words(engine, words.split(), version)] == [Severity.WARN]


def test_versions_before_the_table_and_other_engines_are_left_alone(tmp_path):
    root = micro(tmp_path / "m")
    for engine, version in (("sglang", "0.3.0"), ("custom", "1")):
        told = validate(root, {"engine": {"name": engine, "version": version, "arguments": ["--nonsense", "1"]}})
        assert [one for one in told.flaws if one.code.startswith("argument")] == []
    assert set(TABLES) == {"vllm", *NEWEST}
