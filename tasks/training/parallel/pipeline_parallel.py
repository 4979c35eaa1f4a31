"""Pipeline parallelism: each stage holds some layers; hidden states go forward, gradients come back (1F1B).

DeepSpeed's PipelineEngine is not used: it takes one loss, averaged over a fixed number of equal micro-batches, at the
last stage. Ours has a balance loss and expert counts on every stage, weights each micro-batch by its targets, and its
batch grows along the course. Each stage is a DeepSpeed engine of its own over the stage's replicas (ZeRO 0 or 1). It
gets the gradients of the outputs instead of a loss.

The MTP layer on the last stage needs embeddings. The first stage sends them and receives their gradients, instead of
a second copy of the matrix. So every parameter is on one stage only, and nothing must be kept equal in weights,
moments, norm or checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.architecture.decoder_layer import LayerOutput
from model.architecture.moe import MixtureOfExperts
from model.architecture.transformer import Glm4Moe
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.mixed_precision import ComputeInBfloat16
from tasks.training.parallel.ranks import Ranks
from tasks.training.plan.pipeline_stages import stage_layers

if TYPE_CHECKING:
    from tasks.training.parallel.trainable import DividedModel, Trainable


class AbsentLayer(nn.Module):
    """Takes the number of a layer of another stage, so that this stage's layers keep their numbers and names."""

    def forward(self, hidden_BTD: Tensor, *context: object, **named: object) -> LayerOutput:
        return LayerOutput(hidden_BTD, None, None)


class StageOutput(NamedTuple):
    """`hidden_BTD` goes to the next stage; the last one has losses instead."""

    hidden_BTD: Tensor | None
    embedded_BTD: Tensor | None
    """On the first stage of a model with an MTP layer: goes to the last stage."""
    lm: Tensor | None
    mtp: Tensor | None
    balance: Tensor
    """Of this stage's layers."""
    counts_LE: Tensor
    """Of this stage's layers with experts."""
    target_scores_BT: Tensor | None = None
    """On the last stage, where targets were to be scored; there are no losses then."""


def divide_stages(model: Glm4Moe, ranks: Ranks) -> None:
    """Take out of a built model what other stages hold; what stays keeps its names. Reads no value: weights may be on
    the meta device."""
    pipeline, layers = ranks.pipeline, model.model.layers
    if pipeline.size == 1:
        return
    own = stage_layers(model.recipe, pipeline.size)[pipeline.rank]
    is_last = pipeline.rank == pipeline.size - 1
    for number in range(len(layers)):
        if number not in own and not (is_last and number >= model.recipe.num_hidden_layers):
            layers[number] = AbsentLayer()
    if pipeline.rank > 0:
        del model.model.embed_tokens
    if not is_last:
        del model.model.norm
        delattr(model, "score" if model.is_scored else "lm_head")


def router_rows(model: Glm4Moe) -> list[int]:
    """Rows of the whole model's (layers with experts, experts) counts that belong to this stage's routers, in the
    model's order."""
    first = model.recipe.first_k_dense_replace
    return [
        number - first
        for number, layer in enumerate(model.model.layers)
        if isinstance(getattr(layer, "mlp", None), MixtureOfExperts)
    ]


