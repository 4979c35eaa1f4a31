"""Counts how often tokenizers use each of their tokens, per domain and language.

Runs in executors: imports no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from configs.files.stored_files import StoredFile, local_copy
from tasks.data.records.documents import names_of
from tasks.data.text.text_encoder import TextEncoder

if TYPE_CHECKING:
    import pyarrow as pa

USE_COLUMNS = "tokenizer string, domain string, language string, token_id long, num_tokens long"


def count_token_use(
    batches: Iterator[pa.RecordBatch], tokenizers: Mapping[str, StoredFile]
) -> Iterator[pa.RecordBatch]:
    """USE_COLUMNS of batches with domain, language and text; a row may come more than once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    encoders = {name: TextEncoder(local_copy(file)) for name, file in tokenizers.items()}
    for batch in batches:
        table = pa.Table.from_batches([batch])
        cells = table.group_by(["domain", "language"]).aggregate([]).to_pylist()
        for cell in cells:
            of_cell = table.filter((pc.field("domain") == cell["domain"]) & (pc.field("language") == cell["language"]))
            texts = of_cell["text"].combine_chunks()
            for name, encoder in encoders.items():
                ids, _ = encoder.encode(texts, None)
                used, counts = np.unique(ids.astype(np.int64), return_counts=True)
                same = [
                    pa.array([value] * len(used), pa.string()) for value in (name, cell["domain"], cell["language"])
                ]
                columns = [*same, pa.array(used), pa.array(counts.astype(np.int64))]
                yield pa.RecordBatch.from_arrays(columns, names=names_of(USE_COLUMNS))
