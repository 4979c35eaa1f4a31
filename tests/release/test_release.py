"""The released files and the served model against our own model."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from configs.load import load_scale
from configs.schema import ReleaseRecipe, ServingResources
from flows.cli.serving.serve_asked import watch
from flows.cli.serving.serve_model import ServedModel, complete
from infra.home import Home
from infra.serving.model_gateway import MAX_REQUEST_BYTES
from infra.serving.model_server import Access, is_healthy, running_model_server, start_model_server
from infra.storage.open_store import open_store
from model.formats.gguf_checkpoint import write_gguf
from tasks.evaluation.engine import document_token_ids, special_token_id
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.evaluation.items import read_items
from tasks.evaluation.suite import read_suite
from tasks.release.convert_to_gguf import convert_to_gguf
from tasks.release.decide_quantization import Calibrations, QuantizedEvaluations, decide_quantization
from tasks.release.evaluate_gguf import evaluate_gguf
from tasks.release.generate_reference import MIN_COMPARED_TOKENS, SHORT_TOKENS, ReferenceAnswer, generate_reference
from tasks.release.served_scoring import ServedEngine, ServedScorer
from tasks.release.smoke_test import SMOKE_SLOTS, ask_server
from tasks.release.token_bytes import ends_inside_character, token_bytes
from tests.conftest import ROOT
from tests.support.evaluation_fakes import (
    DOCUMENTS,
    EVALUATION_RESOURCES,
    VOCAB_SIZE,
    checkpoint,
    commit,
    evaluation_suite,
    toy_tokenizer,
)
from tests.support.evaluation_fakes import RECIPE as ANSWERS
from tests.support.toy_steps import local_output

RELEASE_RESOURCES = load_scale("micro").release.resources
RECIPE = ReleaseRecipe(
    gguf_types=("F32", "Q8_0"),
    smoke_prompts=("What is 4 + 1?", "def add", "Привет, м", "4 + 1 ="),
    smoke_prompt_tokens=12,
    smoke_new_tokens=40,
    smoke_min_margin=0.01,
    parity_prompts=2,
    parity_calls=2,
    max_parity_log_probability=0.001,
    max_served_log_probability=0.001,
    max_quantization_bits_per_byte=0.05,
    max_4_bit_bits_per_byte=0.5,
    max_contaminated_share=0.01,
    quantized_formats=(),
    min_routing_agreement={},
    calibration_rows=8,
    max_idle_expert_share=0.0,
    num_quantization_documents=6,
    max_quantization_document_tokens=24,
    num_answered_problems=20,
)
SERVING = ServingResources(host="127.0.0.1", port=0, context_length=1024, num_threads=1, startup_timeout_seconds=30)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(None, Home(tmp_path_factory.mktemp("release")))


@pytest.fixture(scope="module")
def gguf(store):
    return commit(store, convert_to_gguf, checkpoint=checkpoint(store, "trained"), recipe=RECIPE.conversion_recipe())


@pytest.fixture(scope="module")
def suite(store):
    return evaluation_suite(store, num_tasks=3)


@pytest.fixture(scope="module")
def served(gguf, tmp_path_factory):
    with running_model_server(
        gguf.path("model-F32.gguf"), SERVING, tmp_path_factory.mktemp("served") / "server.log"
    ) as server:
        yield server


GUARDED = Access(api_key="key-of-the-clients", num_slots=SMOKE_SLOTS)


@pytest.fixture(scope="module")
def guarded(gguf, tmp_path_factory):
    """With a key and slots."""
    log_path = tmp_path_factory.mktemp("guarded") / "server.log"
    with running_model_server(gguf.path("model-F32.gguf"), SERVING, log_path, access=GUARDED) as server:
        yield server


def smoked(server, reference):
    """The smoke test's report."""
    return ask_server(server.url, GUARDED.api_key, SERVING.context_length, reference)


def engine_of(store, name="trained"):
    from tasks.evaluation.engine import load_engine

    artifact = checkpoint(store, name)
    return load_engine(artifact.directory("hf"), weights_version=artifact.digest, batch_sequences=4)


