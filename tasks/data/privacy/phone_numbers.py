"""Decides whether a number in a text is a phone number. Runs in executors: imports no Spark.

A number with + or 00 is judged by its country's lengths. A national one is judged by the numbering plans of the
regions where the text's language is spoken (phonenumbers, Google's tables): a plan must hold the number, and group it
in this way. Without groups, or where the groups are those of any large number (612 345 678), the text must name it as
a phone number. A number that the text names as one needs less evidence.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise

REGIONS = {
    "en": ("US", "GB", "AU", "IN", "CA", "NZ", "IE", "ZA", "SG"),
    "de": ("DE", "AT", "CH"),
    "fr": ("FR", "BE", "CH", "CA"),
    "es": ("ES", "MX", "AR", "CO", "CL", "PE"),
    "pt": ("BR", "PT"),
    "it": ("IT", "CH"),
    "nl": ("NL", "BE"),
    "zh": ("CN", "TW", "HK"),
    "ja": ("JP",),
    "ko": ("KR",),
    "ru": ("RU", "UA", "KZ"),
    "uk": ("UA",),
    "pl": ("PL",),
    "cs": ("CZ",),
    "sk": ("SK",),
    "sv": ("SE", "FI"),
    "da": ("DK",),
    "no": ("NO",),
    "fi": ("FI",),
    "tr": ("TR",),
    "el": ("GR",),
    "hu": ("HU",),
    "ro": ("RO",),
    "bg": ("BG",),
    "hr": ("HR",),
    "he": ("IL",),
    "ar": ("EG", "SA", "AE", "MA"),
    "fa": ("IR",),
    "hi": ("IN",),
    "bn": ("BD", "IN"),
    "ta": ("IN",),
    "te": ("IN",),
    "ur": ("PK", "IN"),
    "th": ("TH",),
    "vi": ("VN",),
    "id": ("ID",),
    "ms": ("MY",),
    "tl": ("PH",),
    "sw": ("KE", "TZ"),
    "af": ("ZA",),
}
"""Regions in which a language is spoken most, by ISO 639-1."""
COMMON_REGIONS = (
    "US",
    "GB",
    "DE",
    "FR",
    "IN",
    "CN",
    "JP",
    "BR",
    "ES",
    "IT",
    "RU",
    "AU",
    "NL",
    "KR",
    "PL",
    "MX",
    "TR",
    "CH",
    "AT",
    "BE",
    "SE",
)
"""Regions tried where the language is unknown, or its regions have no number of this form."""

DATE = re.compile(
    r"(?:19|20)\d\d[-./ ]\d{1,2}[-./ ]\d|\d{1,2}[-./ ]\d{1,2}[-./ ](?:19|20)\d\d"
    r"|(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\Z"
)
NORTH_AMERICAN = re.compile(r"(?:(?:\+|00)?1[-. ])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[-. ])[2-9]\d\d[-. ]\d{4}")
TOLL_FREE = re.compile(r"(?:1[-. ])?(?:\(8\d\d\) ?|8(?:00|33|44|55|66|77|88)[-. ])\d{3}[-. ]\d{4}")
TRUNK = re.compile(r"\(0\d{0,4}\)[ -]?\d[\d -]{5,}\d")
"""An area code in brackets with the trunk prefix 0."""
EXTENSION = re.compile(r"\s?(?:x|ext\.?)\s?\d{1,5}\Z", re.IGNORECASE)
NAMED = re.compile(
    r"(?<![^\W_])(?:tele)?(?:phone|fon|foon|fono|fone|fón|fax)s?(?: "
    r"?(?:no|number|nr|num)\b\.?)?[^\d\n]{0,16}\n?[^\d\n]{0,4}$"
    r"|(?<![^\W_])(?:tel|tél|tlf|tfno|mob|mobile|cell|desk(?=:)|office(?=:)|whatsapp|wechat|viber|hotline|sms|handy|mobil|telefonnummer|telefonischer"
    r"|mobiltelefon|portable|téléphone|teléfono|celular|móvil|movil|cellulare|telemóvel|komórk\w*|kom|puh|puhelin|gsm|telefoon\w*|тел|телефон\w*"
    r"|моб\w*|phonenumber|numéro|numero|número|rufnummer|durchwahl|nummer)\b[^\d\n]{0,16}\n?[^\d\n]{0,4}$"
    r"|(?:电话|電話|手机|手機|热线|熱線|传真|傳真|携帯|微信|전화|휴대폰|팩스|연락처|هاتف|الهاتف|جوال|تلفن|موبایل|همراه|ٹیلیفون|فون|फोन|טלפון|τηλ\w*|โทร\w*)[^\d\n]{0,12}$",
    re.IGNORECASE,
)
"""Names of a phone number, directly before it."""
ASKED_TO_CALL = re.compile(
    r"(?<![^\W_])(?:call|calling|dial|ring|text|reach|contact|message|messages|answering|appel\w*|joindre|rufen|anrufen|erreich\w*"
    r"|llám\w*|llam\w*|ligue|ligar|chiam\w*|bel|bellen|zadzwo\w*|dzwoń|ring\w*|звон\w*|позвон\w*|дзвон\w*|ara\w*)\b[^\d\n]{0,24}$",
    re.IGNORECASE,
)
NAMED_AFTER = re.compile(r"[ -]{1,2}\(?(?:office|fax|mobile|home|cell|desk|tel)\b|（(?:手机|电话|携帯)", re.IGNORECASE)
LABEL_CHARS = 40
CLAUSE = re.compile(r"\d{3}\.\d{3}-\d{4}")
"""A clause of federal rules (252.227-7013): a phone number has one kind of sign."""
US_POST_CODE = re.compile(r"\d{5}-\d{4}")
US_STATE = re.compile(r"(?<![^\W_])[A-Z]{2}[.,]?\s{1,8}$")
"""A post code with four more digits, and the state before it: MA 02110-1301."""
MIN_DIGITS, MAX_DIGITS = 7, 15


def is_phone(match: re.Match[str], before: str, language: str) -> bool:
    """Whether a match, with the text `before` it, is a phone number in a text of this language ("" if unknown)."""
    number = match[0]
    plain = EXTENSION.sub("", number)
    groups = re.findall(r"\d+", plain)
    digits = "".join(groups)
    if (
        not MIN_DIGITS <= len(digits) <= MAX_DIGITS
        or DATE.match(plain)
        or plain.count("(") != plain.count(")")
        or _is_counting(groups)
        or (US_POST_CODE.fullmatch(plain) and US_STATE.search(before))
    ):
        return False
    is_named = NAMED.search(before) is not None or NAMED_AFTER.match(match.string, match.end()) is not None
    if CLAUSE.fullmatch(plain) and not is_named:
        return False
    if plain.startswith(("+", "(+", "＋")):
        return _is_international(plain.lstrip("(+＋"), is_named or len(groups) > 1)
    if NORTH_AMERICAN.fullmatch(plain) or TOLL_FREE.fullmatch(plain) or TRUNK.fullmatch(plain):
        return True
    if digits.startswith("00") and len(digits) > 9:
        return _is_international(digits[2:], is_named)
    if is_named:
        return not re.fullmatch(r"0+|(\d)\1+", digits) and (
            len(groups) > 1 or len(digits) < 10 or _is_in_plan(plain, _regions(language))
        )
    if ASKED_TO_CALL.search(before):
        return _is_in_plan(plain, _regions(language))
    return _is_written_as_phone(match, plain, groups, language)


def _is_written_as_phone(match: re.Match[str], plain: str, groups: list[str], language: str) -> bool:
    """Whether a national number is a phone number by its form only."""
    digits = "".join(groups)
    has_trunk = digits[0] == "0" or re.match(r"8 ?\(", plain) is not None
    if len(groups) == 1:
        return (
            (has_trunk or len(digits) == 11)
            and len(digits) >= 10
            and _is_in_plan(plain, REGIONS.get(language, ()), only_mobile=True)
        )
    is_decimal_or_range = (
        len(groups) == 2
        and plain[len(groups[0])] in ".-\u2010\u2011\u2013"
        and (plain[len(groups[0])] == "." or len(groups[0]) == len(groups[1]))
    )
    if is_decimal_or_range or min(map(len, groups[1:])) < 2 or len(groups) > 6 or re.search(r"[.\u2013] ", plain):
        return False
    if has_trunk:
        return len(digits) >= 9 and _is_in_plan(plain, _regions(language))
    could_be_any = (
        all(len(group) == len(groups[1]) for group in groups[1:])
        and re.search(r"[^\d .\u00a0\u2009\u202f]", plain) is None
    )
    if could_be_any and re.match(r"[ \u00a0]?[^\W_]", match.string[match.end() : match.end() + 2]):
        return False
    return _is_in_plan(plain, REGIONS.get(language, ()))


def _is_counting(groups: list[str]) -> bool:
    """01 02 03 04 05, 10 20 30 40 or 0123456789: a row of numbers."""
    values = [int(group) for group in groups] if len(groups) > 2 else [int(digit) for digit in "".join(groups)]
    steps = {later - earlier for earlier, later in pairwise(values)}
    return len(steps) == 1 and min(steps) >= 0


def _is_international(digits: str, is_evident: bool) -> bool:
    """Whether a number after + has a possible length in its country; without evidence (groups or a name) it must be in
    the country's plan."""
    import phonenumbers

    try:
        number = phonenumbers.parse("+" + digits)
    except phonenumbers.NumberParseException:
        return False
    return phonenumbers.is_possible_number(number) if is_evident else phonenumbers.is_valid_number(number)


def _is_in_plan(plain: str, regions: tuple[str, ...], only_mobile: bool = False) -> bool:
    """Whether the plan of one of the regions holds the number, and the number has the plan's groups or none."""
    import phonenumbers

    for region in regions:
        for candidate in phonenumbers.PhoneNumberMatcher(
            plain, region, leniency=phonenumbers.Leniency.STRICT_GROUPING, max_tries=3
        ):
            is_mobile = phonenumbers.number_type(candidate.number) == phonenumbers.PhoneNumberType.MOBILE
            if candidate.raw_string == plain and (is_mobile or not only_mobile):
                return True
    return False


@cache
def _regions(language: str) -> tuple[str, ...]:
    own = REGIONS.get(language, ())
    return (*own, *(region for region in COMMON_REGIONS if region not in own))
