"""Post-training: supervised fine-tuning on conversations, reward model, reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import flow

from flows.show.track_run import name_phases
from flows.train_phases import train_phases

if TYPE_CHECKING:  # Prefect writes a schema of the parameters whose types it can import: a tenth of a second each
    from configs.schema import PhaseSection
    from flows.running.run import Run
    from flows.train_phases import PhaseHistory
    from tasks.prepared_data import PreparedData


@flow(name="post_train_model", flow_run_name=name_phases, validate_parameters=False)
def post_train_model(
    run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...], history: PhaseHistory
) -> PhaseHistory:
    """The history extended by the post-training phases, up to the first that its gate refused."""
    return train_phases(run, prepared, phases, history)
