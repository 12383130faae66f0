"""What the static gate says of vLLM's launch arguments is what vLLM's parser and configuration would say."""

import json
import subprocess

import pytest

from gates.environment import engine_prefix
from gates.static import rules
from gates.static.flexible import check_words
from gates.static.spellings import spellings
from schemas.result import Severity
from tests.support.checkpoints import micro, validate
from workers.engines.vllm import TABLE as TAKEN

ARGUMENTS = rules.table("vllm")["arguments"]


def found(*words: str, version: str | None = "0.32.0") -> list[tuple[str, str, object]]:
    return [(one.code, str(one.pointer), one.found) for one in check_words("vllm", words, version)]


def test_all_that_the_driver_takes_or_sets_is_in_the_list_with_its_choices():
    assert rules.table("vllm")["source"]
    missing = {
        (name, choice)
        for name, argument in TAKEN.arguments.items()
        for choice in argument.choices or ("",)
        if name not in ARGUMENTS or (choice and choice not in ARGUMENTS[name].get("choices", [choice]))
    }
    assert missing == set()
    assert {name for name, one in TAKEN.arguments.items() if one.type == "switch"} <= {
        name for name, one in ARGUMENTS.items() if one["takes"] == "switch"
    }


@pytest.mark.parametrize(
    ("words", "code", "place", "message"),
    [
        ("--max-modl-len 100", "unknown", 0, "vllm has no argument --max-modl-len; did you mean --max-model-len?"),
        ("--enable-reasoning", "unknown", 0, None),
        ("--wholly=other", "unknown", 0, None),
        ("--max-num 3", "unknown", 0, None),
        ("--tp 2", "unknown", 0, "vllm has no argument --tp; did you mean -tp?"),
        ("--temp 2", "unknown", 0, "vllm has no argument --temp, which llamacpp has."),
        ("--ctx-size 8", "unknown", 0, "vllm has no argument --ctx-size, which is llamacpp's; write --max-model-len."),
        ("-xyz 3", "unknown", 0, None),
        ("--compilation-konfig.mode 3", "unknown", 0, None),
        ("--max-model-len abc", "value", 1, None),
        ("--max-model-len 1.5K", "value", 1, None),
        ("--max-model-len=", "value", 0, None),
        ("--enforce-eager --max-model-len", "value", 1, None),
        ("--max-model-len --enforce-eager", "value", 0, None),
        ("--served-model-name --enforce-eager", "value", 0, None),
        ("--max-model-len.key 1", "value", 0, "--max-model-len has no keys."),
        ("--compilation-config.mode", "value", 0, None),
        ("-tp two", "value", 1, None),
        ("-tp=0", "value", 0, None),
        ("--gpu-memory-utilization 9", "value", 1, None),
        ("--gpu-memory-utilization 0", "value", 1, None),
        ("--gpu-memory-utilization nan", "value", 1, None),
        ("--video-pruning-rate 1", "value", 1, None),
        ("--quantization fp9", "value", 1, "--quantization is fp9; did you mean fp8?"),
        ("-qfp9", "value", 0, None),
        ("--tool-call-parser hermess", "value", 1, "--tool-call-parser is hermess; did you mean hermes?"),
        ("--reasoning-parser nosuch", "value", 1, None),
        ("--max-lora-rank 9", "value", 1, None),
        ("--compilation-config {", "value", 1, None),
        ("--compilation-config []", "value", 1, None),
        ("--hf-overrides {a}", "value", 1, None),
        ("--enforce-eager false", "value", 0, "--enforce-eager takes no value, and is given false."),
        ("--no-enforce-eager=1", "value", 0, None),
    ],
)
def test_each_mistake_is_told_with_its_place_and_what_was_meant(words, code, place, message):
    (one,) = check_words("vllm", words.split(), "0.32.0")
    assert (one.code, one.pointer) == (f"argument-{code}", f"/engine/arguments/{place}")
    assert one.severity is Severity.BLOCK
    assert message in {None, one.message}