def test_llama_cpp_scores_what_our_engine_scores(store, served):
    tokenizer = toy_tokenizer()
    texts = [document_token_ids(tokenizer, text)[:40] for text in (*DOCUMENTS.values(), "<|user|> written out")]
    special = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<think>")]
    texts.append([*texts[0][:6], *special, VOCAB_SIZE - 1, *texts[0][6:9]])
    assert any(ends_inside_character(token_bytes(tokenizer, token_id)) for ids in texts for token_id in ids), (
        "no hidden token: test is too easy"
    )
    ours = engine_of(store).score(texts)
    with ServedScorer(served.url, tokenizer.token_to_id("a"), VOCAB_SIZE) as scorer:
        for token_ids, expected in zip(texts, ours, strict=True):
            assert scorer.score(token_ids) == pytest.approx(expected, abs=1e-4)


def test_an_answer_of_a_slow_model_is_waited_for(served):
    """Sixteen answers of 8,192 tokens by a large model on processors take hours, and come in one piece."""
    with ServedScorer(served.url, toy_tokenizer().token_to_id("a"), VOCAB_SIZE) as scorer:
        scorer.score([1, 2])
        assert scorer.connection.sock.gettimeout() is None


def asked(store, suite, recipe=RECIPE):
    """What the files of the trained model are asked."""
    trained = checkpoint(store, "trained")
    answered = {"checkpoint": trained, "suite": suite}
    own = commit(store, evaluate_checkpoint, recipe=ANSWERS, resources=EVALUATION_RESOURCES, **answered)
    return answered | {"evaluation": own, "recipe": recipe.format_recipe(ANSWERS)}


def test_gguf_evaluation_equals_our_engine_on_the_same_tokens(store, gguf, suite):
    evaluation = commit(store, evaluate_gguf, gguf=gguf, resources=SERVING, **asked(store, suite))
    documents = [question for question in read_suite(suite.path("suite.parquet")) if question.kind == "document"][:6]
    ids = [document_token_ids(toy_tokenizer(), document.text)[:25] for document in documents]
    ours = -sum(map(sum, engine_of(store).score(ids))) / math.log(2) / evaluation.record.num_bytes
    assert evaluation.record.bits_per_byte["F32"] == pytest.approx(ours, abs=1e-4)
    assert evaluation.record.num_tokens == sum(len(row) - 1 for row in ids)
    assert evaluation.record.num_bytes == sum(
        len(token_bytes(toy_tokenizer(), token_id)) for row in ids for token_id in row[1:]
    )

    decision = commit(
        store,
        decide_quantization,
        gguf_evaluation=evaluation,
        quantized=QuantizedEvaluations({}),
        calibrations=Calibrations({}),
        recipe=RECIPE,
    )
    assert decision.record.accepted, decision.record.refusals


def test_the_served_file_answers_the_same_problems(store, gguf, suite):
    """Greedily as our engine does; sampled answers are other draws from the same probabilities."""
    given = asked(store, suite)
    evaluation = commit(store, evaluate_gguf, gguf=gguf, resources=SERVING, **given)
    own = {item.item_id: item for item in read_items(given["evaluation"].path("items.parquet"))}
    served = read_items(evaluation.path("items-F32.parquet"))
    num_choices = sum(item.kind == "choice" for item in own.values())
    asked_kinds = {"arithmetic": 20, "chat_problem": 20}
    asked_of_served = {"choice": num_choices, "safety": 24, "task": 3}
    assert Counter(item.kind for item in served) == asked_kinds | asked_of_served and num_choices > 1
    assert Counter(item.kind for item in read_items(evaluation.path("items-Q8_0.parquet"))) == asked_kinds
    for item in served:
        same = own[item.item_id]
        assert (item.prompt_digest, item.num_samples) == (same.prompt_digest, same.num_samples)
        if item.kind == "arithmetic":
            assert item.output == same.output
            assert item.log_probability == pytest.approx(same.log_probability, abs=1e-3)
        if item.kind == "choice":
            assert (item.score, item.expected) == (same.score, same.expected)
            assert json.loads(item.output) == pytest.approx(json.loads(same.output), abs=1e-3)
    for kind in ("chat_problem", "safety", "task"):
        assert any(item.output != own[item.item_id].output for item in served if item.kind == kind)
    requests = evaluation.record.served.figures["safe_answer_share"]
    assert requests.is_sampled and requests.before == given["evaluation"].record.safe_answer_share
    chosen = evaluation.record.served.figures["choice_accuracy"]
    assert (chosen.change, chosen.disagreement, chosen.num_answers) == (0, 0, num_choices)
    change = evaluation.record.served.figures["arithmetic_accuracy"]
    assert (change.change, change.disagreement, change.num_answers) == (0, 0, 20)
    sampled = evaluation.record.figures["Q8_0"]["pass_at_1"]
    assert sampled.before == evaluation.record.figures["F32"]["pass_at_1"].value
    assert (sampled.num_items, sampled.num_answers) == (20, 80)


