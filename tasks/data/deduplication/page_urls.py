"""Normalises page URLs, as Arrow columns, so that one page has one spelling.

Some parts do not name another page: scheme and `www.`, the default port, an anchor, a trailing slash, parameters that
only track visitors or hold their session, and another encoding of the same characters. `#!` and `#/` are routes of a
page's own script and stay. Some parts may or may not name another page (order of parameters, mobile hosts,
`index.html`). They are left to the comparison of texts: a wrong guess here loses a page. courlan takes 3.9 times as
long and gives 14 of 16 pairs of one page two spellings, 10 where scheme, `www.` and trailing slash are cut from its
result (benchmarks/data/page_urls.py). Runs in executors: imports no Spark.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pyarrow as pa

URL = r"^(?i:https?)://(?:[^/?#@]*@)?(?P<host>[^/?#:]+)(?P<port>:[0-9]*)?(?P<path>[^?#]*)(?P<query>\?[^#]*)?(?P<route>#[!/].*)?(?:#.*)?$"
TRACKING = r"(?i)([?&])(?:utm_[^=&]*|gclid|dclid|fbclid|msclkid|yclid|igshid|mc_cid|mc_eid|_ga|ref_src|phpsessid|jsessionid)=[^&]*"  # noqa: E501
SESSION = r"(?i);(?:jsessionid|phpsessid)=[^/;]*"
SPELLED = r"%|xn--|[^\x00-\x7f]"
"""Matches text that can be written in more than one way."""
ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def normalised_urls(urls: pa.Array) -> pa.Array:
    """The page of every URL, empty where it is no http(s) URL."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def call(name: str, *arrays: object, **options: object) -> pa.Array:
        return cast("pa.Array", getattr(pc, name)(*arrays, **options))

    parts = call("extract_regex", urls.cast(pa.string()), pattern=URL)
    host, port, path, query, route = (call("coalesce", call("struct_field", parts, [index]), "") for index in range(5))
    host = call("replace_substring_regex", call("utf8_lower", host), pattern=r"^www\.|\.$", replacement="")
    port = call("replace_substring_regex", port, pattern=r"^:(80|443)?$", replacement="")
    query = call("replace_substring_regex", query, pattern=TRACKING, replacement=r"\1")
    query = call("replace_substring_regex", query, pattern=r"[?&]+$", replacement="")
    query = call("replace_substring_regex", query, pattern=r"&{2,}", replacement="&")
    query = call("replace_substring_regex", query, pattern=r"^\?&+", replacement="?")
    path = call("replace_substring_regex", path, pattern=SESSION, replacement="")
    path, route = (
        call("replace_substring_regex", part, pattern=r"(?:#!?)?/*$", replacement="") for part in (path, route)
    )
    host, tail = (
        _respelled(host, _in_unicode),
        _respelled(call("binary_join_element_wise", path, query, route, ""), _escaped),
    )
    return call("binary_join_element_wise", host, port, tail, "")


def _respelled(texts: pa.Array, spell: Callable[[str], str]) -> pa.Array:
    """Apply `spell` to the few texts that can be written in more than one way: only these are processed in Python."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_open = pc.match_substring_regex(texts, SPELLED)  # pyright: ignore[reportAttributeAccessIssue]
    spelled = pa.array([spell(text) for text in texts.filter(is_open).to_pylist()], pa.string())
    return pc.replace_with_mask(texts, is_open, spelled)  # pyright: ignore[reportAttributeAccessIssue]


def _escaped(text: str) -> str:
    """The normal form of RFC 3986, 6.2.2: unreserved characters unescaped; escaped and non-ASCII ones as %XX with
    capital digits."""
    encoded = "".join(
        char if char.isascii() else "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "replace")) for char in text
    )

    def plain(escape: re.Match[str]) -> str:
        char = chr(int(escape[1], 16))
        return char if char in UNRESERVED else escape[0].upper()

    return ESCAPE.sub(plain, encoded)


def _in_unicode(host: str) -> str:
    """A host name with its Punycode labels decoded, except broken ones and those of half a surrogate pair, which no
    column holds."""
    labels = []
    for label in host.split("."):
        try:
            decoded = label[4:].encode("ascii").decode("punycode") if label.startswith("xn--") else label
            decoded.encode()
        except UnicodeError:
            decoded = label
        labels.append(decoded)
    return ".".join(labels)
