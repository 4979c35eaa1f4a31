"""What llama.cpp's server, and vLLM's, reads from a model that reasons, and calls a function where it chooses to
(`tool_choice` "auto"): a toy model learns three conversations by heart, rendered as training does."""

from __future__ import annotations

import json

import pytest
import torch
from openai import OpenAI

from infra.serving.model_server import running_model_server
from model.architecture.transformer import Glm4Moe
from model.formats.gguf_checkpoint import write_gguf
from model.text.chat_template import encode, render_to_train
from tests.release.test_release import SERVING
from tests.release.test_served_requests import WEATHER
from tests.support.engines.real_vllm import REAL_VLLM, SERVABLE, real_vllm, save_servable
from tests.support.evaluation_fakes import VOCAB_SIZE, toy_tokenizer
from tests.support.model_recipes import with_every_expert

WARM, SAY = ({"role": "user", "content": content} for content in ("How warm is it?", "Say five."))
CALL = {"role": "assistant", "content": "", "reasoning": "They ask."}
CALL |= {"tool_calls": [{"name": "weather", "arguments": {"days": 7}}]}
FIVE = {"role": "assistant", "content": "five", "reasoning": "A word."}
AT_ONCE = [{**SAY, "content": "Say five./nothink"}, {"role": "assistant", "content": "five"}]
LEARNT = [([WARM, CALL], [WEATHER]), ([SAY, FIVE], [WEATHER]), ([SAY, FIVE], []), (AT_ONCE, [])]
NUM_STEPS = 90


def learnt_model() -> Glm4Moe:
    tokenizer = toy_tokenizer()
    encoded = [encode(tokenizer, render_to_train(turns, tools)) for turns, tools in LEARNT]
    width = max(len(token_ids) for token_ids, _ in encoded)
    ids_BT = torch.tensor([token_ids + [0] * (width - len(token_ids)) for token_ids, _ in encoded])
    is_trained_BT = torch.tensor([is_trained + [False] * (width - len(is_trained)) for _, is_trained in encoded])
    targets_BT = ids_BT.masked_fill(~is_trained_BT, -100)[:, 1:]
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024}
    model = Glm4Moe(with_every_expert(SERVABLE).model_copy(update=sizes))
    model.init_weights(torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        logits_BTV = model(ids_BT[:, :-1]).logits_BTV
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1, "the conversations are not known by heart"
    return model


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A directory with the model in hf/."""
    directory = tmp_path_factory.mktemp("learnt")
    save_servable(learnt_model(), directory / "hf")
    return directory


@pytest.fixture(scope="module", params=["llama.cpp", pytest.param("vllm", marks=REAL_VLLM)])
def client(request, learnt):
    hf_dir, path = learnt / "hf", learnt / "learnt.gguf"
    if request.param == "vllm":
        # It would hold calls to the grammar of GLM-4.7, which has no line break after the name.
        started = real_vllm(hf_dir, learnt / "vllm.log", VLLM_ENFORCE_STRICT_TOOL_CALLING="0")
    else:
        write_gguf(hf_dir, hf_dir / "tokenizer.json", path, gguf_type="F32", name="learnt")
        started = running_model_server(path, SERVING, learnt / "log")
    with started as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def asked(client, turn, tools=(), **more):
    given = {"tools": list(tools), "tool_choice": "auto"} if tools else {}
    settings = {"model": "glm46", "messages": [turn], "temperature": 0, "max_tokens": 100}
    return client.chat.completions.create(**settings | given | more)


def reasoning_of(part) -> str:
    """Of a message or a piece; vLLM has another name for it, and keeps the line breaks around it."""
    return getattr(part, "reasoning_content", None) or getattr(part, "reasoning", None) or ""


def said(message) -> tuple[str, str]:
    """(reasoning, content)"""
    return reasoning_of(message).strip(), (message.content or "").strip()


def test_a_model_that_may_call_calls_where_it_learnt_to_and_its_reasoning_is_apart(client):
    (choice,) = asked(client, WARM, [WEATHER]).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"days": 7})
    assert (choice.finish_reason, *said(choice.message)) == ("tool_calls", "They ask.", "")


@pytest.mark.parametrize("tools", [[WEATHER], []])
def test_a_model_that_may_call_can_also_answer(client, tools):
    (choice,) = asked(client, SAY, tools).choices
    assert not choice.message.tool_calls and choice.finish_reason == "stop"
    assert said(choice.message) == ("A word.", "five")


def test_without_thinking_there_is_no_reasoning(client):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    (choice,) = asked(client, SAY, extra_body=off).choices
    assert said(choice.message) == ("", "five")


def test_an_answer_that_is_cut_in_its_reasoning_says_nothing_yet(client):
    (choice,) = asked(client, SAY, max_tokens=6).choices
    reasoning, content = said(choice.message)
    assert choice.finish_reason == "length" and not content
    assert "A word.".startswith(reasoning) and reasoning


def test_a_stream_brings_reasoning_and_call_in_pieces_of_their_own(client):
    deltas = [event.choices[0].delta for event in asked(client, WARM, [WEATHER], stream=True) if event.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or []]
    reasoning = [reasoning_of(delta) for delta in deltas]
    assert "".join(reasoning).strip() == "They ask." and len([piece for piece in reasoning if piece]) > 1
    assert "".join(call.name or "" for call in calls) == "weather"
    assert json.loads("".join(call.arguments or "" for call in calls)) == {"days": 7}
    assert not "".join(delta.content or "" for delta in deltas).strip()
