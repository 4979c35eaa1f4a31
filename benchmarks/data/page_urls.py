"""One spelling per page URL: ours beside courlan, which trafilatura brings.

`python -m benchmarks.data.page_urls [--write]`   (../shared/data as in docs/data.md)

The speed is that over the different links of real pages, in processor seconds, in turn, round by round. Decisions are
those on GROUPS: each group holds spellings of one page, and no two groups name the same page. `merged` counts pairs of
different pages that get one spelling (of each, one would be lost), `missed` counts pairs of one page that get two.
courlan keeps scheme, `www.` and trailing slash: `cut` is its clean_url after which they are removed, the others are its
functions as they are.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import combinations

import pyarrow as pa
from courlan import clean_url, normalize_url

from benchmarks.results import WRITE_FLAG, report
from infra.code_digest import ROOT
from tasks.data.deduplication.page_urls import normalised_urls

PAGES = ROOT.parent / "shared" / "data" / "html" / "article_extraction.jsonl.gz"
LINK = re.compile(r"href=[\"'](https?://[^\"'\s>]+)")
MAX_LINKS, ROUNDS = 20_000, 5
GROUPS = (
    ("https://WWW.Example.org:443/a/b/?utm_source=x&b=2&gclid=3#part", "http://user:word@example.org/a/b?b=2"),
    ("HTTP://Example.org.", "https://example.org/"),
    ("https://example.org/?a=1&utm_x=2&c=3", "http://www.example.org?a=1&c=3"),
    ("https://example.org/?utm_x=2&c=3", "https://example.org?c=3"),
    ("https://example.org:8080/A/", "http://example.org:8080/A"),
    ("https://example.org:8080/a",),
    ("https://example.org/a?utm_x=2", "https://example.org/a#top", "https://example.org/a/"),
    ("https://example.org/?sid=4",),
    ("https://example.org/?sid=5",),
    ("https://example.org/a;jsessionid=8F.node1/b;v=2?x=1", "https://example.org/a/b;v=2?x=1"),
    ("https://example.org/a;JSESSIONID=8F?x=1", "https://example.org/a?x=1"),
    ("https://example.org/#!/topic/1", "http://example.org/#!/topic/1/"),
    ("https://example.org/#!/topic/2",),
    ("https://example.org/app/#/topic/2/", "https://example.org/app#/topic/2"),
    ("https://example.org/app#!/", "https://example.org/app"),
    ("https://example.org/%7euser/%e4%b8%ad?q=%2f%41#top", "https://example.org/~user/中?q=%2FA"),
    ("https://example.org/100%/%zz",),
    ("http://xn--mnchen-3ya.de/a", "http://MÜNCHEN.de/a"),
    ("http://xn--fa-hia.de", "http://faß.de"),
    ("http://fass.de",),
    ("http://xn--99999999.de",),
    ("https://m.example.org/a",),
)
"""Spellings of pages, after tests/data/deduplication/test_deduplication.py."""


def _cut(url: str) -> str:
    return re.sub(r"^https?://(?:www\.)?", "", clean_url(url) or "").rstrip("/")


PEERS: dict[str, Callable[[str], str]] = {
    "clean_url": lambda url: clean_url(url) or "",
    "normalize_url": normalize_url,
    "normalize_url strict": lambda url: normalize_url(url, strict=True, trailing_slash=False),
    "cut": _cut,
}


def _ours(urls: list[str]) -> list[str]:
    return normalised_urls(pa.array(urls, pa.string())).to_pylist()


def _links() -> list[str]:
    """Different links of real pages, in their order."""
    with gzip.open(PAGES, "rt", encoding="utf-8") as file:
        pages = [json.loads(line)["html"] for line in file]
    links = dict.fromkeys(html.unescape(link) for page in pages for link in LINK.findall(page))
    return list(links)[:MAX_LINKS]


def _decisions(spell: Callable[[list[str]], list[str]]) -> dict[str, int]:
    group_of = [number for number, group in enumerate(GROUPS) for _ in group]
    spelled = spell([url for group in GROUPS for url in group])
    pairs = [
        (first[0] == second[0], first[1] == second[1])
        for first, second in combinations(zip(group_of, spelled, strict=True), 2)
    ]
    return {
        "merged": sum(is_equal and not is_same for is_same, is_equal in pairs),
        "missed": sum(is_same and not is_equal for is_same, is_equal in pairs),
    }


def _seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(WRITE_FLAG, action="store_true")
    parser.parse_args()
    if not PAGES.is_file():
        raise SystemExit(f"this benchmark needs {PAGES}: put the shared data there")
    links = _links()
    _ours(links[:10])  # loads Arrow's functions
    speeds: dict[str, list[float]] = {"ours": [], **{name: [] for name in PEERS}}
    for _ in range(ROUNDS):
        speeds["ours"].append(len(links) / _seconds(lambda: _ours(links)))
        for name, spell in PEERS.items():
            speeds[name].append(len(links) / _seconds(lambda spell=spell: [spell(link) for link in links]))
    decisions = {"ours": _decisions(_ours)} | {
        name: _decisions(lambda urls, spell=spell: [spell(url) for url in urls]) for name, spell in PEERS.items()
    }
    ratios = [ours / peer for ours, peer in zip(speeds["ours"], speeds["clean_url"], strict=True)]
    report(
        "page_urls",
        ours=statistics.median(speeds["ours"]),
        peer=statistics.median(speeds["clean_url"]),
        unit="URLs per second of one core",
        ratio=round(statistics.median(ratios), 3),
        ratios=[round(ratio, 3) for ratio in ratios],
        links=len(links),
        medians={name: round(statistics.median(values)) for name, values in speeds.items()},
        decisions=decisions,
        courlan=version("courlan"),
    )


if __name__ == "__main__":
    main()
