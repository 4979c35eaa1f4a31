"""Disguises in which an evaluation item turns up in a web page, for benchmarks/data/decontamination.py.

near_quotes.py was written with DEVELOPED at hand. UNSEEN are other ways to do the same (other typing errors, fillers,
synonyms, markup, line breaks); no threshold was chosen by them.
"""

from __future__ import annotations

import html
import json
import random
import re
import textwrap
from collections.abc import Callable

Disguise = Callable[[str, random.Random], str]

_PAIRS = (
    "big:large small:little begin:start begins:starts buy:purchase buys:purchases bought:purchased help:assist "
    "house:home "
    "car:automobile child:kid children:kids man:guy woman:lady say:state said:stated says:states show:demonstrate "
    "shows:demonstrates "
    "get:obtain gets:obtains make:produce makes:produces use:employ uses:employs used:employed find:determine "
    "many:numerous "
    "often:frequently also:additionally because:since but:however each:every total:overall money:cash friend:pal "
    "job:occupation "
    "answer:response question:query quick:fast hard:difficult easy:simple smart:clever happy:glad sad:unhappy "
    "near:close far:distant "
    "end:finish ends:finishes think:believe thinks:believes important:significant different:distinct "
    "following:subsequent "
    "correct:right wrong:incorrect between:among most:majority about:regarding after:following before:prior "
    "person:individual "
    "people:individuals street:road city:town store:shop food:meals water:liquid year:annum day:date time:moment "
    "way:manner "
    "part:portion piece:bit group:set number:amount cost:price costs:prices pay:spend pays:spends need:require "
    "needs:requires "
    "want:desire wants:desires like:enjoy likes:enjoys give:hand gives:hands take:grab takes:grabs look:glance "
    "see:notice "
    "keep:retain keeps:retains hold:grip work:labor works:labors write:compose list:sequence return:yield"
)
_OTHER_PAIRS = (
    "large:sizeable good:fine bad:poor new:recent old:aged long:lengthy short:brief high:tall low:shallow "
    "first:initial last:final "
    "next:coming great:superb little:tiny own:personal right:proper early:premature young:youthful same:identical "
    "able:capable "
    "home:residence hand:palm place:spot case:instance company:firm system:arrangement program:routine work:toil "
    "government:administration problem:issue fact:truth lot:bunch study:investigation book:volume eye:sight word:term "
    "business:enterprise side:flank kind:sort head:skull service:provision area:region game:match line:row "
    "member:participant "
    "law:statute car:vehicle name:title president:leader team:crew minute:moment idea:notion body:figure "
    "information:data "
    "parent:guardian face:visage level:degree office:bureau door:entrance health:wellbeing art:craft war:conflict "
    "history:past "
    "party:celebration result:outcome change:shift morning:dawn reason:cause research:inquiry girl:lass boy:lad "
    "air:atmosphere "
    "teacher:instructor force:power education:schooling is:remains are:remain went:travelled came:arrived "
    "made:crafted took:picked "
    "saw:spotted knew:understood thought:figured told:informed asked:inquired felt:sensed became:turned left:departed "
    "put:placed "
    "mean:signify let:allow seem:appear talk:speak turn:rotate start:commence might:could show:display hear:listen "
    "play:perform "
    "run:sprint move:shift live:dwell believe:trust bring:carry happen:occur must:has_to provide:supply sit:rest "
    "stand:rise "
    "lose:misplace meet:encounter include:contain continue:proceed set:fix learn:study lead:guide understand:grasp "
    "watch:observe "
    "follow:trail stop:halt create:build speak:utter read:peruse allow:permit add:append spend:expend grow:expand "
    "open:unlock "
    "walk:stroll win:triumph offer:propose"
)
SYNONYMS, OTHER_SYNONYMS = (dict(pair.split(":") for pair in pairs.split()) for pairs in (_PAIRS, _OTHER_PAIRS))
FILLERS = ("well", "you know", "um", "basically", "like", "sort of")
OTHER_FILLERS = ("- I mean -", "hmm,", "(sic)", "so to say,", "ok", "right?", "let's see:")
KEYS = {
    "q": "w",
    "w": "e",
    "e": "r",
    "r": "t",
    "t": "y",
    "y": "u",
    "u": "i",
    "i": "o",
    "o": "p",
    "a": "s",
    "s": "d",
    "d": "f",
    "f": "g",
    "g": "h",
    "h": "j",
    "j": "k",
    "k": "l",
    "z": "x",
    "x": "c",
    "c": "v",
    "v": "b",
    "b": "n",
    "n": "m",
}
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def _by_word(text: str, change: Callable[[str], str]) -> str:
    return re.sub(r"[^\W\d_]+", lambda match: change(match[0]), text)


def _typing_errors(text: str, generator: random.Random, per_letter: float) -> str:
    """Two letters swapped or one lost, in words of at least three letters."""

    def change(word: str) -> str:
        if len(word) < 3 or generator.random() > per_letter * len(word):
            return word
        at = generator.randrange(len(word) - 1)
        return word[:at] + (word[at + 1] + word[at] + word[at + 2 :] if generator.random() < 0.5 else word[at + 1 :])

    return _by_word(text, change)


