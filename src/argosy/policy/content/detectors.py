"""Detectors of personal data and secrets: a pattern each, what may not stand beside a match, and a check of digits.

Fixed formats only: a detector that needs context words or entropy finds too much in prose and code. Formats of keys are
those that their issuers document.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from argosy.policy.content.pattern_prefixes import MAX_MATCH_CHARS, BoundedPattern, PatternError

MAX_DENY_WORDS = 1000
MAX_CUSTOM_PATTERNS = 20
MAX_END_CHARS = 64
_WORD = "0-9A-Za-z_"


Action = Literal["redact", "mask", "stop", "report"]
"""Effect on a match.

- `redact` replaces it by the detector's name in brackets, such as `[email]`.
- `mask` replaces it by characters of the same format, of which the last ones may be kept.
- `stop` ends the text before it.
- `report` counts it only.
"""


class Detector(NamedTuple):
    """Format of one kind of text.

    Attributes:
        name: Name in settings, metrics and replacements.
        pattern: The text, or the beginning that proves it if `swallowed` is set. Greedy, without assertions.
        not_before: Characters that may not precede a match, as in the brackets of a pattern; empty for any.
        not_after: Pattern of what may not follow a match; None for anything.
        check: Verifies the digits of a match; None for no check.
        swallowed: Characters that belong to the match as long as they follow it; None for no more than the match.
        swallowed_until: Pattern at whose end they no longer belong to it, of at most `MAX_END_CHARS`; None for none.
        keep_last: Characters at the end of a match that `mask` keeps.
        masked: Replacement of `mask` in the format of the match; None for asterisks.
    """

    name: str
    pattern: BoundedPattern
    not_before: str = _WORD
    not_after: BoundedPattern | None = None
    check: Callable[[str], bool] | None = None
    swallowed: str | None = None
    swallowed_until: str | None = None
    keep_last: int = 0
    masked: str | None = None

    def replace(self, match: str, action: Action) -> str:
        """Return the replacement of a match. It contains no character that JSON escapes."""
        if action != "mask":
            return f"[{self.name}]"
        if self.masked is not None:
            return self.masked
        kept = match[-self.keep_last :] if self.keep_last else ""
        return (
            "".join("*" if each.isalnum() else each for each in match[: len(match) - len(kept)])
            + kept
        )


def _pattern(text: str) -> BoundedPattern:
    return BoundedPattern(text)


_NO_WORD_AFTER = _pattern(f"[{_WORD}]")
_NO_NUMBER_AFTER = _pattern(r"[0-9A-Za-z_]|[.,\-/][0-9]")


def _digits(text: str) -> list[int]:
    return [ord(each) - 48 for each in text if "0" <= each <= "9"]


def _is_luhn(text: str) -> bool:
    digits = _digits(text)
    doubled = (2 * each - 9 * (each > 4) for each in digits[-2::-2])
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


_CARD_LENGTHS = (
    (re.compile("4"), {13, 16, 19}),
    (re.compile("5[1-5]|2(22[1-9]|2[3-9]|[3-6]|7[01]|720)"), {16}),
    (re.compile("3[47]"), {15}),
    (re.compile("3(0[0-5]|[689])"), {14, 16, 19}),
    (re.compile("6(011|5|4[4-9])|35(2[89]|[3-8])"), {16, 19}),
    (re.compile("62|81"), {16, 17, 18, 19}),
    (re.compile("50|5[6-9]|6[0379]"), {12, 13, 14, 15, 16, 17, 18, 19}),
)
"""Issuers' prefixes and the lengths of their numbers (ISO/IEC 7812).

