"""Page URLs in one spelling, as Arrow columns. Runs in executors: imports no Spark.

Scheme and `www.` do not name another page, nor do the default port, the fragment, a trailing slash or parameters that only track visitors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pyarrow as pa

PAGE_RECORD_COLUMNS = (
    "id string, source string, offset long, piece long, is_earlier boolean, quality double, num_chars long, page string, file string"
)
URL = r"^(?i:https?)://(?:[^/?#@]*@)?(?P<host>[^/?#:]+)(?P<port>:[0-9]*)?(?P<path>[^?#]*)(?P<query>\?[^#]*)?(?:#.*)?$"
TRACKING = r"(?i)([?&])(?:utm_[^=&]*|gclid|dclid|fbclid|msclkid|yclid|igshid|mc_cid|mc_eid|_ga|ref_src|phpsessid|jsessionid)=[^&]*"


def normalised_urls(urls: pa.Array) -> pa.Array:
    """The page of every URL, empty where it is no http(s) URL."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def call(name: str, *arrays: object, **options: object) -> pa.Array:
        return cast("pa.Array", getattr(pc, name)(*arrays, **options))

    parts = call("extract_regex", urls.cast(pa.string()), pattern=URL)
    host, port, path, query = (call("coalesce", call("struct_field", parts, [place]), "") for place in range(4))
    host = call("replace_substring_regex", call("utf8_lower", host), pattern=r"^www\.|\.$", replacement="")
    port = call("replace_substring_regex", port, pattern=r"^:(80|443)?$", replacement="")
    query = call("replace_substring_regex", query, pattern=TRACKING, replacement=r"\1")
    query = call("replace_substring_regex", query, pattern=r"[?&]+$", replacement="")
    query = call("replace_substring_regex", query, pattern=r"&{2,}", replacement="&")
    query = call("replace_substring_regex", query, pattern=r"^\?&+", replacement="?")
    path = call("replace_substring_regex", path, pattern=r"/+$", replacement="")
    return call("binary_join_element_wise", host, port, path, query, "")


def page_records(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """PAGE_RECORD_COLUMNS of the documents that have a page URL; file: the source file that the record lies in."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = [column.split(" ")[0] for column in PAGE_RECORD_COLUMNS.split(", ")]
    for batch in batches:
        page = normalised_urls(batch.column("url"))
        file = pc.replace_substring_regex(batch.column("source"), pattern="!.*$", replacement="")  # pyright: ignore[reportAttributeAccessIssue]
        columns = {"page": page, "file": file}
        arrays = [columns[name] if name in columns else batch.column(name) for name in names]
        yield pa.RecordBatch.from_arrays(arrays, names=names).filter(pc.not_equal(page, ""))  # pyright: ignore[reportAttributeAccessIssue]
