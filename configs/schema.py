"""Every knob of glm46: one frozen pydantic tree, filled by one complete YAML per scale. Long on purpose: it reads as one page.

A section has up to two parts. `recipe` changes results and enters the step keys; `resources` says where and how wide the work runs
and never enters a key. Field docstrings give unit, effect and source; "report" is the GLM-4.5 technical report (arXiv 2508.06471).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

PHASE_TEMPLATES = (
    "pretrain_general", "pretrain_code_reasoning", "mid_repo_code", "mid_reasoning", "mid_long_context", "mid_domain",
    "sft", "reward_model", "rl_cold_start", "rl_rejection_sampling", "rl_reasoning", "rl_agentic", "rl_alignment",
)  # fmt: skip
PhaseName = Annotated[str, Field(pattern=rf"^({'|'.join(PHASE_TEMPLATES)})(_[a-z0-9]+)*$")]
"""A phase of the recipe; a repeated or specialised one adds a suffix: mid_reasoning_2, mid_domain_medical."""
Domain = Literal["web", "multilingual", "code", "repository", "commit", "issue", "math", "medical", "financial", "synthetic", "chat"]
"""Kind of text. `repository`: the files of one repository in one document; `commit`: a change as a diff with its message;
`issue`: the thread of an issue or pull request."""
PackagedEncoder = Literal["all-MiniLM-L6-v2"]
"""Text encoders that an installed package holds (tasks/data/embedding/embedding_model.py)."""
ClassifierKind = Literal["toxicity", "quality", "factuality"]
"""What labelled records may teach."""


class Frozen(BaseModel):
    """Base of every section: immutable, unknown keys refused, field docstrings kept as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


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
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(f"num_experts_per_tok ({self.num_experts_per_tok}) must not exceed n_routed_experts ({self.n_routed_experts})")
        if self.first_k_dense_replace > self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace ({self.first_k_dense_replace}) must not exceed num_hidden_layers ({self.num_hidden_layers})"
            )
        if self.rotary_dim % 2:
            raise ValueError(f"head_dim x partial_rotary_factor must be even, is {self.head_dim} x {self.partial_rotary_factor}")
        if (self.n_group, self.topk_group) != (1, 1):
            raise ValueError(f"n_group and topk_group must be 1, as in every GLM-4.5/4.6 model, are {self.n_group} and {self.topk_group}")
        return self

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


class ModelSection(Frozen):
    recipe: ModelRecipe


class IngestRecipe(Frozen):
    max_record_bytes: int = Field(gt=0)
    """Of a line, page, member or row: a longer one is kept aside, reason `record_too_long`, and no more of it is held in memory. A longer
    plain text is read as several records, cut at line ends."""
    max_source_bytes: int = Field(gt=0)
    """Bytes of source text per run, shared out evenly over the domains; what a domain does not need goes to the others. Where a domain
    holds more than its part, documents are kept by the hash of their place, so the bytes are met on average."""
    max_rejected_share: float = Field(ge=0, le=1)
    """Share of unreadable records (damaged, not UTF-8, without text, empty, with an id that an earlier one has) above which the run stops
    and names them. What is no text by its nature (a redirect, a picture in a crawl) is counted, and not part of the share."""


class ExtractionRecipe(Frozen):
    html_extractor: Literal["combined", "trafilatura", "readability", "resiliparse"]
    """Finds the main text of a page. combined: never far from the best library on four sets of pages (docs/data.md); resiliparse: several
    times faster and with more boilerplate left."""
    max_markup_chars: int = Field(gt=0)
    """A longer page is dropped, reason `markup_too_large`, as is one whose nesting or tags would make parsing it quadratic."""
    min_chars: int = Field(ge=0)
    """A page with less text is dropped, reason `too_short`; text that needs no extraction is left to the filter."""
    max_failed_share: float = Field(ge=0, le=1)
    """Share of a collection's pages that give no text (no_main_content, broken_markup, markup_too_large) above which the run stops and
    shows examples."""
    max_document_chars: int = Field(gt=0)
    """Longer documents are cut at paragraph ends into pieces of at most this many characters, each with its own offset."""


class BoilerplateRecipe(Frozen):
    min_documents: int = Field(gt=1)
    """A paragraph that so many documents of one collection and host hold is boilerplate; one of them keeps it."""
    min_words: int = Field(gt=0)
    """Shorter paragraphs stay: headings such as `See also` are the same in many articles and belong to each."""
    min_remaining_chars: int = Field(ge=0)
    """A document that lost paragraphs and has less text left is dropped, reason `only_boilerplate`."""
    max_removed_share: float = Field(gt=0, le=1)
    """Share of a collection's bytes above which the run stops and shows examples."""


class ClassifierRecipe(Frozen):
    """Labelled records of the sources to classifiers over words, one per kind that has any."""

    positive_labels: dict[ClassifierKind, tuple[str, ...]]
    """Labels of the named records that count as the thing itself; every other label is its opposite."""
    min_records: int = Field(ge=20)
    """A kind with fewer labelled records stops the run."""
    num_folds: int = Field(ge=2)
    """Every record is held out once: each fold, by the hash of its text, is scored by a model trained on the others."""
    min_auc: float = Field(ge=0.5, lt=1)
    """A classifier that ranks the held-out records worse than this scores nothing; the record says so."""
    prior: dict[ClassifierKind, Annotated[float, Field(gt=0, lt=1)]]
    """Share of all documents that probabilities take to be positive. The labelled records do not say it: most labelled tweets are toxic."""
    encoder: Literal["", PackagedEncoder]
    """Packaged text encoder that reads the passages whose toxicity their words leave in doubt; empty: the words decide. On texts of other
    kinds than the labels the area under the curve is 0.93 with it, 0.80 without (docs/data.md)."""
    flagged_above: float = Field(gt=0, lt=1)
    """Toxicity above which a sentence of data_contracts/toxicity_sentences.py counts as flagged; `filter.scores.max_toxicity` at least."""
    max_flagged_harmless: float = Field(ge=0, le=1)
    """With a larger share of the harmless sentences flagged, toxicity is not scored and its bound drops nothing."""
    word_ngrams: int = Field(ge=1, le=3)
    """Runs of so many words and signs are features as well."""
    min_texts: int = Field(gt=0)
    """A word, or run of words, that fewer records hold is no feature."""
    inverse_penalty: float = Field(gt=0)
    """Of the logistic regression over words: the larger, the closer it follows the records (scikit-learn's C)."""
    max_chars: int = Field(gt=0)
    """Characters from the start of a document that are scored."""
    min_known_share: float = Field(gt=0, le=1)
    """A document of whose words the classifier knows a smaller share is not scored: it is in another language or of another kind."""


class LanguageRecipe(Frozen):
    max_chars: int = Field(gt=0)
    """Characters from the start of a document that its language is found from."""
    model_path: str
    """A fastText model that names languages, such as lid.176.bin or GlotLID, on a file system that executors see; empty for the three
    identifiers that come with the packages."""
    model_sha256: str = Field(pattern="^([0-9a-f]{64})?$")
    """Of that file: a run with another file stops."""

    @model_validator(mode="after")
    def _has_a_digest(self) -> LanguageRecipe:
        if bool(self.model_path) != bool(self.model_sha256):
            raise ValueError(
                f"model_path ({self.model_path!r}) and model_sha256 ({self.model_sha256!r}): give both, or leave both empty; "
                "`sha256sum FILE` prints the digest"
            )
        return self


