"""Says in the log what of the data is left out: what no phase reads, domains that a phase asks for and the data lack,
and conversations and prompts that are too long for a phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.unread_data import unread_data

if TYPE_CHECKING:
    from configs.schema import PhaseSection
    from flows.running.run import Run
    from infra.step import Artifact
    from tasks.data.packing.pack_phase import PackedPhase
    from tasks.prepared_data import PreparedData
    from tasks.training.policy.prompt_order import LeftOutPrompts


def say_unread(run: Run, prepared: PreparedData) -> None:
    """Before anything is trained. The report repeats it."""
    for line in unread_data(prepared, run.scale):
        run.log.say(line)


def say_left_out(run: Run, phase: PhaseSection, packed: Artifact[PackedPhase]) -> None:
    """Says nothing where the rows hold something of all that the mixture asks for."""
    record = packed.record
    if record.absent_domains:
        absent = ", ".join(record.absent_domains)
        run.log.say(f"{phase.name}: no text of {absent}: their share goes to the other domains")
    if record.num_too_long:
        run.log.say(
            f"{phase.name}: {record.num_too_long:,} conversations are longer than a row of {record.sequence_length:,} "
            f"tokens and are left out: raise the phase's sequence_length to read them"
        )


def say_unasked(run: Run, phase: PhaseSection, left_out: LeftOutPrompts) -> None:
    """Says nothing where the phase may ask all prompts of its mixture's domains, and all of these have some."""
    if left_out.absent_domains:
        absent = ", ".join(left_out.absent_domains)
        run.log.say(f"{phase.name}: no prompts of {absent} to ask: their share goes to the other domains")
    if left_out.too_long:
        counts = ", ".join(f"{domain} {count:,}" for domain, count in left_out.too_long.items())
        run.log.say(
            f"{phase.name}: {sum(left_out.too_long.values()):,} prompts ({counts}) leave no room for an answer of "
            f"objective.max_new_tokens in a row of {phase.recipe.sequence_length:,} tokens and are left out: raise the "
            f"phase's sequence_length to ask them"
        )
