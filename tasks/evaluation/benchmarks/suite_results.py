"""The results of a suite as files, and the paired comparison of two.

FILE.json has the figures and everything that decided them; FILE.items.jsonl beside it one line per item. The items are
written first, and each file appears whole: a FILE.json has its items.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.files.atomic_files import replacing
from infra.step import digest_of
from tasks.evaluation.benchmarks.benchmark_tasks import ItemOutcome
from tasks.evaluation.benchmarks.repository_tasks import prediction
from tasks.evaluation.comparisons import BITS_PER_BYTE
from tasks.evaluation.intervals import Interval, paired_share_interval, ratio_interval, share_interval

FORMAT = "glm46-eval-2"
SAME_SETTINGS = ("enable_thinking", "sequence_length")
"""Of a suite, by which answers differ whoever gives them."""
ITEMS_SUFFIX, PREDICTIONS_SUFFIX = ".items.jsonl", ".predictions.jsonl"


class Figure(BaseModel):
    name: str
    part: str = ""
    """The part of the benchmark that it is measured on; empty for all items."""
    num_items: int
    value: float
    interval: Interval | None
    """95 %; null for a single item, which says nothing about others."""


class BenchmarkFile(BaseModel):
    """A file that was read."""

    name: str
    sha256: str


class BenchmarkResult(BaseModel):
    name: str
    settings: dict[str, object]
    """The benchmark as the suite states it."""
    files: tuple[BenchmarkFile, ...]
    num_records: int
    left_out: dict[str, int]
    """Records by reason that were not asked."""
    num_items: int
    num_cut: int | None = None
    """Prompts that lost their beginning, as sequence_length has no room for them; null of a server."""
    num_unfinished: int | None = None
    """Answers that ended because they had max_new_tokens."""
    items_digest: str
    """Over items, examples and expected answers: equal where two results answer the same questions."""
    figures: tuple[Figure, ...]
    harness: dict[str, float]
    """The harness's own metrics."""