class NgramModelRecipe(Frozen):
    order: int = Field(gt=0, le=5)
    """Words per n-gram."""
    min_count: int = Field(gt=0)
    """N-grams, also single words, that occur fewer times are forgotten; their mass goes to shorter ones and to unknown words."""
    min_language_bytes: int = Field(gt=0)
    """A language with less reference text (role `reference`) has no model, and its documents no perplexity. From 0.1 to 4 MB of an
    encyclopedia judged pages are told apart alike (AUC 0.80 to 0.82): the percentiles of `held_out_documents` need more."""
    held_out_documents: int = Field(gt=0)
    """Reference documents, by hash, that a model does not learn from: what the perplexity of documents is ranked among. At most a quarter
    is held out, and a language for which that is less has no model. With 400 the share of judged good pages above the 99th percentile
    varied by 0.3 to 3 points between draws (standard deviation), with 100 by 3 to 7."""
    max_language_bytes: int = Field(gt=0)
    """Text per language that its model is trained on, on average: documents are taken by the hash of their id."""
    max_bytes: int = Field(gt=0)
    """Reference text of all languages together that is read for that, on average."""


class NgramTrainingRecipe(Frozen):
    """What decides a language model: also how languages are told apart. Made by `DataRecipe.ngram_training`."""

    language: LanguageRecipe
    ngram_model: NgramModelRecipe
    ingest: IngestRecipe
    """How reference text is read; documents are already."""
    extract: ExtractionRecipe


class SemanticRecipe(Frozen):
    """Code and commits are left out: the threshold is measured on prose."""

    embedding_model: str
    """all-MiniLM-L6-v2, which an installed package holds, or a directory with a model that gives texts their vectors, on a file system that
    executors see: config.json, tokenizer.json and *.safetensors of an encoder (MiniLM, E5 ...) or of a checkpoint that this pipeline
    exported. A vector is the mean of the last hidden states. Empty: a projection of word weights, which needs no model and knows no
    meaning."""
    embedding_sha256: str = Field(pattern="^([0-9a-f]{64})?$")
    """Of that directory's files: a run with others stops; empty for a packaged encoder.
    `cd DIR && LC_ALL=C sh -c 'sha256sum *' | sha256sum` prints it."""
    passage_tokens: int = Field(gt=2)
    """With a model: tokens that go through it at once, special ones included; at most its positions."""
    max_passages: int = Field(gt=0)
    """With a model: of a longer document so many passages are read, at equal distances from its first to its last."""
    dimensions: int = Field(gt=0, le=1024)
    """Entries of a document's vector, one byte each. At 256 unrelated texts have cosines up to 0.3. Of the projection alone: a model's
    vectors have its hidden size."""
    min_words: int = Field(gt=0)
    """Shorter documents are not judged: a few words are no meaning."""
    max_cosine: float = Field(gt=0, le=1)
    """Of two documents of one cluster whose vectors are more alike than this, one stays. At 0.95 the judged collections of docs/data.md
    lose no document that differs from its neighbour; lower values take pages that share their template. That was measured without a model.
    With one, a cosine is whatever that model makes of it (unrelated texts are at 0.1 in one, at 0.8 in the next): choose the bound by
    reading similar.parquet of a sample."""
    cluster_documents: int = Field(gt=1)
    """Documents per cluster aimed at; SemDedup compares inside a cluster only."""
    window: int = Field(gt=1)
    """Each document is compared with so many before it in its cluster: what bounds memory and time where a cluster is larger."""
    sample_documents: int = Field(gt=0)
    """Documents, chosen by the hash of their ids, that word weights and centroids are fitted on; bounds the driver's memory."""
    iterations: int = Field(gt=0)
    """Of k-means on the sample."""
    max_removed_share: float = Field(gt=0, le=1)
    """Share of one source's documents above which the run stops and shows examples."""
    seed: int

    @model_validator(mode="after")
    def _has_a_digest(self) -> SemanticRecipe:
        is_directory = bool(self.embedding_model) and self.embedding_model not in get_args(PackagedEncoder)
        if is_directory != bool(self.embedding_sha256):
            raise ValueError(
                f"embedding_model ({self.embedding_model!r}) and embedding_sha256 ({self.embedding_sha256!r}): a directory needs its "
                f"digest, {' or '.join(get_args(PackagedEncoder))} and the built-in vectors (both empty) have none; "
                "`cd DIR && LC_ALL=C sh -c 'sha256sum *' | sha256sum` prints the digest"
            )
        return self


class DeduplicationRecipe(Frozen):
    ngram_size: int = Field(gt=0)
    """Words per shingle."""
    num_permutations: int = Field(gt=0)
    threshold: float = Field(gt=0, lt=1)
    """True Jaccard similarity from which two documents are near-duplicates (S0: 0.7)."""
    max_removed_share: float = Field(gt=0, le=1)
    """Share of one source's documents above which the run stops and shows examples."""
    max_cluster_share: float = Field(gt=0, le=1)
    """Share of one source's documents that one cluster of near-duplicates may remove; above it the run stops and shows the cluster:
    pages of one template with other facts look like that. The largest clusters are in the record and the report in any case."""
    previous: tuple[str, ...]
    """Directories that earlier runs of deduplicate_documents left (documents/ and signatures/): new documents are compared with those kept
    there, by their stored signatures, and go where one of them says the same. Empty: none."""

    @property
    def signing(self) -> dict[str, object]:
        """How signatures are made, as their files say: only equal ones can be compared."""
        return {"ngram_size": self.ngram_size, "num_permutations": self.num_permutations, "scheme": "datasketch affine32, seed 1"}


class SplitRecipe(Frozen):
    """Membership is decided by the hash of a document's duplicate cluster."""

    validation_share: float = Field(gt=0, lt=1)
    """Expected share of duplicate clusters that is measured while a phase trains, and by which `validation.keep: best` chooses."""
    test_share: float = Field(gt=0, lt=1)
    """Expected share of duplicate clusters that gates judge by; a comparison needs documents of at least 20 records."""

    @model_validator(mode="after")
    def _leaves_training_text(self) -> Self:
        if self.validation_share + self.test_share >= 1:
            raise ValueError(f"validation_share ({self.validation_share}) and test_share ({self.test_share}) must add up to less than 1")
        return self


class HeuristicRecipe(Frozen):
    """Bounds of the rules of Gopher, C4 and FineWeb (tasks/data/filtering/heuristics.py); a document outside one is dropped under that
    reason. In brackets the papers' values, which are those of full scale; a value on its bound passes."""

    min_words: int = Field(ge=0)
    """Gopher: 50. Words of code do not count, except in the domains code and commit."""
    min_math_words: int = Field(ge=0)
    """In mathematics (domain `math`, or a tenth of the words in formulas): a problem with its solution may be short."""
    min_code_words: int = Field(ge=0)
    """In the domains code and commit: a repository's small files belong to it."""
    max_words: int = Field(gt=0)
    """Gopher: 100,000."""
    min_mean_word_length: float = Field(ge=0)
    """Gopher: 3."""
    max_mean_word_length: float = Field(gt=0)
    """Gopher: 10."""
    max_symbol_word_ratio: float = Field(ge=0)
    """Hash signs per word, and ellipses per word (Gopher: 0.1 for either)."""
    max_bullet_line_share: float = Field(ge=0, le=1)
    """Gopher: 0.9."""
    max_ellipsis_line_share: float = Field(ge=0, le=1)
    """Gopher: 0.3."""
    min_alphabetic_word_share: float = Field(ge=0, le=1)
    """Gopher: 0.8."""
    min_math_alphabetic_word_share: float = Field(ge=0, le=1)
    """In mathematics, whose sentences hold numbers: 1 % of GSM8K's problems with solutions are below 0.67, none of 7,473 below 0.48."""
    min_stop_words: int = Field(ge=0)
    """Different stop words of the document's language, where its list is known (Gopher: 2)."""
    max_repeated_line_share: float = Field(ge=0, le=1)
    """Lines that stood before in the document (Gopher: 0.3)."""
    max_repeated_line_char_share: float = Field(ge=0, le=1)
    """Share of characters in such lines (FineWeb: 0.1; Gopher: 0.2)."""
    max_repeated_paragraph_share: float = Field(ge=0, le=1)
    """Gopher: 0.3."""
    max_repeated_paragraph_char_share: float = Field(ge=0, le=1)
    """Gopher: 0.2."""
    max_top_ngram_shares: tuple[float, float, float]
    """Share of characters in the most frequent n-gram of 2, 3, 4 words (Gopher: 0.2, 0.18, 0.16)."""
    max_repeated_ngram_shares: tuple[float, float, float, float, float, float]
    """Share of characters in n-grams of 5 to 10 words that stood before (Gopher: 0.15 down to 0.10)."""
    min_sentences: int = Field(ge=0)
    """C4: 3."""
    max_curly_bracket_share: float = Field(ge=0, le=1)
    """Share of the characters of prose. C4 drops a page with any, to drop code, which is left out here; a text about code names some."""
    max_lorem_ipsum: int = Field(ge=0)
    """Occurrences of `lorem ipsum` (C4: 0)."""
    max_policy_line_share: float = Field(ge=0, le=1)
    """Lines about JavaScript, cookies, privacy policies and terms of use. C4 removes such lines, whatever their share."""
    min_terminated_line_share: float = Field(ge=0, le=1)
    """Lines that end with punctuation (FineWeb: 0.12)."""
    max_short_line_share: float = Field(ge=0, le=1)
    """Lines of less than 30 characters (FineWeb: 0.67)."""


