"""What the gateway answers where a key is no text, and where the model's server is gone."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from aiohttp import ClientError, ClientSession, StreamReader, web
from aiohttp.base_protocol import BaseProtocol

from infra.child_process import free_port
from infra.serving.chat_requests import readable_chat
from infra.serving.model_gateway import gateway
from infra.serving.required_call import required_call
from infra.serving.reshaped_answers import reshaped_events, reshaping

KEY = "schlüssel"


async def started(application: web.Application) -> tuple[web.AppRunner, int]:
    runner, port = web.AppRunner(application), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner, port


def asked(upstream: web.Application | None, header: bytes, path: str = "/v1/models") -> tuple[int, bytes]:
    """Status and body of one request with this Authorization header, byte for byte."""

    async def ask() -> tuple[int, bytes]:
        other, port = await started(web.Application() if upstream is None else upstream)
        if upstream is None:
            await other.cleanup()
        runner, own = await started(gateway(f"http://127.0.0.1:{port}", "own", "127.0.0.1", 0, KEY, 64))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", own)
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: ".encode()
            writer.write(head + header + b"\r\n\r\n")
            await writer.drain()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            return int(head.split()[1]), body
        finally:
            await runner.cleanup()
            await other.cleanup()

    return asyncio.run(ask())


def serving() -> web.Application:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    application = web.Application()
    application.router.add_get("/v1/models", answer)
    return application


@pytest.mark.parametrize("key", [b"\xff\xfe", "schlüssel".encode("latin-1"), b"", b"schl"])
def test_a_key_that_is_no_text_is_a_wrong_one(key):
    assert {asked(serving(), scheme + KEY.encode())[0] for scheme in (b"Bearer ", b"bearer ")} == {200}
    status, body = asked(serving(), b"Bearer " + key)
    assert status == 401 and json.loads(body)["error"]["message"].startswith("the key is missing or wrong")


def test_a_dead_server_is_reported_as_json_with_status_502():
    status, body = asked(None, b"Bearer " + KEY.encode())
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (502, 502, "server_error")
    assert error["message"].startswith("the model's server does not answer (ClientConnectorError)")


def test_a_server_that_dies_in_its_answer_breaks_the_connection():
    """A client must not take half an answer for a whole one."""

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"begun")
        assert request.transport is not None
        request.transport.close()
        return response

    async def ask() -> bytes:
        application = web.Application()
        application.router.add_get("/v1/models", half)
        other, port = await started(application)
        runner, own = await started(gateway(f"http://127.0.0.1:{port}", "own", "127.0.0.1", 0, KEY, 64))
        try:
            headers = {"Authorization": f"Bearer {KEY}"}
            url = f"http://127.0.0.1:{own}/v1/models"
            async with ClientSession() as session, session.get(url, headers=headers) as got:
                return await got.read()
        finally:
            await runner.cleanup()
            await other.cleanup()

    with pytest.raises(ClientError):
        asyncio.run(ask())


def test_a_server_is_asked_by_its_own_names_at_any_port_and_its_pages_at_their_own():
    """As curl and browsers do."""

    async def ask(port: int, **headers: str) -> int:
        other, upstream = await started(serving())
        runner, own = await started(gateway(f"http://127.0.0.1:{upstream}", "own", "127.0.0.1", port, "", 64))
        try:
            async with (
                ClientSession() as session,
                session.get(f"http://127.0.0.1:{own}/v1/models", headers=headers) as got,
            ):
                return got.status
        finally:
            await runner.cleanup()
            await other.cleanup()

    for host, origin in (("localhost", "http://localhost"), ("127.0.0.1:80", "http://127.0.0.1")):
        assert asyncio.run(ask(80, Host=host, Origin=origin)) == 200
    assert asyncio.run(ask(80, Host="localhost", Origin="http://evil.example")) == 403
    for host, status in (
        ("localhost:8000", 200),
        ("localhost:9000", 200),  # of a tunnel
        ("LOCALHOST", 200),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("localhost:x", 403),
    ):
        assert asyncio.run(ask(8000, Host=host)) == status, host
    assert asyncio.run(ask(8000, Host="localhost:9000", Origin="http://localhost:9000")) == 200
    assert asyncio.run(ask(8000, Host="localhost:8000", Origin="http://localhost:3000")) == 403
    assert asyncio.run(ask(8000, Host="localhost:8000", Origin="https://localhost:8000")) == 403


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_a_required_call_is_held_to_its_grammar_at_both_paths_of_a_chat(path):
    """By the completion that the gateway asks for; the server's own chat is not asked."""
    grammars = []

    async def template(_request: web.Request) -> web.Response:
        return web.json_response({"prompt": "<tool_call>"})

    async def complete(request: web.Request) -> web.Response:
        asked = await request.json()
        grammars.append(asked["grammar"])
        made = {"content": "time\n</tool_call>", "stop_type": "eos", "model": "m", "timings": {}}
        return web.json_response(made | {"tokens_evaluated": 1, "tokens_predicted": 2})

    async def ask() -> dict:
        application = web.Application()
        application.router.add_post("/apply-template", template)
        application.router.add_post("/completion", complete)
        other, upstream = await started(application)
        runner, own = await started(gateway(f"http://127.0.0.1:{upstream}", "own", "127.0.0.1", 0, KEY, 64))
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            async with (
                ClientSession() as session,
                session.post(f"http://127.0.0.1:{own}{path}", json=CALL, headers=headers) as got,
            ):
                return await got.json()
        finally:
            await runner.cleanup()
            await other.cleanup()

    (answer,) = asyncio.run(ask())["choices"]
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"} and grammars


