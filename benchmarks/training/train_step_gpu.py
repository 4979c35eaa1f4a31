"""Training of a ~3B-parameter mixture of experts on one GPU, ours beside transformers': python -m
benchmarks.training.train_step_gpu [--write]

Both get the same architecture (3.2 B parameters, 0.9 B of them active), 4 sequences of 4,096 tokens, bfloat16 weights
and torch's fused AdamW, one after the other so that each peak of memory is its own. Printed: tokens/s, MFU by the
formula of model/architecture/counts.py, peak memory. Ours: flash attention by SDPA, experts by grouped matrix products,
cross-entropy without the full logits, layers compiled. Peer: Glm4MoeForCausalLM with SDPA and grouped products. The MTP
layer and the router's balancing, which transformers does not have, are left out.

`training` is a step as the worker takes it, with what the others leave out: the MTP layer, balancing, float32 masters
below DeepSpeed, Muon, gradients summed over micro-batches, kernels that add in one order (--no-deterministic goes
without).

Without a GPU its whole path is walked at toy size: `--device cpu --size toy --peak-tflops 0.2 --no-compile`.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.results import WRITE_FLAG, report
from configs.load import load_scale
from configs.schema import ModelRecipe
from model.architecture.counts import count_parameters, training_flops_per_token

LARGE = ModelRecipe(
    vocab_size=65_536,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=1024,
    num_hidden_layers=18,
    first_k_dense_replace=1,
    n_routed_experts=24,
    n_shared_experts=1,
    num_experts_per_tok=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    attention_bias=True,
    use_qk_norm=True,
    partial_rotary_factor=0.5,
    rope_theta=10_000.0,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    initializer_range=0.02,
    tie_word_embeddings=False,
    num_nextn_predict_layers=0,
)
TOY = LARGE.model_copy(
    update={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
)
SIZES = {"3b": (LARGE, 4096), "toy": (TOY, 64)}
"""Architecture and sequence length."""
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0}
"""Dense bfloat16, by a part of the device's name (NVIDIA's data sheets, SXM)."""
BUCKET_ELEMENTS = 500_000_000


class Measured(NamedTuple):
    tokens_per_second: float
    peak_gib: float
    """0 on a CPU."""
    loss: float


def our_loss(
    recipe: ModelRecipe, device: torch.device, given: argparse.Namespace
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Raises ValueError where compiled layers have another gradient."""
    from model.architecture.transformer import Glm4Moe
    from tasks.training.parallel.compiled_layers import compile_layers, refuse_wrong_gradients

    with device:
        model = Glm4Moe(recipe).bfloat16()
    if given.compile:
        compile_layers(model)
        refuse_wrong_gradients(model, given.sequences, SIZES[given.size][1])

    def loss(token_ids: Tensor) -> Tensor:
        losses = model(token_ids[:, :-1], target_ids_BT=token_ids[:, 1:]).losses
        assert losses is not None
        return losses.lm

    return model, loss