They are Visa, Mastercard, American Express, Diners Club, Discover and JCB, UnionPay, and Maestro.
"""


def _is_card(text: str) -> bool:
    number = "".join(each for each in text if each.isdigit())
    return _is_luhn(number) and any(
        prefix.match(number) and len(number) in lengths for prefix, lengths in _CARD_LENGTHS
    )


_IBAN_COUNTRIES = {
    15: "NO",
    16: "BE",
    18: "DK FI FK FO GL NL SD",
    19: "MK SI",
    20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "BI DJ FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}
"""Countries by the length of their IBANs (SWIFT's registry, release of 2025)."""
_IBAN_LENGTHS = {
    country: length
    for length, countries in _IBAN_COUNTRIES.items()
    for country in countries.split()
}


def _is_iban(text: str) -> bool:
    account = text.replace(" ", "").upper()
    if len(account) != _IBAN_LENGTHS.get(account[:2]):
        return False
    return int("".join(str(int(each, 36)) for each in account[4:] + account[:4])) % 97 == 1


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_us_ssn(text: str) -> bool:
    area, group, serial = text[:3], text[4:6], text[7:]
    return area not in {"000", "666"} and area < "900" and group != "00" and serial != "0000"


def _is_de_tax_id(text: str) -> bool:
    digits = _digits(text)
    counts = sorted(digits[:10].count(each) for each in set(digits[:10]))
    if digits[0] == 0 or counts[-1] not in {2, 3} or counts[-2:-1] not in ([], [1]):
        return False
    product = 10
    for each in digits[:10]:
        product = 2 * ((each + product) % 10 or 10) % 11
    return (11 - product) % 10 == digits[10]


def _is_fr_nir(text: str) -> bool:
    number = text.replace(" ", "").upper().replace("2A", "19").replace("2B", "18")
    return number.isdigit() and 97 - int(number[:-2]) % 97 == int(number[-2:])


def _is_es_dni(text: str) -> bool:
    number = text.upper().replace("X", "0", 1).replace("Y", "1", 1).replace("Z", "2", 1)
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number[:8]) % 23] == text[-1].upper()


_IT_ODD_VALUES = "BAFHJNPRTVBAFHJNPRTVCESULDGIMOQKWZYX"
"""Values of the digits and letters at odd places of an Italian tax code, as letters from A = 0."""


def _is_it_codice(text: str) -> bool:
    code = text.upper()
    odd = sum(ord(_IT_ODD_VALUES[int(each, 36)]) - 65 for each in code[:15:2])
    even = sum(int(each) if each.isdigit() else ord(each) - 65 for each in code[1:15:2])
    return chr((odd + even) % 26 + 65) == code[15]


def _is_nl_bsn(text: str) -> bool:
    digits = _digits(text)
    return any(digits) and (
        sum(d * w for d, w in zip(digits, (9, 8, 7, 6, 5, 4, 3, 2, -1), strict=True)) % 11 == 0
    )


def _is_pl_pesel(text: str) -> bool:
    digits = _digits(text)
    month, day = (digits[2] % 2) * 10 + digits[3], digits[4] * 10 + digits[5]
    weights = (1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1)
    return 1 <= month <= 12 and 1 <= day <= 31 and sum(map(int.__mul__, digits, weights)) % 10 == 0


def _is_br_cpf(text: str) -> bool:
    digits = _digits(text)
    if len(set(digits)) == 1:
        return False
    return all(
        sum(d * w for d, w in zip(digits, range(count + 1, 1, -1), strict=False)) * 10 % 11 % 10
        == digits[count]
        for count in (9, 10)
    )


_DIHEDRAL = "0123456789123406789523401789563401289567401239567859876043216598710432765982104387659321049876543210"
_VERHOEFF = "01234567891576283094580379614289160435279453126870428657390127938064157046913258"


def _is_in_aadhaar(text: str) -> bool:
    digits = _digits(text)
    checksum = 0
    for position, digit in enumerate(reversed(digits)):
        permuted = int(_VERHOEFF[position % 8 * 10 + digit])
        checksum = int(_DIHEDRAL[checksum * 10 + permuted])
    return checksum == 0 and digits[0] > 1


def _is_cn_id(text: str) -> bool:
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    total = sum(w * int(each) for w, each in zip(weights, text, strict=False))
    return "10X98765432"[total % 11] == text[17].upper() and "1800" < text[6:10] < "2100"


_BASE64 = r"A-Za-z0-9_\-"
_SECRETS = (
    (r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}", _WORD, None),  # Amazon Web Services
    (r"gh[pousr]_[A-Za-z0-9]{36}", _WORD, _WORD),  # GitHub
    (r"github_pat_[A-Za-z0-9_]{40}", _WORD, _WORD),
    (r"glpat-[A-Za-z0-9_\-]{20}", _WORD, _BASE64 + "."),  # GitLab
    (
        r"sk-(?:proj-|svcacct-|admin-|ant-|or-)?[A-Za-z0-9_\-]{20}",
        _WORD + r"\-",
        _BASE64,
    ),  # OpenAI, Anthropic, OpenRouter
    (r"AIza[A-Za-z0-9_\-]{35}", _WORD, _BASE64),  # Google
    (r"ya29\.[A-Za-z0-9_\-]{20}", _WORD, _BASE64 + "."),
    (r"xox[abeoprs]-[A-Za-z0-9\-]{10}", _WORD, r"A-Za-z0-9\-"),  # Slack
    (r"(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16}", _WORD, _WORD),  # Stripe
    (r"whsec_[A-Za-z0-9+/=]{24}", _WORD, r"A-Za-z0-9+/="),
    (r"npm_[A-Za-z0-9]{36}", _WORD, _WORD),
    (r"pypi-AgEI[A-Za-z0-9_\-]{20}", _WORD, _BASE64),
    (r"hf_[A-Za-z]{30}", _WORD, _WORD),  # Hugging Face
    (r"SG\.[A-Za-z0-9_\-]{16}", _WORD, _BASE64 + "."),  # SendGrid
    (r"dop_v1_[a-f0-9]{32}", _WORD, _WORD),  # DigitalOcean
    (r"eyJ[A-Za-z0-9_\-]{16}", _WORD, _BASE64 + "."),  # JSON Web Tokens
    (r"argosy_[A-Za-z0-9]{16}", _WORD, _BASE64),
)


