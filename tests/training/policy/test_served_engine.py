"""Rollouts by a server: the log-probabilities are the trainer's, wrong answers are refused by name, and a server that
dies is given the weights again and asked again."""

from __future__ import annotations

import base64
import io
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.architecture.routes import recorded_routes
from model.generation.generation import InProcessEngine, NonFiniteLogitsError, Sampling, sampling_draws
from tasks.training.policy.rollout_connection import (
    BrokenWeightsError,
    EngineError,
    RefusedRequestError,
    ServerConnection,
)
from tasks.training.policy.served_engine import ServedEngine
from tests.support.engines.engine_servers import STARTED, SglangServer, VllmServer, free_port
from tests.support.model_recipes import GLM46, random_model
from tests.support.saved_models import save_checkpoint
from tests.support.training_inputs import RESOURCES, TrainingInputs, metrics_of
from tests.training.test_objectives import ANSWERS, GRPO, rl_recipe, sft_recipe

MODEL = GLM46.model_copy(update={"num_nextn_predict_layers": 0})
PROMPTS = [[5, 6, 7], [8, 9], [3]]
SAMPLING = Sampling(6, 0.8, stop_token_ids=(1,), seed=46)
DRAWS = sampling_draws(SAMPLING, len(PROMPTS))


@pytest.fixture(scope="module")
def hf_dirs(tmp_path_factory):
    """Two versions of the weights."""
    dirs = []
    for seed in (1, 2):
        hf_dir = tmp_path_factory.mktemp(f"weights-{seed}")
        model = random_model(MODEL, seed=seed)
        save_checkpoint(model, hf_dir, eos_token_ids=[1], pad_token_id=0, dtype=torch.float32, max_shard_bytes=1 << 30)
        dirs.append((hf_dir, model))
    return dirs


SERVERS = {"sglang": SglangServer, "vllm": VllmServer}


@pytest.fixture(params=SERVERS)
def kind(request):
    return request.param


@pytest.fixture
def server(kind, hf_dirs):
    server = SERVERS[kind](hf_dirs[0][0])
    yield server
    server.stop()


def test_answers_are_of_the_given_weights_with_their_log_probabilities(kind, server, hf_dirs):
    hf_dir, model = hf_dirs[1]
    engine = ServedEngine(kind, server.url, hf_dir, "rl-2")
    made = engine.generate(PROMPTS, SAMPLING, "rl-2", [own[:size] for own, size in zip(DRAWS, (6, 4, 1), strict=True)])
    assert server.versions == [STARTED, "rl-2"] and made.weights_version == "rl-2"
    own = InProcessEngine(model, weights_version="own", batch_sequences=1)
    for prompt, token_ids, values, size in zip(
        PROMPTS, made.token_ids, made.sampled_log_probabilities, (6, 4, 1), strict=True
    ):
        assert len(token_ids) == size or (len(token_ids) < size and token_ids[-1] == 1)
        with torch.no_grad():
            logits = own.model(torch.tensor([[*prompt, *token_ids]])).logits_BTV[0, len(prompt) - 1 : -1] / 0.8
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(values), wanted, atol=1e-5)
    again = engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS)
    assert again.token_ids == engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS).token_ids
    assert server.versions == [STARTED, "rl-2"], "weights travel once"


def test_routes_are_those_of_a_pass_over_what_was_read(kind, server, hf_dirs):
    hf_dir, model = hf_dirs[1]
    server.names_experts = True
    engine = ServedEngine(kind, server.url, hf_dir, "rl-2", MODEL)
    made = engine.generate(PROMPTS, replace(SAMPLING, keeps_routes=True), "rl-2", DRAWS)
    for prompt, token_ids, routes in zip(PROMPTS, made.token_ids, made.routes, strict=True):
        read = torch.tensor([[*prompt, *token_ids[:-1]]])
        with torch.no_grad(), recorded_routes(model.trunk_layers) as recorded:
            model.hidden_states(read)
        assert torch.equal(routes, torch.stack(recorded).to(torch.int16))
    assert engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS).routes is None


def changed(**about):
    """SGLang's answers whose first one says something else of itself."""

    def spoil(answers):
        answers[0]["meta_info"].update(about)
        return answers

    return spoil


def without_scores(answers):
    del answers[1]["meta_info"]["output_token_logprobs"]
    return answers


