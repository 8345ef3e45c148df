"""Secrets that are known by a name alone are found in the layouts of everyday files; what only looks like one stays."""

from __future__ import annotations

import csv
import io
import random
import string
import time

import pytest

from capibara.builders.redaction.redact import Redaction
from capibara.core.types import UserError
from capibara.jobs import secrets

pytest.importorskip("detect_secrets")
# {P}: a password, {K}: a key.
FORMS = {
    "md row": "| Name | Value |\n|---|---|\n| DB_PASSWORD | {P} |\n| API_KEY | {K} |\n",
    "md row code": "| `db_password` | `{P}` |\n| **API token** | `{K}` | prod |\n",
    "md header col": "| user | password |\n|---|---|\n| alice | {P} |\n| bob | {K} |\n",
    "k8s env": 'env:\n  - name: DB_PASSWORD\n    value: {P}\n  - name: API_KEY\n    value: "{K}"\n',
    "k8s env rev": "env:\n  - value: {P}\n    name: DB_PASSWORD\n",
    "k8s json": '{"env": [{"name": "DB_PASSWORD", "value": "{P}"}, {"name": "API_KEY", "value": "{K}"}]}',
    "k8s json pretty": '{\n  "name": "DB_PASSWORD",\n  "value": "{P}"\n}',
    "k8s flow": "- {name: DB_PASSWORD, value: {P}}",
    "ecs key": '{"Key": "DB_PASSWORD", "Value": "{P}"}',
    "docker ENV space": "FROM x\nENV DB_PASSWORD {P}\nENV API_KEY {K}\n",
    "docker ENV eq": "ENV A=b DB_PASSWORD={P}\n",
    "docker ARG": "ARG API_TOKEN={K}\n",
    "docker -e": "docker run -e DB_PASSWORD={P} -e A=1 img\n",
    "docker --env": "docker run --env DB_PASSWORD={P} --env=API_KEY={K} img\n",
    "build-arg": "docker build --build-arg NPM_TOKEN={K} --build-arg=DB_PASSWORD={P} .\n",
    "compose list": "environment:\n  - DB_PASSWORD={P}\n  - API_KEY={K}\n",
    "compose map": "environment:\n  DB_PASSWORD: {P}\n  API_KEY: {K}\n",
    "tool --key": "tool --api-key {K} --password {P}\n",
    "tool --key=": "tool --api-key={K} --password={P} --token='{K}'\n",
    "tool --key quoted": 'tool --password "{P}"\n',
    "tool --secret single": "deploy --secret {P} now\n",
    "tool --key VALUE": "tool --key {K}\n",
    "tool --key=VALUE": "tool --key={K}\n",
    "argv list": '["tool", "--password", "{P}", "--api-key", "{K}"]',
    "argv eq list": '["tool", "--password={P}"]',
    "url": "postgres://me:{P}@db.example.com:5432/x\n",
    "url long": "https://user:{K}@host.example.com/x.git\n",
    "netrc": "machine a.example.com login me password {P}\n",
    "netrc lines": "machine a.example.com\n  login me\n  password {P}\n",
    "netrc account": "machine a.example.com login me account x password {P}\n",
    "netrc pw first": "machine a.example.com password {P} login me\n",
    "next line colon": "Password:\n{P}\n",
    "next line indent": "password:\n    {P}\n",
    "next line prompt": "Your API key is:\n\n    {K}\n",
    "next line label": "API key\n{K}\n",
    "next line json": '"password":\n    "{P}"\n',
    "next line py": 'PASSWORD = \\\n    "{P}"\n',
    "next line paren": 'PASSWORD = (\n    "{P}"\n)\n',
    "yaml block": "password: |\n  {P}\n",
    "json": '{"password": "{P}", "api_key": "{K}"}',
    "yaml": "db:\n  password: {P}\n  apiKey: {K}\n",
    "yaml quoted": "password: '{P}'\n",
    "toml": 'password = "{P}"\napi_key = "{K}"\n',
    "ini": "[db]\npassword={P}\npasswd = {P}\n",
    "properties": "spring.datasource.password={P}\napi.key: {K}\n",
    "properties space": "db.password {P}\n",
    "header x": "X-Api-Key: {K}\nX-Auth-Token: {K}\n",
    "header auth": "Authorization: Bearer {K}\n",
    "header token": "Authorization: Token {K}\n",
    "header raw": "Authorization: {K}\n",
    "header py": 'headers = {"X-Api-Key": "{K}"}',
    "cookie": "Cookie: session={K}\n",
    "curl -H": "curl -H 'X-Api-Key: {K}' https://a.example.com\n",
    "curl -u": "curl -u me:{P} https://a.example.com\n",
    "export": "export DB_PASSWORD={P}\nexport API_KEY='{K}'\n",
    "set cmd": "set DB_PASSWORD={P}\r\nsetx API_KEY {K}\r\n",
    "ps": "$env:DB_PASSWORD = '{P}'\n",
    "fish": "set -x API_KEY {K}\n",
    "xml attr": '<add key="DbPassword" value="{P}"/>',
    "xml attr2": '<property name="password" value="{P}"/>',
    "xml": "<password>{P}</password>",
    "terraform": 'variable "db_password" {\n  default = "{P}"\n}\n',
    "tfvars": 'db_password = "{P}"\n',
    "helm set": "helm install --set db.password={P} --set-string apiKey={K} x\n",
    "gh secret": "gh secret set API_KEY --body {K}\n",
    "kubectl literal": "kubectl create secret generic a --from-literal=password={P}\n",
    "csv": "name,password\nalice,{P}\n",
    "html td": "<tr><td>Password</td><td>{P}</td></tr>",
    "rst": ":password: {P}\n",
    "dict": "dict(password='{P}')",
    "set": "os.environ['API_KEY'] = '{K}'",
    "gin": "WandbTracker.api_key = '{K}'",
}


