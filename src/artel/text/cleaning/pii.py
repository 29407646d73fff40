"""Find personal data: email addresses, phones, bank cards, IP addresses, and Russian documents by check digits.

A match needs a characteristic form, check digits, or a word before it (ИНН, паспорт): plain numbers in a novel do not
match. Names and street addresses are not detected.

- email, ip: as in datatrove's `PIIFormatter`; ip only for public addresses.
- phone: with + and a country code, or in a Russian form (8 495 123-45-67, (495) 123-45-67), and valid in the numbering
  plan of its country (phonenumbers, the port of Google's libphonenumber).
- card: the prefix and length of a payment system, and the check digit of Luhn (ISO/IEC 7812-1).
- snils, inn: the check digits of the Russian pension fund and tax service; passport: series and number after the word.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from artel.config import PiiConfig, PiiKind
from artel.errors import missing_extra

Span = tuple[int, int]

# Seven digits with at most three other characters between them. Numbers are searched only around these: few texts have
# any.
_SEVEN_DIGITS = re.compile(r"\d(?:\D{0,3}\d){6}")
_CONTEXT_CHARACTERS = 60  # characters searched before these digits (for words that name a number) and after
_GAP = r"[ \u00a0().\-‐‑–]{0,2}"
_EMAIL = re.compile(
    r"(?<![\w.+%/-])[^\W_](?:[\w.+%-]{0,62}[\w+%-])?@(?:[^\W_](?:[\w-]{0,61}[^\W_])\.)+[^\W\d_]{2,24}(?![\w-]|\.\w)"
)
_INTERNATIONAL_PHONE = re.compile(rf"(?<![\w+])\+\d(?:{_GAP}\d){{7,14}}(?!\d|[.,]\d)")
_RUSSIAN_PHONE = re.compile(
    rf"(?<![\w.,+/:№#-])(?<!\d )(?:[78]{_GAP})?\(?\d{{3,5}}\)?(?:{_GAP}\d){{5,7}}(?!\w|[.,/-]\d)"
)
_CARD = re.compile(
    r"(?<![\w.,+/-])(?<!\d )"
    r"(?:\d{4}([ \u00a0-])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|3\d{3}([ \u00a0-])\d{6}\2\d{5}|\d{15,19})"
    r"(?!\w|[.,/-]\d| \d)"
)
_IP_4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IP_6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:){2,7}(?::?[0-9A-Fa-f]{1,4}){1,6}(?![\w:])")
_SNILS = re.compile(r"(?<![\w-])\d{3}-\d{3}-\d{3}[ \u00a0-]\d{2}(?![\w-])|(?i:\bснилс)\D{0,20}?(?P<bare>\d{11})(?!\w)")
_INN = re.compile(r"(?i:\bинн)[^\d\n]{0,25}?(\d{12}|\d{10})(?!\w)")
_PASSPORT = re.compile(
    r"(?i:паспорт\w{0,3}|\bсери[яи]|\bсер\.)[^\d\n]{0,40}?(\d\d[ \u00a0]?\d\d[ \u00a0,]{0,3}"
    r"(?i:№|номер|ном\.|n)?[ \u00a0]{0,2}\d{6})(?!\w|[.,-]\d)"
)
# Words that mark four numbers as a section or a version.
_SECTION = re.compile(r"(?i:\bv|\bver\.?|верси\w*|version\w*|§|раздел\w*|глав\w*|пункт\w*|\bпп?\.|\bст\.|section)\s*$")
_MAX_SECTION_NUMBER = 30  # four numbers up to this are a section, such as 4.2.1.3


def mask_pii(text: str, rules: PiiConfig, changes: Counter[str]) -> str:
    """Replace personal data by placeholders such as [EMAIL]. Add their number to `changes["pii_email"]`."""
    chunks, position = [], 0
    for start, end, kind in find_pii(text, rules.mask):
        chunks += [text[position:start], f"[{kind.upper()}]"]
        position = end
        changes[f"pii_{kind}"] += 1
    return "".join([*chunks, text[position:]]) if chunks else text


def find_pii(text: str, kinds: Sequence[PiiKind]) -> list[tuple[int, int, PiiKind]]:
    """Return (start, end, kind) of each match, in order. If two overlap, the kind that comes first in `KINDS` wins.

    Raise InputError if `kinds` has phones and phonenumbers is not installed.
    """
    regions = list(_number_regions(text))
    findings: list[tuple[int, int, PiiKind]] = []
    spans: list[Span] = []
    for kind, find in KINDS.items():
        if kind not in kinds:
            continue
        for start, end in find(text, regions):
            if not any(start < other_end and end > other_start for other_start, other_end in spans):
                spans.append((start, end))
                findings.append((start, end, kind))
    return sorted(findings)


def check_pii(rules: PiiConfig) -> None:
    """Raise InputError if a package that the rules need is missing."""
    if "phone" in (*rules.mask, *rules.drop):
        _import_phonenumbers()


def _number_regions(text: str) -> Iterator[Span]:
    """Yield (start, end) of disjoint regions, with context, that may hold numbers of seven or more digits."""
    start = end = 0
    for match in _SEVEN_DIGITS.finditer(text):
        if match.start() - _CONTEXT_CHARACTERS > end:
            if end:
                yield start, end
            start = max(0, match.start() - _CONTEXT_CHARACTERS)
        end = match.end() + _CONTEXT_CHARACTERS
    if end:
        yield start, end


def _find_matches(pattern: re.Pattern[str], text: str, regions: list[Span]) -> Iterator[re.Match[str]]:
    return (match for start, end in regions for match in pattern.finditer(text, start, end))


def _find_emails(text: str, _: list[Span]) -> Iterator[Span]:
    return (match.span() for match in _EMAIL.finditer(text)) if "@" in text else iter(())


def _find_cards(text: str, regions: list[Span]) -> Iterator[Span]:
    for match in _find_matches(_CARD, text, regions):
        digits = _keep_digits(match[0])
        if _has_payment_prefix(digits) and _passes_luhn(digits):
            yield match.span()


def _has_payment_prefix(digits: str) -> bool:
    """True for prefixes and lengths of Visa, Mastercard, Mir, UnionPay, JCB, American Express, Maestro."""
    length, prefix = len(digits), int(digits[:4])
    if length == 15:
        return digits[:2] in ("34", "37")
    if length == 16:
        is_mastercard = 5100 <= prefix <= 5599 or 2221 <= prefix <= 2720
        return digits[0] == "4" or is_mastercard or 2200 <= prefix <= 2204 or digits[:2] in ("62", "35")
    return digits[:2] in ("62", "50", "56", "57", "58", "63", "67") or 2200 <= prefix <= 2204


def _passes_luhn(digits: str) -> bool:
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1


def _find_snils(text: str, regions: list[Span]) -> Iterator[Span]:
    for match in _find_matches(_SNILS, text, regions):
        group = "bare" if match["bare"] else 0
        digits = _keep_digits(match[group])
        check = sum(int(digit) * weight for digit, weight in zip(digits, range(9, 0, -1), strict=False)) % 101 % 100
        if check == int(digits[9:]) and digits[:9] > "001001998":
            yield match.span(group)


def _find_inn(text: str, regions: list[Span]) -> Iterator[Span]:
    weights = (3, 7, 2, 4, 10, 3, 5, 9, 4, 6, 8)

    def passes_check(digits: str, position: int) -> bool:
        total = sum(int(digit) * weight for digit, weight in zip(digits, weights[11 - position :], strict=False))
        return total % 11 % 10 == int(digits[position])

    for match in _find_matches(_INN, text, regions):
        digits = match[1]
        if len(set(digits)) > 1 and all(
            passes_check(digits, position) for position in ((9,) if len(digits) == 10 else (10, 11))
        ):
            yield match.span(1)


def _find_passports(text: str, regions: list[Span]) -> Iterator[Span]:
    for match in _PASSPORT.finditer(text):  # the words before it are enough; "номер" may separate its digits
        year = int(_keep_digits(match[1])[2:4])  # in which the form was printed, from 1997 on
        if year <= 40 or year >= 97:
            yield match.span(1)


def _find_phones(text: str, regions: list[Span]) -> Iterator[Span]:
    library: Any = _import_phonenumbers() if regions else None
    for match in (*_find_matches(_INTERNATIONAL_PHONE, text, regions), *_find_matches(_RUSSIAN_PHONE, text, regions)):
        number_text = match[0]
        if not number_text.startswith("+") and not _is_russian_form(number_text):
            continue
        try:
            number = library.parse(number_text, "RU")
        except library.NumberParseException:
            continue
        if library.is_valid_number(number):
            yield match.span()


def _is_russian_form(number_text: str) -> bool:
    """True for 8 and a code, or a code in parentheses. Bare digits only for mobile and toll-free numbers from 8."""
    digits = _keep_digits(number_text)
    if len(digits) == 11:
        return digits[0] in "78" and (number_text != digits or digits.startswith(("89", "8800")))
    return len(digits) == 10 and number_text.startswith("(")


def _find_addresses(text: str, _: list[Span]) -> Iterator[Span]:
    for match in _IP_4.finditer(text) if "." in text else ():
        numbers = match[0].split(".")
        is_section = all(int(number) <= _MAX_SECTION_NUMBER for number in numbers) or _SECTION.search(
            text[: match.start()][-20:]
        )
        if not is_section and _is_public(match[0]):
            yield match.span()
    for match in _IP_6.finditer(text) if ":" in text else ():
        # Global addresses begin with 2 or 3; a time or C++'s :: does not.
        if match[0][0] in "23" and match[0].count(":") >= 3 and _is_public(match[0]):
            yield match.span()


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _keep_digits(text: str) -> str:
    return "".join(re.findall("[0-9]", text))


def _import_phonenumbers() -> Any:
    try:
        import phonenumbers
    except ImportError:
        raise missing_extra("phonenumbers", "pii", "data.clean.pii") from None
    return phonenumbers


KINDS: dict[PiiKind, Callable[[str, list[Span]], Iterator[Span]]] = {
    "email": _find_emails,
    "card": _find_cards,
    "snils": _find_snils,
    "passport": _find_passports,
    "inn": _find_inn,
    "phone": _find_phones,
    "ip": _find_addresses,
}
