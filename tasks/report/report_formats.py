"""The report about what is released besides the checkpoint: files for llama.cpp, and quantized checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from configs.schema import served_gguf_type
from infra.step import Artifact
from tasks.report.report_page import paragraph, table

if TYPE_CHECKING:
    from tasks.evaluation.comparisons import FigureChange
    from tasks.release.decide_quantization import QuantizedEvaluations
    from tasks.release.evaluate_gguf import GgufEvaluation
    from tasks.release.evaluate_quantized import QuantizedEvaluation

COLUMNS = ("format", "size", "of the checkpoint", "bits per byte", "before", "same token", "same experts", "pass@1")
PASS_AT_1 = "pass_at_1"
ASKED = {
    PASS_AT_1: "pass@1",
    "arithmetic_accuracy": "arithmetic",
    "choice_accuracy": "multiple choice",
    "safe_answer_share": "safe answers",
    "agentic_success": "tasks solved",
}
"""Names of the columns of figures."""


def formats_section(gguf: Artifact[GgufEvaluation] | None, quantized: QuantizedEvaluations | None) -> str:
    """What every format loses; empty where the run ended before the release."""
    records = [] if quantized is None else [evaluation.record for evaluation in quantized.evaluations.values()]
    return ("" if gguf is None else gguf_table(gguf.record)) + (quantized_table(records) if records else "")


def gguf_table(record: GgufEvaluation) -> str:
    """What files for llama.cpp lose."""
    served = served_gguf_type(record.file_bytes)
    whole = record.file_bytes[served]
    asked = {figure: name for figure, name in ASKED.items() if figure in record.figures[served]}
    rows = [
        (
            gguf_type,
            f"{record.file_bytes[gguf_type] / 1e6:,.1f} MB",
            f"{record.file_bytes[gguf_type] / whole:.0%}",
            _bits(bits),
            *(_change(record.figures[gguf_type], figure) for figure in asked),
        )
        for gguf_type, bits in record.bits_per_byte.items()
    ]
    columns = ("type", "size", f"of {served}", "bits per byte", *asked.values())
    return table(columns, rows) + paragraph(
        f"Measured by llama.cpp itself on the leading tokens of {record.num_documents} held-out documents "
        f"({record.num_tokens:,} tokens, "
        f"{record.num_bytes:,} bytes): every token is scored given those before it. "
        + _asked(record.figures[served])
        + f"{served}, which is served, is compared with the checkpoint in our own engine, the others beside {served}. "
        f"Only {served} is asked multiple choice, requests and tasks.",
        "soft",
    )


def quantized_table(records: Sequence[QuantizedEvaluation]) -> str:
    """What quantized checkpoints lose."""
    rows = [
        (
            record.quantized_format,
            f"{record.num_bytes / 1e6:,.1f} MB",
            f"{record.num_bytes / record.num_original_bytes:.0%}",
            _bits(record.bits_per_byte),
            _bits(record.original_bits_per_byte),
            f"{record.token_agreement:.1%}",
            "no experts" if record.routing_agreement is None else f"{record.routing_agreement:.1%}",
            _change(record.figures, PASS_AT_1),
        )
        for record in records
    ]
    first = records[0]
    note = (
        f"Checkpoints for vLLM, SGLang and transformers, read back and computed as those engines do, on the leading "
        f"tokens of {first.num_documents} held-out documents ({first.num_tokens:,} tokens). Same token: share of "
        "positions with the same most likely token. Same experts: share of positions and layers at which the router "
        "chooses the same experts. Embeddings, head, router and the MTP layer are not quantized; FP8_EXPERTS "
        "quantizes nothing but the experts. "
        + _asked(first.figures)
        + "They were drawn with the numbers of the checkpoint's own answers, beside which they stand"
        + (", as do the answers to the benchmarks of the release." if first.benchmarks else ".")
    )
    return table(COLUMNS, rows) + _benchmark_table(records) + paragraph(note, "soft")


def _benchmark_table(records: Sequence[QuantizedEvaluation]) -> str:
    """What became of each benchmark of the release; empty where the scale has no suite."""
    if not records[0].benchmarks:
        return ""
    rows = [
        (
            name,
            f"{each.change.before:.3f}",
            *(_change({name: record.benchmarks[name].change}, name) for record in records),
        )
        for name, each in records[0].benchmarks.items()
    ]
    return table(("benchmark", "before", *(record.quantized_format for record in records)), rows)


def _bits(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _change(figures: Mapping[str, FigureChange], name: str) -> str:
    """Value, change and its interval."""
    if name not in figures:
        return "not asked"
    figure = figures[name]
    bounds = figure.change_interval
    return f"{figure.value:.3f}, {figure.change:+.3f}" + (
        "" if bounds is None else f" [{bounds[0]:+.3f}, {bounds[1]:+.3f}]"
    )


def _asked(figures: Mapping[str, FigureChange]) -> str:
    sampled = figures[PASS_AT_1]
    return (
        f"{sampled.num_answers} answers to {sampled.num_items} held-out problems: value and change with its paired "
        f"95 % interval; with other seeds only, pass@1 changes by up to {sampled.noise_floor:.3f} (the noise floor). "
    )
