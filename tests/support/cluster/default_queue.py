"""What the schedulers' tests ask for, where it does not matter."""

from __future__ import annotations

from configs.schema import PhaseQueue

DEFAULT_QUEUE = PhaseQueue(
    partition="",
    account="",
    time_limit_minutes=10,
    hostfile="",
    image="",
    environment={},
    volume_claim="",
    max_missing_nodes=0,
    patience_minutes=60.0,
)
