"""Step: accepts or refuses quantized files and checkpoints by how many bits per byte each loses, checkpoints by how
often they choose other experts and by what each benchmark of the release loses, and calibrations by how many experts no
token reached.

llama.cpp measured GGUF files, against the F32 one. Checkpoints were measured against the one they were made of.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import served_gguf_type
from infra.step import Artifact, Output, digest_of, step
from tasks.evaluation.bounds import Bound, Verdict
from tasks.evaluation.comparisons import BENCHMARK, Compared, judge
from tasks.evaluation.decide_gate import GateDecision
from tasks.evaluation.intervals import Interval, ratio_interval

if TYPE_CHECKING:
    from configs.schema import ReleaseRecipe
    from tasks.release.evaluate_gguf import GgufEvaluation
    from tasks.release.evaluate_quantized import QuantizedEvaluation
    from tasks.release.measure_importance import ImportanceMatrix
    from tasks.release.quantize_checkpoint import QuantizedCheckpoint

CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class QuantizedEvaluations:
    """The evaluation of every quantized checkpoint, by format."""

    evaluations: dict[str, Artifact[QuantizedEvaluation]]

    @property
    def digest(self) -> str:
        """sha256 over the formats and their evaluations' digests."""
        return digest_of({name: evaluation.digest for name, evaluation in self.evaluations.items()})


@dataclass(frozen=True)
class Calibrations:
    """What was calibrated with text, by what it is called: checkpoints, and the importance matrix of GGUF files."""

    made: dict[str, Artifact[QuantizedCheckpoint] | Artifact[ImportanceMatrix]]

    @property
    def digest(self) -> str:
        """sha256 over the names and what was made, by digest."""
        return digest_of({name: artifact.digest for name, artifact in self.made.items()})


@dataclass(frozen=True)
class SuiteBounds:
    """How much each benchmark of the release may lose, by its name; none where the scale has no suite."""

    margins: dict[str, float]

    @property
    def digest(self) -> str:
        """sha256 over them."""
        return digest_of(self.margins)


NO_SUITE = SuiteBounds({})


@step(content=("decision.json",), distributions=("numpy", "scipy"))
def decide_quantization(
    *,
    gguf_evaluation: Artifact[GgufEvaluation],
    quantized: QuantizedEvaluations,
    calibrations: Calibrations,
    recipe: ReleaseRecipe,
    output: Output,
    benchmarks: SuiteBounds = NO_SUITE,
) -> GateDecision:
    """A refusal is a result. Raises ValueError for a benchmark with a bound that a
    format was not asked."""
    measured = gguf_evaluation.record.bits_per_byte
    served = served_gguf_type(measured)
    verdict = Verdict()
    finite = {gguf_type: math.nan if bits is None else bits for gguf_type, bits in measured.items()}
    verdict.finite(f"bits per byte of {served}", finite[served])
    for gguf_type in measured:
        if gguf_type != served:
            loss = round(finite[gguf_type] - finite[served], 6)
            interval = gguf_loss(gguf_evaluation.path("gguf_scores.json"), gguf_type, served)
            figure = f"bits per byte that {gguf_type} loses against {served}"
            verdict.ceiling(figure, loss, recipe.max_loss(gguf_type), interval=interval)
    for name, evaluation in quantized.evaluations.items():
        before, after = evaluation.record.original_bits_per_byte, evaluation.record.bits_per_byte
        loss = math.nan if before is None or after is None else round(after - before, 6)
        interval = checkpoint_loss(evaluation.path("quantized_scores.json"))
        figure = f"bits per byte that {name} loses against the checkpoint"
        verdict.ceiling(figure, loss, recipe.max_loss(name), interval=interval)
        agreement = evaluation.record.routing_agreement
        if name in recipe.min_routing_agreement and agreement is not None:
            share = f"share of positions and layers at which {name} chooses the same experts"
            verdict.floor(share, agreement, recipe.min_routing_agreement[name])
        verdict.bounds += _benchmark_bounds(name, evaluation.record, benchmarks, gguf_evaluation.record)
    for name, artifact in calibrations.made.items():
        idle, num_experts = artifact.record.idle_experts, artifact.record.num_experts
        if num_experts:
            share = f"share of {num_experts:,} experts that no calibration token of {name} reaches"
            remark = f": {', '.join(idle[:3])}{' and others' if len(idle) > 3 else ''}" if idle else ""
            verdict.ceiling(share, len(idle) / num_experts, recipe.max_idle_expert_share, remark)
    decision = GateDecision(
        accepted=verdict.is_held, bounds=tuple(verdict.bounds), candidate_digest=gguf_evaluation.digest
    )
    output.path("decision.json").write_text(
        json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    )
    return decision


def _benchmark_bounds(
    name: str, measured: QuantizedEvaluation, benchmarks: SuiteBounds, gguf: GgufEvaluation
) -> list[Bound]:
    """Broken where the whole interval is on the worse side, beyond the noise floor, and does not exclude a loss of the
    margin. An undecided one is no refusal: of the checkpoint itself as many items decided."""
    bounds = []
    for benchmark, margin in benchmarks.margins.items():
        if benchmark not in measured.benchmarks:
            raise ValueError(
                f"benchmark {benchmark} has a bound in evaluation.suite.bounds, and {name} was not asked it: evaluate "
                f"the format on the suite that holds it"
            )
        change = measured.benchmarks[benchmark]
        figure = f"{change.figure} of benchmark {benchmark} by {name}"
        compared = Compared(figure, BENCHMARK, change.difference(gguf.served), is_required=False)
        bounds.append(judge(compared, CHECKPOINT, margin))
    return bounds


def checkpoint_loss(scores_path: Path) -> Interval | None:
    """Interval of the bits per byte that a quantized checkpoint loses, over the documents of quantized_scores.json.
    None where a score is not finite, and of one document."""
    rows = json.loads(scores_path.read_text(encoding="utf-8"))
    return _lost_interval([(row["original"], row["quantized"], row["num_bytes"]) for row in rows])


def gguf_loss(scores_path: Path, gguf_type: str, reference_type: str) -> Interval | None:
    """The same of a GGUF file beside that of the reference type, over the documents of gguf_scores.json."""
    scores: dict[str, list[dict[str, Any]]] = json.loads(scores_path.read_text(encoding="utf-8"))
    pairs = zip(scores[reference_type], scores[gguf_type], strict=True)
    return _lost_interval(
        [(before["log_probability"], after["log_probability"], before["num_bytes"]) for before, after in pairs]
    )


def _lost_interval(rows: list[tuple[float | None, float | None, int]]) -> Interval | None:
    lost = [before - after for before, after, _ in rows if before is not None and after is not None]
    if len(lost) < max(2, len(rows)):
        return None
    low, high = ratio_interval([each / math.log(2) for each in lost], [num_bytes for _, _, num_bytes in rows])
    return round(low, 6), round(high, 6)