@pytest.mark.parametrize(
    "words",
    [
        "--max-model-len 32k --max-num-batched-tokens=8K --max_num_seqs 256 --max-num-queued-tokens 1.5m",
        "--max-model-len auto --seed -1",
        "--max-model-len -1 --middleware a.b --middleware c.d --seed 1 --seed 1",
        "-tp 2 -pp=2 -q fp8 -O3 -O=1 -O 2 -cc.mode 3 --optimization-level 2",
        "-qFP8",
        '--compilation-config.mode=3 --compilation-config {"max_cudagraph_capture_size":1k} -cc.mode 3',
        "--comp {}",
        "--speculative_config.num_speculative_tokens 3 --override-generation-config.stop+ a,b",
        "--no-enable-prefix-caching --enable-chunked-prefill",
        "--no_enable_chunked_prefill",
        "--served-model-name a b --cudagraph-capture-sizes 1 2 4 --hf-token --api-key=k",
        "--config more.yaml --model m --host 0.0.0.0 --port 1 --trust-remote",
        "--moe-backend flashinfer-TRTLLM --max-lora-rank 16 --gpu-memory-utilization 1.0 --cpu-offload-gb 1e1",
        "--tool-call-parser mine --tool_parser_plugin mine.py --quantization None",
        '--hf-overrides {"a":1} --kv-cache-dtype fp8_e4m3',
        "--hf-overrides some.function",
        "org/model --enforce-eager",
        "",
    ],
)
def test_each_form_that_the_parser_takes_is_taken(words):
    assert found(*words.split()) == []


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("--max-model-len 32k --max-model-len -1", 2),
        ("--tensor-parallel-size 2 -tp=4", 2),
        ("--enable-prefix-caching --no-enable-prefix-caching", 1),
    ],
)
def test_the_last_of_two_values_counts_and_that_there_are_two_warns(words, place):
    (one,) = check_words("vllm", words.split(), "0.32.0")
    assert (one.code, one.severity, one.pointer) == ("argument-value", Severity.WARN, f"/engine/arguments/{place}")


@pytest.mark.parametrize(
    ("version", "words", "is_taken"),
    [
        ("0.33.0", "--disable-prefix-caching --enable-sliding-window --monokernel", True),
        ("0.33.0", "--no-enable-prefix-caching --disable-lora", True),
        ("0.32.0", "--disable-prefix-caching", False),
        ("0.32.0", "--monokernel", False),
        ("0.33.0", "--spec-method medusa", False),
        ("0.32.0", "--spec-method medusa", True),
        ("0.33.0", "--reasoning-parser step5 --tool-strict-level None", True),
        ("0.32.0", "--reasoning-parser step5", False),
        ("0.33.0", "--enable-prefix-caching --disable-prefix-caching", False),
    ],
)
def test_each_of_its_versions_takes_what_its_own_parser_takes(version, words, is_taken):
    assert (list(check_words("vllm", words.split(), version)) == []) is is_taken


def test_later_versions_and_none_warn_and_earlier_ones_are_left_to_themselves(tmp_path):
    root = micro(tmp_path / "m")
    for version, severities in (("0.32.1", {"block"}), ("0.33.0", {"block"}), ("0.40.0", {"warn"}), ("0.8.0", set())):
        told = validate(
            root, {"engine": {"name": "vllm", "version": version, "arguments": ["--max-modl-len", "9", "-tp", "x"]}}
        )
        flaws = [one for one in told.flaws if one.code in {"argument-unknown", "argument-value"}]
        assert {one.severity for one in flaws} == severities
        assert [one.found for one in flaws] == (["--max-modl-len", "x"] if severities else [])
    assert [one.severity for one in check_words("vllm", ["--max-modl-len", "9"], None)] == [Severity.WARN]


READ = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser, taken = make_arg_parser(FlexibleArgumentParser()), []
options = {one: sorted(map(str, action.choices or ())) for action in parser._actions for one in action.option_strings}
for line in json.loads(sys.argv[1]):
    try:
        parser.parse_args(line)
        taken.append(True)
    except (SystemExit, ValueError):
        taken.append(False)
print(json.dumps([options, taken]))
"""
LINES = [
    "--max-model-len 32k --max_num_seqs 4 -tp 2 -O3 --served-model-name a b",
    "--no-enable-prefix-caching --compilation-config.mode 3 --trust-remote",
    "--max-model-len 1.5K",
    "--disable-prefix-caching",
    "--max-num 3",
    "--quantization FP8 --kv-cache-dtype fp8",
    "--kv-cache-dtype fp9",
    "--hf-overrides {a}",
    "--nonsense 1",
    "--max-model-len",
]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_table_is_what_its_own_parser_takes():
    python = engine_prefix("vllm") / "bin" / "python"
    lines = [line.split() for line in LINES]
    done = subprocess.run([python, "-c", READ, json.dumps(lines)], capture_output=True, check=True, timeout=240)
    options, taken = json.loads(done.stdout.decode().splitlines()[-1])
    there = spellings("vllm", "0.32.0")
    assert set(options) - {"--headless", "--grpc", "--config"} <= set(there.names)
    assert [name for name in there.names if name not in options and not name.startswith("--no-")] == []
    for name, choices in options.items():
        argument = there.arguments[there.names[name]]
        if choices:
            assert {*argument["choices"], "None"} == {*choices, "None"}, name
    blocked = [[one for one in check_words("vllm", line, "0.32.0") if one.severity is Severity.BLOCK] for line in lines]
    assert [not one for one in blocked] == taken