class ScoreRecipe(Frozen):
    """Bounds on what score_documents found. A score that is absent passes and is counted as unscored."""

    allowed_languages: tuple[str, ...] = Field(min_length=1)
    """ISO 639 codes; `*` allows all."""
    min_language_score: float = Field(ge=0, le=1)
    """Probability of the language (FineWeb: 0.65)."""
    max_toxicity: float = Field(ge=0, le=1)
    """S0: 0.3."""
    max_perplexity_percentile: float = Field(gt=0, le=1)
    """Share of the held-out reference documents of its language that a document's perplexity may exceed; at 1 nothing is dropped. S0's
    bound of 500 depends on a model that it does not describe. Without reference text, or a model of the language, nothing is dropped."""
    min_factuality: float = Field(ge=0, le=1)
    """S0: 0.7."""


class FilterRecipe(Frozen):
    heuristics: HeuristicRecipe
    scores: ScoreRecipe
    max_removed_share: float = Field(gt=0, le=1)
    """Share of one source's, language's or domain's documents that one bound may drop; above it the run stops and names the bound and
    examples. `allowed_languages` is not held to it."""
    num_quality_buckets: int = Field(gt=0)
    """Equal parts of the scored documents that pass everything else, by quality (Nemotron-CC)."""
    num_dropped_buckets: int = Field(ge=0)
    """How many of the lowest are dropped (GLM-4.5 drops the lowest)."""
    max_dropped_quality: float = Field(ge=0, le=1)
    """Documents of the dropped buckets whose quality is higher stay: the lowest fifth of a good corpus is good."""

    @model_validator(mode="after")
    def _something_stays(self) -> Self:
        if self.num_dropped_buckets >= self.num_quality_buckets:
            raise ValueError(
                f"num_dropped_buckets ({self.num_dropped_buckets}) must stay below num_quality_buckets ({self.num_quality_buckets}): "
                "else no scored document is left"
            )
        return self


class PersonalDataRecipe(Frozen):
    kinds: tuple[Literal["secret", "email", "iban", "credit_card", "us_ssn", "ip_address", "phone"], ...]
    """What is replaced by its kind in angle brackets; in code and commits secrets and e-mail addresses alone."""


ReasoningFamily = Literal["brackets", "equations", "systems", "quadratics", "logic", "code"]
"""Kinds of verified problems besides arithmetic: tasks/data/problems/reasoning_families.py."""


class SynthesisRecipe(Frozen):
    num_training_problems: int = Field(gt=0)
    """Of arithmetic, in documents; `families` adds others (S0: 1,000,000 in all)."""
    num_evaluation_problems: int = Field(gt=0)
    """Of arithmetic: what checkpoints are asked."""
    families: dict[ReasoningFamily, int]
    """Problems of each family in documents, with their reasoning; as many of them are conversations as num_chats to
    num_training_problems."""
    difficulty: int = Field(ge=1, le=5)
    """Of the families: how large the numbers, how many the steps, people or conditions of a problem are."""
    num_held_out_problems: int = Field(ge=0)
    """Of each family, from its part that is never trained on: held_out.parquet, protected by decontamination."""
    prompt_families: tuple[Literal["brackets", "equations", "systems", "quadratics", "logic"], ...]
    """Families that give num_prompts prompts of reinforcement learning as well; their answer is a short text that is compared."""
    operations: tuple[Literal["+", "-", "*"], ...] = Field(min_length=1)
    max_operand: int = Field(ge=9, le=1_000_000_000)
    """Largest operand, so that products fit 64 bits; the operand pairs are divided between training and evaluation by hash."""
    problems_per_document: int = Field(gt=0)
    num_chats: int = Field(gt=0)
    """Training problems that are also written as conversations, for SFT."""
    thinking_share: float = Field(ge=0, le=1)
    """Share of these conversations whose answer is reasoned in <think>; the others are asked with /nothink (report: SFT mixes both)."""
    num_prompts: int = Field(gt=0)
    """Further training problems, in no document and no conversation: the prompts of reinforcement learning."""

    @model_validator(mode="after")
    def _chats_are_training_problems(self) -> Self:
        if self.num_chats > self.num_training_problems:
            raise ValueError(f"num_chats ({self.num_chats}) must not exceed num_training_problems ({self.num_training_problems})")
        unknown = sorted(set(self.prompt_families) - set(self.families))
        if unknown:
            raise ValueError(f"prompt_families names {unknown[0]}, families ({', '.join(self.families)}) does not: add it there")
        return self


class SeedVariationRecipe(Frozen):
    """Seed problems with annotated calculations, told again with other numbers (tasks/data/seeds/seed_variations.py)."""

    per_seed: int = Field(ge=0)
    """Conversations at most of each seed; some have fewer numbers that keep the story sensible. 0: none."""


class ChatRecipe(Frozen):
    """Conversations from the sources with role `sft`, besides those of the verified problems."""

    max_chat_chars: int = Field(gt=0)
    """A longer conversation is dropped, reason `too_long`: cut, it would teach to answer without the question."""
    max_rejected_share: float = Field(ge=0, le=1)
    """Share of malformed conversations (unknown role, tool result without a call, no answer) above which the run stops and names them."""
    max_per_collection: int = Field(gt=0)
    """About so many conversations of one collection stay, by hash; the others are dropped, reason `collection_full`: one set of ten
    thousand problems would leave the rest no share of a short phase."""
    validation_share: float = Field(ge=0, lt=1)
    """Share of conversations held out, by a hash of the record they come from: a seed and its variations go the same way, and so do
    near-duplicates by deduplicate.threshold."""


class TeacherRequest(Frozen):
    """What a teacher is asked. An empty base_url stands for no teacher: request_traces does not run."""

    base_url: str
    """Of an OpenAI-compatible server, http:// or https://, with /v1; its key comes from GLM46_TEACHER_API_KEY and never stands here."""
    model: str
    num_seeds: int = Field(gt=0)
    """Problems with role `prompts` that are asked, those of smallest hash."""
    temperature: float = Field(ge=0)
    max_tokens: int = Field(gt=0)
    """Of one answer; a longer one is dropped, reason `cut_off`."""

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.base_url and not re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?", self.base_url):
            raise ValueError(
                "teacher.request: base_url must be http:// or https:// with a host and no password, as in http://127.0.0.1:8000/v1; the "
                "key comes from GLM46_TEACHER_API_KEY"
            )
        if self.base_url and not self.model:
            raise ValueError(f"teacher.request: base_url is {self.base_url} and model is empty: name the model, as the server lists it")
        return self