def test_the_server_draws_from_our_probabilities(store, gguf, tmp_path):
    from model.generation.sampling import Sampling

    prompt, num_draws = document_token_ids(toy_tokenizer(), "Привет, "), 400
    with (
        running_model_server(
            gguf.path("model-F32.gguf"), SERVING, tmp_path / "log", access=Access(num_slots=4)
        ) as server,
        ServedScorer(server.url, special_token_id(toy_tokenizer(), "a"), VOCAB_SIZE) as scorer,
    ):
        served = ServedEngine(scorer, 4, "v")
        drawn = served.generate([prompt] * num_draws, Sampling(1, 2.0, seed=1), "v")
        longer = [served.generate([prompt] * 6, Sampling(8, 1.0, seed=seed), "v") for seed in (3, 3, 4)]
    answers, again, others = longer
    assert answers == again and answers.token_ids != others.token_ids
    assert len(set(map(tuple, answers.token_ids))) > 1
    ours = engine_of(store).score([[*prompt, *token_ids] for token_ids in answers.token_ids])
    for scores, reported in zip(ours, answers.log_probabilities, strict=True):
        assert reported == pytest.approx(scores[len(prompt) - 1 :], abs=1e-4)

    every = engine_of(store).score([[*prompt, token_id] for token_id in range(VOCAB_SIZE)])
    flat = [math.exp(row[-1] / 2) for row in every]  # temperature 2
    counts = Counter(token_ids[0] for token_ids in drawn.token_ids)
    for token_id, _ in counts.most_common(3):
        share = flat[token_id] / sum(flat)
        spread = math.sqrt(share * (1 - share) / num_draws)
        assert abs(counts[token_id] / num_draws - share) < 4 * spread, (token_id, share)


@pytest.mark.long
def test_threads_change_no_score(store, gguf, suite, tmp_path):
    short = RECIPE.model_copy(update={"num_quantization_documents": 2, "max_quantization_document_tokens": 8})
    given = {"gguf": gguf, **asked(store, suite, short)}
    other = open_store(None, Home(tmp_path))
    one = commit(store, evaluate_gguf, **given, resources=SERVING)
    two = commit(other, evaluate_gguf, **given, resources=SERVING.model_copy(update={"num_threads": 2}))
    assert (one.key, one.digest) == (two.key, two.digest)


def answers_of(reference) -> list[ReferenceAnswer]:
    return [ReferenceAnswer.model_validate(entry) for entry in json.loads(reference.path("reference.json").read_text())]


def test_what_is_made_and_compared_is_kept_where_a_bound_of_the_decisions_is_edited():
    bounds = {"max_quantization_bits_per_byte": 0.5, "max_4_bit_bits_per_byte": 0.5, "min_routing_agreement": {}}
    edited = RECIPE.model_copy(update=bounds | {"max_contaminated_share": 0.5, "max_idle_expert_share": 0.5})
    for name in ("conversion_recipe", "reference_recipe", "parity_recipe", "calibration_recipe"):
        assert getattr(edited, name)() == getattr(RECIPE, name)()