def longer(answers):
    answers[0] |= {"output_ids": [2] * 7}
    answers[0]["meta_info"]["output_token_logprobs"] = [[-1.0, 2, None]] * 7
    return answers


def no_number(answers):
    answers[2]["meta_info"]["output_token_logprobs"][0][0] = math.nan
    return answers


def choice(**about):
    """vLLM's answers of one choice, each of which says something else."""

    def spoil(answer):
        answer["choices"][0].update(about)
        return answer

    return spoil


def spans(*versions):
    return choice(weight_versions=[{"version": version, "start": 0, "end": 1} for version in versions])


def as_bytes(*experts):
    """Of SGLang's answers the experts in place of those of the second one."""
    return base64.b64encode(np.array(experts, np.int32).tobytes()).decode()


def as_file(array):
    """Of vLLM's answers, in place of theirs."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def spoilt_experts(**about):
    def spoil(answers):
        answers[1]["meta_info"].update(about)
        return answers

    return spoil


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        ("sglang", spoilt_experts(routed_experts=None), "answer 1 of .* names no experts: start the server with --en"),
        ("sglang", spoilt_experts(routed_experts=as_bytes(1, 2)), "answer 1 of .* names 2 experts, and . tokens that"),
        ("sglang", spoilt_experts(routed_experts="?"), "answer 1 of .* has no output_ids with output_token_logprobs"),
        ("vllm", choice(routed_experts=None), "answer 0 of .* names no experts: start the server with --enable"),
        ("vllm", choice(routed_experts=as_file(np.array([None]))), "answer 0 of .* has no token_ids .*allow_pickle"),
        ("vllm", choice(routed_experts=""), "answer 0 of .* has no token_ids with logprobs and weight_versions"),
        ("zeros", None, "answer 0 of .* names experts that no router of 8 chooses, or one twice for a token: set r"),
        ("beyond", None, "answer 0 of .* names experts that no router of 8 chooses, or one twice for a token: set r"),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused(kind, spoil, message, hf_dirs, monkeypatch):
    server = SERVERS.get(kind, VllmServer)(hf_dirs[0][0])
    server.names_experts, server.spoil = True, spoil or server.spoil
    named = server.routes
    if kind == "zeros":
        monkeypatch.setattr(server, "routes", lambda row: 0 * named(row))
    elif kind == "beyond":
        monkeypatch.setattr(server, "routes", lambda row: named(row) + 1)
    engine = ServedEngine("sglang" if kind == "sglang" else "vllm", server.url, hf_dirs[1][0], "rl-2", MODEL)
    with pytest.raises(EngineError, match=message):
        engine.generate(PROMPTS, replace(SAMPLING, keeps_routes=True), "rl-2", DRAWS)
    server.stop()


SCORED = {"token_id": 2, "logprob": -1.0}


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        ("sglang", changed(weight_version="rl-1"), "answer 0 of .* was sampled by weights rl-1, not rl-2"),
        ("sglang", changed(output_token_logprobs=[[-1.0, 2, None]]), r"answer 0 of .* tokens, of which 1 have a log-p"),
        ("sglang", longer, "answer 0 of .* has 7 tokens, of which 7 have a log-probability and 6 were asked for"),
        ("sglang", lambda answers: answers[:2], "gave 2 answers to 3 prompts"),
        ("sglang", lambda answers: {"error": "busy"}, "gave 1 answers to 3 prompts"),
        ("sglang", without_scores, "answer 1 of .* has no output_ids with output_token_logprobs"),
        ("sglang", lambda answers: [{**answers[0], "output_ids": []}, *answers[1:]], "answer 0 of .* has 0 tokens"),
        ("sglang", no_number, "answer 2 of .* log-probability that is no number"),
        ("vllm", spans("rl-1"), "answer 0 of .* was sampled by weights rl-1, not rl-2"),
        ("vllm", spans("rl-1", "rl-2"), "answer 0 of .* was sampled by weights rl-1, rl-2, not rl-2"),
        (
            "vllm",
            choice(weight_versions=None),
            "answer 0 of .* has no token_ids with logprobs and weight_versions .*st",
        ),
        ("vllm", choice(logprobs=None), "answer 0 of .* has no token_ids with logprobs and weight_versions"),
        ("vllm", choice(logprobs={"content": [SCORED]}), r"answer 0 of .* tokens, of which 1 have a log-probability"),
        ("vllm", choice(token_ids=[], logprobs={"content": []}), "answer 0 of .* has 0 tokens"),
        ("vllm", choice(token_ids=[2], logprobs={"content": [{**SCORED, "logprob": math.nan}]}), "that is no number"),
        ("vllm", choice(token_ids=[2] * 7, logprobs={"content": [SCORED] * 7}), "has 7 tokens, .* and 6 were"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(kind, server, hf_dirs, spoil, message):
    server.spoil = spoil
    with pytest.raises(EngineError, match=message):
        ServedEngine(kind, server.url, hf_dirs[1][0], "rl-2").generate(PROMPTS, SAMPLING, "rl-2", DRAWS)


ROWS = [[5, 6, 7, 8, 9], [8, 9], [3, 30, 31, 7, 7, 2]]


def test_rows_are_scored_as_our_engine_scores_them(kind, server, hf_dirs):
    hf_dir, model = hf_dirs[1]
    served = ServedEngine(kind, server.url, hf_dir, "rl-2")
    own = InProcessEngine(model, weights_version="own", batch_sequences=1)
    for ours, theirs in zip(own.score(ROWS), served.score(ROWS), strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5)
    greedy = own.generate(PROMPTS, Sampling(3), "own").token_ids
    pairs = [*zip(PROMPTS, greedy, strict=True), *((row[:2], row[2:]) for row in ROWS if len(row) > 2)]
    wanted = own.score_continuations(pairs)
    scores = served.score_continuations(pairs)
    assert [score.is_greedy for score in scores] == [score.is_greedy for score in wanted]
    assert {score.is_greedy for score in scores} == {True, False}
    assert [score.log_probability for score in scores] == pytest.approx(
        [score.log_probability for score in wanted], abs=1e-5
    )
    assert server.versions == [STARTED, "rl-2"] and served.score([]) == [] and served.score_continuations([]) == []


def test_greedy_answers_are_our_engines_with_log_probabilities_of_the_model_itself(kind, server, hf_dirs):
    hf_dir, model = hf_dirs[1]
    own = InProcessEngine(model, weights_version="rl-2", batch_sequences=1)
    ours = own.generate(PROMPTS, Sampling(5), "rl-2")
    made = ServedEngine(kind, server.url, hf_dir, "rl-2").generate(PROMPTS, Sampling(5), "rl-2")
    assert made.token_ids == ours.token_ids
    for values, wanted in zip(made.log_probabilities, ours.log_probabilities, strict=True):
        assert values == pytest.approx(wanted, abs=1e-5)


def test_draws_that_nobody_gives_are_those_of_the_sampling(kind, server, hf_dirs):
    engine = ServedEngine(kind, server.url, hf_dirs[1][0], "rl-2")
    made = engine.generate(PROMPTS, SAMPLING, "rl-2")
    assert made.token_ids == engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS).token_ids
    assert all(math.isnan(value) for row in made.log_probabilities for value in row), "unknown at temperature 0.8"


def spoilt_scores(**about):
    """SGLang's answers whose second one says something else of its row."""

    def spoil(answers):
        answers[1]["meta_info"].update(about)
        return answers

    return spoil


