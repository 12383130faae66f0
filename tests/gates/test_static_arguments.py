"""What the static gate says of llama.cpp's launch arguments is what its driver would say when it boots."""

import mmap
import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates.static import rules
from gates.static.arguments import TABLES, check_words
from tests.support.checkpoints import micro, validate
from workers.engines import llamacpp_server

TABLE = rules.table("llamacpp")
VALUES = ["0", "1", "-1", "4", "2.5", "nan", "on", "f16", "none", "{}", "[]", '{"a": 1}', "x", "", "9999999999999"]


def found(*words: str) -> list[tuple[str, str, object]]:
    return [(one.code, str(one.pointer), one.expected) for one in check_words("llamacpp", words)]


def test_the_list_is_the_driver_s():
    assert set(TABLE["arguments"]) == set(llamacpp_server.ARGUMENTS)
    assert set(llamacpp_server.MANAGED) <= set(TABLE["managed"])
    assert TABLE["shorter"] == llamacpp_server.ALIASES
    assert set(TABLE["shorter"].values()) <= set(TABLE["arguments"])
    known = [*TABLE["arguments"], *TABLE["shorter"], *TABLE["managed"], *TABLE["other_options"]]
    assert len(known) == len(set(known))
    assert all(rules.table(engine)["source"] for engine in TABLES)


def test_every_argument_and_option_of_the_list_is_one_that_the_engine_has():
    (library,) = [file for file in distribution("xllamacpp").files or () if str(file).endswith(".so")]
    own = {"--port-file", "--drain-seconds", "--die-with-parent", "--adapter"}
    names = {*TABLE["arguments"], *TABLE["other_options"], *TABLE["managed"], *TABLE["shorter"]} - own
    long = sorted(name for name in names if name.startswith("--"))
    with Path(str(library.locate())).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        there = set(re.findall(rb"\0(--[a-z][a-z0-9-]+)(?=\0)", raw))
    assert [name for name in long if name.encode() not in there] == []


@given(
    st.lists(
        st.sampled_from([*TABLE["arguments"], *TABLE["managed"], *TABLE["shorter"], "--no-such", "--seed=1", *VALUES]),
        max_size=6,
    )
)
def test_a_command_line_is_sound_here_exactly_when_the_driver_takes_it(words):
    try:
        llamacpp_server.read_arguments(words)
    except llamacpp_server.UsageError:
        assert found(*words) != []
    else:
        assert found(*words) == []


@pytest.mark.parametrize(
    ("words", "code", "pointer", "expected"),
    [
        (["--ctx-sise", "512"], "argument-unknown", "/engine/arguments/0", "--ctx-size"),
        (["--ctx_size", "512"], "argument-unknown", "/engine/arguments/0", "--ctx-size"),
        (["--slots", "-c", "-1"], "argument-value", "/engine/arguments/2", "a whole number from 0 to 2147483647"),
        (["-c", "512", "--ctx-size", "512"], "argument-value", "/engine/arguments/2", "one of them, once"),
        (["--ctx-size=512"], "argument-unknown", "/engine/arguments/0", "--ctx-size"),
        (["--lora", "x"], "argument-unknown", "/engine/arguments/0", None),
        (["--port", "80"], "argument-unknown", "/engine/arguments/0", None),
        (["--wholly-other"], "argument-unknown", "/engine/arguments/0", None),
        (["--max-model-len", "8"], "argument-unknown", "/engine/arguments/0", "--ctx-size"),
        (["--max_num_seqs=8"], "argument-unknown", "/engine/arguments/0", "--parallel"),
        (["--slots", "--threads", "0"], "argument-value", "/engine/arguments/2", "a whole number from 1 to 512"),
        (["--threads"], "argument-value", "/engine/arguments/0", "a whole number from 1 to 512"),
        (["--flash-attn", "yes"], "argument-value", "/engine/arguments/1", "one of on, off, auto"),
        (["--slots", "--no-slots"], "argument-value", "/engine/arguments/1", "one of them, once"),
    ],
)
def test_each_mistake_is_told_with_its_place_and_what_was_meant(words, code, pointer, expected):
    assert found(*words) == [(code, pointer, expected)]


def test_every_mistake_of_a_line_is_told_and_a_near_name_is_asked_for():
    (typing, short, value) = check_words("llamacpp", ["--thread", "2", "-np=4", "--top-p", "7"])
    assert typing.message == "llamacpp has no argument --thread; did you mean --threads?"
    assert (short.expected, short.advice) == ("--parallel", "Write -np and its value as two words.")
    assert value.message == "--top-p is 7, and may be a number from 0 to 1."


def test_the_engine_s_short_names_are_its_arguments_and_what_its_driver_lacks_warns(tmp_path):
    root = micro(tmp_path / "m")
    words = ["-c", "512", "-np", "2", "-ngl", "99", "-fa", "on", "--threads", "-1"]
    assert llamacpp_server.spelled(words)[:4] == ["--ctx-size", "512", "--parallel", "2"]
    assert llamacpp_server.spelled(["--seed", "-c", "-kvu", "x"]) == ["--seed", "-c", "--kv-unified", "x"]
    told = {"engine": {"name": "llamacpp", "arguments": words[:8]}}
    assert [one for one in validate(root, told).flaws if one.code.startswith("argument")] == []
    told["engine"]["arguments"] += ["--host", "0.0.0.0", "--numa", "distribute", "-md", "x", "--wholly-other"]
    found = [one for one in validate(root, told).flaws if one.code.startswith("argument")]
    assert {one.severity for one in found} == {"warn"}
    assert [one.found for one in found] == ["--host", "--numa", "-md", "--wholly-other"]


def test_the_gate_blocks_it_and_of_an_engine_without_version_warns(tmp_path):
    root = micro(tmp_path / "m")
    for engine, severities in (("llamacpp", ["block"]), ("vllm", ["warn"]), ("external", ["block"])):
        told = validate(root, {"engine": {"name": engine, "arguments": ["--ctx-sise", "4096"]}})
        assert [one.severity for one in told.flaws if one.code == "argument-unknown"] == severities
