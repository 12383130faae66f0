"""What every engine must do alike: exact answers of CHAIN, whose greedy chain is known in advance."""

import asyncio
import json

import pytest

from gates import catalog
from gates.answers import Outcome
from gates.dialects import releases
from gates.dialects.base import Sampling
from gates.gate import GateContext
from gates.leniency import LENIENCY
from gates.questions import ask_all
from schemas.policy import CompatibilityRule
from schemas.result import Severity, Verdict
from schemas.runner import Agreement
from schemas.suite import GoldenSuite
from tests.support.chain import ANSWER, ANSWER_IDS, PROMPT, PROMPT_TOKENS, token
from tests.support.real_engines import CONTEXT_TOKENS

pytestmark = pytest.mark.timeout(400)  # the first test of each engine waits for its boot
RENDERED = "<|im_start|>user\nping<|im_end|>\n<|im_start|>assistant\n"
PROMPT_IDS = [3, *map(token, "user\nping"), 4, token("\n"), 3, *map(token, "assistant\n")]
ENDLESS = {"sel": "E"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
END_OF_TURN = 4
# Where the prompt's last token is followed by one that is sure, the next likeliest has a log-probability of −179.
SURE, HOPELESS = -0.01, -100


def pushed():
    """Return scores that make every character of `{"n":1}` likelier than what a grammar lets in beside it."""
    ranked = {token(character): 90.0 - 5 * rank for rank, character in enumerate('}1"n:{')}
    return ranked | {token(character): -100.0 for character in "\n\t\r "}


async def test_it_serves_under_its_name_with_the_context_of_the_bundle(engine):
    async with engine.endpoint() as endpoint:
        assert await endpoint.is_healthy()
        models = await endpoint.models()
        facts = await endpoint.facts()
    assert [(model.id, model.context_tokens) for model in models] == [("chain", CONTEXT_TOKENS)]
    assert engine.ready.identity.context_tokens == CONTEXT_TOKENS
    assert engine.ready.findings == ()
    agreed = {row.item for row in engine.ready.compared if row.outcome is Agreement.EQUAL}
    assert agreed >= {"version", "environment", "arguments", "model", "model_path", "context_tokens", "kv_tokens"}
    assert agreed >= {"template", "bos_token", "eos_token"}
    assert facts
    if engine.name == "vllm":
        assert facts == {"version": engine.bundle.engine.version}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_is_answered_by_the_chain(engine, stream):
    async with engine.endpoint() as endpoint:
        answer = await endpoint.chat(PROMPT, max_tokens=8, stream=stream, top_logprobs=1)
    assert (answer.outcome, answer.text, answer.finish_reason) == (Outcome.OK, ANSWER, "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, len(ANSWER_IDS))
    assert answer.usage.cached_tokens == 0
    assert answer.model == "chain"
    # llama.cpp leaves the end of turn out of a stream.
    expected = ANSWER_IDS[:-1] if stream and engine.name == "llamacpp" else ANSWER_IDS
    assert list(answer.token_ids) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ping\n", [*map(token, "ping\n")]])
async def test_a_text_and_its_token_ids_are_continued_alike(engine, stream, prompt):
    async with engine.endpoint() as endpoint:
        answer = await endpoint.complete(prompt, max_tokens=8, stream=stream)
    assert (answer.outcome, answer.text, answer.finish_reason) == (Outcome.OK, ANSWER, "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_cut_at_the_most_tokens(engine, stream):
    async with engine.endpoint() as endpoint:
        answer = await endpoint.chat(PROMPT, max_tokens=12, stream=stream, template_arguments=ENDLESS)
    assert (answer.outcome, answer.text, answer.finish_reason) == (Outcome.OK, "abcdefghabcd", "length")
    assert answer.usage.completion_tokens == 12


async def test_sampling_is_repeated_by_its_seed(engine):
    async with engine.endpoint() as endpoint:
        hot = Sampling(temperature=2.0, top_k=0, seed=7)
        first, second = [
            await endpoint.chat(PROMPT, max_tokens=8, stream=False, sampling=hot, top_logprobs=1) for _ in range(2)
        ]
    assert first.token_ids == second.token_ids


async def test_log_probabilities_have_ids_and_alternatives_best_first(engine):
    async with engine.endpoint() as endpoint:
        answer = await endpoint.chat(PROMPT, max_tokens=1, stream=False, top_logprobs=3)
        tokens = await endpoint.with_texts(answer.tokens)
    (chosen,) = tokens
    assert (chosen.id, chosen.text) == (token("H"), "H")
    assert chosen.logprob > SURE
    assert chosen.top[0].id == chosen.id
    assert [one.logprob for one in chosen.top] == sorted((one.logprob for one in chosen.top), reverse=True)
    assert all(one.logprob < HOPELESS for one in chosen.top[1:])


async def test_log_probabilities_of_a_completion_are_those_of_a_conversation(engine):
    async with engine.endpoint() as endpoint:
        answer = await endpoint.complete("ping\n", max_tokens=2, stream=False, top_logprobs=2)
    assert list(answer.token_ids) == ANSWER_IDS[:2]
    assert all(one.logprob > SURE and one.top[0].id == one.id for one in answer.tokens)


async def test_a_conversation_is_rendered_without_being_answered(engine):
    async with engine.endpoint() as endpoint:
        assert await endpoint.rendered(PROMPT) == (RENDERED, PROMPT_IDS)
        chosen = await endpoint.render_prompt_ids(PROMPT, ENDLESS)
    assert len(PROMPT_IDS) == PROMPT_TOKENS
    assert chosen == [*PROMPT_IDS, token("E")]


async def test_text_and_markers_are_read_as_tokens_and_back(engine):
    async with engine.endpoint() as endpoint:
        assert await endpoint.tokenize("ping<|im_end|>") == [*map(token, "ping"), END_OF_TURN]
        assert await endpoint.detokenize([*map(token, "ping"), END_OF_TURN]) == "ping<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_is_enforced_on_what_the_model_would_not_say(engine, stream):
    async with engine.endpoint() as endpoint:
        fields = endpoint.dialect.schema_fields("answer", SCHEMA) | endpoint.dialect.bias_fields(pushed())
        answer = await endpoint.chat(PROMPT, max_tokens=40, stream=stream, extra=fields)
    assert (answer.outcome, answer.text, answer.finish_reason) == (Outcome.OK, '{"n":1}', "stop")
    assert answer.usage.completion_tokens == 8


async def test_a_prompt_is_computed_anew_unless_a_request_lets_it_be_reused(engine):
    long = [{"role": "user", "content": "ping " * 80}]
    async with engine.endpoint() as endpoint:
        cold = [await endpoint.chat(long, max_tokens=8, stream=False) for _ in range(2)]
        await endpoint.chat(long, max_tokens=8, stream=False, use_cache=True)
        warm = await endpoint.chat(long, max_tokens=8, stream=False, use_cache=True)
    assert [answer.usage.cached_tokens for answer in cold] == [0, 0]
    assert warm.usage.cached_tokens >= 256
    assert {answer.text for answer in (*cold, warm)} == {ANSWER}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", b"{"),
        ("chat", b'{"model": "chain", "messages": "ping"}'),
        ("chat", b'{"model": "chain", "messages": [{"role": "user", "content": "ping"}], "temperature": "hot"}'),
        ("completions", b'{"model": "chain", "prompt": {}}'),
    ],
)
async def test_a_malformed_request_is_refused_with_a_reason(engine, path, body):
    async with engine.endpoint() as endpoint:
        reply = await endpoint.post(getattr(endpoint.dialect, f"{path}_path"), body, headers=JSON)
    # llama.cpp calls JSON that it cannot read a server error.
    assert (reply.outcome, reply.status) in {(Outcome.HTTP_4XX, 400), (Outcome.HTTP_5XX, 500)}
    assert engine.name == "llamacpp" or reply.status == 400
    assert len(reply.detail) > len("400: ")


JSON = {"Content-Type": "application/json"}


def test_it_passes_compatibility_and_accepts_exactly_what_its_table_names(engine):
    context = GateContext(
        bundle=engine.bundle,
        root=engine.root,
        rule=CompatibilityRule(gate="compatibility", boot_seconds="400", answer_seconds="20"),
        endpoint=engine.endpoint(),
        engine=engine.ready.identity,
        process_id=engine.replica.process_id,
        ready_ms=engine.ready.ready_ms,
    )
    result, raw = catalog.run("compatibility", context)
    assert (result.verdict, [one for one in result.findings if one.severity is not Severity.INFO]) == (
        Verdict.PASSED,
        [],
    ), result.summary
    known = LENIENCY[engine.name]
    statuses = {one["case"]: one["exchange"]["status"] for one in json.loads(raw)["records"]["cases"]}
    answered = {case for case, status in statuses.items() if status == 200 and not case.startswith("hang-up")}
    assert answered == known.accepts
    assert {case for case, status in statuses.items() if status >= 500} == set(known.errors)


async def test_a_prompt_beyond_the_context_is_refused(engine):
    async with engine.endpoint() as endpoint:
        answer = await endpoint.complete("x" * (CONTEXT_TOKENS + 10), max_tokens=1, stream=False)
    assert (answer.outcome, answer.status) == (Outcome.HTTP_4XX, 400)


async def test_its_metrics_count_what_was_generated(engine):
    async with engine.endpoint() as endpoint:
        names = endpoint.dialect.metrics
        before = await endpoint.metrics()
        await endpoint.chat(PROMPT, max_tokens=8, stream=False)
        after = await settled(endpoint, names.generated_tokens, before[names.generated_tokens] + len(ANSWER_IDS))
    assert {getattr(names, name) for name in vars(names)} <= after.keys()
    assert after[names.generated_tokens] - before[names.generated_tokens] == len(ANSWER_IDS)
    assert after[names.prompt_tokens] - before[names.prompt_tokens] == PROMPT_TOKENS
    assert after[names.progress] > before[names.progress]


async def settled(endpoint, name, value):
    """Return the metrics once a counter has arrived where it must; an engine may count after it has answered."""
    for _ in range(200):
        if (metrics := await endpoint.metrics())[name] >= value:
            return metrics
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} never came to {value}")


async def test_the_names_on_the_metrics_page_are_those_of_the_release(engine):
    pages = {page["release"]: page["names"] for page in releases.recorded().get(engine.name, {}).get("pages", ())}
    async with engine.endpoint() as endpoint:
        expected = pages.get(engine.bundle.engine.version, vars(endpoint.dialect.metrics).values())
        await endpoint.chat(PROMPT, max_tokens=8, stream=False)
        seen = await endpoint.metrics()
    assert set(expected) <= seen.keys()


async def test_a_caller_who_hangs_up_ends_his_answer(engine):
    """4,000 tokens would be generated otherwise; both engines have time for some hundred."""
    async with engine.endpoint() as endpoint:
        names, dialect = endpoint.dialect.metrics, endpoint.dialect
        before = await endpoint.metrics()
        request = dialect.chat("chain", PROMPT, max_tokens=4000, stream=True, template_arguments=ENDLESS)
        body = json.dumps(request.body).encode()
        host, port = engine.replica.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {request.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b'"content":"a"')
        writer.transport.abort()
        for _ in range(200):
            metrics = await endpoint.metrics()
            if metrics[names.running] + metrics[names.waiting] == 0:
                break
            await asyncio.sleep(0.05)
        generated = metrics[names.generated_tokens] - before[names.generated_tokens]
    assert metrics[names.running] + metrics[names.waiting] == 0
    assert generated < 4000


async def test_a_golden_suite_records_the_same_on_every_engine(engine):
    prompts = [{"id": text, "messages": [{"role": "user", "content": text}], "max_tokens": 8} for text in ("ping", "o")]
    body = {"schema": GoldenSuite.SCHEMA_ID, "name": "chain", "prompts": prompts, "top_k": 2, "repeats": 2}
    records = await ask_all(engine.endpoint(), GoldenSuite.model_validate(body), None, lambda _: None)
    for record in records:
        assert record["problem"] is None
        assert (record["text"], record["finish_reason"], record["completion_tokens"]) == (ANSWER, "stop", 3)
        assert [(one["id"], one["text"]) for one in record["output"]] == [
            (token("H"), "H"),
            (token("i"), "i"),
            (END_OF_TURN, "<|im_end|>"),
        ]
    assert records[0]["prompt_ids"] == PROMPT_IDS
    assert records[0]["rendered"] == RENDERED
