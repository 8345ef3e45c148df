"""Rules that find secrets by the name beside them: assignments, environment variables, flags, SQL, configuration files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from capibara.builders.redaction.rules import IDENTIFIER_PATH, Check, Rule, is_placeholder, is_random

# A name of the first kind stands for a password, which may be any word; one of the second for a generated key.
_PASSWORD = (
    r"passw(?:or)?ds?|passphrase|passcode|pwd|(?<![a-z])pass(?![a-z])|(?<![a-z])pw(?![a-z])|credentials?|"
    r"passwort|kennwort|contrase(?:ñ|n)a|mot_?de_?passe|senha|wachtwoord|пароль|密码|パスワード"
)
_KEY_OF = ("api", "access", "auth", "private", "secret", "encryption", "signing", "master", "account", "session", "ssh")
_KEY = r"keys?|secrets?|tokens?|(?<![a-z])auth(?![a-z])"
_NAME = rf"(?P<name>(?P<password>{_PASSWORD})|(?P<key>{_KEY}))"
ANCHOR = re.compile(
    "[Pp](?:[Aa][Ss][Ss]|[Ww])|[Kk][Ee][Yy]|[Ss][Ee][Cc][Rr][Ee][Tt]|[Tt][Oo][Kk][Ee][Nn]|[Aa][Uu][Tt][Hh]|"
    "[Cc][Rr][Ee][Dd][Ee][Nn][Tt][Ii][Aa][Ll]|[Kk][Ee][Nn]{2}[Ww][Oo][Rr][Tt]|[Cc][Oo][Nn][Tt][Rr][Aa][Ss][Ee]|"
    "[Mm][Oo][Tt]_?[Dd][Ee]|[Ss][Ee][Nn][Hh][Aa]|[Ww][Aa][Cc][Hh][Tt][Ww]|[Пп]ароль|密码|パスワード"
)
_REST = r"(?P<rest>[A-Za-z0-9_.-]{0,40})"
# `token_type = "bearer"` names a type, not a token.
_OF_IT = re.compile(
    r"(?i)[_.-]?(?:fields?|labels?|types?|names?|ur[li]s?|paths?|files?(?:name)?|hints?|regexp?|patterns?|len(?:gth)?|prompts?|messages?|"
    r"msg|errors?|polic(?:y|ies)|class(?:es)?|formats?|columns?|re|chars?|characters?|index|counts?|expir\w*|ttl|limits?|"
    r"endpoints?|headers?|env|vars?|variables?|kinds?|lists?|maps?|sets?|inputs?|valid\w*|helpers?|texts?|titles?|prefix(?:es)?|"
    r"suffix(?:es)?|tags?|managers?|stores?|handlers?|providers?|services?|algorithm|method|mode|strength|required|reset|"
    r"change\w*|confirm\w*|group|owner|table|parser|dir(?:ectory)?|info|status|spec|schema|encod\w*|desc\w*|docs?|ids?)[A-Za-z0-9_.-]*"
)
_FLAG = re.compile(r"(?:^|[\s\"'])--?(?:[A-Za-z0-9]{1,20}-)*$")
_PATH_OR_URL = re.compile(r"(?:\.{0,2}|~)/\S*|[A-Za-z]:\\\S*|[a-z]+://\S*")
_PLACE = re.compile(
    r"[\w.-]{1,80}:\d+(?::\d+)?|v?\d+(?:\.\d+)+\S{0,20}|[\w.-]+@[\w.-]+"
)  # file:line, a version, an address
# What may stand before a name and its value with only spaces between: ENV of Docker, setx, set -x of fish, or nothing.
_BEFORE_NAME = re.compile(r"\s*(?:(?:ENV|ARG|setx|setenv|set\s+-\w{1,3}|config\s+set|secrets?\s+set)\s+)?[\w.-]*")
_WORDS = re.compile(r"[A-Za-z]+(?:[_-][A-Za-z]+)*")


def _is_literal(match: re.Match[str]) -> bool:
    """Whether a quoted text assigned to a name is a secret."""
    value = match["value"]
    if _names_another(match) or is_placeholder(value):
        return False
    if match["equals"] == "," and not is_random(value, 2.5):
        return False  # the next item of a list
    return _is_password(value) if match["password"] else _is_key(value)


def _is_bare(match: re.Match[str]) -> bool:
    """Whether a text without quotes, as in an environment variable, is a secret and no expression of a program."""
    value = match["value"]
    if _names_another(match) or is_placeholder(value) or IDENTIFIER_PATH.fullmatch(value):
        return False
    if match["password"]:
        is_shell = match["name"].isupper() and match["equals"] == "="
        is_number = value.isdigit() and match["name"].lower() in ("password", "passwd", "passcode", "pwd")
        return _is_password(value) and len(value) >= 6 and (is_shell or is_number or is_random(value, 2.0))
    return _is_key(value)


def _is_flag(match: re.Match[str]) -> bool:
    value = match["value"]
    before = match.string[max(0, match.start() - 40) : match.start()]
    if _FLAG.search(before) is None or is_placeholder(value) or value.startswith("-"):
        return False
    if match["name"].lower() == "key" and not match["rest"]:
        return _is_key(value)  # `tool --key VALUE`: a name that stands for much else
    if _names_another(match):
        return False
    if match["name"].lower() in ("secret", "token") and len(value) >= 8 and is_random(value, 2.5):
        return _is_password(value)
    return len(value) >= 4 and (_is_password(value) if match["password"] else _is_key(value))


def _is_laid_out(match: re.Match[str]) -> bool:
    """Whether what stands beside a name in a table, a pair, or on the next line is a secret: less sure than after "="."""
    value, line = match["value"], match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.start()]
    if _names_another(match) or is_placeholder(value) or _PLACE.fullmatch(value):
        return False
    if match["space"] and not _BEFORE_NAME.fullmatch(line):
        return False
    if match["alone"] is not None and (match["space"] or match["line"]) and match["alone"].strip(" \t\r\"'`,;)"):
        return False
    return _is_shown(match, value)


def _is_pair(match: re.Match[str]) -> bool:
    return not (_names_another(match) or is_placeholder(match["value"])) and _is_shown(match, match["value"])


def _is_shown(match: re.Match[str], value: str) -> bool:
    if match["password"]:
        return _is_password(value) and len(value) >= 6 and is_random(value, 2.0)
    return _is_key(value)


def _is_named_password(match: re.Match[str]) -> bool:
    return not is_placeholder(match["value"]) and _is_password(match["value"])


def _is_element(match: re.Match[str]) -> bool:
    value = match["value"]
    if _is_about_it(match) or is_placeholder(value):
        return False
    return _is_password(value) if match["password"] else _is_key(value)


def _is_number(match: re.Match[str]) -> bool:
    return bool(match["password"]) and not _names_another(match) and not is_placeholder(match["value"])


def _names_another(match: re.Match[str]) -> bool:
    if match.string.endswith("<", 0, match.start("name")):
        return True  # our own placeholder
    return _is_about_it(match)


def _is_about_it(match: re.Match[str]) -> bool:
    if match["name"].lower().startswith("key"):
        before = match.string[max(0, match.start("name") - 12) : match.start("name")].lower().rstrip("_-. ")
        if not before.endswith(_KEY_OF):
            return True
    rest = match["rest"]
    return bool(rest) and _OF_IT.fullmatch(rest) is not None


def _is_password(value: str) -> bool:
    if len(value) < 4 or _PATH_OR_URL.fullmatch(value) or any(c in value for c in " \t"):
        return False
    if _WORDS.fullmatch(value):  # words: a password only if they are more than a name
        return len(value) >= 8 and value.islower() and "_" not in value
    return not IDENTIFIER_PATH.fullmatch(value) and any(c.isalnum() for c in value) and value[-1] not in ":?"


def _is_key(value: str) -> bool:
    if len(value) < 12 or _PATH_OR_URL.fullmatch(value) or any(c in value for c in " \t(){}[],"):
        return False
    return is_random(value, 3.0) and sum(c.isdigit() for c in value) >= 2 and not IDENTIFIER_PATH.fullmatch(value)


def _rule(
    kind: str,
    pattern: str,
    *gates: str,
    check: Check = _is_named_password,
    anchor: re.Pattern[str] | None = None,
) -> Rule:
    compiled = re.compile(f"(?i){pattern}", re.MULTILINE)
    return Rule(kind=kind, pattern=compiled, group="value", gates=gates, check=check, anchor=anchor)


_GATES = (
    *("pass", "pwd", "pw", "key", "secret", "token", "auth", "credential"),
    *("kennwort", "contrase", "senha", "wachtwoord", "пароль", "密码", "パスワード"),
)
_QUOTE = r"(?:[rbfu]{1,2})?(?P<quote>\\?(?:\"{3}|'{3}|[\"'`]))"
NAMED = (
    # NAME = "value", "name": "value", name: str = 'value', name => "value", os.environ["NAME"] = "value"
    _rule(
        "named_secret",
        rf"{_NAME}{_REST}\\?[\"']?\]?(?:\s?:\s?(?:str|bytes|string|Optional\[str\]))?\s{{0,8}}(?P<equals>=>|:=|==|!=|=|:|,)\s{{0,8}}"
        rf"{_QUOTE}(?P<value>[^\"'`\n]{{4,400}}?)(?P=quote)",
        *_GATES,
        check=_is_literal,
        anchor=ANCHOR,
    ),
    # NAME=value, export NAME=value, name: value (YAML), name = value (INI)
    _rule(
        "named_secret",
        rf"{_NAME}{_REST}(?P<equals>=|[ \t]?[:=][ \t]{{1,8}}|:)(?P<value>[^\s\"'`,;(){{}}\[\]<>&|]{{4,400}})(?=[\s\"'`,;&|)\]}}]|$)",
        *_GATES,
        check=_is_bare,
        anchor=ANCHOR,
    ),
    # "password": 83625471 (JSON)
    _rule(
        "password",
        rf"{_NAME}{_REST}\\{{0,4}}[\"']\s?:\s?(?P<value>\d{{6,30}})(?=[\s,}}\]]|$)",
        *_GATES,
        check=_is_number,
        anchor=ANCHOR,
    ),
    # password: >-, and the value in the next line (YAML)
    _rule(
        "named_secret",
        rf"{_NAME}{_REST}\s?:[ \t]{{1,4}}[|>][+-]?[ \t]{{0,4}}\n[ \t]{{1,40}}(?P<value>\S{{4,400}})$",
        *_GATES,
        check=_is_element,
        anchor=ANCHOR,
    ),
    # | name | value |, name: NAME and value: VALUE (Kubernetes, HTML, XML), <td>name</td><td>value, the next line, ENV NAME VALUE
    _rule(
        "named_secret",
        rf"{_NAME}{_REST}[\"'`*\])]{{0,4}}(?:[ \t]{{0,40}}\|[ \t]{{0,40}}[\"'`*]{{0,3}}"
        rf"|[\s,;{{]{{1,60}}(?:--?)?[\"']?(?:value|val|default|content|body|data)[\"']?(?:\s{{0,8}}[:=]\s{{0,8}}|[ \t]{{1,4}})[\"']?"
        rf"|</(?:td|th|dt|b|strong|code)>\s{{0,60}}(?:<[^<>\n]{{1,80}}>\s{{0,20}}){{1,2}}"
        rf"|(?P<line>(?:[ \t]{{1,4}}(?:is|are|was))?[ \t]{{0,8}}[:=]?[ \t]{{0,8}}[\\(]?[ \t]{{0,4}}\r?\n(?:[ \t]{{0,40}}\r?\n)?[ \t]{{0,40}}[\"'`]?)"
        rf"|(?P<space>[ \t]{{1,8}}[\"']?))"
        rf"(?P<value>[^\s\"'`,;(){{}}\[\]<>&|]{{6,400}})(?=[\s\"'`,;|)\]}}<*]|$)(?=(?P<alone>[^\n]{{0,12}}))",
        *_GATES,
        check=_is_laid_out,
        anchor=ANCHOR,
    ),
    # value: VALUE and name: NAME
    _rule(
        "named_secret",
        rf"[\"']?\bvalue[\"']?\s{{0,8}}[:=]\s{{0,8}}[\"']?(?P<value>[^\s\"'`,;(){{}}\[\]<>&|]{{6,400}})[\"']?[\s,]{{1,60}}(?:-[ ])?[\"']?"
        rf"(?:name|key|id)[\"']?\s{{0,8}}[:=]\s{{0,8}}[\"']?[A-Za-z0-9_.-]{{0,40}}?{_NAME}{_REST}",
        "value",
        check=_is_pair,
    ),
    # <password>value</password>
    _rule(
        "named_secret",
        rf"{_NAME}{_REST}>(?P<value>[^<>\s]{{4,400}})</",
        *_GATES,
        check=_is_element,
        anchor=ANCHOR,
    ),
    # <input type="password" value="value">
    _rule(
        "password",
        r"<input\b[^<>\n]{0,200}?type=[\"']password[\"'][^<>\n]{0,200}?\svalue=[\"'](?P<value>[^\"'\n]{4,200})",
        "<input",
    ),
    # auth=("user", "value")
    _rule(
        "password",
        r"(?:\bauth\s?=\s?|BasicAuth|DigestAuth|\.login)\(\s?[\"'][^\"'\n]{1,100}[\"'],\s?[\"'](?P<value>[^\"'\n]{3,200})[\"']",
        "auth", ".login",
    ),
    # --password value, --api-key=value
    _rule(
        "named_secret",
        rf"{_NAME}{_REST}(?:=|\s{{1,4}})[\"']?(?P<value>[^\s\"'`,;(){{}}\[\]<>&|]{{4,400}})",
        *_GATES,
        check=_is_flag,
        anchor=ANCHOR,
    ),
    # Password=value; in a connection string
    _rule("password", r"[;\"'][ ]?(?:password|pwd)[ ]?=[ ]?(?P<value>[^;\"'\s]{3,200})(?=;|[\"']|\s|$)", "password", "pwd"),
    # IDENTIFIED BY 'value', PASSWORD 'value'
    _rule(
        "password",
        r"\b(?:identified(?:\s+with\s+\w+)?\s+(?:by|as)|password|passphrase)\s{1,4}(?P<quote>[\"'])(?P<value>[^\"'\n]{3,200})(?P=quote)",
        "identified", "password", "passphrase",
    ),
    # machine example.org login me password value (.netrc, in any order)
    _rule(
        "password",
        r"\b(?:machine\s{1,8}\S{1,200}|default)(?:\s{1,40}(?:login|account)\s{1,8}\S{1,200}){0,2}\s{1,40}password\s{1,8}(?P<value>\S{3,200})",
        "machine", "default",
    ),
    # curl -u user:value, mysql -pvalue, sshpass -p value
    _rule("password", r"\bcurl\b[^\n]{0,400}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']{1,100}:(?P<value>[^\s\"']{3,200})", "curl"),
    _rule(
        "password",
        r"\b(?:mysql|mysqldump|mysqladmin|mariadb)\b[^\n]{0,200}?\s-p(?P<value>[^\s\"'-][^\s\"']{2,200})",
        "mysql", "mariadb",
    ),
    _rule(
        "password",
        r"\b(?:sshpass|docker\s+login|smbclient|redis-cli|mongo(?:sh|dump)?)\b[^\n]{0,200}?\s-[pa]\s?[\"']?(?P<value>[^\s\"'-][^\s\"']{2,200})",
        "sshpass", "docker", "smbclient", "redis-cli", "mongo",
    ),
)  # fmt: skip

_HEAD = re.compile(r"[^\n|,;\t]{0,80}(?:[|,;\t][^\n|,;\t]{0,80}){1,40}")  # the row of a table that names its columns
_CELL_MARKS = " \t\r\"'`*"
_MOST_HEAD = 3500  # characters
_MOST_ROW = _MOST_CELL = 3500  # characters of a row with line ends before its last cell, and of a cell in quotes
_MOST_OTHERS = 3  # rows with another number of cells that end a table


def in_columns(text: str, anchors: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Secrets below the name of their column, in Markdown and CSV: start and end in the text, and the kind.

    Args:
      text: the text.
      anchors: where a name may begin.
    """
    done = 0  # each row is looked at once, and a long line is no row: the time is linear
    for anchor in anchors:
        begin = text.rfind("\n", max(0, anchor - _MOST_HEAD), anchor) + 1
        if begin < done or not begin and anchor > _MOST_HEAD or (head := _HEAD.match(text, begin)) is None:
            continue
        done = head.end()
        if text[head.end() : head.end() + 1] != "\n":
            continue
        mark = next((mark for mark in "|\t;," if mark in head[0]), ",")
        names = head[0].split(mark)
        if not all(_COLUMN.fullmatch(name.strip(_CELL_MARKS)) for name in names):
            continue
        named = {
            at: result for at, name in enumerate(names) if (result := _SECRET_NAME.fullmatch(name.strip(_CELL_MARKS)))
        }
        named = {at: output for at, output in named.items() if not _names_another(output)}
        at, others = head.end() + 1, 0  # others: rows one after the other that have another number of cells
        while named and others < _MOST_OTHERS:
            # A quote may be alone, as in 5": then each line is a row.
            row = next(filter(None, (_row(text, at, cell, len(names)) for cell in _CELLS[mark])), [])
            end = row[-1].stop if row else text.find("\n", at)
            end = len(text) if end < 0 else end
            others = 0 if row else others + 1 if text[at:end].strip() else _MOST_OTHERS
            for column, result in named.items() if row else ():
                value = text[row[column]].strip(_CELL_MARKS)
                begin = text.find(value, row[column].start)
                if value and not is_placeholder(value) and _is_shown(result, value):
                    yield begin, begin + len(value), "password" if result["password"] else "named_secret"
            if end == len(text):
                break
            at = end + 1
            done = done if others else at


