"""The prompts of a policy phase in their order, and the parts of a reward; a phase on mixed prompts, killed and
resumed."""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, normalizers

from configs.schema import MixtureWaypoint, PolicyObjective, RewardRecipe
from infra.step import Output, step
from model.text.chat_template import encode
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.prompts.verifiers import WrittenAnswer
from tasks.training.policy import prompts
from tasks.training.policy.prompt_order import LeftOutPrompts, PromptOrder, domains_of_groups, refuse_missing_prompts
from tasks.training.policy.prompts import Prompt, with_room
from tasks.training.policy.rewards import is_in_form, overlong_punishment, reward_answers, reward_metrics
from tests.support.training_inputs import SEQUENCE_LENGTH, ToyPrompts, TrainingInputs, compute, metrics_of
from tests.training.test_objectives import GRPO, rl_recipe, sft_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill

MIXED = [{"at_share": share, "mixture": {"synthetic": 1.0, "math": 1.0, "code": 1.0}} for share in (0.0, 1.0)]
KINDS = (("synthetic", "exact", "{}"), ("math", "math", "{}"), ("code", "code_with_tests", "assert f() == {}"))


def rows_of(domain: str, count: int, prompt: str = "a?") -> list[dict]:
    empty = {"domain": domain, "kind": "exact", "prompt": prompt, "tools": "[]", "messages": "[]"} | {
        "source": f"{domain}.jsonl"
    }
    return [{**empty, "id": f"{domain}-{number:02}", "answer": str(number)} for number in range(count)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("prompts") / "home")


@pytest.fixture(scope="module")
def tokenizer(inputs):
    return tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))


def order_of(tmp_path, tokenizer, rows, mixture=None, num_groups: int = 12, solved_path=None, **changes) -> PromptOrder:
    """The order of a phase of so many groups."""
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    recipe = rl_recipe(num_steps=1, **changes)
    points = [{"at_share": share, "mixture": mixture or {"synthetic": 1.0}} for share in (0.0, 1.0)]
    num_tokens = num_groups * recipe.objective.samples_per_prompt * recipe.sequence_length
    values = recipe.model_dump() | {"num_tokens": num_tokens, "course_num_tokens": num_tokens, "prompt_mixture": points}
    return PromptOrder(path, tokenizer, type(recipe).model_validate(values), solved_path)


