"""What the schedulers' tests ask for, where it does not matter."""

from __future__ import annotations

from configs.schema import QueueResources

DEFAULT_QUEUE = QueueResources(partition="", account="", time_limit_minutes=10, hostfile="", image="", volume_claim="")
