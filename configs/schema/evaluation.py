"""How a checkpoint is evaluated, and the gate that it must pass."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Frozen
from configs.schema.jobs import JobResources, unserved_rollouts
from configs.schema.policy_objectives import EpisodeRecipe
from configs.schema.suites import Suite


class MarginRecipe(Frozen):
    """How much worse than another checkpoint a candidate may be, figure by figure, on the same items. The 95 % interval
    of the difference must exclude a loss of the margin or more (docs/evaluation.md says how many items decide which
    margin); 1 allows a share any loss."""

    bits_per_byte: float = Field(gt=0)
    """Over the held-out documents."""
    domain_bits_per_byte: float = Field(gt=0)
    """Over the held-out documents of any one domain: how much of a domain may be forgotten; over worked problems or
    far text, for a phase trained for them. A domain with documents of
    fewer than 20 records is refused only where the whole interval is beyond the margin."""
    arithmetic_accuracy: float = Field(gt=0, le=1)
    pass_at_1: float = Field(gt=0, le=1)
    choice_accuracy: float = Field(gt=0, le=1)
    """With fewer than 20 questions in the suite it is refused as a domain with few records is."""
    agentic_success: float = Field(gt=0, le=1)
    """Also of the tasks of each environment by themselves."""
    safe_answer_share: float = Field(gt=0, le=1)
    """Also of harmful and of harmless requests by themselves."""


class GateRecipe(Frozen):
    """Bounds that an evaluation must hold to be accepted."""

    max_bits_per_byte: float = Field(gt=0)
    """Ceiling on the bits per byte of the held-out documents."""
    min_arithmetic_accuracy: float = Field(ge=0, le=1)
    """Floor on the share of verified problems continued rightly as plain text."""
    min_pass_at_1: float = Field(ge=0, le=1)
    """Floor on the share of sampled answers to verified problems, asked as a conversation, that are right."""
    min_choice_accuracy: float = Field(ge=0, le=1)
    """Floor on the share of multiple-choice questions answered rightly; above 0 a suite without questions is
    refused."""
    min_formed_answer_share: float = Field(ge=0, le=1)
    """Floor on the share of those answers that end by themselves and say something outside their reasoning: what SFT
    teaches first. A run with --data has none: what its conversations teach, other answers than these may need."""
    min_distinct_answer_share: float = Field(ge=0, le=1)
    """Floor on different answers given over different right ones, among all chat problems: below it the policy has
    collapsed."""
    min_harmful_refused_share: float = Field(ge=0, le=1)
    """Floor on the share of sampled answers to harmful requests that refuse and give nothing."""
    min_harmless_answered_share: float = Field(ge=0, le=1)
    """Floor on the share of sampled answers to harmless requests that do not refuse: one that refuses everything fails
    here. Both floors need evaluation.recipe.num_safety_prompts above 0."""
    min_pair_accuracy: float = Field(ge=0, le=1)
    """Floor on the share of held-out preference pairs whose preferred answer is put first: by a reward model's scores,
    or by how a DPO phase moved the probabilities. 0 for other phases, which compare none."""
    max_calibration_error: float = Field(ge=0, le=1)
    """Ceiling on the expected calibration error of a reward model: how far the certainty sigmoid(margin) is from the
    share of right pairs, in 10 bins. A reward model is held to these two and to its own figure only."""
    own_figure: Literal[
        "none",
        "bits_per_byte",
        "bits_per_byte of domain code",
        "bits_per_byte of domain repository",
        "worked_bits_per_byte",
        "far_bits_per_byte",
        "arithmetic_accuracy",
        "pass_at_1",
        "choice_accuracy",
        "agentic_success",
        "safe_answer_share",
        "pair_accuracy",
    ]
    """What the phase is trained for. Where the whole interval of its difference from the start is on the worse side,
    the phase is refused at any margin: reinforcement learning that lowers pass@1, for example."""
    must_gain: bool
    """Whether the phase is also refused where its own figure is not better than its start's beyond the interval. false:
    the verdict says so. A run with --data asks for no gain: only the problems that a scale was made for can promise
    one."""
    start: MarginRecipe
    """Against the checkpoint that the phase started from."""
    champion: MarginRecipe
    """Against the champion and against the anchors, the best version so far of each figure; only those
    of the released phase are used."""
    max_expert_load: float | None = Field(ge=1)
    """Ceiling on the most used expert over the mean, on the held-out documents, of the worst layer (S0: within 5 % at
    full scale). Added to it is the load that an ideal router, which sends every token to random experts, exceeds only
    once in a thousand evaluations on as many tokens: at 89 layers of 160 experts, 8 of them per token, 13 % on 32,768
    tokens, 6.4 % on 131,072, 0.5 % on 20 million. Text is not random: topics use experts unevenly, so a bound near 1
    needs documents by the thousand. null: not judged, as where a server is asked (evaluation.recipe.rollouts)."""
    max_expert_cv: float | None = Field(ge=0)
    """Ceiling on the coefficient of variation of a layer's expert loads; the variation by chance is added likewise.
    null: not judged."""


class PairEvaluationRecipe(Frozen):
    """What the margins of preference pairs depend on. Made by the flow."""

    beta: float = Field(gt=0)
    """That of a DPO objective; 1 for a reward model, whose margin is the difference of its scores."""


class TaskRecipe(Frozen):
    """How held-out tasks are played, samples_per_problem times each."""

    max_new_tokens: int = Field(gt=0)
    """All that follows the prompt, the tools' tokens included."""
    episodes: EpisodeRecipe


