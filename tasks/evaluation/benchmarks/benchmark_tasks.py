"""A benchmark as a task of lm-evaluation-harness, and the harness's samples as outcomes of items.

The prompts, with their examples, are made by benchmark_items: the harness adds none. Programs are judged in the
project's sandbox; the harness executes nothing.
"""

from __future__ import annotations

import ast
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from pydantic import BaseModel

from configs.schema import Benchmark, LikelihoodBenchmark
from model.text.chat_template import answer_of
from tasks.data.problems.refusals import behaves
from tasks.data.prompts.python_turns import last_words
from tasks.data.prompts.verifiers import agrees_mathematically, calls_functions, follows_constraints, passes_tests
from tasks.data.sandbox.code_sandbox import PASSED, find_verdict
from tasks.data.seeds.code_answers import program_of
from tasks.evaluation.benchmarks.benchmark_items import BenchmarkItem
from tasks.evaluation.benchmarks.question_forms import COMPLETE
from tasks.evaluation.benchmarks.repository_tasks import RepositoryTask, judge_patch
from tasks.evaluation.benchmarks.retrieval_items import states_code
from tasks.evaluation.comparisons import ACCURACY, BITS_PER_BYTE
from tasks.evaluation.harness import QuietTask

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

NORMALISED = "accuracy_normalised"
"""Accuracy by a choice's log-probability over its number of characters (acc_norm)."""
WELL_FORMED = "well_formed"
"""Share of the answers that hold a patch which can be read and, where the source is here, fits it."""
PROGRAMS = ("completed_program", "program", "math_with_python")
"""Kinds that run what a model wrote."""
RIGHT, FORMED = "acc", "formed"


class ItemOutcome(BaseModel):
    """What was asked, what came back, and how it was judged."""

    benchmark: str
    part: str = ""
    """The part of the benchmark with a figure of its own: a category of function calling, a length of retrieval."""
    item_id: str
    instance_id: str = ""
    """SWE-bench's name of an issue; empty for other kinds."""
    example_ids: tuple[str, ...]
    """Items shown as answered examples, in their order."""
    prompt: str
    """As the model was given it, with examples and chat template; of context_choice the first context. Messages as
    JSON for a server that applies the template itself."""
    choices: tuple[str, ...]
    expected: str
    output: str | None
    """What was generated; a JSON list where there are several answers, null where nothing was generated."""
    num_samples: int = 1
    """Answers that the scores are means of."""
    log_probabilities: tuple[float, ...]
    """Of every choice, of the last word, or of the whole text; empty where an answer was generated."""
    scores: dict[str, float]
    """Per figure: 1 right, 0 wrong; for bits_per_byte the number of bits."""
    num_bytes: int
    """Of the scored text, for bits_per_byte; else 1."""


def harness_task(benchmark: Benchmark, items: Sequence[BenchmarkItem]) -> ConfigurableTask:
    """The items as the harness's documents, in their order."""
    shape = _shape(benchmark, {item.item_id: item.question.task for item in items if item.question.task is not None})
    rows = [_row(benchmark.kind, item) for item in items]
    dataset = {"test": Dataset.from_list(rows)}
    return QuietTask(
        config={
            "task": benchmark.name,
            "custom_dataset": lambda **options: dataset,
            "test_split": "test",
            "num_fewshot": 0,
            "doc_to_text": "text",
            **shape,
        }
    )


def _row(kind: str, item: BenchmarkItem) -> dict[str, Any]:
    question = item.question
    choices = [item.prompt + choice for choice in question.choices] if kind == "context_choice" else question.choices
    target = f" {question.expected}" if kind == "last_word" else question.expected
    # A request with tools is looked up by its id where the chat template is applied.
    text = item.item_id if question.tools else item.prompt
    return {"item_id": item.item_id, "text": text, "choices": list(choices), "right": question.right, "target": target}


