"""What a toy answers that answers by chance, and experts: what is kept, how often k answers hold a right one, that
training on it is learning, and which prompts a policy phase asks by it."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file, save_file

from configs.schema import (
    ContractRecipe,
    DistillationObjective,
    Frozen,
    PackingRecipe,
    RejectionSamplingObjective,
    Scale,
    SolutionRecipe,
)
from flows.solution_rules import refuse_long_prompts, refuse_too_few_solutions
from infra.step import Output, step
from infra.storage.manifest_graph import read_manifest_graph
from model.text.chat_template import encode, problem_prompt, render_to_train
from model.text.tokenizer_layout import END_TOKENS, tokenizer_for_text
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.shards.shard_chats import shard_chats
from tasks.data.validate_contract import validate_contract
from tasks.evaluation.intervals import best_of_k
from tasks.evaluation.sample_solutions import CHATS_FILE, ROLLOUTS_FILE, SOLVED_FILE, Solving, sample_solutions
from tasks.lineage.trained_phases import asked_prompt_ids
from tasks.training.input_rules import refuse_foreign_expert
from tasks.training.policy.episode_messages import conversation
from tasks.training.policy.episodes import Turn
from tasks.training.policy.prompts import Prompt
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tests.configs.test_phase_graph import add_phase, with_experts
from tests.conftest import ROOT
from tests.support.data_inputs import RECIPE as DATA_RECIPE
from tests.support.data_inputs import RESOURCES as SPARK
from tests.support.engines.engine_servers import STARTED, SglangServer
from tests.support.evaluation_fakes import EVALUATION_RESOURCES
from tests.support.training_inputs import (
    SEED,
    SEQUENCE_LENGTH,
    PromptAnswers,
    TrainingInputs,
    compute,
    metrics_of,
    small_recipe,
    write_toy_prompts,
)
from tests.training.test_objectives import ANSWERS, GRPO, course, rl_recipe, sft_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill

SAMPLES, STEPS, ROWS = 16, 32, 4
OBJECTIVE = RejectionSamplingObjective(
    kind="rejection_sampling",
    samples_per_prompt=SAMPLES,
    max_kept_per_prompt=2,
    dropped_shortest_share=0.0,
    max_new_tokens=4,
    temperature=1.0,
    enable_thinking=False,
    rollouts="in_process",
)
RECIPE = SolutionRecipe(
    objective=OBJECTIVE,
    keeps_answers=True,
    domains=(),
    sequence_length=SEQUENCE_LENGTH,
    dtype="float32",
    num_threads=1,
    seed=SEED,
)
MEASURING = RECIPE.model_copy(update={"keeps_answers": False, "domains": ("synthetic",)})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("solutions") / "home")


@pytest.fixture(scope="module")
def tuned(inputs):
    """Answers `a?` to `h?` with 0 as often as with 1."""
    return inputs.train(inputs.chat_arguments(sft_recipe()))


def sample(inputs, checkpoint, recipe=RECIPE, answers=ANSWERS, batch_sequences=32, domains=(), server="", **calls):
    """Answers of `checkpoint`, or of experts that `calls` name."""
    resources = {"batch_sequences": batch_sequences, "rollout_server": server}
    return compute(
        inputs.store,
        sample_solutions,
        checkpoint=checkpoint,
        prompts=compute(inputs.store, write_toy_prompts, recipe=PromptAnswers(answers=answers, domains=domains)),
        recipe=recipe,
        resources=EVALUATION_RESOURCES.model_copy(update=resources),
        **calls,
    )


def train_on(inputs, solutions, phase: str, objective, start, num_steps=STEPS):
    """A phase from `start` on the kept answers."""
    chats = compute(
        inputs.store,
        shard_chats,
        chats=solutions,
        tokenizer=inputs.tokenizer,
        recipe=DATA_RECIPE.shards,
        resources=SPARK,
    )
    assert chats.record.num_tokens == solutions.record.num_kept_tokens
    num_tokens = num_steps * ROWS * SEQUENCE_LENGTH
    packing = PackingRecipe(
        num_tokens=num_tokens,
        sequence_length=SEQUENCE_LENGTH,
        packing="best_fit",
        mixture={"chat": 1.0},
        bucket_weights=(),
        max_epochs=100.0,
        fim_rate=0.0,
        seed=SEED,
    )
    packed = compute(inputs.store, pack_phase, shards=None, chats=chats, recipe=packing)
    recipe = sft_recipe(
        phase=phase,
        objective=objective.model_dump(),
        course=course(phase, 1e-2, ROWS),
        num_tokens=num_tokens,
        course_num_tokens=num_tokens,
    )
    given = {"packed": packed, "shards": None, "chats": chats}
    return inputs.train(inputs.chat_arguments(recipe, start=start) | given)


@pytest.fixture(scope="module")
def solutions(inputs, tuned):
    return sample(inputs, tuned)


@pytest.fixture(scope="module")
def measured(inputs, tuned):
    """The same answers, as a phase has them that only measures its prompts."""
    return sample(inputs, tuned, MEASURING)


def table(artifact, name):
    return pq.read_table(artifact.path(name)).to_pylist()


def test_right_answers_are_kept_each_once_and_read_as_they_were_sampled(inputs, tuned, solutions):
    record, tokenizer = solutions.record, tokenizer_for_text(str(tuned.path("hf/tokenizer.json")))
    groups = {
        line["prompt_id"]: line for line in map(json.loads, solutions.path(ROLLOUTS_FILE).read_text().split("\n")[:-1])
    }
    solved, chats = table(solutions, SOLVED_FILE), table(solutions, CHATS_FILE)
    assert (record.num_prompts, record.num_answers, record.num_kept) == (8, 8 * SAMPLES, len(chats))
    for row in solved:
        group = groups[row["id"]]
        ended = tuple(f"\n{group['answer']}{token}" for token in END_TOKENS)
        right = [text for text in group["samples"] if text == f"\n{group['answer']}<|user|>"]
        others = [text for text in group["samples"] if text.startswith(ended) and text not in right]
        assert row["num_right"] == len(right) + len(others) == sum(group["rewards"])
        assert row["num_kept"] == (1 if right else 0), "equal answers count once"
    assert (
        sum(row["num_right"] for row in solved) == record.num_right == record.num_kept + sum(record.left_out.values())
    )
    num_tokens = 0
    for chat in chats:
        question, answered = json.loads(chat["messages"])
        ids, trained = encode(tokenizer, render_to_train([question, answered], ()))
        num_tokens += len(ids)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        prompt = tokenizer.decode(
            encode(tokenizer, problem_prompt(question["content"], False))[0], skip_special_tokens=False
        )
        sampled = [text.removeprefix(prompt)]
        assert (
            sampled[0]
            in next(group for group in groups.values() if group["question"] == question["content"])["samples"]
        )
        assert (
            tokenizer.decode([each for each, own in zip(ids, trained, strict=True) if own], skip_special_tokens=False)
            == sampled[0]
        )
    assert num_tokens == record.num_kept_tokens > 0


@pytest.mark.parametrize(("share", "kept"), [(0.0, [0, 1, 2, 3]), (0.4, [0, 2, 3]), (0.5, [0, 2]), (0.99, [2])])
def test_prompts_with_the_shortest_answers_are_left_out(tuned, share, kept):
    """Means of 6, 4, 7 and 5 tokens; the last prompt has no right answer and counts in no share."""
    solving = Solving(tokenizer_for_text(str(tuned.path("hf/tokenizer.json"))), RECIPE, "toy", "sft")
    answers = [(0, 5), (0, 7), (1, 4), (2, 7), (3, 2), (3, 8)]
    solving.chats = [{"offset": number} for number, _ in answers]
    solving.answer_tokens, solving.chat_tokens = [size for _, size in answers], [size + 10 for _, size in answers]
    counts = [2, 1, 1, 2, 0]
    solving.solved = [{"num_kept": count} for count in counts]
    solving.leave_out_shortest(share)
    assert [chat["offset"] for chat in solving.chats] == [number for number, _ in answers if number in kept]
    assert [row["num_kept"] for row in solving.solved] == [counts[n] if n in kept else 0 for n in range(5)]
    assert solving.left_out["short"] == 6 - len(solving.chats)
    assert sum(solving.chat_tokens) == sum(size + 10 for number, size in answers if number in kept)


def test_the_answers_meet_their_contract(inputs, solutions, measured):
    contract = ContractRecipe(name="sampled_solutions")
    for sampled in (solutions, measured):
        held = compute(inputs.store, validate_contract, subject=sampled, recipe=contract, resources=SPARK).record
        assert held.num_rows == sampled.record.num_kept + sampled.record.num_prompts and held.num_expectations == 23


def test_what_only_measures_counts_the_same_and_keeps_nothing(inputs, tuned, solutions, measured):
    kept_none = [row | {"num_kept": 0} for row in table(solutions, SOLVED_FILE)]
    assert table(measured, SOLVED_FILE) == kept_none and not table(measured, CHATS_FILE)
    expected = {"num_kept": 0, "num_kept_tokens": 0, "left_out": {}}
    expected["domains"] = tuple(each.model_dump() | {"num_kept": 0} for each in solutions.record.domains)
    assert measured.record.model_dump() == solutions.record.model_dump() | expected
    other = sample(inputs, tuned, MEASURING.model_copy(update={"domains": ("math",)}))
    assert other.record.num_prompts == 0, "prompts of other domains are not asked"


def test_a_server_that_reads_the_weights_answers_in_place_of_the_process(inputs, tuned, solutions):
    base = inputs.train(inputs.arguments(small_recipe()))
    server = SglangServer(base.path("hf/config.json").parent)
    served = RECIPE.model_copy(update={"objective": OBJECTIVE.model_copy(update={"rollouts": "sglang"})})
    try:
        found = sample(inputs, tuned, served, server=server.url)
    finally:
        server.stop()
    assert server.versions == [STARTED, f"sft-{tuned.digest[:12]}"] and found.key != solutions.key
    assert server.num_asked == found.record.num_answers == solutions.record.num_answers
    # Other draws of the same weights: four standard deviations of the difference, where a quarter is right.
    assert found.record.num_right == pytest.approx(solutions.record.num_right, abs=28)
    kept = [json.loads(chat["messages"])[-1]["content"] for chat in table(found, CHATS_FILE)]
    assert len(kept) == found.record.num_kept == solutions.record.num_kept and {*kept} == {"0", "1"}


def chosen_arguments(inputs, tuned, measured, **changes):
    """A phase that asks the prompts whose pass rate is not the highest, from easy to hard."""
    band = {"samples_per_prompt": SAMPLES, "min_pass_rate": 0.0, "order": "easy_first"}
    band["max_pass_rate"] = sorted({*rates_of(measured).values()})[-2]
    recipe = rl_recipe(objective=GRPO | {"difficulty": band})
    return inputs.prompt_arguments(recipe, ANSWERS, start=tuned, **changes) | {"pass_rates": measured}


def rates_of(measured) -> dict[str, float]:
    return {row["id"]: row["num_right"] / SAMPLES for row in table(measured, SOLVED_FILE)}


@pytest.fixture(scope="module")
def chosen(inputs, tuned, measured):
    return inputs.train(chosen_arguments(inputs, tuned, measured))


def test_a_phase_asks_what_its_start_finds_neither_too_easy_nor_too_hard(inputs, measured, chosen):
    rates = rates_of(measured)
    easiest = {name for name, rate in rates.items() if rate == max(rates.values())}
    assert 0 < len(easiest) < 6 and len({*rates.values()}) > 3, rates
    record = chosen.record
    assert (record.num_easy_prompts, record.num_hard_prompts) == (len(easiest), 0)
    graph = read_manifest_graph(inputs.store)
    prompts = graph.input_of(chosen.manifest, "prompts")
    asked = asked_prompt_ids(graph, chosen.manifest, prompts)
    assert {*asked} == {*rates} - easiest
    assert [rates[name] for name in asked] == sorted((rates[name] for name in asked), reverse=True)
    logged = [json.loads(line)["prompt_id"] for line in chosen.path("rollouts.jsonl").read_text().splitlines()]
    assert logged[:2] == asked[:2] and not easiest & {*logged}


@pytest.mark.long
def test_a_killed_phase_on_measured_prompts_continues_to_the_same_result(chosen, measured, tmp_path):
    other = TrainingInputs(tmp_path / "home")
    tuned = other.train(other.chat_arguments(sft_recipe()))

    def interrupted(progress):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        sample(other, tuned, MEASURING, report=interrupted)
    again = sample(other, tuned, MEASURING)
    assert again.digest == measured.digest
    resumed = train_through_a_kill(other, chosen_arguments(other, tuned, again, resources=SAVE_EVERY_STEP))
    assert resumed.digest == chosen.digest
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert metrics_of(resumed.path(name)) == metrics_of(chosen.path(name))


def test_pass_at_k_is_the_mean_over_every_choice_of_k_answers():
    num_right, num_samples = [0, 1, 3, 6], 6
    for point in best_of_k(num_right, num_samples):
        shares = []
        for right in num_right:
            outcomes = [True] * right + [False] * (num_samples - right)
            chosen = [any(own) for own in itertools.combinations(outcomes, point.k)]
            shares.append(sum(chosen) / len(chosen))
        assert point.share == pytest.approx(sum(shares) / len(shares), abs=1e-6)
    assert [point.k for point in best_of_k(num_right, num_samples)] == [1, 2, 4, 6]
    assert [point.k for point in best_of_k([1], 64)] == [1, 2, 4, 8, 16, 32, 64] and best_of_k([], 8) == ()
    assert best_of_k([1], 2)[0].interval is None


def test_the_curve_is_that_of_the_counts_and_rises(solutions):
    right = [row["num_right"] for row in table(solutions, SOLVED_FILE)]
    assert solutions.record.pass_at == best_of_k(right, SAMPLES)
    shares = [point.share for point in solutions.record.pass_at]
    assert shares == sorted(shares) and shares[0] == pytest.approx(sum(right) / (8 * SAMPLES), abs=1e-6)
    assert 0.2 < shares[0] < 0.8 < shares[-1]


@pytest.mark.long
def test_answers_depend_neither_on_batches_nor_on_an_interruption(inputs, tuned, solutions, tmp_path):
    other = TrainingInputs(tmp_path / "home")

    def interrupted(progress):
        raise InterruptedError

    start = other.train(other.chat_arguments(sft_recipe()))
    assert start.digest == tuned.digest
    with pytest.raises(InterruptedError):
        sample(other, start, report=interrupted)
    assert sample(other, start, batch_sequences=3).digest == solutions.digest
    seeded = sample(inputs, tuned, RECIPE.model_copy(update={"seed": SEED + 1}))
    assert seeded.path(SOLVED_FILE).read_bytes() != solutions.path(SOLVED_FILE).read_bytes()


def test_a_prompt_without_room_is_left_out_and_counted(inputs, tuned):
    none = sample(inputs, tuned, RECIPE.model_copy(update={"sequence_length": 5})).record
    assert (none.num_prompts, none.num_too_long, none.num_kept, none.pass_at) == (0, 8, 0, ())


@pytest.fixture(scope="module")
def trained(inputs, tuned, solutions):
    return train_on(inputs, solutions, "rl_rejection_sampling", OBJECTIVE, tuned)


def test_a_phase_on_right_answers_learns_them(inputs, solutions, trained):
    """The toy's own coin tosses, of which only the right ones are trained: it answers rightly afterwards."""
    assert trained.record.objective == "rejection_sampling" and trained.record.is_chat_trained
    losses = [line["lm"] for line in metrics_of(trained.path("metrics.jsonl"))]
    assert losses[-1] < losses[0]
    before, after = solutions.record.pass_at[0], sample(inputs, trained).record.pass_at[0]
    assert before.interval is not None and before.interval[1] < 0.9 < after.share, (before, after)


