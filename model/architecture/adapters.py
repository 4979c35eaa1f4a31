"""Low-rank adapters: LoRA (arXiv 2106.09685), DoRA (arXiv 2402.09353) and QLoRA (arXiv 2305.14314), on the matrices of
a model whose own stay.

The mathematics and the names are those of PEFT. A matrix W computes W x + alpha / rank * B A x; DoRA scales each
output by a trained magnitude over the norm of its row of W + alpha / rank * B A, through which no gradient flows
(section 4.3). B starts at zero and magnitudes at the norms of W, so an adapter begins as the model itself. QLoRA is
LoRA where all matrices of the trunk's attention, MLPs and experts are held in 4 bits, with an adapter or without
(four_bit_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import AdapterRecipe
from model.architecture.decoder_layer import DecoderLayer
from model.architecture.four_bit_layers import hold_in_four_bits
from model.architecture.gated_mlp import SeparateMlp
from model.architecture.grouped_linear import frozen_linear, grouped_linear
from model.architecture.moe import Experts, MixtureOfExperts, SeparateExperts
from model.architecture.transformer import Glm4Moe

LORA_A, LORA_B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""How the names of an adapter's tensors end, after the name of their matrix; the experts' are stacked here."""
ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")


def scaling_of(adapter: AdapterRecipe) -> float:
    """The factor of B A."""
    return adapter.alpha / adapter.rank


