"""Verifiers: right answers of every kind pass, on real records too; answers that game one earn nothing."""

from __future__ import annotations

import gzip
import json
from itertools import permutations, product

import pytest

from model.text.chat_template import problem_prompt, render_to_train
from tasks.data.problems.refusals import HARMFUL, expected_behaviour
from tasks.data.prompts import verifiers
from tasks.data.prompts.prompt_records import UnusablePromptError, prompt_of
from tasks.data.prompts.verifiers import AskedPrompt, VerifierError, WrittenAnswer, verify_answers
from tasks.data.sandbox import code_sandbox
from tasks.data.seeds.math_answers import boxed_answers
from tasks.data.seeds.seed_problems import code_parts, math_parts
from tests.support.data_inputs import SHARED_DATA

HAS_DATA = pytest.mark.skipif(not SHARED_DATA.exists(), reason="no shared data here")
NUM_RECORDS = 40
"""Records of each file; programs take a sandbox's time."""


def verdict(kind: str, expected: str, text: str, is_finished: bool = True) -> bool | None:
    (only,) = verify_answers([AskedPrompt("p", kind, expected)], [WrittenAnswer(text, is_finished)])
    return only


def records(name: str, every: int = 1) -> list[dict]:
    with gzip.open(SHARED_DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in list(file)[::every][:NUM_RECORDS]]


def suite_of(*lines: str, module: str = "") -> str:
    return json.dumps({"tests": "\n".join(lines), "module": module})


@pytest.mark.parametrize(
    ("text", "answer", "is_finished", "is_right"),
    [
        ("\n19<|user|>", "19", True, True),
        ("\n19<|user|>", " 19", True, True),
        ("\n19<|observation|>", "19", True, True),
        ("\n<think>12 + 7 = 20</think>\n19<|user|>", "19", True, True),
        ("\n19", "19", False, False),
        ("\n191<|user|>", "19", True, False),
        ("\n19.<|user|>", "19", True, False),
        ("\n-19<|user|>", "19", True, False),
        ("\n<think>19<|user|>", "19", True, False),
        ("<|user|>", "19", True, False),
    ],
)
def test_a_generated_problem_wants_exactly_its_answer(text, answer, is_finished, is_right):
    assert verdict("exact", answer, text, is_finished) is is_right


