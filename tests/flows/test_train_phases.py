"""Which weights a phase starts from, is compared with and leaves for a release, where phases form a graph."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import yaml

from configs.schema import Scale
from flows import train_phases as flow
from flows.running.run import AssessedModel, AssessedRewardModel
from flows.solution_rules import refuse_unanswered_domains
from flows.stages import choose_stages
from flows.train_phases import PhaseHistory
from tests.configs.test_phase_graph import DIFFICULTY, SAMPLING, add_phase, phase_of, scored_by, with_experts
from tests.conftest import ROOT


def artifact(name):
    return SimpleNamespace(digest=name)


@pytest.fixture
def scale():
    """A second domain beside micro's path; its reward model and rl_reasoning start from sft."""
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    add_phase(tree, "mid_domain", like="mid_reasoning", before="sft", start="pretrain_general")
    phase_of(tree, "sft")["start"] = "mid_reasoning"
    return Scale(**tree)


@pytest.fixture
def train(scale, monkeypatch):
    """Runs the phases with steps that record (phase, weights it started from, evaluation it is compared with).
    `train.judges` has the reward model of each phase, `train.rates` its measured prompts; phases of `meet` are trained
    only at the same time."""
    seen, named, rates = [], {}, {}

    def run_step(run, step, *, stage, start, reward_model, **inputs):
        name = stage.removeprefix("train ")
        named[name] = reward_model and reward_model.digest
        if inputs.get("pass_rates") is not None:
            rates[name] = inputs["pass_rates"].digest
        seen.append([name, start and start.digest])
        for names, meeting in run.meetings.items():
            if name in names:
                meeting.wait()
        return artifact(name)

    def reasons(run, phase):
        return ("too low",) if phase.name in run.refused else ()

    def assess(run, prepared, phase, checkpoint, packed, start_evaluation, run_id, pairs):
        next(each for each in seen if each[0] == phase.name).append(start_evaluation)
        figures = f"figures of {phase.name}"
        return AssessedModel(phase, packed, checkpoint, figures, None, "1", run_id, reasons(run, phase))

    def score(run, phase, checkpoint, pairs, run_id):
        return AssessedRewardModel(phase, checkpoint, pairs, None, run_id, reasons(run, phase))

    stubs = {"run_step": run_step, "assess_checkpoint": assess, "assess_reward_model": score}
    for name, stub in stubs.items():
        monkeypatch.setattr(flow, name, stub)
    monkeypatch.setattr(flow, "track_phase", lambda run, phase, key: "run")
    monkeypatch.setattr(flow, "show_phase", lambda run, model: None)
    monkeypatch.setattr(flow, "connect", lambda uri: None)
    monkeypatch.setattr(flow, "evaluate", lambda run, prepared, start, stage: f"figures of {start.digest}")
    monkeypatch.setattr("flows.stages.refuse_impossible_training", lambda *arguments: None)
    prepared = SimpleNamespace(
        documents=SimpleNamespace(validation=artifact("validation"), decontaminated=artifact("clean")),
        tokenizer=artifact("tokenizer"),
        shards=artifact("shards"),
        chat_shards=artifact("chats"),
    )

    def run(first=None, start=None, refused=(), until=None, scale=scale, meet=()):
        seen.clear()
        window = choose_stages(scale, first, start, until)
        rows = {phase.name: artifact("rows") for phase in window.phases}
        pairs = {phase.name: artifact("pairs") for phase in window.phases if phase.recipe.reads_pairs}
        history = PhaseHistory(None if start is None else artifact(start), rows, pairs)
        meetings = {names: threading.Barrier(len(names), timeout=60) for names in meet}
        run = SimpleNamespace(scale=scale, mlflow="", refused=refused, meetings=meetings)
        return flow.train_phases(run, prepared, window.phases, history), list(map(tuple, seen))

    run.judges, run.rates = named, rates
    return run


def test_a_phase_starts_from_and_is_compared_with_the_model_of_its_start(train):
    history, trained = train()
    assert trained == [
        ("pretrain_general", None, None),
        ("mid_reasoning", "pretrain_general", "figures of pretrain_general"),
        ("mid_domain", "pretrain_general", "figures of pretrain_general"),
        ("sft", "mid_reasoning", "figures of mid_reasoning"),
        ("reward_model", "sft"),
        ("rl_reasoning", "sft", "figures of sft"),
    ]
    assert history.candidate.phase.name == "rl_reasoning"


