"""The HTTP server that clients of a served model talk to: it passes requests on to llama.cpp's server.

A browser sends requests to loopback on behalf of any page. So without a key a request whose Host or Origin is not this
server's own is refused; with one, a request that does not bring it is, whoever sends it. llama.cpp's server is asked
with a key that only this process has. What it answers is written as the API that was asked has it
(reshaped_answers.py). A required function call is made here, by a grammar of our own (required_call.py), for chats in
OpenAI's older shape; in other shapes of llama.cpp it is refused.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from infra.serving.chat_page import chat_page
from infra.serving.chat_requests import readable_chat, refuse_wrong_messages, with_thinking
from infra.serving.required_call import RequiredCall, required_call
from infra.serving.reshaped_answers import COMPLETIONS, MESSAGES, RESPONSES, reshaped, reshaped_events, reshaping
from infra.serving.unread_settings import (
    refuse_broken_format,
    refuse_formats,
    refuse_unread,
    with_chosen_token,
    with_format,
)

MAX_REQUEST_BYTES = 64 << 20
CHATS = ("/v1/chat/completions", "/chat/completions")
"""Both are llama.cpp's."""
OTHER_CHATS = (*RESPONSES, MESSAGES)
"""Chats in other shapes, which llama.cpp translates itself: of a required call it would hold only the end
of the answer, and ignore the name."""
HEALTH, PAGE = "/health", "/"
"""Answered without a key: whoever restarts a server has none, and the page asks for it."""
HOP_HEADERS = {
    "host",
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "authorization",
    "x-api-key",
}
"""Headers that belong to one connection, or are replaced here."""
CLIENTS_FAULTS = ("Failed to parse", "input is not supported", "Missing tool call", "type must be", "is required")
"""Parts of messages that llama.cpp's server has with status 500 for requests that are wrong: a client would repeat
them."""
TOO_MANY = "Field 'n'"
"""The beginning of its message on a number of answers."""
UPSTREAM = web.AppKey("upstream", str)
KEY = web.AppKey("key", str)
CLIENT_KEY = web.AppKey("client_key", str)
NAMES = web.AppKey("names", frozenset)
"""Of this machine, by which programs on it reach the server."""
ADDRESS = web.AppKey("address", str)
CONTEXT_LENGTH = web.AppKey("context_length", int)
SESSION = web.AppKey("session", ClientSession)
BEGUN = web.RequestKey("begun", bool)
"""Whether the first bytes of an answer were sent."""


def gateway(upstream: str, key: str, host: str, port: int, client_key: str, context_length: int) -> web.Application:
    """The application that listens at host:port; `upstream` is the URL of llama.cpp's server, without a trailing slash,
    `key` its key and `context_length` that of a request. Clients must send `client_key`; empty: they need none, and are
    programs of this machine."""
    allowing = _require_key if client_key else _refuse_other_sites
    app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[allowing, _report_dead_upstream])
    app[UPSTREAM], app[KEY], app[CLIENT_KEY] = upstream, key, client_key
    app[CONTEXT_LENGTH] = context_length
    app[NAMES], app[ADDRESS] = frozenset({host.lower(), "127.0.0.1", "localhost"}), f"http://127.0.0.1:{port}"
    app.cleanup_ctx.append(_session)
    app.router.add_get(PAGE, chat_page)
    app.router.add_route("*", "/{path:.*}", _pass_on)
    return app


async def _session(app: web.Application) -> AsyncIterator[None]:
    # llama.cpp's server closes connections that idle; one that is used again then fails, seen as status 500 at 32
    # requests at a time. On loopback a new one costs nothing.
    connector = TCPConnector(force_close=True, limit=0)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=None), auto_decompress=False) as session:
        app[SESSION] = session
        yield


@web.middleware
async def _require_key(request: web.Request, handler: Any) -> web.StreamResponse:
    given = request.headers.get("Authorization", request.headers.get("x-api-key", ""))
    given = re.sub("^bearer +", "", given, flags=re.IGNORECASE)
    # aiohttp hands on bytes that are not UTF-8 as lone surrogates; encoded so they are the bytes that were sent.
    sent = given.encode(errors="surrogateescape")
    is_open = request.path == HEALTH or request.match_info.handler is chat_page
    if not is_open and not hmac.compare_digest(sent, request.app[CLIENT_KEY].encode()):
        return _refusal(401, "the key is missing or wrong: send it as the header Authorization: Bearer KEY")
    return await handler(request)


@web.middleware
async def _refuse_other_sites(request: web.Request, handler: Any) -> web.StreamResponse:
    """By the name in Host, which a page that points a name of its own at this machine cannot choose; the port may be
    that of a tunnel. A page is of this server where Origin is Host."""
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    if _place(f"http://{host}")[0] not in request.app[NAMES]:
        return _refusal(403, f"Host {host} is not this server: ask it at {request.app[ADDRESS]}")
    if origin is not None and not (origin.startswith("http://") and _place(origin) == _place(f"http://{host}")):
        return _refusal(403, f"pages of {origin} must not use this server")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return _refusal(403, "pages of other sites must not use this server")
    return await handler(request)


def _place(url: str) -> tuple[str, int]:
    """(name, port) of an address; no name where it is none."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or 80
    except ValueError:
        return "", 80


@web.middleware
async def _report_dead_upstream(request: web.Request, handler: Any) -> web.StreamResponse:
    """Status 502 where llama.cpp's server is gone. An answer that has begun has its status: its connection breaks."""
    try:
        return await handler(request)
    except ClientError as error:
        if request.get(BEGUN, False):
            raise
        message = f"the model's server does not answer ({type(error).__name__}): look at its log, and start it again"
        return _refusal(502, message, "server_error")


