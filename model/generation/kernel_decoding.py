"""Generates on a CPU in float32 by the compiled pass: packed weights of a model, and the sequences of one batch.

A sequence's tokens do not depend on what else is in the batch, on chunks or on threads: every number is summed in one
fixed order. llama.cpp's server takes 2.7, 3.2 and 3.4 times as long at the size of `nightly` and batch 1, 8 and 64
(1.1, 1.9 and 2.7 times with weights that only float32 holds), and it reads weights only from a file
(benchmarks/training/generate_llama.py).
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from model.architecture.adapters import AdaptedLinear, adapted_parts, matrix_of, stack_of
from model.architecture.attention import Attention, attend
from model.architecture.decoder_layer import DecoderLayer
from model.architecture.gated_mlp import GatedMlp
from model.architecture.kv_cache import check_positions
from model.architecture.moe import MixtureOfExperts
from model.architecture.mtp import MtpLayer
from model.architecture.norm import RMSNorm
from model.architecture.rotary import rotary_tables
from model.architecture.routes import free_routes
from model.architecture.transformer import Glm4Moe
from model.generation.decoding import empty_routes
from model.generation.sampling import Chosen, NonFiniteLogitsError, Sampling, choose_tokens, describe_choice
from model.kernels.decoding_kernel import Cache, Call, Layer, Model, load_kernel, pack_panels

TOKENS_PER_PASS = 256
"""Prompts are read in passes of this many tokens: their activations stay in the second-level cache."""


def kernel_applies(model: Glm4Moe) -> bool:
    """Whether the compiled pass computes this very model: whole float32 weights on a CPU, in plain modules or ones with
    an adapter, which is merged in."""
    if model.num_slices > 1 or model.num_parts > 1:
        return False
    is_plain = all(
        parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and parameter.numel() > 0
        and not hasattr(parameter, "shard")
        for parameter in model.parameters()
    )
    return is_plain and all(
        type(child) in (nn.Linear, AdaptedLinear) and module.attend is attend
        for module in model.modules()
        if isinstance(module, Attention)
        for child in (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
    )


class KernelWeights:
    """Weights packed for the compiled pass; they follow the model only by packing again (`are_current`)."""

    def __init__(self, model: Glm4Moe) -> None:
        recipe = model.recipe
        self.model = model
        self._state = _state_of(model)
        self._kept: list[object] = []
        """Tensors to which the pointers of the structures point, kept alive."""
        matrices = [parameter.detach() for parameter in model.parameters() if parameter.dim() > 1]
        fits_half = not adapted_parts(model) and all(torch.equal(each, each.bfloat16().float()) for each in matrices)
        self._dtype = torch.bfloat16 if fits_half else torch.float32
        """bfloat16 only where it loses nothing, as for the weights of a bfloat16 checkpoint: half the memory traffic,
        the same numbers."""
        layers = [self._layer(cast(DecoderLayer, layer)) for layer in model.model.layers]
        self._kept.append(structures := (Layer * len(layers))(*layers))
        last = cast(DecoderLayer, model.model.layers[-1])
        self.structure = Model(
            layers=structures,
            embedding=self._pointer(model.model.embed_tokens.weight),
            norm=self._pointer(model.model.norm.weight),
            mtp_norm=self._pointer(last.shared_head.norm.weight) if isinstance(last, MtpLayer) else None,
            head=self._panels(model.lm_head.weight),
            num_layers=len(layers),
            hidden_size=recipe.hidden_size,
            num_heads=recipe.num_attention_heads,
            num_kv_heads=recipe.num_key_value_heads,
            head_dim=recipe.head_dim,
            rotary_dim=recipe.rotary_dim,
            num_experts=recipe.n_routed_experts,
            experts_per_token=recipe.num_experts_per_tok,
            expert_width=recipe.moe_intermediate_size,
            vocab_size=recipe.vocab_size,
            is_half=fits_half,
            normalises_weights=recipe.norm_topk_prob,
            routed_scale=recipe.routed_scaling_factor,
            eps=recipe.rms_norm_eps,
        )

    def are_current(self) -> bool:
        """False once a parameter was replaced or written to."""
        return self._state == _state_of(self.model)

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _panels(self, *matrices: Tensor) -> int | None:
        return self._pointer(pack_panels([matrix.detach() for matrix in matrices], self._dtype))

    def _layer(self, layer: DecoderLayer) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([matrix_of(projection).detach() for projection in projections])
        biases = [projection.bias for projection in projections]
        packed = Layer(
            input_norm=self._pointer(layer.input_layernorm.weight),
            post_norm=self._pointer(layer.post_attention_layernorm.weight),
            qkv=self._panels(qkv),
            output=self._panels(matrix_of(attention.o_proj)),
            qkv_bias=None if biases[0] is None else self._pointer(torch.cat([bias.detach() for bias in biases])),
        )
        if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
            packed.q_norm, packed.k_norm = (
                self._pointer(attention.q_norm.weight),
                self._pointer(attention.k_norm.weight),
            )
        dense = mlp if isinstance(mlp, GatedMlp) else cast(MixtureOfExperts, mlp).shared_experts
        if dense is not None:
            packed.gate_up = self._panels(matrix_of(dense.gate_proj), matrix_of(dense.up_proj))
            packed.down, packed.mlp_width = self._panels(matrix_of(dense.down_proj)), dense.up_proj.weight.shape[0]
        if isinstance(mlp, MixtureOfExperts):
            packed.is_moe, packed.router_bias = 1, self._pointer(mlp.gate.e_score_correction_bias)
            packed.router = self._pointer(pack_panels([mlp.gate.weight.detach()], torch.float32))
            packed.expert_gate_up = self._panels(*(stack_of(mlp.experts, name) for name in ("gate_proj", "up_proj")))
            packed.expert_down = self._panels(stack_of(mlp.experts, "down_proj"))
        if isinstance(layer, MtpLayer):
            packed.enorm, packed.hnorm = self._pointer(layer.enorm.weight), self._pointer(layer.hnorm.weight)
            packed.eh = self._panels(layer.eh_proj.weight)
        return packed


def _state_of(model: Glm4Moe) -> list[tuple[int, int]]:
    tensors = [*model.parameters(), *model.buffers()]
    # A tensor made in inference mode counts no versions and cannot be written to outside of it either.
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


class KernelDecoding:
    """Sequences of one batch, continued by the compiled pass; the interface is `model.generation.decoding.Decoding`."""

    def __init__(
        self, weights: KernelWeights, num_sequences: int, max_tokens: int, *, keeps_routes: bool = False
    ) -> None:
        self._kernel = load_kernel()
        self._weights = weights
        recipe = weights.model.recipe
        check_positions(recipe, max_tokens)
        self.routes_LBTK = empty_routes(recipe, num_sequences, max_tokens, keeps_routes)
        capacity = -(-max_tokens // self._kernel.block_positions()) * self._kernel.block_positions()
        shape = (weights.structure.num_layers, num_sequences, recipe.num_key_value_heads, capacity, recipe.head_dim)
        tables = rotary_tables(torch.arange(capacity), recipe.rotary_dim, weights.model.rope_theta)
        self._kept = [
            torch.empty(shape),
            torch.empty(shape),
            *(table[:, : recipe.rotary_dim // 2].contiguous() for table in tables),
        ]
        keys, values, cosines, sines = (tensor.data_ptr() for tensor in self._kept)
        self._cache = Cache(
            keys=keys, values=values, cosines=cosines, sines=sines, num_sequences=num_sequences, capacity=capacity
        )
        self._scratch = self._kernel.new_scratch()
        self.lengths = [0] * num_sequences
        self._mtp_lengths = [0] * num_sequences

    def __del__(self) -> None:
        if scratch := getattr(self, "_scratch", None):
            self._kernel.free_scratch(scratch)

    def extend(
        self,
        tokens: Sequence[Sequence[int]],
        sampling: Sampling,
        draws: Sequence[Sequence[float]],
        *,
        keeps_hidden: bool,
    ) -> tuple[list[list[Chosen]], list[Tensor]]:
        return self._run(tokens, self.lengths, sampling, draws, None, keeps_hidden)

    def draft(self, next_tokens: Sequence[Sequence[int]], hidden: Sequence[Tensor]) -> list[int | None]:
        read = [[0.0] if each else [] for each in next_tokens]
        chosen, _ = self._run(next_tokens, self._mtp_lengths, Sampling(1), read, torch.cat(list(hidden)), False)
        return [each[0].token_id if each else None for each in chosen]

    def cut(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def _run(
        self,
        tokens: Sequence[Sequence[int]],
        lengths: list[int],
        sampling: Sampling,
        draws: Sequence[Sequence[float]],
        mtp_hidden: Tensor | None,
        keeps_hidden: bool,
    ) -> tuple[list[list[Chosen]], list[Tensor]]:
        """Runs all tokens in passes; of each sequence the successors of its last `len(draws)` tokens are chosen."""
        unread = [len(row) - len(drawn) for row, drawn in zip(tokens, draws, strict=True)]
        token_ids = [token_id for row in tokens for token_id in row]
        sequences = [sequence for sequence, row in enumerate(tokens) for _ in row]
        positions = [
            position
            for length, row in zip(lengths, tokens, strict=True)
            for position in range(length, length + len(row))
        ]
        successors = [
            draw for num_unread, drawn in zip(unread, draws, strict=True) for draw in (*[None] * num_unread, *drawn)
        ]
        chosen: list[list[Chosen]] = [[] for _ in tokens]
        hidden: list[Tensor] = []
        for start in range(0, len(token_ids), TOKENS_PER_PASS):
            part = slice(start, start + TOKENS_PER_PASS)
            inputs = None if mtp_hidden is None else mtp_hidden[part].contiguous()
            if keeps_hidden:
                hidden.append(torch.empty(len(token_ids[part]), self._weights.structure.hidden_size))
            out = hidden[-1] if keeps_hidden else None
            choices = self._pass(
                [token_ids[part], sequences[part], positions[part]], successors[part], sampling, inputs, out
            )
            for sequence, choice in choices:
                chosen[sequence].append(choice)
        for sequence, row in enumerate(tokens):
            lengths[sequence] += len(row)
        return chosen, list(torch.cat(hidden).split([len(row) for row in tokens])) if keeps_hidden else []

    def _pass(
        self,
        tokens: list[list[int]],
        successors: list[float | None],
        sampling: Sampling,
        mtp_hidden: Tensor | None,
        hidden_RD: Tensor | None,
    ) -> Iterable[tuple[int, Chosen]]:
        """Tokens are ids, sequences and positions; a token has a draw where its successor is chosen. `hidden_RD` is
        written."""
        structure = self._weights.structure
        structure.num_threads = torch.get_num_threads()
        tokens_3R = torch.tensor(tokens)
        read = [index for index, draw in enumerate(successors) if draw is not None]
        numbers = torch.empty(3, len(read))
        integers = torch.tensor([read, read], dtype=torch.int64)
        draws = torch.tensor([draw for draw in successors if draw is not None], dtype=torch.float64)
        routes_LRK = None
        if mtp_hidden is None and self.routes_LBTK.numel():
            routes_LRK = free_routes(structure.num_layers, len(successors), structure.experts_per_token).int()
        logits = None
        if sampling.temperature > 0 and read:
            width = self._kernel.panel_width()
            logits = torch.empty(len(read), -(-structure.vocab_size // width) * width)
        call = Call(
            num_tokens=len(successors),
            token_ids=tokens_3R[0].data_ptr(),
            sequences=tokens_3R[1].data_ptr(),
            positions=tokens_3R[2].data_ptr(),
            mtp_hidden=None if mtp_hidden is None else mtp_hidden.data_ptr(),
            hidden=None if hidden_RD is None else hidden_RD.data_ptr(),
            routes=None if routes_LRK is None else routes_LRK.data_ptr(),
            num_read=len(read),
            read=integers[0].data_ptr(),
            temperature=sampling.temperature,
            draws=draws.data_ptr(),
            chosen=integers[1].data_ptr(),
            log_probability=numbers[0].data_ptr(),
            sampled_log_probability=numbers[1].data_ptr(),
            margin=numbers[2].data_ptr(),
            logits=None if logits is None else logits.data_ptr(),
        )
        self._kernel.run_pass(ctypes.byref(structure), ctypes.byref(self._cache), ctypes.byref(call), self._scratch)
        if call.has_failed:
            raise NonFiniteLogitsError
        if routes_LRK is not None:
            recipe = self._weights.model.recipe
            trunk = slice(recipe.first_k_dense_replace, recipe.num_hidden_layers)
            self.routes_LBTK[:, tokens_3R[1], tokens_3R[2]] = routes_LRK[trunk].to(self.routes_LBTK)
        sequences = [tokens[1][index] for index in read]
        if logits is not None and sampling.top_p < 1:
            logits_RV = logits[:, : structure.vocab_size]
            choices = describe_choice(logits_RV, choose_tokens(logits_RV, sampling, draws), sampling)
        else:
            choices = map(Chosen, integers[1].tolist(), *numbers.tolist())
        return zip(sequences, choices, strict=True)
