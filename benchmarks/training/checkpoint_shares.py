"""What each rank of a scale writes and hashes of a checkpoint, counted without its weights:
python -m benchmarks.training.checkpoint_shares [SCALE] [--write]

Nothing is measured. Ranks connect by torch's fake process group, the model of each pipeline stage is divided on the
device `meta` as training divides it, and ZeRO's equal partitions of each group of parameters are computed for every
rank of the stage. tasks/training/state/own_runs.py then says what the rank writes. `ours` is the gigabytes of the
fullest rank; `peer` those that one rank hashes where it alone commits: all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.results import WRITE_FLAG, report
from configs.files.file_digests import BLOCK_BYTES, DIGEST_CHARS
from configs.load import load_scale
from configs.schema import TrainingRecipe, TrainingResources
from model.architecture.transformer import Glm4Moe
from model.optimizer.optimizer import build_optimizer
from tasks.training.loop.build_model import divide_model
from tasks.training.parallel.partitions import Piece
from tasks.training.parallel.ranks import Axis, Ranks, connect_ranks
from tasks.training.plan.phase_needs import state_bytes
from tasks.training.state.own_runs import own_range, runs_of
from tasks.training.state.state import router_biases

HASHED_PER_SECOND = 1.15e9
"""sha256 on one core."""


@dataclass(frozen=True)
class Share:
    """What one rank writes."""

    num_bytes: int
    index_bytes: int
    """Of the index that rank 0 commits."""


def shares(recipe: TrainingRecipe, resources: TrainingResources) -> dict[int, list[Share]]:
    """Of every rank, by pipeline stage. ZeRO 1 and 2, whose partitions are equal runs of each group of parameters."""
    assert resources.zero_stage in (1, 2), resources.zero_stage
    num_in_stage = resources.num_ranks // resources.pipeline_parallel
    return {
        stage: list(_stage_shares(recipe, resources, stage * num_in_stage))
        for stage in range(resources.pipeline_parallel)
    }


def _stage_shares(recipe: TrainingRecipe, resources: TrainingResources, first_rank: int) -> Iterator[Share]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=first_rank, world_size=resources.num_ranks)
    ranks = connect_ranks(resources)
    with torch.device("meta"):
        model = Glm4Moe(recipe.model, rope_theta=recipe.rope_theta)
    divide_model(model, ranks, resources)
    dist.destroy_process_group()
    optimizer = build_optimizer(model, recipe.optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    num_moments = {each: 1 if optimizer.has_momentum(each) else 2 for each in names}
    groups = [(_placed(group["params"]), bool(group.get("moe"))) for group in optimizer.param_groups]
    for index in range(ranks.stage.size):
        own = _ranks_of(ranks, index)
        num_elements, kept = 0, []
        for placed, is_divided in groups:
            for piece in _pieces(placed, own.expert_data if is_divided else own.replicas):
                num_kinds = 1 + num_moments[piece.parameter]
                for run in runs_of(names[piece.parameter], piece, *own_range(piece, own), own):
                    num_elements += run.length * num_kinds
                    kept += [("master", run)] * num_kinds
        if index == 0:
            num_elements += sum(buffer.numel() for buffer in router_biases(model).values())
        digests = -(-4 * num_elements // BLOCK_BYTES) * (DIGEST_CHARS + 3)
        yield Share(4 * num_elements, digests + len(json.dumps(kept, separators=(",", ":"))))


def _placed(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, int, int]]:
    """Parameters one after the other: each with its first element and the one after its last."""
    ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
    return list(zip(parameters, [0, *ends], ends, strict=False))


def _ranks_of(ranks: Ranks, index: int) -> Ranks:
    """The coordinates of another rank of the same stage, where shapes are the same."""

    def at(axis: Axis, rank: int) -> Axis:
        return replace(axis, rank=rank)

    return replace(
        ranks,
        tensor=at(ranks.tensor, index % ranks.tensor.size),
        replicas=at(ranks.replicas, index // ranks.tensor.size),
        expert=at(ranks.expert, index % ranks.expert.size),
        expert_data=at(ranks.expert_data, index // ranks.expert.size),
        stage=at(ranks.stage, index),
    )


def _pieces(placed: list[tuple[nn.Parameter, int, int]], axis: Axis) -> Iterator[Piece]:
    """ZeRO's partition of a group: an equal run of its parameters, one after the other."""
    size = -(-placed[-1][2] // axis.size)
    first, stop = axis.rank * size, (axis.rank + 1) * size
    master = torch.empty(0, device="meta")
    for parameter, begin, end in placed[bisect_right(placed, first, key=lambda each: each[2]) :]:
        low, high = max(first, begin), min(stop, end)
        if low >= high:
            return
        yield Piece(parameter, parameter.shape, master, low - first, low - begin, high - low, is_shared=True)


def main() -> None:
    """Print the shares of a scale's first phase."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scale", nargs="?", default="full")
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the result in benchmarks/results/")
    scale = load_scale(parser.parse_args().scale)
    recipe, resources = scale.training_recipe(scale.phases[0]), scale.phases[0].resources
    by_stage = shares(recipe, resources)
    every = [share.num_bytes for stage in by_stage.values() for share in stage]
    fullest = max(every)
    by_mean = [
        max(each.num_bytes for each in of) * len(of) / sum(each.num_bytes for each in of) for of in by_stage.values()
    ]
    report(
        "checkpoint_shares",
        ours=fullest / 1e9,
        peer=sum(every) / 1e9,
        unit="GB hashed by the rank that hashes most",
        lower_is_better=True,
        num_ranks=resources.num_ranks,
        state_bytes=sum(every),
        planned_state_bytes=state_bytes(recipe),
        fullest_over_mean_of_stage=[round(each, 3) for each in by_mean],
        fullest_hash_seconds=round(fullest / HASHED_PER_SECOND, 2),
        index_bytes=sum(share.index_bytes for stage in by_stage.values() for share in stage),
    )


if __name__ == "__main__":
    main()
