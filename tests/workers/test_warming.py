"""What is asked before an engine is ready, and what of its files lies in memory."""

import os

import pytest

from gates.dialects.llamacpp import LLAMACPP
from schemas.bundle import Bundle
from tests.support.factories import bundle_body
from workers.warming import LONG_CHARACTERS, TOKENS, requests, resident_percent


def bundle(features, context_tokens=512):
    runtime = {"context_tokens": context_tokens, "max_sequences": 2}
    body = bundle_body(runtime=runtime)
    body["serving"] = {**body["serving"], "features": features}
    return Bundle.model_validate(body)


@pytest.mark.parametrize(
    ("features", "paths"),
    [
        (["chat"], ["/v1/chat/completions"]),
        (["chat", "json_schema"], ["/v1/chat/completions", "/v1/chat/completions"]),
        (["completions"], ["/v1/completions"]),
    ],
)
def test_each_intended_shape_is_asked_for_once_in_few_tokens(features, paths):
    asked = requests(bundle(features), LLAMACPP)
    assert [one.path for one in asked] == paths
    assert {one.body["max_tokens"] for one in asked} == {TOKENS}
    assert ("response_format" in asked[-1].body) is ("json_schema" in features)


@pytest.mark.parametrize(("context", "longest"), [(64, 32), (512, 256), (131_072, LONG_CHARACTERS)])
def test_the_long_prompt_never_takes_more_than_half_of_the_context(context, longest):
    (asked,) = requests(bundle(["completions"], context), LLAMACPP)
    assert len(asked.body["prompt"]) == longest


def test_what_was_just_written_lies_in_memory_and_what_is_not_there_says_nothing(tmp_path):
    small, large, empty = (tmp_path / name for name in ("small", "large", "empty"))
    small.write_bytes(b"x")
    large.write_bytes(os.urandom(3 << 20))
    empty.write_bytes(b"")
    assert resident_percent([small, large]) == 100
    assert resident_percent([small, empty]) == 100
    assert resident_percent([empty]) is None
    assert resident_percent([]) is None
    assert resident_percent([small, tmp_path / "missing"]) is None


def test_what_the_kernel_dropped_does_not_lie_in_memory(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(8 << 20)  # a hole: nothing of it was ever read
    assert resident_percent([path]) == 0