def their_loss(
    recipe: ModelRecipe, device: torch.device, given: argparse.Namespace
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    fields = {name: value for name, value in recipe.model_dump().items() if name != "num_nextn_predict_layers"}
    with device:
        config = Glm4MoeConfig(**fields, attn_implementation="sdpa")  # pyright: ignore[reportCallIssue]
        model = Glm4MoeForCausalLM(config).bfloat16()
    if given.compile:
        for layer in model.model.layers:
            layer.compile()

    def loss(token_ids: Tensor) -> Tensor:
        return model(
            input_ids=token_ids[:, :-1], labels=token_ids[:, :-1], shift_labels=token_ids[:, 1:].contiguous()
        ).loss

    return model, loss


Build = Callable[..., tuple[nn.Module, Callable[[Tensor], Tensor]]]


def measure(build: Build, recipe: ModelRecipe, length: int, given: argparse.Namespace) -> Measured:
    """The median step after the warm-up ones, in which the layers are compiled."""
    device = torch.device(given.device)
    torch.manual_seed(46)
    model, loss_of = build(recipe, device, given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    token_ids = torch.randint(recipe.vocab_size, (given.sequences, length + 1), device=device)

    def step(number: int) -> float:
        loss = loss_of(token_ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()  # waits for the loss

    return time_steps(step, token_ids.numel() - given.sequences, given)


def measure_training(recipe: ModelRecipe, length: int, given: argparse.Namespace) -> Measured:
    """Of take_step on a single rank; raises ValueError as our_loss does."""
    with tempfile.TemporaryDirectory() as directory:
        own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": given.device}
        own["GLM46_RENDEZVOUS"] = f"{directory}/ranks"
        os.environ.update(own)  # before DeepSpeed is imported
        from tasks.training.loop.rank_process import configure_process

        configure_process(given.device, torch.get_num_threads(), given.deterministic)
        try:
            return time_steps(*training_step(recipe, length, given), given)
        finally:
            dist.destroy_process_group()


def training_step(recipe: ModelRecipe, length: int, given: argparse.Namespace) -> tuple[Callable[[int], float], int]:
    """A step of tiny's first phase with this model in bfloat16 and ZeRO 1, on random tokens; and its tokens."""
    from model.architecture.transformer import Glm4Moe
    from tasks.training.loop.build_model import build_trainable, divide_model, make_weights
    from tasks.training.loop.training_step import take_step
    from tasks.training.parallel.compiled_layers import refuse_wrong_gradients
    from tasks.training.parallel.micro_batch import MicroBatch
    from tasks.training.parallel.ranks import connect_ranks
    from tasks.training.schedule.schedules import plan_step

    scale = load_scale("tiny")
    phase = scale.phases[0].model_copy(
        update={
            "resources": scale.phases[0].resources.model_copy(
                update={
                    "device": given.device,
                    "zero_stage": 1,
                    "micro_batch_sequences": given.sequences,
                    "compile_layers": given.compile,
                    "deterministic": given.deterministic,
                    "bucket_elements": BUCKET_ELEMENTS,
                }
            )
        }
    )
    training = scale.training_recipe(phase).model_copy(
        update={"model": recipe.model_copy(update={"num_nextn_predict_layers": 1}), "dtype": "bfloat16"}
    )
    ranks = connect_ranks(phase.resources)
    with torch.device("meta"):
        model = Glm4Moe(training.model)
    divide_model(model, ranks, phase.resources)
    make_weights(model, training.dtype, phase.resources, ranks)
    model.init_weights()
    trainable = build_trainable(model, training.optimizer, training.dtype, phase.resources, ranks)
    if given.compile:
        refuse_wrong_gradients(model, given.sequences, length)
    token_ids = torch.randint(
        recipe.vocab_size, (given.micro_batches, given.sequences, length + 1), device=given.device
    )
    micro_batches = [
        MicroBatch(
            rows[:, :-1].contiguous(),
            rows[:, 1:].contiguous(),
            torch.zeros_like(rows[:, 1:]),
            is_segmented=False,
            max_documents=given.sequences,
        )
        for rows in token_ids
    ]
    plan = plan_step(training, 0)
    return (
        lambda number: take_step(trainable, training, plan, micro_batches, number).losses.lm,
        given.micro_batches * given.sequences * length,
    )


def time_steps(step: Callable[[int], float], num_tokens: int, given: argparse.Namespace) -> Measured:
    """The median of the steps after the warm-up ones; a step returns its loss, from 1 on they are numbered."""
    seconds, loss = [], float("nan")
    for number in range(1, given.warmup + given.steps + 1):
        started = time.perf_counter()
        loss = step(number)
        if given.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else 0.0
    return Measured(num_tokens / statistics.median(seconds[given.warmup :]), peak, loss)


def peak_flops(given: argparse.Namespace) -> float:
    """Of the device. Raises ValueError where it is not known and not given."""
    if given.peak_tflops is not None:
        return given.peak_tflops * 1e12
    name = torch.cuda.get_device_name() if given.device == "cuda" else given.device
    known = [tflops for part, tflops in PEAK_TFLOPS.items() if part in name]
    if not known:
        raise ValueError(
            f"peak of {name} unknown (known: {', '.join(PEAK_TFLOPS)}): give --peak-tflops, dense bfloat16"
        )
    return known[0] * 1e12


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), default="3b")
    parser.add_argument("--sequences", type=int, default=4, help="per pass")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step of training")
    parser.add_argument("--warmup", type=int, default=4, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--peak-tflops", type=float, default=None, help="of the device, dense bfloat16, where its name is not known"
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the layers of both models"
    )
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let training's kernels add in one order",
    )
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the result in benchmarks/results/")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both and print the result."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "no CUDA device here: run it on a machine with one, or see the path at toy size by --device cpu --size toy"
        )
    recipe, length = SIZES[given.size]
    try:
        peak = peak_flops(given)
    except ValueError as error:
        parser.error(str(error))
    with_mtp = recipe.model_copy(update={"num_nextn_predict_layers": 1})
    measured: dict[str, Measured] = {}
    mfu: dict[str, float] = {}
    for name, run, of_what in (
        ("ours", partial(measure, our_loss), recipe),
        ("transformers", partial(measure, their_loss), recipe),
        ("training", measure_training, with_mtp),
    ):
        if given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        measured[name] = run(recipe, length, given)
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
        speed, gib, loss = measured[name]
        mfu[name] = round(speed * training_flops_per_token(of_what, length) / peak, 4)
        print(
            f"{name}: {speed:,.0f} tokens/s, MFU {mfu[name]:.1%}, peak {gib:.1f} GiB, last loss {loss:.3f}", flush=True
        )
    ours, peer, training = measured["ours"], measured["transformers"], measured["training"]
    report(
        "train_step_gpu",
        ours=ours.tokens_per_second,
        peer=peer.tokens_per_second,
        unit="tokens/s",
        mfu=mfu["ours"],
        peer_mfu=mfu["transformers"],
        training_tokens_per_second=round(training.tokens_per_second, 1),
        training_mfu=mfu["training"],
        peak_gib=round(ours.peak_gib, 2),
        peer_peak_gib=round(peer.peak_gib, 2),
        training_peak_gib=round(training.peak_gib, 2),
        num_parameters=count_parameters(recipe).total,
        sequence_length=length,
        num_sequences=given.sequences,
        num_micro_batches=given.micro_batches,
        device=torch.cuda.get_device_name() if given.device == "cuda" else given.device,
        size=given.size,
        is_compiled=given.compile,
        is_deterministic=given.deterministic,
    )


if __name__ == "__main__":
    main()
