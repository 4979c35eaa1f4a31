"""Says in the log what is left out: records of the sources above the bound on their bytes, domains of a phase without
text, and conversations that no row holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import PhaseSection
    from flows.running.run import Run
    from infra.step import Artifact
    from tasks.data.packing.pack_phase import PackedPhase
    from tasks.data.sources.ingest_documents import IngestedDocuments


def say_unread(run: Run, ingested: Artifact[IngestedDocuments]) -> None:
    """Says nothing where every record of the sources was read."""
    if num_unread := ingested.record.num_unsampled_documents:
        run.log.say(
            f"{num_unread:,} records of the sources are left out: their texts have more than the "
            f"{run.scale.data.recipe.ingest.max_source_bytes:,} bytes of data.recipe.ingest.max_source_bytes; raise it "
            f"to read them"
        )


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
