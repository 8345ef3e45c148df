"""Planted secrets and personal data are found in every place; real text stays as it is."""

from __future__ import annotations

import base64
import collections
import json
import pathlib
import re
import sysconfig
import time

import pytest

from capibara.builders.redaction import secrets
from capibara.builders.redaction.redact import Redaction
from capibara.core.types import UserError
from tests.builders.redaction import planted

pytest.importorskip("detect_secrets")
SEEDS = range(3)
PLACEHOLDER = re.compile(r"<(SECRET|PERSONAL):[a-z0-9_]+:\d+>")


def redact(value):
    return Redaction().scope().redact(value)


def pieces(secret: str) -> list[str]:
    """The secret and parts of it that must not remain either."""
    return [secret, *(secret[i : i + 12] for i in range(0, len(secret) - 12, 6))]


def assert_gone(value, *hidden: str) -> None:
    text = json.dumps(redact(value), ensure_ascii=False)
    left = [piece for secret in hidden for piece in pieces(secret) if piece in text]
    assert not left, text
    assert PLACEHOLDER.search(text), text


def kinds_of(value) -> list[str]:
    return sorted({found for found in re.findall(r"<(?:SECRET|PERSONAL):(\w+):", json.dumps(redact(value)))})


# Where a token may stand: a text with it, of a token.
PLACES = {
    "alone": lambda t: t,
    "code": lambda t: f'client = Client("{t}")\nprint(1)',
    "sentence": lambda t: f"error: the key {t}.",
    "file name": lambda t: f"/tmp/dump_{t}.json",
    "traceback": lambda t: (
        f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f("{t}")\nValueError: bad key {t}\n'
    ),
    "JSON within JSON": lambda t: json.dumps(json.dumps({"a": f"\n{t}", "b": t})),
    "unicode escape": lambda t: '{"a": "' + t[0] + f"\\u{ord(t[1]):04x}" + t[2:] + '"}',
    "percent escape": lambda t: f"q={t[:2]}%{ord(t[2]):02X}{t[3:]}&x=1",
    "base64": lambda t: "data: " + base64.b64encode(f'{{"key": "{t}"}}'.encode()).decode(),
    "base64 twice": lambda t: base64.b64encode(base64.b64encode(f"key {t}".encode())).decode(),
    "header": lambda t: f"curl -H 'Authorization: Bearer {t}' https://acme.io",
    "environment": lambda t: f"export SERVICE_TOKEN={t}\n",
}


def split(token: str) -> list[str]:
    """Texts in which the token is split: literals side by side, a sum of them, a line that a terminal has broken."""
    half = len(token) // 2
    if not any(c.isdigit() for c in token[half:]):
        half = max(2, min(i for i, c in enumerate(token) if c.isdigit()) - 1)
    one, other = token[:half], token[half:]
    return [
        f'key = ("{one}"\n       "{other}")',
        f"key = '{one}' + '{other}'",
        f"the key is {one}\n{other}\ndone",
        f"the key is {one}\\\n{other}\n",
    ]


@pytest.mark.parametrize("kind", planted.TOKENS)
def test_a_token_is_found_wherever_it_stands(kind):
    for seed in SEEDS:
        token = planted.TOKENS[kind](planted.Make(seed))
        for place in PLACES.values():
            text = place(token)
            hidden = [token] if token in text else [token[4:]] if token[4:] in text else [text[-40:]]
            assert_gone(text, *hidden)
            assert_gone({"stdout": ["line", text], "code": "x = 1"}, *hidden)
        if any(c.isdigit() for c in token):
            for text in split(token):
                assert_gone(text, *[part for part in re.findall(r"[\w.$:~-]{12,}", text) if part in token])


@pytest.mark.parametrize("kind", planted.IN_CONTEXT)
def test_a_secret_is_found_by_what_stands_beside_it(kind):
    for seed in SEEDS:
        text, secret = planted.IN_CONTEXT[kind](planted.Make(seed))
        assert_gone(text, secret)
        assert_gone({"code": f"line\n{text}\nline"}, json.dumps(secret)[1:-1])
        assert_gone(json.dumps({"log": text}), json.dumps(secret)[1:-1])


@pytest.mark.parametrize("kind", planted.PERSONAL)
def test_personal_data_is_found(kind):
    for seed in SEEDS:
        text, value = planted.PERSONAL[kind](planted.Make(seed))
        assert_gone(text, value)
        assert_gone(json.dumps({"log": f"line\n{text}\n"}), json.dumps(value)[1:-1])