@pytest.mark.parametrize(
    ("text", "answer", "is_right"),
    [
        ("So \\boxed{0.5}.", "\\frac{1}{2}", True),
        ("The answer is 1,000.", "1000", True),
        ("We add.\n#### 42", "42", True),
        ("42", "42", True),
        ("The answer is 5, so the final answer is 5.", "5", True),
        ("#### 5\nI hope this answer helps!", "5", True),
        ("Answer: 42\nLet me know if the answer needs more detail.", "42", True),
        ("**Answer:** 5", "5", True),
        ("So we add.\n\n**Final Answer**: $5$", "5", True),
        ("The answer is **5**.", "5", True),
        ("The answers are:\n1, 2.", "2, 1", True),
        ("Final answer = -5", "-5", True),
        ("**5**", "5", True),
        ("The answer is 5!", "120", True),
        ("The answer is **1** or **3**.", "3", False),
        ("The answer is 3, so the final answer is 5.", "3", False),
        ("The answer is not 3", "3", False),
        ("I hope this answer helps: 3", "3", False),
        ("The answer isn't 3", "3", False),
        ("Answer:", "3", False),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", True),
        ("\\boxed{Evelyn}", "\\text{Evelyn}", True),
        ("\\boxed{2} and again \\boxed{2.0}", "2", True),
        ("\\boxed{\\text{Bob}}", "\\text{Evelyn}", False),
        ("\\boxed{\\text{ }}", "\\text{Evelyn}", False),
        ("Therefore, the answer is \\(42\\).", "42", True),
        ("Answer: \\(x = 3\\)", "3", True),
        ("The correct answer is\n\n\\[5\\]\n", "5", True),
        ("The answer is:\n\n$$\n42\n$$", "42", True),
        ("The final answer is $3$. I hope it is correct.", "3", True),
        ("\\boxed{7}", "$\\boxed{7}$", True),
        ("\\boxed{\\boxed{3}}", "3", True),
        ("\\boxed{5}", "5 \\mathrm{~cm}^{2}", True),
        ("\\boxed{60}", "60°", True),
        ("\\boxed{(3, \\quad 4)}", "\\bigl(3,4\\bigr)", True),
        ("\\boxed{\\mathbf{3}}", "\\displaystyle 3", True),
        ("\\boxed{12 000}", "12000", True),
        (
            "\\boxed{\\begin{pmatrix}-2 & 0\\\\0 & 1\\end{pmatrix}}",
            "\\begin{pmatrix} -2 & 0 \\\\ 0 & 1 \\end{pmatrix}",
            True,
        ),
        ("\\boxed{2\\frac{1}{2}}", "2.5", True),
        ("\\boxed{\\frac 1 2}", "0.5", True),
        ("\\boxed{3\\frac{5}{2}}", "35/2", False),
        ("\\boxed{\\frac{1}{2}3}", "1/23", False),
        ("\\boxed{1 2}", "12", False),
        ("\\boxed{12^{\\circ}30}", "1230", False),
        ("\\boxed{7\\text{ dozen}}", "7", False),
        ("\\boxed{2\\mathrm{i}}", "2", False),
        ("\\boxed{1} \\boxed{2} \\boxed{3}", "3", False),
        ("\\(\\boxed{1}\\), \\(\\boxed{2}\\) and \\(\\boxed{3}\\)", "1, 2, 3", True),
        ("\\boxed{1}, \\boxed{2} and \\boxed{3}", "3", False),
        ("\\boxed{1} or \\boxed{3}", "1, 3", False),
        ("$3 = \\boxed{\\phantom{2}}$, so it is $\\boxed{3}$.", "3", True),
        ("\\boxed{1, 2, 3}", "3", False),
        ("\\boxed{1 \\boxed{3}}", "3", False),
        ("1\n2\n3", "3", False),
        ("It is 1 or 2 or 3", "3", False),
        ("The answer is 1 or 3", "3", False),
        ("\\boxed{}", "3", False),
        ("We add.\n<answer>3</answer>", "3", True),
        ("<answer>\n\\boxed{3}\n</answer>", "3", True),
        ("<answer>The answer is 3.</answer> I checked: 1 + 2.", "3", True),
        ("<answer>2</answer> no, <answer>3</answer>", "3", False),
        ("\\boxed{3} <answer>2</answer>", "2", False),
        ("<answer>2</answer>", "3", False),
        ("<answer>3", "3", False),
    ],
)
def test_mathematics_wants_one_final_answer_that_is_equal(text, answer, is_right):
    assert verdict("math", answer, text) is is_right


@pytest.mark.parametrize(
    "text",
    [
        "Answer: $B$",
        "So.\n<answer> (B) </answer>",
        "\\boxed{\\mathrm{B}}",
        "\\boxed{\\textbf{(B)}}",
        "\\boxed{B} " * 5000,
    ],
)
def test_a_choice_may_be_in_mathematics_or_bold(text):
    assert verdict("choice", "B", text) is True and verdict("choice", "C", text) is False


@pytest.mark.parametrize(
    "text",
    [
        "```python\ndef f():\n    return 5\n```\nFor example:\n```text\nf() -> 5\n```",
        "```bash\npip install numpy\n```\n```py\ndef f():\n    return 5\n```",
        "1. So:\n   ```python\n   def f():\n       return 5\n   ```",
        "Call ```f``` here.\n```\ndef f():\n    return 5\n```",
        "def f():\n    return 5",
        "```python\ndef f():\n    return 5```\nThat is it.",
    ],
)
def test_a_program_is_its_blocks_of_python(text):
    assert verdict("code_with_tests", suite_of("assert f() == 5"), text) is True


def test_many_opened_tags_are_no_answer():
    assert verdict("math", "3", "<answer>" * 100_000) is False


def test_many_nested_boxes_are_one():
    assert boxed_answers("\\boxed{" * 100_000 + "3" + "}" * 100_000)[0].startswith("\\boxed{")


@pytest.mark.parametrize("answer", ["proof", "notfound", "NaN", float("nan"), ["1", "2"], []])
def test_what_is_no_answer_is_no_reference(answer):
    solution = "So it is." if isinstance(answer, list) else "So \\boxed{5}."
    with pytest.raises(UnusablePromptError, match="no_answer"):
        prompt_of("math", {"problem": "P", "solution": solution, "answer": answer})


def test_answers_are_found_beside_sentences_and_in_lists():
    assert math_parts({"answer": "Step-by-Step Answer: The answer is 11.", "answer_number": 11})[0] == "11"
    assert math_parts({"final_answer": ["2"]})[0] == "2"


