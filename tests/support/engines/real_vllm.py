"""vLLM itself, where `make env-vllm` installed it, and models of shapes that its attention on CPUs computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from infra.child_process import free_port
from infra.serving.engine_process import running_engine
from infra.serving.model_server import ModelServer
from model.architecture.transformer import Glm4Moe
from model.text.chat_template import CHAT_TEMPLATE
from model.text.tokenizer_layout import END_TOKENS
from tasks.serving.engine_command import Place, engine_command, rollout_environment
from tasks.serving.fleet import find_fleet
from tasks.serving.plan_serving import plan_serving
from tasks.serving.planned_server import Wishes
from tasks.serving.served_model import model_of_directory
from tests.conftest import ROOT
from tests.support.evaluation_fakes import toy_tokenizer
from tests.support.model_recipes import GLM46
from tests.support.saved_models import save_checkpoint

PROGRAM = ROOT / ".venv-vllm" / "bin" / "vllm"
PATH = f"{os.environ['PATH']}:{PROGRAM.parent}"
"""With the program at its end: nothing else of that environment takes the place of ours."""
REAL_VLLM = [
    pytest.mark.long,
    pytest.mark.skipif(not PROGRAM.is_file(), reason="vLLM is not installed: run `make env-vllm`"),
]
SERVABLE = GLM46.model_copy(update={"head_dim": 32})
"""The narrowest heads are of 32."""


def save_servable(model: Glm4Moe, hf_dir: Path) -> None:
    """An export with tokenizer and chat template."""
    tokenizer = toy_tokenizer()
    ends = [tokenizer.token_to_id(token) for token in END_TOKENS]
    shape = {"eos_token_ids": ends, "pad_token_id": 0, "dtype": torch.float32, "max_shard_bytes": 1 << 30}
    save_checkpoint(model, hf_dir, **shape)
    tokenizer.save(str(hf_dir / "tokenizer.json"))
    (hf_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@contextmanager
def real_vllm(
    hf_dir: Path, log_path: Path, *words: str, port: int = 0, rollouts: bool = False, **environment: str
) -> Iterator[ModelServer]:
    """A planned server on loopback, with further arguments and variables."""
    wishes = Wishes("vllm", "balanced", slots=16, rollouts=rollouts)
    plan = plan_serving(model_of_directory("glm46", hf_dir), find_fleet("none"), wishes)
    port = port or free_port()
    _, *planned = engine_command(plan, Place(str(hf_dir), "127.0.0.1", port))
    environment |= rollout_environment(plan)
    with running_engine([str(PROGRAM), *planned, *words], "127.0.0.1", port, log_path, environment) as server:
        yield server