class Renamed(Frozen):
    phase: str


@step(content=("hf/*",))
def contradict(*, checkpoint, recipe, output: Output) -> TrainedCheckpoint:
    """A model that answers 0 where the other answers 1."""
    for path in sorted(checkpoint.directory("hf").iterdir()):
        output.path(f"hf/{path.name}").write_bytes(path.read_bytes())
    (weights_path,) = output.directory.glob("hf/*.safetensors")
    weights, tokenizer = load_file(weights_path), tokenizer_for_text(str(checkpoint.path("hf/tokenizer.json")))
    zero, one = (tokenizer.encode(digit, add_special_tokens=False).ids[0] for digit in "01")
    weights["lm_head.weight"][[zero, one]] = weights["lm_head.weight"][[one, zero]]
    save_file(weights, weights_path, {"format": "pt"})
    return checkpoint.record.model_copy(update={"phase": recipe.phase})


WANTED, DOMAINS = (*ANSWERS[:4], *ANSWERS[:3:-1]), ("math",) * 4 + ("code",) * 4
"""`e?` to `h?` want the opposite of what `trained` learned."""
JOINING = DistillationObjective(
    **OBJECTIVE.model_dump(exclude={"kind"}),
    kind="distillation",
    experts=({"phase": "rl_rejection_sampling", "domains": ["math"]}, {"phase": "rl_agentic", "domains": ["code"]}),
    episodes={"max_turns": 1, "max_turn_tokens": 4, "max_observation_chars": 1, "tool_seconds": {"others": 1.0}},
)
DISTILLING = RECIPE.model_copy(update={"objective": JOINING})


