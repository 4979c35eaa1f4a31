"""Converts a checkpoint, for `glm46 convert`: Hugging Face, hand-over and Megatron-Core both ways, GGUF one way.

Tensors are read, checked, and written one by one, and then read back and compared with the source: the card beside the
export says what was found. The export appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from configs.files.atomic_files import write_durably
from configs.schema import Frozen, GgufType
from infra.storage.store import hash_file
from model.architecture.counts import count_parameters
from model.formats.gguf_checkpoint import write_gguf
from model.formats.hf_checkpoint import CONFIG_FILE, mtp_copies, plan_shards, stored_dtype, write_checkpoint
from model.formats.megatron_checkpoint import LATEST_FILE, write_megatron
from model.formats.safetensors_writer import tensor_bytes, write_safetensors
from model.formats.weight_files import INDEX_FILE
from tasks.release.checkpoint_source import HANDOVER, HF, TOKENIZER_FILE, CheckpointSource, open_source
from tasks.release.gguf_comparison import ConvertedTensors, compare_gguf, compare_served
from tasks.training.import_checkpoint import checkpoint_files, imported_position
from tasks.training.state.adapter_export import MergedTensors
from tasks.training.state.trained_checkpoint import WEIGHTS_SUFFIX
from tasks.training.state.written_adapter import open_adapter

TargetFormat = Literal["hf", "native", "megatron", "gguf"]
MtpLayout = Literal["4.6", "4.5"]
MAX_SHARD_BYTES = 4 << 30
MAX_COMPARED_PARAMETERS = 1_000_000_000
"""Parameters up to which both models are loaded, in float32, to compare their logits."""
NUM_COMPARED_TOKENS = 32
OURS, TRANSFORMERS, LLAMA_CPP = "glm46", "transformers", "llama.cpp"
CARD_SUFFIX = ".conversion.json"


class ConversionCard(Frozen):
    """What FILE.conversion.json says about an export."""

    source: str
    adapter: str
    """Directory of the adapter that was merged in, or empty."""
    source_format: str
    target_format: str
    variant: str
    """Layout of the MTP layer, GGUF type, or empty."""
    num_source_tensors: int
    num_equal: int
    """Tensors whose numbers were all found again in the export, read back."""
    num_rounded: int
    """Tensors of which the export holds other numbers, since its dtype has fewer bits than the source on disk."""
    largest_rounding: float
    """The largest difference of a number, over its tensor's largest magnitude; 0 where nothing was rounded."""
    tensors_sha256: str
    """Of names, dtypes, shapes and bytes of the source's tensors in the dtype of its config.json, to which masters are
    rounded; equal for equal weights in hf, native and megatron."""
    files: dict[str, str]
    """Sha256 of each file of the export, by its path."""
    largest_logit_differences: dict[str, float]
    """By engine that computed the export, against the source's numbers on disk, computed by our own code in
    float32; empty where that was not done."""
    not_compared: str
    """Why not; else empty."""

    def describe(self, target: Path) -> str:
        """Two lines for a terminal."""
        by_engine = [f"{value:.2e} by {engine}" for engine, value in self.largest_logit_differences.items()]
        logits = ", ".join(by_engine) or self.not_compared
        return (
            f"{target}: {self.num_source_tensors:,} tensors of {self.source_format}, {self.num_equal:,} equal, "
            f"{self.num_rounded:,} rounded (by at most {self.largest_rounding:.1e} of the largest number)\n"
            f"largest logit difference: {logits}; card: {card_path(target)}"
        )


def convert_checkpoint(
    source: CheckpointSource,
    target: Path,
    to: TargetFormat,
    *,
    mtp_layout: MtpLayout = "4.6",
    gguf_type: GgufType = "BF16",
) -> ConversionCard:
    """Raises ValueError for what the format cannot hold and for numbers that are not finite, OSError for a full disk;
    then neither `target` nor its card exists."""
    refuse_target(target, to)
    refuse_unsuitable(source, to, mtp_layout)
    with _appearing(card_path(target)) as temporary_card, _appearing(target) as temporary:
        hashed = HashedTensors(source, keeps_masters=to == "native")
        if to == "gguf":
            _write_gguf(source, hashed, temporary, gguf_type)
            found = compare_gguf(temporary, source)
        else:
            _write(source, hashed, temporary, to, mtp_layout)
            found = _compare(temporary, hashed)
        differences, reason = _logit_differences(source, temporary, to)
        variant = {"hf": mtp_layout if source.recipe.num_nextn_predict_layers else "", "gguf": gguf_type}.get(to, "")
        card = ConversionCard(
            source=str(source.path),
            adapter=source.adapter,
            source_format=source.format,
            target_format=to,
            variant=variant,
            num_source_tensors=len(source.shapes),
            num_equal=found.num_equal,
            num_rounded=found.num_rounded,
            largest_rounding=found.largest_rounding,
            tensors_sha256=hashed.digest(),
            files=_files_of(temporary, target.name),
            largest_logit_differences=differences,
            not_compared=reason,
        )
        write_durably(temporary_card, (card.model_dump_json(indent=1) + "\n").encode())
    return card


