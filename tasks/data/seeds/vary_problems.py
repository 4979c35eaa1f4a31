"""Step: seed problems that annotate their calculations -> chats.parquet of the same problems with other numbers.

The variations are verified. rejected.parquet has the seeds without a variation and the variations that do not verify.
A variation has its seed's source and offset, so collect_chats holds out both or neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infra.step import Output, Progress, Record, step
from tasks.data.records.documents import document_id
from tasks.data.seeds.problem_kinds import MATH
from tasks.data.seeds.seed_problems import Seed, check_solution, conversation, read_seeds
from tasks.data.seeds.seed_programs import NoProgramError, read_program
from tasks.data.seeds.seed_variations import check_variation, seed_variations
from tasks.data.seeds.verify_solutions import CHATS, REJECTED, counts, stated_solution, write_rows, written_solution

if TYPE_CHECKING:
    from configs.schema import SeedVariationRecipe
    from tasks.data.sources.list_sources import SourceListing

SUFFIX = "#variations"
DUPLICATE = "duplicate_question"
NO_NUMBERS = "no_other_numbers"
MAX_TRIED = 10
"""Variations tried per requested one."""


class VariedProblems(Record):
    num_seeds: int
    """Seeds of mathematics with a worked solution."""
    num_varied_seeds: int
    num_chats: int
    chats_by_collection: dict[str, int]
    rejected: dict[str, int]
    """Seeds without a variation, by reason; rejected variations, by `variation_` and reason."""


@dataclass
class _Made:
    """Variations and rejections so far."""

    questions: set[str]
    chats: list[dict[str, object]] = field(default_factory=list)
    rejected: list[dict[str, object]] = field(default_factory=list)


@step(content=("chats.parquet", "rejected.parquet"), distributions=("pyarrow", "numpy"))
def vary_problems(*, sources: SourceListing, recipe: SeedVariationRecipe, output: Output) -> VariedProblems:
    """Write up to `per_seed` variations of each seed. Without seeds, or with `per_seed` 0, both tables are empty."""
    seeds = (
        [seed for seed in read_seeds(sources.files) if seed.kind == MATH and seed.solution] if recipe.per_seed else []
    )
    made = _Made({seed.question for seed in seeds})
    num_varied = 0
    for number, seed in enumerate(seeds):
        if number % 100 == 0:
            output.report(Progress(number, len(seeds), "seeds", f"{len(made.chats)} variations"))
        reason = _vary(seed, recipe.per_seed, made)
        num_varied += not reason
        if reason:
            made.rejected.append({"id": seed.id, "source": seed.source, "offset": seed.offset, "reason": reason})
    write_rows(output.path("chats.parquet"), made.chats, CHATS)
    write_rows(output.path("rejected.parquet"), made.rejected, REJECTED)
    return VariedProblems(
        num_seeds=len(seeds),
        num_varied_seeds=num_varied,
        num_chats=len(made.chats),
        chats_by_collection=counts(made.chats, "collection"),
        rejected=counts(made.rejected, "reason"),
    )


def _vary(seed: Seed, count: int, made: _Made) -> str:
    """Add the variations of a seed; returns the reason where there are none, else empty."""
    reason = check_solution(seed, stated_solution(seed))
    if reason:
        return reason
    try:
        program = read_program(seed)
    except NoProgramError as error:
        return error.reason
    num_kept = 0
    for piece, variation in enumerate(seed_variations(seed, program)):
        if num_kept == count or piece == MAX_TRIED * count:
            break
        refused = DUPLICATE if variation.question in made.questions else check_variation(seed, program, variation)
        if refused:
            address = {
                "id": document_id(f"{seed.source}{SUFFIX}", seed.offset, piece),
                "source": seed.source,
                "offset": seed.offset,
            }
            made.rejected.append({**address, "reason": f"variation_{refused}"})
        else:
            made.questions.add(variation.question)
            made.chats.append(conversation(variation, SUFFIX, "", written_solution(variation), piece))
            num_kept += 1
    return "" if num_kept else NO_NUMBERS