class SuiteResult(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: str
    target: str
    engine: str
    """What computed: glm46, llama.cpp, or the server's URL."""
    suite: str
    settings: dict[str, object]
    """The suite's settings without its benchmarks, and the limit."""
    versions: dict[str, str]
    items_sha256: str
    """Of the file of items."""
    benchmarks: tuple[BenchmarkResult, ...]

    def describe(self) -> str:
        """A table of the figures."""
        lines = [f"{'benchmark':<18}{'figure':<22}{'value':>8}  {'95 %':<18}{'items':>6}"]
        for benchmark in self.benchmarks:
            for figure in benchmark.figures:
                lines.append(
                    f"{benchmark.name:<18}{figure.part or figure.name:<22}{figure.value:>8.4f}  "
                    f"{_written(figure.interval):<18}{figure.num_items:>6}"
                )
            if benchmark.num_cut:
                lines.append(
                    f"  {benchmark.num_cut} prompts of {benchmark.name} lost their beginning: raise sequence_length"
                )
            if benchmark.num_unfinished:
                lines.append(f"  {benchmark.num_unfinished} answers to {benchmark.name} ended at max_new_tokens")
        return "\n".join(lines)


class PairedDifference(BaseModel):
    """Second result minus first, on the same items."""

    benchmark: str
    figure: str
    first: float
    second: float
    difference: float
    interval: Interval | None
    verdict: str
    """better, worse, or undecided where the interval holds 0."""
    num_items: int


def figures_of(outcomes: Sequence[ItemOutcome]) -> tuple[Figure, ...]:
    """Every figure of one benchmark's items, with its interval: over all, then over each part."""
    parts = [part for part in dict.fromkeys(each.part for each in outcomes) if part]
    return tuple(
        _figure(name, part, [each for each in outcomes if part in ("", each.part)])
        for name in outcomes[0].scores
        for part in ("", *parts)
    )


def _figure(name: str, part: str, outcomes: Sequence[ItemOutcome]) -> Figure:
    scores, weights = [each.scores[name] for each in outcomes], [each.num_bytes for each in outcomes]
    tries = [each.num_samples for each in outcomes]
    rights = [score * tried for score, tried in zip(scores, tries, strict=True)]
    interval = ratio_interval(scores, weights) if name == BITS_PER_BYTE else share_interval(rights, tries)
    return Figure(
        name=name, part=part, num_items=len(outcomes), value=sum(scores) / sum(weights), interval=bounded(interval)
    )


def bounded(interval: Interval) -> Interval | None:
    """None for an interval without ends, which says nothing."""
    return interval if math.isfinite(sum(interval)) else None


def _written(interval: Interval | None) -> str:
    return "-" if interval is None else f"[{interval[0]:.4f}, {interval[1]:.4f}]"


def items_digest(outcomes: Sequence[ItemOutcome]) -> str:
    """Digest of what was asked, without how a target was given it."""
    return digest_of([[each.item_id, each.example_ids, each.choices, each.expected] for each in outcomes])


def items_path(path: Path) -> Path:
    """Where the items of a result are."""
    return path.with_name(path.name.removesuffix(".json") + ITEMS_SUFFIX)


def predictions_path(path: Path, benchmark: str) -> Path:
    """Where the predictions of a benchmark of kind patch are, as SWE-bench's harness reads them."""
    return path.with_name(f"{path.name.removesuffix('.json')}.{benchmark}{PREDICTIONS_SUFFIX}")


def encode_items(outcomes: Sequence[ItemOutcome]) -> bytes:
    """One JSON line per item."""
    return "".join(outcome.model_dump_json() + "\n" for outcome in outcomes).encode()


def write_result(path: Path, result: SuiteResult, items: bytes) -> None:
    """Write the items, the predictions of benchmarks of kind patch, then the result."""
    assert result.items_sha256 == hashlib.sha256(items).hexdigest()
    written = {items_path(path): items}
    outcomes = [ItemOutcome.model_validate_json(line) for line in items.splitlines()]
    for name in dict.fromkeys(each.benchmark for each in outcomes if each.instance_id):
        lines = (
            prediction(each.instance_id, result.target, each.output or "")
            for each in outcomes
            if each.benchmark == name
        )
        written[predictions_path(path, name)] = "".join(lines).encode()
    written[path] = result.model_dump_json(indent=1).encode() + b"\n"
    for target, data in written.items():
        with replacing(target) as temporary:
            temporary.write_bytes(data)


def read_result(path: Path) -> tuple[SuiteResult, dict[str, list[ItemOutcome]]]:
    """A result with its items by benchmark. Raises ValueError for a file that is none, or whose items are others."""
    try:
        result = SuiteResult.model_validate_json(path.read_bytes())
        items = items_path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror}): name a file of glm46 eval") from error
    except ValidationError as error:
        raise ValueError(f"{path} is no result of glm46 eval: name the file that --output wrote") from error
    if result.format != FORMAT or hashlib.sha256(items).hexdigest() != result.items_sha256:
        raise ValueError(f"{items_path(path)} is not the file of items that {path} was written with: evaluate again")
    by_benchmark: dict[str, list[ItemOutcome]] = {}
    for line in items.splitlines():
        outcome = ItemOutcome.model_validate_json(line)
        by_benchmark.setdefault(outcome.benchmark, []).append(outcome)
    return result, by_benchmark


ItemPair = tuple[ItemOutcome, ItemOutcome]
"""The same item answered by two models."""


def paired_items(first_path: Path, second_path: Path) -> dict[str, list[ItemPair]]:
    """The items of two results by benchmark. Raises ValueError where they do not answer the same questions."""
    (first, first_items), (second, second_items) = read_result(first_path), read_result(second_path)
    for name in SAME_SETTINGS:
        if first.settings.get(name) != second.settings.get(name):
            raise ValueError(
                f"{first_path} has {name} {first.settings.get(name)} and {second_path} {second.settings.get(name)}: "
                f"evaluate both with the same --suite"
            )
    theirs = {benchmark.name: benchmark for benchmark in second.benchmarks}
    if [benchmark.name for benchmark in first.benchmarks] != list(theirs):
        raise ValueError(
            f"{first_path} and {second_path} hold different benchmarks: evaluate both with the same --suite"
        )
    for benchmark in first.benchmarks:
        other = theirs[benchmark.name]
        if (benchmark.items_digest, benchmark.settings) != (other.items_digest, other.settings):
            raise ValueError(
                f"benchmark {benchmark.name}: {first_path} has {benchmark.num_items} items and {second_path} "
                f"{other.num_items}, which are not the same questions in the same form: evaluate both with the same "
                f"--suite, --data and --limit"
            )
    return {name: list(zip(items, second_items[name], strict=True)) for name, items in first_items.items()}


