"""What the formats of a registered version lost, for `glm46 compare` with one model: as its release measured them, and
how fast they answer on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from configs.load import load_scale
from configs.schema import served_gguf_type
from flows.cli.serving.format_speeds import FormatSpeed, measure_speeds, unread_checkpoint
from infra.home import Home
from infra.registry.model_registry import FIGURES_TAG, GGUF_TAG, model_name, open_registry
from infra.registry.registered_versions import named_version
from infra.step import Artifact
from infra.storage.open_store import open_known_store
from tasks.evaluation.comparisons import FigureChange
from tasks.evaluation.intervals import Interval
from tasks.release.convert_to_gguf import GgufFiles
from tasks.release.decide_quantization import checkpoint_loss, gguf_loss
from tasks.release.evaluate_gguf import GgufEvaluation
from tasks.release.evaluate_quantized import QuantizedEvaluation

GGUF = "GGUF"
"""After FIGURES_TAG, where quantized checkpoints have the name of their format."""


class FormatFigures(BaseModel):
    """One format beside what it was made from: the checkpoint, or the F32 file for the other GGUF files."""

    name: str
    computed_by: str
    num_bytes: int
    num_original_bytes: int
    bits_per_byte_change: float | None
    """None where one of the two is not finite, and for the F32 file: the checkpoint is not scored on the same texts."""
    bits_per_byte_interval: Interval | None = None
    """95 % interval of the change, over documents."""
    figures: dict[str, FigureChange]
    """Of a quantized checkpoint also the benchmarks of the scale's suite, by their names."""
    routing_agreement: float | None
    """None for GGUF files: llama.cpp does not say which experts it chooses."""
    speed: FormatSpeed | None = None
    """On the machine of the comparison, now."""
    no_speed: str = "not measured"
    """Why there is none; empty where there is one."""


class FormatComparison(BaseModel):
    """What `glm46 compare VERSION` prints and writes."""

    target: str
    formats: tuple[FormatFigures, ...]

    def describe(self) -> str:
        """The table, each format minus what it was made from."""
        lines = [
            self.target,
            f"{'format':<14}{'computed by':<14}{'MB':>9}{'of it':>7}{'bits lost':>11}  {'95 %':<20}  {'figure':<21}"
            f"{'value':>7}{'change':>9}  {'95 %':<20}{'floor':>7}{'items':>6}{'experts':>9}{'tokens/s':>10}"
            f"{'of F32':>20}",
        ]
        for each in self.formats:
            bits = "-" if each.bits_per_byte_change is None else f"{each.bits_per_byte_change:+.4f}"
            experts = "-" if each.routing_agreement is None else f"{each.routing_agreement:.1%}"
            speed, ratio = _shown(each.speed)
            share = each.num_bytes / each.num_original_bytes
            of_bits = _shown_interval(each.bits_per_byte_interval)
            start = (
                f"{each.name:<14}{each.computed_by:<14}{each.num_bytes / 1e6:>9,.1f}{share:>7.0%}{bits:>11}  "
                f"{of_bits:<20}  "
            )
            for figure, change in each.figures.items():
                interval = _shown_interval(change.change_interval)
                lines.append(
                    f"{start}{figure:<21}{change.value:>7.4f}{change.change:>+9.4f}  {interval:<20}"
                    f"{change.noise_floor:>7.4f}{change.num_items:>6}{experts:>9}{speed:>10}{ratio:>20}"
                )
                start, experts, speed, ratio = " " * len(start), "", "", ""
        reasons: dict[str, list[str]] = {}
        for each in self.formats:
            if each.no_speed:
                reasons.setdefault(each.no_speed, []).append(each.name)
        lines += [f"tokens/s of {', '.join(names)}: none, {reason}" for reason, names in reasons.items()]
        return "\n".join(lines)


def _shown_interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"


def _shown(speed: FormatSpeed | None) -> tuple[str, str]:
    if speed is None:
        return "none", "-"
    low, high = speed.ratio_range
    return f"{speed.tokens_per_second:,.0f}", f"{speed.ratio:.2f} [{low:.2f}, {high:.2f}]"


def measured_formats(target: str, home: Home, scale: str, store_address: str | None) -> FormatComparison:
    """The comparison with the speed of every file that this machine can serve. Raises RuntimeError where a server does
    not start."""
    comparison, registered = compare_formats(target, home, scale, store_address), model_name(load_scale(scale).scale)
    version = named_version(open_registry(home), registered, target).registered
    gguf = open_known_store(store_address, home).load(version.tag(GGUF_TAG), GgufFiles)
    found = measure_speeds({name: gguf.path(file) for name, file in gguf.record.file_names.items()}, home)
    return with_speeds(comparison, found)


def with_speeds(comparison: FormatComparison, found: Mapping[str, FormatSpeed | str]) -> FormatComparison:
    """`found` is by GGUF type; no engine of this project reads the other formats."""
    formats = tuple(_with_speed(each, found.get(each.name)) for each in comparison.formats)
    return comparison.model_copy(update={"formats": formats})


def _with_speed(figures: FormatFigures, found: FormatSpeed | str | None) -> FormatFigures:
    if isinstance(found, FormatSpeed):
        return figures.model_copy(update={"speed": found, "no_speed": ""})
    return figures.model_copy(update={"no_speed": unread_checkpoint() if found is None else found})


def compare_formats(target: str, home: Home, scale: str, store_address: str | None) -> FormatComparison:
    """Raises ValueError for a version that no release measured, and for one that is not registered."""
    registered = model_name(load_scale(scale).scale)
    version = named_version(open_registry(home), registered, target).registered
    keys = {tag.removeprefix(FIGURES_TAG): key for tag, key in version.tags.items() if tag.startswith(FIGURES_TAG)}
    if GGUF not in keys:
        raise ValueError(
            f"version {version.version} of {registered} was not released: its formats were not measured. Name the "
            f"version of a release, or two models"
        )
    store = open_known_store(store_address, home)
    formats = _gguf_formats(store.load(keys.pop(GGUF), GgufEvaluation))
    formats += [_quantized_format(store.load(key, QuantizedEvaluation)) for _, key in sorted(keys.items())]
    return FormatComparison(target=f"{registered} version {version.version}", formats=tuple(formats))


def _gguf_formats(evaluation: Artifact[GgufEvaluation]) -> list[FormatFigures]:
    record, scores = evaluation.record, evaluation.path("gguf_scores.json")
    served = served_gguf_type(record.file_bytes)
    return [
        FormatFigures(
            name=name,
            computed_by="llama.cpp",
            num_bytes=record.file_bytes[name],
            num_original_bytes=record.file_bytes[served],
            bits_per_byte_change=None
            if name == served
            else _change(record.bits_per_byte[name], record.bits_per_byte[served]),
            bits_per_byte_interval=None if name == served else gguf_loss(scores, name, served),
            figures=figures,
            routing_agreement=None,
        )
        for name, figures in record.figures.items()
    ]


def _quantized_format(evaluation: Artifact[QuantizedEvaluation]) -> FormatFigures:
    record = evaluation.record
    return FormatFigures(
        name=record.quantized_format,
        computed_by="transformers",
        num_bytes=record.num_bytes,
        num_original_bytes=record.num_original_bytes,
        bits_per_byte_change=_change(record.bits_per_byte, record.original_bits_per_byte),
        bits_per_byte_interval=checkpoint_loss(evaluation.path("quantized_scores.json")),
        figures=record.figures | {name: each.change for name, each in record.benchmarks.items()},
        routing_agreement=record.routing_agreement,
    )


def _change(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
