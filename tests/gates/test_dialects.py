import asyncio
import math

import pytest

from gates.dialects.base import GREEDY, Malformed, Piece, Sampling, Usage, parse_metrics
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from tests.support import chain
from tests.support.engine import boot, chain_engine

MESSAGES = chain.PROMPT


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with chain_engine(
        tmp_path_factory.mktemp("chain"), extra=chain.endless(), template=chain.SELECTING_TEMPLATE
    ) as running:
        yield running


def ask(engine, call):
    async def run():
        async with Endpoint(engine.base_url, engine.model, LLAMACPP) as endpoint:
            return await call(endpoint)

    return asyncio.run(run())


def test_a_generation_names_every_sampling_field_in_the_engines_spelling():
    body = LLAMACPP.chat("m", MESSAGES, max_tokens=8, sampling=Sampling(temperature=0.5, seed=7)).body
    wanted = {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "seed": 7}
    assert body.items() >= wanted.items()
    assert body["cache_prompt"] is False


def test_a_streamed_generation_always_asks_for_usage():
    assert LLAMACPP.completion("m", "x", max_tokens=1, stream=True).body["stream_options"] == {"include_usage": True}
    assert "stream_options" not in LLAMACPP.completion("m", "x", max_tokens=1).body


def test_extra_fields_win_over_those_made_by_the_dialect():
    body = LLAMACPP.chat("m", MESSAGES, max_tokens=8, extra={"max_tokens": 3, "stop": ["i"]}).body
    assert (body["max_tokens"], body["stop"]) == (3, ["i"])


def test_the_engine_answers_the_chain_and_counts_its_tokens(engine):
    answer = ask(engine, lambda e: e.chat(MESSAGES, max_tokens=16, stream=False, top_logprobs=3))
    assert answer.is_ok
    assert (answer.text, answer.finish_reason) == (chain.ANSWER, "stop")
    assert answer.usage == Usage(chain.PROMPT_TOKENS, len(chain.ANSWER_IDS), 0)
    assert answer.token_ids == tuple(chain.ANSWER_IDS)


def test_a_stream_tells_the_ids_of_its_text_tokens_but_not_of_the_end_of_turn(engine):
    answer = ask(engine, lambda e: e.chat(MESSAGES, max_tokens=16, top_logprobs=1))
    assert answer.token_ids == tuple(chain.ANSWER_IDS[:2])
    assert answer.usage.completion_tokens == 3


def test_tokens_of_probability_zero_are_no_alternatives(engine):
    answer = ask(engine, lambda e: e.chat(MESSAGES, max_tokens=2, stream=False, top_logprobs=5))
    assert [[other.id for other in token.top] for token in answer.tokens] == [[77], [110]]


def test_the_prompt_that_a_chat_gets_can_be_rendered_and_tokenized_without_generating(engine):
    ids = ask(engine, lambda e: e.render_prompt_ids(MESSAGES))
    text = "<|im_start|>user\nping<|im_end|>\n<|im_start|>assistant\n"
    assert ids[:2] == [3, chain.token("u")]
    assert len(ids) == chain.PROMPT_TOKENS
    assert ask(engine, lambda e: e.render_prompt(MESSAGES)) == text


def test_template_arguments_reach_the_template(engine):
    rendered = ask(engine, lambda e: e.render_prompt(MESSAGES, {"sel": "E"}))
    assert rendered.endswith("assistant\nE")
    answer = ask(engine, lambda e: e.chat(MESSAGES, max_tokens=4, template_arguments={"sel": "E"}))
    assert (answer.text, answer.finish_reason) == ("abcd", "length")


def test_a_completion_takes_token_ids(engine):
    answer = ask(engine, lambda e: e.complete([3, chain.token("\n")], max_tokens=8, stream=False, top_logprobs=0))
    assert answer.text == chain.ANSWER
    assert answer.usage.prompt_tokens == 2


def test_a_cold_request_reuses_no_cached_prompt_and_a_warm_one_does(engine):
    async def cached(endpoint, use_cache):
        for _ in range(2):
            answer = await endpoint.chat(MESSAGES, max_tokens=2, use_cache=use_cache)
        return answer.usage.cached_tokens

    assert ask(engine, lambda e: cached(e, use_cache=False)) == 0
    assert ask(engine, lambda e: cached(e, use_cache=True)) > 0