def of_prompt(change):
    """vLLM's answers, each with something else about its row."""
    return lambda answer: answer | {"prompt_logprobs": change(answer["prompt_logprobs"])}


SCORED_ROW = [[None, 8, None], [-1.0, 9, None]]
TOP = [None, [[-0.5, 4, None]]]


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        ("sglang", spoilt_scores(weight_version="rl-1"), "answer 1 of .* was sampled by weights rl-1, not rl-2"),
        ("sglang", spoilt_scores(input_token_logprobs=None), "answer 1 of .* has no input_token_logprobs of its row"),
        (
            "sglang",
            spoilt_scores(input_token_logprobs=SCORED_ROW[:1], input_top_logprobs=TOP[:1]),
            "answer 1 of .* has the log-probabilities of 0 tokens of its row, which has 1 after its first",
        ),
        ("sglang", spoilt_scores(input_top_logprobs=[None, None]), "answer 1 of .* with input_top_logprobs"),
        (
            "sglang",
            spoilt_scores(input_token_logprobs=[SCORED_ROW[0], [-1.0, 7, None]]),
            "answer 1 of .*token 1 is 9, 7 was scored",
        ),
        ("sglang", lambda answers: answers[:2], "gave 2 answers to 3 prompts"),
        ("vllm", spans("rl-1"), "answer 0 of .* was sampled by weights rl-1, not rl-2"),
        ("vllm", of_prompt(lambda reported: None), "answer 0 of .* has no prompt_logprobs of its row's tokens"),
        (
            "vllm",
            of_prompt(lambda reported: reported[:-1]),
            "answer 0 of .* has the log-probabilities of 3 tokens of its row, which has 4 after its first",
        ),
        (
            "vllm",
            of_prompt(lambda reported: [None, {"1": {"logprob": -1.0}}, *reported[2:]]),
            "answer 0 of .* has no prompt_logprobs of its row's tokens .KeyError.'6'",
        ),
        ("vllm", choice(weight_versions=None), "answer 0 of .* has no token_ids with logprobs and weight_versions"),
    ],
)
def test_scores_that_do_not_fit_their_row_are_refused(kind, server, hf_dirs, spoil, message):
    server.spoil = spoil
    engine = ServedEngine(kind, server.url, hf_dirs[1][0], "rl-2")
    with pytest.raises(EngineError, match=message):
        engine.score(ROWS)
    with pytest.raises(EngineError, match=message):
        engine.score_continuations([(row[:1], row[1:]) for row in ROWS])


