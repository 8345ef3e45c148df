"""What looks like a secret does not leave the machine; what looks similar stays."""

import pytest

from capibara.monitoring.metrics_file.redaction import HIDDEN, redact, redact_json

SECRETS = [
    "hf_" + "aB3" * 11,
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "11AAAAAAA0" * 4,
    "glpat-" + "x1y2z3_" * 3,
    "sk-proj-" + "Ab12" * 8,
    "AKIA" + "IOSFODNN7EXAMPLE",
    "AIza" + "SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
    "xoxb-" + "123456789012-abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_DEF-123",
    "dapi" + "0123456789abcdef" * 2,
    "Zq8Kf0Wv3Xr7Lm2Tn9Yb4Hc6Jd1Ps5Ga",
    "https://hooks.slack.com/services/T00/B00/abcDEF",
    "https://discord.com/api/webhooks/123/abcDEF",
    "https://x.blob.core.windows.net/y?sv=1&sig=abc%2FDEF",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]
NAMED = [
    'api_key = "{}"',
    "WANDB_API_KEY={}",
    "--token={}",
    "Tracker.password = '{}'",
    '{{"client_secret": "{}"}}',
    "Authorization: Bearer {}",
    "authorization: Basic {}",
    "https://user:{}@host/path",
    "AWS_SECRET_ACCESS_KEY: {}",
]
PLAIN = [
    "Trainer.steps = 20000",
    "max_tokens = 4096, tokens_per_s: 123456",
    "Dataset.token_mask = None",
    "tokenizer = @SentencePiece()",
    "commit 1b2c3d4e5f60718293a4b5c6d7e8f90123456789",
    "sha256 " + "0123456789abcdef" * 4,
    "uid f1c35b58040d4eac93fb4dfa19709de6",
    "gs://bucket/my-run/checkpoints/000200/params_and_optimizer_state_of_run",
    "DecoderConfig.attention_implementation_of_the_long_context_layers = 'splash'",
    "http://localhost:5000/#/experiments/3",
    "nobody knew the secret of the story, nor the password",
    "benchmarks/record_executions.py              | 331 +++++++++++++----------",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_tokens_by_their_own_look(secret):
    for text in (secret, f"x = '{secret}'", f"git clone {secret} and more"):
        assert secret not in redact(text) and HIDDEN in redact(text)


@pytest.mark.parametrize("around", NAMED)
def test_values_by_their_names(around):
    text = redact(around.format("hunter2plain"))
    assert "hunter2plain" not in text and HIDDEN in text
    assert redact(text) == text


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_what_utf8_cannot_hold_is_escaped():
    assert redact("a\udc80b") == "a\\udc80b" and redact_json({"\ud800": ["\ud800"]}) == {"\\ud800": ["\\ud800"]}


def test_json_values():
    found = redact_json(
        {"password": "hunter2plain", "deep": [{"api_key": "abcdef123"}, "hf_" + "a1" * 12], "n": 3, "tokens": 7}
    )
    assert found == {"password": HIDDEN, "deep": [{"api_key": HIDDEN}, HIDDEN], "n": 3, "tokens": 7}


def test_long_texts_take_no_time():
    text = "password " * 20_000 + "a-" * 50_000 + "x" * 200_000 + "://" * 30_000 + "token=" * 20_000
    assert len(redact(text)) > 100_000
