"""Names of the stages at which a run may begin and end, and the ones that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.schema import PhaseSection, Scale
from infra.storage.store import hash_file
from tasks.data.tokenizer.import_tokenizer import read_given_tokenizer
from tasks.training.plan.launch_rules import refuse_impossible_training

PREPARE_DATA = "prepare_data"
RELEASE_MODEL = "release_model"


@dataclass(frozen=True)
class StageWindow:
    """The stages of one run."""

    phases: tuple[PhaseSection, ...]
    releases: bool
    reads_documents: bool
    """Whether documents are prepared. They are not where the tokenizer is given and the phases read conversations."""

    @property
    def pre_training(self) -> tuple[PhaseSection, ...]:
        return tuple(phase for phase in self.phases if phase.kind == "pretraining")

    @property
    def mid_training(self) -> tuple[PhaseSection, ...]:
        return tuple(phase for phase in self.phases if phase.kind == "mid_training")

    @property
    def post_training(self) -> tuple[PhaseSection, ...]:
        return tuple(phase for phase in self.phases if phase.kind == "post_training")


def choose_stages(scale: Scale, from_stage: str | None, start: str | None, until: str | None) -> StageWindow:
    """The stages between `from_stage` and `until`, both included. Raises ValueError for an unknown name, an entry
    without weights, or a phase between them that cannot be trained.

    Data is always prepared, or taken from the store: training and evaluation read it.
    """
    names = [PREPARE_DATA, *(phase.name for phase in scale.phases), RELEASE_MODEL]
    for option, name in (("--from", from_stage), ("--until", until)):
        if name is not None and name not in names:
            raise ValueError(f"{option} {name}: the stages of scale {scale.scale} are {', '.join(names)}")
    if (start is None) != (from_stage in (None, PREPARE_DATA)):
        raise ValueError(
            "--from STAGE and --start CHECKPOINT|HF_DIR|hf://OWNER/NAME|ALIAS go together: the one says where to "
            "begin, the other with which weights"
        )
    first = names.index(from_stage or PREPARE_DATA)
    last = names.index(until or RELEASE_MODEL)
    if first > last:
        raise ValueError(f"--from {from_stage} comes after --until {until}: the order is {', '.join(names)}")
    chosen = names[first : last + 1]
    kind = scale.data.recipe.tokenizer.kind
    if RELEASE_MODEL in chosen and kind not in ("bpe", "given"):
        raise ValueError(
            f"tokenizer.kind {kind}: the release converts to GGUF, which here holds only byte-level BPE; set it to "
            f"bpe, or leave before "
            f"the release with --until {names[-2]}"
        )
    phases = tuple(phase for phase in scale.phases if phase.name in chosen)
    for phase in phases:
        refuse_impossible_training(scale.training_recipe(phase), phase.resources)
    packed = [each for phase in phases for each in (*scale.packed_before(phase), phase)]
    reads_documents = kind != "given" or not phases or any(phase.recipe.reads_documents for phase in packed)
    return StageWindow(phases, RELEASE_MODEL in chosen, reads_documents)


def with_tokenizer_of_start(scale: Scale, start: str | None) -> Scale:
    """The scale with the tokenizer.json of the directory that `--start` names, where it is given without a path."""
    tokenizer = scale.data.recipe.tokenizer
    if tokenizer.kind != "given" or tokenizer.path or start is None or not (Path(start) / "tokenizer.json").is_file():
        return scale
    path = (Path(start) / "tokenizer.json").absolute()
    given = tokenizer.model_copy(update={"path": str(path), "sha256": hash_file(path)})
    recipe = scale.data.recipe.model_copy(update={"tokenizer": given})
    return scale.model_copy(update={"data": scale.data.model_copy(update={"recipe": recipe})})


def refuse_missing_inputs(scale: Scale, window: StageWindow, data: str | None) -> None:
    """Raises ValueError for a given tokenizer that cannot be used, and where only conversations are read: for such
    that nobody named, and for a phase that would choose weights by documents."""
    if scale.data.recipe.tokenizer.kind == "given":
        read_given_tokenizer(scale.data.recipe.tokenizer)
    if window.reads_documents:
        return
    for phase in window.phases:
        if phase.recipe.validation.keep == "best":
            raise ValueError(
                f"phase {phase.name}: validation.keep best chooses weights by held-out documents, and the phases of "
                "this run read only conversations: set it to last"
            )
    if data is None:
        raise ValueError(
            "the phases of this run read only conversations: name them with --data FILE, a directory, "
            "s3://bucket/prefix or hf://owner/name"
        )