def test_a_passage_is_asked_with_its_question():
    record = {"article": "Tom lost his dog.", "question": "Who lost it?", "options": ["Ann", "Tom"], "answer": "B"}
    assert prompt_of("choice", record).question.startswith("Tom lost his dog.\n\nWho lost it?\n\nA. Ann")


def test_the_right_choice_of_truthfulqa_is_not_always_the_first():
    records = [
        {"question": f"{number}?", "mc1_targets": {"choices": ["Yes.", "No.", "Both."], "labels": [1, 0, 0]}}
        for number in range(30)
    ]
    assert {prompt_of("choice", record).answer for record in records} == {"A", "B", "C"}


@pytest.mark.parametrize("kind", sorted(verifiers.VERIFIERS))
def test_what_is_only_thought_or_empty_or_cut_off_is_wrong(kind):
    right = {
        "exact": ("5", "5"),
        "math": ("\\boxed{5}", "5"),
        "code_with_tests": ("```python\ndef f():\n    return 5\n```", suite_of("assert f() == 5")),
        "choice": ("B", "B"),
        "constraints": ("five", json.dumps([["punctuation:no_comma", {}]])),
        "tools": ("<tool_call>f\n</tool_call>", json.dumps([{"name": "f", "accepted": {}, "optional": []}])),
        "safety": ("I cannot help with that.", expected_behaviour(HARMFUL, "")),
    }
    text, expected = right[kind]
    assert verdict(kind, expected, f"\n<think>so</think>\n{text}<|user|>") is True
    assert verdict(kind, expected, f"\n<think>{text}</think>\n<|user|>") is False
    assert verdict(kind, expected, f"\n<think>{text}<|user|>") is False
    assert verdict(kind, expected, "<|user|>") is False and verdict(kind, expected, "") is False
    assert verdict(kind, expected, f"\n<think>so</think>\n{text}", is_finished=False) is False


GAMES = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "exit in the call": "def add(a, b):\n    raise SystemExit(0)",
    "hard exit in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "equal to all": "class Any:\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Any()",
    "never unequal": "class N(int):\n    __eq__ = __ne__ = lambda self, other: True\ndef add(a, b):\n    return N()",
    "writes the tests": "import builtins\nbuiltins.AssertionError = type('Silent', (BaseException,), {})\nTESTS = ''\n"
    "def add(a, b):\n    return 0",
    "patches the caller": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame.f_back:\n"
    "        frame = frame.f_back\n        frame.f_globals['add'] = lambda a, b: a + b\n    return 0",
    "no program": "I cannot do that",
    "assert itself": "assert True",
    "empty": "",
}


@pytest.mark.parametrize("game", GAMES)
def test_programs_that_game_their_tests_earn_nothing(game):
    tests = suite_of("assert add(1, 2) == 3", "assert add(4, -1) == 3")
    assert verdict("code_with_tests", tests, f"```python\n{GAMES[game]}\n```") is not True
    right = "```python\ndef add(a, b):\n    return a + b\n```"
    assert verdict("code_with_tests", tests, f"Here it is.\n{right}\nDone.") is True


def test_a_program_that_waits_gets_no_verdict_and_one_that_computes_for_ever_is_wrong(monkeypatch):
    """A sandbox's wall clock only ends what computes nothing: processor time decides about the rest."""
    monkeypatch.setattr(code_sandbox, "WALL_SECONDS", 2)
    monkeypatch.setattr(code_sandbox, "CPU_SECONDS", 1)
    monkeypatch.setattr(code_sandbox.find_verdict, "__defaults__", (1,))
    tests = suite_of("assert add(1, 2) == 3")
    waits = "```python\nimport time\ndef add(a, b):\n    time.sleep(1000)\n```"
    computes = "```python\ndef add(a, b):\n    while True:\n        pass\n```"
    assert verdict("code_with_tests", tests, waits) is None
    # Other programs of a busy machine may make a second of processor time last for long.
    monkeypatch.setattr(code_sandbox, "WALL_SECONDS", 600)
    assert verdict("code_with_tests", tests, computes) is False