def test_an_epoch_asks_every_prompt_once_in_an_order_of_its_own(tmp_path, tokenizer):
    rows = rows_of("synthetic", 11)
    order = order_of(tmp_path, tokenizer, rows, num_groups=33)
    epochs = [[prompt.id for prompt in order.groups(start, start + 11, {})] for start in (0, 11, 22)]
    assert all(sorted(epoch) == [row["id"] for row in rows] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [prompt.id for prompt in order.groups(9, 13, {})] == [*epochs[0][9:], *epochs[1][:2]]
    other = order_of(tmp_path, tokenizer, rows, num_groups=33, seed=47)
    assert [prompt.id for prompt in other.groups(0, 11, {})] != epochs[0]


def test_domains_are_asked_in_their_shares_at_every_moment_and_absent_ones_are_left_out(tmp_path, tokenizer):
    rows = [*rows_of("synthetic", 30), *rows_of("math", 30), *rows_of("web", 30)]
    mixture = {"synthetic": 3.0, "math": 1.0, "code": 4.0, "web": 0.0}
    asked = order_of(tmp_path, tokenizer, rows, mixture, num_groups=40).groups(0, 40, {})
    for stop in range(1, 41):
        num_math = sum(prompt.domain == "math" for prompt in asked[:stop])
        assert abs(num_math - stop / 4) <= 1
    assert Counter(prompt.domain for prompt in asked) == {"synthetic": 30, "math": 10}
    assert len({prompt.id for prompt in asked}) == 40, "no prompt twice before all of its domain"


def test_a_mixture_with_waypoints_moves_along_its_line():
    ends = [MixtureWaypoint(at_share=0.0, mixture={"math": 1.0}), MixtureWaypoint(at_share=1.0, mixture={"code": 1.0})]
    chosen = domains_of_groups("rl", tuple(ends), ["code", "math"], 100)
    shares = [float(chosen[start : start + 25].mean()) for start in (0, 25, 50, 75)]
    assert shares == pytest.approx([0.875, 0.625, 0.375, 0.125], abs=0.05) and chosen.sum() == 50


def test_a_mixture_without_prompts_and_too_many_passes_over_a_domain_are_refused(tmp_path, inputs, tokenizer):
    with pytest.raises(ValueError, match=r"phase \w+: none of the mixture's domains math has prompts: name domains"):
        order_of(tmp_path, tokenizer, rows_of("synthetic", 3), {"math": 1.0})
    rows = [*rows_of("synthetic", 30), *rows_of("math", 2)]
    even = {"synthetic": 1.0, "math": 1.0}
    with pytest.raises(
        ValueError, match=r"6 groups of answers need 3.0 passes over 2 prompts of domain math, max_epochs is 2.0"
    ):
        order_of(tmp_path, tokenizer, rows, even, max_epochs=2.0)
    order_of(tmp_path, tokenizer, rows, even, max_epochs=3.0)
    recipe = rl_recipe(prompt_mixture=MIXED, max_epochs=1.0)

    def check(*rows: list[dict]) -> LeftOutPrompts:
        pq.write_table(pa.Table.from_pylist([row for own in rows for row in own]), tmp_path / "prompts.parquet")
        given: Any = SimpleNamespace(path=lambda name: tmp_path / name)
        return refuse_missing_prompts(recipe, given, inputs.tokenizer)

    long = rows_of("code", 3, prompt="a question that is too long")
    assert check(rows_of("math", 16), rows_of("web", 1), long) == ({"code": 3}, ("code", "synthetic"))
    with pytest.raises(ValueError, match=r"16 groups of answers need 1\.1 passes over 15 prompts of domain math"):
        check(rows_of("math", 15), rows_of("web", 100))
    with pytest.raises(ValueError, match="none of the mixture's domains synthetic, math, code has prompts"):
        check(rows_of("web", 100))
    with pytest.raises(
        ValueError,
        match=r"phase \w+: all 3 prompts \(of code\.jsonl\) have more than 12 tokens, .* raise the phase's seq",
    ):
        check(long, rows_of("web", 100))


def test_prompts_longer_than_the_window_are_counted_and_never_asked(tmp_path, tokenizer):
    rows = [*rows_of("synthetic", 5), *rows_of("math", 4, prompt="a question that is too long")]
    order = order_of(tmp_path, tokenizer, rows, {"synthetic": 1.0, "math": 1.0})
    assert order.num_too_long == 4 and {prompt.domain for prompt in order.groups(0, 12, {})} == {"synthetic"}
    assert order_of(tmp_path, tokenizer, rows, {"synthetic": 1.0}).num_too_long == 0


@pytest.mark.parametrize("rewrites", [False, True])
def test_prompts_with_room_are_those_that_encode_to_few_tokens_and_few_are_encoded(tokenizer, monkeypatch, rewrites):
    """Lengths on both sides of the room, of a tokenizer with a token per byte, and of one that rewrites the text."""
    opened, encoded = Tokenizer.from_str(tokenizer.to_str()), []
    opened.encode_special_tokens = True
    if rewrites:
        opened.normalizer = normalizers.Replace("a", "aaaa")  # pyright: ignore[reportAttributeAccessIssue]
    asked = [Prompt(str(length), "math", "exact", "a" * length, "[]", "1") for length in range(1, 120)]
    objective = rl_recipe().objective
    sequence_length = objective.max_new_tokens + 100
    ids = [prompt.token_ids(opened, objective.enable_thinking) for prompt in asked]
    monkeypatch.setattr(prompts, "encode", lambda *given: encoded.append(given) or encode(*given))
    kept = with_room(asked, opened, sequence_length, objective)
    assert kept == [prompt for prompt, own in zip(asked, ids, strict=True) if len(own) <= 100]
    assert 0 < len(kept) < len(asked) and (len(encoded) == len(asked) if rewrites else len(encoded) < 40)


@pytest.mark.parametrize(
    ("text", "enable_thinking", "is_good"),
    [
        ("\n<think>so</think>\n5<|user|>", True, True),
        ("<think></think>5<|observation|>", True, True),
        ("\n5<|user|>", False, True),
        ("\n5<|user|>", True, False),
        ("\n<think>so</think>\n5<|user|>", False, False),
        ("\n<think>so</think>\n<|user|>", True, False),
        ("\n<think>so\n5<|user|>", True, False),
        ("\nso</think>\n5<|user|>", True, False),
        ("\n<think>so</think>\n<think>5</think>6<|user|>", True, False),
        ("5<think>so</think>\n5<|user|>", True, False),
        ("\n<think>so</think>\n5", True, False),
        ("\n<think>so</think>\n5<|user|>more<|user|>", True, False),
        ("<|user|>", False, False),
    ],
)
def test_an_answer_is_in_form_with_one_block_of_reasoning_one_answer_and_one_end(text, enable_thinking, is_good):
    assert is_in_form(WrittenAnswer(text, text.endswith("|>")), enable_thinking) is is_good


def test_the_punishment_of_length_is_the_formula_of_dapo():
    """Equation 13 of arXiv 2503.14476 with L_max 20 and L_cache 4."""
    for size in range(1, 21):
        expected = 0.0 if size <= 16 else (16 - size) / 4
        assert overlong_punishment(size, 20, 4) == expected
    assert overlong_punishment(20, 20, 4) == -1.0


def objective_with(**weights: float) -> PolicyObjective:
    rewards = {"verified": 0.0, "format": 0.0, "length": 0.0, "overlong_tokens": 2, "reward_model": 0.0} | weights
    return PolicyObjective(**GRPO | {"rewards": rewards})


def test_the_reward_is_the_weighted_sum_of_its_parts_and_all_are_kept():
    prompt = Prompt("p", "synthetic", "exact", "?", "[]", "5")
    texts = ("5<|user|>", "6<|user|>", "5", "<|user|>")
    written = [WrittenAnswer(text, text.endswith("|>")) for text in texts]
    objective = objective_with(verified=1.0, format=0.5, length=0.25)
    rewards = reward_answers([prompt] * 4, written, [2, 3, 4, 1], objective)
    assert [reward.verified for reward in rewards] == [1.0, 0.0, 0.0, 0.0]
    assert [reward.format for reward in rewards] == [1.0, 1.0, 0.0, 0.0]
    assert [reward.length for reward in rewards] == [0.0, -0.5, -1.0, 0.0]
    assert [reward.total for reward in rewards] == [1.5, 0.375, -0.25, 0.0]
    metrics = {"pass_rate": 0.25, "reward_format": 0.5, "reward_length": -0.375, "unverified": 0.0}
    assert reward_metrics(rewards) == metrics
    only = reward_answers([prompt] * 4, written, [2, 3, 4, 1], objective_with(verified=1.0))
    assert [(each.total, math.copysign(1, each.total)) for each in only] == [(1.0, 1), *[(0.0, 1)] * 3]
    assert reward_metrics(only) == metrics, "the parts do not depend on what they weigh"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "rewards gives every part the weight 0: give one of verified, format, length and reward_model more"),
        (
            {"verified": 1.0, "overlong_tokens": 5},
            r"rewards.overlong_tokens \(5\) must not exceed max_new_tokens \(4\)",
        ),
    ],
)
def test_rewards_that_reward_nothing_or_punish_every_answer_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        objective_with(**weights)
    assert RewardRecipe(verified=0.0, format=0.0, length=1.0, overlong_tokens=1, reward_model=0.0).length == 1.0