def test_there_are_fifty_kinds():
    assert len(planted.TOKENS) + len(planted.IN_CONTEXT) + len(planted.PERSONAL) >= 100
    found = {
        one.kind
        for makers in (planted.TOKENS, planted.IN_CONTEXT, planted.PERSONAL)
        for maker in makers.values()
        for made in [maker(planted.Make(0))]
        for one in secrets.find(made if isinstance(made, str) else made[0])
    }
    assert len(found) >= 50
    assert found <= secrets.kinds()


def test_the_kind_says_what_it_is():
    make = planted.Make(5)
    assert kinds_of(planted.TOKENS["github_token"](make)) == ["github_token"]
    assert kinds_of(planted.TOKENS["e2b_key"](make)) == ["e2b_key"]
    assert kinds_of(f'GITHUB_TOKEN = "{planted.TOKENS["github_token"](make)}"') == ["github_token"]
    assert kinds_of("ann@acme-corp.io") == ["email"]
    assert kinds_of('password = "hunter2x"') == ["password"]


def test_equal_secrets_have_equal_placeholders_and_different_ones_different_placeholders():
    first, second = (planted.TOKENS["github_token"](planted.Make(seed)) for seed in (1, 2))
    found = redact({"a": f"{first} {second}", "b": [second, first], first: "name"})
    one, two = found["a"].split()
    assert (one, two) == ("<SECRET:github_token:1>", "<SECRET:github_token:2>")
    assert found == {"a": f"{one} {two}", "b": [two, one], one: "name"}
    escaped = first[:6] + f"\\u{ord(first[6]):04x}" + first[7:]
    assert redact([first, f'{{"k": "{escaped}"}}']) == [one, f'{{"k": "{one}"}}']


def test_a_scope_numbers_over_several_records():
    first, second = (planted.TOKENS["openai_key"](planted.Make(seed)) for seed in (1, 2))
    scope = Redaction().scope()
    assert scope.redact(first) == "<SECRET:openai_key:1>"
    assert scope.redact([second, first]) == ["<SECRET:openai_key:2>", "<SECRET:openai_key:1>"]


def test_a_password_is_replaced_wherever_else_it_is_printed():
    record = {"code": 'password = "tr0ub4dor"\nprint(password)', "stdout": "tr0ub4dor\n"}
    found = redact(record)
    assert "tr0ub4dor" not in json.dumps(found)
    assert found["stdout"] == "<SECRET:password:1>\n"
    scope = Redaction().scope()
    scope.redact('password = "tr0ub4dor"')
    assert scope.redact("it was tr0ub4dor") == "it was <SECRET:password:1>"


def test_a_password_that_is_a_word_is_not_replaced_elsewhere():
    found = redact({"code": 'password = "elephant"', "stdout": "an elephant\n"})
    assert found == {"code": 'password = "<SECRET:password:1>"', "stdout": "an elephant\n"}


def test_members_of_objects_are_secrets_by_their_names():
    found = redact(
        {"user": "ann", "password": "tr0ub4dor", "token_type": "bearer", "nested": {"api_key": "a1b2c3d4e5f6a7b8"}}
    )
    assert found["user"] == "ann" and found["token_type"] == "bearer"
    assert found["password"].startswith("<SECRET:") and found["nested"]["api_key"].startswith("<SECRET:")


@pytest.mark.parametrize(
    "makers", [planted.TOKENS, planted.IN_CONTEXT, planted.PERSONAL], ids=["tokens", "context", "personal"]
)
def test_what_was_redacted_stays_as_it_is(makers):
    made = [maker(planted.Make(7)) for maker in makers.values()]
    once = redact([one if isinstance(one, str) else one[0] for one in made])
    assert redact(once) == once