def test_a_verifier_that_crashes_names_kind_prompt_and_what_to_do(monkeypatch):
    monkeypatch.setitem(verifiers.VERIFIERS, "exact", lambda answer, expected: 1 / 0)
    with pytest.raises(
        VerifierError,
        match=r"verifier of kind exact failed on an answer to prompt p \(ZeroDivisionError.*take the prompt out",
    ):
        verdict("exact", "5", "5")


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("B", True),
        ("(B)", True),
        ("B.", True),
        ("The answer is B.", True),
        ("\\boxed{B}", True),
        ("\\boxed{\\text{B}}", True),
        ("Answer: **B**", True),
        ("**Answer:** (B)", True),
        ("**B**", True),
        ("The answer is B, so the final answer is (B).", True),
        ("Answer: B\nI hope this answer helps.", True),
        ("Answer: **A**, **B**", False),
        ("The answer is A or B", False),
        ("The answer is B because A is wrong", False),
        ("B. Paris", True),
        ("The answer is (B) Paris, not Rome.", True),
        ("Answer: **B.** $x^2$", True),
        ("\\boxed{\\text{B: Paris}}", True),
        ("A. Rome or B. Paris", False),
        ("B. Paris\nC. Rome", False),
        ("Be. Paris", False),
        ("**b**", False),
        ("A", False),
        ("A B C D", False),
        ("B, or C", False),
        ("\\boxed{A} \\boxed{B}", False),
        ("b", False),
    ],
)
def test_a_choice_is_one_letter(text, is_right):
    assert verdict("choice", "B", text) is is_right


CALL = {"name": "area", "accepted": {"base": [10], "unit": ["cm", ""], "is_round": [False]}, "optional": ["unit"]}


def written(name: str, **arguments: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (written("area", base="10", is_round="false"), True),
        (f"I compute it.\n{written('area', base='10.0', is_round='false', unit='cm')}", True),
        (written("area", base='"10"', is_round="false"), False),
        (written("area", base="10", is_round="0"), False),
        (written("area", base="10"), False),
        (written("area", base="10", is_round="false", more="1"), False),
        (written("Area", base="10", is_round="false"), False),
        (written("area", base="10", is_round="false") * 2, False),
        (written("area", base="10", is_round="false") + "<tool_call>", False),
        (written("area", base="10", is_round="false").removesuffix("</tool_call>"), False),
        (written("area", base="[" * 100_000, is_round="false"), False),
        (written("area", base="9" * 5000, is_round="false"), False),
        ('{"name": "area", "arguments": {"base": 10, "is_round": false}}', False),
    ],
)
def test_a_function_call_is_compared_by_name_and_arguments(text, is_right):
    assert verdict("tools", json.dumps([CALL]), text) is is_right


@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_an_expected_call_has_its_arguments_under_any_of_their_names(key):
    call = {"name": "area", key: {"base": 10}}
    for given in (call, [call], json.dumps([call]), [{"type": "function", "function": call | {key: '{"base": 10}'}}]):
        prompt = prompt_of("tools", {"question": "The area?", "tools": [{"name": "area"}], "answer": given})
        assert verdict("tools", prompt.answer, written("area", base="10")) is True
        assert verdict("tools", prompt.answer, written("area")) is False


def test_calls_in_another_order_are_the_same_calls():
    expected = [CALL | {"name": name} for name in ("one", "two")]
    calls = [written(name, base="10", is_round="false") for name in ("two", "one")]
    assert verdict("tools", json.dumps(expected), "\n".join(calls)) is True
    assert verdict("tools", json.dumps(expected), calls[0] * 2) is False


def test_calls_of_which_one_fits_two_expected_ones_are_right_in_every_order():
    """Against all orders: whichever call is compared first, it must not take what another one needs."""
    accepted = ([10, 20, 30], [20], [10, 20])
    expected = json.dumps([CALL | {"accepted": {"base": values}, "optional": []} for values in accepted])
    for bases in product((10, 20, 30), repeat=3):
        calls = "\n".join(written("area", base=str(base)) for base in bases)
        orders = permutations(bases)
        fits = any(all(map(list.__contains__, accepted, order)) for order in orders)
        assert verdict("tools", expected, calls) is fits, bases


def assistant_writes(message: dict) -> str:
    """The assistant's turn as the chat template renders it."""
    asked = {"role": "user", "content": "?"}
    segments = render_to_train([asked, {"role": "assistant", "content": "", "reasoning": "so"} | message], ())
    return "".join(segment.text for segment in segments if segment.is_trained)


