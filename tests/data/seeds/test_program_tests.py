"""Programs in published layouts are read, asked and judged, as prompts and as benchmarks."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest

from tasks.data.prompts.prompt_records import UnusablePromptError, prompt_of
from tasks.data.prompts.verifiers import passes_tests
from tasks.data.sandbox.code_sandbox import FAILED, PASSED, STANDARD_INPUT, find_isolation, judge_solution
from tasks.data.seeds import program_tests
from tasks.data.seeds.seed_problems import asked_question, code_parts
from tasks.evaluation.benchmarks.benchmark_tasks import is_right
from tasks.evaluation.benchmarks.question_forms import READERS

pytestmark = pytest.mark.skipif(not find_isolation()[0], reason=find_isolation()[1])

ASKED = "Read n, then n numbers. Print their sum."
SUM = "n = int(input())\nprint(sum(int(input()) for _ in range(n)))"
WRONG = "n = int(input())\nprint(n)"
PAIRS = [("2\n1\n2\n", "3\n"), ("1\n5\n", "5")]
INPUTS, OUTPUTS = map(list, zip(*PAIRS, strict=True))
LISTED = [{"input": given, "output": expected, "type": "stdin_stdout", "fn_name": None} for given, expected in PAIRS]
STARTER = "class Solution:\n    def total(self, numbers: List[int]) -> int:\n        "
METHOD = "from typing import List\n\nclass Solution:\n    def total(self, numbers: List[int]) -> int:\n        return "
FUNCTION = "def total(numbers):\n    return "


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


def livecodebench(kind, public, private, metadata=None):
    cases = [[{"input": given, "output": out, "testtype": kind} for given, out in part] for part in (public, private)]
    return {
        "question_title": "Sum",
        "question_content": ASKED,
        "starter_code": STARTER if metadata else "",
        "public_test_cases": json.dumps(cases[0]),
        "private_test_cases": packed(cases[1]),
        "metadata": json.dumps(metadata or {}),
    }


PRINTING = {
    "APPS": {
        "question": ASKED,
        "solutions": json.dumps(["print raw_input()", SUM]),
        "input_output": json.dumps({"inputs": INPUTS, "outputs": OUTPUTS}),
        "starter_code": "",
    },
    "APPS with lines": {
        "question": ASKED,
        "input_output": json.dumps({"inputs": [["2", "1", "2"], ["1", "5"]], "outputs": [["3"], ["5"]]}),
    },
    "LiveCodeBench": livecodebench("stdin", PAIRS[:1], PAIRS[1:]),
    "CodeContests": {
        "description": ASKED,
        "public_tests": {"input": INPUTS[:1], "output": OUTPUTS[:1]},
        "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": INPUTS[1:], "output": OUTPUTS[1:]},
        "solutions": {"language": [2, 3], "solution": ["int main() {}", SUM]},
    },
    "DeepCoder": {"problem": ASKED, "tests": json.dumps(LISTED), "solutions": [SUM]},
    "SYNTHETIC-1": {"prompt": ASKED, "verification_info": json.dumps({"language": "python", "test_cases": LISTED})},
    "verl": {
        "prompt": [{"role": "user", "content": ASKED}],
        "reward_model": {"ground_truth": json.dumps({"inputs": INPUTS, "outputs": OUTPUTS})},
    },
}
CALLING = {
    "APPS": {
        "question": ASKED,
        "starter_code": STARTER,
        "solutions": json.dumps([f"{STARTER}return sum(numbers)"]),
        "input_output": json.dumps({"fn_name": "total", "inputs": [[[1, 2]], [[5]]], "outputs": [3, [5]]}),
    },
    "LiveCodeBench": livecodebench("functional", [("[1, 2]", "3")], [("[5]", "5")], {"func_name": "total"}),
    "DeepCoder": {
        "problem": ASKED,
        "tests": json.dumps(
            [
                {"input": [given], "output": out, "type": "function_call", "fn_name": "total"}
                for given, out in (([1, 2], 3), ([5], 5))
            ]
        ),
    },
}
PAIR = {
    "public_test_cases": json.dumps([{"input": "[5]", "output": "[5, 5]", "testtype": "functional"}]),
    "private_test_cases": packed([]),
}


def test_the_packed_tests_are_read_without_unpickling():
    class Opened:
        def __reduce__(self):
            return (print, ("unpickled",))

    assert program_tests._packed_text(packed([1])) == "[1]"
    for broken in (packed([1])[:-8], "no base64", base64.b64encode(zlib.compress(pickle.dumps(Opened()) * 2)).decode()):
        assert program_tests._packed_text(broken) is None


@pytest.mark.parametrize("layout", PRINTING)
def test_a_program_is_judged_by_what_it_prints_in_every_layout(layout):
    prompt = prompt_of("code_with_tests", PRINTING[layout])
    assert prompt.question.startswith(ASKED) and "standard input" in prompt.question and "5" not in prompt.question
    assert json.loads(json.loads(prompt.answer)["tests"]) == [
        [given.rstrip(), out.rstrip()] if "lines" in layout else [given, out] for given, out in PAIRS
    ]
    assert passes_tests(f"```python\n{SUM}\n```", prompt.answer) is True
    assert passes_tests(f"```python\n{WRONG}\n```", prompt.answer) is False
    solution = code_parts(PRINTING[layout]).solution
    assert solution == (SUM if "solutions" in PRINTING[layout] else "")


@pytest.mark.parametrize("layout", CALLING)
def test_a_function_is_judged_by_what_it_returns_in_every_layout(layout):
    record = CALLING[layout]
    prompt = prompt_of("code_with_tests", record)
    has_class = "starter_code" in record
    assert ("from typing import List" if has_class else "`total`") in prompt.question and "[5]" not in prompt.question
    written = METHOD if has_class else FUNCTION
    assert passes_tests(f"{written}sum(numbers)", prompt.answer) is True
    assert passes_tests(f"{written}len(numbers) + 1", prompt.answer) is False, "right for the first test only"
    assert passes_tests("print(3)", prompt.answer) is False
    pair = prompt_of("code_with_tests", CALLING["LiveCodeBench"] | PAIR).answer
    assert passes_tests(f"{METHOD}numbers[0], numbers[0]", pair) is True, "a tuple is a list"
    assert passes_tests(f"{METHOD}numbers[0], numbers[0]", prompt.answer) is False
    if "solutions" in record:
        assert passes_tests(code_parts(record).solution, prompt.answer) is True


@pytest.mark.parametrize(
    "fields",
    [
        {"private_test_cases": "broken"},
        {"public_test_cases": json.dumps([{"input": "1"}])},
        {"public_test_cases": json.dumps([{"input": "1", "output": 2, "testtype": "stdin"}])},
        {"public_test_cases": json.dumps([{"input": "\ud83d", "output": "", "testtype": "stdin"}])},
        {"public_test_cases": json.dumps([{"input": "[1]", "output": "1", "testtype": "functional"}])},
        {"public_test_cases": f"{'[' * 500}{']' * 500}"},
        {"public_test_cases": "[]", "private_test_cases": packed([])},
    ],
)
def test_a_record_with_a_broken_test_is_no_prompt(fields):
    """Its other tests might be the examples of the question."""
    with pytest.raises(UnusablePromptError, match="no_answer"):
        prompt_of("code_with_tests", PRINTING["LiveCodeBench"] | fields)
    given = {"fn_name": "total", "inputs": [[1.0]], "outputs": [float("nan")]}
    for record in ({"input_output": ""}, {"input_output": given}, {"verification_info": {"tests": "none"}}):
        with pytest.raises(UnusablePromptError, match="no_answer"):
            prompt_of("code_with_tests", {"question": ASKED, **record})


def test_the_first_tests_that_fit_are_kept(monkeypatch):
    monkeypatch.setattr(program_tests, "MAX_TESTS_CHARS", 10)
    assert json.loads(code_parts(PRINTING["APPS"]).tests) == [list(PAIRS[0])]
    monkeypatch.setattr(program_tests, "MAX_TESTS_CHARS", 7)
    assert code_parts(PRINTING["APPS"]).tests == ""


def test_tests_that_test_nothing_are_none():
    """Any program passed them."""
    listed = json.dumps(["assert add(1, 2) == 3"])
    assert code_parts({"tests": listed}).tests == "assert add(1, 2) == 3"
    for tests in ("print(add(1, 2))", "[]", '["add(1, 2) == 3"]'):
        assert code_parts({"tests": tests}).tests == ""


def test_functions_of_pytest_are_run():
    record = {
        "question": "Add.",
        "test": "from solution import add\n\ndef test_sum():\n    assert add(1, 2) == 3\n",
        "solution": "def add(a, b):\n    return a + b",
    }
    assert code_parts(record).module == "solution"
    answer = prompt_of("code_with_tests", record).answer
    assert passes_tests(record["solution"], answer) is True
    assert passes_tests("def add(a, b):\n    return a - b", answer) is False
    inside = prompt_of("code_with_tests", record | {"test": "def test_sum():\n    assert add(1, 2) == 3\n"}).answer
    assert passes_tests(record["solution"], inside) is True
    assert passes_tests("def add(a, b):\n    return a - b", inside) is False
    helper = "def test_pair(a, b):\n    assert add(a, b) == a + b\n\ntest_pair(1, 2)\n"
    called = prompt_of("code_with_tests", record | {"test": helper}).answer
    assert passes_tests(record["solution"], called) is True, "the tests call it with what it needs"
    never = prompt_of("code_with_tests", record | {"test": helper.partition("\n\n")[0]}).answer
    assert passes_tests(record["solution"], never) is False, "nothing gives it what it needs"


def test_the_layouts_are_benchmarks_too():
    for layout in PRINTING:
        question = READERS["program"](PRINTING[layout], True)
        assert question.prompt.startswith(ASKED) and "should pass these tests" not in question.prompt
        assert is_right("program", question.prompt, question.expected, f"```python\n{SUM}\n```")
        assert not is_right("program", question.prompt, question.expected, f"```python\n{WRONG}\n```")
        assert json.loads(question.expected)["module"] == STANDARD_INPUT


def test_imports_of_tests_stand_before_them():
    record = {"test_imports": ["import math"], "test_setup_code": "", "test_list": ["assert math.isclose(f(), 1)"]}
    assert program_tests.assertions(record) == "import math\n\nassert math.isclose(f(), 1)"


LEETCODE = {
    "problem_description": "Add two numbers that are in a list.",
    "prompt": "from typing import *\n\nclass Pair:\n    def __init__(self, one):\n        self.one = one\n",
    "starter_code": "class Solution:\n    def sumOf(self, numbers: List[int]) -> int:\n        ",
    "completion": "class Solution:\n    def sumOf(self, numbers: List[int]) -> int:\n        return sum(numbers)\n",
    "entry_point": "Solution().sumOf",
    "test": "def check(candidate):\n    assert candidate(numbers = Pair([1, 2]).one) == 3\n",
    "query": "You are an expert. Add two numbers.",
    "input_output": [{"input": "numbers = [1, 2]", "output": "3"}],
}
"""In the layout of LeetCodeDataset, whose `input_output` is written for people."""


def test_a_method_is_judged_by_the_function_that_checks_it():
    parts = code_parts(LEETCODE)
    assert asked_question(LEETCODE) == LEETCODE["problem_description"]
    assert parts.told.startswith("It begins with these lines:\n```python\nfrom typing import *\n\nclass Pair:")
    assert parts.told.endswith("def sumOf(self, numbers: List[int]) -> int:\n```")
    assert judge_solution(parts.solution, parts.tests, parts.module) == PASSED
    wrong = parts.solution.replace("sum(", "len(")
    assert judge_solution(wrong, parts.tests, parts.module) == FAILED
    for lacking in ({"entry_point": "sumOf"}, {"prompt": None}, {"starter_code": None}):
        assert program_tests.published_tests(LEETCODE | lacking) == program_tests.NO_TESTS


HUMANEVAL = {
    "prompt": 'import math\n\ndef half(x):\n    return x / 2\n\ndef twice(x):\n    """Undo half."""\n',
    "canonical_solution": "    return x * 2\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert math.isclose(half(candidate(0.3)), 0.3)\n",
    "entry_point": "twice",
}
"""In the layout of HumanEval: `prompt` defines what the tests use, before the function that it begins."""


def test_a_begun_function_is_judged_with_what_its_beginning_defines():
    parts = code_parts(HUMANEVAL)
    assert judge_solution(parts.solution, parts.tests, parts.module) == PASSED
    assert judge_solution("def twice(x):\n    return 2 * x\n", parts.tests, parts.module) == PASSED
    for wrong in ("def twice(x):\n    return x\n", "def double(x):\n    return 2 * x\n"):
        assert judge_solution(wrong, parts.tests, parts.module) == FAILED
    called = HUMANEVAL | {"test": HUMANEVAL["test"] + "\ncheck(twice)\n"}
    assert judge_solution(parts.solution, code_parts(called).tests, parts.module) == PASSED
    assert code_parts(HUMANEVAL | {"entry_point": "half_of"}).tests == ""
