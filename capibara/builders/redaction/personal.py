"""Rules that find personal data: addresses, phone and card numbers, accounts, public IP addresses, names of users in paths."""

from __future__ import annotations

import ipaddress
import re

from capibara.builders.redaction.rules import Category, Check, Rule

# Ends of host names that are words of programs as well (`query@key.to`) count only where no call follows.
_ENDS = frozenset(
    "com org net edu gov mil int info biz name pro aero coop museum jobs mobi travel app dev xyz online site tech store "
    "cloud ai io co me tv cc eu asia email company academy agency blog digital global group health institute live media "
    "network news online software solutions studio systems team today university work world zone".split()
)
_EXAMPLE_HOST = re.compile(
    r"(?i)(?:.*\.)?(?:example|test|invalid|localhost|local|localdomain|internal)(?:\.(?:com|org|net|edu))?"
)
_SERVICES = frozenset("git noreply no-reply donotreply do-not-reply root user postmaster example nobody".split())
_CARD = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}|"
    r"6(?:011|5\d\d|4[4-9]\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|3(?:0[0-5]|[68]\d)\d{11}"
)  # fmt: skip
_GROUPS = ((4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 4, 4, 3), (4, 4, 4, 1))
_IBAN_CODES = frozenset(
    "AD AE AL AT AZ BA BE BG BH BR BY CH CR CY CZ DE DK DO EE EG ES FI FO FR GB GE GI GL GR GT HR HU IE IL IQ IS IT JO "
    "KW KZ LB LC LI LT LU LV LY MC MD ME MK MR MT MU NL NO PK PL PS PT QA RO RS SA SC SE SI SK SM ST SV TL TN TR UA VA "
    "VG XK".split()
)
# Accounts of images and services, whose names say nothing about a person.
_NOBODY = frozenset(
    "user users runner ubuntu debian root admin administrator public shared default guest jovyan vscode node app appuser "
    "ec2-user ubuntu centos fedora vagrant docker circleci travis jenkins codespace gitpod sandbox work workspace me you "
    "username user_name your_username yourname name runneradmin containeradministrator alluser all builder build dev "
    "developer coder test tester example foo bar linuxbrew git www-data nobody service notebook sagemaker-user colab".split()
)
_PHONE = re.compile(
    r"(?i)(?<![a-z])(?:tele)?(?:phone|mobile|fax|tel|cell)(?:[ _-]?(?:no|nr|number))?[\"']?\s?[.:=]{1,2}\s?[\"']?\(?$"
)
_VERSION = re.compile(r"(?i)(?:version|ver|v|release|sections?|chapter|==|>=|<=|~=|rev|build)[\s:=\"']{0,4}$")


def _is_address(match: re.Match[str]) -> bool:
    text, (start, end) = match.string, match.span()
    name, host = match[1].lower(), match[2].lower()
    if name in _SERVICES or _EXAMPLE_HOST.fullmatch(host):
        return False
    last = host.rpartition(".")[2]
    if last not in _ENDS and (len(last) != 2 or last in ("py", "sh", "md", "rs", "pl")):
        return False  # a file name
    if len(name) == 1 and last not in ("com", "org", "net", "edu"):
        return False  # a product of matrices
    if text[end : end + 1] in ("(", "["):
        return False
    before = text[max(0, start - 200) : start]
    return re.search(r"://[^\s@/?#]*$", before) is None  # a password in a URL


def _is_phone(match: re.Match[str]) -> bool:
    digits = [c for c in match[0] if c.isdigit()]
    least, most = (10, 15) if any(c in " .-()" for c in match[0]) else (11, 13)
    is_number = least <= len(digits) <= most and digits[0] != "0" and len(set(digits)) > 3
    return is_number and "555-01" not in match[0]


def _is_national_phone(match: re.Match[str]) -> bool:
    return len({c for c in match[0] if c.isdigit()}) > 3 and "555-01" not in match[0]


def _is_named_phone(match: re.Match[str]) -> bool:
    if _PHONE.search(match.string, max(0, match.start() - 30), match.start()) is None:
        return False
    digits = [c for c in match[0] if c.isdigit()]
    return 7 <= len(digits) <= 15 and len(set(digits)) > 3 and re.match(r"\d{4}-\d\d-\d\d", match[0]) is None


def _is_card(match: re.Match[str]) -> bool:
    digits = "".join(c for c in match[0] if c.isdigit())
    parts = tuple(map(len, re.split(r"[ -]", match[0])))
    if _CARD.fullmatch(digits) is None or (len(parts) > 1 and parts not in _GROUPS) or len(set(digits)) < 2:
        return False
    doubled = [int(c) * (2 - (i % 2)) for i, c in enumerate(reversed(digits), 1)]
    return sum(item - 9 if item > 9 else item for item in doubled) % 10 == 0