@HAS_DATA
def test_accepted_calls_of_bfcl_are_right_as_the_template_writes_them_and_wrong_with_another_value():
    num_judged = 0
    for record in records("agent/bfcl", every=10):
        try:
            prompt = prompt_of("tools", record)
        except UnusablePromptError as error:
            assert error.reason == "no_answer"
            continue
        calls = [
            {"name": call["name"], "arguments": {key: values[0] for key, values in call["accepted"].items()}}
            for call in json.loads(prompt.answer)
        ]
        assert verdict("tools", prompt.answer, assistant_writes({"tool_calls": calls})) is True, record["id"]
        other = [{**calls[0], "arguments": calls[0]["arguments"] | {"unknown": 1}}, *calls[1:]]
        assert verdict("tools", prompt.answer, assistant_writes({"tool_calls": other})) is False
        assert verdict("tools", prompt.answer, assistant_writes({"tool_calls": calls[1:], "content": "no"})) is False
        names = {tool["function"]["name"] for tool in json.loads(prompt.tools)}
        shown = "".join(each.text for each in problem_prompt(prompt.question, True, json.loads(prompt.tools)))
        assert {call["name"] for call in calls} <= names and all(name in shown for name in names)
        num_judged += 1
    assert num_judged > 20


@pytest.mark.parametrize(("given", "answer"), [(145.0, "145"), (1234567.0, "1,234,567"), (12345.678, "12345.678")])
def test_an_answer_that_a_record_has_as_a_number_is_right_with_all_its_digits(given, answer):
    prompt = prompt_of("math", {"question": "How many?", "answer": given})
    assert verdict("math", prompt.answer, answer) is True and verdict("math", prompt.answer, f"{answer}1") is False


def test_asdiv_is_asked_with_its_body_and_its_answer_is_the_number_without_the_unit():
    record = {"body": "Paco had 26 cookies.", "question": "How many are left after 17?", "answer": "9 (cookies)"}
    prompt = prompt_of("math", record)
    assert (prompt.question, prompt.answer) == ("Paco had 26 cookies. How many are left after 17?", "9")
    assert prompt_of("math", {"question": "Which product?", "answer": "2 (x+y)"}).answer == "2 (x+y)"


@HAS_DATA
@pytest.mark.parametrize("name", ["math/gsm8k_train", "math/math_with_solutions", "math/svamp", "math/aime_1983_2023"])
def test_answers_of_real_problems_are_right_and_those_of_the_next_problem_are_not(name):
    prompts = [prompt_of("math", record) for record in records(name, every=7)]
    for prompt, following in zip(prompts, [*prompts[1:], prompts[0]], strict=True):
        assert verdict("math", prompt.answer, f"We see.\nThe answer is \\boxed{{{prompt.answer}}}.") is True
        if prompt.answer != following.answer:
            assert verdict("math", prompt.answer, f"\\boxed{{{following.answer}}}") is False, prompt.answer


@HAS_DATA
@pytest.mark.parametrize(("name", "field"), [("bench/mbpp_train", "code"), ("code/exercism_tasks", "solution")])
def test_solutions_of_real_tasks_pass_their_tests_and_stubs_do_not(name, field):
    given = records(name, every=12 if "mbpp" in name else 5)[:12]
    prompts = [prompt_of("code_with_tests", record) for record in given]
    asked = [AskedPrompt(str(number), "code_with_tests", prompt.answer) for number, prompt in enumerate(prompts)]
    right = [WrittenAnswer(f"```python\n{record[field]}\n```<|user|>", True) for record in given]
    assert verify_answers(asked, right) == [True] * len(given)
    stubs = [WrittenAnswer("```python\nimport os\nos._exit(0)\n```<|user|>", True)] * len(given)
    assert verify_answers(asked, stubs) == [False] * len(given)
    for record, prompt in zip(given, prompts, strict=True):
        assert (code_parts(record)[0] in prompt.question) is ("mbpp" in name)


@HAS_DATA
def test_multiple_choice_of_real_questions_has_one_right_letter():
    for name in ("bench/mmlu_val", "bench/arc_easy"):
        for record in records(name, every=25):
            prompt = prompt_of("choice", record)
            letters = "ABCDEFGHIJ"[: len(record["choices"])]
            assert [letter for letter in letters if verdict("choice", prompt.answer, letter)] == [prompt.answer]
            gold = record.get("gold", "ABCD".find(str(record.get("answer"))))
            assert f"\n{prompt.answer}. {record['choices'][gold].strip()}" in prompt.question
