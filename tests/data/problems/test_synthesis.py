"""Generated problems are true, and what is asked was never trained on."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest

from configs.schema import SynthesisRecipe
from tasks.data.environments.environments import OPENERS, TOOLS
from tasks.data.problems import equation_problems, logic_problems, system_problems
from tasks.data.problems.arithmetic import (
    OPERATIONS,
    answers,
    choose_problems,
    is_evaluation_pair,
    terms,
    verify_lines,
    verify_worked,
    worked,
)
from tasks.data.problems.reasoned_problem import ReasonedProblem
from tasks.data.problems.reasoning_families import FAMILIES, Family, choose_reasoned
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.sandbox.code_sandbox import run_trusted
from tests.support.data_inputs import compute, rows

RECIPE = SynthesisRecipe(
    operations=("+", "-", "*"),
    num_training_problems=2000,
    num_evaluation_problems=150,
    max_operand=30,
    problems_per_document=25,
    num_chats=400,
    thinking_share=0.25,
    worked_share=0.5,
    num_prompts=300,
    families={},
    difficulty=1,
    num_held_out_problems=0,
    prompt_families=(),
    tasks={},
    num_evaluation_tasks=0,
    num_task_chats=0,
    num_safety_chats=0,
    num_safety_prompts=0,
)
LINE = re.compile(r"(\d+) ([-+*]) (\d+) = (-?\d+)")


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return compute(synthesize_problems, tmp_path_factory.mktemp("synthesis"), recipe=RECIPE)


def conversations(problems) -> list[tuple[str, str, str]]:
    """(question, reasoning, answer) of every conversation."""
    chats = []
    for row in rows(problems, "chats.parquet"):
        asked, answered = json.loads(row["messages"])
        assert (asked["role"], answered["role"], row["tools"]) == ("user", "assistant", "[]")
        chats.append((asked["content"], answered["reasoning"], answered["content"]))
    return chats


def operands(text: str) -> frozenset[str]:
    """The operand pair that a text speaks of first, in either order."""
    return frozenset(re.findall(r"\d+", text)[:2])


def equations(problems) -> tuple[list[tuple], list[tuple]]:
    """(a, sign, b, result) of every training and of every evaluation problem."""
    documents = [
        row["text"] for row in rows(problems, "documents/*.parquet") if row["source"] == "synthetic/arithmetic"
    ]
    training = [line for text in documents for line in text.splitlines()]
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
    assert all(
        row["text"].endswith("\n") and row["domain"] == "synthetic" for row in rows(problems, "documents/*.parquet")
    )


def test_all_problems_of_a_side_can_be_had_and_one_more_is_refused():
    count = 0
    for wanted in (False, True):
        with pytest.raises(
            ValueError, match=r"operands up to 9 give only\s(\d+): raise synthesize\.max_operand"
        ) as refused:
            choose_problems(10**6, 9, OPERATIONS, wanted)
        most = int(re.search(r"give only (\d+)", str(refused.value))[1])
        assert (
            len({tuple(problem) for problem in np.transpose(choose_problems(most, 9, OPERATIONS, wanted)).tolist()})
            == most
        )
        count += most
    assert count == 300


def test_the_verifier_refuses_false_equations():
    lines = [
        "1 + 2 = 3",
        "1 + 2 = 4",
        "9 - 12 = -3",
        "9 - 12 = 3",
        "7 * 0 = 0",
        "7 * 0 = 7",
        "6 * 7 = 42",
        "6 * 7 = 43",
    ]
    assert verify_lines(np.array(lines)).tolist() == [True, False] * 4


def test_a_conversation_asks_a_training_problem_and_reasons_in_its_share(problems):
    training, _ = equations(problems)
    stated = {f"{a} {sign} {b} = {result}" for a, sign, b, result in training}
    chats = conversations(problems)
    for question, reasoning, answer in chats:
        line = f"{question.removeprefix('What is ').removesuffix('?')} = {answer}"
        assert line in stated and reasoning in ("", line, *works_of([line]))
    assert len({question for question, *_ in chats}) == problems.record.num_chats == 400
    assert 0.17 < np.mean([bool(reasoning) for _, reasoning, _ in chats]) < 0.33
    assert 0.3 < np.mean([" = " not in reasoning for _, reasoning, _ in chats if reasoning]) < 0.7


def works_of(lines: list[str]) -> list[str]:
    """How problems are worked out, from their lines."""
    parts = [LINE.fullmatch(line).groups() for line in lines]
    operation = np.array([OPERATIONS.index(sign) for _, sign, _, _ in parts])
    a, b = (np.array([int(part[number]) for part in parts]) for number in (0, 2))
    return worked(operation, a, b).tolist()


def test_sums_and_differences_are_worked_by_columns_and_products_by_digits():
    lines = {
        "47 + 38 = 85": "7+8=15\n4+3+1=8",
        "5 + 995 = 1000": "5+5=10\n0+9+1=10\n0+9+1=10",
        "52 - 17 = 35": "12-7=5\n5-1-1=3",
        "17 - 52 = -35": "-(52-17)\n12-7=5\n5-1-1=3",
        "1000 - 1 = 999": "10-1=9\n10-0-1=9\n10-0-1=9\n1-0-1=0",
        "0 - 0 = 0": "0-0=0",
        "45 * 7 = 315": "45*7=315",
        "45 * 47 = 2115": "45*7=315\n45*40=1800\n315+1800=2115",
    }
    assert works_of(list(lines)) == list(lines.values())
    assert verify_worked(np.array(list(lines)), np.array(list(lines.values()))).all()


@pytest.mark.parametrize("most", [19, 99, 9999, 999_999_999])
def test_every_work_is_verified_and_one_with_another_number_is_refused(most):
    operation, a, b = choose_problems(300, most, OPERATIONS, for_evaluation=False)
    results = answers(operation, a, b).tolist()
    lines = np.array(
        [f"{text} = {result}" for text, result in zip(terms(operation, a, b).tolist(), results, strict=True)]
    )
    works = worked(operation, a, b)
    assert verify_worked(lines, works).all()
    for pattern in (r"\d(?=\n|$)", r"\d(?=\D)"):
        wrong = [re.sub(pattern, lambda digit: str((int(digit[0]) + 1) % 10), work, count=1) for work in works.tolist()]
        assert not verify_worked(lines, np.array(wrong)).any()


def test_documents_work_out_every_problem_that_they_state(problems):
    texts = [row["text"] for row in rows(problems, "documents/*.parquet") if row["source"].endswith("-worked")]
    found = re.findall(r"Question: What is (.+)\?\n((?:.+\n)+?)Answer: (.+)\n", "".join(texts))
    lines = [f"{question} = {answer}" for question, _, answer in found]
    assert [work.rstrip() for _, work, _ in found] == works_of(lines)
    assert {LINE.fullmatch(line).groups() for line in lines} == set(equations(problems)[0])


def test_no_column_that_training_works_out_is_asked():
    a, b = np.divmod(np.arange(10000), 100)
    asked = is_evaluation_pair(a, b)
    works = worked(np.where(np.arange(20000) < 10000, 0, 1), np.tile(a, 2), np.tile(b, 2))
    columns = {tuple(map(int, pair)) for work in works.tolist() for pair in re.findall(r"^(\d+)[+-](\d+)", work, re.M)}
    assert len(columns) > 100 and not columns & set(zip(a[asked].tolist(), b[asked].tolist(), strict=True))


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


def test_requests_to_decline_or_answer_are_conversations_and_prompts_and_others_are_held_out(tmp_path):
    counts = {"num_safety_chats": 60, "num_safety_prompts": 40, "thinking_share": 0.5}
    made = compute(synthesize_problems, tmp_path, recipe=RECIPE.model_copy(update=counts))
    chats = {question: (thought, answer) for question, thought, answer in conversations(made) if " is " not in question}
    prompts = [row for row in rows(made, "prompts.parquet") if row["domain"] == "safety"]
    held_out = {row["prompt"] for row in rows(made, "safety.parquet")}
    asked = {row["prompt"] for row in prompts}
    assert (len(chats), len(asked), made.record.num_safety_requests) == (60, 40, len(held_out))
    assert not asked & set(chats) and not held_out & (asked | set(chats))
    labels = [json.loads(row["answer"])["label"] for row in prompts]
    assert (
        labels.count("harmful") == labels.count("harmless") == 20 == sum(row["family"] == "harmful" for row in prompts)
    )
    assert sum(answer == "I can't help with that." for _, answer in chats.values()) == 30
    assert {thought for thought, _ in chats.values()} == {"", "This would harm someone.", "This harms nobody."}


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


SIX = ("brackets", "code", "equations", "logic", "quadratics", "systems")
REASONING = RECIPE.model_copy(
    update={
        "num_training_problems": 300,
        "num_chats": 150,
        "num_prompts": 20,
        "families": dict.fromkeys(SIX, 30),
        "difficulty": 2,
        "num_held_out_problems": 15,
        "prompt_families": ("equations", "logic"),
    }
)


@pytest.fixture(scope="module")
def reasoned(tmp_path_factory):
    return compute(synthesize_problems, tmp_path_factory.mktemp("reasoning"), recipe=REASONING)


def test_large_equations_are_verified_to_the_last_digit():
    """By floats, one false product in four of nine digits was taken for true."""
    a, b = np.array([999_999_937, 123_456_789, 7, 0]), np.array([999_999_929, 987_654_321, 0, 5])
    for wrong in (0, 1, -1):
        lines = np.array([f"{x} * {y} = {x * y + wrong}" for x, y in zip(a.tolist(), b.tolist(), strict=True)])
        assert verify_lines(lines).tolist() == [wrong == 0] * 4


def test_a_problem_in_another_order_has_the_same_key():
    """Half of the held-out puzzles stood in training with the two people of a sentence swapped."""
    assert equation_problems.write([3, 4, 2, 9, 5]).key == equation_problems.write([2, 9, 3, 4, 5]).key
    assert system_problems.write([1, 2, 3, 4, 5, 6]).key == system_problems.write([3, 4, 1, 2, 5, 6]).key
    puzzle = logic_problems.write([3, 0, 3, 0, 4, 1, 2, 1, 2, 0, 0])
    swapped = logic_problems.write([3, 5, 3, 0, 4, 2, 2, 0, 1, 1, 1])
    assert puzzle.key == swapped.key and puzzle.question != swapped.question


def test_puzzles_that_differ_in_order_and_names_alone_are_on_one_side():
    generator = np.random.Generator(np.random.Philox(46))
    rows = logic_problems.draw(generator.integers(0, 1 << 62, (400, 24)), 4)[:60].tolist()
    kin = [logic_problems.write(row).kin for row in rows]
    for row, own in zip(rows, kin, strict=True):
        count = row[0]
        order = generator.permutation(count).tolist()
        position = [order.index(number) for number in range(count)]
        claims, one, other = (row[2 + part * count : 2 + (part + 1) * count] for part in range(3))
        moved = [
            count,
            7,
            *(claims[n] for n in order),
            *(position[one[n]] for n in order),
            *(position[other[n]] for n in order),
        ]
        assert logic_problems.write(moved).kin == own
    assert len(set(kin)) > 50


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_step_of_difficulty_changes_the_problems(name):
    chosen = [
        [problem.question for problem in choose_reasoned(name, FAMILIES[name], 40, step, False)[0]]
        for step in range(1, 6)
    ]
    assert all(easier != harder for easier, harder in itertools.pairwise(chosen))
    assert sum(map(len, chosen[0])) < sum(map(len, chosen[-1]))


@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("difficulty", [1, 3, 5])
def test_each_family_gives_verified_problems_whose_evaluation_part_is_never_trained_on(name, difficulty):
    family = FAMILIES[name]
    training, num_rejected = choose_reasoned(name, family, 150, difficulty, for_evaluation=False)
    held_out, _ = choose_reasoned(name, family, 40, difficulty, for_evaluation=True)
    assert num_rejected == 0 and all(family.verify(training)) and all(family.verify(held_out))
    keys = [problem.key for problem in training]
    assert len(set(keys)) == 150 and not set(keys) & {problem.key for problem in held_out}
    assert not {problem.question for problem in training} & {problem.question for problem in held_out}
    assert training[:50] == choose_reasoned(name, family, 50, difficulty, for_evaluation=False)[0]


@pytest.mark.parametrize("name", SIX)
def test_the_verifier_of_each_family_refuses_the_answer_of_another_problem(name):
    problems, _ = choose_reasoned(name, FAMILIES[name], 60, 2, for_evaluation=False)
    others = [problem._replace(answer=other.answer) for problem, other in itertools.pairwise(problems)]
    wrong = [problem for problem, original in zip(others, problems, strict=False) if problem.answer != original.answer]
    refused = FAMILIES[name].verify(wrong).count(False)
    if name == "code":
        assert refused > 0.9 * len(wrong), "another function may pass the tests by chance"
    else:
        assert refused == len(wrong) > 20
    assert FAMILIES[name].verify([problems[0]._replace(question="Who knows?")]) == [False]


def test_wrong_reasoning_is_refused_too():
    for name in ("brackets", "equations", "systems", "quadratics"):
        (problem, *_), _ = choose_reasoned(name, FAMILIES[name], 5, 2, for_evaluation=False)
        broken = re.sub(r"-?\d+(?=\D*$)", "987654", problem.reasoning, count=1)
        assert FAMILIES[name].verify([problem, problem._replace(reasoning=broken)]) == [True, False], (name, broken)


def test_what_the_verifier_refuses_is_counted_and_replaced():
    honest = FAMILIES["equations"]

    def write(row):
        problem = honest.write(row)
        return problem._replace(answer="0") if row[0] == 2 else problem

    family = Family(honest.draw, write, honest.verify)
    chosen, num_rejected = choose_reasoned("equations", family, 100, 2, for_evaluation=False)
    assert len(chosen) == 100 and num_rejected > 0 and all(honest.verify(chosen))


def test_a_family_that_is_exhausted_says_how_many_there_are():
    tiny = Family(
        lambda numbers, difficulty: numbers[:, :1] % 40,
        lambda row: ReasonedProblem(str(row), "", "", str(row)),
        lambda p: [True] * len(p),
    )
    with pytest.raises(
        ValueError, match=r"1000 training problems of family small .* gives only 3\d: raise synthesize\.difficulty"
    ):
        choose_reasoned("small", tiny, 1000, 1, for_evaluation=False)


def test_documents_hold_question_reasoning_and_answer_of_every_family(reasoned):
    record = reasoned.record
    assert record.training_problems_by_family == {"arithmetic": 300} | dict.fromkeys(SIX, 30)
    assert (record.num_training_problems, record.rejected, record.num_held_out_problems) == (480, {}, 90)
    for name in SIX:
        text = "".join(
            row["text"] for row in rows(reasoned, "documents/*.parquet") if row["source"] == f"synthetic/{name}"
        )
        problems, _ = choose_reasoned(name, FAMILIES[name], 30, 2, for_evaluation=False)
        assert all(problem.text in text for problem in problems) and text.count("Question: ") == 30


def test_conversations_prompts_and_held_out_problems_of_the_families(reasoned):
    chats = [row for row in rows(reasoned, "chats.parquet") if row["kind"] != "arithmetic"]
    assert {name: sum(row["kind"] == name for row in chats) for name in SIX} == dict.fromkeys(SIX, 15)
    prompts = [row for row in rows(reasoned, "prompts.parquet") if not row["family"].startswith("arithmetic")]
    held_out = rows(reasoned, "held_out.parquet")
    assert {row["family"] for row in prompts} == {"equations", "logic"} and len(prompts) == 40
    assert {row["family"] for row in held_out} == set(SIX)
    texts = "".join(row["text"] for row in rows(reasoned, "documents/*.parquet")) + "".join(
        row["messages"] for row in chats
    )
    assert not [row for row in (*prompts, *held_out) if row["prompt"] in texts]


def test_our_own_programs_run_in_a_process_of_their_own():
    assert run_trusted(
        ["assert True", "assert False", "pass", "def f(:", "import os\nassert not os.environ.get('HOME')"]
    ) == [True, False, True, False, True]


def test_tasks_of_environments_are_prompts_and_others_are_solved_in_conversations(tmp_path):
    changes = {"tasks": {"calculator": 12, "retail": 15}, "num_task_chats": 8, "num_evaluation_tasks": 6}
    recipe = RECIPE.model_copy(update=changes)
    made = compute(synthesize_problems, tmp_path, recipe=recipe)
    tasks = rows(made, "tasks.parquet")
    assert Counter(row["kind"] for row in tasks) == {"calculator": 12, "retail": 15} and made.record.num_tasks == 27
    solved = [row for row in rows(made, "chats.parquet") if row["kind"] in ("calculator", "retail")]
    assert len(solved) == 16 and made.record.num_chats == RECIPE.num_chats + 16
    asked = {json.loads(row["messages"])[0]["content"] for row in solved}
    assert len(asked) == 16 and not asked & {row["prompt"] for row in tasks}
    held_out = rows(made, "held_out_tasks.parquet")
    assert Counter(row["kind"] for row in held_out) == {"calculator": 6, "retail": 6}
    assert not {row["prompt"] for row in held_out} & (asked | {row["prompt"] for row in tasks})
    assert not {row["answer"] for row in held_out} & {row["answer"] for row in tasks if row["kind"] == "retail"}
    for row in (*tasks, *held_out, *solved):
        names = [tool["function"]["name"] for tool in json.loads(row["tools"])]
        assert names == [tool.name for tool in TOOLS[row["kind"]]]
    for row in (*tasks, *held_out):
        assert row["domain"] == "agentic" and OPENERS[row["kind"]](row["answer"]).judge("") is False
