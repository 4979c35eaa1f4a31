"""The report about the quality of the data: scores, classifiers, buckets, personal data, and how well the tokenizer
fits."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.data.tokenizer.tokenizer_report import ALL
from tasks.prepared_data import PreparedData, PreparedDocuments
from tasks.report.report_page import Cell, heading, paragraph, table

NUM_LANGUAGES = 20
TOKENIZER_FILE = "tokenizer_report.parquet"


def quality_section(data: PreparedData, documents: PreparedDocuments) -> str:
    """What is known about the documents besides their number."""
    return "".join(
        (
            heading("Scores"),
            _scores(data, documents),
            heading("Languages"),
            _languages(documents),
            heading("Tokenizer"),
            _tokenizer(data),
        )
    )


def _scores(data: PreparedData, documents: PreparedDocuments) -> str:
    scored, filtered, classifiers, masked = (
        documents.scored.record,
        documents.filtered.record,
        documents.classifiers.record,
        documents.masked.record,
    )
    names = sorted({*scored.quantiles, *scored.unscored})
    shares = sorted({share for quantiles in scored.quantiles.values() for share in quantiles}, key=float)
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            *(
                f"{scored.quantiles[name][share]:.4g}" if share in scored.quantiles.get(name, {}) else ""
                for share in shares
            ),
            scored.unscored.get(name, 0),
        )
        for name in names
    ]
    parts = [table(("score", *(f"{float(share):.0%} are below" for share in shares), "documents without it"), rows)]
    notes = [
        f"{kind}: area under the curve {classifiers.auc[kind]:.3f} on held-out labels, "
        f"{classifiers.num_records[kind]:,} records"
        for kind in classifiers.kinds
    ]
    notes += [f"no classifier for {kind}: {reason}" for kind, reason in sorted(classifiers.unused.items())]
    parts.append(
        paragraph("; ".join(notes) or "The sources hold no labelled records, so no classifier was trained.", "soft")
    )
    if classifiers.flagged_sentences:
        flagged = [
            (group.replace("_", " "), f"{share:.0%}") for group, share in sorted(classifiers.flagged_sentences.items())
        ]
        parts += [heading("Sentences of the toxicity contract that are flagged"), table(("group", "flagged"), flagged)]
    if filtered.bucket_floors:
        counts = [(_bucket(bucket), count) for bucket, count in sorted(filtered.documents_by_bucket.items())]
        parts += [heading("Quality buckets"), table(("bucket, from the lowest", "documents kept"), counts)]
    in_chats = data.chats.record.masked
    replaced = [(kind, count, in_chats[kind]) for kind, count in masked.masked.items() if count or in_chats[kind]]
    if masked.masked:
        columns = ("kind", "places in documents", "in conversations")
        parts.append(heading("Personal data that was replaced"))
        parts.append(table(columns, replaced) if replaced else paragraph("None was found.", "soft"))
    return "".join(parts)


def _bucket(number: int) -> str:
    return "no quality score" if number < 0 else str(number)


def _sorted(counts: Mapping[str, int]) -> list[tuple[Cell, ...]]:
    return [(name, count) for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count]


def _languages(documents: PreparedDocuments) -> str:
    by_language, models = documents.scored.record.documents_by_language, documents.ngram_model.record
    rows = [(name or "none found", count) for name, count in _sorted(by_language)]
    rest = sum(int(str(count)) for _, count in rows[NUM_LANGUAGES:])
    shown = [*rows[:NUM_LANGUAGES], *([(f"{len(rows) - NUM_LANGUAGES} others", rest)] if rest else [])]
    unjudged = sum(count for name, count in by_language.items() if name not in models.languages)
    note = (
        f"Perplexity is ranked among held-out reference text in {', '.join(models.languages)}; {unjudged:,} documents "
        f"of other languages "
        "have none, and pass its bound."
        if models.languages
        else "Perplexity is not measured: no language has enough reference text."
    )
    return table(("language", "documents"), shown) + paragraph(note, "soft")


def _tokenizer(data: PreparedData) -> str:
    """Fertility by domain and by language, those with the most text first; pairs of both are in the artifact."""
    import pyarrow.parquet as pq

    columns = ("tokenizer", "domain", "language", "num_bytes", "tokens_per_word", "bytes_per_token", "vocabulary_share")
    rows = pq.read_table(data.tokenizer.path(TOKENIZER_FILE), columns=list(columns)).to_pylist()
    single = [row for row in rows if ALL in (row["domain"], row["language"])]
    single.sort(key=lambda row: (row["tokenizer"], row["language"] != ALL, row["domain"] != ALL, -row["num_bytes"]))
    kept = [row for row in single if row["language"] == ALL]
    for name in sorted({row["tokenizer"] for row in single}):
        kept += [row for row in single if row["tokenizer"] == name and row["language"] != ALL][:NUM_LANGUAGES]
    cells = [
        (
            row["tokenizer"],
            _all(row["domain"]),
            _all(row["language"]),
            row["num_bytes"],
            f"{row['tokens_per_word']:.3f}",
            f"{row['bytes_per_token']:.3f}",
            f"{row['vocabulary_share']:.1%}",
        )
        for row in kept
    ]
    names = (
        "tokenizer",
        "domain",
        "language",
        "bytes measured",
        "tokens per word",
        "bytes per token",
        "vocabulary used",
    )
    return table(names, cells)


def _all(name: str) -> str:
    return "all" if name == ALL else name
