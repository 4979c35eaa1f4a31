"""The language of texts: by the compact detector CLD2, or by a fastText model that the user names. Runs in executors: imports no Spark.

CLD2 was chosen by measurement (benchmarks/language_id.py): within a hundredth of the most accurate library tried, at a hundred times its
speed. Per text, independent of the batch.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import TYPE_CHECKING

from tasks.data.documents import CODE, COMMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fasttext.FastText import _FastText

    from configs.schema import LanguageRecipe

NO_LANGUAGE = ""
PROSE_SUFFIXES = (".md", ".rst", ".txt")
"""Files of repositories that hold natural text; of other code, words are names, and a language would be a guess."""
NONCHARACTERS = "".join(chr((plane << 16) + last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
NOT_INTERCHANGEABLE = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{NONCHARACTERS}]+")
"""What CLD2 refuses a whole text for: control characters, lone surrogates, code points that are none."""
LABEL_PREFIX = "__label__"
OLD_CODES = {"iw": "he", "jw": "jv", "in": "id", "ji": "yi", "nb": "no", "sh": "sr", "un": NO_LANGUAGE, "xx": NO_LANGUAGE}
"""Withdrawn codes; Bokmål is `no`, as in lid.176 and CLD2; `xx` stands for a script without a language."""
JOKES = "zz"
"""Prefix of CLD2's codes for pig Latin and the like."""
PAIRS_OF_CODES = """
    aar:aa abk:ab afr:af aka:ak als:sq amh:am ara:ar arb:ar arg:an asm:as ava:av ave:ae aym:ay ayr:ay aze:az azj:az bak:ba bam:bm bel:be
    ben:bn bih:bh bis:bi bod:bo bos:bs bre:br bul:bg cat:ca ces:cs cha:ch che:ce chu:cu chv:cv cmn:zh cor:kw cos:co cre:cr cym:cy dan:da
    deu:de div:dv dzo:dz ekk:et ell:el eng:en epo:eo est:et eus:eu ewe:ee fao:fo fas:fa fij:fj fil:tl fin:fi fra:fr fry:fy ful:ff fuv:ff
    gla:gd gle:ga glg:gl glv:gv grn:gn gug:gn guj:gu hat:ht hau:ha hbs:sr heb:he her:hz hin:hi hmo:ho hrv:hr hun:hu hye:hy ibo:ig ido:io
    iii:ii iku:iu ile:ie ina:ia ind:id ipk:ik isl:is ita:it jav:jv jpn:ja kal:kl kan:kn kas:ks kat:ka kau:kr kaz:kk khk:mn khm:km kik:ki
    kin:rw kir:ky kmr:ku kom:kv kon:kg kor:ko kua:kj kur:ku lao:lo lat:la lav:lv lim:li lin:ln lit:lt ltz:lb lub:lu lug:lg lvs:lv mah:mh
    mal:ml mar:mr mkd:mk mlg:mg mlt:mt mon:mn mri:mi msa:ms mya:my nau:na nav:nv nbl:nr nde:nd ndo:ng nep:ne nld:nl nno:nn nob:no nor:no
    npi:ne nya:ny oci:oc oji:oj ori:or orm:om ory:or oss:os pan:pa pbt:ps pes:fa pli:pi plt:mg pol:pl por:pt prs:fa pus:ps quy:qu que:qu
    roh:rm ron:ro run:rn rus:ru sag:sg san:sa sin:si slk:sk slv:sl sme:se smo:sm sna:sn snd:sd som:so sot:st spa:es sqi:sq srd:sc srp:sr
    ssw:ss sun:su swa:sw swe:sv swh:sw tah:ty tam:ta tat:tt tel:te tgk:tg tgl:tl tha:th tir:ti ton:to tsn:tn tso:ts tuk:tk tur:tr twi:tw
    uig:ug ukr:uk urd:ur uzb:uz uzn:uz ven:ve vie:vi vol:vo wln:wa wol:wo xho:xh ydd:yi yid:yi yor:yo zha:za zho:zh zsm:ms zul:zu
"""
ISO_639_1 = {pair[:3]: pair[4:] for pair in PAIRS_OF_CODES.split()}
"""Three-letter codes, macrolanguages and their usual members, to the two letters that files and other models use."""


def has_language(domain: str, source: str) -> bool:
    """Whether a document is natural text: all but program code and changes; of those the files that are written to be read."""
    return domain not in (CODE, COMMIT) or source.lower().removesuffix(".gz").endswith(PROSE_SUFFIXES)


def check_model(recipe: LanguageRecipe) -> None:
    """Raises ValueError if the recipe names a model file that cannot be read or is another one than its digest says."""
    if not recipe.model_path:
        return
    try:
        with open(recipe.model_path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(
            f"data.recipe.language.model_path {recipe.model_path} cannot be read ({error.strerror}): name a fastText model such as "
            "lid.176.bin, or leave model_path and model_sha256 empty for the built-in detector"
        ) from error
    if found != recipe.model_sha256:
        raise ValueError(
            f"data.recipe.language.model_path {recipe.model_path} has sha256 {found}, model_sha256 is {recipe.model_sha256}: "
            "give the digest of the file that is meant"
        )


def identify_languages(texts: Sequence[str], max_chars: int, model_path: str) -> tuple[list[str], list[float]]:
    """(ISO 639 code, score) per text, from its first `max_chars` characters. No language found is ("", 0.0).

    The score is the share of the letters that CLD2 gives to the language, or the probability that the model at `model_path` gives.
    """
    beginnings = [text[:max_chars] for text in texts]
    found = _by_model(beginnings, model_path) if model_path else [_by_cld2(text) for text in beginnings]
    return [code for code, _ in found], [score for _, score in found]


def iso_code(label: str) -> str:
    """`__label__en`, `__label__eng_Latn` and `zh-Hant` as ISO 639: two letters where there are two, else three."""
    code = re.split("[-_]", label.removeprefix(LABEL_PREFIX).lower(), maxsplit=1)[0]
    code = ISO_639_1.get(code, code)
    return NO_LANGUAGE if code.startswith(JOKES) else OLD_CODES.get(code, code)


def _by_cld2(text: str) -> tuple[str, float]:
    import pycld2

    # Best effort: short texts get the likeliest language instead of none.
    _, _, details = pycld2.detect(NOT_INTERCHANGEABLE.sub(" ", text), isPlainText=True, bestEffort=True)
    _, code, percent, _ = details[0]
    language = iso_code(code)
    return (language, percent / 100) if language else (NO_LANGUAGE, 0.0)


def _by_model(texts: list[str], path: str) -> list[tuple[str, float]]:
    model = load_fasttext(path)
    found = []
    for text in texts:
        labels, scores = model.predict(" ".join(text.split()), k=1)
        found.append((iso_code(labels[0]), min(float(scores[0]), 1.0)) if labels else (NO_LANGUAGE, 0.0))
    return found


@cache
def load_fasttext(path: str) -> _FastText:
    """The model of a file, read once per process."""
    import fasttext

    return fasttext.load_model(path)