def _list_contacts() -> list[Detector]:
    """Return the detectors of addresses and accounts."""
    email = _pattern(r"[0-9A-Za-z._%+'\-]{1,64}@(?:[0-9A-Za-z\-]{1,40}\.){1,3}[A-Za-z]{2,24}")
    return [
        Detector("email", email, r"0-9A-Za-z._%+\-", masked="redacted@example.invalid"),
        *(
            Detector("card", _pattern(pattern), r"0-9A-Za-z_.,\-/", after, _is_card, keep_last=4)
            for pattern, after in (
                (r"[2-6][0-9]{3}(?: [0-9]{4}){3}", _pattern("[0-9A-Za-z_]")),
                (r"[2-6][0-9]{3}(?:-[0-9]{4}){3}", _NO_NUMBER_AFTER),
                (r"3[0-9]{3}[ \-][0-9]{6}[ \-][0-9]{4,5}", _NO_NUMBER_AFTER),
                (r"[2-6][0-9]{11,18}", _NO_NUMBER_AFTER),
            )
        ),
        *(
            Detector("iban", _pattern(pattern), _WORD, _NO_WORD_AFTER, _is_iban, keep_last=4)
            for pattern in (
                r"[A-Za-z]{2}[0-9]{2}(?: [0-9A-Za-z]{4}){2,7}(?: [0-9A-Za-z]{1,3})?",
                r"[A-Za-z]{2}[0-9]{2}[0-9A-Za-z]{11,30}",
            )
        ),
        Detector(
            "ip",
            _pattern(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}"),
            r"0-9A-Za-z_.\-",
            _pattern(r"[0-9A-Za-z_]|[.\-][0-9A-Za-z]"),
            _is_ip,
            masked="0.0.0.0",  # noqa: S104 - no address to listen on
        ),
        Detector(
            "ip",
            _pattern(r"[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{1,4}){7}"),
            "0-9A-Za-z_:",
            _pattern("[0-9A-Za-z_:]"),
            _is_ip,
            masked="::",
        ),
        Detector(
            "phone",
            _pattern(r"\+[1-9](?:[ .\-]?\(?[0-9]\)?){7,14}"),
            r"0-9A-Za-z_+",
            _pattern("[0-9A-Za-z_]"),
            keep_last=2,
        ),
        Detector(
            "phone",
            _pattern(r"\(?[2-9][0-9]{2}\)?[ .\-][2-9][0-9]{2}[.\-][0-9]{4}"),
            r"0-9A-Za-z_.\-/+",
            _NO_NUMBER_AFTER,
            keep_last=2,
        ),
    ]


def _list_national_ids() -> list[Detector]:
    """Return the detectors of the ids of persons in their countries."""
    ids: tuple[tuple[str, str, Callable[[str], bool] | None], ...] = (
        ("us_ssn", r"[0-9]{3}-[0-9]{2}-[0-9]{4}", _is_us_ssn),
        ("de_tax_id", r"[1-9][0-9]{10}|[1-9][0-9] [0-9]{3} [0-9]{3} [0-9]{3}", _is_de_tax_id),
        ("fr_nir", r"[12][0-9]{2}(?:0[1-9]|1[0-2])[0-9][0-9AB][0-9]{8}", _is_fr_nir),
        (
            "fr_nir",
            r"[12] [0-9]{2} (?:0[1-9]|1[0-2]) [0-9][0-9AB] [0-9]{3} [0-9]{3} [0-9]{2}",
            _is_fr_nir,
        ),
        ("es_dni", r"(?i)[XYZ0-9][0-9]{7}[A-Z]", _is_es_dni),
        (
            "it_codice_fiscale",
            r"(?i)[A-Z]{6}[0-9LMNPQRSTUV]{2}[A-EHLMPR-T][0-9LMNPQRSTUV]{2}[A-Z][0-9LMNPQRSTUV]{3}[A-Z]",
            _is_it_codice,
        ),
        ("nl_bsn", r"[0-9]{9}", _is_nl_bsn),
        ("pl_pesel", r"[0-9]{11}", _is_pl_pesel),
        ("br_cpf", r"[0-9]{3}\.[0-9]{3}\.[0-9]{3}-[0-9]{2}", _is_br_cpf),
        ("in_aadhaar", r"[2-9][0-9]{3} [0-9]{4} [0-9]{4}|[2-9][0-9]{11}", _is_in_aadhaar),
        ("cn_id", r"[1-9][0-9]{16}[0-9Xx]", _is_cn_id),
        (
            "uk_nino",
            r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?[0-9]{2} ?[0-9]{2} ?[0-9]{2} ?[A-D]",
            None,
        ),
    )
    return [
        Detector(name, _pattern(pattern), r"0-9A-Za-z_.,\-/", _NO_NUMBER_AFTER, check)
        for name, pattern, check in ids
    ]