def _is_iban(match: re.Match[str]) -> bool:
    text = match[0].replace(" ", "")
    if text[:2] not in _IBAN_CODES or not 15 <= len(text) <= 34:
        return False
    return int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def _is_public_ipv4(match: re.Match[str]) -> bool:
    try:
        address = ipaddress.IPv4Address(match[0])
    except ValueError:
        return False
    if (
        not address.is_global
        or address.is_multicast
        or match[0] in ("8.8.8.8", "8.8.4.4", "1.1.1.1", "1.0.0.1", "9.9.9.9")
    ):
        return False
    return (
        int(match[0].partition(".")[0]) > 4
        and _VERSION.search(match.string, max(0, match.start() - 16), match.start()) is None
    )


def _is_public_ipv6(match: re.Match[str]) -> bool:
    try:
        address = ipaddress.IPv6Address(match[0])
    except ValueError:
        return False
    return address.is_global and not address.is_multicast and int(address) >> 125 == 1 and len(match[0]) >= 12


def _is_person(match: re.Match[str]) -> bool:
    name = match[1]
    return name.lower() not in _NOBODY and not name.startswith((".", "$", "%", "<", "{"))


_ACCOUNT = re.compile(r"[A-Z]{2}[0-9]{2}[A-Z0-9 ]{10,}")
_NUMBER, _COLONS, _AT = re.compile(r"[0-9][0-9 .()-]{5,}[0-9]"), re.compile("[0-9a-fA-F:]{12,}"), re.compile("@")


def _rule(
    kind: str,
    pattern: str,
    *gates: str,
    group: int = 0,
    check: Check | None = None,
    within: re.Pattern[str] | None = None,
    margin: tuple[int, int] = (2, 2),
) -> Rule:
    return Rule(
        kind=kind,
        pattern=re.compile(pattern),
        group=group,
        gates=gates,
        check=check,
        category=Category.PERSONAL,
        within=within,
        margin=margin,
    )


_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
PERSONAL = (
    _rule("email", r"(?<![\w.+%-])([A-Za-z0-9][\w.+%-]{0,63})@((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,5}[A-Za-z]{2,12})(?![\w-])(?!\.[A-Za-z])", check=_is_address, within=_AT, margin=(66, 320)),
    _rule("phone", r"(?<![\w.+-])\+\d(?:[ .()-]{0,2}\d){7,14}(?!\w|\.\d)", "+", check=_is_phone, within=_NUMBER),
    _rule("phone", r"(?<![\w.+/-])(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .-])[2-9]\d\d[.-]\d{4}(?![\w-]|\.\d)", check=_is_national_phone, within=_NUMBER),
    _rule("phone", r"(?<!\w)\+?\d[\d ().-]{5,20}\d(?!\w)", check=_is_named_phone, within=_NUMBER),
    _rule("credit_card", r"(?<![\w.+/-])\d(?:[ -]?\d){12,18}(?![\w-]|\.\d)", check=_is_card, within=_NUMBER),
    _rule("iban", r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])", check=_is_iban, within=_ACCOUNT),
    _rule("social_security_number", r"(?<![\w.-])(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-]|\.\d)", within=_NUMBER),
    _rule("ip_address", rf"(?<![\w.-]){_BYTE}(?:\.{_BYTE}){{3}}(?![\w-]|\.\d)", ".", check=_is_public_ipv4, within=_NUMBER),
    _rule("ip_address", r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){2,7}(?::?[0-9a-fA-F]{1,4}){0,6}(?![\w:])", check=_is_public_ipv6, within=_COLONS),
    _rule("user", r"(?<![\w.])/(?:home|Users|export/home|var/home)/([A-Za-z0-9_][\w.-]{0,63})(?![\w.-])", "/home/", "/users/", group=1, check=_is_person),
    _rule("user", r"(?i)\b[a-z]:(?:\\{1,4}|/)(?:Users|Documents and Settings)(?:\\{1,4}|/)([\w][\w. -]{0,63}?)(?=[\\/\"'\n]|$)", "users", "documents and settings", group=1, check=_is_person),
    _rule("user", r"(?m)(?:^|[\"'])(?:\([\w.-]{1,30}\)\s?)?([a-z_][a-z0-9_-]{0,31})@[\w.-]{1,64}:[~/][^\n]{0,200}?[$#] ", group=1, check=_is_person, within=_AT, margin=(100, 300)),
)  # fmt: skip
