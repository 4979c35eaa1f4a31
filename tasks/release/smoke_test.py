"""Step: serves the GGUF file by llama.cpp, asks it through the OpenAI client, and compares its greedy answers token by
token with ours.

In: the files, and our own answers (generate_reference). Texts to be continued are sent as token ids, a message as a
message through the chat endpoint. A separate check compares the ids into which the server renders
and splits both. The server leaves tokens that end inside a UTF-8 character out of its token report. So ids are compared
without those, and their bytes through the text. tasks/release/served_requests.py asks for the rest of the API.
"""

from __future__ import annotations

import json
import secrets
import urllib.request
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from configs.schema import served_gguf_type
from infra.serving.model_server import Access, running_model_server
from infra.step import Artifact, Output, Record, step
from tasks.release.generate_reference import MIN_COMPARED_TOKENS, ReferenceAnswer
from tasks.release.served_requests import (
    check_call,
    check_concurrent,
    check_key,
    check_oversized,
    check_schema,
    check_stream,
)
from tasks.release.token_bytes import ends_inside_character

if TYPE_CHECKING:
    from openai import OpenAI

    from configs.schema import ServingResources
    from tasks.release.convert_to_gguf import GgufFiles
    from tasks.release.generate_reference import Reference


SMOKE_SLOTS = 2
"""Of the server that is asked: two show whether answers of different requests mix, and need little memory."""
WITHOUT_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


class SmokeReport(Record):
    """Whether a served model is the one that was trained."""

    passed: bool
    reasons: tuple[str, ...]
    """What differed; empty when passed."""
    model_names: tuple[str, ...]
    num_prompts: int
    num_compared_tokens: int
    """Generated tokens that were compared; those after a margin too small to decide are left out."""


@step(content=(), evidence=("server.log",), distributions=("xllamacpp", "openai"))
def smoke_test(
    *, gguf: Artifact[GgufFiles], reference: Artifact[Reference], resources: ServingResources, output: Output
) -> SmokeReport:
    """Served as for several users: with a key and slots. Differences are reasons, not exceptions; a server
    that does not answer raises the client's error."""
    path = gguf.path(gguf.record.file_names[served_gguf_type(gguf.record.file_names)])
    access = Access(api_key=secrets.token_urlsafe(), num_slots=SMOKE_SLOTS)
    with running_model_server(path, resources, output.path("server.log"), access=access) as server:
        return ask_server(server.url, access.api_key, resources.context_length, reference)


def ask_server(server_url: str, api_key: str, context_length: int, reference: Artifact[Reference]) -> SmokeReport:
    """The report on a server that runs. `context_length` is in tokens."""
    from openai import OpenAI

    answers = [
        ReferenceAnswer.model_validate(entry) for entry in json.loads(reference.path("reference.json").read_text())
    ]
    reasons: list[str] = []
    with urllib.request.urlopen(f"{server_url}/health", timeout=10) as health:
        if health.status != 200:
            reasons.append(f"/health answered {health.status}")
    client = OpenAI(base_url=f"{server_url}/v1", api_key=api_key, max_retries=0, timeout=120)
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    names = tuple(model.id for model in client.models.list())
    if not names:
        reasons.append("/v1/models lists no model")
    name = names[0] if names else ""
    for answer in answers:
        reasons += _check_split(server_url, headers, answer)
        reasons += _check_answer(client, name, answer)
    reasons += check_key(server_url)
    reasons += check_oversized(server_url, headers, context_length + 1)
    texts = [answer for answer in answers if not answer.is_chat]
    reasons += check_stream(client, name, max(texts, key=lambda answer: len(answer.token_ids)))
    for answer in (answer for answer in answers if answer.is_chat):
        reasons += check_schema(client, name, answer.prompt, WITHOUT_THINKING)
        reasons += check_call(client, name, answer.prompt)
    if not reasons:  # answers that are wrong one at a time say nothing about many at a time
        reasons += check_concurrent(answers, partial(_check_answer, client, name))
    num_compared = sum(answer.num_clear for answer in answers)
    if num_compared < MIN_COMPARED_TOKENS:
        reasons.append(
            f"{num_compared} tokens of {len(answers)} prompts can be compared, {MIN_COMPARED_TOKENS} are needed: the "
            f"continuations end, or "
            "their margins fall below release.recipe.smoke_min_margin, too early; raise "
            "release.recipe.smoke_new_tokens, or "
            "evaluation.recipe.max_document_tokens for more prompts"
        )
    return SmokeReport(
        passed=not reasons,
        reasons=tuple(reasons),
        model_names=names,
        num_prompts=len(answers),
        num_compared_tokens=num_compared,
    )