HARMLESS = [
    "password = getpass.getpass()",
    'password = os.environ["DB_PASSWORD"]',
    'parser.add_argument("--password", help="the password")',
    "def login(user: str, password: str) -> None: ...",
    'token_type = "bearer"',
    "tokens = tokenize(text)",
    "key = lambda pair: pair[1]",
    "for key, value in sorted(items): print(key)",
    'API_KEY = "your-api-key-here"',
    'password = "changeme"',
    'secret = "${SECRET}"',
    "git@github.com:python/cpython.git",
    "mail user@example.com",
    "commit 3f786850e387550fdab836ed7e6dc881de23001b",
    "id 123e4567-e89b-12d3-a456-426614174000",
    "query@key.transpose(-1, -2)",
    "version 10.15.7.22, 127.0.0.1, 192.168.1.20, 10.0.0.1, 8.8.8.8, 0.0.0.0",
    "x = 1234567890123456",
    "3.14159265358979323846",
    "2026-01-31 12:00:00 +01:00",
    "/home/user/project /Users/runner/work",
    "https://example.com/a?page=2&sort=name",
    "http://localhost:8080/path@2x.png",
    'ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"',
    "eyJust_a_name.of.a_module",
    "sk-learn sk-image task-runner-with-a-long-name",
    "self.assertEqual(AKIA, 3)",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_stays_as_it_is(text):
    assert redact(text) == text


def standard_library(every: int) -> list[tuple[str, str]]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not {"site-packages", "test", "tests"} & {*path.parts}]
    return [(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in files[::every]]


def false_alarms(every: int) -> tuple[collections.Counter[str], int]:
    """Secrets by kind that are "found" in the standard library, which has none, and its size in bytes."""
    counts: collections.Counter[str] = collections.Counter()
    size = 0
    for _, text in standard_library(every):
        size += len(text)
        counts.update(one.kind for one in secrets.find(text) if one.category == "SECRET")
    print(f"{size:,} characters: {dict(counts)}")
    return counts, size


def test_a_part_of_the_standard_library_has_hardly_a_secret():
    counts, size = false_alarms(every=12)
    assert size > 500_000
    assert sum(counts.values()) <= 1, counts


@pytest.mark.heavy
def test_the_standard_library_has_hardly_a_secret():
    counts, size = false_alarms(every=1)
    assert size > 10_000_000
    assert sum(counts.values()) <= 5, counts


def test_kinds_and_values_can_be_kept():
    scope = Redaction(keep=("email",), allow=("tr0ub4dor",)).scope()
    assert scope.redact("ann@acme-corp.io") == "ann@acme-corp.io"
    assert scope.redact('password = "tr0ub4dor"') == 'password = "tr0ub4dor"'
    with pytest.raises(UserError, match="Redaction.keep: 'e-mail' is no kind: did you mean email"):
        Redaction(keep=("e-mail",))


def test_replacements_are_counted():
    counts = collections.Counter()
    Redaction().scope().redact(["ann@acme-corp.io", "bob@acme-corp.io 93.184.216.34"], counts)
    assert counts == {"email": 2, "ip_address": 1}


def test_texts_of_one_record_are_redacted_together():
    assert Redaction().scope().redact_texts(['pwd = "tr0ub4dor"', "tr0ub4dor", ""]) == [
        'pwd = "<SECRET:password:1>"',
        "<SECRET:password:1>",
        "",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "\\",
        "%41",
        "a\n",
        '"',
        "eyJ",
        "key=",
        "@",
        "1-",
        "a:",
        "password ",
        "C:\\Users\\",
        "-----BEGIN PRIVATE KEY-----",
    ],
)
def test_the_time_is_linear_in_the_length(text):
    """Hostile texts: a quadratic search would take minutes here."""
    secrets.find(text * (200_000 // len(text)))


KEY = "\n".join(planted.Make(5 + i).of(planted.ALNUM, 64) for i in range(3))
HEAD, END = "-----BEGIN RSA PRIVATE KEY-----\n", "\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}{KEY}\nDone reading\n",
        f"{HEAD}{KEY}\naB3/xyzQ9w==\nDone\n",
        f"{HEAD}{KEY}\naB3xyzQ9wKL\nDone\n",
        f"{HEAD}Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0011\n\n{KEY}\nDone\n",
        f"{KEY}\naB3/xyzQ9w=={END}\nDone\n",
    ],
    ids=["cut off", "with its last line", "last line without =", "encrypted", "without its head"],
)
def test_a_key_that_is_cut_off_takes_no_word_with_it(text):
    shown = redact(text)
    assert "Done" in shown
    for piece in (*KEY.split("\n"), "aB3/xyzQ9w", "aB3xyzQ9wKL"):
        assert piece not in shown


@pytest.mark.parametrize(
    "text",
    [
        '{"password": 83625471}',
        "password=83625471",
        "password: >-\n  83625471x!\n",
        "<password>83625471x!</password>",
        '<input type="password" id="p" value="83625471x!">',
        'requests.get(url, auth=("ann", "83625471x!"))',
        'smtp.login("ann", "83625471x!")',
        'password = """83625471x!"""',
        'passwort = "83625471x!"',
        "contraseña: 83625471x!",
    ],
)
def test_more_forms_of_a_password_are_found(text):
    assert "83625471" not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"max_tokens": 100000}',
        "password_length = 1000000",
        "<token>name</token>",
        'auth=("user", "password")',
        "passwords: 1000000",
    ],
)
def test_what_a_password_is_not(text):
    assert redact(text) == text


@pytest.mark.parametrize("text", ['"a"' + " " * 30_000, "token = x " * 20_000, "1.2.3.4 " * 30_000])
def test_hostile_text_takes_no_longer(text):
    begin = time.process_time()
    redact(text)
    assert time.process_time() - begin < 5  # below 1 s; with quadratic patterns a minute
