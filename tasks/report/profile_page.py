"""The page of a server's profile: what was measured here as table and curves, and apart from it what others state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.report.published_figures import published_figures
from tasks.report.report_charts import Line, curves
from tasks.report.report_page import Section, page, paragraph, table

if TYPE_CHECKING:
    from tasks.release.server_profile import ServerProfile

COLUMNS = ("concurrent", "requests", "tokens", "first token s, p50", "p95", "between tokens s, p50", "p95", "tokens/s")


def profile_page(profile: ServerProfile) -> str:
    """A whole HTML file."""
    rows = [
        (
            each.concurrency,
            each.num_requests,
            each.num_tokens,
            *each.seconds_to_first_token,
            *each.seconds_between_tokens,
            each.tokens_per_second,
        )
        for each in profile.levels
    ]
    facts = [("highest tokens/s", f"{max(each.tokens_per_second for each in profile.levels):,.1f}")]
    if profile.memory_bytes is not None:
        facts.append(("memory of the server", f"{profile.memory_bytes / 1e6:,.0f} MB"))
    for each in profile.drafts:
        facts.append((f"{each.engine}: speed with drafts over without", f"{each.gain:.2f}"))
        facts.append((f"{each.engine}: drafts accepted", f"{each.acceptance_rate:.0%}"))
    speed = Line("tokens/s", [(each.concurrency, each.tokens_per_second) for each in profile.levels])
    waits = [
        Line(name, [(each.concurrency, each.seconds_to_first_token[part]) for each in profile.levels], colour)
        for part, (name, colour) in enumerate((("median", "accent"), ("95th percentile", "second")))
    ]
    measured = table(COLUMNS, rows) + (paragraph(profile.not_measured, "soft") if profile.not_measured else "")
    several = len(profile.levels) > 1
    quoted = [(each.figure, each.value, each.of, each.source) for each in published_figures()]
    sections = [
        Section("Measured here", measured),
        Section("Throughput", curves("concurrent requests", "tokens/s", [speed]) if several else ""),
        Section("Time to first token", curves("concurrent requests", "seconds", waits) if several else ""),
        Section("Quoted, not measured", table(("figure", "value", "of", "source"), quoted)),
    ]
    return page(f"Profile of {profile.target}", "Answers of one length, greedy", "", facts, sections)
