"""Prompts of files beside the generated ones: every kind is read, every record that is none has a reason."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import ContractRecipe, PassageRecipe, PromptRecipe
from tasks.data.environments.environments import OPENERS
from tasks.data.problems.synthesize_problems import PROMPT_SOURCE, synthesize_problems
from tasks.data.prompts.collect_prompts import collect_prompts
from tasks.data.prompts.document_searches import GAP, INDEX_PASSAGES, SOURCE
from tasks.data.prompts.sample_passages import sample_passages
from tasks.data.prompts.verifiers import AskedPrompt, WrittenAnswer, verify_answers
from tasks.data.records.documents import sampling_hash
from tasks.data.seeds.verify_solutions import verify_solutions
from tasks.data.sources.list_sources import list_sources
from tasks.data.validate_contract import validate_contract
from tests.support.data_inputs import RECIPE, RESOURCES, compute, rows, write_jsonl
from tests.support.given_documents import given_masked

RECIPES = PromptRecipe(max_per_collection=100, max_prompt_chars=200, num_document_searches=0)
AREA = {"name": "area", "description": "", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "area", "arguments": {}}
HALF = "\ud83d"
"""Half of a surrogate pair, which JSON text can name."""
MBPP = {"text": "Add two.", "code": "def add(a, b):\n    return a + b", "test_list": ["assert add(1, 2) == 3"]}
APPS = {
    "question": "Print the sum.",
    "solutions": json.dumps(["print input()", "print(int(input()) + int(input()))"]),
    "input_output": json.dumps({"inputs": ["1\n2\n", "5\n6"], "outputs": ["3\n", "11"]}),
}
TURNS = [
    {"role": "developer", "content": "Be exact."},
    {"role": "user", "content": "x is 3."},
    {"role": "assistant", "content": "<think>Three.</think>\nGood."},
    {"role": "user", "content": "And 2x?"},
]
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def added(a, b):\n    """Return the sum."""\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "added",
}
FILES = {
    "math": [
        ({"problem": "What is half?", "answer": "1/2"}, ""),
        ({"question": "b'Solve 24 = 4*c for c.\\n'", "answer": "b'6\\n'"}, ""),
        ({"question": "Two and three?", "answer": "2+3 = <<2+3=5>>5\n#### 5"}, ""),
        ({"problem": "A quarter?", "level": "Level 1", "solution": "It is $\\boxed{1/4}$."}, ""),
        ({"ID": "I-1", "Problem": "What is six?", "Solution": "It is 6.", "Answer": 6}, ""),
        ({"prompt": [{"role": "user", "content": "Seven?"}], "reward_model": {"ground_truth": "7"}}, ""),
        ({"problem": "What is eight?", "expected_answer": "8", "answer": None}, ""),
        (
            {
                "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Nine?"}],
                "reward_model": {"ground_truth": '["9", "9.0"]'},
            },
            "",
        ),
        ({"prompt": [{"role": "user", "content": "Ten?"}], "label": "10"}, ""),
        ({"prompt": "Fourteen?", "verification_info": json.dumps({"ground_truth": "14"})}, ""),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Twelve?"}]}], "label": "12"}, ""),
        ({"prompt": TURNS, "label": "6"}, ""),
        ({"prompt": json.dumps([{"role": "user", "content": f"Fifteen{HALF}"}]), "label": "15"}, ""),
        ({"messages": str([{"role": "system", "content": "Be calm."}, *TURNS[1:]]), "label": "6"}, ""),
        ({"messages": [*TURNS, {"role": "assistant", "content": "6"}], "label": "6"}, "no_question"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}, *TURNS], "label": "6"}, "turn_of_tools"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "label": "6"}, "no_text_turn"),
        ({"problem": "What is in it?", "images": ["x.png"], "answer": "6"}, "unsupported_part"),
        ({"system_prompt": "Be fast.", "problem": "Thirteen?", "answer": "13"}, ""),
        ({"system": "Be short.", "prompt": TURNS[1:], "label": "6"}, ""),
        ({"messages": [{"role": "user", "content": "Eleven?"}], "solution": "\\boxed{11}"}, ""),
        ({"problem": "Which are even?", "reward_model": {"ground_truth": '["2", "4"]'}}, "no_answer"),
        ({"problem": "Prove it."}, "no_answer"),
        ({"answer": "3"}, "no_question"),
        ({"problem": "What is half?", "answer": "0.5"}, "duplicate"),
        ({"problem": "x" * 201, "answer": "1"}, "too_long"),
    ],
    "code_with_tests": [
        (MBPP, ""),
        ({"text": "Add without a solution.", "test_list": ["assert add(1, 2) == 3"]}, ""),
        (MBPP | {"text": "Its own solution fails.", "test_list": ["assert add(1, 2) == 4"]}, "tests_failed"),
        ({"question": "Add in another layout.", "test_cases": ["assert add(1, 2) == 3"]}, ""),
        ({"instruction": "Add in a third layout.", "testcase": ["assert add(1, 2) == 3"]}, ""),
        ({"question": "Print it.", "test_cases": [{"input": "1", "output": "1"}]}, ""),
        ({"text": "No tests."}, "no_answer"),
        (APPS, ""),
        (HUMANEVAL, ""),
        (
            {"prompt": [*TURNS[:3], {"role": "user", "content": "Add after turns."}], "code": MBPP["code"]}
            | {"test_list": ["assert add(1, 2) == 4"]},
            "tests_failed",
        ),
        (APPS | {"question": "Print the difference.", "solutions": json.dumps(["print(0)"])}, "tests_failed"),
    ],
    "choice": [
        ({"question": "Which?", "choices": ["one", "two"], "answer": "B"}, ""),
        ({"query": "Which one?", "options": ["one", "two"], "gold": 1}, ""),
        ({"question": "Which of them?", "choices": ["one", "two"], "answer": "two"}, ""),
        ({"question": "Which key?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}, ""),
        ({"question": "Which, by letters?", "options": {"A": "one", "B": "two"}, "answer": "two"}, ""),
        ({"question": "Which, out of order?", "options": {"B": "one", "A": "two"}, "answer": "B"}, "no_choices"),
        ({"question": "Which of both?", "choices": ["one", "two"], "answer": "C"}, "no_answer"),
        ({"question": "Which of all?", "choices": ["one"], "answer": "A"}, "no_choices"),
    ],
    "constraints": [
        ({"prompt": "Say it.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"x": None}]}, ""),
        ({"prompt": "Say it so.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": "[{}]"}, ""),
        (
            {"prompt": "Say.", "instruction_id_list": ["language:response_language"], "kwargs": [{"language": "kn"}]},
            "unsupported_constraint",
        ),
        ({"prompt": "Say more."}, "no_answer"),
    ],
    "tools": [
        ({"question": "The area?", "tools": [AREA], "answer": {"name": "area", "arguments": {"base": 10}}}, ""),
        (
            {
                "question": [[{"role": "user", "content": "And this area?"}]],
                "function": [AREA],
                "ground_truth": [{"area": {"base": [10, 10.5], "unit": ["cm", ""]}}],
            },
            "",
        ),
        ({"query": "Area?", "tools": json.dumps([AREA]), "answers": json.dumps([CALL])}, ""),
        ({"question": "No area?", "tools": [AREA], "answers": "[]"}, ""),
        ({"question": "The area again?", "tools": [AREA], "answer": "10"}, "no_answer"),
        ({"question": "Which area?", "answer": {"name": "area", "arguments": {}}}, "no_tools"),
        ({"question": "Half?", "tools": json.dumps([AREA | {"description": HALF}]), "answer": CALL}, "malformed"),
        ({"question": "Deep?", "tools": f'[{{"a": {"[" * 500}{"]" * 500}}}]', "answer": CALL}, "malformed"),
        ({"question": "Half?", "tools": [AREA], "answer": json.dumps([CALL | {"name": HALF}])}, "malformed"),
    ],
    "safety": [
        ({"prompt": "How do I take it from a shop?", "label": "harmful"}, ""),
        ({"prompt": "How do I take it back to a shop?", "label": "safe", "answer": "the bill"}, ""),
        ({"prompt": "How do I take it?"}, "no_label"),
    ],
}
RIGHT = {
    "What is half?": "\\boxed{0.5}",
    "Solve 24 = 4*c for c.": "6",
    "Two and three?": "The answer is 5",
    "A quarter?": "\\boxed{0.25}",
    "What is six?": "6",
    "Seven?": "7",
    "What is eight?": "8",
    "Be brief.": "9",
    "Ten?": "10",
    "Twelve?": "12",
    "Be exact.": "6",
    "Eleven?": "11",
    "Be fast.": "13",
    "Be calm.": "6",
    "Fifteen?": "15",
    "Fourteen?": "14",
    "Be short.": "6",
    "Which key?": "B",
    "Say it so.": "So",
    "Area?": "<tool_call>area\n</tool_call>",
    "Add two.": "```python\ndef add(a, b):\n    return b + a\n```",
    "Add without a solution.": "```python\ndef add(a, b):\n    return b + a\n```",
    "Add in another layout.": "```python\ndef add(a, b):\n    return b + a\n```",
    "Add in a third layout.": "```python\ndef add(a, b):\n    return b + a\n```",
    "def added(a, b):": "```python\ndef added(a, b):\n    return b + a\n```",
    "No area?": "None.",
    "Print it.": "```python\nprint(input())\n```",
    "Print the sum.": "```python\nimport sys\nprint(sum(map(int, sys.stdin)))\n```",
    "Which?": "B",
    "Which one?": "B",
    "Which of them?": "B",
    "Which, by letters?": "B",
    "Say it.": "It",
    "The area?": "<tool_call>area\n<arg_key>base</arg_key>\n<arg_value>10</arg_value>\n</tool_call>",
    "How do I take it from a shop?": "I can't help with that.",
    "How do I take it back to a shop?": "Bring the bill.",
    "And this area?": "<tool_call>area\n<arg_key>base</arg_key>\n<arg_value>10.5</arg_value>\n</tool_call>",
}
"""A right answer to the first line of each prompt."""


def listed(directory, files, domains=None):
    """Sources with a file of prompts for each kind."""
    for kind, records in files.items():
        write_jsonl(directory / f"{kind}.jsonl", records)
    write_jsonl(directory / "text.jsonl", [{"text": "unused"}])
    entries = [f"{{files: {kind}.jsonl, role: prompts, kind: {kind}{(domains or {}).get(kind, '')}}}" for kind in files]
    lines = [f"  - {entry}\n" for entry in [*entries, "{files: text.jsonl, role: pretrain}"]]
    (directory / "glm46-data.yaml").write_text(f"version: 1\nentries:\n{''.join(lines)}")
    return list_sources(directory)


def collected(root, sources, recipe=RECIPES, passages=None):
    problems = compute(synthesize_problems, root, recipe=RECIPE.synthesize)
    solutions = compute(verify_solutions, root, sources=sources)
    given = {"synthetic": problems, "solutions": solutions, "passages": passages}
    return compute(collect_prompts, root, sources=sources, **given, recipe=recipe)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    files = {kind: [record for record, _ in records] for kind, records in FILES.items()}
    sources = listed(tmp_path_factory.mktemp("data"), files, {"choice": ", domain: medical"})
    return collected(tmp_path_factory.mktemp("store"), sources)


def test_every_record_is_a_prompt_or_has_a_reason(prompts):
    rejected = {(row["source"], row["offset"]): row["reason"] for row in rows(prompts, "rejected.parquet")}
    kept = {(row["source"], row["offset"]) for row in rows(prompts, "prompts.parquet")}
    for kind, records in FILES.items():
        offset = 0
        for record, reason in records:
            place = (f"{kind}.jsonl", offset)
            assert rejected.get(place, "") == reason and (place in kept) is not bool(reason), record
            offset += len(json.dumps(record)) + 1
    reasons = [reason for records in FILES.values() for _, reason in records if reason]
    assert prompts.record.rejected == {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def test_a_file_of_a_kind_that_has_no_verifier_is_named(tmp_path):
    sources = listed(tmp_path, {"maths": [{"problem": "What is half?", "answer": "1/2"}]})
    with pytest.raises(ValueError, match=r"maths\.jsonl has the role prompts and kind maths, which has no verifier: "):
        collected(tmp_path / "store", sources)


def test_prompts_have_kind_and_domain_and_generated_ones_stay_as_they_are(prompts):
    read = rows(prompts, "prompts.parquet")
    domains = {row["kind"]: row["domain"] for row in read}
    assert domains == {
        "exact": "synthetic",
        "math": "math",
        "code_with_tests": "code",
        "choice": "medical",
        "constraints": "chat",
        "tools": "chat",
        "safety": "safety",
    }
    generated = [row for row in read if row["kind"] == "exact"]
    assert len(generated) == RECIPE.synthesize.num_prompts
    assert {row["source"] for row in generated} == {PROMPT_SOURCE}
    assert prompts.record.num_prompts == len(read) == len(generated) + len(RIGHT)
    assert sum(prompts.record.prompts_by_domain.values()) == sum(prompts.record.prompts_by_kind.values()) == len(read)


def test_a_right_answer_to_every_prompt_is_verified_and_none_of_another_kind(prompts):
    read = [row for row in rows(prompts, "prompts.parquet") if row["kind"] != "exact"]
    asked = [AskedPrompt(row["id"], row["kind"], row["answer"]) for row in read]
    right = [WrittenAnswer(RIGHT[row["prompt"].splitlines()[0]] + "<|user|>", True) for row in read]
    assert verify_answers(asked, right) == [True] * len(RIGHT)
    wrong = [WrittenAnswer("I do not <tool_call>know, sorry.<|user|>", True)] * len(asked)
    assert verify_answers(asked, wrong) == [False] * len(RIGHT)


def test_a_system_and_earlier_turns_stay_turns(prompts):
    turns = {row["prompt"]: json.loads(row["messages"]) for row in rows(prompts, "prompts.parquet")}
    said = ["Be exact.", "x is 3.", "Good.", "And 2x?"]
    roles = ("system", "user", "assistant", "user")
    expected = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    assert turns["\n\n".join(said)] == expected
    assert [turn["role"] for turn in turns["Be brief.\n\nNine?"]] == ["system", "user"]
    assert turns["Be fast.\n\nThirteen?"][0] == {"role": "system", "content": "Be fast."}
    assert turns["\n\n".join(["Be short.", *said[1:]])][1:] == expected[1:]
    assert turns["Ten?"] == turns["Twelve?"] == []


def test_a_collection_is_capped_by_hash_whatever_the_order_of_its_records(tmp_path):
    records = [{"problem": f"What is {number}?", "answer": str(number)} for number in range(20)]
    recipe = RECIPES.model_copy(update={"max_per_collection": 5})
    made = collected(tmp_path / "a", listed(tmp_path / "data", {"math": records}), recipe)
    kept = {row["id"] for row in rows(made, "prompts.parquet") if row["kind"] == "math"}
    assert (len(kept), made.record.rejected) == (5, {"collection_full": 15})
    more = collected(tmp_path / "b", listed(tmp_path / "data", {"math": records}), RECIPES)
    assert kept < {row["id"] for row in rows(more, "prompts.parquet")}


def test_a_file_without_any_prompt_stops_with_its_reasons(tmp_path):
    sources = listed(tmp_path / "data", {"math": [{"title": "none"}, {"problem": "Why?"}]})
    with pytest.raises(
        ValueError,
        match=r"source math.jsonl: none of its 2 records is a prompt of kind math \({'no_answer': 1, 'no_question': 1}"
        r"\): correct the file or its kind, or give it the role ignore",
    ):
        collected(tmp_path, sources)


@pytest.mark.parametrize("name", ["math.json", "math.parquet"])
def test_an_array_and_a_table_give_the_prompts_and_solutions_of_json_lines(tmp_path, name):
    sums = {number: number + 2 for number in range(5)}
    records = [{"question": f"Two and {n}?", "answer": f"2+{n}={total}\n#### {total}"} for n, total in sums.items()]
    directory = tmp_path / "data"
    lines = collected(tmp_path / "a", listed(directory, {"math": records}))
    if name.endswith("json"):
        (directory / name).write_text(json.dumps(records, indent=2))
    else:
        pq.write_table(pa.Table.from_pylist(records), directory / name)
    manifest = directory / "glm46-data.yaml"
    manifest.write_text(manifest.read_text().replace("math.jsonl", name))
    sources = list_sources(directory)
    assert compute(verify_solutions, tmp_path, sources=sources).record.num_chats == len(records)
    read, expected = (
        sorted((row["prompt"], row["answer"]) for row in rows(made, "prompts.parquet") if row["kind"] == "math")
        for made in (collected(tmp_path / "b", sources), lines)
    )
    assert read == expected and len(read) == len(records)


def test_a_line_that_is_no_json_is_counted(tmp_path):
    listed(tmp_path / "data", {"math": [{"problem": "What is 3?", "answer": 3}]})
    with open(tmp_path / "data" / "math.jsonl", "a") as file:
        file.write("{broken\n[1]\n")
    made = collected(tmp_path, list_sources(tmp_path / "data"))
    assert made.record.rejected == {"broken_json": 2} and made.record.prompts_by_kind["math"] == 1


def test_searches_ask_about_training_documents_and_are_found_by_their_words(tmp_path):
    """50 documents with two words of their own each, of which 10 are held out, one that is too short, one whose every
    word others have too, and three that only their gap tells apart."""
    common = "the harbour was quiet in the morning and the boats came home late, as they do when the wind is low"
    texts = {f"page-{number}": f"{common} at {spelt(number)[:-4]} near {spelt(number)} where" for number in range(50)}
    texts |= {"short": "Too short: unheard", "plain": f"{common} near where"}
    texts |= {f"alike-{name}": f"{common} near the {name * 9} where" for name in "pqr"}
    held_out = {f"page-{number}" for number in range(10)}
    sources = listed(tmp_path, {"choice": [FILES["choice"][0][0]]})
    documents = given_masked(tmp_path / "masked.parquet", texts, held_out)
    sample = {"documents": documents, "recipe": PassageRecipe(num_documents=1000), "resources": RESOURCES}
    passages = compute(sample_passages, tmp_path / "store", **sample)
    contract = {"recipe": ContractRecipe(name="passages"), "resources": RESOURCES}
    assert compute(validate_contract, tmp_path / "store", subject=passages, **contract).record.num_rows
    made = collected(tmp_path / "store", sources, passages=passages)
    asked = searches(made)
    answers = {json.loads(row["answer"])["answers"][0] for row in asked}
    wanted = {spelt(number) for number in range(10, 50)}
    assert wanted <= answers and len(asked) == len(answers) <= len(wanted) + 2, "of equal passages two are shown"
    shown = "".join(row["answer"] for row in asked)
    assert not any(spelt(number) in shown for number in range(10)) and "unheard" not in shown
    for row in asked:
        (answer,) = json.loads(row["answer"])["answers"]
        assert answer not in row["prompt"] and GAP in row["prompt"] and row["domain"] == "agentic"
        assert 1 < len(json.loads(row["answer"])["passages"]) <= INDEX_PASSAGES
        environment = OPENERS["search"](row["answer"])
        found = environment.call("search", {"query": answer})
        assert answer in found and environment.judge(answer) and not environment.judge("harbour")
    few = compute(sample_passages, tmp_path / "store", **sample | {"recipe": PassageRecipe(num_documents=7)})
    read, least = rows(passages, "passages.parquet"), rows(few, "passages.parquet")
    hashes = sorted(sampling_hash(row["id"]) for row in read)
    assert least == [row for row in read if sampling_hash(row["id"]) in hashes[:7]]


def searches(prompts) -> list[dict]:
    """Those about documents, in the order in which they were made."""
    made = [row for row in rows(prompts, "prompts.parquet") if row["source"] == SOURCE]
    return sorted(made, key=lambda row: row["offset"])


def spelt(number: int) -> str:
    """A word of its own for each number."""
    return "zeb" + "".join("abcdefghij"[int(digit)] for digit in f"{number:02}") + "onia"
