"""What no policy trains on, and how a rank ends that cannot go on: with a sentence in place of a traceback."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from configs.schema import Waypoint
from infra.jobs.launchers import JobFailedError
from tasks.data.prompts.verifiers import VerifierError
from tasks.training import worker
from tasks.training.plan.launch_rules import refuse_impossible_training
from tests.configs.test_phase_graph import CRITIC
from tests.support.model_recipes import GLM46
from tests.support.training_inputs import RESOURCES, TrainingInputs
from tests.training.test_objectives import ANSWERS, GRPO, rl_recipe


class Deaf(BaseHTTPRequestHandler):
    """A server of another protocol: it has status 501 for every question."""


@pytest.mark.parametrize("kind", ["grpo", "gspo", "ppo"])
def test_a_loss_of_the_mtp_layer_is_refused_since_it_would_learn_wrong_answers(kind):
    objective = GRPO | (CRITIC if kind == "ppo" else {}) | {"kind": kind, "loss_mean": "answers"}
    recipe = rl_recipe(objective=objective)
    refuse_impossible_training(recipe, RESOURCES)
    taught = recipe.course.model_copy(update={"mtp_loss_weight": (Waypoint(until_share=1.0, value=0.1),)})
    message = rf"objective {kind} with an mtp_loss_weight above 0 .*: set mtp_loss_weight to 0 in course rl_reasoning"
    with pytest.raises(ValueError, match=message):
        refuse_impossible_training(recipe.model_copy(update={"course": taught}), RESOURCES)


@pytest.mark.parametrize(
    ("kind", "rollouts", "message"),
    [
        (
            "grpo",
            "in_process",
            "tensor_parallel 2 cannot train grpo, whose answers each rank samples .*, or rollouts to",
        ),
        ("ppo", "in_process", "tensor_parallel 2 cannot train ppo, whose answers each rank samples"),
        ("ppo", "sglang", ""),
        ("gspo", "sglang", ""),
    ],
)
def test_a_divided_policy_is_refused_where_it_samples(kind, rollouts, message):
    served = {"rollouts": rollouts, "routes": "ignore", "loss_mean": "answers"}
    recipe = rl_recipe(objective=GRPO | (CRITIC if kind == "ppo" else {}) | {"kind": kind} | served)
    server = {} if rollouts == "in_process" else {"rollout_server": "http://h:1"}
    resources = RESOURCES.model_copy(update={"num_ranks": 2, "ranks_per_node": 2, "tensor_parallel": 2} | server)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        refuse_impossible_training(recipe, resources)


@pytest.mark.parametrize(
    ("routes", "recompute", "message"),
    [
        (
            "replay",
            "full",
            "routes replay with pipeline_parallel 2 and recompute full, which would use the routes of a",
        ),
        ("replay", "none", ""),
        ("compare", "full", ""),
    ],
)
def test_routes_are_not_replayed_in_stages_that_compute_activations_again(routes, recompute, message):
    recipe = rl_recipe(objective=GRPO | {"rollouts": "sglang", "routes": routes})
    ranks = {"num_ranks": 2, "ranks_per_node": 2, "pipeline_parallel": 2, "rollout_server": "http://h:1"}
    resources = RESOURCES.model_copy(update=ranks | {"recompute": recompute})
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        refuse_impossible_training(recipe, resources)


def test_a_reward_model_that_cannot_be_divided_as_the_policy_is_refused():
    """The policy has a layer for each of two stages, the reward model has one layer."""
    objective = GRPO | {"rollouts": "sglang", "routes": "ignore", "reward_model": "reward_model"}
    small = GLM46.model_copy(update={"num_hidden_layers": 1, "num_nextn_predict_layers": 0}).model_dump()
    recipe = rl_recipe(objective=objective | {"rewards": GRPO["rewards"] | {"reward_model": 1.0}}, scorer=small)
    divided = {"num_ranks": 2, "ranks_per_node": 2, "pipeline_parallel": 2, "rollout_server": "http://h:1"}
    message = r"^phase rl_reasoning: of the reward model: pipeline_parallel \(2\) exceeds num_hidden_layers \(1\)"
    with pytest.raises(ValueError, match=message):
        refuse_impossible_training(recipe, RESOURCES.model_copy(update=divided))


def test_a_rank_whose_server_answers_in_another_protocol_ends_with_a_sentence(tmp_path):
    inputs = TrainingInputs(tmp_path / "home")
    server = HTTPServer(("127.0.0.1", 0), Deaf)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    resources = RESOURCES.model_copy(update={"rollout_server": url})
    recipe = rl_recipe(objective={**GRPO, "rollouts": "sglang", "routes": "ignore"})
    try:
        with pytest.raises(JobFailedError, match=f"{url}/update_weights_from_disk answered with status 501") as failed:
            inputs.train(inputs.prompt_arguments(recipe, ANSWERS, resources))
    finally:
        server.shutdown()
        server.server_close()
    assert "Traceback" not in str(failed.value)


def test_a_rank_whose_verifier_fails_ends_with_its_sentence(monkeypatch, tmp_path, capsys):
    def fail(job: object) -> int:
        raise VerifierError("the verifier of kind exact failed: correct the verifier")

    monkeypatch.setattr(worker, "run", fail)
    monkeypatch.setattr(worker.TrainingJob, "model_validate_json", lambda text: None)
    (tmp_path / "job.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "job.json")])
    assert worker.main() == 1
    assert capsys.readouterr().err == "the verifier of kind exact failed: correct the verifier\n"
