"""Names what of the prepared data nothing trains on: records that ingestion left out, and domains, prompts,
conversations and preferences that no phase reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from configs.schema import mixture_waypoints

if TYPE_CHECKING:
    from configs.schema import PhaseSection, Scale
    from tasks.prepared_data import PreparedData


def unread_data(prepared: PreparedData, scale: Scale) -> tuple[str, ...]:
    """A sentence for each, with the fix. All phases of the scale count, also where the run has only some of them."""
    documents, phases, ingested = prepared.documents, scale.phases, prepared.ingested.record
    lines = []
    if documents is not None and (num_left_out := ingested.num_unsampled_documents):
        lines.append(
            f"{num_left_out:,} of {num_left_out + ingested.num_documents:,} records are left out, drawn by hash: the "
            f"sources hold more than ingest.max_source_bytes ({scale.data.recipe.ingest.max_source_bytes:,}); raise it "
            f"to read more of them"
        )
    if documents is not None:
        rows = [phase for phase in phases if phase.recipe.reads_rows]
        lines += _unread(scale, rows, documents.shards.record.tokens_by_domain, "tokens of documents")
    if documents is not None and not any(phase.recipe.samples_solutions for phase in phases):  # they ask every domain
        policies = [phase for phase in phases if phase.recipe.samples_answers]
        lines += _unread(scale, policies, documents.decontaminated.record.prompts_by_domain, "prompts")
    if not any(phase.recipe.reads_chats for phase in phases) and (num_chats := prepared.chats.record.training_chats):
        lines.append(
            f"no phase of scale {scale.scale} reads the {num_chats:,} conversations: give chat a share in the mixture "
            f"of a phase with objective sft"
        )
    if not any(phase.recipe.reads_pairs for phase in phases) and (num_files := _num_preference_files(prepared)):
        lines.append(
            f"no phase of scale {scale.scale} reads the {num_files:,} files of role preference: add a phase with "
            f"objective dpo or reward"
        )
    return tuple(lines)


def _unread(scale: Scale, phases: list[PhaseSection], amounts: Mapping[str, int], what: str) -> list[str]:
    waypoints = [point for phase in phases for point in mixture_waypoints(phase.recipe.mixture)]
    read = {domain for point in waypoints for domain, weight in point.mixture.items() if weight}
    return [
        f"no phase of scale {scale.scale} reads the {amount:,} {what} of domain {domain}: give {domain} a share in a "
        f"phase's mixture, or files of it another domain in glm46-data.yaml"
        for domain, amount in sorted(amounts.items())
        if amount and phases and domain not in read
    ]


def _num_preference_files(prepared: PreparedData) -> int:
    import pyarrow.parquet as pq

    roles = pq.read_table(prepared.ingested.path("sources.parquet"), columns=["role"])["role"].to_pylist()
    return roles.count("preference")