class TeacherLimits(Frozen):
    """How a teacher is asked: none of it changes what is asked."""

    num_parallel: int = Field(gt=0)
    requests_per_minute: int = Field(gt=0)
    tokens_per_minute: int = Field(gt=0)
    max_attempts: int = Field(gt=0)
    first_delay_seconds: float = Field(gt=0)
    """Before the second attempt; doubled before each further one, up to a minute. A server's Retry-After goes before."""
    timeout_seconds: float = Field(gt=0)
    price_per_million_prompt_tokens: float = Field(ge=0)
    price_per_million_completion_tokens: float = Field(ge=0)
    max_cost: float = Field(gt=0)
    """At these prices; the run stops there and keeps what was answered."""


class TeacherRecipe(Frozen):
    """Reasoning traces for seed problems, kept where they verify."""

    request: TeacherRequest
    limits: TeacherLimits


class DecontaminationRecipe(Frozen):
    ngram_size: int = Field(gt=0)
    """Normalised words per n-gram; one shared n-gram with an evaluation item drops a document (GPT-3: 13)."""
    code_ngram_size: int = Field(gt=0)
    """The same for program text in items: solutions, added lines of a change, tracebacks. Honest programs share shorter runs."""
    max_items_per_run: int = Field(gt=0)
    """A run of words that more items share is the benchmark's instruction and tells nothing."""
    max_documents_per_run: int = Field(gt=0)
    """A run that more documents hold is a common phrase and drops none (GPT-3: 10). Evaluated arithmetic is never one."""

    @model_validator(mode="after")
    def _programs_need_longer_runs(self) -> Self:
        if self.code_ngram_size < self.ngram_size:
            raise ValueError(f"code_ngram_size ({self.code_ngram_size}) must be at least ngram_size ({self.ngram_size})")
        return self


class RepositoryRecipe(Frozen):
    """Documents of domain `repository`: the files of one repository one after the other, as far as they survived the filters."""

    max_document_chars: int = Field(gt=0)
    """A longer repository is cut between files; more than the longest training sequence holds is of no use."""


class ChatCollectionRecipe(Frozen):
    """What decides which conversations are kept. Made by `DataRecipe.chat_collection`."""

    chats: ChatRecipe
    personal_data: PersonalDataRecipe
    deduplicate: DeduplicationRecipe
    """Which conversations are near-duplicates, so that they are held out together."""
    decontaminate: DecontaminationRecipe


class TokenizerRecipe(Frozen):
    kind: Literal["bpe", "sentencepiece_bpe", "sentencepiece_unigram"]
    """bpe: byte-level BPE with GLM's pre-tokenizer, which llama.cpp reads too. sentencepiece_*: trained by SentencePiece on one machine,
    exported to the same files; nothing is converted to GGUF then, so a run ends before its release."""
    num_ordinary_tokens: int = Field(ge=256)
    """Tokens before the special ones; 151,329 in GLM-4.5/4.6."""
    special_tokens: Literal["glm", "s1_256"]
    """glm: the 36 of GLM-4.5/4.6. s1_256: S1's 256, GLM's first, the rest reserved (model/text/tokenizer_layout.py)."""
    sample_chars: int = Field(gt=0)
    """Characters of training text that the tokenizer is learned from, chosen by document hash, per domain and language to a document."""
    domain_shares: dict[Domain, Annotated[float, Field(ge=0)]]
    """Weight of each domain in the sample; a domain without one is left out, and text that one lacks is told, not made up by others. {}: as
    in the corpus, which is what a stage alone on somebody's directory needs: its domains are not known here. For a run with the phases of
    full.yaml, {web: 0.40, multilingual: 0.12, code: 0.30, math: 0.06, synthetic: 0.12} is how they mix the first 22T tokens."""
    language_shares: dict[str, Annotated[float, Field(ge=0)]]
    """The same by language, as found in the text, else as the source says, else "und". With both, both hold as far as the corpus allows."""
    min_word_count: int = Field(gt=0)
    """bpe: rarer words of the sample are left out before merges are learned, which bounds memory and changes merges; 1 keeps all."""
    compare_with: str
    """A tokenizer.json whose figures stand beside ours in the step's report; "" for none. Its digest is in the record, not in the key."""

    @property
    def num_special_tokens(self) -> int:
        """Rows of the vocabulary behind the ordinary tokens."""
        return {"glm": NUM_SPECIAL_TOKENS, "s1_256": 256}[self.special_tokens]


class ShardRecipe(Frozen):
    multiple_of: int = Field(gt=0)
    """A domain's shards are a multiple of this: data-parallel copies x pipeline groups of the largest phase, so that every reader has as
    many. 1: as many as the text's size asks for."""


class ContractRecipe(Frozen):
    name: str = Field(pattern=r"^[a-z_]+$")
    """The file data_contracts/<name>.yaml."""


Packing = Literal["stream", "best_fit"]
"""stream: documents one after the other, cut where rows end, attention over document ends (report, pre-training). best_fit: whole
documents in rows with the fewest gaps, attention inside documents, no target across them (report, mid-training; every SFT)."""


MixtureWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MixtureWaypoint(Frozen):
    """Where a mixture stands at a place of its phase; between two waypoints it changes linearly."""

    at_share: float = Field(ge=0, le=1)
    """Share of the phase's tokens."""
    mixture: dict[Domain, MixtureWeight] = Field(min_length=1)


def _waypoints_span_the_phase(
    mixture: dict[Domain, float] | tuple[MixtureWaypoint, ...],
) -> dict[Domain, float] | tuple[MixtureWaypoint, ...]:
    for weights in [mixture] if isinstance(mixture, dict) else [waypoint.mixture for waypoint in mixture]:
        if not any(weights.values()):
            raise ValueError(f"mixture {weights} gives every domain the weight 0: give one of them more")
    places = [0.0, 1.0] if isinstance(mixture, dict) else [waypoint.at_share for waypoint in mixture]
    if len(places) < 2 or places != sorted(set(places)) or (places[0], places[-1]) != (0.0, 1.0):
        raise ValueError(f"mixture has waypoints at_share {places}: let them rise from 0.0 to 1.0, or state one mixture without waypoints")
    return mixture


def _mixture_kind(mixture: object) -> str:
    """Chosen before it is read, so that a mistake is told of the kind that was written."""
    return "waypoints" if isinstance(mixture, list | tuple) else "weights"


Mixture = Annotated[
    Annotated[dict[Domain, MixtureWeight], Field(min_length=1), Tag("weights")]
    | Annotated[tuple[MixtureWaypoint, ...], Field(min_length=1), Tag("waypoints")],
    Discriminator(_mixture_kind),
    AfterValidator(_waypoints_span_the_phase),
]
"""One mixture for a whole phase, or waypoints from its first token to its last."""


def mixture_waypoints(mixture: Mixture) -> tuple[MixtureWaypoint, ...]:
    """A single mixture as two equal waypoints."""
    if not isinstance(mixture, dict):
        return mixture
    return MixtureWaypoint(at_share=0.0, mixture=mixture), MixtureWaypoint(at_share=1.0, mixture=mixture)