def pass_at_1(solutions) -> dict[str, float]:
    return {each.domain: each.pass_at[0].share for each in solutions.record.domains}


def test_distillation_joins_the_domains_of_experts_in_weights_that_know_neither(inputs, tuned, trained):
    opposite = compute(inputs.store, contradict, checkpoint=trained, recipe=Renamed(phase="rl_agentic"))
    experts, asked = {"rl_rejection_sampling": trained, "rl_agentic": opposite}, {"answers": WANTED, "domains": DOMAINS}
    for expert, own, other in ((trained, "math", "code"), (opposite, "code", "math")):
        alone = pass_at_1(sample(inputs, expert, **asked))
        assert alone[own] > 0.9 and alone[other] < 0.1, alone

    def interrupted(progress):
        if progress.message.startswith("rl_agentic"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        sample(inputs, None, DISTILLING, **asked, report=interrupted, **experts)
    lost = r"domain math of expert rl_rejection_sampling: all 4 prompts \(of toys.jsonl\) have more than 1 tokens"
    with pytest.raises(ValueError, match=lost):
        sample(inputs, None, DISTILLING.model_copy(update={"sequence_length": 5}), **asked, **experts)
    solutions = sample(inputs, None, DISTILLING, **asked, **experts)
    found = [(each.phase, each.domain, each.num_prompts, each.num_kept) for each in solutions.record.domains]
    assert found == [("rl_rejection_sampling", "math", 4, 4), ("rl_agentic", "code", 4, 4)]
    answered = {row["id"]: row["phase"] for row in table(solutions, SOLVED_FILE)}
    assert [*answered.values()] == ["rl_rejection_sampling"] * 4 + ["rl_agentic"] * 4
    sources = {f"solutions/{name}/{expert.digest[:12]}": 4 for name, expert in experts.items()}
    assert Counter(chat["source"] for chat in table(solutions, CHATS_FILE)) == sources
    given = solutions.manifest.identity["inputs"]
    assert {name: given[name] for name in experts} == {name: expert.digest for name, expert in experts.items()}
    joined = train_on(inputs, solutions, "distillation", JOINING, tuned, num_steps=2 * STEPS)
    assert joined.record.objective == "distillation" and joined.record.is_chat_trained
    assert all(share < 0.7 for share in pass_at_1(sample(inputs, tuned, **asked)).values())
    shares = pass_at_1(sample(inputs, joined, **asked))
    assert all(share > 0.75 for share in shares.values()), shares


def test_an_expert_with_other_tokens_or_another_architecture_is_refused(inputs, trained):
    recipe = sft_recipe(phase="distillation", objective=JOINING.model_dump())
    refuse_foreign_expert(recipe, inputs.tokenizer, trained)
    with pytest.raises(ValueError, match=r"expert rl_rejection_sampling was trained with tokenizer .* with the same"):
        refuse_foreign_expert(recipe, SimpleNamespace(digest="0" * 64), trained)
    changed = recipe.model.model_copy(update={"num_experts_per_tok": recipe.model.num_experts_per_tok + 1})
    with pytest.raises(ValueError, match=r"config\.json of phase rl_rejection_sampling says num_experts_per_tok"):
        refuse_foreign_expert(recipe.model_copy(update={"model": changed}), inputs.tokenizer, trained)


def test_of_a_prompt_of_several_turns_only_the_sampled_answer_is_trained(inputs):
    said = [("system", "Be brief."), ("user", "x = 3"), ("assistant", "Good."), ("user", "2x?")]
    messages = [{"role": role, "content": content} for role, content in said]
    prompt = Prompt("p", "math", "math", "Be brief.\n\nx = 3\n\nGood.\n\n2x?", "[]", "6", "", json.dumps(messages))
    tokenizer = tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))
    whole = conversation(prompt, [Turn("assistant", "\n<think>so</think>\n6<|user|>")], enable_thinking=True)
    segments = render_to_train(whole, [])
    assert "".join(each.text for each in segments if each.is_trained) == "\n<think>so</think>\n6<|user|>"
    token_ids, trained = encode(tokenizer, segments)
    assert prompt.token_ids(tokenizer, enable_thinking=True) == token_ids[: trained.index(True)]


