"""Writes a Hugging Face checkpoint and its tokenizer as one GGUF file that llama.cpp serves (`glm4moe`).

The MTP layer follows the others, as in the published files: llama.cpp loads it only where it makes drafts.
gguf_types.py says which type a tensor has. Tensors are read, converted and written one by one, so memory holds one
stack of experts at a time. Equal input gives equal bytes.
"""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from configs.schema import CALIBRATED_GGUF_TYPES, GgufType, ModelRecipe
from model.formats.checkpoint_names import checkpoint_names
from model.formats.checkpoint_template import checkpoint_template
from model.formats.gguf_types import FILE_TYPES, num_stored_bytes, quantize, stored_type
from model.formats.gguf_vocabulary import Vocabulary, read_vocabulary
from model.formats.hf_checkpoint import ROUTER_BIAS, read_config
from model.formats.weight_files import open_safetensors, tensor_files
from model.text.tokenizer_layout import END_TOKENS

_TRUNK = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ATTENTION = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{kind}_proj.weight": f"attn_{kind}.weight" for kind in "qkv"},
}
_DENSE = {f"mlp.{kind}_proj.weight": f"ffn_{kind}.weight" for kind in ("gate", "up", "down")}
_MOE = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    f"mlp.gate.{ROUTER_BIAS}": "exp_probs_b.bias",
    **{f"mlp.experts.{kind}_proj": f"ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("gate", "up", "down")},
}
_MTP = {
    "eh_proj.weight": "nextn.eh_proj.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
}


