"""An evaluation that is asked of a server: where nothing is drawn, the items and figures of one device that holds the
whole model; and what no server can give is refused before a run starts."""

from __future__ import annotations

import json
import math

import pyarrow.parquet as pq
import pytest

from configs.load import load_scale, load_suite
from configs.schema import ContractRecipe, Scale, SuiteRecipe
from infra.home import Home
from infra.storage.open_store import open_store
from tasks.data.sources.list_sources import list_named
from tasks.data.validate_contract import validate_contract
from tasks.evaluation.benchmarks.evaluate_suite import SUITE_FILE, evaluate_suite
from tasks.evaluation.document_scores import score_far_texts
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.evaluation.expert_use import EXPERTS_FILE, read_expert_use
from tasks.evaluation.items import (
    ARITHMETIC,
    CHAT_PROBLEM,
    CHOICE,
    DOCUMENT,
    FAR,
    SAFETY,
    TASK,
    WORKED,
    bits_per_byte,
    read_items,
)
from tasks.evaluation.open_engine import open_engine
from tasks.evaluation.suite import Question
from tests.evaluation.benchmarks.toy_suite import write_suite
from tests.support.data_inputs import RESOURCES as SPARK
from tests.support.engines.engine_servers import STARTED, SglangServer, VllmServer
from tests.support.evaluation_fakes import (
    EVALUATION_RESOURCES,
    RECIPE,
    checkpoint,
    commit,
    evaluation_suite,
    toy_tokenizer,
)
from tests.support.toy_steps import local_output
from tests.support.training_inputs import compute

SERVERS = {"sglang": SglangServer, "vllm": VllmServer}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return open_store(None, Home(tmp_path_factory.mktemp("served")))


def evaluation_of(store, rollouts="in_process", server=""):
    return commit(
        store,
        evaluate_checkpoint,
        checkpoint=checkpoint(store, "trained"),
        suite=evaluation_suite(store, num_tasks=2),
        recipe=RECIPE.model_copy(update={"rollouts": rollouts}),
        resources=EVALUATION_RESOURCES.model_copy(update={"rollout_server": server}),
    )


@pytest.fixture(scope="module", params=SERVERS)
def served(request, store):
    """The evaluation by a server that started with other weights, and what the server was asked."""
    server = SERVERS[request.param](checkpoint(store, "random").directory("hf"))
    try:
        yield evaluation_of(store, request.param, server.url), server
    finally:
        server.stop()


def by_kind(evaluation, *kinds):
    return [item for item in read_items(evaluation.path("items.parquet")) if item.kind in kinds]


def test_what_a_server_scores_and_continues_greedily_is_what_one_device_does(store, served):
    own, (evaluation, server) = evaluation_of(store), served
    assert server.versions == [STARTED, f"toy-{checkpoint(store, 'trained').digest[:12]}"]
    assert evaluation.key != own.key and evaluation.record.checkpoint_digest == own.record.checkpoint_digest
    for kind in (DOCUMENT, WORKED, FAR):
        ours, theirs = by_kind(own, kind), by_kind(evaluation, kind)
        assert [item.item_id for item in theirs] == [item.item_id for item in ours] and ours
        assert bits_per_byte(theirs, kind) == pytest.approx(bits_per_byte(ours, kind), abs=1e-6)
    answers = [(item.item_id, item.output, item.num_right) for item in by_kind(own, ARITHMETIC)]
    assert [(item.item_id, item.output, item.num_right) for item in by_kind(evaluation, ARITHMETIC)] == answers
    for ours, theirs in zip(by_kind(own, CHOICE), by_kind(evaluation, CHOICE), strict=True):
        assert json.loads(theirs.output) == pytest.approx(json.loads(ours.output), abs=1e-3)
        assert (theirs.item_id, theirs.num_right) == (ours.item_id, ours.num_right)
    for figure in ("arithmetic_accuracy", "choice_accuracy", "choice_accuracy_normalised"):
        assert getattr(evaluation.record, figure) == getattr(own.record, figure)


@pytest.mark.parametrize("kind", SERVERS)
def test_weights_that_are_not_finite_are_counted_and_not_an_error(kind, store):
    """The gate refuses such a checkpoint by its items."""
    server = SERVERS[kind](checkpoint(store, "random").directory("hf"))
    server.is_broken = True
    try:
        evaluation = commit(
            store,
            evaluate_checkpoint,
            checkpoint=checkpoint(store, "random"),
            suite=evaluation_suite(store, num_tasks=2),
            recipe=RECIPE.model_copy(update={"rollouts": kind}),
            resources=EVALUATION_RESOURCES.model_copy(update={"rollout_server": server.url}),
        )
    finally:
        server.stop()
    assert evaluation.record.num_non_finite == len(read_items(evaluation.path("items.parquet"))) > 10


@pytest.mark.parametrize("kind", SERVERS)
def test_a_suite_has_the_figures_of_one_device(kind, store, tmp_path):
    """Every kind of benchmark, all answers greedy."""
    path, data = write_suite(tmp_path / "toy")
    suite = load_suite(str(path))
    server = SERVERS[kind](checkpoint(store, "random").directory("hf"))
    given = {"checkpoint": checkpoint(store, "trained"), "files": list_named(str(data), suite.own_files)}
    try:
        own, asked = (
            commit(
                store,
                evaluate_suite,
                recipe=SuiteRecipe(suite=suite, limit=None, num_threads=1, rollouts=rollouts),
                resources=EVALUATION_RESOURCES.model_copy(update={"rollout_server": url}),
                **given,
            )
            for rollouts, url in (("in_process", ""), (kind, server.url))
        )
    finally:
        server.stop()
    assert own.key != asked.key and len(own.record.figures) == len(suite.benchmarks)
    assert asked.record.num_items == own.record.num_items
    for name, figures in own.record.figures.items():
        assert asked.record.figures[name] == pytest.approx(figures, abs=1e-6), name
    assert json.loads(asked.path(SUITE_FILE).read_text())["engine"] == kind


