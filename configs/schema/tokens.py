"""How the kept documents become shards of token ids: repositories, tokenizer, shards."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import Domain, Frozen

NUM_SPECIAL_TOKENS = 36
"""<|endoftext|> ... <|end_of_box|>, ids 151329-151364 in GLM-4.5/4.6 (glm-4-9b tokenizer_config and copies)."""


class RepositoryRecipe(Frozen):
    """Documents of domain `repository`: the files of one repository one after the other, as far as they survived the
    filters."""

    max_document_chars: int = Field(gt=0)
    """A longer repository is cut between files; more than the longest training sequence holds is of no use."""


class TokenizerRecipe(Frozen):
    kind: Literal["bpe", "sentencepiece_bpe", "sentencepiece_unigram", "given"]
    """bpe: byte-level BPE with GLM's pre-tokenizer, which llama.cpp reads too. sentencepiece_*: trained by
    SentencePiece on one machine, exported to the same files. Such a tokenizer is not converted to GGUF, so a run with a
    release is refused. given: the file `path`, byte-level BPE in GLM's layout; nothing is trained, and the settings of
    the sample have no effect."""
    path: str
    """given: the tokenizer.json of the checkpoint that training starts from; "" for that in the directory of `--start`,
    and for the other kinds."""
    sha256: str = Field(pattern="^([0-9a-f]{64})?$")
    """sha256 of that file: a run with another file stops."""
    num_ordinary_tokens: int = Field(ge=256)
    """Tokens before the special ones; 151,329 in GLM-4.5/4.6."""
    special_tokens: Literal["glm", "s1_256"]
    """glm: the 36 of GLM-4.5/4.6. s1_256: S1's 256, GLM's first, the rest reserved (model/text/tokenizer_layout.py)."""
    sample_chars: int = Field(gt=0)
    """Characters of training text that the tokenizer is learned from, chosen by document hash, exact to a document per
    domain and language."""
    domain_shares: dict[Domain, Annotated[float, Field(ge=0)]]
    """Weight of each domain in the sample; a domain without one is left out. Text that a domain lacks is reported, not
    replaced by others. {}: as in the corpus, which a single stage on somebody's directory needs, as its domains are not
    known here. For a run with the phases of full.yaml, {web: 0.40, multilingual: 0.12, code: 0.30, math: 0.06,
    synthetic: 0.12} is how they mix the first 22T tokens."""
    language_shares: dict[str, Annotated[float, Field(ge=0)]]
    """The same by language, as found in the text, else as the source says, else "und". With both, both hold as far as
    the corpus allows."""
    split_digits: bool
    """Whether every digit is a token, with which a small model learns arithmetic from fewer examples. false: numbers
    are learned like words, as in GLM, whose pre-tokenizer cuts them into threes."""
    min_word_count: int = Field(gt=0)
    """bpe: rarer words of the sample are left out before merges are learned, which bounds memory and changes merges; 1
    keeps all."""
    compare_with: str
    """A tokenizer.json whose figures are shown beside ours in the step's report; "" for none. Its digest is in the
    record, not in the key."""

    @model_validator(mode="after")
    def _file_has_a_digest(self) -> Self:
        if bool(self.path) != bool(self.sha256) or (self.path and self.kind != "given"):
            raise ValueError(
                f"path ({self.path!r}) and sha256 ({self.sha256!r}) go together and with kind given, kind is "
                f'{self.kind}: give both (`sha256sum FILE` prints the digest), or write "" for both'
            )
        return self

    @property
    def num_special_tokens(self) -> int:
        """Rows of the vocabulary after the ordinary tokens."""
        return {"glm": NUM_SPECIAL_TOKENS, "s1_256": 256}[self.special_tokens]


class ShardRecipe(Frozen):
    multiple_of: int = Field(gt=0)
    """A domain's shards are a multiple of this: data-parallel copies x pipeline groups of the largest phase, so that
    every reader has the same number. 1: as many as the size of the text requires."""