# The cells of a row, with marks and line ends in quotes, and without.
_CELLS = {
    mark: [
        re.compile(rf'( *+"(?:[^"]|""){{0,{_MOST_CELL}}}+"[ \r]*+(?=[{mark}\n]|\Z)|[^{mark}\n]*+){mark}?'),
        re.compile(rf"([^{mark}\n]*+){mark}?"),
    ]
    for mark in ",;\t"
} | {"|": [re.compile(r"([^|\n]*+)\|?")]}


def _row(text: str, at: int, cell: re.Pattern[str], count: int) -> list[slice]:
    """Where the cells of a row are in the text; empty: it has another number of cells than `count`, or too many lines."""
    cells: list[slice] = []
    most = at + _MOST_ROW
    while (result := cell.match(text, at)) and len(cells) < count and (at <= most or '"' not in cell.pattern):
        cells.append(slice(*result.span(1)))
        if result.end() == result.end(1):  # without a mark behind it
            return cells if len(cells) == count else []
        at = result.end()
    return []


_COLUMN = re.compile(r"[^\W\d][\w .-]{0,60}|")
_SECRET_NAME = re.compile(rf"(?i)[A-Za-z0-9_. -]{{0,40}}?{_NAME}{_REST}")


def is_secret_member(name: str, value: str) -> bool:
    """Whether a member of a JSON object is a secret, by its name: {"password": "..."}."""
    result = _SECRET_NAME.match(name)
    if result is None or _names_another(result) or is_placeholder(value):
        return False
    return _is_password(value) if result["password"] else _is_key(value)
