import asyncio
import contextlib
import json
import socket

import pytest

from gates.answers import Outcome, Stream, merge_tool_calls
from gates.dialects.base import Malformed
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint, EndpointError
from tests.support import chain
from tests.support.engine import chain_engine
from tests.support.scripted_engine import (
    DONE,
    Script,
    chat_event,
    chat_stream,
    event,
    scripted_engine,
    usage_event,
)

CHAT, PING = "/v1/chat/completions", chain.PROMPT
HEALTHY = b"".join(chat_stream("H", "ü€😀", "i"))
PLAIN = {
    "model": "scripted",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 23, "completion_tokens": 3, "total_tokens": 26},
}


def chat(script, **options):
    async def run():
        async with (
            scripted_engine({CHAT: script}) as engine,
            Endpoint(engine.base_url, "scripted", LLAMACPP) as endpoint,
        ):
            options.setdefault("timeout_seconds", 5.0)
            answer = await endpoint.chat(PING, max_tokens=8, **options)
            return answer, engine

    return asyncio.run(run())


def read(chunks):
    stream = Stream(LLAMACPP)
    for now_ns, chunk in enumerate(chunks):
        stream.feed(now_ns, chunk)
    return stream.read()


def test_a_healthy_stream_is_ok_with_all_that_it_says():
    answer, engine = chat(Script(chunks=chat_stream("H", "i")))
    assert (answer.outcome, answer.detail) == (Outcome.OK, "")
    assert (answer.text, answer.finish_reason, answer.model) == ("Hi", "stop", "scripted")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (23, 3)
    assert (answer.status, answer.events) == (200, 5)
    (asked,) = engine.log
    assert json.loads(asked.body)["stream"] is True


def test_instants_are_in_order_and_the_first_token_is_not_the_role():
    answer, _ = chat(Script(chunks=chat_stream("H", "i"), delay_seconds=0.05, pause_seconds=0.05))
    instants = [answer.sent_ns, answer.headers_ns, answer.first_event_ns, *answer.output_ns, answer.done_ns]
    assert instants == sorted(instants)
    assert len(answer.output_ns) == 2
    assert answer.headers_ns - answer.sent_ns >= 0.045e9
    assert answer.first_token_ns - answer.first_event_ns >= 0.045e9
    assert answer.last_token_ns - answer.first_token_ns >= 0.045e9
    assert answer.ttft_ms >= 90


@pytest.mark.parametrize("place", range(len(HEALTHY) + 1))
def test_every_cut_in_two_gives_the_same_answer(place):
    answer = read([HEALTHY[:place], HEALTHY[place:]])
    assert (answer.outcome, answer.text, answer.events) == (Outcome.OK, "Hü€😀i", 6)


def test_a_character_cut_between_packets_arrives_whole():
    first, second, *rest = chat_stream("ü")
    answer, _ = chat(Script(chunks=[first, *(bytes([byte]) for byte in second), *rest]))
    assert (answer.outcome, answer.text) == (Outcome.OK, "ü")


def test_a_plain_answer_is_ok():
    answer, _ = chat(Script.json(PLAIN), stream=False)
    assert (answer.outcome, answer.text, answer.first_token_ns) == (Outcome.OK, "Hi", answer.done_ns)


def test_reasoning_and_tool_calls_are_output_too():
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "get_time", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": "{}"}}
    chunks = [
        chat_event(reasoning_content="hm"),
        chat_event(tool_calls=[call]),
        chat_event(tool_calls=[rest]),
        chat_event(finish_reason="tool_calls"),
        DONE,
    ]
    answer, _ = chat(Script(chunks=chunks))
    assert (answer.outcome, answer.reasoning, answer.text) == (Outcome.OK, "hm", "")
    assert answer.tool_calls == ({"id": "c1", "type": "function", "name": "get_time", "arguments": "{}"},)
    assert len(answer.output_ns) == 3


H, FINISH = chat_event("H"), chat_event(finish_reason="stop")


