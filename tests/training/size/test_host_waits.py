"""A step on an accelerator waits for it once: its kernels are queued, and only the figures of the log are read.

Tensors on the device `meta` have no content. Whatever needs a value on the host (`.item()`, `.tolist()`, `bool()`,
`nonzero`, `bincount`) raises, and code that asks whether it is on a CPU takes the accelerator's branches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch

from model.architecture.attention import visible_within_segments
from model.architecture.losses import IGNORED
from model.architecture.moe import dispatch
from model.architecture.transformer import Glm4Moe
from model.optimizer.optimizer import build_optimizer
from tasks.data.packing.packed_rows import NO_SEGMENT
from tasks.training.loop import training_step
from tasks.training.loop.batches import read_micro_batches
from tasks.training.loop.training_step import Figures, expert_use, read_figures, take_step
from tasks.training.parallel import tensor_vocabulary
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.ranks import Axis, Ranks
from tasks.training.parallel.recompute import recompute_activations
from tasks.training.parallel.tensor_vocabulary import VocabularyParallelHead
from tasks.training.parallel.trainable import Trainable
from tasks.training.schedule.schedules import StepPlan
from tasks.training.state.position import StepLosses
from tests.support.model_recipes import GLM46
from tests.support.training_inputs import small_recipe

META = torch.device("meta")
ALONE = Axis(1, 0, (0,), None)
RECIPE = small_recipe(model=GLM46.model_dump(), dtype="bfloat16")
PLAN = StepPlan(0, 4, 0, 4 * RECIPE.sequence_length)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(training_step.dist, "get_world_size", lambda: 1)


class Engine:
    """What `take_step` asks of DeepSpeed without ZeRO, on one rank."""

    def __init__(self, model: Glm4Moe, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.device, self.num_steps = model, optimizer, META, 0

    def __call__(self, *arguments, **named):
        return self.model(*arguments, **named)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def zero_optimization_stage(self) -> int:
        return 0

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1


def build(recompute: Literal["none", "selective", "full"]) -> Trainable:
    with META:
        model = Glm4Moe(GLM46).to(torch.bfloat16)
    recompute_activations(model, recompute, 1)
    optimizer = build_optimizer(model, RECIPE.optimizer)
    ranks = Ranks(*[ALONE] * 9)
    return Trainable(Engine(model, optimizer), model, ranks, optimizer)  # pyright: ignore[reportArgumentType]


class DocumentRows:
    """Rows of three documents each, and of a fourth, or of gaps where attention stays inside documents."""

    def __init__(self, is_segmented: bool) -> None:
        self.is_segmented = is_segmented

    def __len__(self) -> int:
        return 8

    def close(self) -> None: ...

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = stop - start, RECIPE.sequence_length + 1
        segments = np.broadcast_to(np.arange(shape[1]) * 4 // shape[1], shape)
        segments = np.where((segments == 3) & self.is_segmented, NO_SEGMENT, segments)
        return np.zeros(shape, np.int32), segments.astype(np.int32), np.ones(shape, bool)


def batches(is_segmented: bool, device: torch.device = META) -> list[MicroBatch]:
    return read_micro_batches(DocumentRows(is_segmented), PLAN, 0, 1, 2, device)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("is_segmented", [False, True])
def test_a_step_reads_the_accelerator_once(is_segmented, recompute, monkeypatch):
    read = []

    def figures(sums, grad_norm, attended, counts_LE):
        read.append([sums.shape, grad_norm.shape, attended.shape])
        losses = StepLosses(lm=1.0, mtp=1.0, balance=1.0)
        # A norm above max_grad_norm: gradients are scaled too.
        return Figures(losses, 1e3, 1, 1, torch.ones(counts_LE.shape, dtype=torch.int64))

    monkeypatch.setattr(training_step, "read_figures", figures)
    trainable = build(recompute)
    result = take_step(trainable, RECIPE, PLAN, batches(is_segmented), 1)
    assert read == [[(3,), (), (2,)]] and trainable.engine.num_steps == 1
    assert result.grad_norm == 1e3 and set(result.expert_use.load) == {1.0}


def test_the_guard_sees_a_read():
    """Each on the path of the step: the figures, the optimizer, the routed experts, the documents."""
    trainable = build("none")
    with pytest.raises((RuntimeError, NotImplementedError)):
        take_step(trainable, RECIPE, PLAN, batches(is_segmented=True), 1)
    assert trainable.engine.num_steps == 0
    uncounted = SimpleNamespace(**{**vars(batches(is_segmented=True)[0]), "max_documents": None})
    with pytest.raises((RuntimeError, NotImplementedError)):
        trainable.engine(uncounted.token_ids_BT, segment_ids_BT=uncounted.segment_ids_BT)
    for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero, torch.bincount, bool):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(torch.zeros(1, dtype=torch.int64, device=META))


@pytest.mark.parametrize("number", range(GLM46.first_k_dense_replace + 1))
def test_torch_can_compile_a_block_of_an_accelerator_as_one_graph(number, monkeypatch):
    with META:
        model = Glm4Moe(GLM46).to(torch.bfloat16)
    hidden_BTD = torch.empty(2, 12, GLM46.hidden_size, dtype=torch.bfloat16, device=META, requires_grad=True)
    segments_BT = torch.zeros(2, 12, dtype=torch.int64, device=META)
    graphs = []

    def run_as_it_is(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # tests/conftest.py
    block = torch.compile(model.model.layers[number], fullgraph=True, backend=run_as_it_is)
    output = block(
        hidden_BTD,
        model._rotary(12, 0, META),
        visible_BTS=visible_within_segments(segments_BT, 4),
        gaps_BT=segments_BT.bool(),
    )
    output.hidden_BTD.sum().backward()
    assert len(graphs) == 1 and hidden_BTD.grad is not None


def test_figures_are_exact():
    counts = torch.tensor([[2**40 + 1, 3], [0, 7]])
    sums, norm = torch.tensor([1.5, 0.25, 3e-9], dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    figures = read_figures(sums, norm, torch.tensor([11, 2**45 + 1]), counts)
    assert figures[1:4] == (0.1, 11, 2**45 + 1) and torch.equal(figures.counts_LE, counts)
    assert figures.losses == StepLosses(lm=1.5, mtp=0.25, balance=3e-9)
    assert expert_use(figures.counts_LE) == expert_use(counts)


def test_counts_of_experts_equal_a_count_one_by_one():
    ids = torch.randint(0, 7, (50, 3), generator=torch.Generator().manual_seed(3))
    for num_experts in (7, 9):
        counted = dispatch(torch.zeros(50, 2), ids, num_experts).counts_E
        assert counted.dtype == torch.int64
        assert counted.tolist() == [int((ids == expert).sum()) for expert in range(num_experts)]


def test_the_bound_of_documents_holds():
    (batch, *_) = batches(is_segmented=True, device=torch.device("cpu"))
    assert batch.max_documents == 2 * 4
    assert batch.terms.tolist() == [batch.num_lm_targets, batch.num_mtp_targets, 2]


def test_the_divided_unembedding_takes_an_accelerators_chunks_and_two_reductions_each(monkeypatch):
    reductions = []
    monkeypatch.setattr(tensor_vocabulary.dist, "all_reduce", lambda values, **_: reductions.append(values.shape))
    monkeypatch.setattr(tensor_vocabulary, "gather_positions", lambda hidden, *_: hidden)
    weight = torch.nn.Parameter(torch.empty(18_944, 64, device=META, dtype=torch.bfloat16))
    head = VocabularyParallelHead(weight, Axis(8, 0, tuple(range(8)), None))
    hidden = torch.empty(1, 4096, 64, device=META, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.full((1, 4096), IGNORED, device=META)
    head(hidden, targets).backward()
    assert reductions == [(4096,), (2, 4096)] and weight.grad is not None
