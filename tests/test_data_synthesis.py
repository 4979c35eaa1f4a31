"""Generated problems are true, and what is asked was never trained on."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from configs.schema import SynthesisRecipe
from tasks.data.arithmetic import OPERATIONS, choose_problems, is_evaluation_pair, verify_lines
from tasks.data.synthesize_problems import synthesize_problems
from tests.data_inputs import compute, rows

RECIPE = SynthesisRecipe(
    operations=("+", "-", "*"), num_training_problems=2000, num_evaluation_problems=150, max_operand=30, problems_per_document=25,
    num_chats=400, thinking_share=0.25, num_prompts=300,
)  # fmt: skip
LINE = re.compile(r"(\d+) ([-+*]) (\d+) = (-?\d+)")


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return compute(synthesize_problems, tmp_path_factory.mktemp("synthesis"), recipe=RECIPE)


def conversations(problems) -> list[tuple[str, str, str]]:
    """(question, reasoning, answer) of every conversation."""
    found = []
    for row in rows(problems, "chats.parquet"):
        asked, answered = json.loads(row["messages"])
        assert (asked["role"], answered["role"], row["tools"]) == ("user", "assistant", "[]")
        found.append((asked["content"], answered["reasoning"], answered["content"]))
    return found


def operands(text: str) -> frozenset[str]:
    """The operand pair that a text speaks of first, in either order."""
    return frozenset(re.findall(r"\d+", text)[:2])


def equations(problems) -> tuple[list[tuple], list[tuple]]:
    """(a, sign, b, result) of every training and of every evaluation problem."""
    training = [line for row in rows(problems, "documents/*.parquet") for line in row["text"].splitlines()]
    asked = [row["prompt"] + row["answer"] for row in rows(problems, "problems.parquet")]
    return tuple([LINE.fullmatch(line).groups() for line in lines] for lines in (training, asked))


def test_every_equation_is_true_and_there_are_as_many_as_asked_for(problems):
    training, asked = equations(problems)
    assert (len(set(training)), len(set(asked))) == (2000, 150)
    for a, sign, b, result in [*training, *asked]:
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(result)
    assert {sign for _, sign, _, _ in training} == {sign for _, sign, _, _ in asked} == {"+", "-", "*"}


def test_no_operand_pair_is_both_trained_on_and_asked(problems):
    training, asked = ({frozenset((a, b)) for a, _, b, _ in side} for side in equations(problems))
    assert not training & asked


def test_the_side_of_a_pair_does_not_depend_on_its_order():
    a, b = np.divmod(np.arange(10000), 100)
    assert (is_evaluation_pair(a, b) == is_evaluation_pair(b, a)).all()
    assert 0.09 < is_evaluation_pair(a, b).mean() < 0.16


def test_prompts_and_answers_join_as_the_training_text_writes_them(problems):
    for row in rows(problems, "problems.parquet"):
        assert re.fullmatch(r"\d+ [-+*] \d+ =", row["prompt"]) and re.fullmatch(r" -?\d+", row["answer"])
        assert f" {row['operation']} " in row["prompt"]
    assert all(row["text"].endswith("\n") and row["domain"] == "synthetic" for row in rows(problems, "documents/*.parquet"))


def test_all_problems_of_a_side_can_be_had_and_one_more_is_refused():
    count = 0
    for wanted in (False, True):
        with pytest.raises(ValueError, match=r"operands up to 9 give only\s(\d+): raise synthesize\.max_operand") as refused:
            choose_problems(10**6, 9, OPERATIONS, wanted)
        most = int(re.search(r"give only (\d+)", str(refused.value))[1])
        assert len({tuple(problem) for problem in np.transpose(choose_problems(most, 9, OPERATIONS, wanted)).tolist()}) == most
        count += most
    assert count == 300


def test_the_verifier_refuses_false_equations():
    lines = ["1 + 2 = 3", "1 + 2 = 4", "9 - 12 = -3", "9 - 12 = 3", "7 * 0 = 0", "7 * 0 = 7", "6 * 7 = 42", "6 * 7 = 43"]
    assert verify_lines(np.array(lines)).tolist() == [True, False] * 4


def test_a_conversation_asks_a_training_problem_and_reasons_in_its_share(problems):
    training, _ = equations(problems)
    stated = {f"{a} {sign} {b} = {result}" for a, sign, b, result in training}
    chats = conversations(problems)
    for question, reasoning, answer in chats:
        line = f"{question.removeprefix('What is ').removesuffix('?')} = {answer}"
        assert line in stated and reasoning in ("", line)
    assert len({question for question, *_ in chats}) == problems.record.num_chats == 400
    assert 0.17 < np.mean([bool(reasoning) for _, reasoning, _ in chats]) < 0.33


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_thinking_share_goes_from_none_to_all(share, tmp_path):
    made = compute(synthesize_problems, tmp_path, recipe=RECIPE.model_copy(update={"thinking_share": share}))
    assert {bool(reasoning) for _, reasoning, _ in conversations(made)} == {share == 1.0}


def test_no_prompt_of_reinforcement_learning_is_in_a_document_or_a_conversation_or_evaluated(problems):
    prompts = {row["prompt"] for row in rows(problems, "prompts.parquet")}
    training, asked = equations(problems)
    assert len(prompts) == problems.record.num_prompts == 300
    assert not prompts & {f"What is {a} {sign} {b}?" for a, sign, b, _ in training}
    assert not prompts & {question for question, *_ in conversations(problems)}
    evaluated = {frozenset((a, b)) for a, _, b, _ in asked}
    assert not evaluated & {operands(prompt) for prompt in prompts}
    assert not evaluated & {operands(question) for question, *_ in conversations(problems)}


def test_prompts_carry_their_true_answer_and_evaluation_asks_the_same_problem_twice(problems):
    for row in rows(problems, "prompts.parquet"):
        a, sign, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", row["prompt"]).groups()
        assert int(row["answer"]) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert row["domain"] == "synthetic" and row["family"] == f"arithmetic {sign}"
    for row in rows(problems, "problems.parquet"):
        assert row["question"] == f"What is {row['prompt'].removesuffix(' =')}?"


def test_only_the_operations_asked_for_are_used(tmp_path):
    counts = {"num_training_problems": 300, "num_evaluation_problems": 50, "num_chats": 50, "num_prompts": 50}
    few = RECIPE.model_copy(update={"operations": ("-",), **counts})
    made = compute(synthesize_problems, tmp_path, recipe=few)
    assert {row["family"] for row in rows(made, "prompts.parquet")} == {"arithmetic -"}
    assert {sign for side in equations(made) for _, sign, _, _ in side} == {"-"}