def _shape(benchmark: Benchmark, tasks: Mapping[str, RepositoryTask]) -> dict[str, Any]:
    """The part of a task's configuration that its kind decides."""

    is_judged = not tasks or all(task.tree is not None for task in tasks.values())
    measured = [*([RIGHT] if is_judged else []), *([FORMED] if tasks else [])]

    def judged(row: Mapping[str, Any], answer: str) -> dict[str, float]:
        if row["item_id"] in tasks:
            verdict = judge_patch(tasks[row["item_id"]], answer_of(answer))
            resolved = {} if verdict.is_resolved is None else {RIGHT: float(verdict.is_resolved)}
            return {**resolved, FORMED: float(verdict.is_well_formed)}
        return {RIGHT: float(is_right(benchmark.kind, row["text"], row["target"], answer))}

    def mean_judged(row: Mapping[str, Any], answers: Sequence[Sequence[str]]) -> dict[str, float]:
        scores = [judged(row, answer) for answer in answers[0]]
        return {name: sum(each[name] for each in scores) / len(scores) for name in scores[0]}

    if not isinstance(benchmark, LikelihoodBenchmark):
        return {
            "output_type": "generate_until",
            "doc_to_target": "target",
            "generation_kwargs": {
                "until": benchmark.until,
                "max_gen_toks": benchmark.max_new_tokens,
                "do_sample": benchmark.temperature > 0,
                "temperature": benchmark.temperature,
            },
            "repeats": benchmark.num_samples,
            "filter_list": [{"name": "none", "filter": [{"function": "take_first_k", "k": benchmark.num_samples}]}],
            "process_results": mean_judged,
            "metric_list": [_mean(name) for name in measured],
        }
    if benchmark.kind == "text":
        return {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "target"}
    if benchmark.kind == "last_word":
        return {"output_type": "loglikelihood", "doc_to_target": "target", "metric_list": [_mean(RIGHT)]}
    is_context = benchmark.kind == "context_choice"
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "right" if is_context else "text",
        "doc_to_choice": "choices",
        "doc_to_target": "target" if is_context else "right",
        "metric_list": [_mean(RIGHT), *([_mean("acc_norm")] if benchmark.kind == "choice" else [])],
    }


def _mean(name: str) -> dict[str, Any]:
    return {"metric": name, "aggregation": "mean", "higher_is_better": True}


def is_right(kind: str, prompt: str, expected: str, text: str) -> bool:
    """Whether a generated text answers an item. A program whose tests come to no verdict is not right."""
    if kind == "completed_program":
        program, tests = (prompt + text, expected)
        if prompt.startswith(COMPLETE):
            given = json.loads(expected)
            program, tests = whole_program(given["begun"], given["name"], answer_of(text)), given["tests"]
        return find_verdict(program, tests, "") == PASSED
    answer = last_words(text) if kind == "math_with_python" else answer_of(text)
    if not answer:
        return False
    if kind == "program":
        return passes_tests(answer, expected) is True
    if kind in ("math", "math_with_python"):
        return agrees_mathematically(answer, expected)
    if kind == "constraints":
        return follows_constraints(answer, expected)
    if kind == "tools":
        return calls_functions(answer, expected)
    if kind == "retrieval":
        return states_code(answer, expected)
    if kind in ("refusal", "over_refusal"):
        return behaves(answer, expected)
    assert kind == "exact", kind
    return answer == expected.strip()


def whole_program(begun: str, name: str, answer: str) -> str:
    """A begun program with the function that an answer in a chat holds, whole or only its rest. What the beginning
    imports and defines before the function stays."""
    code = program_of(answer)
    if _defines(code, name):
        return f"{begun.rstrip()}\n    pass\n\n{code}"
    return begun + (code if code.startswith((" ", "\t")) else textwrap.indent(code, "    "))


def _defines(code: str, name: str) -> bool:
    try:
        nodes = ast.parse(code).body
    except SyntaxError:
        return False
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in nodes)


def outcome_of(benchmark: Benchmark, item: BenchmarkItem, sample: dict[str, Any]) -> ItemOutcome:
    """An item's outcome from the harness's sample. Raises ValueError for a log-probability that is not finite."""
    responses = sample["filtered_resps"]
    scores, num_bytes = {}, 1
    if benchmark.kind == "text":
        num_bytes = len(item.question.expected.encode())
        scores[BITS_PER_BYTE] = -responses[0] / math.log(2)
        log_probabilities = (responses[0],)
    else:
        if RIGHT in sample:
            scores[ACCURACY] = float(sample[RIGHT])
        log_probabilities = tuple(each[0] for each in responses) if isinstance(benchmark, LikelihoodBenchmark) else ()
    if "acc_norm" in sample:
        scores[NORMALISED] = float(sample["acc_norm"])
    if FORMED in sample:
        scores[WELL_FORMED] = float(sample[FORMED])
    if not all(map(math.isfinite, log_probabilities)):
        raise ValueError(
            f"benchmark {benchmark.name}, item {item.item_id}: the model's log-probabilities are not finite: its "
            f"weights are broken, export the checkpoint again"
        )
    return ItemOutcome(
        benchmark=benchmark.name,
        part=item.question.part,
        item_id=item.item_id,
        instance_id="" if item.question.task is None else item.question.task.instance_id,
        example_ids=item.example_ids,
        prompt=sample["arguments"][0][0],
        choices=item.question.choices,
        expected=item.question.expected,
        output=None if isinstance(benchmark, LikelihoodBenchmark) else _written(responses[0]),
        num_samples=1 if isinstance(benchmark, LikelihoodBenchmark) else benchmark.num_samples,
        log_probabilities=log_probabilities,
        scores=scores,
        num_bytes=num_bytes,
    )


def _written(answers: Sequence[str]) -> str:
    return answers[0] if len(answers) == 1 else json.dumps(answers, ensure_ascii=False)
