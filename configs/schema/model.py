"""The architecture."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen


class ModelRecipe(Frozen):
    """The architecture, under the key names of the public `glm4_moe` config.json."""

    vocab_size: int = Field(gt=0, le=2**31)
    """Rows of the embedding; 151,552 for GLM-4.5/4.6. Ids are stored in four bytes."""
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    """Hidden width of the dense layers' MLP."""
    moe_intermediate_size: int = Field(gt=0)
    """Hidden width of one expert."""
    num_hidden_layers: int = Field(gt=0)
    first_k_dense_replace: int = Field(ge=0)
    """Number of leading layers with a dense MLP instead of experts."""
    n_routed_experts: int = Field(gt=0)
    n_shared_experts: int = Field(ge=0)
    num_experts_per_tok: int = Field(gt=0)
    routed_scaling_factor: float = Field(gt=0)
    """Factor on the normalised routing weights: 2.5 for GLM-4.5/4.6, 1.0 for Air."""
    norm_topk_prob: bool
    n_group: int = Field(gt=0)
    topk_group: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    attention_bias: bool
    """Bias on q, k and v; o_proj never has one."""
    use_qk_norm: bool
    """RMSNorm per head on q and k: true for GLM-4.5/4.6, false for Air."""
    partial_rotary_factor: float = Field(gt=0, le=1)
    """Share of head_dim that is rotated; the rest carries no position."""
    rope_theta: float = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    initializer_range: float = Field(gt=0)
    tie_word_embeddings: Literal[False]
    num_nextn_predict_layers: int = Field(ge=0, le=1)
    """MTP layers after the last one; the report trains one."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must not exceed n_routed_experts "
                f"({self.n_routed_experts})"
            )
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace ({self.first_k_dense_replace}) must not exceed num_hidden_layers "
                f"({self.num_hidden_layers})"
            )
        if self.rotary_dim % 2:
            raise ValueError(
                f"head_dim x partial_rotary_factor must be even, is {self.head_dim} x {self.partial_rotary_factor}"
            )
        if (self.n_group, self.topk_group) != (1, 1):
            raise ValueError(
                f"n_group and topk_group must be 1, as in every GLM-4.5/4.6 model, are {self.n_group} and "
                f"{self.topk_group}"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


class ModelSection(Frozen):
    recipe: ModelRecipe
