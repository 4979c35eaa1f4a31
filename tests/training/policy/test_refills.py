"""Dynamic sampling: which further prompts replace groups without signal, and when a step stops asking."""

from __future__ import annotations

from collections import Counter

import pytest

from model.text.tokenizer_layout import tokenizer_for_text
from tasks.training.policy.rollouts import Rollout, sample_until_informative
from tests.support.training_inputs import TrainingInputs
from tests.training.policy.test_policy import OBJECTIVE, prompt_named, reward_of
from tests.training.test_prompts_and_rewards import order_of, rows_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    inputs = TrainingInputs(tmp_path_factory.mktemp("refills") / "home")
    return tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))


def test_further_prompts_are_of_the_lost_domains_and_no_prompt_is_left_out_or_asked_twice(tmp_path, tokenizer):
    """Steps of 4 groups, 3 of synthetic and 1 of math, each losing what the list says."""
    rows = [*rows_of("synthetic", 40), *rows_of("math", 40)]
    order = order_of(tmp_path, tokenizer, rows, {"synthetic": 3.0, "math": 1.0}, num_groups=12)
    refilled, asked = Counter(), []
    for start, lost in ((0, ["math", "synthetic", "math"]), (4, []), (8, ["synthetic"])):
        step = order.groups(start, start + 4, refilled)
        further = order.further(start + 4, lost, refilled)
        assert [prompt.domain for prompt in further] == lost
        refilled.update(lost)
        asked += [*step, *further]
    assert Counter(prompt.domain for prompt in asked) == {"synthetic": 11, "math": 5}
    ids = [prompt.id for prompt in asked]
    assert len({*ids}) == len(ids)
    plain = order_of(tmp_path, tokenizer, rows, {"synthetic": 1.0}, num_groups=11).groups(0, 11, {})
    own = [prompt.id for prompt in asked if prompt.domain == "synthetic"]
    assert own == [prompt.id for prompt in plain], "the order of a domain does not depend on what was refilled"
    assert {*ids} == {prompt.id for prompt in order.asked(refilled)}


def test_further_prompts_end_where_a_later_group_would_have_none(tmp_path, tokenizer):
    order = order_of(tmp_path, tokenizer, rows_of("synthetic", 10), {"synthetic": 1.0}, num_groups=8, max_epochs=1.0)
    first = order.further(4, ["synthetic"] * 3, {})
    assert len(first) == 2 and not order.further(4, ["synthetic"], {"synthetic": 2})
    later = order.groups(4, 8, {"synthetic": 2})
    asked = [*order.groups(0, 4, {}), *first, *later]
    assert len({prompt.id for prompt in asked}) == 10


def test_a_step_asks_again_for_what_is_lost_until_the_bound():
    """Groups of the prompts named e have equal rewards; what is asked further is named in turn."""
    calls, supply = [], iter("eueuuu")
    size = OBJECTIVE.samples_per_prompt

    def sample(prompts, first_group):
        calls.append(([prompt.id for prompt in prompts], first_group))
        return [
            Rollout(prompt, [1], [2], [-1.0], "", reward_of(float(prompt.id == "u" and number == 0)))
            for prompt in prompts
            for number in range(size)
        ]

    def further(domains):
        return [prompt_named(next(supply)) for _ in domains]

    prompts = [prompt_named(name) for name in "eue"]
    rollouts = sample_until_informative(sample, prompts, further, 2, size)
    assert calls == [(["e", "u", "e"], 0), (["e", "u"], 3), (["e"], 5)]
    assert [rollout.prompt.id for rollout in rollouts[::size]] == ["e", "u", "e", "e", "u", "e"]
    calls.clear()
    sample_until_informative(sample, prompts, lambda domains: [], 2, size)
    sample_until_informative(sample, [prompt_named("u")], further, 2, size)
    sample_until_informative(sample, prompts, further, 0, size)
    assert [first for _, first in calls] == [0, 0, 0], "nothing to ask, nothing lost, no refill allowed"
