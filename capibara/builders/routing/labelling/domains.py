"""The domains of a routing set, and what marks a text as one of them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Sequence

from capibara.config import configurable
from capibara.core import limits
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError


class Outcome(enum.StrEnum):
    """What a record says of a run.

    FAILED: it failed, or a conversation asks why.
    FIXED: it failed, and its fix follows.
    """

    FAILED = "failed"
    FIXED = "fixed"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
    """A domain, and what marks a text as one of it.

    Attributes:
      name: as records and `Dataset.domains` have it.
      names: other names that records declare for it, such as ("js",).
      outcomes: runs that belong to it, whatever their language.
      imports: modules that code of it imports: the part before the first dot of Python, or the package of JavaScript.
      words: regular expressions that are typical of its texts, found without regard to case; each counts once.
      languages: of its code, such as ("python",).
    """

    name: str
    names: tuple[str, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    imports: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+#-]{1,64}", self.name):
            raise UserError(f"Domain.name ({self.name!r}) must be 1 to 64 letters, digits, '_', '.', '+', '#' or '-'")
        if not (self.names or self.outcomes or self.imports or self.words or self.languages):
            object.__setattr__(self, "names", (self.name,))  # only what declares it belongs to it
        for pattern in self.words:
            try:
                limits.check_pattern(pattern)
                re.compile(pattern)
            except (re.error, limits.Refused) as error:
                raise UserError(
                    f"Domain.words of {self.name!r}: {pattern!r} is no usable regular expression ({error}): correct it"
                ) from None

    @functools.cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """`words`, compiled."""
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.words)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PYTHON = Domain(
    name="python",
    names=("py", "python3"),
    languages=("python",),
    words=(
        r"\bpython\b",
        r"\bpip install\b",
        r"\bdecorators?\b",
        r"\blist comprehensions?\b",
        r"\bcontext managers?\b",
        r"\bdataclass(?:es)?\b",
        r"\bdocstrings?\b",
        r"\bpytest\b",
        r"\bf-strings?\b",
        r"\bvirtualenv\b",
        r"\b__\w+__\b",
    ),
)
_SQL = Domain(
    name="sql",
    names=("database", "databases", "postgres", "postgresql", "mysql", "sqlite"),
    languages=("sql",),
    words=(
        r"\bsql\b",
        r"\bselect\b.{1,80}\bfrom\b",
        r"\b(?:left|inner|outer|cross) join\b",
        r"\bgroup by\b",
        r"\border by\b",
        r"\b(?:primary|foreign) keys?\b",
        r"\bind(?:ex|exes|ices)\b.{0,40}\b(?:column|table|query|queries)\b",
        r"\bquery plans?\b",
        r"\b(?:postgres|postgresql|mysql|sqlite|duckdb)\b",
        r"\bcreate table\b",
        r"\btransactions?\b.{0,60}\b(?:commit|rollback|isolation)\b",
    ),
)
_JAVASCRIPT = Domain(
    name="javascript",
    names=("js", "node", "nodejs", "typescript", "ts", "ecmascript"),
    languages=("javascript", "typescript"),
    words=(
        r"\bjavascript\b",
        r"\btypescript\b",
        r"\bnode\.?js\b",
        r"\bnpm (?:install|run)\b",
        r"\bpromises?\b.{0,40}\b(?:await|then|reject|resolve)",
        r"\b(?:react|vue|angular|webpack)\b",
        r"\bconsole\.log\b",
        r"\bevent loop\b",
        r"\bdom\b.{0,40}\belement",
        r"===",
    ),
)
_DEBUG = Domain(
    name="debug",
    names=("debugging", "fix", "fixes", "error", "errors", "troubleshooting"),
    outcomes=(Outcome.FAILED, Outcome.FIXED),
    words=(
        r"^traceback \(most recent call last\)",
        r"\b\w+(?:Error|Exception)\b: ",
        r"\bdebug(?:ger|ging)?\b",
        r"\bstack ?traces?\b",
        r"\bbreakpoints?\b",
        r"\broot cause\b",
        r"\bsegmentation fault\b",
        r"\bcore dump",
        r"\breproduc(?:e|es|ing) the (?:bug|error|failure|problem)\b",
        r"\bwhy does (?:this|it|the) .{0,40}(?:fail|crash|raise)",
        r"\bunexpected (?:token|indent|end)\b",
    ),
)
_ML = Domain(
    name="ml",
    names=("machine_learning", "machine-learning", "deep_learning", "data_science"),
    imports=_words(
        "numpy scipy sklearn pandas torch torchvision tensorflow keras jax jaxlib flax optax equinox xgboost lightgbm "
        "catboost transformers datasets tokenizers peft accelerate statsmodels gensim spacy nltk cv2 einops wandb mlflow "
        "onnx onnxruntime diffusers sentence_transformers pytorch_lightning lightning polars seaborn "
        "@tensorflow/tfjs @tensorflow/tfjs-node brain.js onnxruntime-node"
    ),
    words=(
        r"\bmachine learning\b",
        r"\bneural net(?:work)?s?\b",
        r"\bgradient descent\b",
        r"\blearning rates?\b",
        r"\b(?:over|under)fit(?:ting|s)?\b",
        r"\bcross[- ]validation\b",
        r"\b(?:training|validation|test) sets?\b",
        r"\bhyper-?parameters?\b",
        r"\bembeddings?\b",
        r"\bepochs?\b",
        r"\b(?:numpy|pytorch|tensorflow|scikit-learn|jax)\b",
        r"\bclassifiers?\b",
        r"\bbatch size\b",
    ),
)
_API = Domain(
    name="api",
    names=("apis", "http", "rest", "web", "web_api"),
    imports=_words(
        "requests httpx aiohttp urllib urllib3 http fastapi flask starlette uvicorn django rest_framework graphql grpc "
        "pydantic_settings websockets websocket tornado sanic bottle webob werkzeug yarl multidict furl hyperlink w3lib "
        "openai anthropic boto3 "
        "axios express koa fastify node-fetch undici got superagent @nestjs/core @apollo/server https node:http node:https"
    ),
    words=(
        r"\bhttps?://",
        r"\b(?:rest|restful|graphql|grpc|web) apis?\b",
        r"\bapi (?:keys?|calls?|endpoints?|clients?|gateway)\b",
        r"\bendpoints?\b",
        r"\bstatus[_ ]?codes?\b",
        r"\b(?:GET|POST|PUT|PATCH|DELETE) /\w",
        r"\bfetch\(\s{0,8}[\"'`]",
        r"\bcurl -",
        r"\bauthorization\b.{0,20}\bbearer\b",
        r"\bcontent-type\b",
        r"\brate limit(?:s|ed|ing)?\b",
        r"\bwebhooks?\b",
        r"\.json\(\)",
        r"\bpagination\b",
    ),
)
BUILT_IN = {domain.name: domain for domain in (_PYTHON, _SQL, _JAVASCRIPT, _DEBUG, _ML, _API)}


def resolved(domains: Sequence[str | Domain]) -> tuple[Domain, ...]:
    """The domains, built-in ones by their name.

    Raises:
      UserError: a name is unknown, or two domains share one.
    """
    result = []
    for item in domains:
        if isinstance(item, str) and item not in BUILT_IN:
            raise UserError(
                f"RoutingSet.domains: {item!r} is no built-in domain{did_you_mean(item, BUILT_IN, 'built in')}: or define a "
                "Domain with this name"
            )
        result.append(BUILT_IN[item] if isinstance(item, str) else item)
    owners: dict[str, str] = {}
    for domain in result:
        for name in {name.lower() for name in (domain.name, *domain.names)}:
            if name in owners:
                raise UserError(
                    f"RoutingSet.domains: {owners[name]!r} and {domain.name!r} are both named {name!r}: "
                    "remove it from one of Domain.names"
                )
            owners[name] = domain.name
    return tuple(result)