def passed_on(*requests: tuple[str, dict, bytes], status: int = 200, answer: dict | None = None) -> list:
    """(status, answer, body that the model's server got) of each request: path, headers, body."""
    got: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.read())
        return web.json_response(answer or {}, status=status)

    async def ask() -> list:
        application, answers = web.Application(), []
        application.router.add_route("*", "/{path:.*}", take)
        other, upstream = await started(application)
        runner, own = await started(gateway(f"http://127.0.0.1:{upstream}", "own", "127.0.0.1", 0, KEY, 64))
        try:
            async with ClientSession() as session:
                for path, headers, body in requests:
                    url, sent = f"http://127.0.0.1:{own}{path}", {"Authorization": f"Bearer {KEY}"} | headers
                    async with session.post(url, data=body, headers=sent) as replied:
                        answers.append((replied.status, await replied.json(), got.pop() if got else b""))
        finally:
            await runner.cleanup()
            await other.cleanup()
        return answers

    return asyncio.run(ask())


def test_a_chat_is_passed_on_in_the_form_that_the_server_reads():
    call = {"id": "a", "function": {"name": "time", "arguments": ""}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None}
    chat = {"messages": [turn, {"role": "user", "content": "x", "name": None}], "thinking": {"type": "disabled"}}
    packed = gzip.compress(json.dumps(chat).encode())
    ((status, _, body),) = passed_on(("/v1/chat/completions", {"Content-Encoding": "gzip"}, packed))
    call = {"type": "function", "id": "a", "function": {"name": "time", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert status == 200 and json.loads(body) == {
        "messages": [turn, {"role": "user", "content": "x"}],
        "thinking": {"type": "disabled"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    same = b'{"messages": [{"role": "user", "content": "\\u00e4"}],  "seed": 1e0}'
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (same, deep, b"no JSON"):
        assert passed_on(("/v1/chat/completions", {}, body))[0][2] == body, "what needs no other form stays as it is"


def test_anthropics_clients_may_send_their_key_and_switch_reasoning_off():
    asked = json.dumps({"messages": [{"role": "user"}], "thinking": {"type": "disabled"}}).encode()
    headers = {"Authorization": "", "x-api-key": KEY}
    wrong, right = passed_on(("/v1/messages", headers, asked), ("/v1/messages", {}, asked))
    assert wrong[0] == 401
    assert json.loads(right[2])["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("switch", "thinks"),
    [
        ({"enable_thinking": False}, False),
        ({"think": True}, True),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "low"}}, None),
        ({"think": "high", "enable_thinking": None}, None),
    ],
)
def test_reasoning_may_be_switched_in_the_words_of_several_apis(switch, thinks):
    read = readable_chat({"messages": [{"role": "user", "content": "x"}], **switch})
    assert read.get("chat_template_kwargs") == (None if thinks is None else {"enable_thinking": thinks})


def test_what_the_client_did_wrong_is_no_fault_of_the_server():
    for message, status in (("Failed to parse tools: x", 400), ("'messages' is required", 400), ("no memory", 500)):
        answer = {"error": {"code": 500, "message": message, "type": "server_error"}}
        ((given, error, _),) = passed_on(("/v1/chat/completions", {}, b"{}"), status=500, answer=answer)
        assert given == status == error["error"]["code"] and error["error"]["message"] == message


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "time"}, {"type": "function", "function": {"name": "time"}}),
        ({"name": "time"}, {"type": "function", "function": {"name": "time"}}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"name": "time"}]}}, "required"),
    ],
)
def test_a_choice_among_tools_may_be_in_the_words_of_several_apis(choice, asked):
    other = {"type": "function", "function": {"name": "date"}}
    made = readable_chat({"tools": [TOOL, other], "tool_choice": choice})
    assert made["tool_choice"] == asked
    assert made["tools"] == ([TOOL] if choice.get("type") == "allowed_tools" else [TOOL, other])


