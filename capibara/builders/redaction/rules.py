"""Rules that find secrets by their own form: tokens with a known prefix, private keys, credentials in URLs and headers."""

from __future__ import annotations

import base64
import binascii
import collections
import dataclasses
import enum
import math
import re
from collections.abc import Callable

Check = Callable[[re.Match[str]], bool]


class Category(enum.StrEnum):
    """What a rule finds; the first word of its placeholder."""

    SECRET = "SECRET"
    PERSONAL = "PERSONAL"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A regular expression that finds one kind of secret or of personal data.

    Attributes:
      kind: the name in the placeholder, such as "github_token".
      pattern: the regular expression; its time is linear in the length of the text.
      group: the group that is redacted.
      gates: the rule is tried only on text that has one of these, in lower case; empty: on every text.
      check: decides whether a match counts; None: each does.
      category: secret or personal.
      is_token: the form alone identifies it, so it is also found when line breaks or quotes split it.
      within: the pattern is searched only in and near the runs of text that this finds; None: everywhere.
      margin: the numbers of characters before and after a run that are searched, too.
      anchor: the pattern is tried only at the beginnings that this finds; None: everywhere.
    """

    kind: str
    pattern: re.Pattern[str]
    group: int | str = 0
    gates: tuple[str, ...] = ()
    check: Check | None = None
    category: Category = Category.SECRET
    is_token: bool = False
    within: re.Pattern[str] | None = None
    margin: tuple[int, int] = (1, 2)
    anchor: re.Pattern[str] | None = None

    def kind_of(self, match: re.Match[str]) -> str:
        """The kind of a match: "password" where the name beside it says so."""
        return "password" if "password" in self.pattern.groupindex and match["password"] else self.kind


# One pass finds the runs of characters that may be a token; the many rules then look at these alone.
LONG_RUN = re.compile(r"[A-Za-z0-9_.~+/=$%:-]{20,}")
LONGER_RUN = re.compile(r"[A-Za-z0-9_.~+/=$%:-]{34,}")  # for rules whose tokens begin like any word


def entropy(text: str) -> float:
    """The entropy of the characters of a text, in bits per character."""
    counts = collections.Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)


def is_random(text: str, least: float = 3.0) -> bool:
    """Whether a text may be a generated key: it has letters and digits, and at least this entropy in bits."""
    return any(c.isdigit() for c in text) and any(c.isalpha() for c in text) and entropy(text) >= least


_TEMPLATE = re.compile(r"\$[{(\w]|\{\{|\{[\w.!:]*\}|%[({sd]|%\w+%|<[^>]*>|\[[^\]]*\]|\*{3}|\.{3}|…")
_DUMMY = re.compile(
    r"(?i)(?:x+|0+|1+|\W+|your.*|my[_-]?(?:pass(?:word)?|passwd|secret|token|key)|change[_-]?(?:me|it)|replace[_-]?me|"
    r"(?:test|dummy|fake|sample|example|default|some|the|a|new|old|no|user|db|bad|wrong)?[_-]?"
    r"(?:pass(?:word|wd|phrase)?|pwd|pw|secret|token|key|credentials?|value|string)s?|"
    r"foo(?:bar)?|bar|baz|spam|eggs|ham|abc|test|demo|dummy|none|null|nil|true|false|undefined|required|optional|hidden|"
    r"str|bytes|int|bool|text|object|number|redacted|masked|removed|user(?:name)?|admin|root|guest|anonymous)"
)


IDENTIFIER_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(.*)?")  # `base64.b64encode`


def is_placeholder(value: str) -> bool:
    """Whether a value stands for a secret without being one: "changeme", "${TOKEN}", "<password>", "xxxx"."""
    return _DUMMY.fullmatch(value) is not None or _TEMPLATE.search(value) is not None


def decoded_base64(text: str) -> str | None:
    """The text that base64 (or its URL-safe form) encodes; None: it encodes no printable text in UTF-8."""
    body = text.rstrip("=").replace("-", "+").replace("_", "/")
    if len(body) % 4 == 1:
        return None
    try:
        result = base64.b64decode(body + "=" * (-len(body) % 4), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return result if all(c.isprintable() or c in "\t\n\r" for c in result) else None


def _token(
    kind: str,
    pattern: str,
    *gates: str,
    check: Check | None = None,
    tail: str = r"(?![A-Za-z0-9])",
    within: re.Pattern[str] = LONG_RUN,
) -> Rule:
    compiled = re.compile(rf"(?<![A-Za-z0-9]){pattern}{tail}")
    return Rule(kind=kind, pattern=compiled, gates=gates, check=check, is_token=True, within=within)


def _rule(
    kind: str, pattern: str, *gates: str, check: Check | None = None, within: re.Pattern[str] | None = None
) -> Rule:
    return Rule(kind=kind, pattern=re.compile(pattern), gates=gates, check=check, group=1, within=within)


def _is_openai(match: re.Match[str]) -> bool:
    return is_random(match[0], 3.5)


def _is_jwt(match: re.Match[str]) -> bool:
    """Whether the header decodes; the payload may be cut off."""
    head = decoded_base64(match[0].partition(".")[0])
    return head is not None and head.startswith("{") and '"' in head


def _is_mixed(match: re.Match[str]) -> bool:
    value = match[match.re.groups]
    return (
        any(c.isdigit() for c in value)
        and any(c.islower() for c in value)
        and any(c.isupper() for c in value)
        and entropy(value) >= 4
    )


def _is_basic(match: re.Match[str]) -> bool:
    decoded = decoded_base64(match[1])
    return decoded is not None and ":" in decoded


def _is_credential(match: re.Match[str]) -> bool:
    return not is_placeholder(match[1])


def _is_long_credential(match: re.Match[str]) -> bool:
    return not is_placeholder(match[1]) and is_random(match[1]) and IDENTIFIER_PATH.fullmatch(match[1]) is None


GITLAB_GATES = (
    *(f"gl{name}-" for name in ("pat", "dt", "oas", "rt", "soat", "ft", "imt", "agent", "cbt", "ptt")),
    "gr1348941",
)
_HEX = "[0-9a-f]"
_WORD = "[A-Za-z0-9_-]"
TOKENS = (
    _token("e2b_key", r"(?:sk_)?e2b_[A-Za-z0-9]{20,}", "e2b_"),
    _token("github_token", r"gh[pousr]_[A-Za-z0-9]{36,255}", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    _token("github_token", r"github_pat_[A-Za-z0-9_]{22,255}", "github_pat_"),
    _token(
        "gitlab_token", rf"(?:gl(?:pat|dt|oas|rt|soat|ft|imt|agent|cbt|ptt)-|GR1348941){_WORD}{{20,255}}", *GITLAB_GATES
    ),
    _token("aws_key_id", r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}", "a3t", "akia", "asia", "abia", "acca"),
    _token("aws_session_token", r"(?:FwoG|IQoJ|FQoG)[A-Za-z0-9/+]{100,4000}={0,2}", "fwog", "iqoj", "fqog"),
    _token("google_api_key", rf"AIza{_WORD}{{35}}", "aiza", tail=r"(?![A-Za-z0-9_-])"),
    _token("google_oauth_token", rf"ya29\.{_WORD}{{20,1024}}", "ya29."),
    _token("google_client_secret", rf"GOCSPX-{_WORD}{{20,40}}", "gocspx-"),
    _token("google_refresh_token", rf"1//0{_WORD}{{30,200}}", "1//0"),
    _token("azure_client_secret", r"[A-Za-z0-9_~.-]{3}\dQ~[A-Za-z0-9_~.-]{31,34}", "q~"),
    _token("slack_token", r"xox[abeoprs](?:\.xox[bp])?-[A-Za-z0-9-]{15,255}", "xox"),
    _token("slack_token", r"xapp-\d-[A-Za-z0-9-]{20,255}", "xapp-"),
    _token("anthropic_key", rf"sk-ant-{_WORD}{{20,255}}", "sk-ant-"),
    _token("openrouter_key", rf"sk-or-(?:v\d-)?{_WORD}{{32,128}}", "sk-or-"),
    _token("openai_key", rf"sk-(?:proj-|svcacct-|admin-|None-)?{_WORD}{{20,255}}", "sk-", check=_is_openai),
    _token("huggingface_token", r"(?:hf|api_org)_[A-Za-z]{34}", "hf_", "api_org_"),
    _token("huggingface_token", r"hf_[A-Za-z0-9]{30,40}", "hf_"),
    _token("replicate_token", r"r8_[A-Za-z0-9]{37,40}", "r8_"),
    _token("groq_key", r"gsk_[A-Za-z0-9]{40,64}", "gsk_"),
    _token("xai_key", r"xai-[A-Za-z0-9]{70,90}", "xai-"),
    _token("perplexity_key", r"pplx-[A-Za-z0-9]{40,64}", "pplx-"),
    _token("langsmith_key", rf"lsv2_(?:pt|sk)_{_HEX}{{32}}_{_HEX}{{10}}", "lsv2_"),
    _token("tavily_key", rf"tvly-{_WORD}{{20,64}}", "tvly-"),
    _token("pinecone_key", r"pcsk_[A-Za-z0-9_]{40,128}", "pcsk_"),
    _token("wandb_key", r"wandb_v1_[A-Za-z0-9_]{40,128}", "wandb_v1_"),
    _token("databricks_token", rf"dapi{_HEX}{{32}}(?:-\d)?", "dapi"),
    _token("stripe_key", r"(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,255}", "sk_live_", "rk_live_", "sk_test_", "rk_test_"),
    _token("stripe_webhook_secret", r"whsec_[A-Za-z0-9+/]{24,64}={0,2}", "whsec_"),
    _token("square_token", rf"sq0[a-z]{{3}}-{_WORD}{{22,43}}", "sq0"),
    _token("square_token", rf"EAAA{_WORD}{{60}}", "eaaa", tail=r"(?![A-Za-z0-9_-])"),
    _token("facebook_token", r"EAA[A-Z][A-Za-z0-9]{80,255}", "eaa"),
    _token("braintree_token", rf"access_token\$(?:production|sandbox)\$[0-9a-z]{{16}}\${_HEX}{{32}}", "access_token$"),
    _token("shopify_token", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}", "shpat_", "shpca_", "shppa_", "shpss_"),
    _token("twilio_key", rf"(?:SK|AC){_HEX}{{32}}", "sk", "ac", within=LONGER_RUN),
    _token("sendgrid_key", rf"SG\.{_WORD}{{16,32}}\.{_WORD}{{32,64}}", "sg."),
    _token("mailgun_key", rf"key-{_HEX}{{32}}", "key-"),
    _token("mailgun_key", rf"{_HEX}{{32}}-{_HEX}{{8}}-{_HEX}{{8}}", "-", within=LONGER_RUN),
    _token("mailchimp_key", rf"{_HEX}{{32}}-us\d{{1,2}}", "-us"),
    _token("brevo_key", rf"xkeysib-{_HEX}{{64}}-[A-Za-z0-9]{{16}}", "xkeysib-"),
    _token("npm_token", r"npm_[A-Za-z0-9]{36}", "npm_"),
    _token("pypi_token", rf"pypi-AgE{_WORD}{{50,1024}}", "pypi-age"),
    _token("rubygems_key", rf"rubygems_{_HEX}{{48}}", "rubygems_"),
    _token("docker_token", rf"dckr_(?:pat|oat)_{_WORD}{{20,64}}", "dckr_"),
    _token("digitalocean_token", rf"do[opr]_v1_{_HEX}{{64}}", "_v1_"),
    _token("heroku_key", rf"HRKU-{_WORD}{{36,80}}", "hrku-"),
    _token("netlify_token", rf"nf[pcou]_{_WORD}{{36,64}}", "nfp_", "nfc_", "nfo_", "nfu_"),
    _token("fly_token", r"fo1_[A-Za-z0-9_-]{43}", "fo1_"),
    _token("fly_token", r"fm[12][ar]?_[A-Za-z0-9+/]{60,1024}={0,3}", "fm1", "fm2"),
    _token("supabase_key", rf"sbp_{_HEX}{{40}}", "sbp_"),
    _token("supabase_key", rf"sb_secret_{_WORD}{{20,64}}", "sb_secret_"),
    _token("planetscale_token", r"pscale_(?:tkn|oauth|pw)_[A-Za-z0-9_.-]{32,64}", "pscale_"),
    _token("doppler_token", r"dp\.(?:pt|st|ct|scim|audit|sa)\.(?:[a-z0-9_-]{2,35}\.)?[A-Za-z0-9]{40,44}", "dp."),
    _token("vault_token", rf"hv[sbr]\.{_WORD}{{24,300}}", "hvs.", "hvb.", "hvr."),
    _token("terraform_token", r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{60,70}", ".atlasv1."),
    _token("pulumi_token", rf"pul-{_HEX}{{40}}", "pul-"),
    _token("grafana_token", r"(?:glc_[A-Za-z0-9+/]{32,400}={0,2}|glsa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8})", "glc_", "glsa_"),
    _token("newrelic_key", r"NR(?:AK|JS|II|IQ)-[A-Za-z0-9_-]{19,40}", "nrak-", "nrjs-", "nrii-", "nriq-"),
    _token("sentry_token", r"sntr(?:ys|yu)_[A-Za-z0-9_+/=.-]{40,400}", "sntry"),
    _token("dynatrace_token", r"dt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{64}", "dt0"),
    _token("linear_key", r"lin_(?:api|oauth)_[A-Za-z0-9]{32,64}", "lin_"),
    _token("notion_token", r"(?:ntn_[A-Za-z0-9]{40,50}|secret_[A-Za-z0-9]{43})", "ntn_", "secret_"),
    _token("airtable_token", rf"pat[A-Za-z0-9]{{14}}\.{_HEX}{{64}}", "pat", within=LONGER_RUN),
    _token("figma_token", rf"fig[dro]_{_WORD}{{40,60}}", "figd_", "figr_", "figo_"),
    _token("postman_key", rf"PMAK-{_HEX}{{24}}-{_HEX}{{34}}", "pmak-"),
    _token("atlassian_token", r"ATATT3[A-Za-z0-9_=-]{100,255}", "atatt3"),
    _token("adobe_secret", r"p8e-[A-Za-z0-9]{32}", "p8e-"),
    _token("artifactory_token", r"AKC[a-zA-Z0-9]{50,80}", "akc"),
    _token("discord_token", r"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}", ".", check=_is_mixed, within=LONGER_RUN),
    _token("telegram_token", rf"\d{{8,10}}:AA{_WORD}{{32,35}}", ":aa"),
    _token("twitter_token", r"A{20,}[A-Za-z0-9%]{60,120}", "aaaaaaaaaaaaaaaaaaaa", check=_is_mixed),
    _token("age_key", r"AGE-SECRET-KEY-1[A-Z0-9]{58}", "age-secret-key-"),
    _token("crates_token", r"cio[A-Za-z0-9]{32}", "cio", check=_is_mixed),
    _token("jwt", r"eyJ[A-Za-z0-9_-]{10,4096}\.[A-Za-z0-9_-]{4,16384}(?:\.[A-Za-z0-9_-]{0,4096}){0,3}", "eyj", check=_is_jwt),
)  # fmt: skip

_KEY_HEAD = r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_KEY_END = r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_BETWEEN = r"(?:[\s>#|\"',+]|\\[nr]){0,16}+"
_KEY_ABOUT = rf"(?:[A-Za-z-]{{4,20}}: [^\n\\]{{0,80}}{_BETWEEN}){{0,4}}"  # `Proc-Type: 4,ENCRYPTED`
_KEY_LINES = rf"(?:[A-Za-z0-9+/=]{{24,}}+{_BETWEEN})"
# The last line is shorter; a word of what follows is none: it has no "=", or not both cases and a digit.
_KEY_REST = (
    r"(?:[A-Za-z0-9+/]{1,23}={1,2}|[A-Za-z0-9+/]{1,23}\Z|(?=[a-z0-9+/]{0,22}[A-Z])(?=[A-Z0-9+/]{0,22}[a-z])"
    r"(?=[A-Za-z]{0,22}[0-9+/])[A-Za-z0-9+/]{8,23}(?=[\"'\\\r\n]))"
)
FORMS = (
    Rule(
        kind="private_key",
        pattern=re.compile(
            rf"{_KEY_HEAD}(?:[^-]|-(?!----)){{16,20000}}{_KEY_END}"
        ),
        gates=("private key",),
    ),
    # One whose end is cut off: the lines that look like base64.
    Rule(
        kind="private_key",
        pattern=re.compile(rf"{_KEY_HEAD}{_BETWEEN}{_KEY_ABOUT}{_KEY_LINES}{{1,400}}+{_KEY_REST}?"),
        gates=("private key",),
    ),
    # One whose beginning is cut off.
    Rule(
        kind="private_key",
        pattern=re.compile(rf"(?<![A-Za-z0-9+/=]){_KEY_LINES}{{1,400}}+(?:[A-Za-z0-9+/=]{{1,23}}{_BETWEEN})?{_KEY_END}"),
        gates=("private key",),
        within=re.compile(_KEY_END),
        margin=(16_000, 1),
    ),
    _rule("aws_secret_key", r"(?:A3T[A-Z0-9]|AKIA|ASIA)[A-Z0-9]{16}[^A-Za-z0-9/+][\s\S]{0,120}?(?<![A-Za-z0-9/+=])([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])", "akia", "asia", "a3t", check=_is_mixed),
    _rule("aws_secret_key", r"(?i:aws|secret)[^\n]{0,40}?[\s=:\"']([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])", "aws", "secret", check=_is_mixed),
    _rule("azure_storage_key", r"(?i:AccountKey|SharedAccessKey)\s*=\s*([A-Za-z0-9+/]{40,90}={0,2})", "accountkey", "sharedaccesskey"),
    _rule("url_password", r"[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s:/@\"'<>]{0,100}:([^\s/@\"'<>]{2,200})@[\w\[%]", "://", check=_is_credential),
    _rule("url_token", r"https?://([A-Za-z0-9_-]{16,100})@[\w.-]+", "://", check=_is_long_credential),
    _rule("url_token", r"(?<=[?&;])(?i:access_token|refresh_token|id_token|token|api_?key|key|sig|signature|client_secret|secret|password|passwd|pwd|auth|x-amz-signature|x-amz-security-token|x-goog-signature)=([^&\s\"'<>#;]{8,2048})", *(f"{name}=" for name in ("token", "key", "sig", "signature", "secret", "password", "passwd", "pwd", "auth")), check=_is_long_credential, within=LONG_RUN),
    _rule("slack_webhook", r"https://hooks\.slack\.com/(?:services|workflows|triggers)/([A-Za-z0-9_/-]{20,120})", "hooks.slack.com"),
    _rule("discord_webhook", r"https://(?:ptb\.|canary\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/(\d{15,22}/[A-Za-z0-9_-]{40,100})", "/webhooks/"),
    _rule("teams_webhook", r"https://[\w.-]+\.webhook\.office\.com/(webhookb2/[A-Za-z0-9@/_-]{40,300})", "webhook.office.com"),
    _rule("zapier_webhook", r"https://hooks\.zapier\.com/hooks/catch/(\d+/[a-z0-9]{5,20})", "hooks.zapier.com"),
    _rule("sentry_dsn", r"https://([0-9a-f]{32}(?::[0-9a-f]{32})?)@[\w.-]+/\d+", "https://"),
    _rule("basic_auth", r"(?i:\bbasic)\s+([A-Za-z0-9+/]{8,400}={0,2})", "basic", check=_is_basic),
    _rule("bearer_token", r"(?i:\bbearer)\s+([A-Za-z0-9._~+/-]{16,4096}=*)", "bearer", check=_is_long_credential),
    _rule("auth_header", r"(?i:\b(?:proxy-)?authorization|x-api-key|x-auth-token|x-access-token|api-key|private-token|x-vault-token|ocp-apim-subscription-key)[\"']?\s*[:=,]\s*[\"']?(?:(?i:bearer|basic|token|apikey)\s+)?([A-Za-z0-9._~+/=-]{12,4096})(?![\w(\[])", "authorization", "api-key", "-token", "subscription-key", check=_is_long_credential),
    _rule("cookie", r"(?i:\b(?:set-)?cookie)[\"']?\s*:\s*[\"']?[\w.-]{1,64}=([^;\s\"',]{12,4096})", "cookie", check=_is_long_credential),
    _rule("cookie", r"(?i:\b(?:sessionid|session_id|session|sid|csrftoken|phpsessid|jsessionid|connect\.sid))=([A-Za-z0-9%._+/=-]{20,512})", "sessionid=", "session_id=", "session=", "sid=", "csrftoken=", "phpsessid=", check=_is_long_credential, within=LONG_RUN),
    _rule("password_hash", r"(\$2[abxy]?\$\d\d\$[./A-Za-z0-9]{53})", "$2"),
    _rule("password_hash", r"(\$(?:1|5|6|y|7|argon2(?:id?|d)|scrypt|pbkdf2-sha\d+|apr1)\$[\w.,=/+$-]{20,300})", "$"),
    _rule("password_hash", r"(pbkdf2_sha\d+\$\d+\$[\w+/=]+\$[\w+/=]{20,100})", "pbkdf2_"),
    _rule("otp_seed", r"otpauth://[^\s\"']{0,200}?secret=([A-Z2-7]{16,128})", "otpauth://"),
    _rule("seed_phrase", r"(?i:mnemonic|(?:seed|recovery)[_ -]?phrase|secret[_ -]recovery)[^\n]{0,20}?((?<![a-z])(?:[a-z]{3,8} ){11,23}[a-z]{3,8})(?![a-z])", "mnemonic", "phrase", "recovery"),
)  # fmt: skip
