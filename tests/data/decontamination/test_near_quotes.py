"""A long item is known from a quotation with changes; another item, another number and other text are not."""

from __future__ import annotations

import random

import pytest

from benchmarks.data import decontamination
from benchmarks.inputs.quotation_disguises import DEVELOPED, UNSEEN
from configs.load import load_scale
from tasks.data.decontamination.near_quotes import MIN_SHARE, MIN_WORDS, PASSAGE_WORDS
from tasks.data.decontamination.overlap import MIN_WORDS_OF_TEXT, OverlapIndex, ProtectedTexts, Protection, build_index
from tasks.data.decontamination.protected_items import index_items
from tests.support.data_inputs import SHARED_DATA

SIZE = 13
ITEM = (
    "A farmer sells 48 baskets of apples in spring, and in summer he sells half as many; every basket holds 20 "
    "apples, of which the "
    "merchant returns those that rotted on the road. How many apples did the farmer sell in both seasons, if nothing "
    "was returned?"
)
AROUND = (
    "The weather report for the coast mentioned strong wind and little rain, so ships stayed in port until the "
    "evening of that day. "
)


def index_of(items: list[str], max_items: int = 20) -> OverlapIndex:
    protection = Protection(MIN_WORDS_OF_TEXT, SIZE, False, is_known_from_parts=True)
    return build_index([ProtectedTexts(items, list(range(len(items))), protection)], max_items)


def hit(text: str, items: list[str], max_items: int = 20) -> int:
    return int(index_of(items, max_items).first_hits([AROUND + text + " " + AROUND])[0])


def invented(count: int, seed: int) -> list[str]:
    """Words that occur once."""
    generator = random.Random(seed)
    return ["".join(generator.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(9)) for _ in range(count)]


@pytest.mark.parametrize("name", [*DEVELOPED, *UNSEEN])
def test_a_disguised_item_is_found(name):
    disguised = (DEVELOPED | UNSEEN)[name](ITEM, random.Random(46))
    assert hit(disguised, [ITEM]) == 0


def test_the_same_problem_with_other_numbers_is_another_problem():
    worded = ITEM.replace("in spring", "in autumn").replace("on the road", "on the way")
    worded = " ".join(word for at, word in enumerate(worded.split(" ")) if at % 11)
    assert hit(worded, [ITEM]) == 0
    assert hit(worded.replace("48", "52").replace("20", "24"), [ITEM]) == -1


@pytest.mark.parametrize(("kept", "expected"), [(MIN_SHARE, 0), (MIN_SHARE - 0.05, -1)])
def test_a_passage_is_quoted_from_a_share_of_its_words_on(kept, expected):
    item, other = invented(40, seed=1), invented(40, seed=2)
    run = [at for at in range(40) if at % 10 < 6]  # runs of six words: shorter than an n-gram, longer than a shingle
    stay = set(run[: round(kept * 40)])
    text = " ".join(item[at] if at in stay else other[at] for at in range(40))
    assert hit(text, [" ".join(item)]) == expected


def test_words_in_another_order_and_far_apart_are_no_quotation():
    item = invented(36, seed=3)
    parts = [item[at : at + 6] for at in range(0, 36, 6)]
    assert hit(" ".join(word for part in reversed(parts) for word in part), [" ".join(item)]) == -1
    apart = [word for at, part in enumerate(parts) for word in [*part, *invented(12, seed=10 + at)]]
    assert hit(" ".join(apart), [" ".join(item)]) == -1
    near = [word for at, part in enumerate(parts) for word in [*part, *invented(2, seed=20 + at)]]
    assert hit(" ".join(near), [" ".join(item)]) == 0


@pytest.mark.parametrize(("count", "expected"), [(MIN_WORDS, 0), (MIN_WORDS - 1, -1)])
def test_short_texts_are_found_only_as_they_are(count, expected):
    item = invented(count, seed=4)
    changed = [*item[:7], "instead", *item[8:]]
    assert hit(" ".join(changed), [" ".join(item)]) == expected and hit(" ".join(item), [" ".join(item)]) == 0


def test_a_part_of_a_long_text_is_found():
    item = invented(4 * PASSAGE_WORDS, seed=5)
    part = item[PASSAGE_WORDS : 2 * PASSAGE_WORDS]
    changed = [word for at, word in enumerate(part) if at % 8]
    assert hit(" ".join(changed), [" ".join(item)]) == 0
    assert hit(" ".join(changed[:30]), [" ".join(item)]) == -1


def test_what_many_items_share_is_no_evidence():
    instruction = invented(40, seed=6)
    changed = " ".join(word for at, word in enumerate(instruction) if at % 8)
    items = [f"{' '.join(instruction)} {' '.join(invented(20, seed=30 + number))}" for number in range(4)]
    assert hit(changed, [" ".join(instruction)], max_items=3) == 0
    assert hit(changed, items, max_items=3) == -1


def test_scripts_without_spaces_are_compared_by_character():
    item = "小明有三十六个苹果，他把其中的四分之一给了妹妹，又买了十五个，然后把剩下的苹果平均放进九个篮子里，请问每个篮子里有多少个苹果呢？"  # noqa: E501
    changed = (
        item.replace("妹妹", "弟弟")
        .replace("平均", "全部")
        .replace("请问", "那么")
        .replace("然后", "接着")
        .replace("又买了", "再买了")
    )
    other = "小红有四十八块糖，她把其中的三分之一给了同学，又吃了六块，接着把剩下的糖平均分给四个朋友，那么每个朋友得到了多少块糖呢？"  # noqa: E501
    assert [hit(changed, [item]), hit(other, [item])] == [0, -1]


def test_the_same_quotations_are_found_whatever_the_batch():
    items = [" ".join(invented(60, seed)) for seed in range(50, 60)]
    texts = [AROUND + DEVELOPED["filler every eight words"](item, random.Random(1)) for item in items] + [AROUND]
    index = index_of(items)
    assert index.first_hits(texts).tolist() == [*range(10), -1] == [int(index.first_hits([text])[0]) for text in texts]


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the shared data is not on this machine")
def test_public_items_are_found_in_disguise_and_clean_text_is_not(monkeypatch):
    monkeypatch.setattr(decontamination, "CLEAN", {"prose": ("text/c4_sample", "text/wikipedia_plain_sample")})
    given = decontamination.records(3)
    _, index = index_items(given, (), load_scale("full").data.recipe.decontaminate)
    rows = dict(decontamination.recall(index, decontamination.quotations(given), [AROUND]))
    assert rows["verbatim"]["all"][0] == 1 and rows["entities and tags"]["all"][0] > 0.98
    for name in ("typing errors in 3 % of letters", "filler every eight words", "synonyms, articles lost"):
        assert rows[name]["long"][0] > max(rows[name]["long_runs"][0], 0.85), (name, rows[name])
    assert decontamination.false_hits(index, "prose")["num_added"] == 0
