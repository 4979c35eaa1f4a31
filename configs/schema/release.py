"""What is released, and how it is checked."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen
from configs.schema.evaluation import EvaluationRecipe
from configs.schema.jobs import JobResources

GGUF_BLOCK = 32
"""Elements that share a scale factor in GGUF files: rows of every quantized tensor are whole blocks. Blocks of 256 are
not needed: shorter rows take another type."""


GgufType = Literal["F32", "BF16", "F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M"]
WHOLE_GGUF_TYPES: tuple[GgufType, ...] = ("F32", "BF16", "F16")
"""Types without blocks, the widest first: one of them is served."""
CALIBRATED_GGUF_TYPES: tuple[GgufType, ...] = ("Q6_K", "Q5_K_M", "Q4_K_M")
"""Types whose rounding is weighed by an importance matrix."""
NARROW_GGUF_TYPES: tuple[GgufType, ...] = ("Q4_K_M",)
"""Types of 4 bits, which may lose more."""
QuantizedFormat = Literal["FP8_DYNAMIC", "FP8_BLOCK", "FP8_EXPERTS", "GPTQ_W4A16", "AWQ_W4A16"]
CALIBRATED_FORMATS: tuple[QuantizedFormat, ...] = ("GPTQ_W4A16", "AWQ_W4A16")
"""Formats of 4 bits, which look at activations of text before they round."""


QUANTIZED_BLOCK = 128
"""Inputs of a matrix that share a scale factor, in these formats but those of ROW_FORMATS."""
ROW_FORMATS: tuple[QuantizedFormat, ...] = ("FP8_DYNAMIC", "FP8_EXPERTS")
"""Formats with a scale factor per row of a matrix, of any length."""


def served_gguf_type(gguf_types: Collection[str]) -> GgufType:
    """Of the files of a release the one that is served: the widest."""
    return next(gguf_type for gguf_type in WHOLE_GGUF_TYPES if gguf_type in gguf_types)


class CalibrationRecipe(Frozen):
    """What an importance matrix depends on. Made by `ReleaseRecipe.calibration_recipe`."""

    calibration_rows: int = Field(gt=0)


class ConversionRecipe(Frozen):
    """What GGUF files depend on. Made by `ReleaseRecipe.conversion_recipe`."""

    gguf_types: tuple[GgufType, ...]


class ReferenceRecipe(Frozen):
    """What our own answers depend on, with which engines are compared. Made by `ReleaseRecipe.reference_recipe`."""

    smoke_prompts: tuple[str, ...]
    smoke_prompt_tokens: int
    smoke_new_tokens: int
    smoke_min_margin: float
    parity_prompts: int


class ParityRecipe(Frozen):
    """What the comparison of engines depends on. Made by `ReleaseRecipe.parity_recipe`."""

    parity_prompts: int
    parity_calls: int
    max_parity_log_probability: float
    max_served_log_probability: float


class QuantizationRecipe(Frozen):
    quantized_format: QuantizedFormat
    calibration_rows: int = Field(ge=0)


class ContaminationBound(Frozen):
    """What a release is refused by beside its answers. Made by `ReleaseRecipe.contamination_bound`."""

    max_contaminated_share: float


class FormatRecipe(Frozen):
    """What the figures of a GGUF file or a quantized checkpoint depend on. Made by `ReleaseRecipe.format_recipe`."""

    num_documents: int
    max_document_tokens: int
    num_problems: int
    answers: EvaluationRecipe
    """How the checkpoint itself was asked the same problems."""


class ReleaseRecipe(Frozen):
    gguf_types: tuple[GgufType, ...] = Field(min_length=1)
    """Files for llama.cpp, by its names of types. The widest of F32, BF16 and F16 is served, and the others are
    compared with it. BF16 holds what a bfloat16 checkpoint does in half the bytes of F32; llama.cpp then rounds
    activations to it, too. Q6_K, Q5_K_M and Q4_K_M look at text first."""
    smoke_prompts: tuple[str, ...] = Field(min_length=1)
    """Prompts whose greedy continuations by the served model must equal our own generation; the beginnings of held-out
    documents follow them until 500 tokens are compared."""
    smoke_prompt_tokens: int = Field(gt=0)
    """Leading tokens of a held-out document that make such a prompt."""
    smoke_new_tokens: int = Field(gt=0)
    """Most tokens by which a prompt is continued."""
    smoke_min_margin: float = Field(ge=0)
    """Top-2 logit margin below which a prompt's comparison ends: there rounding decides the token."""
    parity_prompts: int = Field(gt=0)
    """Prompts on which transformers, llama.cpp, and vLLM where it is installed, must choose our greedy tokens: the
    first of those that the smoke test asks."""
    parity_calls: int = Field(gt=0)
    """Required calls of different functions, which llama.cpp must write the same with drafts of the MTP layer as
    without; one at a time, so each costs the same. None is asked of a model without that layer, or that knows no
    conversations."""
    max_parity_log_probability: float = Field(gt=0)
    """Most by which an engine's log-probability of such a token may differ from ours (natural logarithm): of those that
    compute in float32."""
    max_served_log_probability: float = Field(gt=0)
    """The same for llama.cpp with the served file. It differs by 1e-5 with F32. With BF16 and F16 it rounds
    activations: of a random model of three layers 373 tokens differed by up to 0.06 and 0.003, and it chose other
    tokens where our margin was below 0.009: smoke_min_margin belongs above that."""
    max_quantization_bits_per_byte: float = Field(ge=0)
    """Bits per byte that a quantized file may lose against the served one, measured by llama.cpp on validation text."""
    max_4_bit_bits_per_byte: float = Field(ge=0)
    """The same bound for formats of 4 bits, Q4_K_M among them."""
    max_contaminated_share: float = Field(ge=0, le=1)
    """Share of the items of one evaluation source (a file, or a kind of generated problems) that training data may
    still quote: figures can be too good by that much, so it belongs below the champion's margins."""
    quantized_formats: tuple[QuantizedFormat, ...]
    """Checkpoints that vLLM, SGLang and transformers read (compressed-tensors). Their loss is measured with activations
    rounded as those engines round them, against the same bounds."""
    min_routing_agreement: dict[QuantizedFormat, float]
    """By format, the least share of positions and layers at which the quantized checkpoint must choose the same set of
    experts as the unquantized one. Formats that are not named are measured without this bound."""
    calibration_rows: int = Field(gt=0)
    """Packed rows that GPTQ, AWQ and the importance matrix of GGUF files look at: of the last phase that reads rows,
    with its mixture and length."""
    max_idle_expert_share: float = Field(ge=0, le=1)
    """Share of the routed experts of all layers that the router may choose for none of the tokens of those rows. Every
    expert is calibrated on all tokens, but on what the router sends an idle one nothing is known."""
    num_quantization_documents: int = Field(gt=0)
    max_quantization_document_tokens: int = Field(gt=0)
    """Leading tokens scored of each such document; llama.cpp takes one request per token. Of checkpoints every document
    of the suite is scored, as far."""
    num_answered_problems: int = Field(gt=0)
    """Problems that every format answers, the first of the suite: in conversations, evaluation.samples_per_problem
    times each, and as plain text. llama.cpp answers with every GGUF file, which is where this costs time."""

    def format_recipe(self, answers: EvaluationRecipe) -> FormatRecipe:
        """What the figures of a format depend on, asked as the checkpoint was."""
        return FormatRecipe(
            num_documents=self.num_quantization_documents,
            max_document_tokens=self.max_quantization_document_tokens,
            num_problems=self.num_answered_problems,
            answers=answers,
        )

    def quantization_recipe(self, quantized_format: QuantizedFormat) -> QuantizationRecipe:
        """What one format depends on."""
        rows = self.calibration_rows if quantized_format in CALIBRATED_FORMATS else 0
        return QuantizationRecipe(quantized_format=quantized_format, calibration_rows=rows)

    def calibration_recipe(self) -> CalibrationRecipe:
        """What the importance matrix of the GGUF files depends on."""
        return CalibrationRecipe(calibration_rows=self.calibration_rows)

    def conversion_recipe(self) -> ConversionRecipe:
        """What the GGUF files depend on."""
        return ConversionRecipe(gguf_types=self.gguf_types)

    def reference_recipe(self) -> ReferenceRecipe:
        """What our own answers depend on."""
        return ReferenceRecipe(
            smoke_prompts=self.smoke_prompts,
            smoke_prompt_tokens=self.smoke_prompt_tokens,
            smoke_new_tokens=self.smoke_new_tokens,
            smoke_min_margin=self.smoke_min_margin,
            parity_prompts=self.parity_prompts,
        )

    def parity_recipe(self) -> ParityRecipe:
        """What the comparison of engines depends on."""
        return ParityRecipe(
            parity_prompts=self.parity_prompts,
            parity_calls=self.parity_calls,
            max_parity_log_probability=self.max_parity_log_probability,
            max_served_log_probability=self.max_served_log_probability,
        )

    def contamination_bound(self) -> ContaminationBound:
        """What the decision on contamination depends on."""
        return ContaminationBound(max_contaminated_share=self.max_contaminated_share)

    def max_loss(self, quantized_format: str) -> float:
        """Bits per byte that a format or GGUF type may lose."""
        is_narrow = quantized_format in (*CALIBRATED_FORMATS, *NARROW_GGUF_TYPES)
        return self.max_4_bit_bits_per_byte if is_narrow else self.max_quantization_bits_per_byte

    @model_validator(mode="after")
    def _bounds_only_what_is_written(self) -> Self:
        for name, share in self.min_routing_agreement.items():
            if name not in self.quantized_formats or not 0 <= share <= 1:
                raise ValueError(
                    f"min_routing_agreement holds {name}: {share}: name formats of quantized_formats "
                    f"({', '.join(self.quantized_formats)}) and shares from 0 to 1"
                )
        return self

    @model_validator(mode="after")
    def _has_the_served_type(self) -> Self:
        if not {*WHOLE_GGUF_TYPES} & {*self.gguf_types}:
            raise ValueError(
                f"gguf_types is {list(self.gguf_types)}: add one of {', '.join(WHOLE_GGUF_TYPES)}, which is served and "
                f"the others are compared with"
            )
        return self


class ApprovalRequest(Frozen):
    """A question to a person in Prefect's UI."""

    timeout_hours: float = Field(gt=0)
    """Hours after which a release that nobody has answered is refused."""

    @property
    def timeout_seconds(self) -> int:
        """At least 1."""
        return math.ceil(self.timeout_hours * 3600)


class ReleaseSection(Frozen):
    recipe: ReleaseRecipe
    approval: ApprovalRequest | None
    """Whether a release that every gate accepted waits for a person's approval; null: nobody is asked. Needs servers
    that `glm46 up` started."""
    resources: JobResources
    """Of conversion, quantization and the reference; `device` is the reference's."""
