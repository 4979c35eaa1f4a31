"""Names of the stages at which a run may begin and end, and the ones that it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from configs.schema import CALIBRATED_FORMATS, CALIBRATED_GGUF_TYPES, JobResources, PhaseSection, Scale
from infra.machine.doctor import check_compiler, check_java, check_launchers, check_spark_master, require
from infra.storage.store import hash_file
from tasks.data.tokenizer.import_tokenizer import read_given_tokenizer
from tasks.training.import_checkpoint import refuse_foreign_checkpoint
from tasks.training.plan.launch_rules import incomplete_queue, refuse_impossible_training

PREPARE_DATA = "prepare_data"
RELEASE_MODEL = "release_model"


@dataclass(frozen=True)
class StageWindow:
    """The stages of one run."""

    phases: tuple[PhaseSection, ...]
    releases: bool
    reads_documents: bool
    """Whether documents are prepared. They are not where the tokenizer is given and the phases read conversations."""
    reads_pairs: bool
    """Whether preference pairs are prepared: a phase reads them, or no phase runs and one of the scale does."""

    @property
    def pre_training(self) -> tuple[PhaseSection, ...]:
        return tuple(phase for phase in self.phases if phase.kind == "pretraining")

    @property
    def mid_training(self) -> tuple[PhaseSection, ...]:
        return tuple(phase for phase in self.phases if phase.kind == "mid_training")

    @property
    def post_training(self) -> tuple[PhaseSection, ...]:
        return tuple(phase for phase in self.phases if phase.kind == "post_training")


def launchers_of(scale: Scale, phases: Iterable[PhaseSection], *, releases: bool) -> set[str]:
    """What starts the jobs of these phases, of their evaluation, and of a release."""
    launchers = {phase.resources.launcher for phase in phases}
    if launchers or releases:
        launchers.add(scale.evaluation.resources.launcher)
    return launchers | ({scale.release.resources.launcher} if releases else set())


def require_programs(scale: Scale, window: StageWindow) -> None:
    """Raises ValueError where this machine lacks Java, a compiler, the Spark master or a launcher's commands."""
    launchers = launchers_of(scale, window.phases, releases=window.releases)
    master = scale.data.resources.master
    require(check_java(), check_compiler(), check_spark_master(master), *check_launchers(launchers))


def choose_stages(scale: Scale, from_stage: str | None, start: str | None, until: str | None) -> StageWindow:
    """The stages between `from_stage` and `until`, both included; with weights and a given tokenizer from the first
    phase, unless another is named. Raises ValueError for an unknown name, an entry without weights, or a phase between
    them that cannot be trained.

    Data is always prepared, or taken from the store: training and evaluation read it.
    """
    names = [PREPARE_DATA, *(phase.name for phase in scale.phases), RELEASE_MODEL]
    for option, name in (("--from", from_stage), ("--until", until)):
        if name is not None and name not in names:
            raise ValueError(f"{option} {name}: the stages of scale {scale.scale} are {', '.join(names)}")
    if start is not None and from_stage is None and scale.data.recipe.tokenizer.kind == "given":
        from_stage = scale.phases[0].name  # the scale is made for weights that others trained
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
    if RELEASE_MODEL in chosen:
        _refuse_unreleasable(scale, names[-2])
    phases = tuple(phase for phase in scale.phases if phase.name in chosen)
    _refuse_missing_starts(scale, phases)
    if start is None and phases and phases[0].recipe.asks_start:
        raise ValueError(
            f"phase {phases[0].name} asks the weights that it starts from, and there are none: put a "
            f"phase before it, or run with --from {phases[0].name} --start WEIGHTS"
        )
    if RELEASE_MODEL in chosen and (scale.released_phase is None or (phases and scale.released_phase not in phases)):
        raise ValueError(
            f"the stages {', '.join(chosen)} leave nothing to release, for a reward model does not answer: end with "
            f"--until {scale.phases[-1].name}"
        )
    for phase in phases:
        _refuse_foreign_own_model(phase)
        refuse_impossible_training(scale.training_recipe(phase), phase.resources)
        _refuse_missing_gpus(f"phase {phase.name}", phase.resources, phase.resources.num_ranks)
    if chosen != [PREPARE_DATA]:
        _refuse_impossible_job("evaluation", scale.evaluation.resources)
    if RELEASE_MODEL in chosen:
        _refuse_impossible_job("release", scale.release.resources)
    packed = [each for phase in phases for each in (*scale.packed_before(phase), phase)]
    is_given = scale.data.recipe.tokenizer.kind == "given"
    reads_documents = not is_given or not phases or any(phase.recipe.reads_documents for phase in packed)
    reads_pairs = any(phase.recipe.reads_pairs for phase in phases or scale.phases)
    return StageWindow(phases, RELEASE_MODEL in chosen, reads_documents, reads_pairs)