class PackingRecipe(Frozen):
    """The part of a phase that decides its packed rows. Made by `PhaseRecipe.packing_recipe`."""

    num_tokens: int = Field(gt=0)
    sequence_length: int = Field(gt=1)
    packing: Packing
    mixture: Mixture
    bucket_weights: tuple[Annotated[float, Field(ge=0)], ...]
    max_epochs: float = Field(gt=0)
    fim_rate: float = Field(ge=0, le=1)
    seed: int

    @property
    def waypoints(self) -> tuple[MixtureWaypoint, ...]:
        """A single mixture stands in two equal ones."""
        return mixture_waypoints(self.mixture)

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Domains with a weight at some place of the phase, in the order in which they are first named."""
        return tuple(dict.fromkeys(name for point in self.waypoints for name, weight in point.mixture.items() if weight))


class DataRecipe(Frozen):
    ingest: IngestRecipe
    extract: ExtractionRecipe
    boilerplate: BoilerplateRecipe
    classifiers: ClassifierRecipe
    ngram_model: NgramModelRecipe
    language: LanguageRecipe
    deduplicate: DeduplicationRecipe
    semantic: SemanticRecipe
    split: SplitRecipe
    filter: FilterRecipe
    personal_data: PersonalDataRecipe
    synthesize: SynthesisRecipe
    seed_variations: SeedVariationRecipe
    teacher: TeacherRecipe
    chats: ChatRecipe
    decontaminate: DecontaminationRecipe
    repositories: RepositoryRecipe
    tokenizer: TokenizerRecipe
    shards: ShardRecipe

    @model_validator(mode="after")
    def _contract_holds_at_the_bound(self) -> Self:
        if self.filter.scores.max_toxicity < self.classifiers.flagged_above:
            raise ValueError(
                f"filter.scores.max_toxicity ({self.filter.scores.max_toxicity}) is below classifiers.flagged_above "
                f"({self.classifiers.flagged_above}), at which harmless sentences are judged: lower flagged_above, or raise max_toxicity"
            )
        return self

    @property
    def ngram_training(self) -> NgramTrainingRecipe:
        """The part that language models depend on."""
        return NgramTrainingRecipe(language=self.language, ngram_model=self.ngram_model, ingest=self.ingest, extract=self.extract)

    @property
    def chat_collection(self) -> ChatCollectionRecipe:
        """Conversations are masked, compared and decontaminated as documents are."""
        return ChatCollectionRecipe(
            chats=self.chats, personal_data=self.personal_data, deduplicate=self.deduplicate, decontaminate=self.decontaminate
        )


class SparkResources(Frozen):
    master: str
    """Spark master URL: local[2], spark://host:7077, yarn, k8s://..."""
    driver_memory: str = Field(pattern=r"^[0-9]+[kmgtKMGT]$")
    """Heap of the driver's JVM: 2g, 512m. The driver's Python holds at most half as much of the tokenizer's words, the rest in files."""
    executor_memory: str
    shuffle_partitions: int = Field(gt=0)

    @property
    def driver_array_bytes(self) -> int:
        """What a step may hold in the driver's Python before it moves to a file."""
        return int(self.driver_memory[:-1]) * 2 ** (10 * (1 + "kmgt".index(self.driver_memory[-1].lower()))) // 2


class DataSection(Frozen):
    recipe: DataRecipe
    resources: SparkResources


class Waypoint(Frozen):
    """A step of a piecewise-constant schedule: `value` holds until this share of the course's tokens has been seen."""

    until_share: float = Field(gt=0, le=1)
    value: float = Field(ge=0)


class CourseRecipe(Frozen):
    """Schedules over the token axis that consecutive phases share; their places are shares of the course's tokens."""

    name: str
    phases: tuple[PhaseName, ...] = Field(min_length=1)
    peak_learning_rate: float = Field(gt=0)
    """Report: 2.5e-4, for Muon with update RMS 0.2."""
    final_learning_rate: float = Field(ge=0)
    """Report: 2.5e-5 at the end of mid-training, by cosine."""
    warmup_share: float = Field(ge=0, le=1)
    """Linear from 0; the report does not give the length."""
    start_batch_tokens: int = Field(gt=0)
    peak_batch_tokens: int = Field(gt=0)
    batch_rampup_share: float = Field(ge=0, le=1)
    """Share over which the batch grows linearly from start to peak (report: 16M -> 64M over the first 500B of 23.1T)."""
    router_bias_rate: tuple[Waypoint, ...] = Field(min_length=1)
    """Loss-free balancing update (report: 0.001 for 15T tokens, then 0)."""
    mtp_loss_weight: tuple[Waypoint, ...] = Field(min_length=1)
    """Report: 0.3 for 15T tokens, then 0.1."""
    balance_loss_weight: float = Field(ge=0)
    """Sequence-level balance loss (report: 1e-4)."""

    @model_validator(mode="after")
    def _batch_grows(self) -> Self:
        if self.peak_batch_tokens < self.start_batch_tokens:
            raise ValueError(
                f"course {self.name}: peak_batch_tokens ({self.peak_batch_tokens}) is below start_batch_tokens ({self.start_batch_tokens})"
            )
        for name in ("router_bias_rate", "mtp_loss_weight"):
            shares = [waypoint.until_share for waypoint in getattr(self, name)]
            if shares != sorted(set(shares)) or shares[-1] != 1.0:
                raise ValueError(f"course {self.name}: {name} has until_share {shares}: let them rise and end at 1.0")
        return self


class CourseSection(Frozen):
    recipe: CourseRecipe


class OptimizerRecipe(Frozen):
    """muon: Muon on the matrices but the embedding, AdamW on the rest. adamw: AdamW on all (S2, S4)."""

    kind: Literal["muon", "adamw"]
    muon_momentum: float = Field(ge=0, lt=1)
    """Report: 0.95."""
    muon_newton_schulz_steps: Literal[5]
    """Report: 5, which the coefficients of the quintic are tuned for."""
    muon_update_rms: float = Field(gt=0)
    """Report: 0.2."""
    adam_beta1: float = Field(ge=0, lt=1)
    adam_beta2: float = Field(ge=0, lt=1)
    adam_eps: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    """Report: 0.1 on matrices; biases, norms and the embedding are not decayed."""
    max_grad_norm: float = Field(ge=0)
    """Gradients of a step whose norm over the whole model is larger are scaled down to it, before the optimizer (S2: 1.0, and Megatron's
    default, which S3 and S4 run with; the report names none). 0: they are left as they are. A Muon update has no scale, but its momentum
    has: a step with a large gradient weighs more in it than the steps around."""
    state_dtype: Literal["float32", "bfloat16"]
    """Of momentum and moments; master weights are float32 either way."""


class PretrainObjective(Frozen):
    """Cross-entropy of every next token."""

    kind: Literal["pretrain"]


class SftObjective(Frozen):
    """Cross-entropy of what the assistant writes and of the role token that closes its turn; documents of the mixture as in pretrain."""

    kind: Literal["sft"]


class RewardObjective(Frozen):
    """Bradley-Terry loss over preference pairs, on a scalar head."""

    kind: Literal["reward"]


class DpoObjective(Frozen):
    kind: Literal["dpo"]
    beta: float = Field(gt=0)


MIN_TOKEN_CLIP = 0.01
"""Rounding in bfloat16 alone moved a token's ratio by 0.003 to 0.013 on average in random models of 3 layers."""