def test_answers_are_scored_by_the_model_of_the_phase_that_is_named(train, scale):
    train()
    assert set(train.judges.values()) == {None}
    values = scale.model_dump(mode="json")
    recipe = phase_of(values, "rl_reasoning")["recipe"]
    recipe["objective"] = scored_by(recipe["objective"], "reward_model", 1.0)
    train(scale=Scale(**values))
    assert {name: judge for name, judge in train.judges.items() if judge} == {"rl_reasoning": "reward_model"}


def test_the_candidate_is_the_newest_language_model(train):
    history, _ = train(until="reward_model")
    assert [model.phase.name for model in history.models][-2:] == ["sft", "reward_model"]
    assert history.candidate.phase.name == "sft" and not history.reasons


def test_given_weights_stand_for_the_start_of_every_phase_that_has_the_first_ones(train):
    _, trained = train("reward_model", "given")
    assert trained == [("reward_model", "given"), ("rl_reasoning", "given", "figures of given")]


def test_experts_answer_before_the_phase_that_joins_them_in_its_start(train, scale, monkeypatch):
    asked = {}

    def sample(run, prepared, phase, models):
        asked[phase.name] = {name: model.digest for name, model in models.items()}
        return artifact("solutions")

    monkeypatch.setattr(flow, "_sample", sample)
    monkeypatch.setattr(flow, "_pack_solutions", lambda *arguments: (artifact("rows"), artifact("chats")))
    monkeypatch.setattr(flow, "log_solutions", lambda *arguments: None)
    values = with_experts(scale.model_dump(mode="json"))
    for phase in values["phases"]:
        phase["resources"]["launcher"] = "slurm"
    meet = (("rl_reasoning", "rl_agentic"),)
    history, trained = train("sft", "given", scale=Scale(**values), meet=meet)
    assert asked == {"distillation": {"rl_reasoning": "rl_reasoning", "rl_agentic": "rl_agentic"}}
    assert trained[-1] == ("distillation", "sft", "figures of sft"), "branches side by side, then what joins them"
    assert history.candidate.solutions.digest == "solutions"
    history, trained = train("sft", "given", scale=Scale(**values), refused=("rl_agentic",))
    assert "distillation" not in [name for name, *_ in trained] and history.reasons == ("too low",)


def test_every_domain_with_prompts_has_an_expert_and_every_expert_has_prompts(scale):
    phase = Scale(**with_experts(scale.model_dump(mode="json"))).phases[-1]
    refuse_unanswered_domains(phase, {"synthetic": 9, "agentic": 8})
    with pytest.raises(ValueError, match="no expert answers the 7 prompts of domain math: name it among the domains"):
        refuse_unanswered_domains(phase, {"synthetic": 9, "agentic": 8, "math": 7})
    for found in ({"synthetic": 9}, {"synthetic": 9, "agentic": 0}):
        with pytest.raises(ValueError, match="expert rl_agentic is to answer domain agentic, which has no prompts"):
            refuse_unanswered_domains(phase, found)


