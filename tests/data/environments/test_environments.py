"""Every environment: its generated tasks are solved by their own calls only, and no episode sees another's state."""

from __future__ import annotations

import json
import math
from collections import Counter
from random import Random

import pytest

from tasks.data.environments import retail
from tasks.data.environments.environment import ToolError, ToolTimeoutError
from tasks.data.environments.environments import GENERATORS, OPENERS, TOOLS
from tasks.data.environments.passages import NUM_SHOWN, search, words_of
from tasks.data.environments.python_programs import run_python
from tasks.data.problems.environment_tasks import choose_tasks, conversation, is_solved
from tasks.data.problems.reasoning_families import is_evaluation_key


@pytest.mark.parametrize("kind", GENERATORS)
def test_tasks_are_solved_by_their_calls_and_by_no_others(kind):
    count = 8 if kind == "python" else 40  # each runs programs
    tasks = choose_tasks(kind, count)
    assert len({task.question for task in tasks}) == count and tasks[:2] == choose_tasks(kind, 2)
    (held_out,) = choose_tasks(kind, 1, for_evaluation=True)
    assert is_solved(kind, held_out) and is_evaluation_key(f"{kind} {held_out.key}") and held_out not in tasks
    for task in tasks:
        assert is_solved(kind, task) and not is_evaluation_key(f"{kind} {task.key}")
        untouched = OPENERS[kind](task.expected)
        assert untouched.judge("") is untouched.judge("I do not know.") is False
    assert {call for task in tasks for call, _ in task.calls} == {tool.name for tool in TOOLS[kind]}, (
        "every tool is needed by some task"
    )


def test_every_request_of_the_shop_has_one_right_end():
    """Done where the order's status allows it, else refused; a needless or a wrong change is no right end."""
    kinds = Counter()
    for task in choose_tasks("retail", 60):
        given = json.loads(task.expected)
        changed = {number for number in given["orders"] if given["orders"][number] != given["wanted"][number]}
        kinds["changed" if changed else "refused or asked"] += 1
        assert len(changed) == (0 if given["said"] else 1)
        for number, order in given["orders"].items():
            if order["status"] == "pending":
                environment = OPENERS["retail"](task.expected)
                environment.call("change_address", {"order_id": number, "address": "elsewhere"})
                assert environment.judge(task.answer) is False
        if given["said"]:
            environment = OPENERS["retail"](task.expected)
            for wrong in {*retail.STATUSES} - {given["said"]}:
                assert environment.judge(f"It is {wrong}.") is False
            assert environment.judge(" or ".join(retail.STATUSES)) is False
    assert min(kinds.values()) > 10


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("order W1 is shipped, not pending", True),
        ("It cannot be cancelled: it is shipped.", True),
        ("It can't be cancelled, only pending orders can. It is shipped.", True),
        ("Pending or delivered orders can be changed; this one has shipped.", True),
        ("It is not shipped.", False),
        ("It is not shipped but pending.", False),
        ("It is shipped or pending.", False),
        ("It is shipped and was cancelled.", False),
    ],
)
def test_a_status_that_an_answer_denies_is_not_stated(answer, is_right):
    order = {"email": "a@example.com", "items": ["lamp"], "address": "Mill Lane 1", "status": "shipped"}
    expected = json.dumps({"orders": {"W1": order}, "wanted": {"W1": order}, "said": "shipped"})
    assert OPENERS["retail"](expected).judge(answer) is is_right


def test_the_shop_refuses_what_its_rules_forbid():
    orders = {
        "W1": {"email": "a@example.com", "items": ["lamp"], "address": "Mill Lane 1", "status": "shipped"},
        "W2": {"email": "a@example.com", "items": ["desk"], "address": "Mill Lane 1", "status": "delivered"},
    }
    expected = json.dumps({"orders": orders, "wanted": orders, "said": ""})
    shop = OPENERS["retail"](expected)
    assert shop.call("find_orders", {"email": "a@example.com"}) == "W1, W2"
    for name, arguments, message in (
        ("cancel_order", {"order_id": "W1"}, "order W1 is shipped, not pending"),
        ("change_address", {"order_id": "W2", "address": "x"}, "order W2 is delivered, not pending"),
        ("return_item", {"order_id": "W2", "item": "lamp"}, "order W2 has no lamp"),
        ("look_up_order", {"order_id": "W3"}, "there is no order W3"),
        ("find_orders", {"email": "b@example.com"}, "there is no customer"),
        ("pay", {}, "there is no tool pay: the tools are find_orders, look_up_order"),
        ("cancel_order", {}, "cancel_order takes the arguments order_id"),
        ("cancel_order", {"order_id": "W1", "why": ""}, "cancel_order takes the arguments order_id"),
    ):
        with pytest.raises(ToolError, match=message):
            shop.call(name, arguments)
    assert shop.judge("") is True
    shop.call("return_item", {"order_id": "W2", "item": "desk"})
    assert shop.judge("") is False and OPENERS["retail"](expected).judge("") is True


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 + 7*3", "33"),
        ("-(2 - 5) / 4", "0.75"),
        ("1/3", "0.3333333333"),
        ("0.1 + 0.2", "0.3"),
        (" 7 ", "7"),
        ("999*999*999*999*999*999*999*999", str(999**8)),
        ("1/10000000000000", "0"),
        ("1e300*1e300", "1" + "0" * 600),
    ],
)
def test_the_calculator_computes_exactly(expression, result):
    assert OPENERS["calculator"]('{"answer": "1"}').call("calculator", {"expression": expression}) == result


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1/0", "2**99", "a + 1", "__import__('os')", "1 if 1 else 2", "(" * 90, "1+" * 120, "True", "1e999"),
        *("'a'*9", "1e300*1e300/7", "*".join(["1e300"] * 30), "1/3*" + "*".join(["1e300"] * 30)),
    ],
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises(ToolError):
        OPENERS["calculator"]('{"answer": "1"}').call("calculator", {"expression": expression})


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("57", True),
        (" 57. ", True),
        ("57.0", True),
        ("114/2", True),
        ("+5.7e1", True),
        ("56", False),
        ("114/0", False),
        ("57/1e0", False),
        ("56 57", False),
        ("1e3000000", False),
        ("1e1000000000", False),
        ("9" * 5000, False),
        ("It is 57", False),
    ],
)
def test_a_number_is_right_by_its_value_and_alone(answer, is_right):
    for kind in ("calculator", "python"):
        assert OPENERS[kind]('{"answer": "57"}').judge(answer) is is_right