def made(seed):
    """A password with a sign in it, and a key, which no form gives away."""
    rng = random.Random(seed)
    letters = string.ascii_letters + string.digits
    password = "".join(["h7", *rng.choices(letters, k=4), rng.choice("-_.!"), *rng.choices(letters, k=5), "9Q"])
    return password, "".join(["q8Zr3", *rng.choices(letters, k=17)])


@pytest.mark.parametrize("name", FORMS)
def test_a_named_secret_is_found_in_every_layout(name):
    for seed in range(5):
        password, key = made(seed)
        text = f"# before\n{FORMS[name].replace('{P}', password).replace('{K}', key)}after\n"
        redacted = Redaction().scope().redact(text)
        assert password not in redacted and key not in redacted, redacted
        assert redacted.startswith("# before\n") and redacted.endswith("after\n")


@pytest.mark.parametrize("seed", range(30))
def test_secrets_of_csv_are_found_whatever_its_other_cells_hold(seed):
    """Cells as Python's csv module writes them: with marks, quotes and line ends, and rows of another number of cells."""
    rng = random.Random(seed)
    mark = rng.choice(",;\t")
    drawn = ("Smith", "Smith, John", "a;b", "one\ntwo", 'he said "hi"', '""', "", "tab\there", "x,y;z\nw")
    secrets_of = [made(100 * seed + row) for row in range(12)]
    # A password that reads like `settings.name` is taken for a reference.
    secrets_of = [(password.replace(".", "-"), key) for password, key in secrets_of]
    rows = [["id", "note", "password", "api_key"]]
    for password, key in secrets_of:
        rows.append([str(len(rows)), rng.choice(drawn), password, key])
        if rng.random() < 0.2:
            rows.append(["a total"])
    written = io.StringIO()
    csv.writer(written, delimiter=mark, lineterminator="\n").writerows(rows)
    redacted = Redaction().scope().redact(written.getvalue())
    assert not [one for pair in secrets_of for one in pair if one in redacted], redacted
    kept = csv.reader(io.StringIO(redacted), delimiter=mark)
    assert [row[:2] for row in kept] == [row[:2] for row in rows]


@pytest.mark.parametrize("note", ['5" pipe', 'a 5"', '"a', '"a" b', 'a "b" c', '"', '""', "it's", '"a""', 'a""b'])
@pytest.mark.parametrize("rest", ["", "x,q7-Kd82mWs\n", '"x",q7-Kd82mWs\n'])
def test_a_quote_alone_hides_no_secret(note, rest):
    """By RFC 4180 a cell is quoted if it begins with a quote; other files have quotes anywhere."""
    for text in (f"note,password\n{note},hq7-Vx92mLp\n{rest}", f"password,note\nhq7-Vx92mLp,{note}\n{rest}"):
        assert "hq7-Vx92mLp" not in Redaction().scope().redact(text)


