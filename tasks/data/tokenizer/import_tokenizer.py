"""Step: takes over the tokenizer.json that the configuration names, in GLM's layout; nothing is trained.

It writes the files of train_tokenizer. tokenizer.json is the given file, byte for byte; its configuration and chat
template are ours, as for every model that is trained here. The report has no rows.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from infra.step import Output, digest_of, step
from model.text.tokenizer_layout import SPECIAL_TOKENS_BY_LAYOUT, byte_characters
from tasks.data.tokenizer.tokenizer_report import write_no_report
from tasks.data.tokenizer.train_tokenizer import TOKENIZER_FILES, TrainedTokenizer, write_companions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import TokenizerRecipe


@step(content=TOKENIZER_FILES, distributions=("tokenizers", "pyarrow", "gguf"))
def import_tokenizer(*, recipe: TokenizerRecipe, output: Output) -> TrainedTokenizer:
    """Raises ValueError for a file that is not the named one, or that shards, chats or the release cannot use."""
    tokenizer = read_given_tokenizer(recipe)
    specials = SPECIAL_TOKENS_BY_LAYOUT[recipe.special_tokens]
    shutil.copyfile(recipe.path, output.path("tokenizer.json"))
    write_companions(tokenizer, specials, output)
    write_no_report(output.path("tokenizer_report.parquet"))
    return TrainedTokenizer(
        num_tokens=tokenizer.get_vocab_size(),
        num_ordinary_tokens=recipe.num_ordinary_tokens,
        special_ids={token: recipe.num_ordinary_tokens + number for number, token in enumerate(specials)},
        tokenizer_digest=digest_of(tokenizer.to_str()),
        num_sample_documents=0,
        num_sample_chars=0,
        given_sha256=recipe.sha256,
    )


def read_given_tokenizer(recipe: TokenizerRecipe) -> Tokenizer:
    """The tokenizer of kind `given`. Raises ValueError, as import_tokenizer does: a run asks this before any work."""
    from tokenizers import Tokenizer

    path = Path(recipe.path)
    if not recipe.path:
        raise ValueError(
            "tokenizer.kind is given and no file is named: set tokenizer.path and sha256, or name with --start the "
            "directory of a checkpoint that holds a tokenizer.json"
        )
    if not path.is_file():
        raise ValueError(f"tokenizer.path: {path.absolute()} is no file: name the tokenizer.json of your checkpoint")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != recipe.sha256:
        raise ValueError(
            f"tokenizer.sha256: {path} has {digest}, the configuration {recipe.sha256}: name the file that is meant, "
            "or its digest"
        )
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"tokenizer.path: {path} is no readable tokenizer.json ({error}): copy it again") from error
    _refuse_other_algorithm(path, recipe, tokenizer)
    _refuse_other_vocabulary(path, recipe, tokenizer)
    return tokenizer


def _refuse_other_algorithm(path: Path, recipe: TokenizerRecipe, tokenizer: Tokenizer) -> None:
    """Raises ValueError unless it is the byte-level BPE that our shards and llama.cpp read alike."""
    from model.formats.gguf_vocabulary import read_vocabulary

    try:
        read_vocabulary(path, 1 + max(tokenizer.get_vocab().values(), default=0))
    except ValueError as error:
        raise ValueError(f"tokenizer.path: {error}; give the tokenizer.json of a GLM-4.5 or GLM-4.6 model") from error
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        raise ValueError(
            f"tokenizer.path: {path} truncates or pads, which would change the data: set truncation and padding to "
            "null in it, and tokenizer.sha256 to its new digest"
        )
    absent = sum(tokenizer.token_to_id(character) is None for character in byte_characters())
    if absent:
        raise ValueError(
            f"tokenizer.path: {path} lacks {absent} of the 256 byte tokens, so some text has no ids: give the "
            "tokenizer.json of a GLM-4.5 or GLM-4.6 model"
        )


def _refuse_other_vocabulary(path: Path, recipe: TokenizerRecipe, tokenizer: Tokenizer) -> None:
    """Raises ValueError unless the special tokens of the layout follow the ordinary ones without a gap."""
    specials = SPECIAL_TOKENS_BY_LAYOUT[recipe.special_tokens]
    ids = {token: tokenizer.token_to_id(token) for token in specials}
    absent = [token for token, identity in ids.items() if identity is None]
    if absent:
        raise ValueError(
            f"tokenizer.path: {path} has no {', '.join(absent[:3])} ({len(absent)} of {len(specials)} special tokens "
            f"of layout {recipe.special_tokens} are absent), so the chat template cannot be written with it: give the "
            "tokenizer.json of a GLM-4.5 or GLM-4.6 model"
        )
    num_ordinary = min(identity for identity in ids.values() if identity is not None)
    if list(ids.values()) != list(range(num_ordinary, num_ordinary + len(specials))):
        raise ValueError(
            f"tokenizer.path: the special tokens of {path} do not follow one another in the order of layout "
            f"{recipe.special_tokens}: give the tokenizer.json of a GLM-4.5 or GLM-4.6 model"
        )
    others = tokenizer.get_vocab_size() - num_ordinary - len(specials)
    if others:
        raise ValueError(
            f"tokenizer.path: {path} has {others} tokens beside {num_ordinary} ordinary ones and the {len(specials)} "
            f"special ones of layout {recipe.special_tokens}: give the tokenizer.json without added tokens"
        )
    if num_ordinary != recipe.num_ordinary_tokens:
        raise ValueError(
            f"tokenizer.num_ordinary_tokens is {recipe.num_ordinary_tokens}, {path} has {num_ordinary}: set it to that"
        )
