"""Checkpoints that a plain DeepSpeed engine wrote, converted to Hugging Face, against DeepSpeed's own consolidation."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from model.formats.deepspeed_checkpoint import step_dir
from tasks.release.checkpoint_source import open_source
from tasks.release.convert_checkpoint import convert_checkpoint
from tests.release.test_conversion import SHAPES, saved
from tests.support.rank_processes import on_ranks

RECIPE = SHAPES["355B"].model_copy(
    update={"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
)
STAGES = {1: "bf16", 2: "fp32", 3: "bf16"}
UP, DOWN = (f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


def write_engines(rank, num_ranks, source, target):
    """One step of transformers' model on each ZeRO stage, with a frozen head and two groups of parameters."""
    import deepspeed

    for stage, dtype in STAGES.items():
        torch.manual_seed(stage)
        model = Glm4MoeForCausalLM(Glm4MoeConfig.from_pretrained(source))
        model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
        model.lm_head.weight.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [{"params": [each for each in trained if (each.ndim > 1) is wide]} for wide in (True, False)]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": dtype == "bf16"},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        token_ids_BT = torch.arange(8)[None] + rank
        engine.backward(engine(input_ids=token_ids_BT, labels=token_ids_BT).loss)
        engine.step()
        engine.save_checkpoint(f"{target}/stage{stage}")
    return {}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A checkpoint of two ranks of every stage, with the model's own files beside it."""
    root = tmp_path_factory.mktemp("engines")
    hf = saved(root / "hf", RECIPE, torch.float32)
    on_ranks(write_engines, 2, root, str(hf), str(root))
    for stage in STAGES:
        for name in ("config.json", "tokenizer.json"):
            shutil.copyfile(hf / name, root / f"stage{stage}" / name)
    return root


@pytest.mark.parametrize("stage", STAGES)
def test_what_an_engine_wrote_is_what_deepspeed_makes_of_it(engines, stage, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    source = open_source(engines / f"stage{stage}")
    card = convert_checkpoint(source, tmp_path / "out", "hf")
    assert (card.source_format, card.largest_logit_differences["glm46"]) == ("deepspeed", 0.0)
    assert card.num_equal == card.num_source_tensors
    wanted = get_fp32_state_dict_from_zero_checkpoint(str(engines / f"stage{stage}"))
    found = Glm4MoeForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    torch.manual_seed(stage)
    head = Glm4MoeForCausalLM(Glm4MoeConfig.from_pretrained(engines / "hf")).lm_head.weight
    assert torch.equal(found["lm_head.weight"], head.bfloat16().float() if STAGES[stage] == "bf16" else head)
    assert set(found) - set(wanted) == ({"lm_head.weight"} if stage == 1 else set()), "DeepSpeed loses what is frozen"
    assert UP in wanted and set(wanted) <= set(found)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name].float())] == []
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".safetensors"}


def rewritten(path, change):
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def without_shape(state):
    del state["param_shapes"][0][UP]


def of_another_shape(state):
    shapes = state["param_shapes"][0]
    shapes[DOWN] = torch.Size((shapes[DOWN][0], shapes[DOWN][2], shapes[DOWN][1]))


class Harmful:
    def __reduce__(self):
        return print, ("code of the file ran",)


@pytest.mark.parametrize(
    ("stage", "name", "change", "message"),
    [
        (1, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", None, r"holds 1 \*_optim_states.pt, 2 are needed"),
        (3, "zero_pp_rank_1_mp_rank_00_model_states.pt", None, r"holds 1 \*_model_states.pt, 2 are needed"),
        (2, "mp_rank_00_model_states.pt", without_shape, r"have [\d,]+ numbers, their shapes [\d,]+"),
        (3, "zero_pp_rank_0_mp_rank_00_model_states.pt", without_shape, r"have [\d,]+ numbers, their shapes [\d,]+"),
        (2, "mp_rank_00_model_states.pt", of_another_shape, rf"tensor {DOWN} has shape \(8, 32, 64\), the model wants"),
        (
            2,
            "mp_rank_00_model_states.pt",
            lambda state: state.update(more=Harmful()),
            r"it holds \S*print, which is not read: it could run code",
        ),
    ],
    ids=["no file of a rank", "no model file", "short 2", "short 3", "shape", "code"],
)
def test_a_damaged_one_is_refused_by_name_and_none_of_its_code_runs(engines, stage, name, change, message, tmp_path):
    copied = shutil.copytree(engines / f"stage{stage}", tmp_path / "copied")
    path = step_dir(copied) / name
    if change is None:
        path.unlink()
    else:
        rewritten(path, change)
    with pytest.raises(ValueError, match=message):
        open_source(copied)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"num_nextn_predict_layers": 1},
            r"tensor model.layers.2.\S+ is missing: transformers trains no MTP layer, so write num_nextn_predict",
        ),
        ({"use_qk_norm": False}, r"tensor model.layers.0.self_attn.k_norm.weight is unexpected"),
    ],
)
def test_the_config_of_another_model_is_refused_by_the_first_tensor(engines, edit, message, tmp_path):
    copied = shutil.copytree(engines / "stage2", tmp_path / "copied")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | edit))
    with pytest.raises(ValueError, match=message):
        open_source(copied)


def test_parts_of_another_axis_and_a_step_that_is_not_there_are_refused(engines, tmp_path):
    copied = shutil.copytree(engines / "stage2", tmp_path / "copied")
    (step_dir(copied) / "zero_pp_rank_0_mp_rank_01_optim_states.pt").touch()
    with pytest.raises(ValueError, match="tensor, expert or pipeline parallelism divides"):
        open_source(copied)
    for named in ("global_step9", "../copied/global_step1"):
        (copied / "latest").write_text(named)
        with pytest.raises(ValueError, match=r"latest names .* which holds no \*_model_states.pt"):
            open_source(copied)