@pytest.mark.parametrize("mark", ",;\t|")
def test_a_long_cell_hides_no_secret(mark):
    text = f"note{mark}password\n{'word ' * 2000}{mark}hq7-Vx92mLp\n"
    assert "hq7-Vx92mLp" not in Redaction().scope().redact(text)


@pytest.mark.parametrize("line", ['"a', 'x","', 'x,"', '"a\n\n', ',"', '"",', 'a,"b', '""', '"' * 4000])
def test_many_quotes_take_no_longer(line):
    begin = time.process_time()
    Redaction().scope().redact("name,password\n" + (line + "\n") * (200_000 // len(line)))
    assert time.process_time() - begin < 5  # below 1 s; with quadratic code a minute


def test_a_table_ends_with_a_blank_line():
    text = "name,password\nalice,kT4-wPz81nQd\n\nLater, hq7-Vx92mLp\n"
    redacted = Redaction().scope().redact(text)
    assert "kT4-wPz81nQd" not in redacted and redacted.endswith("\n\nLater, hq7-Vx92mLp\n")


def test_a_table_ends_where_text_begins():
    text = "name,password\nalice,{P}\n" + "Some text\n" * 3 + "Later, hq7-Vx92mLp\n"
    assert Redaction().scope().redact(text.replace("{P}", "kT4-wPz81nQd")).endswith("Later, hq7-Vx92mLp\n")


@pytest.mark.parametrize(
    "value", [{"name": "DB_PASSWORD", "value": "hq7-Vx92mLp"}, {"Key": "API_KEY", "Value": "q8Zr3nV7xLw2Tf9KbC4d"}]
)
def test_a_pair_of_members_is_found(value):
    assert "<SECRET:" in str(Redaction().scope().redact({"env": [value]}))
    assert Redaction().scope().redact({"name": "SHELL", "value": "hq7-Vx92mLp"})["value"] == "hq7-Vx92mLp"


@pytest.mark.parametrize(
    "text",
    [
        "| option | default |\n|---|---|\n| token | none |\n| api_key | the key of the service |\n",
        "| password | string | required |\n| token_type | bearer | v2.10.3 |\n",
        "name,password\nalice,changeme\nbob,<password>\n",
        "env:\n  - name: SHELL\n    value: /bin/bash2\n  - name: KEYBOARD\n    value: us101layout\n",
        "Password:\n    the password of the user, at least 8 characters\n",
        "token\n    utf8parser.tokenize3\n",
        "ENV KEY_FILE /run/secrets/key1\n", "tool --key column2 --sort\n", "sort --key=2,2n\n",
        "the secret 42nd chapter\n", "def f(key,\n      value0=1):\n", "self.token\nline12 = 3\n",
        "name,password\nalice,changeme\nLater on, hq7-Vx92mLp, a third part\n",
        "| name | password |\n|---|---|\n| alice | hq7-Vx92mLp | of another table |\n",
        "tool --password --keep-2-copies x\n", "tool --token --of-q8Zr3nV7xLw2Tf9KbC4d\n",
        "password: ${DB_PASSWORD}\n", "for key\n    in values1:\n",
    ],
)  # fmt: skip
def test_what_only_looks_like_one_stays(text):
    assert Redaction().scope().redact(text) == text


@pytest.mark.parametrize(
    "text", ["--api-key=q8Zr3nV7xLw2Tf9KbC4d", "postgres://me:hq7-Vx92mLp@db.example.com/x", "A.password='hq7-Vx92mLp'"]
)
def test_launch_finds_what_the_redaction_finds(text):
    assert secrets.has_secret(text)
    with pytest.raises(UserError) as error:
        secrets.check_public("A", text)
    assert "hq7-Vx92mLp" not in str(error.value) and "q8Zr3nV7" not in str(error.value)
    for plain in (
        "--gin.TRAIN_STEPS=100",
        "--gin.Trainer.tokens_per_step=1048576",
        "gs://bucket/runs/a",
        "--gin.TOKENIZER='tok.json'",
    ):
        assert not secrets.has_secret(plain)