class PipelineStage(nn.Module):
    """One stage's forward pass; the first takes only tokens, the others what they received."""

    def __init__(self, model: Glm4Moe, ranks: Ranks) -> None:
        super().__init__()
        self.model = model
        self.is_first, self.is_last = ranks.pipeline.rank == 0, ranks.pipeline.rank == ranks.pipeline.size - 1

    def forward(self, batch: MicroBatch, hidden_BTD: Tensor | None, embedded_BTD: Tensor | None) -> StageOutput:
        arguments = batch.model_arguments
        routes_LBTK = arguments.pop("routes_LBTK", None)
        if self.is_first:
            hidden_BTD = embedded_BTD = self.model.model.embed_tokens(batch.token_ids_BT)
        assert hidden_BTD is not None, "every stage but the first receives hidden states"
        trunk = self.model.run_trunk(
            hidden_BTD, arguments.get("segment_ids_BT"), None, batch.max_documents, routes_LBTK, batch.gaps_BT
        )
        if self.is_last:
            output = self.model.losses(trunk, hidden_BTD if embedded_BTD is None else embedded_BTD, **arguments)
            if output.losses is None:
                zero = hidden_BTD.new_zeros(())
                return StageOutput(None, None, None, None, zero, output.expert_counts_LE, output.target_scores_BT)
            return StageOutput(None, None, *output.losses, output.expert_counts_LE)
        balance = (
            torch.stack(trunk.balance).sum() * self.model.num_parts
            if trunk.balance
            else torch.zeros((), device=hidden_BTD.device)
        )
        sent_BTD = embedded_BTD if self.is_first and has_mtp(self.model) else None
        return StageOutput(trunk.hidden_BTD, sent_BTD, None, None, balance, self.model.stack_counts(trunk.counts))


def has_mtp(model: Glm4Moe) -> bool:
    """Whether the last stage needs the embeddings; `runs_mtp` is the same on all stages."""
    return model.recipe.num_nextn_predict_layers > 0 and model.runs_mtp


