"""The report about what models answered before a phase: best-of-k, what was kept or asked, and some answers."""

from __future__ import annotations

import json

from tasks.evaluation.sample_solutions import ROLLOUTS_FILE, SampledSolutions
from tasks.report.report_charts import Line, curves
from tasks.report.report_inputs import ReportedPhase, ReportedPhases
from tasks.report.report_page import Cell, folded, heading, paragraph, table
from tasks.training.policy.prompt_difficulty import SOLVED_FILE

NUM_SHOWN_ANSWERS = 4


def solutions_section(phases: ReportedPhases) -> str:
    """Empty where no phase asks models before it trains."""
    return "".join(_of_phase(phase) for phase in phases)


def _of_phase(phase: ReportedPhase) -> str:
    if phase.solutions is None:
        return ""
    record = phase.solutions.record
    points = [(float(point.k), point.share) for point in record.pass_at]
    rows: list[tuple[Cell, ...]] = [
        (point.k, f"{point.share:.4f}", "" if point.interval is None else "{:.4f} to {:.4f}".format(*point.interval))
        for point in record.pass_at
    ]
    groups = [json.loads(line) for line in phase.solutions.path(ROLLOUTS_FILE).read_text().splitlines()]
    domains: list[tuple[Cell, ...]] = []
    for own in record.domains:
        shares = own.num_kept / own.num_answers, own.pass_at[0].share, own.pass_at[-1].share
        counts = own.num_prompts, own.num_answers, own.num_right, own.num_kept
        domains.append((own.phase, own.domain, *counts, *shares))
    titles = ("weights of", "domain", "prompts", "answers", "right", "kept", "kept share", "pass@1", "best of all")
    answers: list[tuple[Cell, ...]] = [
        (group["phase"], group["question"], text, "right" if reward else "wrong")
        for group in groups
        for text, reward in list(zip(group["samples"], group["rewards"], strict=True))[:NUM_SHOWN_ANSWERS]
    ]
    return (
        heading(f"Best of k before {phase.name}")
        + curves("answers to a prompt (k)", "prompts with a right one", [Line("pass@k", points)])
        + table(("k", "pass@k", "95 % interval"), rows)
        + table(titles, domains)
        + paragraph(_counted(record) + (_kept(record) if phase.packed is not None else _asked(phase)), "soft")
        + folded("Sampled answers", table(("weights of", "prompt", "answer", "verdict"), answers))
    )


def _counted(record: SampledSolutions) -> str:
    return (
        f"{record.num_right:,} of {record.num_answers:,} answers to {record.num_prompts:,} prompts are right, and "
        f"{record.num_solved_prompts:,} prompts have a right one. "
    )


def _kept(record: SampledSolutions) -> str:
    """What became of the answers, in words."""
    left_out = "; ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in record.left_out.items())
    return f"The phase trained on {record.num_kept:,} ({record.num_kept_tokens:,} tokens)" + (
        f"; right ones left out: {left_out}." if left_out else "."
    )


def _asked(phase: ReportedPhase) -> str:
    """Which prompts the phase may ask by its difficulty, in words."""
    recipe = phase.checkpoint.manifest.identity["recipe"]["objective"]["difficulty"]
    record = phase.checkpoint.record
    assert phase.solutions is not None, phase.name
    num_asked = phase.solutions.record.num_prompts - record.num_easy_prompts - record.num_hard_prompts
    return (
        f"The phase asks the {num_asked:,} prompts of a pass rate of {recipe['min_pass_rate']:g} to "
        f"{recipe['max_pass_rate']:g}, {recipe['order'].replace('_', ' ')}. Left out: {record.num_easy_prompts:,} too "
        f"easy, {record.num_hard_prompts:,} too hard. {SOLVED_FILE} of stage sample {phase.name} counts those of each."
    )
