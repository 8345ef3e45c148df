"""Serves over HTTP: a loaded model with OpenAI's API (`capibara.serve`), and runs in a browser (`capibara.dashboard`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from capibara.core import extras
from capibara.core.types import UserError

if TYPE_CHECKING:
    from capibara.api.language_model import LanguageModel
    from capibara.inference.sampling.sampling import Sampling
    from capibara.inference.server.service.service import Served, ServerConfig
    from capibara.monitoring.dashboard.settings import DashboardConfig
    from capibara.retrieval.tool import SearchTool

_KEY = "CAPIBARA_API_KEY"


def serve(
    model: LanguageModel,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key_file: str | None = None,
    limits: ServerConfig | None = None,
    search: SearchTool | None = None,
    sampling: Sampling | None = None,
    ready: Callable[[str], None] = print,
) -> None:
    """Serves a model until a signal, such as ctrl-C, as `capibara serve` does.

    Args:
      model: the loaded model.
      host, port: where to listen; port 0: any free one.
      name: the model's name for clients; None: the name of its folder or file.
      api_key_file: API keys, one a line; None: those of CAPIBARA_API_KEY, or none, on this machine only.
      limits: of the server; None: its defaults.
      search: an index that the model searches in chats; None: none.
      sampling: what requests do not say; None: the defaults.
      ready: called with the address when the model answers.

    Raises:
      UserError: an option does not fit the model, the address cannot be used, or other machines could send requests without a key.
    """
    if not hasattr(type(model), "engine"):
        raise UserError(f"serve takes a loaded model, and {model!r} is none: try cb.load({model!r})")
    if not 0 <= port < 65536:
        raise UserError(f"port is {port}, must be from 0 to 65535 (0: any free one)")
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        extras.require(package, extra="serve", why="capibara.serve")
    from capibara.inference.sampling.sampling import Sampling
    from capibara.inference.server import server
    from capibara.inference.server.service.service import ServerConfig

    takes = ServerConfig() if limits is None else limits
    name = name or os.path.basename(os.path.normpath(model.path)).removesuffix(".gguf")
    endpoint = server.open_endpoint(host, port, api_key_file, _KEY)
    served = _served(model, name, Sampling() if sampling is None else sampling, takes, search)
    server.run(endpoint.listening, endpoint.keys, lambda: (served, takes), lambda _: ready(endpoint.url), host)


def _served(
    model: LanguageModel, name: str, sampling: Sampling, takes: ServerConfig, search: SearchTool | None
) -> Served:
    """The model with its engine or its scores; errors as for `serve`."""
    from capibara.cli.composition import models, retrieving, serving
    from capibara.inference.interactive import chat
    from capibara.inference.server.service.service import Served
    from capibara.models.api import Head

    folders = model.adapting.folders
    data, scores = model.loaded.dataset, model.config.head is Head.SCORE
    if scores:
        serving.check_scores(
            None if search is None else search.index, takes, name, () if folders is None else folders.roots
        )
    serving.check_texts(sampling, takes, search)
    talk = chat.of_served(data, model.template)
    return Served(
        None if scores else model.engine,
        model.tokenizer,
        talk,
        data.length,
        data.encoder_length,
        name,
        sampling,
        read_adapter=None if scores or folders is None else folders.read,
        scorer=model.scorer if scores else None,
        judge=models.reward_model(takes.thinking, "the reward model"),
        tool=None if search is None else retrieving.search_of(search, talk),
    )


def dashboard(
    runs: str | Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    token_file: str | None = None,
    settings: DashboardConfig | None = None,
    ready: Callable[[str], None] = print,
) -> None:
    """Shows runs in a browser until a signal, such as ctrl-C, as `capibara dashboard` does.

    Args:
      runs: a run folder or a folder of run folders, here or in a bucket, or several.
      host, port: where to listen; port 0: any free one.
      token_file: a file with the token; None: of the environment, or a new one if other machines can connect.
      settings: of alerts and limits; None: the defaults.
      ready: called with a line that has the address.

    Raises:
      UserError: the address cannot be used, or a file cannot be read.
    """
    roots = (runs,) if isinstance(runs, str) else tuple(runs)
    if not roots or not all(isinstance(root, str) for root in roots):
        raise UserError(f"runs is {runs!r}, must be a folder, or a list of them: try 'runs'")
    if not 0 <= port < 65536:
        raise UserError(f"port is {port}, must be from 0 to 65535 (0: any free one): try 8080")
    for package in ("starlette", "uvicorn", "pyarrow", "regex"):
        extras.require(package, extra="dashboard", why="capibara.dashboard")
    from capibara.cli.composition import run_facts
    from capibara.monitoring.dashboard import server
    from capibara.monitoring.dashboard.settings import DashboardConfig

    options = server.Options(roots=roots, host=host, port=port, token_file=token_file)
    server.run(options, settings or DashboardConfig(), run_facts.questions(roots), ready)
