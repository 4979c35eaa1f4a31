"""Opens a checkpoint as lm-evaluation-harness asks it, with the settings of a suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from model.formats.checkpoint_template import given_template
from model.formats.hf_checkpoint import read_config
from tasks.evaluation.engine import ScoringEngine, load_engine
from tasks.evaluation.harness import EngineModel

if TYPE_CHECKING:
    from configs.schema import Suite
    from infra.step import Progress


def checkpoint_model(
    checkpoint_dir: Path, suite: Suite, weights_version: str, device: str, report: Callable[[Progress], None]
) -> EngineModel:
    """A Hugging Face directory with its tokenizer, computed by our engine."""
    positions = read_config(checkpoint_dir).max_position_embeddings

    def load() -> ScoringEngine:
        return load_engine(
            checkpoint_dir,
            weights_version=weights_version,
            batch_sequences=suite.batch_sequences,
            device=device,
            dtype=suite.dtype,
        )

    return engine_model(load, checkpoint_dir, suite, weights_version, positions, report)


def engine_model(
    load: Callable[[], ScoringEngine],
    checkpoint_dir: Path,
    suite: Suite,
    weights_version: str,
    positions: int,
    report: Callable[[Progress], None],
) -> EngineModel:
    """The engine that is loaded, with the tokenizer of the directory. A model with fewer positions than the suite's
    rows sets their length. Raises ValueError where there is no tokenizer, before anything is loaded."""
    tokenizer_path = checkpoint_dir / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ValueError(f"{tokenizer_path} does not exist: export the checkpoint with its tokenizer")
    return EngineModel(
        load(),
        Tokenizer.from_file(str(tokenizer_path)),
        min(suite.sequence_length, positions),
        weights_version,
        report,
        starts_documents=False,
        enable_thinking=suite.enable_thinking,
        template=given_template(checkpoint_dir),
    )