def test_reasoning_and_calls_are_read_into_their_fields():
    prompt = Prompt("p", "tools", "tools", "What is it?", "[]", "")
    turn = Turn("assistant", "\n<think>so and\nso</think>\n12<|user|>")
    _, said = conversation(prompt, [turn], enable_thinking=True)
    assert (said["reasoning"], said["content"]) == ("so and\nso", "12")
    call = "\n<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>it</arg_value>\n</tool_call><|observation|>"
    _, said = conversation(prompt, [Turn("assistant", call)], enable_thinking=False)
    assert said["tool_calls"] == [{"name": "find", "arguments": {"what": "it"}}] and said["content"] == ""


def test_prompts_without_room_are_refused_before_the_models_that_answer_are_trained(inputs, tmp_path):
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    joined = Scale(**with_experts(copy.deepcopy(tree))).phases[-1]
    add_phase(
        tree, "rl_rejection_sampling", like="sft", before="rl_reasoning", start="sft", objective=OBJECTIVE.model_dump()
    )
    alone = next(phase for phase in Scale(**tree).phases if phase.recipe.samples_solutions)
    prompts = SimpleNamespace(path=lambda name: tmp_path / name)

    def write(**questions: str) -> None:
        empty = {"kind": "exact", "tools": "[]", "answer": "0", "messages": "[]"}
        rows = [
            {**empty, "id": domain, "domain": domain, "prompt": question, "source": f"{domain}.jsonl"}
            for domain, question in questions.items()
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")

    long = "a question " * alone.recipe.sequence_length
    write(synthetic="a?", agentic="a?", math=long)
    for phase in (joined, alone):
        refuse_long_prompts(phase, prompts, inputs.tokenizer)
    write(synthetic="a?", agentic=long)
    refuse_long_prompts(alone, prompts, inputs.tokenizer)
    with pytest.raises(ValueError, match=r"domain agentic of expert rl_agentic: all 1 prompts \(of agentic\.jsonl\)"):
        refuse_long_prompts(joined, prompts, inputs.tokenizer)
    write(synthetic=long, math=long)
    with pytest.raises(ValueError, match=r"phase rl_rejection_sampling: all 2 prompts \(of math\.jsonl, synthetic\.js"):
        refuse_long_prompts(alone, prompts, inputs.tokenizer)


def test_too_few_right_answers_are_named_with_figures_and_the_fix(inputs, tuned, solutions):
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    changes = {"objective": OBJECTIVE.model_dump(), "mixture": {"chat": 0.5, "web": 0.5}, "max_epochs": 4.0}
    add_phase(tree, "rl_rejection_sampling", like="sft", before="rl_reasoning", start="sft", **changes)
    phase = next(phase for phase in Scale(**tree).phases if phase.recipe.samples_solutions)
    least = phase.recipe.num_tokens // 2 // 4
    enough = solutions.record.model_copy(update={"num_kept_tokens": least})
    refuse_too_few_solutions(phase, enough)
    few = enough.model_copy(update={"num_kept_tokens": least - 1})
    figures = rf"phase rl_rejection_sampling: \d+ of 128 answers to 8 prompts are right .*hold {least - 1} tokens, "
    with pytest.raises(ValueError, match=rf"{figures}.*at least {least}: raise objective.samples_per_prompt"):
        refuse_too_few_solutions(phase, few)
    wrong = sample(inputs, tuned, answers=("wrong",) * 8).record
    assert wrong.num_right == wrong.num_kept == 0
    with pytest.raises(ValueError, match=r"0 of 128 answers .*pass@16 0\.0000"):
        refuse_too_few_solutions(phase, wrong)