def _replaced(text: str, share: float, generator: random.Random) -> str:
    """Another word for a share of the words, whatever they say."""
    others = sorted(SYNONYMS.values())
    return _by_word(
        text, lambda word: generator.choice(others) if len(word) > 2 and generator.random() < share else word
    )


def _slips(text: str, generator: random.Random) -> str:
    """A neighbouring key or a doubled letter, in 4 % of the words."""

    def change(word: str) -> str:
        if len(word) < 3 or generator.random() > 0.04:
            return word
        at = generator.randrange(len(word))
        return (
            word[:at] + (KEYS.get(word[at].lower(), "e") if generator.random() < 0.5 else 2 * word[at]) + word[at + 1 :]
        )

    return _by_word(text, change)


def _filled(text: str, every: int, fillers: tuple[str, ...], generator: random.Random) -> str:
    words = text.split(" ")
    return " ".join(
        word if (at + 1) % every else f"{word} {generator.choice(fillers)}" for at, word in enumerate(words)
    )


def _reworded(text: str, synonyms: dict[str, str], articles: float, generator: random.Random) -> str:
    """Synonyms for the words that have one, and some articles lost."""

    def change(word: str) -> str:
        if word.lower() in ("the", "a", "an") and generator.random() < articles:
            return ""
        return synonyms.get(word.lower(), word).replace("_", " ")

    return re.sub("  +", " ", _by_word(text, change))


def _tagged(text: str, generator: random.Random) -> str:
    escaped = html.escape(text).replace("&#x27;", "&#39;" if generator.random() < 0.5 else "&#x27;")
    words = escaped.split(" ")
    marked = [f"<b>{word}</b>" if generator.random() < 0.12 else word for word in words]
    return "<p>" + " ".join(marked).replace("\n", "<br/>\n") + "</p>"


def _deeply_tagged(text: str, generator: random.Random) -> str:
    words = html.escape(html.escape(text)).split(" ")
    opening = '<span class="w" data-x="1 > 0">'
    marked = [f"{opening}{word}</span>" if generator.random() < 0.2 else word for word in words]
    return '<div class="q">' + "&nbsp;".join(marked).replace("\n", '<br class="x">') + "</div>"


def _hyphenated(text: str, width: int, margin: str) -> str:
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split():
            if line and len(line) + len(word) + 1 > width:
                room = width - len(line) - 2
                if len(word) > 6 and 2 < room < len(word) - 2 and word.isalpha():
                    lines.append(f"{margin}{line} {word[:room]}-")
                    line = word[room:]
                    continue
                lines.append(margin + line)
                line = word
            else:
                line = f"{line} {word}".strip()
        lines.append(margin + line)
    return "\n".join(lines)


def _spelled(text: str, generator: random.Random) -> str:
    return re.sub(
        r"(?<![\w.,\\^_{])\d{1,2}(?![\w.,}])",
        lambda match: NUMBERS[int(match[0])] if int(match[0]) < 13 else match[0],
        text,
    )


DEVELOPED: dict[str, Disguise] = {
    "verbatim": lambda text, generator: text,
    "upper case": lambda text, generator: text.upper(),
    "other quotation marks and dashes": lambda text, generator: (
        text.replace("'", "’").replace('"', "”").replace("-", "‐")
    ),
    "Markdown": lambda text, generator: "> " + text.replace("\n", "  \n> **") + "**",
    "code comment": lambda text, generator: "\n".join(f"# {line}" for line in textwrap.wrap(text, 70)),
    "forum thread": lambda text, generator: f"jo wrote:\n>> {text.replace(chr(10), chr(10) + '>> ')}\n-- \nThanks!",
    "JSON escapes": lambda text, generator: json.dumps({"body": text}),
    "numbers in words": _spelled,
    "numbered choices": lambda text, generator: re.sub(
        r"(?m)^([A-E])\. ", lambda match: f"{ord(match[1]) - 64}) ", text
    ),
    "entities and tags": _tagged,
    "hyphenated line ends": lambda text, generator: _hyphenated(text, 60, ""),
    "typing errors in 3 % of letters": lambda text, generator: _typing_errors(text, generator, 0.03),
    "filler every eight words": lambda text, generator: _filled(text, 8, FILLERS, generator),
    "synonyms, articles lost": lambda text, generator: _reworded(text, SYNONYMS, 0.3, generator),
    "both lists of synonyms": lambda text, generator: _reworded(text, SYNONYMS | OTHER_SYNONYMS, 0.5, generator),
}
UNSEEN: dict[str, Disguise] = {
    "entities twice, tags with attributes": _deeply_tagged,
    "hyphenated, quoted, narrow": lambda text, generator: _hyphenated(text, 38, "> "),
    "slips in 4 % of words": _slips,
    "filler every seven words": lambda text, generator: _filled(text, 7, OTHER_FILLERS, generator),
    "filler every five words": lambda text, generator: _filled(text, 5, OTHER_FILLERS, generator),
    "other synonyms": lambda text, generator: _reworded(text, OTHER_SYNONYMS, 0.0, generator),
    "one word in six replaced": lambda text, generator: _replaced(text, 1 / 6, generator),
    "slips and fillers": lambda text, generator: _filled(_slips(text, generator), 9, OTHER_FILLERS, generator),
    "a word in twelve lost": lambda text, generator: " ".join(
        word for word in text.split(" ") if generator.random() > 1 / 12
    ),
}
