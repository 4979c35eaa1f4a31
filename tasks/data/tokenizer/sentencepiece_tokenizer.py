"""A tokenizer that SentencePiece trains, as an object of the `tokenizers` library like byte-level BPE.

Text is not changed before encoding (no normalization, no leading blank). Characters without a piece are written as
bytes. So decoding gives every text back, except the sign U+2581, which SentencePiece itself uses for the blank.
Training takes the sample on one machine, in one thread.
"""

from __future__ import annotations

import io
from itertools import chain
from typing import TYPE_CHECKING

from model.text.tokenizer_layout import added_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer

    from configs.schema import TokenizerRecipe

MODEL_FILE = "tokenizer.model"
BLANK = "▁"
UNKNOWN = "<unk>"
SCORE_STEPS = 256
MODEL_TYPES = {"sentencepiece_bpe": "bpe", "sentencepiece_unigram": "unigram"}


def train_sentencepiece(
    texts: list[str], recipe: TokenizerRecipe, special_tokens: tuple[str, ...], model_path: Path
) -> Tokenizer:
    """Train on the lines of texts, write SentencePiece's model, and return it as a tokenizer of `tokenizers`.

    Raises ValueError with SentencePiece's message where the texts do not hold a vocabulary of this size."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain.from_iterable(text.split("\n") for text in texts),
            model_writer=model,
            model_type=MODEL_TYPES[recipe.kind],
            vocab_size=recipe.num_ordinary_tokens,
            split_digits=recipe.split_digits,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            character_coverage=0.9995,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=1,
            max_sentence_length=2**30,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"SentencePiece cannot learn tokenizer.num_ordinary_tokens {recipe.num_ordinary_tokens} from this sample "
            f"({error}): "
            "lower it, raise tokenizer.sample_chars or bring more text"
        ) from error
    model_path.write_bytes(_with_exact_scores(model.getvalue()))
    tokenizer = as_tokenizer(sentencepiece.SentencePieceProcessor(model_file=str(model_path)), recipe.kind)
    tokenizer.add_tokens(added_tokens(special_tokens))
    return tokenizer


def _with_exact_scores(model: bytes) -> bytes:
    """The model with scores in steps of 1/256: sums of some thousands have no rounding errors in 32 bits, so the
    processor and the `tokenizers` library, which adds 64-bit numbers, make the same choice among equally good
    segmentations."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * SCORE_STEPS) / SCORE_STEPS
    return proto.SerializeToString()


def as_tokenizer(processor: SentencePieceProcessor, kind: str) -> Tokenizer:
    """The processor's vocabulary as a model of `tokenizers` that gives the same ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = range(processor.get_piece_size())
    pieces = [(processor.id_to_piece(number), processor.get_score(number)) for number in ids]
    if kind == "sentencepiece_unigram":
        model = models.Unigram(pieces, unk_id=processor.unk_id(), byte_fallback=True)
    else:
        ordinary = {
            piece: score
            for number, (piece, score) in enumerate(pieces)
            if not processor.is_byte(number) and piece != UNKNOWN
        }
        vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
        model = models.BPE(vocabulary, merges_of(ordinary), unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", BLANK)  # pyright: ignore[reportAttributeAccessIssue]
    # A piece has a blank only at its beginning, so words are encoded one by one: that is faster, and scores of long
    # texts lose no digits.
    words = pre_tokenizers.Split(BLANK, "merged_with_next")
    # Characters that spell the name of a byte are characters: the library's unigram model would take the byte.
    names = pre_tokenizers.Split(Regex(r"<(?=0x[0-9A-F]{2}>|unk>)"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([names, words])  # pyright: ignore[reportAttributeAccessIssue]
    parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def merges_of(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All merges of two pieces to one, in the order of SentencePiece's scores for the merged pieces."""
    order = {piece: number for number, piece in enumerate(scores)}
    merges = [
        (-score, order[piece[:cut]], order[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(merges)]
