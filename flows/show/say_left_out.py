"""Says in the log what a phase's rows leave out: domains without text, and conversations that no row holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import PhaseSection
    from flows.running.stage_log import StageLog
    from tasks.data.packing.pack_phase import PackedPhase


def say_left_out(log: StageLog, phase: PhaseSection, packed: PackedPhase) -> None:
    """Says nothing where the rows hold something of all that the mixture asks for."""
    if packed.absent_domains:
        log.say(f"{phase.name}: no text of {', '.join(packed.absent_domains)}: their share goes to the other domains")
    if packed.num_too_long:
        log.say(
            f"{phase.name}: {packed.num_too_long:,} conversations are longer than a row of {packed.sequence_length:,} "
            f"tokens and are left out: raise the phase's sequence_length to read them"
        )