@pytest.mark.parametrize("allowed", [None, {"mode": "auto"}, {"mode": "auto", "tools": [{"name": "x"}]}])
def test_a_choice_that_allows_no_tool_is_refused(allowed):
    with pytest.raises(ValueError, match="tool_choice"):
        readable_chat({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}})


def test_a_result_of_a_function_is_one_of_a_tool():
    made = readable_chat({"messages": [{"role": "function", "name": "time", "content": "noon"}]})
    assert made["messages"] == [{"role": "tool", "name": "time", "content": "noon"}]
    made = readable_chat({"messages": [{"role": "tool", "content": [{"output": "noon"}, {"output": {"a": 1}}]}]})
    assert made["messages"] == [{"role": "tool", "content": "noon"}, {"role": "tool", "content": '{"a": 1}'}]


def test_an_answer_that_the_request_begins_has_no_reasoning_unless_it_says_so():
    begun = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It"}]}
    assert readable_chat(begun)["chat_template_kwargs"] == {"enable_thinking": False}
    told = begun | {"chat_template_kwargs": {"enable_thinking": True}}
    assert readable_chat(told) == told


TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CALL = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"messages": None}, "messages is missing"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs is no object"),
        ({"tool_choice": {"type": "function", "function": "date"}}, "asks for the function 'date'"),
    ],
)
def test_a_required_call_that_is_asked_for_wrongly_is_refused_with_the_reason(changed, why):
    with pytest.raises(ValueError, match=why):
        required_call({**CALL, **changed})


def test_a_limit_of_no_tokens_is_not_none():
    call = required_call({**CALL, "max_tokens": 0, "chat_template_kwargs": None})
    assert call is not None and call.completion("")["n_predict"] == 0
    assert call.template["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("path", "choices"),
    [
        ("/v1/responses", ["required", {"type": "function", "name": "time"}]),
        ("/responses", ["required"]),
        ("/v1/messages", [{"type": "any"}, {"type": "tool", "name": "time"}]),
    ],
)
def test_a_call_that_another_api_requires_is_refused_and_its_other_requests_pass(path, choices):
    """llama.cpp's own grammar, which such a request would get, does not hold what our gateway promises."""

    async def ask(*asked: dict) -> list[int]:
        async def answer(_request: web.Request) -> web.Response:
            return web.json_response({})

        application = web.Application()
        application.router.add_post(path, answer)
        other, upstream = await started(application)
        runner, own = await started(gateway(f"http://127.0.0.1:{upstream}", "own", "127.0.0.1", 0, KEY, 64))
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            async with ClientSession(headers=headers) as session:
                answers = [await session.post(f"http://127.0.0.1:{own}{path}", json=each) for each in asked]
                said = [(await each.json())["error"]["message"] for each in answers if each.status == 400]
                assert all("required at /v1/chat/completions only" in message for message in said)
                return [each.status for each in answers]
        finally:
            await runner.cleanup()
            await other.cleanup()

    required = [{"tools": [TOOL], "tool_choice": choice} for choice in choices]
    free = [{"tools": [TOOL], "tool_choice": choice} for choice in ("auto", "none", {"type": "auto"}, None)]
    assert asyncio.run(ask(*required)) == [400] * len(required)
    assert asyncio.run(ask(*free, {"tool_choice": "required"}, {})) == [200] * (len(free) + 2)