@pytest.mark.parametrize(
    ("chunks", "outcome"),
    [
        ([], Outcome.TRUNCATED),
        ([H, DONE], Outcome.TRUNCATED),
        ([H, FINISH], Outcome.TRUNCATED),
        ([H, FINISH, DONE[:-1]], Outcome.TRUNCATED),
        ([H, chat_event(finish_reason="abort"), DONE], Outcome.TRUNCATED),
        ([H, FINISH, FINISH, DONE], Outcome.MALFORMED),
        ([H, FINISH, H, DONE], Outcome.MALFORMED),
        ([H, chat_event(finish_reason="content_filter"), DONE], Outcome.MALFORMED),
        ([b"data: {\n\n", H, FINISH, DONE], Outcome.MALFORMED),
        ([b"data: []\n\n", H, FINISH, DONE], Outcome.MALFORMED),
        ([b'data: {"choices": 1}\n\n', H, FINISH, DONE], Outcome.MALFORMED),
        ([H, event({"error": {"code": 500, "message": "full"}})], Outcome.ERROR_EVENT),
        ([H, event({"error": {"code": 500, "message": "full"}}), DONE], Outcome.ERROR_EVENT),
        ([H, b'error: {"code":500,"message":"full"}\n\n'], Outcome.ERROR_EVENT),
        ([H, b"event: error\ndata: full\n\n", DONE], Outcome.ERROR_EVENT),
        ([FINISH, DONE], Outcome.EMPTY),
        ([H, FINISH, DONE], Outcome.OK),
        ([b": keep-alive\n\n", H, FINISH, usage_event(), DONE], Outcome.OK),
    ],
)
def test_an_answer_is_ok_only_when_it_is_whole(chunks, outcome):
    answer = read(chunks)
    assert answer.outcome is outcome
    assert (answer.detail == "") is (outcome is Outcome.OK)


def test_bytes_that_are_no_text_are_malformed():
    answer, _ = chat(Script(chunks=[b"data: \xff\n\n", DONE]))
    assert answer.outcome is Outcome.MALFORMED


@pytest.mark.parametrize("cut_after", range(5))
def test_b23_a_cut_stream_is_truncated_and_keeps_what_came(cut_after):
    answer, _ = chat(Script(chunks=chat_stream("H", "i")[:cut_after], ending="cut"))
    assert answer.outcome is Outcome.TRUNCATED
    assert answer.text == ["", "", "H", "Hi", "Hi"][cut_after]


def test_an_error_event_before_a_cut_is_the_reason():
    chunks = [H, event({"error": {"code": 500, "message": "Context size has been exceeded."}})]
    answer, _ = chat(Script(chunks=chunks, ending="cut"))
    assert (answer.outcome, answer.detail) == (Outcome.ERROR_EVENT, "Context size has been exceeded.")


def test_a_stream_that_hangs_times_out():
    answer, _ = chat(Script(chunks=[H], ending="hang"), timeout_seconds=0.2)
    assert (answer.outcome, answer.text) == (Outcome.TIMEOUT, "H")


def test_a_server_that_never_answers_times_out():
    answer, _ = chat(Script(delay_seconds=1.0), timeout_seconds=0.1)
    assert (answer.outcome, answer.status, answer.headers_ns) == (Outcome.TIMEOUT, 0, None)


