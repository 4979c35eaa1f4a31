"""Asks a model every benchmark of a suite, by lm-evaluation-harness.

In: a model as the harness knows it, the suite, its data files. Out: figures with intervals, and every item's outcome.
Nothing is written here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from infra.step import Progress
from tasks.data.sandbox.code_sandbox import isolation
from tasks.data.sources.list_sources import SourceListing, list_hub_files, list_named
from tasks.evaluation.benchmarks.benchmark_items import BenchmarkItem, BenchmarkItems, files_of, read_items

if TYPE_CHECKING:
    from lm_eval.api.model import LM

    from configs.schema import Benchmark, Suite
    from tasks.evaluation.benchmarks.suite_results import BenchmarkResult, ItemOutcome, SuiteResult

PACKAGES = ("lm_eval", "torch", "transformers", "tokenizers", "xllamacpp")
WHOLE_PROMPTS = ("retrieval", "tools", "patch", "math_with_python")
"""Kinds whose prompts state what the answer needs: none is cut."""
LIKELIHOOD_KINDS = ("choice", "lettered_choice", "context_choice", "last_word", "text")


@dataclass(frozen=True)
class Asked:
    """What a suite asks: its items, and the files that they come from."""

    name: str
    suite: Suite
    limit: int | None
    files: SourceListing
    items: dict[str, BenchmarkItems]
    """By benchmark."""

    @property
    def needs_likelihoods(self) -> bool:
        return any(benchmark.kind in LIKELIHOOD_KINDS for benchmark in self.suite.benchmarks)

    @property
    def needs_whole_texts(self) -> bool:
        return any(benchmark.kind == "text" for benchmark in self.suite.benchmarks)


def read_suite_items(name: str, suite: Suite, data: str | None, limit: int | None) -> Asked:
    """As read_listed_items, of the files of a data directory and of the hub; data may be None where the suite names no
    file of a directory."""
    needed = suite.own_files
    if data is None and needed:
        file = next(iter(needed))
        raise ValueError(
            f"benchmark {needed[file]} of suite {name} reads {file}: name with --data the directory, "
            f"s3://bucket/prefix or hf://owner/name that has this file with the role evaluation"
        )
    own = SourceListing(()) if data is None else list_named(data, needed)
    return read_listed_items(name, suite, SourceListing(own.files + list_hub_files(suite.hub_files).files), limit)


def read_listed_items(name: str, suite: Suite, files: SourceListing, limit: int | None) -> Asked:
    """Everything that can be wrong without a model is found here. Raises ValueError for data that do not fit the suite,
    and on a machine without a sandbox for programs."""
    from tasks.evaluation.benchmarks.benchmark_tasks import PROGRAMS

    if any(benchmark.kind in PROGRAMS for benchmark in suite.benchmarks):
        isolation()
    items = {benchmark.name: read_items(benchmark, files, limit) for benchmark in suite.benchmarks}
    tasks = [item.question.task for read in items.values() for item in read.items]
    if any(task is not None and task.tree is not None for task in tasks):
        isolation()
    return Asked(name, suite, limit, files, items)


def run_suite(
    model: LM, asked: Asked, target: str, engine: str, report: Callable[[Progress], None]
) -> tuple[SuiteResult, bytes]:
    """(the result, the file of items as bytes)."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from tasks.evaluation.benchmarks.suite_results import FORMAT, SuiteResult, encode_items

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    outcomes: list[ItemOutcome] = []
    results: list[BenchmarkResult] = []
    for number, benchmark in enumerate(asked.suite.benchmarks):
        report(Progress(number, len(asked.suite.benchmarks), "benchmarks", benchmark.name))
        result, answered = _run_benchmark(model, benchmark, asked)
        results.append(result)
        outcomes += answered
    items = encode_items(outcomes)
    settings: dict[str, object] = {**asked.suite.model_dump(exclude={"benchmarks"}), "limit": asked.limit}
    result = SuiteResult(
        format=FORMAT,
        target=target,
        engine=engine,
        suite=asked.name,
        settings=settings,
        versions={name: version(name) for name in PACKAGES},
        items_sha256=hashlib.sha256(items).hexdigest(),
        benchmarks=tuple(results),
    )
    return result, items


def _run_benchmark(model: LM, benchmark: Benchmark, asked: Asked) -> tuple[BenchmarkResult, list[ItemOutcome]]:
    from lm_eval.evaluator import evaluate

    from tasks.evaluation.benchmarks.benchmark_tasks import harness_task, outcome_of
    from tasks.evaluation.benchmarks.suite_results import BenchmarkFile, BenchmarkResult, figures_of, items_digest

    read, name = asked.items[benchmark.name], benchmark.name
    _prepare(model, benchmark, read.items)
    evaluated: Any = evaluate(
        model,
        {name: harness_task(benchmark, read.items)},
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=getattr(benchmark, "is_chat", False),
    )
    samples = sorted(evaluated["samples"][name], key=lambda sample: sample["doc_id"])
    outcomes = [outcome_of(benchmark, item, sample) for item, sample in zip(read.items, samples, strict=True)]
    metrics = {key.removesuffix(",none"): value for key, value in evaluated["results"][name].items()}
    names = {file.name for pattern in benchmark.file_names for file in files_of(pattern, asked.files)}
    result = BenchmarkResult(
        name=name,
        settings=benchmark.model_dump(),
        files=tuple(
            BenchmarkFile(name=file.name, sha256=file.sha256) for file in asked.files.files if file.name in names
        ),
        num_records=read.num_records,
        left_out=read.left_out,
        num_items=len(outcomes),
        num_cut=getattr(model, "num_cut", None),
        num_unfinished=getattr(model, "num_unfinished", None),
        items_digest=items_digest(outcomes),
        figures=figures_of(outcomes),
        harness={key: value for key, value in metrics.items() if isinstance(value, float)},
    )
    return result, outcomes


def _prepare(model: LM, benchmark: Benchmark, items: list[BenchmarkItem]) -> None:
    """Tell the model what the harness does not pass on."""
    from tasks.evaluation.harness import EngineModel, SuiteModel, ToolRequest

    if isinstance(model, EngineModel):
        model.num_cut = 0
    if isinstance(model, SuiteModel):
        model.num_unfinished = 0
        model.refuses_cuts = benchmark.kind in WHOLE_PROMPTS
        model.runs_python = benchmark.kind == "math_with_python"
        model.tool_requests = {
            item.item_id: ToolRequest(item.question.prompt, json.loads(item.question.tools))
            for item in items
            if item.question.tools
        }
