"""Tiny recipes of both model families, and models with weights large enough that a mistake shows."""

import torch

from configs.schema import ModelRecipe
from model.architecture.moe import Router
from model.architecture.transformer import Glm4Moe

GLM46 = ModelRecipe(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    attention_bias=True,
    use_qk_norm=True,
    partial_rotary_factor=0.5,
    rope_theta=1_000_000.0,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    initializer_range=0.02,
    tie_word_embeddings=False,
    num_nextn_predict_layers=1,
)
AIR = GLM46.model_copy(update={"use_qk_norm": False, "routed_scaling_factor": 1.0, "rope_theta": 10_000.0})


def with_every_expert(recipe: ModelRecipe) -> ModelRecipe:
    """The recipe with all experts chosen, so that no rounding lets another one win: for weights that many steps of
    training left, whose bits depend on the processor, and for bfloat16."""
    return recipe.model_copy(update={"num_experts_per_tok": recipe.n_routed_experts})


def random_model(recipe: ModelRecipe, seed: int = 0, std: float = 0.2) -> Glm4Moe:
    """Every parameter random, norms and biases included, and router biases that change who is selected."""
    generator = torch.Generator().manual_seed(seed)
    model = Glm4Moe(recipe)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
        for module in model.modules():
            if isinstance(module, Router):
                module.e_score_correction_bias.normal_(0.0, std, generator=generator)
    return model