def _refuse_unreleasable(scale: Scale, last_phase: str) -> None:
    """Raises ValueError for a tokenizer or a format that the release of a scale could not write."""
    kind = scale.data.recipe.tokenizer.kind
    if kind not in ("bpe", "given"):
        raise ValueError(
            f"tokenizer.kind {kind}: the release converts to GGUF, which here holds only byte-level BPE; set it to "
            f"bpe, or leave before the release with --until {last_phase}"
        )
    formats = (*scale.release.recipe.quantized_formats, *scale.release.recipe.gguf_types)
    calibrated = [name for name in formats if name in (*CALIBRATED_FORMATS, *CALIBRATED_GGUF_TYPES)]
    if calibrated and scale.calibration_phase is None:
        raise ValueError(
            f"release.recipe asks for {' and '.join(calibrated)}, which look at rows of a phase, and no phase of scale "
            f"{scale.scale} reads any: leave them out, or leave before the release with --until {last_phase}"
        )


def _refuse_missing_starts(scale: Scale, phases: tuple[PhaseSection, ...]) -> None:
    """Raises ValueError for a phase that starts from one before the window, unless the weights of --start stand for
    it, and for one whose answers a reward model from before the window scores."""
    given = next((scale.start_of(phase) for phase in phases if phase.recipe.own_model is None), None)
    names = [phase.name for phase in phases]
    for phase in phases:
        model = phase.recipe.reward_model
        if model is not None and model not in names:
            raise ValueError(
                f"--from {names[0]}: phase {phase.name} has its answers scored by {model}, which comes before: begin "
                f"with --from {model}, or end before {phase.name} with --until"
            )
        if (reference := phase.recipe.reference) is not None and reference not in names:
            raise ValueError(
                f"--from {names[0]}: phase {phase.name} is held to {reference}, which comes before: begin with --from "
                f"{reference}, or set its objective.reference to null"
            )
        missing = [expert.phase for expert in phase.recipe.experts if expert.phase not in names]
        if missing:
            raise ValueError(
                f"--from {names[0]}: phase {phase.name} learns from the expert {missing[0]}, which comes before: begin "
                f"with --from {missing[0]}, or end before {phase.name} with --until"
            )
        start = scale.start_of(phase)
        if start is not None and start not in phases and start != given:
            assert given is not None, "of the first phase on, all starts are in the window"
            raise ValueError(
                f"--from {phases[0].name}: phase {phase.name} starts from {start.name}, which comes before, and the "
                f"weights of --start stand for {given.name}: begin with --from {start.name}, or end before "
                f"{phase.name} with --until"
            )


def _refuse_foreign_own_model(phase: PhaseSection) -> None:
    """Raises ValueError where the directory of a phase's own model holds no weights of its architecture."""
    if (own := phase.recipe.own_model) is not None:
        if not Path(own.checkpoint_dir).is_dir():
            raise ValueError(
                f"phase {phase.name}: objective.own_model.checkpoint_dir {own.checkpoint_dir} is no directory: name "
                f"one with config.json, safetensors and tokenizer.json"
            )
        refuse_foreign_checkpoint(Path(own.checkpoint_dir), own.architecture)


def _refuse_impossible_job(section: str, job: JobResources) -> None:
    if reasons := incomplete_queue(job):
        raise ValueError(f"{section}: {'; '.join(reasons)}")
    _refuse_missing_gpus(section, job, 1)


def _refuse_missing_gpus(section: str, job: JobResources, num_ranks: int) -> None:
    """Raises ValueError where ranks on this machine have no GPU each; on other machines they look by themselves."""
    if job.launcher == "local" and job.device == "cuda":
        from model.device import refuse_missing_gpu

        try:
            refuse_missing_gpu(num_ranks - 1)
        except ValueError as error:
            raise ValueError(f"{section}: {error}") from error


def with_tokenizer_of_start(scale: Scale, start: str | None) -> Scale:
    """The scale with the tokenizer.json of the directory that `--start` names, where it is given without a path."""
    tokenizer = scale.data.recipe.tokenizer
    if tokenizer.kind != "given" or tokenizer.path or start is None or not (Path(start) / "tokenizer.json").is_file():
        return scale
    path = (Path(start) / "tokenizer.json").absolute()
    given = tokenizer.model_copy(update={"path": str(path), "sha256": hash_file(path)})
    recipe = scale.data.recipe.model_copy(update={"tokenizer": given})
    return scale.model_copy(update={"data": scale.data.model_copy(update={"recipe": recipe})})


def without_required_gains(scale: Scale) -> Scale:
    """The scale for documents of the user: its gates then report a phase that gained nothing, and do not refuse it;
    nor one whose answers have no form, which only the scale's own conversations promise."""
    freed = {"must_gain": False, "min_formed_answer_share": 0.0}
    phases = tuple(
        phase.model_copy(
            update={"recipe": phase.recipe.model_copy(update={"gate": phase.recipe.gate.model_copy(update=freed)})}
        )
        for phase in scale.phases
    )
    return scale.model_copy(update={"phases": phases})


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