def _check_split(server_url: str, headers: dict[str, str], answer: ReferenceAnswer) -> list[str]:
    """The server must render and split the prompt as we do."""
    text, ours = answer.prompt, answer.prompt_ids[1:]
    if answer.is_chat:
        text, ours = (
            _post(server_url, headers, "apply-template", {"messages": _messages(answer), **WITHOUT_THINKING})["prompt"],
            answer.prompt_ids,
        )
    asked = {"content": text, "add_special": False, "parse_special": answer.is_chat}
    token_ids = tuple(_post(server_url, headers, "tokenize", asked)["tokens"])
    return [] if token_ids == ours else [f"{_asked(answer)}: the server splits it into {token_ids}, we into {ours}"]


def _post(server_url: str, headers: dict[str, str], path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{server_url}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def _messages(answer: ReferenceAnswer) -> list[Any]:
    return [{"role": "user", "content": answer.prompt}]


def _asked(answer: ReferenceAnswer) -> str:
    return f"{'message' if answer.is_chat else 'prompt'} {answer.prompt!r}"


def _check_answer(client: OpenAI, model_name: str, answer: ReferenceAnswer) -> list[str]:
    """Compares token ids, and for a text to be continued also its bytes: the text of a conversation is cut and trimmed
    by the server."""
    if answer.num_clear == 0:
        return []
    choice = _ask(client, model_name, answer)
    served_ids = (
        [entry["id"] if isinstance(entry, dict) else entry.id for entry in choice.logprobs.content]
        if choice.logprobs
        else []
    )
    expected_ids, expected_bytes = _expected(answer)
    if served_ids[: len(expected_ids)] != expected_ids:
        pairs = zip_longest(served_ids, expected_ids)
        position, (theirs, ours) = next((position, pair) for position, pair in enumerate(pairs) if pair[0] != pair[1])
        return [
            f"{_asked(answer)}: served token {theirs} at position {position} of {len(expected_ids)}, ours is {ours}"
        ]
    reasons = []
    expected_text = expected_bytes.decode(errors="replace").rstrip("\ufffd")
    if not answer.is_chat and not choice.text.startswith(expected_text):
        reasons.append(f"{_asked(answer)}: the server wrote {choice.text!r}, we {expected_text!r}")
    if answer.is_stopped and answer.num_clear == len(answer.token_ids) and choice.finish_reason != "stop":
        reasons.append(f"{_asked(answer)}: the server ended by {choice.finish_reason}, we at a stop token")
    return reasons


def _ask(client: OpenAI, model_name: str, answer: ReferenceAnswer) -> Any:
    """The served answer with the ids of its tokens, which OpenAI's types do not have."""
    if answer.is_chat:
        chat = client.chat.completions.create(
            model=model_name,
            messages=_messages(answer),
            max_tokens=len(answer.token_ids),
            temperature=0,
            logprobs=True,
            top_logprobs=1,
            extra_body=WITHOUT_THINKING,
        )
        return chat.choices[0]
    completion = client.completions.create(
        model=model_name, prompt=list(answer.prompt_ids), max_tokens=len(answer.token_ids), temperature=0, logprobs=1
    )
    return completion.choices[0]


def _expected(answer: ReferenceAnswer) -> tuple[list[int], bytes]:
    """Ids that the server must report and bytes that it must write, up to the stop token or the first unclear step."""
    written = b""
    reported = []
    num_shown = min(answer.num_clear, len(answer.token_ids) - answer.is_stopped)
    for token_id, piece in zip(answer.token_ids[:num_shown], answer.pieces[:num_shown], strict=True):
        written += bytes.fromhex(piece)
        if not ends_inside_character(written):
            reported.append(token_id)
    return reported, written