def test_a_connection_left_open_after_the_end_does_not_delay_the_answer():
    answer, _ = chat(Script(chunks=chat_stream("H"), ending="hang"), timeout_seconds=5.0)
    assert answer.outcome is Outcome.OK
    assert answer.done_ns - answer.sent_ns < 1e9


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, "http_4xx"),
        (429, "http_4xx"),
        (500, "http_5xx"),
        (503, "http_5xx"),
        (302, "malformed"),
        (202, "malformed"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_status_other_than_200_is_a_failure_with_the_servers_own_words(status, outcome, stream):
    answer, _ = chat(Script.json({"error": {"message": "no room"}}, status), stream=stream)
    assert (answer.outcome, answer.status) == (outcome, status)
    assert answer.detail == f"{status}: no room"


def test_a_plain_body_that_is_no_answer_is_malformed():
    for script in (Script.json({"a": 1}), Script.json([]), Script(content_type="text/html", chunks=[b"<p>"])):
        assert chat(script, stream=False)[0].outcome is Outcome.MALFORMED


def test_a_server_that_speaks_no_http_is_malformed():
    async def run():
        async def greet(reader, writer):
            writer.write(b"220 smtp ready\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Endpoint(f"http://127.0.0.1:{port}", "m", LLAMACPP) as endpoint:
            return await endpoint.chat(PING, max_tokens=1)

    assert asyncio.run(run()).outcome is Outcome.MALFORMED


def test_nobody_listening_is_a_failed_connection():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def run():
        async with Endpoint(f"http://127.0.0.1:{port}", "m", LLAMACPP) as endpoint:
            with pytest.raises(EndpointError, match="connect"):
                await endpoint.models()
            return await endpoint.chat(PING, max_tokens=1)

    assert asyncio.run(run()).outcome is Outcome.CONNECT


def test_two_hundred_streams_are_open_at_once():
    async def run():
        script = Script(chunks=chat_stream("H")[:2], ending="hang")
        async with (
            scripted_engine({CHAT: script}) as engine,
            Endpoint(engine.base_url, "scripted", LLAMACPP) as endpoint,
        ):
            tasks = [asyncio.create_task(endpoint.chat(PING, max_tokens=1, timeout_seconds=20)) for _ in range(200)]
            most = await engine.reach(200)
            engine.release()
            await asyncio.gather(*tasks)
            return most

    assert asyncio.run(run()) == 200


def test_a_cancelled_request_hangs_up():
    async def run():
        async with (
            scripted_engine({CHAT: Script(chunks=[H] * 200, pause_seconds=0.01)}) as engine,
            Endpoint(engine.base_url, "scripted", LLAMACPP) as endpoint,
        ):
            task = asyncio.create_task(endpoint.chat(PING, max_tokens=1))
            await engine.reach(1)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return await engine.reach(0, 2.0)

    assert asyncio.run(run()) == 0


def test_headers_of_endpoint_and_request_are_sent():
    async def run():
        async with (
            scripted_engine({CHAT: Script(chunks=chat_stream("H"))}) as engine,
            Endpoint(engine.base_url, "m", LLAMACPP, headers={"Authorization": "Bearer x"}) as endpoint,
        ):
            await endpoint.chat(PING, max_tokens=1, headers={"X-Request-Id": "7"})
            return engine.log[0].headers

    headers = asyncio.run(run())
    assert (headers["authorization"], headers["x-request-id"]) == ("Bearer x", "7")


def test_raw_bytes_are_sent_as_they_are():
    async def run():
        async with (
            scripted_engine({CHAT: Script.json({"error": {"message": "bad"}}, 400)}) as engine,
            Endpoint(engine.base_url, "m", LLAMACPP) as endpoint,
        ):
            reply = await endpoint.post(CHAT, b'{"a": NaN', headers={"Content-Type": "text/plain"})
            return reply, engine.log[0]

    reply, asked = asyncio.run(run())
    assert (reply.outcome, reply.status, json.loads(reply.body)) == ("http_4xx", 400, {"error": {"message": "bad"}})
    assert (asked.body, asked.headers["content-type"]) == (b'{"a": NaN', "text/plain")


def test_tokenizing_that_gives_nothing_for_a_text_is_an_error():
    async def run():
        scripts = {"/tokenize": Script.json({"tokens": []}), "/apply-template": Script.json({"prompt": "x"})}
        async with (
            scripted_engine(scripts) as engine,
            Endpoint(engine.base_url, "m", LLAMACPP) as endpoint,
        ):
            await endpoint.render_prompt_ids(PING)

    with pytest.raises(Malformed):
        asyncio.run(run())


def test_tool_calls_are_joined_by_index_whatever_their_order():
    deltas = [
        {"index": 1, "id": "b", "function": {"name": "g", "arguments": "{"}},
        {"index": 0, "id": "a", "function": {"name": "f"}},
        {"index": 1, "function": {"arguments": "}"}},
    ]
    assert [(call["id"], call["name"], call["arguments"]) for call in merge_tool_calls(deltas)] == [
        ("a", "f", ""),
        ("b", "g", "{}"),
    ]


def test_the_real_engine_streams_what_it_answers_plainly(tmp_path):
    async def run(engine):
        async with Endpoint(engine.base_url, engine.model, LLAMACPP) as endpoint:
            plain = await endpoint.chat(PING, max_tokens=16, stream=False)
            streamed = await asyncio.gather(*(endpoint.chat(PING, max_tokens=16) for _ in range(12)))
            wrong = await endpoint.chat(PING, max_tokens=16, extra={"messages": "no list"})
            return plain, streamed, wrong, await endpoint.is_healthy()

    with chain_engine(tmp_path) as engine:
        plain, streamed, wrong, is_healthy = asyncio.run(run(engine))
    assert plain.text == chain.ANSWER
    assert {(answer.outcome, answer.text) for answer in streamed} == {(Outcome.OK, chain.ANSWER)}
    assert wrong.outcome is Outcome.HTTP_4XX
    assert is_healthy