def test_the_model_list_tells_the_name_and_the_context_of_one_request(engine):
    (model,) = ask(engine, lambda e: e.models())
    assert (model.id, model.context_tokens) == ("chain", 512)


def test_every_metric_of_the_table_is_on_the_engines_page(engine):
    page = ask(engine, lambda e: e.metrics())
    names = LLAMACPP.metrics
    assert page.keys() >= {names.running, names.waiting, names.progress, names.prompt_tokens, names.cached_tokens}
    before = page[names.generated_tokens]
    ask(engine, lambda e: e.chat(MESSAGES, max_tokens=16))
    assert ask(engine, lambda e: e.metrics())[names.generated_tokens] == before + 3


def test_a_schema_is_enforced_in_the_form_that_the_dialect_sends(engine):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    # CHAIN prefers white space for ever under a grammar, so push its likes below the closing tokens.
    bias = {str(chain.token(character)): -100 for character in " \n\t\r"}
    extra = LLAMACPP.schema_fields("answer", schema) | {"logit_bias": bias}
    answer = ask(engine, lambda e: e.chat(MESSAGES, max_tokens=64, stream=False, extra=extra))
    assert answer.text.replace(" ", "").startswith('{"a":1')


def test_logprobs_are_the_full_softmax_of_the_logits(tmp_path):
    root = tmp_path / "bundle"
    root.mkdir()
    ranking = {chain.token("a"): 5.0, chain.token("b"): 4.0}
    chain.write_bias(root / "model.gguf", ranking)
    running = boot(chain.describe(root, environment="sha256:" + "0" * 64), root, tmp_path / "run")
    try:
        answer = ask(running, lambda e: e.chat(MESSAGES, max_tokens=1, stream=False, top_logprobs=2))
    finally:
        running.launcher.kill(running.launched)
    total = math.exp(5) + math.exp(4) + (chain.VOCABULARY_SIZE - 2)
    (token,) = answer.tokens
    assert token.logprob == pytest.approx(5 - math.log(total), abs=1e-3)
    assert token.top[1].logprob == pytest.approx(4 - math.log(total), abs=1e-3)


@pytest.mark.parametrize("body", [{"tokens": []}, {"tokens": ["a"]}, {"tokens": [True]}, {}, [], None])
def test_a_text_without_token_ids_is_an_error(body):
    with pytest.raises(Malformed):
        LLAMACPP.read_tokens(body, "ping")


def test_an_empty_text_may_have_no_tokens():
    assert LLAMACPP.read_tokens({"tokens": []}, "") == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": None},
        {"choices": [1]},
        {"choices": [{"delta": {"content": 1}}]},
        {"choices": [{"delta": {}}, {"delta": {}}]},
        {"choices": [], "usage": {"prompt_tokens": "1", "completion_tokens": 1}},
        {"choices": [{"delta": {}, "logprobs": {"content": [{"token": "a"}]}}]},
    ],
)
def test_what_no_dialect_promises_is_malformed(body):
    with pytest.raises(Malformed):
        LLAMACPP.read_event(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [({"error": {"code": 500, "message": "full"}}, "full"), ({"error": "full"}, "full"), ({"error": 1}, "1")],
)
def test_an_error_is_read_in_every_form_that_engines_use(body, message):
    assert LLAMACPP.read_event(body) == Piece(error=message)


def test_metrics_are_summed_over_labels_and_may_carry_a_time():
    page = '# HELP a b\n# TYPE a gauge\na{x="1 }"} 2\na{x="2"} 3.5 1700000000\nb 1e3\n\n'
    assert parse_metrics(page) == {"a": 5.5, "b": 1000.0}


@pytest.mark.parametrize("line", ["a", "a b", 'a{x="1"}'])
def test_a_metrics_line_without_a_value_is_malformed(line):
    with pytest.raises(Malformed):
        parse_metrics(line)


def test_greedy_leaves_nothing_to_an_engines_files():
    assert Sampling(0.0, 0, 1.0, 0.0, 1.0, 1) == GREEDY