def compare_results(first_path: Path, second_path: Path) -> list[PairedDifference]:
    """Every figure of two results, item by item. Raises ValueError where they do not answer the same questions."""
    pairs = paired_items(first_path, second_path)
    return [
        _difference(benchmark.name, figure, pairs[benchmark.name])
        for benchmark in read_result(first_path)[0].benchmarks
        for figure in benchmark.figures
    ]


def paired_difference(figure: str, pairs: Sequence[ItemPair]) -> tuple[float, Interval]:
    """(second minus first, its interval)."""
    changes = [second.scores[figure] - first.scores[figure] for first, second in pairs]
    if figure == BITS_PER_BYTE:
        num_bytes = [first.num_bytes for first, _ in pairs]
        return sum(changes) / sum(num_bytes), ratio_interval(changes, num_bytes)
    tries = [first.num_samples for first, _ in pairs]
    summed = [change * tried for change, tried in zip(changes, tries, strict=True)]
    return sum(changes) / len(changes), paired_share_interval(summed, tries)


def _difference(benchmark: str, figure: Figure, answered: Sequence[ItemPair]) -> PairedDifference:
    name, pairs = figure.name, [pair for pair in answered if figure.part in ("", pair[0].part)]
    difference, bounds = paired_difference(name, pairs)
    interval = bounded(bounds)
    gain = None if interval is None else (-interval[1], -interval[0]) if name == BITS_PER_BYTE else interval
    verdict = "undecided" if gain is None or gain[0] <= 0 <= gain[1] else "better" if gain[0] > 0 else "worse"
    weight = sum(first.num_bytes for first, _ in pairs)
    first, second = (sum(each.scores[name] for each in side) / weight for side in zip(*pairs, strict=True))
    return PairedDifference(
        benchmark=benchmark,
        figure=figure.part or name,
        first=first,
        second=second,
        difference=difference,
        interval=interval,
        verdict=verdict,
        num_items=len(pairs),
    )


class ComparedModel(BaseModel):
    """One side of a comparison, besides its figures."""

    target: str
    engine: str
    num_bytes: int | None
    """Of the weights; null for a server and for a result that is read from a file, likewise the speed."""
    tokens_per_second: float | None
    """One answer at a time, after it has begun."""


class ModelComparison(BaseModel):
    """What `glm46 compare` prints and writes."""

    suite: str
    first: ComparedModel
    second: ComparedModel
    differences: tuple[PairedDifference, ...]
    routing_agreement: float | None
    """Share of positions and layers at which both choose the same experts."""
    not_measured: str
    """What is null, and why; else empty."""

    def describe(self) -> str:
        """The table, second minus first."""
        lines = [f"{'':<8}{'model':<40}{'computed by':<14}{'MB':>10}{'tokens/s':>10}"]
        for name, side in (("first", self.first), ("second", self.second)):
            size = "-" if side.num_bytes is None else f"{side.num_bytes / 1e6:,.1f}"
            speed = "-" if side.tokens_per_second is None else f"{side.tokens_per_second:,.1f}"
            lines.append(f"{name:<8}{side.target[-39:]:<40}{side.engine[:13]:<14}{size:>10}{speed:>10}")
        lines += ["", describe_differences(self.differences)]
        if self.routing_agreement is not None:
            lines += ["", f"same experts: {self.routing_agreement:.2%} of positions and layers"]
        return "\n".join([*lines, self.not_measured] if self.not_measured else lines)


def describe_differences(differences: Sequence[PairedDifference]) -> str:
    """A table, second minus first."""
    lines = [
        f"{'benchmark':<18}{'figure':<22}{'first':>8}{'second':>8}{'change':>9}  {'95 %':<20}{'items':>6}  verdict"
    ]
    for each in differences:
        lines.append(
            f"{each.benchmark:<18}{each.figure:<22}{each.first:>8.4f}{each.second:>8.4f}{each.difference:>+9.4f}  "
            f"{_written(each.interval):<20}{each.num_items:>6}  {each.verdict}"
        )
    return "\n".join(lines)
