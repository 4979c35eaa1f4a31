"""How source files become documents: reading, extraction, boilerplate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.schema.base import Frozen


class IngestRecipe(Frozen):
    max_record_bytes: int = Field(gt=0)
    """Most bytes of a line, page, member or row. A longer one is rejected, reason `record_too_long`, and no more of it
    is held in memory. A longer plain text is read as several records, cut at line ends."""
    max_source_bytes: int = Field(gt=0)
    """Bytes of source text per run, divided evenly among the domains; what a domain does not need goes to the others.
    Where a domain holds more than its part, documents are chosen by the hash of their position, so the limit holds on
    average."""
    max_rejected_share: float = Field(ge=0, le=1)
    """Share of unreadable records (damaged, not UTF-8, without text, empty, with an id that an earlier one has) above
    which the run stops and names them. Records that hold no text by their nature (a redirect, a picture in a crawl) are
    counted, but are not part of the share."""


class ExtractionRecipe(Frozen):
    html_extractor: Literal["combined", "trafilatura", "readability", "resiliparse"]
    """Finds the main text of a page. combined: close to the best library on each of four sets of pages (docs/data.md);
    resiliparse: several times faster and with more boilerplate left."""
    max_markup_chars: int = Field(gt=0)
    """A longer page is dropped, reason `markup_too_large`; so is one whose nesting or tags would make parsing take
    quadratic time."""
    min_chars: int = Field(ge=0)
    """A page with less text is dropped, reason `too_short`; the filter judges text that needs no extraction."""
    max_failed_share: float = Field(ge=0, le=1)
    """Share of a collection's pages that give no text (no_main_content, broken_markup, markup_too_large) above which
    the run stops and shows examples."""
    max_document_chars: int = Field(gt=0)
    """Longer documents are cut at paragraph ends into pieces of at most this many characters, each with its own
    offset."""


class BoilerplateRecipe(Frozen):
    min_documents: int = Field(gt=1)
    """A paragraph that this many documents of one collection and host hold is boilerplate; one of them keeps it."""
    min_words: int = Field(gt=0)
    """Shorter paragraphs stay: headings such as `See also` are the same in many articles and belong to each."""
    min_remaining_chars: int = Field(ge=0)
    """A document that lost paragraphs and has less text left is dropped, reason `only_boilerplate`."""
    max_removed_share: float = Field(gt=0, le=1)
    """Share of a collection's bytes above which the run stops and shows examples."""
