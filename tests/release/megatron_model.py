"""Megatron-Core's own model reads an export by its own dist_checkpointing, on a CPU.

Run as a module with a directory: its hf/ is a checkpoint in float32, its megatron/ the export. Prints the keys that do
not fit, and the largest logit difference. What Megatron takes from CUDA and Transformer Engine where neither is
installed is replaced: the current device, the random state of dropout, a product of the router.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from configs.schema import ModelRecipe
from model.formats.hf_checkpoint import load_model

NUM_TOKENS = 20


def gpt_model(recipe: ModelRecipe) -> GPTModel:
    """Megatron's model of a recipe, every weight NaN until it is loaded."""
    num_moe = recipe.num_hidden_layers - recipe.first_k_dense_replace
    config = TransformerConfig(
        num_layers=recipe.num_hidden_layers,
        hidden_size=recipe.hidden_size,
        num_attention_heads=recipe.num_attention_heads,
        num_query_groups=recipe.num_key_value_heads,
        kv_channels=recipe.head_dim,
        ffn_hidden_size=recipe.intermediate_size,
        moe_ffn_hidden_size=recipe.moe_intermediate_size,
        num_moe_experts=recipe.n_routed_experts,
        moe_layer_freq=[0] * recipe.first_k_dense_replace + [1] * num_moe,
        moe_shared_expert_intermediate_size=recipe.moe_intermediate_size * recipe.n_shared_experts,
        moe_router_topk=recipe.num_experts_per_tok,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=recipe.routed_scaling_factor,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=recipe.attention_bias,
        qk_layernorm=recipe.use_qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=recipe.rms_norm_eps,
        use_cpu_initialization=True,
        perform_initialization=False,
        mtp_num_layers=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        recipe.vocab_size,
        recipe.max_position_embeddings,
        position_embedding_type="rope",
        rotary_percent=recipe.partial_rotary_factor,
        rotary_base=int(recipe.rope_theta),
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model.eval()


def main(directory: Path) -> None:
    torch.cuda.current_device = lambda: "cpu"
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    ours = load_model(directory / "hf")
    model = gpt_model(ours.recipe)
    state = {name: each for name, each in model.sharded_state_dict().items() if "_extra_state" not in name}
    for name, each in state.items():
        # With Transformer Engine, as models are trained, this norm has its own name in layers with experts.
        if name.endswith("pre_mlp_layernorm.weight") and f"{name.rsplit('.', 2)[0]}.mlp.router.weight" in state:
            each.key = each.key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    strict = dist_checkpointing.validation.StrictHandling.RETURN_ALL
    loaded, missing, unexpected = dist_checkpointing.load(
        state, str(directory / "megatron" / "iter_0000000"), strict=strict
    )
    model.load_state_dict({name: each for name, each in loaded.items() if name in state}, strict=False)
    num_not_loaded = sum(bool(parameter.isnan().any()) for parameter in model.parameters())
    model.mtp_process, model.config.mtp_num_layers = False, None  # it computes only with labels
    token_ids_BT = torch.arange(30, 30 + NUM_TOKENS)[None]
    hidden = ~torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()
    with torch.inference_mode():
        theirs = model(token_ids_BT, torch.arange(NUM_TOKENS)[None], hidden[None, None])
        difference = float((theirs - ours(token_ids_BT).logits_BTV).abs().max())
    wrong = sorted({*missing, *unexpected})
    print(json.dumps({"wrong_keys": wrong, "num_not_loaded": num_not_loaded, "difference": difference}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