CHAT, TEXT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SHAPE = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("path", "asked", "why"),
    [
        (CHAT, {"functions": [TOOL["function"]]}, "functions is not supported: describe them in tools"),
        (CHAT, {"guided_json": SHAPE}, "guided_json is not supported: write response_format"),
        (TEXT, {"min_tokens": 8}, "min_tokens is not supported"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens is 0: an answer has at least 1 token"),
        (TEXT, {"max_tokens": 0}, "max_tokens is 0"),
        (RESPONSE, {"max_output_tokens": 0}, "max_output_tokens is 0"),
        (CHAT, {"stop": 5}, "stop is 5: write a text"),
        (CHAT, {"messages": []}, "messages is empty"),
        (
            CHAT,
            {"messages": [{"role": "oracle", "content": "a"}]},
            "message 0 has the role 'oracle': write one of system",
        ),
        (MESSAGE, {"messages": "x"}, "messages is no list"),
        (MESSAGE, {"messages": []}, "messages is empty"),
        (MESSAGE, {"messages": [{"role": "oracle"}]}, "message 0 has the role 'oracle'"),
        (TEXT, {"stop": ["a", 5]}, "write a text, or a list of texts"),
        (MESSAGE, {"stop_sequences": 5}, "stop_sequences is 5"),
        (CHAT, {"response_format": "json"}, "response_format is json: write"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format is"),
        (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "response_format is"),
        (TEXT, {"response_format": {"type": "json_object"}}, "response_format has an effect at /v1/chat/completions"),
        (
            MESSAGE,
            {"output_config": {"format": {"type": "json_schema", "schema": SHAPE}}},
            "output_config has an effect",
        ),
    ],
)
def test_what_the_server_would_leave_out_without_a_word_is_refused_by_name(path, asked, why):
    ((status, answer, body),) = passed_on((path, {}, json.dumps(asked).encode()))
    assert (status, body) == (400, b"") and why in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "asked", "changed"),
    [
        (CHAT, {"stop": ["a"], "best_of": 1, "function_call": "none", "response_format": {"type": "text"}}, {}),
        (CHAT, {"logprobs": True, "top_logprobs": 0}, {"top_logprobs": 1}),
        (TEXT, {"logprobs": 0}, {"logprobs": 1}),
        (TEXT, {"logprobs": False}, {}),
        (RESPONSE, {"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            RESPONSE,
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SHAPE}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SHAPE}}},
        ),
        (MESSAGE, {"output_config": {"effort": "low"}, "stop_sequences": ["a"]}, {}),
    ],
)
def test_what_the_server_reads_in_another_form_is_written_so(path, asked, changed):
    ((status, _, body),) = passed_on((path, {}, json.dumps(asked).encode()))
    assert status == 200 and json.loads(body) == asked | changed


def response(num_tokens: int) -> dict:
    usage = {"input_tokens": 14, "output_tokens": num_tokens, "total_tokens": 14 + num_tokens}
    return {"status": "completed", "output": [{"type": "message", "status": "completed"}], "usage": usage}


@pytest.mark.parametrize(
    ("asked", "num_tokens", "is_cut"),
    [({"max_output_tokens": 3}, 3, True), ({"max_output_tokens": 4}, 3, False), ({}, 50, True), ({}, 49, False)],
)
def test_a_response_that_was_cut_is_incomplete(asked, num_tokens, is_cut):
    """At its limit, or where the context of 64 tokens was full."""
    ((_, told, _),) = passed_on((RESPONSE, {}, json.dumps(asked).encode()), answer=response(num_tokens))
    status = "incomplete" if is_cut else "completed"
    assert (told["status"], told["output"][0]["status"]) == (status, status)
    assert told.get("incomplete_details") == ({"reason": "max_output_tokens"} if is_cut else None)


@pytest.mark.parametrize(("stopped_by", "reason"), [("\n", "stop_sequence"), (None, "end_turn")])
def test_a_message_that_a_stop_sequence_ended_says_so(stopped_by, reason):
    message = {"type": "message", "stop_reason": "end_turn", "stop_sequence": stopped_by}
    ((_, told, _),) = passed_on((MESSAGE, {}, b"{}"), answer=message)
    assert told == message | {"stop_reason": reason}


def test_the_events_of_a_stream_tell_the_same_as_a_whole_answer():
    """In whatever pieces they come, with their names."""
    begun = {"type": "response.output_text.delta", "delta": "a\u00e4"}
    ended = {"type": "response.completed", "response": response(3)}
    events = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in (begun, ended))
    reshape = reshaping(RESPONSE, {"max_output_tokens": 3}, 64)
    assert reshape is not None

    async def read() -> str:
        content = StreamReader(BaseProtocol(asyncio.get_running_loop()), 2**16)
        for piece in events.encode():
            content.feed_data(bytes([piece]))
        content.feed_eof()
        return b"".join([line async for line in reshaped_events(content, reshape)]).decode()

    first, last, rest = asyncio.run(read()).split("\n\n")
    assert rest == "" and json.loads(first.partition("data: ")[2]) == begun
    name, _, data = last.partition("\ndata: ")
    assert name == "event: response.incomplete" and json.loads(data)["type"] == "response.incomplete"
    assert json.loads(data)["response"]["status"] == "incomplete"


def test_more_answers_than_slots_are_refused_with_the_option_to_give():
    field = {"error": {"message": "Field 'n': Value must be between 1 <= value <= 1, but got 2"}}
    other = {"error": {"message": "Field 'x'"}}
    for answer, said in ((field, "--slots"), (other, "Field 'x'")):
        ((status, told, _),) = passed_on((CHAT, {}, b'{"n": 2}'), status=400, answer=answer)
        assert status == 400 and said in told["error"]["message"]
