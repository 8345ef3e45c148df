r"""The last number of a text, as people and language models write numbers; what has two readings has none here.

    5  -5  .5  1.5  $5  5 km  50%         what stands around a number is ignored: 50% is 50
    1,234,567.5  1'234  1 234             groups of three by commas, apostrophes or spaces; in LaTeX 1{,}234 and 1\,234
    1.234.567  1.234,5                    groups by points, if there are two or a comma follows; 1.234 is below 2
    3/4  1 1/2  1½  \frac{3}{4}           fractions, and whole numbers with a fraction below 1
    1e-3  1.5×10^3  1.5\times10^{3}  10⁻³ powers of ten

No number: lists and decimal commas (1,5), ranges, dates and times (3-4, 10:30), powers and roots; digits after a letter (H2O).
"""

from __future__ import annotations

import math
import re
import unicodedata

_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in (
        ("[\u2212\ufe63\uff0d]", "-"),
        (r"(?<![\w)\]}])–(?=[$€£¥]?\.?\d)", "-"),
        ("⁄", "/"),
        ("\u2019", "'"),
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"\\[,;: ]|[\u00a0\u2009\u202f]", " "),
        (r"\\([$%])", r"\1"),
        (r"\\times(?![a-z])|\\cdot(?![a-z])|[×·]", "*"),
        (r"(?<=\d)\*\*(?=[-+]?\d)", "^"),
        (r"\s*\^\s*\{?\s*([-+]?\d+)\s*\}?", r"^\1"),
        (r"(?<=\d)\s*[*x]\s*10\^([-+]?\d+)", r"e\1"),
        (r"(?<![\w.,^])10\^([-+]?\d+)", r"1e\1"),
        (r"(?<=\d)\s*/\s*(?=[-+]?\d)", "/"),
    )
]
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁻⁺]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_VULGAR = re.compile("(?<=([0-9]))?([¼-¾⅐-⅞])")
_FRACTION = re.compile(r"(?:(\d)\s*)?\\[dt]?frac\s*(?:\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}|(\d)\s*(\d))")
# Digits, and what joins them without a space; or with one, to a group of three digits or to a fraction.
_RUN = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+])?[$€£¥]?(?<![A-Za-z_^])(?P<run>(?:(?<!\d)\d|(?<![\w.])\.(?=\d))"
    r"(?:\d|[.,':/^_](?=\d)|(?<=\d)[-–](?=\d)|(?<=\d)[eE][-+]?(?=\d)|(?<=\d) (?=\d{3}(?!\d)|\d+/\d))*)"
)
_OPERATOR_BEFORE = re.compile(r"(?:sqrt\s*[({\[]?|√)\s*$|/$")
_FACTOR_AFTER = re.compile(r"\s*(?:\\?sqrt|√|π|\\pi(?![a-z])|\^)")
_MIXED = re.compile(r"(?P<whole>\d+) (?P<part>\d+)/(?P<of>\d+)")
_NUMBER = re.compile(
    r"(?P<number>(?P<commas>[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?)|(?P<points>[1-9]\d{0,2}(?:(?:\.\d{3}){2,}(?:,\d+)?|\.\d{3},\d+))"
    r"|[1-9]\d{0,2}(?P<mark>[ '_])\d{3}(?:(?P=mark)\d{3})*(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d+)?"
)


def last_number(text: str) -> float | None:
    """The last number of a text; None: it has none, or it can be read in two ways."""
    text = _rewritten(text)
    result = list(_RUN.finditer(text))
    if not result:
        return None
    last = result[-1]
    if _OPERATOR_BEFORE.search(text[: last.start()]) or _FACTOR_AFTER.match(text, last.end()):
        return None
    value = _value(last["run"])
    if value is None or not math.isfinite(value):
        return None
    return -value if last["sign"] == "-" else value


def _rewritten(text: str) -> str:
    """A text whose numbers are in ASCII, powers of ten with e, fractions with a slash."""
    text = _SUPERSCRIPT.sub(lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)
    text = _VULGAR.sub(lambda match: (" " if match[1] else "") + unicodedata.normalize("NFKC", match[2]), text)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return _FRACTION.sub(_slashed, text)


def _slashed(match: re.Match[str]) -> str:
    before = f"{match[1]} " if match[1] else ""
    return f"{before}{match[2]}/{match[3]}" if match[4] is None else f"{before}{match[4]}/{match[5]}"


def _value(run: str) -> float | None:
    if mixed := _MIXED.fullmatch(run):
        whole, part, of = int(mixed["whole"]), int(mixed["part"]), int(mixed["of"])
        return whole + part / of if part < of else None
    above, slash, below = run.partition("/")
    top = _plain(above)
    if top is None or not slash:
        return top
    bottom = _plain(below)
    return top / bottom if bottom else None


def _plain(run: str) -> float | None:
    match = _NUMBER.fullmatch(run)
    if match is None:
        return None
    number = match["number"]
    if match["points"]:
        number = number.replace(".", "").replace(",", ".")
    for mark in ("," if match["commas"] else None, match["mark"]):
        number = number.replace(mark, "") if mark else number
    return float(number + (match["exponent"] or ""))