class PolicyObjective(Frozen):
    """Policy gradient on sampled answers. grpo: advantages within the group of one prompt, no KL (report); gspo: the ratio of whole
    sequences (S3); ppo: a critic (S0).

    A step has batch_tokens / sequence_length answers, each a row of its own; the tokens of the budget are these rows' positions."""

    kind: Literal["grpo", "gspo", "ppo"]
    samples_per_prompt: int = Field(ge=2)
    """Size of a group: answers per prompt."""
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    enable_thinking: bool
    """Whether the prompt asks for reasoning in <think>."""
    clip_low: float = Field(gt=0, lt=1)
    """Lower clip of the probability ratio against the weights before the update is 1 - clip_low: of tokens in grpo and ppo (S0: 0.2), of
    sequences in gspo (S3: 1e-4; arXiv 2507.18071: 3e-4)."""
    clip_high: float = Field(gt=0)
    """Upper clip is 1 + clip_high (S0: 0.2, arXiv 2503.14476: 0.28; gspo, S3: 2e-4)."""
    importance_cap: float = Field(ge=1)
    """Ceiling on p trainer / p rollout, by which each sampled token is weighted: truncated importance sampling against the difference
    between the arithmetic of sampling and of training (S3: --use-tis, whose cap is 2.0 in slime, as in verl)."""
    max_constant_steps: int = Field(gt=0)
    """Steps in a row in which no group has two different rewards, after which training stops: nothing can be learned from them. Groups of
    equal rewards are left out of a step: they cost no pass and count in no mean."""

    @model_validator(mode="after")
    def _clip_fits_the_ratio(self) -> Self:
        narrow = {name: value for name in ("clip_low", "clip_high") if (value := getattr(self, name)) < MIN_TOKEN_CLIP}
        if narrow and self.kind != "gspo":
            raise ValueError(
                f"{narrow} with kind {self.kind}: bounds below {MIN_TOKEN_CLIP} are those of gspo's ratio of whole sequences; the ratio of "
                "one token moves more by rounding. Set kind gspo, or bounds as 0.2 and 0.28"
            )
        return self


Objective = Annotated[
    PretrainObjective | SftObjective | RewardObjective | DpoObjective | PolicyObjective, Field(discriminator="kind")
]  # fmt: skip


class SpikeRecipe(Frozen):
    """What counts as a spike and what is done about it: roll back to the last good checkpoint and skip rows. A step with a loss or
    gradient norm that is not finite is one in any case."""

    window_steps: int = Field(gt=1)
    """Steps whose median loss and gradient norm a step is compared with; before that many were taken only non-finite ones count."""
    max_loss_ratio: float = Field(gt=1)
    max_grad_norm_ratio: float = Field(gt=1)
    """Of our own norm, before the optimizer."""
    skip_steps: int = Field(gt=0)
    """Steps whose rows are left out, up to and with the one that spiked."""
    max_rollbacks: int = Field(ge=0)
    """Of a phase; behind that training stops and says where the evidence lies."""


class ValidationRecipe(Frozen):
    """Bits per byte of held-out documents per domain, measured while the phase trains."""

    interval_tokens: int = Field(gt=0)
    """Tokens of the phase between two measurements; the last step is always measured."""
    num_tokens: int = Field(gt=0)
    """Scored per domain, documents in the order of the held-out shards."""
    keep: Literal["last", "best"]
    """Which weights the phase leaves: those of its end, or of the measurement with the lowest mean over domains."""


class AdapterRecipe(Frozen):
    """Which weights are trained: all of them, or low-rank additions to the attention and expert matrices."""

    kind: Literal["none", "lora", "dora"]
    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    """The addition is scaled by alpha / rank."""


class MarginRecipe(Frozen):
    """How much worse than another checkpoint a candidate may be, figure by figure, on the same items. The 95 % interval of the difference
    must exclude a loss of the margin or more (docs/evaluation.md says how many items decide which margin); 1 holds a share to nothing."""

    bits_per_byte: float = Field(gt=0)
    """Over the held-out documents."""
    domain_bits_per_byte: float = Field(gt=0)
    """Over those of any one domain: how much of it may be forgotten. A domain with documents of fewer than 20 records is refused only
    where the whole interval is beyond the margin."""
    arithmetic_accuracy: float = Field(gt=0, le=1)
    pass_at_1: float = Field(gt=0, le=1)
    choice_accuracy: float = Field(gt=0, le=1)
    """Where the suite holds fewer than 20 questions: as a domain."""


class GateRecipe(Frozen):
    """Bounds that an evaluation must hold to be accepted."""

    max_bits_per_byte: float = Field(gt=0)
    """Ceiling on the bits per byte of the held-out documents."""
    min_arithmetic_accuracy: float = Field(ge=0, le=1)
    """Floor on the share of verified problems continued rightly as plain text."""
    min_pass_at_1: float = Field(ge=0, le=1)
    """Floor on the share of sampled answers to verified problems, asked as a conversation, that are right."""
    min_choice_accuracy: float = Field(ge=0, le=1)
    """Floor on the share of multiple-choice questions answered rightly; above 0 a suite without questions is refused."""
    min_distinct_answer_share: float = Field(ge=0, le=1)
    """Floor on different answers given over different right ones, among all chat problems: below it the policy has collapsed."""
    own_figure: Literal["none", "bits_per_byte", "arithmetic_accuracy", "pass_at_1", "choice_accuracy"]
    """What the phase is trained for. Where the whole interval of its difference from the start is on the worse side, the phase is refused
    at any margin: reinforcement learning that lowers pass@1, for example."""
    start: MarginRecipe
    """Against the checkpoint that the phase started from."""
    champion: MarginRecipe
    """Against the reigning champion and against the anchors, the best version so far of each figure; read of the last phase."""
    max_expert_load: float = Field(ge=1)
    """Ceiling on the most used expert over the mean, on the held-out documents, of the worst layer (S0: within 5 % at full scale). What
    an ideal router, which sends every token to random experts, exceeds only once in a thousand evaluations on as many tokens is allowed
    on top: at 89 layers of 160 experts, 8 of them per token, 13 % on 32,768 tokens, 6.4 % on 131,072, 0.5 % on 20 million. Text is not
    random: topics use experts unevenly, so a bound near 1 needs documents by the thousand."""
    max_expert_cv: float = Field(ge=0)
    """Ceiling on the coefficient of variation of a layer's expert loads, chance allowed on top likewise."""


