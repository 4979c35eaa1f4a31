"""Makes DeepSpeed sum the gradients of divided experts over the ranks that hold the same ones.

DeepSpeed looks for modules of its own mixture-of-experts classes. It reduces a model without one as if every parameter
were whole on every rank: wrong numbers, no error. `ExpertGroups` is such a module with nothing in it, and our layers
stay ours. It is an AutoEP layer because all ZeRO stages, 3 too, accept that kind.
"""

from __future__ import annotations

from typing import Any

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import nn

from tasks.training.parallel.ranks import Ranks


class ExpertGroups(AutoEPMoELayer):
    """A marker without parameters or arithmetic. It makes the groups known under one name, which expert parameters
    carry."""

    def __init__(self, ranks: Ranks) -> None:
        nn.Module.__init__(self)  # AutoEP's own would build a router and experts
        self.num_experts = 0
        self.group_name, self.sharers = f"ep_size_{ranks.expert.size}", ranks.expert_data.group
        assert ranks.expert.group is not None and ranks.expert_data.group is not None, ranks
        groups._EXPERT_PARALLEL_GROUP[self.group_name] = ranks.expert.group
        groups._EXPERT_PARALLEL_GROUP_RANKS[self.group_name] = list(ranks.expert.ranks)
        groups._EXPERT_DATA_PARALLEL_GROUP[self.group_name] = ranks.expert_data.group
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[self.group_name] = list(ranks.expert_data.ranks)

    def mark_expert(self, parameter: nn.Parameter) -> None:
        """The marks are read by the engine (allreduce, group_name) and by ZeRO 3 (the ds_zero_ ones)."""
        for mark, value in {
            "allreduce": False,
            "group_name": self.group_name,
            "ds_zero_placement_family": "autoep_expert",
            "ds_zero_partition_group_name": self.group_name,
            "ds_zero_partition_process_group": self.sharers,
        }.items():
            setattr(parameter, mark, value)

    def set_deepspeed_parallelism(self, *arguments: Any, **named: Any) -> None:
        """Does nothing: the groups are those of our ranks."""