def reference_of(store, name="trained", recipe=RECIPE):
    return commit(
        store,
        generate_reference,
        checkpoint=checkpoint(store, name),
        suite=evaluation_suite(store),
        recipe=recipe.reference_recipe(),
        resources=RELEASE_RESOURCES,
    )


def test_prompts_that_only_parity_needs_are_continued_by_few_tokens(store):
    enough = answers_of(reference_of(store))
    wanted = sum(answer.num_clear > 0 for answer in enough) + 2
    more = answers_of(reference_of(store, recipe=RECIPE.model_copy(update={"parity_prompts": wanted})))
    assert more[: len(enough)] == enough and sum(answer.num_clear > 0 for answer in more) == wanted
    assert all(len(answer.token_ids) == SHORT_TOKENS or answer.is_stopped for answer in more[len(enough) :])


def test_smoke_test_passes_the_model_that_was_trained(store, guarded):
    """On 500 tokens or more: after the recipe's prompts the beginnings of held-out documents, and no more of them than
    that takes."""
    reference = reference_of(store)
    report = smoked(guarded, reference)
    assert report.passed, report.reasons
    assert report.num_compared_tokens == reference.record.num_clear_tokens >= MIN_COMPARED_TOKENS == 500
    assert report.model_names == ("glm46",)
    answers = json.loads(reference.path("reference.json").read_text())
    assert sum(answer["num_clear"] for answer in answers[:-1]) < 500 and len(answers) > 5
    texts = [
        question.text
        for question in read_suite(evaluation_suite(store).path("suite.parquet"))
        if question.kind == "document"
    ]
    for answer in answers[5:]:
        assert any(text.startswith(answer["prompt"]) for text in texts) and 1 < len(answer["prompt_ids"]) <= 14


@pytest.mark.parametrize(("edit", "least"), [({"smoke_new_tokens": 8}, 100), ({"smoke_min_margin": 1e9}, 0)])
def test_smoke_test_that_compares_too_little_is_refused(store, guarded, edit, least):
    """Continuations that end too early, and margins that are never clear."""
    report = smoked(guarded, reference_of(store, recipe=RECIPE.model_copy(update=edit)))
    assert not report.passed and least <= report.num_compared_tokens < 500
    assert report.reasons[-1].startswith(
        f"{report.num_compared_tokens} tokens of {report.num_prompts} prompts can be compared, 500 are needed"
    )


def test_one_different_token_of_five_hundred_is_found(store, guarded, tmp_path):
    """The last token that must be reproduced and is a character of its own: ids of parts of characters are compared as
    bytes."""
    answers = [
        ReferenceAnswer.model_validate(entry)
        for entry in json.loads(reference_of(store).path("reference.json").read_text())
    ]
    addresses = [
        (number, position)
        for number, answer in enumerate(answers)
        for position, piece in enumerate(answer.pieces[: answer.num_clear - 1])
        if bytes.fromhex(piece).isalpha()
    ]
    number, position = addresses[-1]
    ids = list(answers[number].token_ids)
    ids[position] += 1
    answers[number] = answers[number].model_copy(update={"token_ids": tuple(ids)})
    (tmp_path / "reference.json").write_text(json.dumps([answer.model_dump(mode="json") for answer in answers]))
    report = smoked(guarded, SimpleNamespace(path=lambda name: tmp_path / name))  # pyright: ignore[reportArgumentType]
    assert not report.passed and len(report.reasons) == 1
    assert f"served token {ids[position] - 1} at position {position} of" in report.reasons[0]
    assert report.reasons[0].endswith(f"ours is {ids[position]}")


