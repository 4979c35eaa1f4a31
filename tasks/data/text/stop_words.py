"""Counts the different stop words of its language in a text. Runs in executors: imports no Spark.

English has the eight words of Gopher (Rae et al. 2021, A1.1). The other lists are the commonest function words of the
language, chosen by the same rule: a page of prose without two of them is a list, a table or another language.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.text.words import Words, split_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

STOP_WORDS = {
    "en": "the be to of and that have with",
    "ar": "في من على أن إلى عن مع التي الذي هذا",
    "bg": "и на в да се за от не е",
    "ca": "de la i el que a en un per amb",
    "cs": "a v se na je že to s z do",
    "da": "og i at det er en til af på med",
    "de": "der die und in das ist zu den mit nicht",
    "el": "και το να του η την της με για από",
    "es": "de la que el en y a los se por con",
    "et": "ja on ei et see oli ka kui ta",
    "fa": "و در به از که این را با است",
    "fi": "ja on ei se että oli hän mutta myös",
    "fr": "de la le et les des en un une est que",
    "he": "של את על לא הוא זה עם כי היא",
    "hi": "के में की है और से का को पर",
    "hr": "i u je na se da za su s od",
    "hu": "a az és hogy nem is egy van meg volt",
    "id": "yang dan di dari untuk dengan ini itu dalam pada",
    "it": "di e che la il un a per in non è con",
    "ja": "の に は を た が で と し",
    "ko": "이 그 및 수 등 것 있는 있다 한",
    "lt": "ir į kad yra su iš tai bet ne",
    "lv": "un ir ar no uz par ka kas",
    "nl": "de van het een en in is dat te op met",
    "no": "og i det er på en til som med av",
    "pl": "i w z na się nie do to że jest",
    "pt": "de a o que e do da em um para com",
    "ro": "de și în la a pe cu care nu din",
    "ru": "и в не на что с по как это из",
    "sk": "a v na sa je že to s z do",
    "sl": "in je v na se da za so z",
    "sr": "и у је на се да за су од i u je se su od",
    "sv": "och i att det som en på är av för med",
    "tr": "ve bir bu da için ile de çok olarak",
    "uk": "і в на не що з до та як це",
    "vi": "và của là có trong được cho các một",
    "zh": "的 是 了 在 我 有 不 人 这 和",
}


def count_stop_words(words: Words, languages: Sequence[str]) -> NDArray[np.float64]:
    """Different stop words per text; NaN, which every bound allows, for a language without a list."""
    counts = np.full(len(languages), np.nan)
    owners = np.repeat(np.arange(len(languages)), words.counts)
    for language in sorted(set(languages) & set(STOP_WORDS)):
        is_own = np.array([name == language for name in languages])
        table = _hashes(language)
        within = is_own[owners]
        hashes = words.hashes[within]
        index = np.minimum(np.searchsorted(table, hashes), len(table) - 1)
        hit = table[index] == hashes
        pairs = np.zeros((len(languages), len(table)), dtype=bool)
        pairs[owners[within][hit], index[hit]] = True
        counts[is_own] = pairs[is_own].sum(axis=1)
    return counts


@cache
def _hashes(language: str) -> NDArray[np.uint64]:
    return np.unique(split_words([STOP_WORDS[language]]).hashes)
