"""course.svg: what changes along the course of a scale, by the functions that training reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from configs.schema import Scale
from docs.svg import BAND, COLOURS, INK, LEFT, LINE, RIGHT, WIDTH, svg, text
from tasks.training.schedule.schedules import batch_tokens_at, learning_rate_at, value_at

PANEL, GAP, TOP = 74, 22, 62
NUM_POINTS = 60


def draw_course(scale: Scale) -> str:
    """Small multiples over the first course's tokens; phases as bands, the mid-training part drawn wider, for it is a
    twentieth of all."""
    phases = [phase for phase in scale.phases if phase.name in scale.courses[0].recipe.phases]
    course, total = scale.courses[0].recipe, scale.course_num_tokens(phases[0])
    starts = [scale.course_start_tokens(phase) for phase in phases]
    ends = [*starts[1:], total]
    widths = np.array([0.34, 0.24, *([0.14] * (len(phases) - 2))])[: len(phases)]
    edges = np.concatenate([[0.0], np.cumsum(widths / widths.sum())])

    def place(tokens: float) -> float:
        number = max(n for n, start in enumerate(starts) if tokens >= start)
        inside = (tokens - starts[number]) / (ends[number] - starts[number])
        return LEFT + (edges[number] + inside * (edges[number + 1] - edges[number])) * (WIDTH - LEFT - RIGHT)

    tokens = sorted(
        {
            *np.linspace(0, ends[0] * 0.06, NUM_POINTS).tolist(),
            *(t for a, b in zip(starts, ends, strict=True) for t in np.linspace(a, b - 1, NUM_POINTS).tolist()),
        }
    )
    phase_at = lambda t: phases[max(n for n, start in enumerate(starts) if t >= start)].recipe  # noqa: E731
    panels: list[tuple[str, Callable[[float], float], Callable[[float], str]]] = [
        ("learning rate", lambda t: learning_rate_at(course, total, round(t)), lambda v: f"{v:.2g}"),
        ("batch, tokens", lambda t: batch_tokens_at(course, total, round(t)), lambda v: f"{v / 2**20:.0f}M"),
        ("router bias rate", lambda t: value_at(course.router_bias_rate, total, round(t)), lambda v: f"{v:g}"),
        ("MTP weight", lambda t: value_at(course.mtp_loss_weight, total, round(t)), lambda v: f"{v:g}"),
        ("RoPE base (log)", lambda t: np.log10(phase_at(t).rope_theta), lambda v: f"{10**v:,.0f}"),
        ("sequence (log2)", lambda t: np.log2(phase_at(t).sequence_length), lambda v: f"{2**v:,.0f}"),
    ]
    height = TOP + len(panels) * (PANEL + GAP) + 8
    parts = []
    for number, (phase, start, end) in enumerate(zip(phases, starts, ends, strict=True)):
        x0, x1 = place(start), LEFT + edges[number + 1] * (WIDTH - LEFT - RIGHT)
        if number % 2:
            parts.append(
                f'<rect x="{x0:.1f}" y="{TOP - 40}" width="{x1 - x0:.1f}" height="{height - TOP + 34}" fill="{BAND}"/>'
            )
        parts.append(text((x0 + x1) / 2, TOP - 26, phase.name, "middle", INK))
        kind = f"{(end - start) / 1e12:g}T" if end - start > 9e11 else f"{(end - start) / 1e9:.0f}B"
        parts.append(text((x0 + x1) / 2, TOP - 11, f"{kind}, {phase.recipe.packing}", "middle"))
    for number, (title, value, show) in enumerate(panels):
        top = TOP + number * (PANEL + GAP)
        values = [float(value(t)) for t in tokens]
        low, high = (0.0, max(values)) if "log" not in title else (min(values) - 0.3, max(values))
        points = " ".join(
            f"{place(t):.1f},{top + PANEL - (v - low) / (high - low) * (PANEL - 6):.1f}"
            for t, v in zip(tokens, values, strict=True)
        )
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top + PANEL}" y2="{top + PANEL}" stroke="{LINE}"/>')
        parts.append(f'<polyline fill="none" stroke="{COLOURS[number]}" stroke-width="2" points="{points}"/>')
        parts.append(text(LEFT - 10, top + 18, title, "end", INK))
        parts.append(text(LEFT - 10, top + 36, f"{show(values[0])} first", "end"))
        parts.append(text(LEFT - 10, top + 52, f"{show(max(values))} highest", "end"))
        parts.append(text(LEFT - 10, top + 68, f"{show(values[-1])} last", "end"))
    return svg(height, f"The course of scale {scale.scale}", parts)
