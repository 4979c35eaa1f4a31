"""ZeRO 3 divides each weight as soon as it has memory: no rank ever holds the whole model.

`deepspeed.initialize` would divide only after the whole model is on every rank.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from configs.schema import TrainingResources
from tasks.training.parallel.deepspeed_config import deepspeed_config
from tasks.training.parallel.ranks import DeepSpeedRanks, Ranks


class ZeroPartitions:
    """Keeps this rank's part of a parameter and frees the rest; all ranks divide the same parameters in one order."""

    def __init__(self, resources: TrainingResources, dtype: Literal["float32", "bfloat16"], ranks: Ranks) -> None:
        self._config = deepspeed_config(resources, dtype)
        self._ranks = DeepSpeedRanks(ranks) if dist.get_world_size() > 1 else None
        self._first: Any = None

    def divide(self, parameter: nn.Parameter) -> None:
        """In the dtype in which the model computes: DeepSpeed casts no weights that are divided."""
        if self._first is not None:
            self._first.convert_to_zero_parameters(param_list=[parameter])
            return
        import deepspeed
        from deepspeed.runtime.zero import Init

        deepspeed.init_distributed()  # the configuration is compared with DeepSpeed's own view of the world
        group = None if self._ranks is None else self._ranks.get_data_parallel_group()
        Init(
            nn.ParameterList([parameter]), data_parallel_group=group, config_dict_or_path=self._config, mpu=self._ranks
        )
        self._first = parameter