def test_a_conversation_is_asked_of_models_that_know_any(store, served, tmp_path):
    artifact = checkpoint(store, "trained")
    answers = json.loads(reference_of(store).path("reference.json").read_text())
    chat = answers[4]
    assert [entry["is_chat"] for entry in answers] == [False] * 4 + [True] + [False] * (len(answers) - 5)
    prompt = toy_tokenizer().decode(chat["prompt_ids"], skip_special_tokens=False)
    assert prompt.endswith("What is 4 + 1?/nothink<|assistant|>\n<think></think>")
    assert chat["num_clear"] > 2, "no clear answer: test is too easy"

    base = replace(artifact, record=artifact.record.model_copy(update={"is_chat_trained": False}))
    output = local_output(tmp_path)
    suite = evaluation_suite(store)
    given = {"recipe": RECIPE.reference_recipe(), "resources": RELEASE_RESOURCES}
    generate_reference(checkpoint=base, suite=suite, **given, output=output)
    assert not [entry for entry in json.loads((tmp_path / "reference.json").read_text()) if entry["is_chat"]]


def test_a_server_that_renders_conversations_otherwise_is_refused(store, tmp_path):
    """The same weights with ChatML for a template: its text continuations are right, its conversation is not."""
    artifact = checkpoint(store, "trained")
    shutil.copytree(artifact.directory("hf"), tmp_path / "hf")
    (tmp_path / "hf/chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    write_gguf(tmp_path / "hf", tmp_path / "hf/tokenizer.json", tmp_path / "m.gguf", gguf_type="F32", name="glm46")
    with running_model_server(tmp_path / "m.gguf", SERVING, tmp_path / "log", access=GUARDED) as server:
        report = smoked(server, reference_of(store))
    assert not report.passed and all(reason.startswith("message 'What is 4 + 1?'") for reason in report.reasons)


@pytest.mark.parametrize("is_chat_trained", [False, True])
def test_chat_answers_as_the_model_was_trained(served, is_chat_trained):
    """What `glm46 chat` prints: a continuation, or the answer to a message in the template."""
    model = ServedModel("glm46 version 1", served.url, served, is_chat_trained=is_chat_trained, enable_thinking=False)
    path, body = ("v1/completions", {"prompt": "What is 4 + 1?"})
    if is_chat_trained:
        message = {"role": "user", "content": "What is 4 + 1?"}
        path, body = "v1/chat/completions", {"messages": [message], "chat_template_kwargs": {"enable_thinking": False}}
    data = json.dumps({**body, "max_tokens": 8, "temperature": 0}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{served.url}/{path}", data, {"content-type": "application/json"})
    ) as response:
        choice = json.load(response)["choices"][0]
    expected = choice["message"]["content"] if is_chat_trained else choice["text"]
    assert "".join(complete(model, "What is 4 + 1?", 8, 0.0)) == expected != ""


def answered(served, path, headers=None, body=None):
    """Status, headers and text of a raw request."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    connection.request(
        "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers or {}
    )
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_only_programs_and_pages_of_this_machine_are_answered(served):
    port = served.url.rsplit(":", 1)[1]
    for headers in ({}, {"Host": f"localhost:{port}"}, {"Origin": f"http://127.0.0.1:{port}"}):
        status, returned, _ = answered(served, "/v1/models", headers)
        assert status == 200 and not [name for name in returned if name.lower().startswith("access-control")]
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{port}"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        for body in (None, {"prompt": "4 + 1 =", "max_tokens": 1}):
            status, returned, text = answered(served, "/v1/completions" if body else "/v1/models", headers, body)
            assert status == 403 and ("must not use" in text or "is not this server" in text), (headers, text)
            assert not [name for name in returned if name.lower().startswith("access-control")]


@pytest.mark.parametrize(("num_more", "status"), [(0, 200), (1, 413)])
def test_a_request_is_read_up_to_its_limit_and_refused_beyond_it(served, num_more, status):
    """White space between the parts of a valid request fills it up."""
    start, end = b'{"prompt": "4 + 1 =", "max_tokens": 1', b"}"
    body = start + b" " * (MAX_REQUEST_BYTES + num_more - len(start) - len(end)) + end
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = json.loads(answer.read())
    assert answer.status == status
    if status == 413:
        assert text["error"]["message"] == "the request is too large: at most 67108864 bytes are read"
        assert is_healthy(served.url) and answered(served, "/v1/completions", body={"prompt": "a"})[0] == 200
    else:
        assert text["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_of_completions_have_the_shape_of_openais_api(served):
    body = {"prompt": "What is 4 + 1?", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = json.loads(answered(served, "/v1/completions", body=body)[2])["choices"][0]
    reported = whole["logprobs"]
    assert "".join(reported["tokens"]) == whole["text"] and len(reported["tokens"]) > 1
    assert (
        reported["token_logprobs"] == [entry["logprob"] for entry in reported["content"]]
        and max(reported["token_logprobs"]) <= 0
    )
    for token, top, start in zip(*(reported[name] for name in ("tokens", "top_logprobs", "text_offset")), strict=True):
        assert len(top) == 2 and top[token] == max(top.values()) and whole["text"][start:].startswith(token)
    events = answered(served, "/v1/completions", body={**body, "stream": True})[2].split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    streamed = [choice["logprobs"] for part in parts for choice in part["choices"] if choice.get("logprobs")]
    for name in ("tokens", "text_offset"):
        assert [value for logprobs in streamed for value in logprobs[name]] == reported[name]
    status, _, text = answered(served, "/v1/completions", body={**body, "echo": True})
    assert status == 400 and "echo is not supported" in text


def test_a_killed_model_server_is_an_error(gguf, tmp_path):
    with running_model_server(gguf.path("model-F32.gguf"), SERVING, tmp_path / "log") as server:
        server.process.kill()
        with pytest.raises(RuntimeError, match=r"was ended by SIGKILL.*its log is"):
            watch(server, 30)


def test_smoke_test_refuses_another_model(store, guarded):
    report = smoked(guarded, reference_of(store, "random"))
    assert not report.passed
    assert any("served token" in reason for reason in report.reasons)


def test_equal_weights_give_equal_files(store, gguf, tmp_path):
    again = commit(
        open_store(None, Home(tmp_path)),
        convert_to_gguf,
        checkpoint=checkpoint(store, "trained"),
        recipe=RECIPE.conversion_recipe(),
    )
    assert again.digest == gguf.digest
    assert gguf.record.num_bytes["Q8_0"] < gguf.record.num_bytes["F32"]


@pytest.mark.parametrize("text", ["plain", "Ünïcödé", "你好", "🙂"])
def test_character_rule_equals_a_strict_decoder(text):
    data = text.encode()
    for end in range(1, len(data) + 1):
        try:
            data[:end].decode()
            whole = True
        except UnicodeDecodeError:
            whole = False
        assert ends_inside_character(data[:end]) == (not whole)


def test_port_in_use_is_named(gguf, served, tmp_path):
    port = int(served.url.rsplit(":", 1)[1])
    with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 is taken by"):
        start_model_server(gguf.path("model-F32.gguf"), SERVING.model_copy(update={"port": port}), tmp_path / "log")


def test_broken_file_ends_with_the_servers_words(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(RuntimeError, match="stopped; the end of"):
        start_model_server(tmp_path / "broken.gguf", SERVING, tmp_path / "log")


def test_a_server_on_another_interface_needs_a_key(gguf, tmp_path):
    public = SERVING.model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(ValueError, match=r"reach a server at 0\.0\.0\.0, so its clients need a key: .* --api-key-env"):
        start_model_server(gguf.path("model-F32.gguf"), public, tmp_path / "log")


def test_killed_run_leaves_no_server(gguf, tmp_path):
    path, log_path, settings = str(gguf.path("model-F32.gguf")), str(tmp_path / "log"), SERVING.model_dump()
    program = (
        "import sys, time; from pathlib import Path; from configs.schema import ServingResources\n"
        "from infra.serving.model_server import *\n"
        f"s = start_model_server(Path({path!r}), ServingResources(**{settings}), Path({log_path!r}))\n"
        "print(s.url, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    url = parent.stdout.readline().strip()
    assert is_healthy(url)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while is_healthy(url):
        assert time.monotonic() < deadline, "the server outlived the run that started it"
        time.sleep(0.05)