def _list_secrets() -> list[Detector]:
    """Return the detectors of keys and passwords."""
    found = [
        Detector("secret", _pattern(pattern), before, swallowed=swallowed)
        for pattern, before, swallowed in _SECRETS
    ]
    found += [
        Detector(
            "secret",
            _pattern(r"-----BEGIN (?:[A-Z]{1,10} ){0,3}PRIVATE KEY(?: BLOCK)?-----"),
            "",
            # Headers of an encrypted key and its body. Source code has escapes in place of line ends.
            swallowed=r"A-Za-z0-9+/=\-\\ \r\n\t:,",
            swallowed_until="-----END [A-Z ]{0,40}-----",
        ),
        Detector(
            "secret",
            _pattern(r"(?i)[a-z][a-z0-9+.\-]{1,15}://[^\s:/@\"'<>]{1,64}:[^\s/@\"'<>]{1,64}@"),
            "A-Za-z0-9+.\\-",
            swallowed=r"A-Za-z0-9.\-:",
        ),
    ]
    return found


def _group_detectors() -> dict[str, tuple[Detector, ...]]:
    """Return the detectors by the name that settings use."""
    found = (*_list_contacts(), *_list_national_ids(), *_list_secrets())
    names = dict.fromkeys(each.name for each in found)
    return {name: tuple(each for each in found if each.name == name) for name in names}


DETECTORS = _group_detectors()
"""Detectors by the name that settings use."""


_MARKUP_TAGS = (
    "script|iframe|frame|object|embed|applet|style|link|meta|base|form|input|button|textarea|select|svg|math|img|image|"
    "picture|video|audio|source|track|template|portal"
)
MARKUP_DETECTORS: dict[str, tuple[Detector, ...]] = {
    "html": (
        Detector(
            "html",
            _pattern(f"(?i)</?(?:{_MARKUP_TAGS})"),
            "",
            _NO_WORD_AFTER,
            swallowed=r"^<\n",
            swallowed_until=">",
        ),
    ),
    "markdown_image": (
        Detector(
            "markdown_image",
            _pattern(r"!\[[^\[\]\n]{0,100}\]\("),
            "",
            swallowed=r"^\n",
            swallowed_until=r"\)",
        ),
    ),
    "script_link": (Detector("script_link", _pattern(r"(?i)(?:javascript|vbscript):"), _WORD),),
}
"""Detectors of markup that runs or loads something where an answer is shown, by the name that settings use."""


def create_word_detector(name: str, words: list[str]) -> Detector:
    """Return a detector of whole words, whatever their case.

    Raises:
        PatternError: There are too many words, or one is empty or too long.
    """
    if not 1 <= len(words) <= MAX_DENY_WORDS or not all(word.strip() for word in words):
        raise PatternError(f"Give 1 to {MAX_DENY_WORDS} words, none of them empty.")
    alternatives = sorted(map(re.escape, set(words)), key=len, reverse=True)
    pattern = BoundedPattern(f"(?i){'|'.join(alternatives)}", MAX_DENY_WORDS * MAX_MATCH_CHARS)
    return Detector(name, pattern, _WORD, _NO_WORD_AFTER)


def create_custom_detector(name: str, pattern: str) -> Detector:
    """Return a detector of an operator's pattern, whose matches are whole words.

    Raises:
        PatternError: The pattern cannot be used; the message says why.
    """
    return Detector(name, BoundedPattern(pattern), _WORD, _NO_WORD_AFTER)
