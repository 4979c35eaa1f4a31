"""Draws the curve of one phase as a self-contained picture: losses on the token axis, or rewards on the step axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.report.report_charts import WIDTH, Line, curves
from tasks.report.report_training import PAIR_LOSS, REWARD, read_metrics, sampled_lines

if TYPE_CHECKING:
    from infra.step import Artifact

STYLE = (
    "<style>svg{--accent:#3457d5;--second:#c2660c;--soft:#5b6575;--line:#dfe3ea;--ink:#1c2330;--band:#f3f5f9}"
    'text{font:12px system-ui,sans-serif;fill:#5b6575}</style><rect width="100%" height="100%" fill="#fff"/>'
)


def phase_chart(checkpoint: Artifact[Any]) -> bytes | None:
    """An SVG file; None for imported weights, which have no log."""
    metrics = read_metrics(checkpoint)
    if not metrics:
        return None
    if rewarded := sampled_lines(metrics):
        drawn = curves(
            "steps",
            "mean reward of sampled answers",
            [Line("per step", [(line["step"], line[REWARD]) for line in rewarded])],
        )
    else:
        names = {"next token": ("lm", "accent"), "token after it (MTP)": ("mtp", "second")}
        points = {
            name: [(line["tokens"], line[key]) for line in metrics if key in line] for name, (key, _) in names.items()
        }
        lines = [
            Line(name, points[name], colour) for name, (_, colour) in names.items() if any(y for _, y in points[name])
        ]
        is_paired = any(PAIR_LOSS in line for line in metrics)
        drawn = curves("tokens", "loss per preference pair" if is_paired else "cross-entropy, nats per token", lines)
    return standalone(drawn)


def standalone(drawn: str) -> bytes:
    """A picture of the report, as wide as its page, as an SVG file with colours and a background of its own."""
    opening, rest = drawn.split(">", 1)
    return f'{opening} xmlns="http://www.w3.org/2000/svg" width="{WIDTH}">{STYLE}{rest}'.encode()
