"""Regular expressions of string formats.

Each matches only valid texts, but not all of them: no leap seconds, no quoted mailboxes, no IP literals in URIs,
years of four digits, bounded fields. A generator needs one way to write a value, not every way.
"""

from __future__ import annotations

_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = (
    "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"  # from 1000 on
)
_DATE = f"(?:[1-9][0-9]{{3}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"

_NUMBER = "[0-9]{1,6}"
_DURATION_TIME = (
    f"T(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
)
_DURATION_DATE = (
    f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
)

_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_MAIL_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = rf"{_MAIL_ATOM}(?:\.{_MAIL_ATOM}){{0,2}}@{_HOSTNAME}"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _shortened_ipv6(leading: int) -> str:
    """Return the addresses with `leading` groups before the double colon."""
    left = f"(?:{_GROUP}:){{{leading - 1}}}{_GROUP}" if leading else ""
    right = f"(?:{_GROUP}(?::{_GROUP}){{0,{5 - leading}}})?" if leading < 6 else ""
    return f"{left}::{right}"


_IPV6 = "|".join([f"(?:{_GROUP}:){{7}}{_GROUP}", *(_shortened_ipv6(count) for count in range(7))])

_URI_CHARACTER = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_NO_COLON = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:/{_URI_CHARACTER}*)*"
_TAIL = rf"(?:\?(?:{_URI_CHARACTER}|[/?])*)?(?:#(?:{_URI_CHARACTER}|[/?])*)?"
_AUTHORITY = rf"//{_HOSTNAME}(?::[0-9]{{1,4}})?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]{{0,15}}:(?:{_AUTHORITY}{_PATH}|{_URI_CHARACTER}+{_PATH}){_TAIL}"
_RELATIVE = f"(?:{_AUTHORITY}{_PATH}|/(?:{_URI_CHARACTER}+{_PATH})?|{_NO_COLON}+{_PATH})?{_TAIL}"

_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_VARIABLES = r"[+#./;?&]?[A-Za-z_][A-Za-z0-9_]{0,30}\*?(?:,[A-Za-z_][A-Za-z0-9_]{0,30}\*?)*"

_BODIES = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_NUMBER}W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "iri-reference": f"{_URI}|{_RELATIVE}",
    "uri-template": rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|\{{{_VARIABLES}\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
}

FORMAT_PATTERNS = {name: f"^(?:{body})$" for name, body in _BODIES.items()}
"""Regular expression (ECMA-262) for each format that is enforced."""