@step(content=("prompts.parquet",))
def write_mixed_prompts(*, output: Output) -> ToyPrompts:
    """`a?` to `d?` of every kind, and one prompt without room for its answer; no program is ever right."""
    rows = []
    for domain, kind, answer in KINDS:
        for number in range(4):
            wanted = answer.format(number % 2)
            expected = json.dumps({"tests": wanted, "module": ""}) if domain == "code" else wanted
            place = {"id": f"{domain}-{number}", "domain": domain, "kind": kind, "tools": "[]"}
            rows.append(
                {
                    **place,
                    "prompt": f"{chr(97 + number)}?",
                    "answer": expected,
                    "source": "toys.jsonl",
                    "messages": "[]",
                }
            )
    rows.append({**rows[0], "id": "long", "prompt": "a?" * SEQUENCE_LENGTH})
    pq.write_table(pa.Table.from_pylist(rows), output.path("prompts.parquet"))
    return ToyPrompts(num_prompts=len(rows))


def mixed_arguments(home: TrainingInputs, **changes):
    """A phase on prompts of all kinds, after SFT."""
    rewards = {"verified": 1.0, "format": 0.1, "length": 0.1, "overlong_tokens": 2, "reward_model": 0.0}
    recipe = rl_recipe(num_steps=6, prompt_mixture=MIXED, objective=GRPO | {"rewards": rewards})
    given = home.prompt_arguments(recipe, ("0",), **changes)
    return given | {"prompts": compute(home.store, write_mixed_prompts)}


@pytest.fixture(scope="module")
def tuned(inputs):
    return inputs.train(inputs.chat_arguments(sft_recipe()))


@pytest.fixture(scope="module")
def mixed(inputs, tuned):
    return inputs.train(mixed_arguments(inputs, start=tuned))


def test_a_phase_on_prompts_of_several_kinds_is_rewarded_by_kind(mixed):
    assert mixed.record.num_long_prompts == 1
    lines = metrics_of(mixed.path("metrics.jsonl"))
    groups = [json.loads(line) for line in mixed.path("rollouts.jsonl").read_text().splitlines()]
    assert {group["kind"] for group in groups} == {kind for _, kind, _ in KINDS}
    for group in groups:
        for total, parts, text in zip(group["rewards"], group["parts"], group["samples"], strict=True):
            assert total == pytest.approx(parts["verified"] + 0.1 * parts["format"] + 0.1 * parts["length"])
            answer, end, _ = text.partition("<|user|>")
            is_right = answer.strip() == group["answer"] and bool(end) and group["kind"] != "code_with_tests"
            assert parts["verified"] == float(is_right) and parts["has_verdict"]
    assert any(line["pass_rate"] for line in lines) and all(line["unverified"] == 0 for line in lines)
    assert all(line["reward_length"] <= 0 <= line["reward_format"] for line in lines)


@pytest.mark.long
def test_a_killed_phase_on_prompts_of_several_kinds_continues_to_the_same_result(mixed, tuned, tmp_path):
    other = TrainingInputs(tmp_path / "home")
    resumed = train_through_a_kill(other, mixed_arguments(other, start=tuned, resources=SAVE_EVERY_STEP))
    assert resumed.digest == mixed.digest
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert metrics_of(resumed.path(name)) == metrics_of(mixed.path(name))
