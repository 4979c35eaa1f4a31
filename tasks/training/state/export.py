"""Exports the end of a phase: final/ with the weights as a Hugging Face directory and the hand-over state.

Both come from the last checkpoint and have whole tensors, whatever the topology. The ranks divide the files among
them, and each reads what its files hold. An adapter's phase exports the weights with the adapter merged in, the adapter
itself in PEFT's format (adapter/), and a hand-over state without masters: the next phase reads hf/. Weights that qlora
held in 4 bits are exported as they computed: rounded, then merged. A merge that computes anything else than the adapter
ends the phase (merge_check.py); how exact it was is in adapter/merge.json.

A hand-over's files: master-NNNNN.safetensors (float32 weights and router biases), momentum-NNNNN (Muon),
first_moment-NNNNN and second_moment-NNNNN (AdamW), state.json; those of a critic begin with `critic-`. Of an adapter
state.json, and unreached.json where no gradient reached one of its tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from configs.schema import AdapterRecipe, ModelRecipe
from model.architecture.adapters import add_adapters, scaling_of
from model.architecture.four_bit_layers import four_bit_matrices
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_names, checkpoint_shapes
from model.formats.hf_checkpoint import ALONE, VOCABULARY_KEY, Writer, config_dict, plan_shards, write_checkpoint
from model.text.tokenizer_layout import tokenizer_for_text, vocabulary_sha256
from tasks.training.parallel.control import gathered, on_first_rank
from tasks.training.state.adapter_export import MergedTensors, write_adapter
from tasks.training.state.checkpoints import find_checkpoint, read_index
from tasks.training.state.job import MERGE_FILE, MERGE_KEY, TrainingJob
from tasks.training.state.merge_check import MAX_MERGE_ERROR, merge_error
from tasks.training.state.saved_state import STATE_FILE, SavedState
from tasks.training.state.tensor_sources import FourBitWeights, TensorSource, open_weights
from tasks.training.state.unreached_tensors import FIRST_MOMENTS, UNREACHED, UNREACHED_FILE

MAX_SHARD_BYTES = 4 << 30
MAX_HANDOVER_BYTES = 1 << 30


def export_checkpoint(job: TrainingJob) -> None:
    """Write work_dir/final/ (hf/ in the phase's dtype, handover/) by one rename; all ranks call it. Raises OSError, on
    all of them, where the last checkpoint does not read as it was written."""
    work_dir = Path(job.work_dir)
    temporary = work_dir / ".final"

    def started() -> Path:
        checkpoint_dir, problems = find_checkpoint(work_dir)
        assert checkpoint_dir is not None and not problems, problems
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "handover").mkdir(parents=True)
        return checkpoint_dir

    checkpoint_dir = on_first_rank(started)
    saved = SavedState(checkpoint_dir, on_first_rank(lambda: read_index(checkpoint_dir)))
    writer = Writer(dist.get_rank(), dist.get_world_size())
    export_weights(job, saved, temporary / "hf", temporary / "adapter", writer)
    write_handover(saved, temporary / "handover", job.recipe.adapter.kind == "none", writer)
    for damage in gathered(saved.damage):
        if damage:
            raise OSError(f"checkpoint {checkpoint_dir} cannot be exported ({damage}): run again")
    if job.recipe.adapter.kind != "none":
        on_first_rank(lambda: check_merge(job, saved, temporary / "adapter"))

    def finished() -> None:
        shutil.rmtree(work_dir / "final", ignore_errors=True)
        temporary.rename(work_dir / "final")

    on_first_rank(finished)


def write_handover(saved: SavedState, handover_dir: Path, has_tensors: bool, writer: Writer) -> None:
    """Whole tensors by kind, one file in memory at a time; without them the names of those that no gradient reached.
    Equal state, equal bytes."""
    for kind in saved.kinds() if has_tensors else ():
        source = saved.of_kind(kind)
        for number, names in enumerate(plan_shards(source.shapes(), torch.float32, MAX_HANDOVER_BYTES), start=1):
            if writer.writes(number):
                shard = {name: source.tensor(name) for name in names}
                save_file(shard, handover_dir / f"{kind}-{number:05d}.safetensors", _described(shard, kind))
    if writer.is_first and not has_tensors:
        moments = [(name, saved.of_kind(kind)) for kind in FIRST_MOMENTS for name in saved.of_kind(kind).names()]
        unreached = sorted(name for name, own in moments if not own.tensor(name).any())
        if unreached:
            (handover_dir / UNREACHED_FILE).write_text(json.dumps(unreached, indent=1) + "\n")
    if writer.is_first:
        (handover_dir / STATE_FILE).write_bytes(saved.position_bytes())


def _described(shard: dict[str, Tensor], kind: str) -> dict[str, str] | None:
    """Metadata of a file: of the first moments those tensors that are zero throughout, which no gradient reached."""
    if kind not in FIRST_MOMENTS:
        return None
    unreached = sorted(name for name, tensor in shard.items() if not tensor.any())
    return {UNREACHED: json.dumps(unreached)} if unreached else None


def export_weights(
    job: TrainingJob, saved: SavedState, hf_dir: Path, adapter_dir: Path, writer: Writer = ALONE
) -> None:
    """Write a checkpoint's weights as a Hugging Face directory, in the phase's dtype, and its adapter if it has one."""
    recipe, dtype = job.recipe, getattr(torch, job.recipe.dtype)
    model = recipe.model.model_copy(update={"rope_theta": recipe.rope_theta})
    config = config_dict(
        model, dtype=dtype, eos_token_ids=job.eos_token_ids, pad_token_id=job.pad_token_id, is_scored=recipe.is_scored
    )
    config[VOCABULARY_KEY] = vocabulary_sha256(tokenizer_for_text(job.tokenizer_path))
    with torch.device("meta"):
        shapes = dict(sorted(checkpoint_shapes(Glm4Moe(recipe.model, is_scored=recipe.is_scored)).items()))
    trained = saved.of_kind("master")
    read: Callable[[str], Tensor] = trained.tensor
    if recipe.adapter.kind != "none":
        read = merged_tensors(job, saved, shapes).tensor
        if writer.is_first:
            write_adapter(trained, recipe.adapter, job.start_weights_sha256, adapter_dir)
    write_checkpoint(read, shapes, config, hf_dir, dtype=dtype, max_shard_bytes=MAX_SHARD_BYTES, writer=writer)


def merged_tensors(job: TrainingJob, saved: SavedState, shapes: dict[str, torch.Size]) -> MergedTensors:
    """The weights that an adapter's phase computed with, and its adapter."""
    recipe = job.recipe
    weights: TensorSource = open_weights(Path(job.start_dir), Path(job.start_weights_dir), recipe.model)
    if recipe.adapter.kind == "qlora":
        weights = FourBitWeights(weights, names_in_four_bits(recipe.model, recipe.adapter))
    return MergedTensors(weights, shapes, saved.of_kind("master"), scaling_of(recipe.adapter))


def check_merge(job: TrainingJob, saved: SavedState, adapter_dir: Path) -> None:
    """Write adapter_dir/merge.json: how far the merged weights' logits are from those with the adapter beside them,
    both before the merged ones are rounded to the phase's dtype. Raises ValueError where that is more than rounding."""
    recipe = job.recipe
    with torch.device("meta"):
        merged = merged_tensors(job, saved, checkpoint_shapes(Glm4Moe(recipe.model)))
    error = merge_error(recipe.model, recipe.adapter, merged.beside, merged.tensor)
    if not error <= MAX_MERGE_ERROR:
        raise ValueError(
            f"phase {recipe.phase}: with the adapter merged in, a logit differs by {error:.2g} of the largest one, at "
            f"most {MAX_MERGE_ERROR:g} is rounding: hf/ would be another model than the one that was trained. This is "
            f"an error in glm46, not in your settings: report it with the adapter section ({recipe.adapter.kind})"
        )
    (adapter_dir / MERGE_FILE).write_text(json.dumps({MERGE_KEY: error}) + "\n")


def names_in_four_bits(model: ModelRecipe, adapter: AdapterRecipe) -> set[str]:
    """The tensors of a checkpoint that a phase of qlora holds in 4 bits."""
    with torch.device("meta"):
        adapted = Glm4Moe(model)
        add_adapters(adapted, adapter)
    held = four_bit_matrices(adapted)
    return {each for name, matrices in held.items() for each in checkpoint_names(name, matrices.shape[0])}