def test_weights_that_are_not_finite_have_scores_that_are_no_numbers_and_no_answers(kind, server, hf_dirs):
    server.is_broken = True
    engine = ServedEngine(kind, server.url, hf_dirs[1][0], "rl-2")
    assert [len(row) for row in engine.score(ROWS)] == [4, 1, 5]
    assert all(math.isnan(value) for row in engine.score(ROWS) for value in row)
    scored = engine.score_continuations([(row[:1], row[1:]) for row in ROWS])
    assert all(math.isnan(each.log_probability) and not each.is_greedy for each in scored)
    with pytest.raises(BrokenWeightsError, match=r"answer 0 of .* no number: the weights are broken") as broken:
        engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS)
    assert isinstance(broken.value, EngineError) and isinstance(broken.value, NonFiniteLogitsError)
    greedy = engine.generate(PROMPTS, Sampling(5), "rl-2")
    assert all(math.isnan(value) for row in greedy.log_probabilities for value in row)


def test_a_server_that_was_started_again_scores_by_the_given_weights(kind, server, hf_dirs):
    engine = ServedEngine(kind, server.url, hf_dirs[1][0], "rl-2")
    scores = engine.score(ROWS)
    server.stop()
    other = SERVERS[kind](hf_dirs[0][0], server.port)
    again = engine.score(ROWS)
    other.stop()
    assert other.versions == [STARTED, "rl-2"] and again == scores


def test_a_server_that_dies_gets_the_weights_and_the_prompts_again(kind, server, hf_dirs):
    hf_dir, _ = hf_dirs[1]
    engine = ServedEngine(kind, server.url, hf_dir, "rl-2")
    made = engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS)
    server.stop()
    returned = []
    revival = threading.Timer(0.7, lambda: returned.append(SERVERS[kind](hf_dirs[0][0], server.port)))
    revival.start()
    again = engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS)
    revival.join()
    (other,) = returned
    assert other.versions == [STARTED, "rl-2"] and other.num_asked == len(PROMPTS)
    assert again.token_ids == made.token_ids
    assert again.sampled_log_probabilities == made.sampled_log_probabilities
    other.stop()


def test_a_server_that_was_started_again_between_two_requests_gets_the_weights_again(kind, server, hf_dirs):
    hf_dir, _ = hf_dirs[1]
    engine = ServedEngine(kind, server.url, hf_dir, "rl-2")
    made = engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS)
    server.stop()
    other = SERVERS[kind](hf_dirs[0][0], server.port)
    again = engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS)
    other.stop()
    assert other.versions == [STARTED, "rl-2"] and again.token_ids == made.token_ids