class PhaseRecipe(Frozen):
    objective: Objective
    num_tokens: int = Field(gt=0)
    """Token budget of the phase."""
    sequence_length: int = Field(gt=1)
    """Tokens per training sequence; a packed row holds one more, the last target."""
    rope_theta: float = Field(gt=0)
    """Report: 10,000 at 4K, 1,000,000 from 32K on."""
    packing: Packing
    mixture: Mixture
    """Token share per domain, normalised over the domains that have text; of a policy objective the domains of its prompts. Either one
    mixture or a list of waypoints {at_share, mixture}, linear in between."""
    bucket_weights: tuple[Annotated[float, Field(ge=0)], ...]
    """How often an epoch reads a document of each quality bucket, from low to high (GLM-4.5: over 3.2 of the highest); documents without
    a bucket once. Empty: every document once. None is read again before all of its bucket were read."""
    max_epochs: float = Field(gt=0)
    """Ceiling on the passes over one domain, an epoch being what bucket_weights make of it, from the start of the phase's course; a phase
    whose mixture needs more is refused. The domains code and repository count apart, though repositories are made of files."""
    fim_rate: float = Field(ge=0, le=1)
    """Share of the documents of the domains code and repository that are rearranged to prefix, suffix, middle (report: all source code
    has fill-in-the-middle, without a rate)."""
    adapter: AdapterRecipe
    optimizer: OptimizerRecipe
    spikes: SpikeRecipe
    validation: ValidationRecipe
    dtype: Literal["float32", "bfloat16"]
    """Arithmetic of the forward and backward pass; master weights are float32 either way."""
    num_threads: int = Field(gt=0)
    """CPU threads per rank: part of the result on a CPU, where the order of sums depends on it."""
    seed: int
    """Of weights that begin at random, of rows and prompts, and of the order of documents, which all phases of a course share."""
    gate: GateRecipe

    @property
    def packing_recipe(self) -> PackingRecipe:
        """What packing depends on: a new bound or learning rate packs nothing again."""
        return PackingRecipe(**self.model_dump(include=set(PackingRecipe.model_fields)))

    @property
    def samples_answers(self) -> bool:
        """Whether the phase trains on answers it samples itself, to prompts, instead of packed rows."""
        return isinstance(self.objective, PolicyObjective)

    @property
    def reads_chats(self) -> bool:
        """Whether conversations are among the packed rows."""
        return any("chat" in point.mixture for point in mixture_waypoints(self.mixture)) and not self.samples_answers

    @model_validator(mode="after")
    def _budget_is_whole_rows(self) -> Self:
        if self.num_tokens % self.sequence_length:
            rows = max(1, self.num_tokens // self.sequence_length)
            raise ValueError(
                f"num_tokens ({self.num_tokens}) must be a multiple of sequence_length ({self.sequence_length}), for example "
                f"{rows * self.sequence_length}"
            )
        return self

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        if isinstance(self.objective, SftObjective) and self.packing != "best_fit":
            raise ValueError("packing must be best_fit where the objective is sft: a conversation cut in two teaches no questions")
        if isinstance(self.objective, PolicyObjective) and self.objective.max_new_tokens >= self.sequence_length:
            raise ValueError(
                f"objective.max_new_tokens ({self.objective.max_new_tokens}) must stay below sequence_length ({self.sequence_length}): "
                "a row holds the prompt and its answer"
            )
        return self


class ProfileResources(Frozen):
    """DeepSpeed's FLOP profiler and torch.profiler on some steps; table and trace become MLflow artifacts."""

    steps: int = Field(ge=0)
    """Steps that are profiled, after two that warm up; 0 turns both off."""
    flops: bool
    trace: bool


class TrainingResources(Frozen):
    """Where and how wide a phase trains; what cannot run is refused before launch, by name (tasks/training/plan/launch_rules.py)."""

    launcher: Literal["local", "slurm", "pbs", "kubernetes"]
    device: Literal["cpu", "cuda"]
    """What a rank computes on; `glm46 plan` counts what lives there."""
    num_ranks: int = Field(gt=0)
    """Processes, one per accelerator (or per CPU share): data x tensor x pipeline x context parallel."""
    tensor_parallel: int = Field(gt=0)
    pipeline_parallel: int = Field(gt=0)
    context_parallel: int = Field(gt=0)
    expert_parallel: int = Field(gt=0)
    """Ranks among which a layer's experts are divided; carved out of data x tensor x context parallel, no axis of its own."""
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: Literal["none", "cpu", "nvme"]
    offload_parameters: Literal["none", "cpu", "nvme"]
    """ZeRO 3 only."""
    nvme_dir: str
    """Where offloading to NVMe writes, on every node; read where one of the two says nvme."""
    bucket_elements: int = Field(gt=0)
    """Elements per collective of ZeRO (S2: 5e8)."""
    recompute: Literal["none", "selective", "full"]
    """Activations computed again in the backward pass: none, those of attention and experts, or whole layers."""
    recompute_every_layers: int = Field(gt=0)
    """Of full: how many layers are computed again as one block."""
    overlap_shared_expert: bool
    """Whether the shared expert computes while routed tokens travel; acts where expert_parallel is above 1."""
    peak_flops_per_second: float = Field(gt=0)
    """Of one rank, dense, in the phase's dtype: what MFU is measured against (H100/H800 BF16: 9.89e14)."""
    device_memory_bytes: int = Field(gt=0)
    """Memory of one rank (H100/H800: 80 GB): `glm46 plan` says what does not fit."""
    assumed_document_tokens: int = Field(gt=0)
    """Length of a document by which `glm46 plan` charges attention where packing is best_fit, as if all were alike; of a real corpus the
    sum of squared lengths over the sum of lengths, which metrics.jsonl has as attended_tokens."""
    rollout_cache_bytes: int = Field(gt=0)
    """Memory of a rank for the keys and values of answers that are sampled at once; a policy phase samples a step's answers in batches that
    fit. In float32 on a CPU the batches change no bit of the answers."""
    micro_batch_sequences: int = Field(gt=0)
    save_interval_steps: int = Field(gt=0)
    log_interval_steps: int = Field(gt=0)
    num_kept_checkpoints: int = Field(gt=0)
    """The newest, besides the best one where validation.keep is best."""
    profile: ProfileResources
    tensorboard: bool
    """Event files beside MLflow."""
    wandb: Literal["off", "offline", "online"]
    """Weights & Biases; its key comes from the environment."""


class PhaseSection(Frozen):
    name: PhaseName
    quoted_loss: float | None
    """Loss that a source document states without evidence; shown beside the measured one, decides nothing. Null where none does."""
    recipe: PhaseRecipe
    resources: TrainingResources

    @model_validator(mode="after")
    def _objective_fits_the_phase(self) -> Self:
        kind = self.recipe.objective.kind
        if self.name.startswith(("pretrain_", "mid_")) and kind not in ("pretrain", "sft"):
            raise ValueError(f"phase {self.name}: objective {kind} needs a model that answers: set its kind to pretrain, or name it rl_...")
        return self


class TrainingRecipe(Frozen):
    """What decides the result of training one phase. The phase's gate and mixture stay out: a new bound trains nothing again, and the
    mixture acts through the packed rows. Made by `Scale.training_recipe`."""

    phase: PhaseName
    objective: Objective
    model: ModelRecipe
    course: CourseRecipe
    course_start_tokens: int = Field(ge=0)
    """Tokens of the course before the phase."""
    course_num_tokens: int = Field(gt=0)
    """Length of the whole course in tokens."""
    num_tokens: int = Field(gt=0)
    sequence_length: int = Field(gt=1)
    rope_theta: float = Field(gt=0)
    max_epochs: float = Field(gt=0)
    """Acts on prompts; packed rows are cut to it already."""
    adapter: AdapterRecipe
    optimizer: OptimizerRecipe
    spikes: SpikeRecipe
    validation: ValidationRecipe
    dtype: Literal["float32", "bfloat16"]
    num_threads: int = Field(gt=0)
    seed: int


class EvaluationRecipe(Frozen):
    max_document_tokens: int = Field(gt=0)
    """Tokens of held-out documents that are scored and whose experts are counted: of every domain documents of 20 records first, then the
    others in the order of their hash."""
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
    """Multiple-choice questions, chosen by hash: from the evaluation files, or continuations of held-out documents where there are none."""
    num_threads: int = Field(gt=0)
    """CPU threads: part of the result, where the order of sums depends on it."""

    @model_validator(mode="after")
    def _samples_hold_k(self) -> Self:
        if self.pass_k > self.samples_per_problem:
            raise ValueError(f"pass_k ({self.pass_k}) must not exceed samples_per_problem ({self.samples_per_problem})")
        return self


class EvaluationResources(Frozen):
    batch_sequences: int = Field(gt=0)


class EvaluationSection(Frozen):
    recipe: EvaluationRecipe
    resources: EvaluationResources


SERVED_GGUF_TYPE = "F32"
"""llama.cpp quantizes activations too: only the F32 file's greedy answers can be held to our own."""
Q8_0_BLOCK = 32
"""Elements that share a scale: rows of every quantized tensor hold whole blocks."""


class ReleaseRecipe(Frozen):
    gguf_types: tuple[Literal["F32", "Q8_0"], ...] = Field(min_length=1)
    smoke_prompts: tuple[str, ...] = Field(min_length=1)
    """Prompts whose greedy continuations by the served model must equal our own generation; the beginnings of held-out documents follow
    them until 500 tokens are compared."""
    smoke_prompt_tokens: int = Field(gt=0)
    """Leading tokens of a document that are such a prompt."""
    smoke_new_tokens: int = Field(gt=0)
    """Tokens that a prompt is continued by, at most."""
    smoke_min_margin: float = Field(ge=0)
    """Top-2 logit margin below which a prompt's comparison ends: there rounding decides the token."""
    max_quantization_bits_per_byte: float = Field(ge=0)
    """Bits per byte that a quantized file may lose against the F32 one, measured by llama.cpp on validation text."""
    num_quantization_documents: int = Field(gt=0)
    max_quantization_document_tokens: int = Field(gt=0)
    """Leading tokens scored of each such document; llama.cpp takes one request per token."""

    @model_validator(mode="after")
    def _has_the_served_type(self) -> Self:
        if SERVED_GGUF_TYPE not in self.gguf_types:
            raise ValueError(f"gguf_types is {list(self.gguf_types)}: add {SERVED_GGUF_TYPE}, which is served and the others are held to")
        return self


class ReleaseSection(Frozen):
    recipe: ReleaseRecipe


class ServingResources(Frozen):
    host: Literal["127.0.0.1", "localhost"]
    """Loopback: the server asks for no password."""
    port: int = Field(ge=0, le=65535)
    """0 takes a free port."""
    context_length: int = Field(gt=0)
    num_threads: int = Field(gt=0)
    startup_timeout_seconds: float = Field(gt=0)


class ServingSection(Frozen):
    resources: ServingResources


class Scale(Frozen):
    """One complete YAML."""

    scale: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    data: DataSection
    model: ModelSection
    courses: tuple[CourseSection, ...] = Field(min_length=1)
    phases: tuple[PhaseSection, ...] = Field(min_length=1)
    evaluation: EvaluationSection
    release: ReleaseSection
    serving: ServingSection

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"phases: a name occurs twice in {names}")
        scheduled = [name for course in self.courses for name in course.recipe.phases]
        if scheduled != names:
            raise ValueError(f"courses hold the phases {scheduled}, but phases are {names}: list the same names in the same order")
        tokenizer = self.data.recipe.tokenizer
        used = tokenizer.num_ordinary_tokens + tokenizer.num_special_tokens
        if used > self.model.recipe.vocab_size:
            raise ValueError(
                f"tokenizer.num_ordinary_tokens + {tokenizer.num_special_tokens} special tokens = {used} exceeds "
                f"model.vocab_size ({self.model.recipe.vocab_size}): lower the first or raise the second"
            )
        for course in self.courses:
            seeds = {phase.name: phase.recipe.seed for phase in self.phases if phase.name in course.recipe.phases}
            if len(set(seeds.values())) > 1:
                raise ValueError(f"course {course.recipe.name}: one seed orders its documents, its phases have {seeds}: give them the same")
        num_buckets = self.data.recipe.filter.num_quality_buckets
        for phase in self.phases:
            if len(phase.recipe.bucket_weights) not in (0, num_buckets):
                raise ValueError(
                    f"phase {phase.name}: bucket_weights has {len(phase.recipe.bucket_weights)} weights, "
                    f"data.recipe.filter.num_quality_buckets is {num_buckets}: give one for each bucket, or [] for none"
                )
            if phase.recipe.sequence_length > self.model.recipe.max_position_embeddings:
                raise ValueError(
                    f"phase {phase.name}: sequence_length ({phase.recipe.sequence_length}) exceeds "
                    f"model.max_position_embeddings ({self.model.recipe.max_position_embeddings})"
                )
        return self

    @model_validator(mode="after")
    def _model_can_be_evaluated_and_released(self) -> Self:
        model, evaluation, release, served = self.model.recipe, self.evaluation.recipe, self.release.recipe, self.serving.resources
        positions = "model.recipe.max_position_embeddings", model.max_position_embeddings
        smoke = "release.recipe: smoke_prompt_tokens + smoke_new_tokens"
        for name, value, (bound_name, bound) in (
            ("evaluation.recipe.sequence_length", evaluation.sequence_length, positions),
            ("evaluation.recipe.max_new_tokens", evaluation.max_new_tokens + 1, positions),
            ("evaluation.recipe.max_answer_tokens", evaluation.max_answer_tokens + 1, positions),
            (smoke, release.smoke_prompt_tokens + release.smoke_new_tokens, positions),
            (smoke, release.smoke_prompt_tokens + release.smoke_new_tokens, ("serving.resources.context_length", served.context_length)),
        ):
            if value > bound:
                raise ValueError(f"{name} needs {value} positions, {bound_name} is {bound}: lower the first or raise the second")
        widths = {"hidden_size": model.hidden_size, "num_attention_heads x head_dim": model.num_attention_heads * model.head_dim}
        widths |= {"intermediate_size": model.intermediate_size} if model.first_k_dense_replace else {}
        widths |= {"moe_intermediate_size": model.moe_intermediate_size} if model.first_k_dense_replace < model.num_hidden_layers else {}
        odd = [f"{name} ({width})" for name, width in widths.items() if width % Q8_0_BLOCK]
        if "Q8_0" in release.gguf_types and odd:
            raise ValueError(
                f"release.recipe.gguf_types holds Q8_0, whose rows are multiples of {Q8_0_BLOCK}: model.recipe {' and '.join(odd)} "
                "cannot be; leave Q8_0 out, or choose such sizes"
            )
        return self

    @model_validator(mode="after")
    def _steps_hold_a_row(self) -> Self:
        for phase in self.phases:
            course, length = self.course_of(phase), phase.recipe.sequence_length
            if course.start_batch_tokens < length:
                raise ValueError(
                    f"course {course.name}: start_batch_tokens ({course.start_batch_tokens}) holds no sequence of phase {phase.name} "
                    f"({length} tokens): raise it"
                )
        return self

    def course_of(self, phase: PhaseSection) -> CourseRecipe:
        """The course whose token axis the phase lies on."""
        return next(course.recipe for course in self.courses if phase.name in course.recipe.phases)

    def packed_before(self, phase: PhaseSection) -> tuple[PhaseSection, ...]:
        """The phases of the course before this one that read packed rows: it goes on in the documents where they stopped."""
        before = self.course_of(phase).phases
        before = before[: before.index(phase.name)]
        return tuple(section for section in self.phases if section.name in before and not section.recipe.samples_answers)

    def course_start_tokens(self, phase: PhaseSection) -> int:
        """Tokens of the course that lie before the phase."""
        before = self.course_of(phase).phases
        budgets = {section.name: section.recipe.num_tokens for section in self.phases}
        return sum(budgets[name] for name in before[: before.index(phase.name)])

    def course_num_tokens(self, phase: PhaseSection) -> int:
        """Length of the whole course in tokens."""
        budgets = {section.name: section.recipe.num_tokens for section in self.phases}
        return sum(budgets[name] for name in self.course_of(phase).phases)

    def training_recipe(self, phase: PhaseSection) -> TrainingRecipe:
        """What decides the result of training the phase."""
        shared = phase.recipe.model_dump(include=set(TrainingRecipe.model_fields) & set(PhaseRecipe.model_fields))
        return TrainingRecipe(
            **shared, phase=phase.name, model=self.model.recipe, course=self.course_of(phase),
            course_start_tokens=self.course_start_tokens(phase), course_num_tokens=self.course_num_tokens(phase),
        )  # fmt: skip


NUM_SPECIAL_TOKENS = 36
"""<|endoftext|> ... <|end_of_box|>, ids 151329-151364 in GLM-4.5/4.6 (glm-4-9b tokenizer_config and copies)."""