def test_a_server_samples_as_many_answers_and_plays_as_many_tasks(store, served):
    own, (evaluation, _) = evaluation_of(store), served
    for kind in (CHAT_PROBLEM, SAFETY, TASK):
        ours, theirs = by_kind(own, kind), by_kind(evaluation, kind)
        assert [(item.item_id, item.num_samples) for item in theirs] == [
            (item.item_id, item.num_samples) for item in ours
        ]
        assert ours and all(math.isfinite(item.log_probability) for item in theirs)
    assert evaluation.record.num_non_finite == 0 and evaluation.record.seed_noise.keys() == own.record.seed_noise.keys()


def test_a_server_counts_no_tokens_of_experts_and_accepts_no_drafts(store, served):
    evaluation, _ = served
    record = evaluation.record
    assert (record.expert_load, record.expert_cv, record.num_dead_experts, record.draft_acceptance) == (
        (),
        (),
        (),
        None,
    )
    assert "draft_acceptance" not in record.intervals and read_expert_use(evaluation.path(EXPERTS_FILE)) == []
    ours, theirs = (pq.read_table(each.path(EXPERTS_FILE)) for each in (evaluation_of(store), evaluation))
    assert theirs.schema == ours.schema and ours.num_rows > 0


def test_answers_of_a_server_meet_the_contract(store, served):
    evaluation, _ = served
    contract = ContractRecipe(name="evaluation_items")
    held = compute(store, validate_contract, subject=evaluation, recipe=contract, resources=SPARK).record
    assert held.num_rows == evaluation.record.num_items


@pytest.mark.parametrize("kind", SERVERS)
def test_a_far_text_that_is_too_long_loses_its_beginning_so_that_a_server_can_continue_it(kind, store, tmp_path):
    model = checkpoint(store, "trained")
    server = SERVERS[kind](model.directory("hf"))
    resources = EVALUATION_RESOURCES.model_copy(update={"rollout_server": server.url})
    engine = open_engine(model, kind, "float32", resources)  # pyright: ignore[reportArgumentType]
    lengths, scores = [], server.scores

    def counted(row):
        lengths.append(len(row))
        return scores(row)

    server.scores = counted
    far = Question(f"{FAR}/x", FAR, "web", "x", "The quick brown fox. " * 300, " Then it sleeps.")
    try:
        (item,) = score_far_texts(engine, toy_tokenizer(), [far], 40, local_output(tmp_path))
    finally:
        server.stop()
    assert lengths == [40] and math.isfinite(item.log_probability) and item.num_bytes == 16


def scale_with(**changes):
    """`micro` with other settings of its evaluation and of every gate."""
    tree = load_scale("micro").model_dump(mode="json")
    tree["evaluation"]["recipe"] |= changes.get("recipe", {})
    tree["evaluation"]["resources"] |= changes.get("resources", {})
    for phase in tree["phases"]:
        phase["recipe"]["gate"] |= changes.get("gate", {})
    return Scale.model_validate(tree)


SERVED = {"recipe": {"rollouts": "vllm"}, "resources": {"rollout_server": "http://host:30000"}}
UNJUDGED = {"max_expert_load": None, "max_expert_cv": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (SERVED, r"max_expert_load 1.95, and evaluation.recipe.rollouts is vllm: .* set gate.max_expert_load to null"),
        (
            SERVED | {"gate": {"max_expert_load": None}},
            "max_expert_cv 0.9, .* counts no tokens of experts; set gate.max_expert_cv to null, or rollouts to in_proc",
        ),
        (
            SERVED | {"gate": UNJUDGED, "resources": {}},
            "rollouts vllm need a server, rollout_server is '': set it to its URL",
        ),
        (
            SERVED | {"gate": UNJUDGED, "resources": {"rollout_server": "host:30000"}},
            "rollouts vllm need a server, rollout_server is 'host:30000': set it to its URL",
        ),
        (
            {"resources": {"rollout_server": "http://host:30000"}},
            "rollout_server is http://host:30000 with rollouts in_process: empty it, or set rollouts",
        ),
        (
            SERVED | {"gate": UNJUDGED, "recipe": {"rollouts": "vllm", "temperature": 0.8}},
            "at the temperature of their sampling, temperature is 0.8: set it to 1.0",
        ),
    ],
)
def test_what_no_server_can_give_is_refused_with_the_key(changes, message):
    with pytest.raises(ValueError, match=message):
        scale_with(**changes)


def test_a_scale_that_asks_a_server_judges_no_balance_of_experts():
    served = scale_with(**SERVED, gate=UNJUDGED)
    assert served.evaluation.resources.rollout_server == "http://host:30000"
    unjudged = {phase.recipe.gate.max_expert_cv for phase in served.phases}
    assert unjudged == {None} and scale_with(gate=UNJUDGED).evaluation.recipe.rollouts == "in_process"
