"""Which prompts a phase asks by their pass rate, and in which order. A phase that is trained on measured prompts:
tests/evaluation/test_sample_solutions.py."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.text.tokenizer_layout import tokenizer_for_text
from tasks.training.policy.prompt_difficulty import SOLVED_FILE
from tests.support.training_inputs import TrainingInputs
from tests.training.test_objectives import GRPO
from tests.training.test_prompts_and_rewards import order_of, rows_of

SAMPLES = 16
BAND = {"samples_per_prompt": SAMPLES, "min_pass_rate": 0.25, "max_pass_rate": 0.75, "order": "easy_first"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("difficulty") / "home")


@pytest.fixture(scope="module")
def tokenizer(inputs):
    return tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))


def measured_order(tmp_path, tokenizer, num_right: dict[str, list[int]], band=BAND, **changes):
    """The order of prompts of which so many of 16 answers were right, by domain."""
    rows = [row for domain, counts in num_right.items() for row in rows_of(domain, len(counts))]
    counts = [count for own in num_right.values() for count in own]
    solved = [{"id": row["id"], "num_samples": 16, "num_right": n} for row, n in zip(rows, counts, strict=True)]
    pq.write_table(pa.Table.from_pylist(solved), tmp_path / SOLVED_FILE)
    objective = GRPO | {"difficulty": band}
    mixture = dict.fromkeys(num_right, 1.0)
    return order_of(
        tmp_path, tokenizer, rows, mixture, solved_path=tmp_path / SOLVED_FILE, objective=objective, **changes
    )


def ids(prompts) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_every_epoch_asks_the_prompts_in_the_band_from_easy_to_hard(tmp_path, tokenizer):
    counts = [0, 3, 4, 4, 4, 8, 8, 8, 12, 13, 16]
    order = measured_order(tmp_path, tokenizer, {"synthetic": counts}, num_groups=21)
    assert (order.num_too_easy, order.num_too_hard) == (2, 2)
    epochs = [ids(order.groups(start, start + 7, {})) for start in (0, 7, 14)]
    for epoch in epochs:
        assert [counts[int(name[-2:])] for name in epoch] == [12, 8, 8, 8, 4, 4, 4] and len({*epoch}) == 7
    assert len({tuple(epoch) for epoch in epochs}) > 1, "equal ones are shuffled"
    assert ids(order.groups(0, 3, {"synthetic": 2})) == ids(order.groups(2, 5, {})), "refills go on in the order"
    shuffled = measured_order(
        tmp_path, tokenizer, {"synthetic": counts}, BAND | {"order": "shuffled"}, num_groups=21, max_epochs=3.0
    )
    assert {*ids(shuffled.groups(0, 7, {}))} == {*epochs[0]} and ids(shuffled.groups(0, 7, {})) not in epochs


def test_the_hard_ones_are_those_that_are_right_sometimes(tmp_path, tokenizer):
    """As the report's second stage: no right answer among a few, and one among many."""
    hard = BAND | {"min_pass_rate": 0.001, "max_pass_rate": 0.1}
    order = measured_order(tmp_path, tokenizer, {"synthetic": [0, 1, 2, 8, 1]}, hard, num_groups=2)
    assert {*ids(order.groups(0, 2, {}))} == {"synthetic-01", "synthetic-04"}
    assert (order.num_too_easy, order.num_too_hard) == (2, 1)


def test_a_band_without_prompts_of_a_domain_is_refused_with_the_fix(tmp_path, tokenizer):
    said = (
        r"phase rl_reasoning: none of the 3 prompts of domain math has a pass rate of 0.25 to 0.75 .*: 1 are too easy"
    )
    with pytest.raises(ValueError, match=rf"{said}, 2 too hard. Widen the band, raise samples_per_prompt"):
        measured_order(tmp_path, tokenizer, {"synthetic": [8] * 12, "math": [0, 1, 13]})
    with pytest.raises(ValueError, match=r"12.0 passes over 1 prompts .*, widen the band of objective.difficulty, or"):
        measured_order(tmp_path, tokenizer, {"synthetic": [8, 0, 0]}, max_epochs=2.0)
    measured_order(tmp_path, tokenizer, {"synthetic": [8] * 6, "math": [4] * 6})
    rows = [*rows_of("synthetic", 4), *rows_of("chat", 1)]
    rows[-1] |= {"kind": "calculator"}
    with pytest.raises(ValueError, match=r"domain chat are tasks of environments \(calculator\), whose pass rate"):
        order_of(
            tmp_path,
            tokenizer,
            rows,
            {"synthetic": 1.0, "chat": 1.0},
            solved_path=tmp_path / SOLVED_FILE,
            objective=GRPO | {"difficulty": BAND},
        )