def merge_adapter(source: CheckpointSource, adapter_dir: Path) -> CheckpointSource:
    """The model with an adapter merged in. Raises ValueError where the adapter was trained on other weights."""
    if source.format != HF:
        raise ValueError(f"{source.path} is of format {source.format}: an adapter is merged into a Hugging Face model")
    adapter = open_adapter(adapter_dir, source.config_dir)
    tensors = MergedTensors(source.tensors, source.shapes, adapter, adapter.scaling)
    return replace(source, tensors=tensors, adapter=str(adapter_dir))


def card_path(target: Path) -> Path:
    """The card of an export, beside it."""
    return target.with_name(target.name + CARD_SUFFIX)


def refuse_target(target: Path, to: TargetFormat) -> None:
    """Raises ValueError for a place that is taken or does not exist."""
    for path in (target, card_path(target)):
        if path.exists():
            raise ValueError(f"{path} exists: name a new {'file' if to == 'gguf' else 'directory'}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"the directory of {target} does not exist: make it first")
    if (to == "gguf") != (target.suffix == ".gguf"):
        raise ValueError(f"{target} and --to {to}: a file that ends in .gguf is of format gguf, and no other")


def refuse_unsuitable(source: CheckpointSource, to: TargetFormat, mtp_layout: MtpLayout) -> None:
    """Raises ValueError for what a format cannot hold."""
    if source.is_scored and to in ("gguf", "megatron"):
        raise ValueError(f"{source.path} is a reward model: convert it to hf or native")
    if mtp_layout == "4.5" and (to != "hf" or not source.recipe.num_nextn_predict_layers):
        raise ValueError("--mtp-layout 4.5 is one of hf, for a model with an MTP layer: leave it out")
    if to == source.format != "hf":
        raise ValueError(f"{source.path} is of format {to} already: copy it")
    if to == "gguf" and source.format != "hf":
        raise ValueError(f"{source.path} is of format {source.format}: convert it to hf first, then that to gguf")
    if to == "gguf" and not (source.config_dir / TOKENIZER_FILE).is_file():
        raise ValueError(f"{source.config_dir / TOKENIZER_FILE} does not exist: a GGUF file holds its tokenizer")


class HashedTensors:
    """Reads the source's tensors as the export holds them, and keeps of each a digest and what rounding took."""

    def __init__(self, source: CheckpointSource, keeps_masters: bool) -> None:
        """`keeps_masters`: the export holds float32, and not the dtype of config.json."""
        self.source, self.keeps_masters = source, keeps_masters
        self.digests: dict[str, str] = {}
        """In the dtype of config.json."""
        self.exported: dict[str, str] = {}
        """In the dtype of the export."""
        self.roundings: dict[str, float] = {}
        """Of the tensors that the export rounds: the largest difference over the largest magnitude."""

    def read(self, name: str) -> Tensor:
        stored = self.source.stored(name)
        rounded = stored.to(stored_dtype(name, self.source.dtype))
        exported = stored.float() if self.keeps_masters else rounded
        if name not in self.digests:
            self.digests[name], self.exported[name] = digest_of_tensor(rounded), digest_of_tensor(exported)
            if difference := float((exported.double() - stored.double()).abs().max()):
                self.roundings[name] = difference / float(stored.abs().max())
        return exported

    def digest(self) -> str:
        """Of all tensors; those that the export did not need are read for it."""
        for name in self.source.shapes:
            if name not in self.digests:
                self.read(name)
        lines = "".join(f"{name} {self.digests[name]}\n" for name in sorted(self.digests))
        return hashlib.sha256(lines.encode()).hexdigest()


def digest_of_tensor(tensor: Tensor) -> str:
    """Sha256 of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _write(
    source: CheckpointSource, hashed: HashedTensors, target: Path, to: TargetFormat, mtp_layout: MtpLayout
) -> None:
    target.mkdir()
    if to == "hf":
        _write_hf(source, hashed, target, mtp_layout)
        _copy_texts(source, target)
    elif to == "native":
        (target / HANDOVER).mkdir()
        shards = plan_shards(source.shapes, torch.float32, MAX_SHARD_BYTES)
        for number, names in enumerate(shards, 1):
            layout = {name: (source.shapes[name], torch.float32) for name in names}
            write_safetensors(target / HANDOVER / f"master-{number:05d}{WEIGHTS_SUFFIX}", layout, hashed.read)
        (target / HANDOVER / "state.json").write_text(imported_position())
        (target / HF).mkdir()
        _write_config(source, target / HF)
        _copy_texts(source, target / HF)
    else:
        write_megatron(target, source.recipe, source.shapes, lambda name: stored_dtype(name, source.dtype), hashed.read)
        _write_config(source, target)
        _copy_texts(source, target)


def _write_hf(source: CheckpointSource, hashed: HashedTensors, target: Path, mtp_layout: MtpLayout) -> None:
    copies = mtp_copies(source.recipe) if mtp_layout == "4.5" else {}
    shapes = source.shapes | {name: source.shapes[trunk] for name, trunk in copies.items()}
    write_checkpoint(
        lambda name: hashed.read(copies.get(name, name)),
        dict(sorted(shapes.items())),
        _config(source),
        target,
        dtype=source.dtype,
        max_shard_bytes=MAX_SHARD_BYTES,
    )


def _config(source: CheckpointSource) -> Mapping[str, object]:
    known = {key: value for key, value in source.config.items() if key != "torch_dtype"}
    return dict(sorted((known | {"dtype": str(source.dtype).removeprefix("torch.")}).items()))


def _write_config(source: CheckpointSource, directory: Path) -> None:
    (directory / CONFIG_FILE).write_text(json.dumps(_config(source), indent=2) + "\n")


def _copy_texts(source: CheckpointSource, directory: Path) -> None:
    """Tokenizer, chat template and what else is text beside the weights."""
    for path in checkpoint_files(source.config_dir):
        if path.suffix != WEIGHTS_SUFFIX and path.name not in (CONFIG_FILE, INDEX_FILE, LATEST_FILE, "metadata.json"):
            shutil.copyfile(path, directory / path.name)


def _write_gguf(source: CheckpointSource, hashed: HashedTensors, target: Path, gguf_type: GgufType) -> None:
    from tasks.release.convert_to_gguf import MODEL_NAME

    hashed.digest()  # refuses numbers that are not finite before anything is written
    write_gguf(source.config_dir, source.config_dir / TOKENIZER_FILE, target, gguf_type=gguf_type, name=MODEL_NAME)


def _compare(target: Path, hashed: HashedTensors) -> ConvertedTensors:
    """Read the export back. Raises RuntimeError where a tensor is not the one that was written, bit for bit."""
    written = open_source(target)
    for name in written.shapes:
        if digest_of_tensor(written.stored(name)) != hashed.exported[name]:
            raise RuntimeError(f"{target}: tensor {name} differs from the source's: check the disk, convert again")
    num_rounded = len(hashed.roundings)
    return ConvertedTensors(
        num_equal=len(written.shapes) - num_rounded,
        num_rounded=num_rounded,
        largest_rounding=max(hashed.roundings.values(), default=0.0),
    )


def _logit_differences(source: CheckpointSource, target: Path, target_format: str) -> tuple[dict[str, float], str]:
    """By engine, the largest difference between its logits of the export and ours of the source, over one text of
    random tokens: our own code of every directory, transformers of hf; of a GGUF file llama.cpp's log-probabilities
    of the same tokens. Or why there is none."""
    num_parameters = count_parameters(source.recipe).total
    if source.is_scored or num_parameters > MAX_COMPARED_PARAMETERS:
        why = "a reward model has none" if source.is_scored else f"{num_parameters:,} parameters in float32, twice"
        return {}, why
    generator = torch.Generator().manual_seed(0)
    num_tokens = min(NUM_COMPARED_TOKENS, source.recipe.max_position_embeddings)
    token_ids_BT = torch.randint(0, source.recipe.vocab_size, (1, num_tokens), generator=generator)
    with torch.inference_mode():
        wanted_BTV = source.load()(token_ids_BT).logits_BTV
        if target_format == "gguf":
            return {LLAMA_CPP: compare_served(target, source, token_ids_BT[0], wanted_BTV[0])}, ""
        found = {OURS: open_source(target).load()(token_ids_BT).logits_BTV}
        if target_format == "hf":
            found[TRANSFORMERS] = _of_transformers(target, token_ids_BT)
    return {engine: float((logits_BTV - wanted_BTV).abs().max()) for engine, logits_BTV in found.items()}, ""


def _of_transformers(target: Path, token_ids_BT: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    with ExitStack() as stack:
        stack.callback(logging.set_verbosity, verbosity)
        stack.callback(logging.enable_progress_bar)
        logging.set_verbosity_error()  # it lists the tensors of the MTP layer, which it does not know
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return model(input_ids=token_ids_BT).logits


def _files_of(path: Path, name: str) -> dict[str, str]:
    if path.is_file():
        return {name: hash_file(path)}
    return {str(each.relative_to(path)): hash_file(each) for each in sorted(path.rglob("*")) if each.is_file()}


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A name beside `target` for a file or directory, which gets its name when the block ends."""
    temporary = target.with_name(f".{target.name}.partial")
    _remove(temporary)
    try:
        yield temporary
        temporary.rename(target)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