def _refusal(status: int, message: str, kind: str = "invalid_request_error") -> web.Response:
    return web.json_response(_error(status, message, kind), status=status)


def _error(status: int, message: str, kind: str = "server_error") -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "type": kind}}


def _message_of(body: bytes) -> str:
    """Of an answer that is an error: its message, or its text where it is no object."""
    error = _json_object(body).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else body.decode(errors="replace")[:1000]


async def _pass_on(request: web.Request) -> web.StreamResponse:
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        return _refusal(413, f"the request is too large: at most {MAX_REQUEST_BYTES} bytes are read")
    given = _json_object(body) if request.method == "POST" else {}
    try:
        asked = _readable(request.path, given)
        call = required_call(asked) if request.path in CHATS else None
        if call is not None:
            return await _make_call(request, call)
    except ValueError as error:
        return _refusal(400, str(error))
    except RecursionError:
        return _refusal(400, "the request nests too deeply")
    body = json.dumps(asked).encode() if asked != given else body
    reshape = reshaping(request.path, asked, request.app[CONTEXT_LENGTH])
    left_out = {*HOP_HEADERS, "content-encoding"}  # the body was read, and with that unpacked
    headers = {name: value for name, value in request.headers.items() if name.lower() not in left_out}
    headers["Authorization"] = f"Bearer {request.app[KEY]}"
    url = request.app[UPSTREAM] + request.raw_path
    async with request.app[SESSION].request(
        request.method, url, headers=headers, data=body, allow_redirects=False
    ) as answer:
        if answer.status == 500:
            message = _message_of(await answer.read())
            if any(fault in message for fault in CLIENTS_FAULTS):
                return _refusal(400, message)
            return _refusal(500, message, "server_error")
        if answer.status == 400 and (message := _message_of(await answer.read())).startswith(TOO_MANY):
            return _refusal(400, f"{message}: n is at most the number of --slots that the server was started with")
        response = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
        if reshape is not None and answer.status == 200:
            if answer.content_type == "text/event-stream":
                return await _send(request, response, reshaped_events(answer.content, reshape))
            return await _send(request, response, _once(reshaped(await answer.read(), reshape)))
        is_read = answer.status == 400
        return await _send(request, response, _once(await answer.read()) if is_read else answer.content.iter_any())


def _readable(path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The request as llama.cpp's server reads it. Raises ValueError for what it would leave out without a word."""
    if path in (*CHATS, *OTHER_CHATS, COMPLETIONS):
        refuse_unread(asked)
    if path in CHATS:
        refuse_broken_format(asked)
        return with_chosen_token(readable_chat(asked), "top_logprobs")
    if path in OTHER_CHATS and _requires_call(asked):
        raise ValueError(f"a call can be required at {CHATS[0]} only: ask there, or with tool_choice auto or none")
    if path == MESSAGES:
        refuse_formats(asked, "output_format", "output_config", "response_format")
        refuse_wrong_messages(asked)
        return with_thinking(asked)
    if path == COMPLETIONS:
        refuse_formats(asked, "response_format")
        if asked.get("echo"):
            raise ValueError("echo is not supported: the answer holds no prompt, leave it out")
        return with_chosen_token(asked, "logprobs")
    return with_format(asked) if path in OTHER_CHATS else asked


def _requires_call(asked: Mapping[str, Any]) -> bool:
    """Of a request in another shape: OpenAI's responses have a word or an object, Anthropic's messages an object."""
    choice = asked.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return bool(asked.get("tools")) and kind not in (None, "auto", "none")


async def _make_call(request: web.Request, call: RequiredCall) -> web.StreamResponse:
    """Answer a request for a required call, by a completion that a grammar holds to one."""
    status, made = await _ask(request, "/apply-template", call.template)
    if status == 200:
        status, made = await _ask(request, "/completion", call.completion(made["prompt"]))
    if status != 200:
        return web.json_response(made, status=status)
    try:
        answer = call.answer(made)
    except ValueError as error:
        return _refusal(400, str(error))
    if not call.asked.get("stream"):
        return web.json_response(answer)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    events = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in call.events(answer))
    return await _send(request, response, _once(f"{events}data: [DONE]\n\n".encode()))


async def _ask(request: web.Request, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and answer of llama.cpp's server."""
    headers = {"Authorization": f"Bearer {request.app[KEY]}"}
    url = request.app[UPSTREAM] + path
    async with request.app[SESSION].post(url, headers=headers, json=body) as answer:
        text = await answer.read()
        made = _json_object(text)
        return answer.status, made if made or answer.status == 200 else _error(answer.status, _message_of(text))


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers without those of the other connection and those that would allow pages of other sites."""
    dropped = HOP_HEADERS | {name.lower() for name in headers if name.lower().startswith("access-control-")}
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


async def _send(request: web.Request, response: web.StreamResponse, parts: AsyncIterator[bytes]) -> web.StreamResponse:
    request[BEGUN] = True
    await response.prepare(request)
    async for part in parts:
        await response.write(part)
    await response.write_eof()
    return response


async def _once(part: bytes) -> AsyncIterator[bytes]:
    yield part


def _json_object(body: bytes) -> dict[str, Any]:
    """The body as an object; empty where it is none: llama.cpp's server reports what is wrong."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