@pytest.mark.parametrize("text", ["--5", "-", "", "5.0", "1e3", "9" * 18, "five", "\u00b2"])
def test_an_integer_that_is_none_is_refused_and_one_is_read(text):
    repository = OPENERS["swe_task"](json.dumps({"files": {"a.py": "x = 1\n"}, "tests": {}, "wanted": []}))
    with pytest.raises(ToolError, match="first_line must be an integer, is "):
        repository.call("read_file", {"path": "a.py", "first_line": text})
    assert repository.call("read_file", {"path": "a.py", "first_line": " 1 "}) == "1 x = 1"


def test_passages_are_ranked_by_bm25():
    draw = Random(5)
    letters = "abcdefgh"
    passages = [" ".join(draw.choices(letters, k=draw.randint(3, 12))) for _ in range(12)]
    mean = sum(len(passage.split()) for passage in passages) / 12

    def score(passage: str, query: str) -> float:
        total = 0.0
        for word in set(query.split()):
            holders = sum(word in other.split() for other in passages)
            frequency = passage.split().count(word)
            saturated = frequency * 2.2 / (frequency + 1.2 * (0.25 + 0.75 * len(passage.split()) / mean))
            total += math.log((12 - holders + 0.5) / (holders + 0.5) + 1) * saturated
        return total

    for query in ("a b", "c", "d d e", "h g f e"):
        best = sorted(passages, key=lambda passage, asked=query: -score(passage, asked))
        assert search(passages, query).split("\n") == best[:NUM_SHOWN]
    with pytest.raises(ToolError, match="no passage has any of these words"):
        search(passages, "zebra, moose")
    with pytest.raises(ToolError, match="no passage has any of these words"):
        search(["...", "!"], "zebra")
    towns = ["北京是中国的首都。", "東京は日本の首都です。", "กรุงเทพเป็นเมืองหลวง", "Oslo in Norwegen"]
    for query, found in (("北京", 0), ("日本の首都", 1), ("กรุงเทพ", 2), ("oslo", 3)):
        assert search(towns, query).split("\n")[0] == towns[found]
    assert words_of("Ada's 3 lamps!") == ["ada", "s", "3", "lamps"]


@pytest.mark.parametrize(
    ("answer", "is_right"), [("the Old Mill.", True), ("old mill", True), ("mill", False), ("", False)]
)
def test_a_found_answer_is_compared_without_case_articles_and_punctuation(answer, is_right):
    environment = OPENERS["search"](json.dumps({"passages": ["x"], "answers": ["Old Mill", "the mill house"]}))
    assert environment.judge(answer) is is_right and environment.judge("Mill House") is True


def test_a_program_shows_what_it_prints_and_how_it_failed():
    assert run_python("print('a')\nprint(2**10)") == "a\n1024"
    assert run_python("x = 1") == "(nothing was printed)"
    draws = [run_python("import random\nprint(random.random())") for _ in range(2)]
    assert draws[0] == draws[1]
    for code, message in (
        ("print('before')\n1/0", "ZeroDivisionError: division by zero\nbefore"),
        ("def", "SyntaxError"),
        ("open('/etc/passwd')", "FileNotFoundError"),
        ("import socket\nsocket.socket()", "PermissionError"),
    ):
        with pytest.raises(ToolError, match=message):
            run_python(code)
    assert len(run_python("print('x' * 100_000)")) == 10_000
    with pytest.raises(ToolTimeoutError, match="used up its time or memory, or ended its process"):
        run_python("import os\nprint('passed')\nos._exit(0)")
    assert run_python("print(1)") == "1", "a new sandbox"


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_conversation_of_a_task_ends_with_its_answer(kind):
    (task,) = choose_tasks(kind, 1)
    messages = conversation(kind, task)
    assert messages[0]["content"] == task.question and messages[-1]["content"] == task.answer
    calls = [(call["name"], call["arguments"]) for message in messages for call in message["tool_calls"]]
    assert calls == list(task.calls)
    assert [message["role"] for message in messages[1:-1]] == ["assistant", "tool"] * len(calls)