class _Seed(torch.autograd.Function):
    """A scalar whose gradient for `output` is `gradient`: DeepSpeed's backward pass starts from a scalar."""

    @staticmethod
    def forward(ctx, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None


class _Passing(NamedTuple):
    """A micro-batch between its forward and its backward pass."""

    hidden_BTD: Tensor | None
    """As received, with its gradient after the backward pass."""
    embedded_BTD: Tensor | None
    output: StageOutput
    loss: Tensor | None
    """What this stage's own losses add, weighted; None where it has none."""


class _Pipeline:
    """The passes of one step on one stage. Activations and gradients travel in a group each, in the order of the
    micro-batches."""

    def __init__(self, divided: DividedModel) -> None:
        self.divided = divided
        is_cast = isinstance(divided.engine.module, ComputeInBfloat16)
        self.dtype = torch.bfloat16 if is_cast else next(divided.model.parameters()).dtype
        pipeline = divided.ranks.pipeline
        self.line, self.index = pipeline.ranks, pipeline.rank
        self.down, self.up = pipeline.group, divided.ranks.pipeline_back.group
        self.is_first, self.is_last = self.index == 0, self.index == len(self.line) - 1
        self.has_mtp = has_mtp(divided.model)
        self.sent: list[tuple[dist.Work, Tensor]] = []
        """Messages under way with their buffers: a buffer must live until its message has left."""

    def forward(self, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None, StageOutput]:
        hidden_BTD = None if self.is_first else self._receive(batch, self.index - 1, self.down)
        embedded_BTD = self._receive(batch, 0, self.down) if self.is_last and self.has_mtp else None
        if torch.is_grad_enabled():
            for received in (hidden_BTD, embedded_BTD):
                if received is not None:
                    received.requires_grad_()
        output: StageOutput = self.divided.engine(batch, hidden_BTD, embedded_BTD)
        if output.hidden_BTD is not None:
            self._send(output.hidden_BTD, self.index + 1, self.down)
        if output.embedded_BTD is not None:
            self._send(output.embedded_BTD, len(self.line) - 1, self.down)
        return hidden_BTD, embedded_BTD, output

    def backward(self, batch: MicroBatch, passing: _Passing) -> None:
        terms = [] if passing.loss is None else [passing.loss]
        if passing.output.hidden_BTD is not None:
            terms.append(_Seed.apply(passing.output.hidden_BTD, self._receive(batch, self.index + 1, self.up)))
        if passing.output.embedded_BTD is not None:
            terms.append(_Seed.apply(passing.output.embedded_BTD, self._receive(batch, len(self.line) - 1, self.up)))
        self.divided.engine.backward(torch.stack(terms).sum())
        if passing.hidden_BTD is not None:
            self._send(_gradient(passing.hidden_BTD), self.index - 1, self.up)
        if passing.embedded_BTD is not None:
            self._send(_gradient(passing.embedded_BTD), 0, self.up)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self.sent:
            work.wait()
        self.sent = []

    def _receive(self, batch: MicroBatch, index: int, group: dist.ProcessGroup | None) -> Tensor:
        model = self.divided.model
        rows, positions = batch.token_ids_BT.shape
        # Tensor-parallel ranks hold slices of the positions between layers.
        shape = (rows, positions // model.num_slices, model.recipe.hidden_size)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.divided.device)
        dist.recv(tensor, self.line[index], group)
        return tensor

    def _send(self, tensor: Tensor, index: int, group: dist.ProcessGroup | None) -> None:
        self.sent = [(work, buffer) for work, buffer in self.sent if not work.is_completed()]
        buffer = tensor.detach().contiguous()
        work = dist.isend(buffer, self.line[index], group)
        assert work is not None, "this rank is in the group"
        self.sent.append((work, buffer))


def _gradient(received: Tensor) -> Tensor:
    return torch.zeros_like(received) if received.grad is None else received.grad


def accumulate_in_stages(
    trainable: Trainable, micro_batches: list[MicroBatch], shares: list[Tensor], loss_weights: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """`training_step.accumulate_gradients` in a pipeline: this stage's part of the losses, and the routed copies of its
    own layers in the rows of the whole model. Sums over the pipeline give those of the step."""
    engine, model, ranks = trainable.engine, trainable.model, trainable.ranks
    recipe, device = model.recipe, trainable.device
    num_routed = recipe.num_hidden_layers - recipe.first_k_dense_replace + recipe.num_nextn_predict_layers
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    counts_LE = torch.zeros(num_routed, recipe.n_routed_experts, dtype=torch.int64, device=device)
    rows = router_rows(model)
    pipeline = _Pipeline(trainable)
    passing: dict[int, _Passing] = {}

    def forward(number: int) -> None:
        hidden_BTD, embedded_BTD, output = pipeline.forward(micro_batches[number])
        zero = output.balance.new_zeros(())
        losses = (zero if output.lm is None else output.lm, zero if output.mtp is None else output.mtp, output.balance)
        lm, mtp, balance = (loss * share for loss, share in zip(losses, shares[number], strict=True))
        sums.add_(torch.stack([lm, mtp, balance]).detach().double())
        if not micro_batches[number].is_filler:
            counts_LE[rows] += output.counts_LE
        # Upstream gradients follow from the last stage's loss, so they carry the factor that DeepSpeed's mean over
        # replicas takes away.
        loss = (lm + loss_weights[0] * mtp + loss_weights[1] * balance) * ranks.replicas.size
        passing[number] = _Passing(hidden_BTD, embedded_BTD, output, loss if loss.requires_grad else None)

    def backward(number: int) -> None:
        engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
        pipeline.backward(micro_batches[number], passing.pop(number))

    num_ahead = min(len(micro_batches), ranks.pipeline.size - 1 - ranks.pipeline.rank)
    for number in range(len(micro_batches)):
        forward(number)
        if number >= num_ahead:
            backward(number - num_ahead)
    for number in range(len(micro_batches) - num_ahead, len(micro_batches)):
        backward(number)
    pipeline.finish()
    return sums, counts_LE


@torch.no_grad()
def next_token_loss_in_stages(trainable: Trainable, batch: MicroBatch) -> Tensor:
    """Mean next-token loss of a micro-batch on the last stage, 0 on the others."""
    output = _forward_alone(trainable, batch)
    return torch.zeros((), device=trainable.device) if output.lm is None else output.lm


@torch.no_grad()
def target_scores_in_stages(model: DividedModel, batch: MicroBatch) -> Tensor:
    """Of a micro-batch that scores its targets, on the last stage, 0 on the others."""
    scored_BT = _forward_alone(model, batch).target_scores_BT
    return torch.zeros(batch.target_ids_BT.shape, device=model.device) if scored_BT is None else scored_BT


def _forward_alone(model: DividedModel, batch: MicroBatch) -> StageOutput:
    """A forward pass without a backward pass."""
    pipeline = _Pipeline(model)
    _, _, output = pipeline.forward(batch)
    pipeline.finish()
    return output
