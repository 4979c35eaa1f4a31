"""Mid-training: repositories, reasoning, long context, on the course of pre-training."""

from __future__ import annotations

from prefect import flow

from configs.schema import PhaseSection
from flows.running.run import Run
from flows.show.track_run import name_phases
from flows.train_phases import PhaseHistory, train_phases
from tasks.prepared_data import PreparedData


@flow(name="mid_train_model", flow_run_name=name_phases, validate_parameters=False)
def mid_train_model(
    run: Run, prepared: PreparedData, phases: tuple[PhaseSection, ...], history: PhaseHistory
) -> PhaseHistory:
    """The history extended by the mid-training phases, up to the first that its gate refused."""
    return train_phases(run, prepared, phases, history)