class AdapterDropout:
    """Leaves out a share of the inputs of adapters while they are trained.

    Whether one stays is a hash of seed, row, position, matrix and feature: so ranks, micro-batches, a second forward
    pass and a restart leave out the same ones, and nothing of it is in a checkpoint.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.rate, self._seed = rate, seed
        self._keys_BT: Tensor | None = None

    def begin_rows(self, row_numbers_B: Tensor, num_positions: int) -> None:
        """Name the rows of the next passes by their numbers in the phase, int64."""
        keys_B = mixed_bits(row_numbers_B + torch.full_like(row_numbers_B, self._seed) * _GOLDEN_RATIO)
        positions_T = torch.arange(num_positions, device=row_numbers_B.device)
        self._keys_BT = mixed_bits(keys_B[:, None] + positions_T * _GOLDEN_RATIO)

    def __call__(self, inputs: Tensor, matrix: int) -> Tensor:
        """The inputs of one matrix, (B, T, I) or (B * T, I), those that stay scaled by 1 / (1 - rate)."""
        assert self._keys_BT is not None, "rows that are trained have numbers"
        features_I = torch.arange(inputs.shape[-1], device=inputs.device) + (matrix << _FEATURE_BITS)
        keys = self._keys_BT.view(*inputs.shape[:-1], 1)
        drawn = mixed_bits(keys + features_I * _GOLDEN_RATIO).bitwise_and_((1 << _DRAWN_BITS) - 1)
        return inputs * (drawn >= self.rate * (1 << _DRAWN_BITS)) / (1 - self.rate)


_GOLDEN_RATIO, _FEATURE_BITS, _DRAWN_BITS = 0x9E3779B97F4A7C15 - (1 << 64), 32, 24
_MIXING_STEPS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def mixed_bits(values: Tensor) -> Tensor:
    """splitmix64's finalizer (Steele, Lea and Flood 2014) on int64, which wraps around."""
    for shift, factor in _MIXING_STEPS:
        values = (values ^ _shifted(values, shift)).mul_(factor)
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, without the sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class AdaptedLinear(nn.Linear):
    """A frozen linear layer and its adapter; `matrix` is its number in the model."""

    def __init__(
        self, linear: nn.Linear, adapter: AdapterRecipe, dropout: AdapterDropout | None = None, matrix: int = 0
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = nn.Linear(self.in_features, adapter.rank, bias=False, device=device)
        self.lora_B = nn.Linear(adapter.rank, self.out_features, bias=False, device=device)
        self.scaling, self.dropout, self.matrix = scaling_of(adapter), dropout, matrix
        magnitudes = torch.empty(self.out_features, device=device) if adapter.kind == "dora" else None
        self.lora_magnitude_vector = None if magnitudes is None else nn.Parameter(magnitudes)
        self.sum_over_inputs: Callable[[Tensor], Tensor] = _itself
        """Sums squares over the ranks that hold other columns of the matrix (tasks/training/parallel)."""
        self.is_on = True

    def forward(self, input: Tensor) -> Tensor:
        out = frozen_linear(input, self.weight)
        if self.is_on:
            out = self._adapted(input, out)
        return out if self.bias is None else out + self.bias

    def _adapted(self, input: Tensor, out: Tensor) -> Tensor:
        kept = input if self.dropout is None or not self.training else self.dropout(input, self.matrix)
        low_rank = F.linear(F.linear(kept, self.lora_A.weight), self.lora_B.weight)
        out = out.add(low_rank, alpha=self.scaling)
        if self.lora_magnitude_vector is None:
            return out
        return out * (self.lora_magnitude_vector / self._row_norms()).to(out.dtype)

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        """Norms of the rows of W + s B A, at least float32, from products of the low rank: the sum itself is never
        made."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        weight_OI, a_RI, b_OR = self.weight, self.lora_A.weight, self.lora_B.weight.to(wide) * self.scaling
        squares_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=wide).square()
        crossed_O = (F.linear(weight_OI, a_RI).to(wide) * b_OR).sum(1)
        added_O = ((b_OR @ (a_RI.to(wide) @ a_RI.to(wide).t())) * b_OR).sum(1)
        return self.sum_over_inputs(squares_O + 2 * crossed_O + added_O).sqrt()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class AdaptedExperts(SeparateExperts):
    """Frozen experts with a LoRA each, stacked as they are: `gate_proj_lora_A` (E, rank, D) and so on."""

    def __init__(self, experts: Experts, adapter: AdapterRecipe) -> None:
        nn.Module.__init__(self)
        self.scaling, self.is_on = scaling_of(adapter), True
        for name in MLP_MATRICES:
            weight_EOI = getattr(experts, name)
            num_experts, num_outputs, num_inputs = weight_EOI.shape
            setattr(self, name, weight_EOI)
            for half, shape in (("A", (adapter.rank, num_inputs)), ("B", (num_outputs, adapter.rank))):
                low_rank = torch.empty(num_experts, *shape, device=weight_EOI.device)
                setattr(self, f"{name}_lora_{half}", nn.Parameter(low_rank))

    def product(self, name: str, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        out_RO = super().product(name, rows_RI, counts_E)
        if not self.is_on:
            return out_RO
        inner_RR = grouped_linear(rows_RI, getattr(self, f"{name}_lora_A"), counts_E)
        low_rank_RO = grouped_linear(inner_RR, getattr(self, f"{name}_lora_B"), counts_E)
        return out_RO.add(low_rank_RO, alpha=self.scaling)


def add_adapters(model: Glm4Moe, adapter: AdapterRecipe, seed: int = 0) -> None:
    """Freeze a model, in place, and give the target matrices of its trunk adapters of undefined content; the kind
    `none` changes nothing. Router, norms, embeddings and the MTP layer get none, as in PEFT. `seed` decides what
    dropout leaves out."""
    if adapter.kind == "none":
        return
    model.requires_grad_(False)
    dropout = AdapterDropout(adapter.dropout, seed) if adapter.dropout else None
    model.begin_rows = None if dropout is None else dropout.begin_rows
    numbers = count()

    def adapt(linear: nn.Linear) -> AdaptedLinear:
        return AdaptedLinear(linear, adapter, dropout, next(numbers))

    for layer in model.model.layers[: model.recipe.num_hidden_layers]:
        assert isinstance(layer, DecoderLayer), layer
        if adapter.kind == "qlora":
            hold_in_four_bits(layer)
        if "attention" in adapter.targets:
            for name in ATTENTION_MATRICES:
                setattr(layer.self_attn, name, adapt(getattr(layer.self_attn, name)))
        if isinstance(layer.mlp, MixtureOfExperts):
            if "shared_experts" in adapter.targets and layer.mlp.shared_experts is not None:
                layer.mlp.shared_experts = SeparateMlp(layer.mlp.shared_experts, adapt)
            if "routed_experts" in adapter.targets:
                layer.mlp.experts = AdaptedExperts(layer.mlp.experts, adapter)
        elif "dense_mlp" in adapter.targets:
            layer.mlp = SeparateMlp(layer.mlp, adapt)


def is_frozen(model: nn.Module) -> bool:
    """Whether only adapters are trained."""
    return not all(parameter.requires_grad for parameter in model.parameters())


def adapted_parts(model: nn.Module) -> list[AdaptedLinear | AdaptedExperts]:
    """The modules with an adapter."""
    return [module for module in model.modules() if isinstance(module, AdaptedLinear | AdaptedExperts)]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes with its frozen weights only."""
    parts = adapted_parts(model)
    try:
        for part in parts:
            part.is_on = False
        yield
    finally:
        for part in parts:
            part.is_on = True


@torch.no_grad()
def matrix_of(linear: nn.Linear) -> Tensor:
    """The matrix that computes what a layer computes: its own, or with its adapter merged in."""
    if not isinstance(linear, AdaptedLinear):
        return linear.weight
    halves = linear.lora_A.weight, linear.lora_B.weight
    return merged_weight(linear.weight, *halves, linear.lora_magnitude_vector, linear.scaling)


@torch.no_grad()
def stack_of(experts: Experts, name: str) -> Tensor:
    """One of MLP_MATRICES of all experts, (E, O, I), which likewise computes what they compute."""
    weight_EOI = getattr(experts, name)
    if not isinstance(experts, AdaptedExperts):
        return weight_EOI
    a_ERI, b_EOR = getattr(experts, f"{name}_lora_A"), getattr(experts, f"{name}_lora_B")
    return merged_weight(weight_EOI, a_ERI, b_EOR, None, experts.scaling)


def merged_weight(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, magnitude_O: Tensor | None, scaling: float) -> Tensor:
    """The matrix that computes what a matrix and its adapter compute, float32."""
    sum_OI = weight_OI.float() + scaling * (b_OR.float() @ a_RI.float())
    if magnitude_O is None:
        return sum_OI
    return sum_OI * (magnitude_O.float() / torch.linalg.vector_norm(sum_OI, dim=1)).unsqueeze(1)