def test_right_answers_are_sampled_from_the_start_and_packed_before_the_phase(monkeypatch, scale):
    """The stages of a phase with rejection sampling, each with what it reads; the log says what the rows leave out."""
    seen, said, checked = [], list[str](), list[str]()
    packed_record = SimpleNamespace(absent_domains=("code", "commit"), num_too_long=1200, sequence_length=128)

    def run_step(run, step, *, stage, **inputs):
        seen.append((stage, {name: value.digest for name, value in inputs.items() if hasattr(value, "digest")}))
        return SimpleNamespace(digest=stage, record=packed_record)

    values = scale.model_dump(mode="json")
    add_phase(values, "rl_rejection_sampling", like="sft", before="rl_reasoning", start="sft", objective=SAMPLING)
    branched = Scale(**values)
    phase = next(phase for phase in branched.phases if phase.recipe.samples_solutions)
    monkeypatch.setattr(flow, "run_step", run_step)
    monkeypatch.setattr(flow, "check_contract", lambda run, subject, name, stage: seen.append((stage, subject.digest)))
    monkeypatch.setattr(flow, "refuse_too_few_solutions", lambda phase, record: seen.append(("count", phase.name)))
    monkeypatch.setattr(flow, "stop_spark", lambda: None)
    monkeypatch.setattr(flow, "refuse_long_prompts", lambda phase, *given: checked.append(phase.name))
    prepared = SimpleNamespace(
        documents=SimpleNamespace(decontaminated=artifact("prompts")),
        tokenizer=artifact("tokens"),
        shards=artifact("s"),
    )
    run = SimpleNamespace(scale=branched, log=SimpleNamespace(say=said.append))
    assert flow.pack_phases(run, prepared, (phase,)) == {} and not seen, "its rows wait for the weights"
    assert checked == [phase.name], "room for answers is looked for before anything is trained"
    solutions = flow._sample(run, prepared, phase, {"checkpoint": artifact("sft's weights")})
    packed, chats = flow._pack_solutions(run, prepared, phase, solutions)
    name = phase.name
    assert [each for each in seen if not each[0].startswith("contract")] == [
        (f"sample {name}", {"checkpoint": "sft's weights", "prompts": "prompts"}),
        ("count", name),
        (f"shard {name}", {"chats": f"sample {name}", "tokenizer": "tokens"}),
        (f"pack {name}", {"shards": "s", "chats": f"shard {name}"}),
    ]
    assert [each[0] for each in seen if each[0].startswith("contract")] == [
        f"contract solutions {name}",
        f"contract shards {name}",
        f"contract packed {name}",
    ]
    assert (packed.digest, chats.digest) == (f"pack {name}", f"shard {name}")
    assert said[0].startswith(f"{name}: no text of code, commit: ")
    assert said[1].startswith(f"{name}: 1,200 conversations are longer than a row of 128 tokens")
    seen.clear()
    phase_of(values, "rl_reasoning")["recipe"]["objective"]["difficulty"] = DIFFICULTY
    models = {"checkpoint": artifact("w")}
    measured = flow._sample(SimpleNamespace(scale=Scale(**values)), prepared, Scale(**values).phases[-1], models)
    assert measured.digest == "sample rl_reasoning" and [each[0] for each in seen] == [
        "sample rl_reasoning",
        "contract solutions rl_reasoning",
    ], "no right answer is needed where prompts are only measured"


def test_pass_rates_are_measured_before_the_phase_that_chooses_by_them(train, scale, monkeypatch):
    """As many right answers as there are: none would end a phase of rejection sampling."""
    values = scale.model_dump(mode="json")
    phase_of(values, "rl_reasoning")["recipe"]["objective"]["difficulty"] = DIFFICULTY
    sampled = []

    def sample(run, prepared, phase, models):
        sampled.append((phase.name, models["checkpoint"].digest))
        return artifact(f"rates of {phase.name}")

    monkeypatch.setattr(flow, "_sample", sample)
    monkeypatch.setattr(flow, "log_solutions", lambda run, phase, run_id, solutions: sampled.append(solutions.digest))
    history, trained = train(scale=Scale(**values))
    assert sampled == [("rl_reasoning", "sft"), "rates of rl_reasoning"] and trained[-1][0] == "rl_reasoning"
    assert train.rates == {"rl_reasoning": "rates of rl_reasoning"}
    assert history.models[-1].solutions.digest == "rates of rl_reasoning"


def test_a_refused_branch_ends_the_run(train):
    history, trained = train(refused=("reward_model",))
    assert trained[-1][0] == "reward_model" and history.reasons == ("too low",)


def test_branches_on_nodes_are_trained_at_the_same_time_and_named_in_the_order_of_the_scale(train, scale):
    values = scale.model_dump(mode="json")
    for phase in values["phases"]:
        phase["resources"]["launcher"] = "slurm"
    here, _ = train()
    history, trained = train(
        scale=Scale(**values), meet=(("mid_reasoning", "mid_domain"), ("reward_model", "rl_reasoning"))
    )
    assert [model.phase.name for model in history.models] == [model.phase.name for model in here.models]
    assert history.candidate.phase.name == "rl_reasoning"
    starts = dict(each[:2] for each in trained)
    assert (starts["mid_domain"], starts["sft"], starts["reward_model"]) == ("pretrain_general", "mid_reasoning", "sft")
    refused, trained = train(
        scale=Scale(**values), meet=(("mid_reasoning", "mid_domain"),), refused=("mid_reasoning", "mid_domain")
    )
    assert sorted(name for name, *_ in trained) == ["mid_domain", "mid_reasoning", "pretrain_general"]
    assert refused.reasons == ("too low",) * 2