def test_the_time_in_which_a_server_computes_is_none_of_its_absence(kind, server, hf_dirs, monkeypatch):
    """It dies after it has computed for longer than a server is waited for."""
    engine, post, lost = ServedEngine(kind, server.url, hf_dirs[1][0], "rl-2", patience_seconds=0.7), [], []
    post.append(ServerConnection.post)

    def late(self, path, body):
        if path.endswith("generate") and not lost:
            lost.append(path)
            time.sleep(0.8)
            raise ConnectionResetError("died")
        return post[0](self, path, body)

    monkeypatch.setattr(ServerConnection, "post", late)
    assert all(engine.generate(PROMPTS[:1], SAMPLING, "rl-2", DRAWS[:1]).token_ids) and lost


def test_answers_that_vllm_gives_up_are_asked_again(hf_dirs):
    """A server that ends answers what it computes with finish_reason abort and status 200."""
    server = VllmServer(hf_dirs[0][0])
    engine = ServedEngine("vllm", server.url, hf_dirs[1][0], "rl-2")
    given_up = []

    def spoil(answer):
        if len(given_up) == 0:
            given_up.append(answer)
            return {"choices": [{**answer["choices"][0], "finish_reason": "abort"}]}
        return answer

    server.spoil = spoil
    made = engine.generate(PROMPTS, SAMPLING, "rl-2", DRAWS)
    server.stop()
    assert given_up and server.num_asked == 2 * len(PROMPTS) and server.versions == [STARTED, "rl-2", "rl-2"]
    assert all(made.token_ids)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_vllm_that_was_started_without_the_paths_is_told_how(hf_dirs, status, monkeypatch):
    def refuse(self, path, body):
        raise RefusedRequestError(f"{path} answered with status {status}", status)

    monkeypatch.setattr(ServerConnection, "post", refuse)
    with pytest.raises(EngineError, match=f"status {status}; start it with `glm46 serve --engine vllm --check"):
        ServedEngine("vllm", "http://h:1", hf_dirs[1][0], "rl-2").generate(PROMPTS, SAMPLING, "rl-2", DRAWS)


def test_a_server_that_stays_away_is_named(kind, hf_dirs):
    engine = ServedEngine(kind, f"http://127.0.0.1:{free_port()}", hf_dirs[0][0], "rl-1", patience_seconds=0.1)
    with pytest.raises(EngineError, match=r"was away for 0 s .*: start the server again"):
        engine.generate(PROMPTS, SAMPLING, "rl-1", DRAWS)


SERVED = {**GRPO, "rollouts": "sglang", "routes": "ignore"}


@pytest.mark.long
def test_a_phase_trains_on_what_its_server_samples(kind, tmp_path):
    """Each step's weights are sampled from: else the trainer's log-probabilities would be others."""
    inputs = TrainingInputs(tmp_path / "home")
    start = inputs.train(inputs.chat_arguments(sft_recipe()))
    server = SERVERS[kind](start.path("hf/config.json").parent)
    objective = {**SERVED, "rollouts": kind}
    resources = RESOURCES.model_copy(update={"rollout_server": server.url})
    try:
        trained = inputs.train(
            inputs.prompt_arguments(rl_recipe(num_steps=3, objective=objective), ANSWERS, resources, start=start)
        )
    finally:
        server.stop()
    versions = [f"rl_reasoning-{trained.key[:12]}-{step}" for step in (1, 2, 3)]
    assert server.versions == [STARTED, *versions], "another run with steps of these numbers has other names"
    lines = metrics_of(trained.path("metrics.jsonl"))
    assert len(lines) == 3 and all(line["rollout_log_ratio"] < 1e-5 for line in lines)
    groups = metrics_of(trained.path("rollouts.jsonl"))
    assert {group["weights_version"] for group in groups} == set(server.versions[1:])
    assert {reward for group in groups for reward in group["rewards"]} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("recipe", "resources", "message"),
    [
        (SERVED, {}, "rollouts sglang need a server, rollout_server is '': set it to its URL"),
        (SERVED, {"rollout_server": "host:30000"}, "rollout_server is 'host:30000': set it to its URL"),
        (GRPO, {"rollout_server": "http://host:30000"}, "rollout_server is .* with rollouts in_process: empty it"),
    ],
)
def test_rollouts_that_no_server_can_give_are_refused(recipe, resources, message, tmp_path):
    inputs = TrainingInputs(tmp_path / "home")
    with pytest.raises(ValueError, match=message):
        inputs.train(
            inputs.prompt_arguments(rl_recipe(objective=recipe), ANSWERS, RESOURCES.model_copy(update=resources))
        )