def write_gguf(
    checkpoint_dir: Path,
    tokenizer_path: Path,
    gguf_path: Path,
    *,
    gguf_type: GgufType,
    name: str,
    importance: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Convert; `tokenizer_path` is a `tokenizer.json`, and `chat_template.jinja` is taken from the checkpoint directory
    if it is there. `importance` weighs the columns of every matrix of a layer in types that are calibrated.

    Raises ValueError for a tokenizer that llama.cpp's pre-tokenizer "glm4" would split differently, for one with more
    tokens than the embedding has rows, for a quantized type where a matrix's rows are not a multiple of 32 long, and
    for a calibrated type without the importance of a matrix.
    """
    is_calibrated = gguf_type in CALIBRATED_GGUF_TYPES
    recipe = read_config(checkpoint_dir)
    vocabulary = read_vocabulary(tokenizer_path, recipe.vocab_size)
    sources = tensor_sources(recipe)
    files = tensor_files(checkpoint_dir)
    for name_on_disk in (name for names in sources.values() for name in names):
        if name_on_disk not in files:
            raise ValueError(
                f"{checkpoint_dir}: tensor {name_on_disk} is missing: the checkpoint is incomplete, write it again"
            )
    shapes = {gguf_name: _shape(files, gguf_name, names) for gguf_name, names in sources.items()}
    types = {
        gguf_name: stored_type(gguf_name, shape, gguf_type, recipe.num_hidden_layers)
        for gguf_name, shape in shapes.items()
    }
    num_layers = recipe.num_hidden_layers
    weighed = [each for each, shape in shapes.items() if is_calibrated and _takes_importance(each, shape, num_layers)]
    if missing := [each for each in weighed if importance is None or each not in importance]:
        raise ValueError(
            f"{gguf_type} needs the importance of {missing[0]} and {len(missing) - 1} more matrices: measure the "
            f"checkpoint first, as a release does"
        )
    writer = gguf.GGUFWriter(gguf_path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GLM4_MOE])
    _add_architecture(writer, recipe, gguf_type, name)
    _add_tokenizer(writer, vocabulary, checkpoint_dir)
    for gguf_name, shape in shapes.items():
        stored = types[gguf_name]
        raw_dtype = None if stored == gguf.GGMLQuantizationType.F32 else stored
        writer.add_tensor_info(
            gguf_name, shape, np.dtype(np.float32), num_stored_bytes(shape, stored), raw_dtype=raw_dtype
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for gguf_name, names in sources.items():
        weights = importance[gguf_name] if importance is not None and gguf_name in weighed else None
        writer.write_tensor_data(quantize(_read_array(files, gguf_name, names), types[gguf_name], weights))
    writer.close()


def tensor_sources(recipe: ModelRecipe) -> dict[str, list[str]]:
    """For each GGUF tensor, in file order, the checkpoint tensors it is made of: one, or one per expert."""
    layer_names = dict(_ATTENTION)
    if recipe.attention_bias:
        layer_names |= {f"self_attn.{kind}_proj.bias": f"attn_{kind}.bias" for kind in "qkv"}
    if recipe.use_qk_norm:
        layer_names |= {f"self_attn.{kind}_norm.weight": f"attn_{kind}_norm.weight" for kind in "qk"}
    moe_names = (
        _MOE if recipe.n_shared_experts else {ours: name for ours, name in _MOE.items() if "shared_experts" not in ours}
    )
    sources = {gguf_name: [name] for name, gguf_name in _TRUNK.items()}
    for layer in range(recipe.num_hidden_layers + recipe.num_nextn_predict_layers):
        names = layer_names | (_DENSE if layer < recipe.first_k_dense_replace else moe_names)
        names |= _MTP if layer >= recipe.num_hidden_layers else {}
        for ours, gguf_name in names.items():
            sources[f"blk.{layer}.{gguf_name}"] = checkpoint_names(
                f"model.layers.{layer}.{ours}", recipe.n_routed_experts
            )
    return sources


def _is_stacked(gguf_name: str) -> bool:
    return gguf_name.endswith("_exps.weight")


def _shape(files: dict[str, Path], gguf_name: str, names: list[str]) -> tuple[int, ...]:
    with open_safetensors(files[names[0]]) as file:
        shape = tuple(file.get_slice(names[0]).get_shape())
    return (len(names), *shape) if _is_stacked(gguf_name) else shape


def _read_array(files: dict[str, Path], gguf_name: str, names: list[str]) -> np.ndarray:
    """Float32, experts stacked."""
    tensors = {}
    for path in sorted({files[name] for name in names}):
        with open_safetensors(path) as file:
            tensors |= {name: file.get_tensor(name).float() for name in names if files[name] == path}
    ordered = [tensors[name] for name in names]
    return (torch.stack(ordered) if _is_stacked(gguf_name) else ordered[0]).numpy()


def _takes_importance(gguf_name: str, shape: tuple[int, ...], num_layers: int) -> bool:
    """Matrices of layers but the router: embedding, head and MTP layer are rounded finely without."""
    is_of_layer = gguf_name.startswith("blk.") and int(gguf_name.split(".")[1]) < num_layers
    return is_of_layer and len(shape) > 1 and not gguf_name.endswith("ffn_gate_inp.weight")


def _add_architecture(writer: gguf.GGUFWriter, recipe: ModelRecipe, gguf_type: GgufType, name: str) -> None:
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[gguf_type])
    if gguf_type.startswith("Q"):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(recipe.vocab_size)
    writer.add_block_count(recipe.num_hidden_layers + recipe.num_nextn_predict_layers)
    writer.add_context_length(recipe.max_position_embeddings)
    writer.add_embedding_length(recipe.hidden_size)
    writer.add_feed_forward_length(recipe.intermediate_size)
    writer.add_head_count(recipe.num_attention_heads)
    writer.add_head_count_kv(recipe.num_key_value_heads)
    writer.add_key_length(recipe.head_dim)
    writer.add_value_length(recipe.head_dim)
    writer.add_layer_norm_rms_eps(recipe.rms_norm_eps)
    writer.add_rope_dimension_count(recipe.rotary_dim)
    writer.add_rope_freq_base(recipe.rope_theta)
    writer.add_expert_count(recipe.n_routed_experts)
    writer.add_expert_used_count(recipe.num_experts_per_tok)
    writer.add_expert_feed_forward_length(recipe.moe_intermediate_size)
    writer.add_expert_shared_count(recipe.n_shared_experts)
    writer.add_leading_dense_block_count(recipe.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(recipe.routed_scaling_factor)
    writer.add_expert_weights_norm(recipe.norm_topk_prob)
    writer.add_nextn_predict_layers(recipe.num_nextn_predict_layers)


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: Vocabulary, checkpoint_dir: Path) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    # As in the published files: a turn ends with <|user|>, a tool call with <|observation|>. The chat template writes
    # its own prefix.
    end_of_text, end_of_turn, end_of_message = (vocabulary.id_of(token) for token in END_TOKENS)
    writer.add_bos_token_id(vocabulary.id_of("[gMASK]"))
    writer.add_eos_token_id(end_of_text)
    writer.add_eot_token_id(end_of_turn)
    writer.add_eom_token_id(end_of_message)
    writer.add_pad_token_id(end_of_text)
    writer.add_add_bos_token(False)
    if (template := checkpoint_template(checkpoint_dir)) is not None:
        writer.add_chat_template(template)
