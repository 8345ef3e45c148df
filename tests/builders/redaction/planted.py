"""Secrets and personal data of many kinds, made up from a seed: none stands in this file as it would in a log."""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Callable

ALNUM, HEX, UPPER = string.ascii_letters + string.digits, "0123456789abcdef", string.ascii_uppercase + string.digits
WORD = ALNUM + "_-"
BASE64 = ALNUM + "+/"


class Make:
    """Draws characters."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def of(self, alphabet: str, count: int) -> str:
        """So many characters; the first ones are a digit and letters of both cases, where the alphabet has them."""
        first = [s for s in ("7", "k", "Q") if s in alphabet and count > 8]
        drawn = first + self._random.choices(alphabet, k=count - len(first))
        return "".join(drawn)


# Kind -> its token; the form alone says what it is.
TOKENS: dict[str, Callable[[Make], str]] = {
    "e2b_key": lambda m: "e2b_" + m.of(HEX, 40),
    "github_token": lambda m: "ghp_" + m.of(ALNUM, 36),
    "github_oauth": lambda m: "gho_" + m.of(ALNUM, 36),
    "github_fine_grained": lambda m: "github_pat_" + m.of(ALNUM, 22) + "_" + m.of(ALNUM, 59),
    "gitlab_token": lambda m: "glpat-" + m.of(WORD, 20),
    "aws_key_id": lambda m: "AKIA" + m.of(UPPER, 16),
    "google_api_key": lambda m: "AIza" + m.of(WORD, 34) + "a",
    "google_oauth_token": lambda m: "ya29." + m.of(WORD, 60),
    "google_client_secret": lambda m: "GOCSPX-" + m.of(ALNUM, 28),
    "azure_client_secret": lambda m: m.of(ALNUM, 3) + "8Q~" + m.of(ALNUM, 34),
    "slack_bot_token": lambda m: f"xoxb-{m.of('0123456789', 12)}-{m.of('0123456789', 12)}-{m.of(ALNUM, 24)}",
    "slack_app_token": lambda m: f"xapp-1-A{m.of(UPPER, 10)}-{m.of('0123456789', 12)}-{m.of(HEX, 64)}",
    "anthropic_key": lambda m: "sk-ant-api03-" + m.of(WORD, 93) + "AA",
    "openai_key": lambda m: "sk-" + m.of(ALNUM, 20) + "T3BlbkFJ" + m.of(ALNUM, 20),
    "openai_project_key": lambda m: "sk-proj-" + m.of(WORD, 74) + "T3BlbkFJ" + m.of(ALNUM, 20),
    "openrouter_key": lambda m: "sk-or-v1-" + m.of(HEX, 64),
    "huggingface_token": lambda m: "hf_" + m.of(string.ascii_letters, 34),
    "replicate_token": lambda m: "r8_" + m.of(ALNUM, 37),
    "groq_key": lambda m: "gsk_" + m.of(ALNUM, 52),
    "xai_key": lambda m: "xai-" + m.of(ALNUM, 80),
    "perplexity_key": lambda m: "pplx-" + m.of(ALNUM, 48),
    "langsmith_key": lambda m: f"lsv2_pt_{m.of(HEX, 32)}_{m.of(HEX, 10)}",
    "databricks_token": lambda m: "dapi" + m.of(HEX, 32),
    "stripe_live_key": lambda m: "sk_live_" + m.of(ALNUM, 24),
    "stripe_test_key": lambda m: "rk_test_" + m.of(ALNUM, 24),
    "stripe_webhook": lambda m: "whsec_" + m.of(ALNUM, 32),
    "square_token": lambda m: "sq0atp-" + m.of(WORD, 22),
    "shopify_token": lambda m: "shpat_" + m.of(HEX, 32),
    "twilio_key": lambda m: "SK" + m.of(HEX, 32),
    "sendgrid_key": lambda m: f"SG.{m.of(WORD, 22)}.{m.of(WORD, 43)}",
    "mailgun_key": lambda m: "key-" + m.of(HEX, 32),
    "mailchimp_key": lambda m: m.of(HEX, 32) + "-us12",
    "npm_token": lambda m: "npm_" + m.of(ALNUM, 36),
    "pypi_token": lambda m: "pypi-AgEIcHlwaS5vcmc" + m.of(WORD, 80),
    "rubygems_key": lambda m: "rubygems_" + m.of(HEX, 48),
    "docker_token": lambda m: "dckr_pat_" + m.of(WORD, 27),
    "digitalocean_token": lambda m: "dop_v1_" + m.of(HEX, 64),
    "netlify_token": lambda m: "nfp_" + m.of(ALNUM, 40),
    "supabase_key": lambda m: "sbp_" + m.of(HEX, 40),
    "planetscale_token": lambda m: "pscale_tkn_" + m.of(WORD, 43),
    "doppler_token": lambda m: "dp.pt." + m.of(ALNUM, 43),
    "vault_token": lambda m: "hvs." + m.of(WORD, 95),
    "terraform_token": lambda m: f"{m.of(ALNUM, 14)}.atlasv1.{m.of(WORD, 65)}q",
    "grafana_token": lambda m: f"glsa_{m.of(ALNUM, 32)}_{m.of(HEX, 8)}",
    "newrelic_key": lambda m: "NRAK-" + m.of(UPPER, 27),
    "linear_key": lambda m: "lin_api_" + m.of(ALNUM, 40),
    "notion_token": lambda m: "ntn_" + m.of(ALNUM, 46),
    "airtable_token": lambda m: f"pat{m.of(ALNUM, 14)}.{m.of(HEX, 64)}",
    "figma_token": lambda m: "figd_" + m.of(WORD, 43),
    "postman_key": lambda m: f"PMAK-{m.of(HEX, 24)}-{m.of(HEX, 34)}",
    "atlassian_token": lambda m: "ATATT3xFfGF0" + m.of(WORD, 180),
    "discord_token": lambda m: f"M{m.of(ALNUM, 24)}.{m.of(ALNUM, 6)}.{m.of(WORD, 37)}q",
    "telegram_token": lambda m: f"71{m.of('0123456789', 8)}:AA{m.of(WORD, 33)}",
    "age_key": lambda m: "AGE-SECRET-KEY-1" + m.of(UPPER, 58),
    "jwt": lambda m: ".".join(
        [
            base64.urlsafe_b64encode(part.encode()).decode().rstrip("=")
            for part in ('{"alg":"HS256","typ":"JWT"}', f'{{"sub":"{m.of(HEX, 12)}"}}')
        ]
        + [m.of(WORD, 43)]
    ),
}


def _pem(m: Make, name: str) -> str:
    lines = [m.of(BASE64, 64) for _ in range(6)] + [m.of(BASE64, 30) + "=="]
    return "\n".join([f"-----BEGIN {name}-----", *lines, f"-----END {name}-----"])


# Kind -> a text with the secret, and the secret.
IN_CONTEXT: dict[str, Callable[[Make], tuple[str, str]]] = {
    "rsa_private_key": lambda m: (k := _pem(m, "RSA PRIVATE" + " KEY"), k),
    "openssh_private_key": lambda m: (k := _pem(m, "OPENSSH PRIVATE" + " KEY"), k),
    "truncated_private_key": lambda m: (k := _pem(m, "PRIVATE" + " KEY").rpartition("\n")[0], k.partition("\n")[2]),
    "aws_secret_key": lambda m: (f'aws_secret_access_key = "{(k := m.of(BASE64, 40))}"', k),
    "aws_pair": lambda m: (f"Client('AKIA{m.of(UPPER, 16)}', '{(k := m.of(BASE64, 40))}')", k),
    "azure_storage_key": lambda m: (f"AccountName=acme;AccountKey={(k := m.of(BASE64, 86) + '==')};", k),
    "azure_signature": lambda m: (f"https://acme.blob.core.windows.net/c/f?sv=2024&sig={(k := m.of(ALNUM, 43))}%3D", k),
    "slack_webhook": lambda m: (
        f"https://hooks.slack.com/services/T{m.of(UPPER, 8)}/B{m.of(UPPER, 8)}/{(k := m.of(ALNUM, 24))}", k),
    "discord_webhook": lambda m: (f"https://discord.com/api/webhooks/123456789012345678/{(k := m.of(WORD, 68))}", k),
    "url_password": lambda m: (f"postgresql://app:{(k := m.of(ALNUM, 12))}@db.acme.io:5432/prod", k),
    "redis_password": lambda m: (f"redis://:{(k := m.of(ALNUM, 10))}@cache:6379/0", k),
    "mongo_password": lambda m: (f'MongoClient("mongodb+srv://root:{(k := m.of(ALNUM, 9))}@c0.mongodb.net/x")', k),
    "connection_string": lambda m: (f"Server=db;Database=x;User Id=sa;Password={(k := m.of(ALNUM, 9))}!;Encrypt=yes", k),
    "basic_header": lambda m: (
        f"Authorization: Basic {(k := base64.b64encode(f'ann:{m.of(ALNUM, 12)}'.encode()).decode())}", k),
    "bearer_header": lambda m: (f'headers={{"Authorization": "Bearer {(k := m.of(WORD, 32))}"}}', k),
    "api_key_header": lambda m: (f"x-api-key: {(k := m.of(ALNUM, 32))}", k),
    "cookie": lambda m: (f"Cookie: sessionid={(k := m.of(ALNUM, 32))}; path=/", k),
    "url_parameter": lambda m: (f"GET https://api.acme.io/v1?api_key={(k := m.of(ALNUM, 20))}&page=2", k),
    "password_in_code": lambda m: (f'connect(user="ann", password="{(k := m.of(ALNUM, 9))}")', k),
    "password_word": lambda m: ("db_password = 'correcthorsebattery'", "correcthorsebattery"),
    "password_in_json": lambda m: (f'{{"user": "ann", "password": "{(k := m.of(ALNUM, 9))}"}}', k),
    "password_in_yaml": lambda m: (f"db:\n  user: ann\n  password: {(k := m.of(ALNUM, 9))}\n", k),
    "password_in_environment": lambda m: (f"export DB_PASSWORD={(k := m.of(ALNUM, 9))}\n", k),
    "environment_in_python": lambda m: (f'os.environ["WANDB_API_KEY"] = "{(k := m.of(HEX, 40))}"', k),
    "secret_key_setting": lambda m: (f"SECRET_KEY = 'django-insecure-{(k := m.of(ALNUM, 40))}'", k),
    "key_in_ini": lambda m: (f"[api]\nclient_secret = {(k := m.of(ALNUM, 32))}\n", k),
    "flag": lambda m: (f"tool --user ann --password {(k := m.of(ALNUM, 9))} run", k),
    "key_flag": lambda m: (f"tool --api-key={(k := m.of(ALNUM, 24))} run", k),
    "curl_user": lambda m: (f"curl -u ann:{(k := m.of(ALNUM, 9))} https://acme.io", k),
    "mysql_flag": lambda m: (f"mysql -h db -u root -p{(k := m.of(ALNUM, 9))} shop", k),
    "sql_user": lambda m: (f"CREATE USER ann IDENTIFIED BY '{(k := m.of(ALNUM, 9))}';", k),
    "netrc": lambda m: (f"machine acme.io login ann password {(k := m.of(ALNUM, 9))}", k),
    "npmrc": lambda m: (f"//registry.acme.io/:_authToken={(k := m.of(ALNUM, 36))}", k),
    "bcrypt_hash": lambda m: (k := "$2b$12$" + m.of(ALNUM, 53), k),
    "crypt_hash": lambda m: (f"root:{(k := '$6$' + m.of(ALNUM, 8) + '$' + m.of(ALNUM, 86))}:19000:0:", k),
    "otp_seed": lambda m: (f"otpauth://totp/acme:ann?secret={(k := m.of('ABCDEFGHIJKLMNOPQRSTUVWXYZ234567', 32))}", k),
    "seed_phrase": lambda m: (
        f"mnemonic: {(k := 'legal winner thank year wave sausage worth useful legal winner thank yellow')}", k),
    "sentry_dsn": lambda m: (f"https://{(k := m.of(HEX, 32))}@o12345.ingest.sentry.io/67890", k),
    "softlayer_key": lambda m: (f'softlayer_api_key = "{(k := m.of(HEX, 64))}"', k),
    "unnamed_key": lambda m: (f'client = Client("{(k := m.of(WORD, 44))}")', k),
}  # fmt: skip

PERSONAL: dict[str, Callable[[Make], tuple[str, str]]] = {
    "email": lambda m: (f"mail to {(k := 'ann.' + m.of(string.ascii_lowercase, 7) + '@acme-corp.io')} now", k),
    "escaped_email": lambda m: ("https://acme.io/u?mail=ann.smith%40acme-corp.io", "ann.smith"),
    "phone": lambda m: (f"call +49 30 {m.of('2345678', 4)} 5{(k := m.of('123456789', 3))}7", k),
    "national_phone": lambda m: (f"call ({(k := '415')}) 867-5309", k),
    "named_phone": lambda m: ("phone: 030/123 45678".replace("/", " "), "123 45678"),
    "credit_card": lambda m: ("card 4242 4242 4242 4242 ok", "4242 4242"),
    "credit_card_plain": lambda m: ("number=371449635398431", "371449635398431"),
    "iban": lambda m: ("IBAN DE89 3704 0044 0532 0130 00", "3704 0044"),
    "social_security_number": lambda m: ("ssn 219-09-9999", "219-09-9999"),
    "ipv4": lambda m: ("from 93.184.216.34 port 22", "93.184.216.34"),
    "ipv6": lambda m: ("from 2606:2800:220:1:248:1893:25c8:1946 port 22", "248:1893"),
    "home_on_linux": lambda m: ('File "/home/asmith/project/run.py", line 3', "asmith"),
    "home_on_mac": lambda m: ("/Users/ann.smith/Library/x.py", "ann.smith"),
    "home_on_windows": lambda m: ('File "C:\\Users\\asmith\\run.py", line 3', "asmith"),
    "prompt": lambda m: ("asmith@laptop:~/project$ python run.py", "asmith"),
}  # fmt: skip
