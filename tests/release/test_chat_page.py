"""The chat page of a served model, in a real headless browser, before a server that answers as llama.cpp's does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from aiohttp import web

from infra.child_process import free_port
from infra.serving.model_gateway import gateway
from tests.report.browser import OpenedPage, browser_path, opened_browser

PROGRAM = browser_path()
KEY = "a key"
MARKS = "<b>19</b> & 'more'"
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed")


class Upstream:
    """Streams one reasoned answer; keeps what it was asked. A question `fail` gets llama.cpp's error."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy", "meta": {"n_ctx": 2048}}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        if asked["messages"][-1]["content"] == "fail":
            return web.json_response({"error": {"code": 400, "message": "the context is too short"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas = [{"reasoning_content": "12 and 7"}, {"content": MARKS[:5]}, {"content": MARKS[5:]}]
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        events.append(
            {
                "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}],
                "timings": {"predicted_per_second": 51.2},
            }
        )
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture(params=["", KEY])
def address(upstream: Upstream, request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a gateway with and without a key, in a thread of its own."""
    loop = asyncio.new_event_loop()
    other, own = free_port(), free_port()

    async def start() -> None:
        served = web.Application()
        served.router.add_get("/v1/models", upstream.models)
        served.router.add_post("/v1/chat/completions", upstream.chat)
        for application, port in (
            (served, other),
            (gateway(f"http://127.0.0.1:{other}", "own", "127.0.0.1", own, request.param, 64), own),
        ):
            runner = web.AppRunner(application)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()

    loop.run_until_complete(start())
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{own}/"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def shown(page: OpenedPage, expression: str, wanted: Any) -> None:
    """Waits until a JavaScript expression has this value."""
    deadline = time.monotonic() + 30
    while (value := page.evaluate(expression)) != wanted:
        assert time.monotonic() < deadline, (expression, value, wanted)
        time.sleep(0.05)


def ask(page: OpenedPage, question: str) -> None:
    page.evaluate(f"at('asked').value = {json.dumps(question)}; at('send').click()")


def test_a_chat_in_a_browser_streams_and_sends_its_turns_and_asks_no_other_server(address, upstream, request):
    key = request.node.callspec.params["address"]
    assert PROGRAM is not None
    with opened_browser(PROGRAM) as page:
        page.load(address, 900)
        if key:
            shown(page, "at('key').hidden", False)
            assert "the key is missing" in page.evaluate("at('about').textContent")
            page.evaluate(f"at('key').value = '{key}'; at('key').dispatchEvent(new Event('change'))")
        shown(page, "document.title + at('about').textContent", "toy2,048 tokens of context")
        ask(page, "What is 12 + 7?")
        shown(
            page,
            "at('turns').lastChild.querySelector('.note')?.textContent",
            "51 tokens/s cut: no more tokens were allowed",
        )
        turn = "at('turns').lastChild"
        assert page.evaluate(f"{turn}.querySelector('details .text').textContent") == "12 and 7"
        assert page.evaluate(f"{turn}.lastChild.previousSibling.textContent") == MARKS, "text, no markup"
        page.evaluate("at('thinking').checked = false; at('most').value = 5")
        ask(page, "and 13?")
        shown(page, "at('turns').children.length === 4 && at('stop').hidden", True)
        ask(page, "fail")
        shown(page, "at('turns').lastChild.querySelector('.bad')?.textContent", "the context is too short")
        shown(page, "at('asked').value", "fail")
        assert all(each.startswith((address, "data:")) for each in page.requests)
        assert not [each for each in page.complaints if "status of 40" not in each]
        page.load(address, 380)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
    first, second, _ = upstream.asked
    assert first["chat_template_kwargs"] == {"enable_thinking": True} and "max_tokens" not in first
    assert [turn["content"] for turn in second["messages"]] == ["What is 12 + 7?", MARKS, "and 13?"]
    assert second["max_tokens"] == 5 and second["chat_template_kwargs"] == {"enable_thinking": False}