class FarTextRecipe(Frozen):
    """Held-out text far from the beginning of its document, which a phase of long context is trained to read."""

    context_tokens: int = Field(gt=0)
    """Leading tokens of a document that are not scored: the rows of the phases before it (tiny: 512)."""
    scored_tokens: int = Field(gt=0)
    """Tokens after them that are; both together fit the phase's rows and the model's positions."""
    num_documents: int = Field(ge=20)
    """Documents of that length, each of a record of its own, those of smallest hash. A corpus may have fewer: below 20
    the phase's own figure is undecided."""


class EvaluationRecipe(Frozen):
    max_document_tokens: int = Field(gt=0)
    """Tokens of held-out documents that are scored and whose experts are counted: of every domain documents of 20
    records first, then the others in the order of their hash."""
    max_document_chars: int = Field(gt=0)
    """Leading characters scored of a document: many short items give a narrower paired interval than few long ones."""
    sequence_length: int = Field(gt=1)
    max_new_tokens: int = Field(gt=0)
    """Answer length of the verified problems continued as plain text."""
    num_chat_problems: int = Field(gt=0)
    """Verified problems asked as a conversation."""
    samples_per_problem: int = Field(gt=0)
    """Sampled answers per such problem; pass@1 is their mean."""
    pass_k: int = Field(gt=0)
    """k of pass@k, at most samples_per_problem."""
    temperature: float = Field(gt=0)
    enable_thinking: bool
    max_answer_tokens: int = Field(gt=0)
    num_choice_items: int = Field(gt=0)
    """Multiple-choice questions, chosen by hash: from the evaluation files, or continuations of held-out documents
    where there are none."""
    num_safety_prompts: int = Field(ge=0)
    """Harmful requests and as many harmless ones that are asked as conversations, samples_per_problem times each: those
    of smallest hash from evaluation files of kind safety, or generated ones where there are none. 0: none."""
    far_text: FarTextRecipe | None
    """The far ends of long held-out documents; null: none is scored."""
    tasks: TaskRecipe | None
    """Limits of the held-out tasks of data.recipe.synthesize; null: none is played."""
    dtype: Literal["float32", "bfloat16"]
    """Of the weights and of what is computed with them; router biases and logits are float32."""
    num_threads: int = Field(gt=0)
    """CPU threads: part of the result, where the order of sums depends on it."""
    rollouts: Literal["in_process", "sglang", "vllm"]
    """Who computes an evaluation: its own process, which holds the whole model on one device, or the server of this
    kind that resources.rollout_server names, which reads the checkpoint from the store. A server computes with its own
    arithmetic and draws; it counts no tokens of experts and accepts no drafts of the MTP layer."""

    @model_validator(mode="after")
    def _samples_hold_k(self) -> Self:
        if self.pass_k > self.samples_per_problem:
            raise ValueError(f"pass_k ({self.pass_k}) must not exceed samples_per_problem ({self.samples_per_problem})")
        return self

    @model_validator(mode="after")
    def _samples_have_log_probabilities(self) -> Self:
        if self.rollouts != "in_process" and self.temperature != 1.0:
            raise ValueError(
                f"rollouts {self.rollouts} give the log-probabilities of answers at the temperature of their sampling, "
                f"temperature is {self.temperature:g}: set it to 1.0"
            )
        return self


class BenchmarkBound(Frozen):
    """What a release must hold in one benchmark of its suite."""

    worst: float = Field(ge=0)
    """The least accuracy that is accepted; of a benchmark of kind text the most bits per byte."""
    margin: float = Field(gt=0)
    """How much worse than the champion it may be on the same items, as in MarginRecipe."""


class ReleaseSuite(Frozen):
    """A suite of benchmarks that a release is asked, and its champion with it."""

    name: str
    """One of configs/suites/, or a YAML file by its path. Its files are those of the run's data, with the role
    `evaluation`: so training text is decontaminated against them."""
    limit: int | None = Field(gt=0)
    """At most so many items per benchmark, those of smallest hash; null asks all."""
    bounds: dict[str, BenchmarkBound] = Field(min_length=1)
    """By name of the benchmark; every benchmark of the suite has one."""


class SuiteRecipe(Frozen):
    """What the answers to a suite depend on. Made by the flow."""

    suite: Suite
    limit: int | None
    num_threads: int = Field(gt=0)
    rollouts: Literal["in_process", "sglang", "vllm"]
    """Who answers (EvaluationRecipe)."""


class SuiteGateRecipe(Frozen):
    """Bounds on a suite's figures. Made by the flow."""

    bounds: dict[str, BenchmarkBound]


class EvaluationResources(JobResources):
    """Where a checkpoint is evaluated: in one process, which holds the whole model on one device or asks a server. Also
    where the solutions that a phase asks for are sampled; the flow makes them of these and of the phase's server."""

    batch_sequences: int = Field(gt=0)
    rollout_server: str
    """URL of the server that answers where rollouts names one, empty for in_process. It sees the store under the same
    path, and answers nobody else meanwhile: it holds the weights of one checkpoint."""


class EvaluationSection(Frozen):
    recipe: EvaluationRecipe
    suite: ReleaseSuite | None
    """Benchmarks on which a release is also judged; null: none."""
    resources: EvaluationResources

    @model_validator(mode="after")
    def _server_is_named_where_it_is_asked(self) -> Self:
        if reasons := unserved_rollouts(self.recipe.rollouts, self.resources.rollout_server):
            raise ValueError("; ".join(reasons))
        return self
