"""Every dialect against a server that speaks as its engine's sources document, and against what each must notice."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from gates.answers import Outcome
from gates.dialects import releases
from gates.dialects.base import Capability, Malformed, MetricNames, Sampling
from gates.dialects.table import DIALECTS, dialect_of
from gates.endpoint import Endpoint, EndpointError
from tests.support.folder_bundles import VERSIONS, bundle
from tests.support.scripted_http import ScriptedHttp
from tests.support.speech import SPEECHES, flawed

MESSAGES = [{"role": "user", "content": "ping"}]
ENGINES = sorted(SPEECHES)


def spoken(engine):
    return dialect_of(bundle(engine).engine)


def can(engine, capability):
    return capability in spoken(engine).capabilities


def that_can(capability):
    return [engine for engine in ENGINES if can(engine, capability)]


@asynccontextmanager
async def talking(engine, flaw=""):
    with ScriptedHttp(flawed(engine, flaw)) as server:
        async with Endpoint(server.url, "chain", spoken(engine)) as endpoint:
            endpoint.asked = server.asked
            yield endpoint


def test_every_engine_of_the_table_has_a_script_or_runs_for_real():
    assert set(DIALECTS) - set(ENGINES) <= {"llamacpp", "vllm"}


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_answer_is_read_the_same_plain_and_streamed(engine):
    async with talking(engine) as endpoint:
        assert await endpoint.is_healthy()
        plain = await endpoint.chat(MESSAGES, max_tokens=8, stream=False)
        streamed = await endpoint.chat(MESSAGES, max_tokens=8)
    for each in (plain, streamed):
        assert (each.outcome, each.detail) == (Outcome.OK, "")
        assert (each.text, each.finish_reason) == ("Hi", "stop")
        assert (each.usage.prompt_tokens, each.usage.completion_tokens) == (23, 3)
    assert len(streamed.output_ns) == 2


@pytest.mark.parametrize("engine", that_can(Capability.COMPLETIONS))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_is_read_as_a_conversation_is(engine, stream):
    async with talking(engine) as endpoint:
        said = await endpoint.complete("ping", max_tokens=8, stream=stream)
    assert (said.outcome, said.text, said.finish_reason) == (Outcome.OK, "Hi", "stop")


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_the_engine_says_of_itself_is_read(engine):
    async with talking(engine) as endpoint:
        models, facts = await endpoint.models(), await endpoint.facts()
        metrics = await endpoint.metrics() if can(engine, Capability.METRICS) else {}
    assert [one.id for one in models] == (["chain"] if can(engine, Capability.MODEL_LIST) else [])
    if can(engine, Capability.CONTEXT):
        assert models[0].context_tokens == 4096
    if "version" in spoken(engine).facts_fields:
        assert facts["version"] == VERSIONS[engine]
    names = [name for name in vars(spoken(engine).metrics).values() if name is not None]
    assert set(names) <= set(metrics)
    assert bool(names) is can(engine, Capability.METRICS)


async def test_what_it_says_of_itself_is_read_where_an_older_version_says_it():
    speech = SPEECHES["sglang"]
    said = replace(speech, extras={"/get_server_info": speech.extras["/server_info"]})
    with ScriptedHttp(said) as server:
        async with Endpoint(server.url, "chain", spoken("sglang")) as endpoint:
            assert (await endpoint.facts())["version"] == VERSIONS["sglang"]
    assert [asked.path for asked in server.asked] == ["/server_info", "/get_server_info"]


@pytest.mark.parametrize("engine", that_can(Capability.LOGPROBS))
async def test_log_probabilities_are_read_with_their_alternatives(engine):
    async with talking(engine) as endpoint:
        said = await endpoint.chat(MESSAGES, max_tokens=8, stream=False, top_logprobs=2)
    assert [(token.text, token.logprob) for token in said.tokens] == [("H", -0.25), ("i", -0.5)]
    assert [[other.text for other in token.top] for token in said.tokens] == [["H", "J"], ["i", "a"]]


@pytest.mark.parametrize("engine", that_can(Capability.TOKENIZE))
async def test_token_ids_are_read_and_none_at_all_is_noticed(engine):
    async with talking(engine) as endpoint:
        assert await endpoint.tokenize("ping") == [0, 1, 2, 3]
    async with talking(engine, "no_tokens") as endpoint:
        with pytest.raises(Malformed):
            await endpoint.tokenize("ping")


STREAMED = {
    "no_finish": Outcome.TRUNCATED,
    "abort": Outcome.TRUNCATED,
    "cut": Outcome.TRUNCATED,
    "error_event": Outcome.ERROR_EVENT,
    "broken_event": Outcome.MALFORMED,
    "two_finishes": Outcome.MALFORMED,
    "late_output": Outcome.MALFORMED,
    "strange_finish": Outcome.MALFORMED,
    "empty": Outcome.EMPTY,
    "refuses": Outcome.HTTP_4XX,
    "server_error": Outcome.HTTP_5XX,
    "html": Outcome.TRUNCATED,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("flaw", "outcome"), STREAMED.items(), ids=list(STREAMED))
async def test_a_stream_that_goes_wrong_is_no_success(engine, flaw, outcome):
    async with talking(engine, flaw) as endpoint:
        said = await endpoint.chat(MESSAGES, max_tokens=8)
    assert said.outcome is outcome
    assert said.detail


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_stream_without_its_end_is_no_success(engine):
    async with talking(engine, "no_done") as endpoint:
        said = await endpoint.chat(MESSAGES, max_tokens=8)
    # Where a dialect has no [DONE], the connection's proper end is the end.
    assert said.outcome is (Outcome.TRUNCATED if spoken(engine).has_done else Outcome.OK)


PLAIN = {
    "no_finish": Outcome.TRUNCATED,
    "abort": Outcome.TRUNCATED,
    "strange_finish": Outcome.MALFORMED,
    "two_choices": Outcome.MALFORMED,
    "empty": Outcome.EMPTY,
    "refuses": Outcome.HTTP_4XX,
    "server_error": Outcome.HTTP_5XX,
    "html": Outcome.MALFORMED,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("flaw", "outcome"), PLAIN.items(), ids=list(PLAIN))
async def test_a_plain_answer_that_goes_wrong_is_no_success(engine, flaw, outcome):
    async with talking(engine, flaw) as endpoint:
        said = await endpoint.chat(MESSAGES, max_tokens=8, stream=False)
    assert said.outcome is outcome


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_answer_without_usage_has_none(engine):
    async with talking(engine, "no_usage") as endpoint:
        assert (await endpoint.chat(MESSAGES, max_tokens=8)).usage is None
        assert (await endpoint.chat(MESSAGES, max_tokens=8, stream=False)).usage is None


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_engines_own_words_say_why_it_refused(engine):
    async with talking(engine, "refuses") as endpoint:
        said = await endpoint.chat(MESSAGES, max_tokens=8, stream=False)
    assert said.detail.endswith(": the request is not to its liking")


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_is_wrong_with_the_other_routes_is_noticed(engine):
    async with talking(engine, "unhealthy") as endpoint:
        assert not await endpoint.is_healthy()
    async with talking(engine, "no_models") as endpoint:
        with pytest.raises(Malformed):
            await endpoint.models()
    if can(engine, Capability.MODEL_LIST):
        async with talking(engine, "wrong_model") as endpoint:
            assert [one.id for one in await endpoint.models()] == ["another"]
    if can(engine, Capability.METRICS):
        async with talking(engine, "broken_metrics") as endpoint:
            with pytest.raises((Malformed, EndpointError)):
                await endpoint.metrics()
    if spoken(engine).facts_path is not None:
        async with talking(engine, "no_facts") as endpoint:
            with pytest.raises(Malformed):
                await endpoint.facts()


# ------------------------------------------------------------------------------------------ the table of releases

RECORDED = sorted(releases.recorded())


@pytest.mark.parametrize("engine", RECORDED)
def test_every_row_says_where_it_is_from(engine):
    row = releases.recorded()[engine]
    told = [*(rule for rules in row["capabilities"].values() for rule in rules), *row["metrics"], *row["pages"]]
    assert all(len(one["source"]) > 10 for one in [*told, row["supported"], row["health"]])
    assert set(row["capabilities"]) <= {one.value for one in Capability}


@pytest.mark.parametrize("engine", RECORDED)
def test_a_version_outside_every_range_has_no_capability_and_no_metric(engine):
    for version in ("0.0.1", "nightly"):
        told = dialect_of(bundle(engine, version=version).engine)
        assert (told.capabilities, told.metrics) == (frozenset(), MetricNames())


def test_the_metrics_of_each_release_are_on_its_page():
    for engine in RECORDED:
        for page in releases.recorded()[engine]["pages"]:
            names = [name for name in vars(releases.metric_names(engine, page["release"])).values() if name]
            assert set(names) <= set(page["names"]), f"{engine} {page['release']}"


def test_capabilities_come_with_the_version_that_brought_them():
    assert Capability.TOKENIZE not in releases.capabilities("sglang", "0.5.3")
    assert Capability.TOKENIZE in releases.capabilities("sglang", "0.5.4")
    assert releases.metric_names("sglang", "0.4.6").cached_tokens is None
    assert releases.metric_names("sglang", "0.5.0").cached_tokens == "sglang:cached_tokens_total"


def test_what_has_no_field_of_its_own_is_named_all_the_same():
    asked = spoken("transformers").chat("chain", MESSAGES, max_tokens=8, stream=True, sampling=Sampling(0.7, top_k=3))
    assert json.loads(asked.body.pop("generation_config")) == {
        "top_k": 3,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "do_sample": True,
    }
    assert asked.body == {
        "model": "chain",
        "messages": MESSAGES,
        "max_tokens": 8,
        "stream": True,
        "temperature": 0.7,
        "top_p": 1.0,
        "seed": 1,
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_a_greedy_question_leaves_the_defaults_of_callers_alone(engine):
    asked = spoken(engine).greedy("chain", MESSAGES, max_tokens=8)
    assert set(asked.body) == {"model", "messages", "max_tokens", "stream", "temperature", "seed"}
    assert asked.body["temperature"] == 0


def test_a_schema_is_asked_for_in_the_form_that_the_engine_takes():
    assert spoken("tgi").schema_fields("answer", {"type": "object"}) == {
        "response_format": {"type": "json_object", "value": {"type": "object"}}
    }
