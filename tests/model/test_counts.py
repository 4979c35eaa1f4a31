"""Counts by formula against published figures and against a built model."""

import pytest
import torch

from configs.schema import ModelRecipe
from model.architecture.counts import count_parameters, kv_cache_bytes_per_token, training_flops_per_token
from model.architecture.moe import Router
from model.architecture.transformer import Glm4Moe
from model.text.tokenizer_layout import END_TOKENS, SPECIAL_TOKENS
from tests.support.model_recipes import AIR, GLM46

FULL = GLM46.model_copy(
    update={
        "vocab_size": 151_552,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
        "num_experts_per_tok": 8,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 202_752,
    }
)
FULL_AIR = FULL.model_copy(
    update={
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "max_position_embeddings": 131_072,
    }
)


def billions(number: int) -> float:
    return round(number / 1e9, 3)


def test_glm46_has_355_billion_parameters_by_the_reports_rule() -> None:
    counts = count_parameters(FULL)
    assert (counts.attention_per_layer, counts.expert, counts.moe_layer, counts.mtp_layers) == (
        136_329_472,
        23_592_960,
        3_935_625_632,
        3_988_069_792,
    )
    assert [billions(n) for n in (counts.body, counts.body_and_mtp, counts.total)] == [351.246, 355.234, 356.786]
    assert [round(n / 1e9, 2) for n in (counts.active_body, counts.active_body + counts.active_mtp, counts.active)] == [
        32.08,
        32.48,
        32.86,
    ]
    assert kv_cache_bytes_per_token(FULL) == 376_832


def test_air_has_106_billion_parameters_without_mtp() -> None:
    counts = count_parameters(FULL_AIR)
    assert (counts.attention_per_layer, counts.expert, counts.moe_layer, counts.mtp_layers) == (
        109_066_240,
        17_301_504,
        2_341_492_864,
        2_375_059_584,
    )
    assert [billions(n) for n in (counts.body, counts.body_and_mtp)] == [105.611, 107.986]
    # The published Air file repeats embedding and unembedding in the MTP layer.
    assert billions(counts.total + counts.embeddings) == 110.469
    assert [round(n / 1e9, 2) for n in (counts.active_body, counts.active_body + counts.active_mtp, counts.active)] == [
        12.18,
        12.48,
        12.80,
    ]


@pytest.mark.parametrize("recipe", [GLM46, AIR, FULL, FULL_AIR], ids=["tiny", "tiny_air", "glm46", "air"])
def test_counts_equal_a_model_built_on_the_meta_device(recipe: ModelRecipe) -> None:
    with torch.device("meta"):
        model = Glm4Moe(recipe)
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == count_parameters(recipe).total
    assert all(
        module.e_score_correction_bias.dtype == torch.float32
        for module in model.modules()
        if isinstance(module, Router)
    )


def test_flops_grow_by_six_per_active_parameter_and_by_attention_length() -> None:
    without_mtp = FULL.model_copy(update={"num_nextn_predict_layers": 0})
    attention = 12 * 92 * 96 * 128 * 4096 / 2
    assert training_flops_per_token(without_mtp, 4096) == 6 * count_parameters(without_mtp).active + attention
    assert training_flops_per_token(without_mtp, 8192) - training_flops_per_token(without_mtp, 4096) == attention
    assert training_flops_per_token(FULL, 4096) > training_flops_per_token(without_mtp, 4096)


def test_special_tokens_have_the_published_offsets() -> None:
    ids = {token: 151_329 + offset for offset, token in enumerate(SPECIAL_TOKENS)}
    assert [ids[token] for token in END_TOKENS] == [151_329, 151_336, 151_338]
    published = {
        "[gMASK]": 151_331,
        "<sop>": 151_333,
        "<|assistant|>": 151_337,
        "<think>": 151_350,
        "/nothink": 151_360,
        "<|video|>": 151_364,
    }
    assert {token: ids[token] for token in published} == published
    assert len(ids) == 36
