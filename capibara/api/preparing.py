"""Data sets and indices of documents, from Python: `capibara prepare`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capibara.api.stored import Loaded, file_path, stored_path
from capibara.core.types import UserError

if TYPE_CHECKING:
    from capibara.builders.executions.chats import ExecutionChats
    from capibara.builders.executions.filters import ExecutionFilter
    from capibara.builders.executions.fixes import FixPairs
    from capibara.builders.files.manifest import Manifest
    from capibara.builders.playbooks.chats import PlaybookChats
    from capibara.builders.playbooks.filters import AgentFilter, BulletFilter
    from capibara.builders.playbooks.merging import BulletMerging
    from capibara.builders.playbooks.ranking import BulletRanking
    from capibara.builders.redaction.redact import Redaction
    from capibara.builders.routing.settings import RoutingSet
    from capibara.retrieval.index import Index
    from capibara.retrieval.settings import IndexPreparation


def prepare_playbooks(
    inputs: str | Sequence[str],
    out: str,
    *,
    agents: AgentFilter | None = None,
    merging: BulletMerging | None = None,
    bullets: BulletFilter | None = None,
    ranking: BulletRanking | None = None,
    chats: PlaybookChats | None = None,
    redaction: Redaction | None = None,
    num_workers: int = 0,
) -> dict[str, Any]:
    """Makes training sets out of agents' playbooks, as `capibara prepare playbooks` does; returns the manifest.

    Args:
      inputs: files, folders and globs of playbooks and agents.
      out: the output folder; a build that was killed resumes there.
      agents, merging, bullets, ranking, chats, redaction: what is kept and made; None: the defaults.
      num_workers: processes that read files; 0: this one.

    Raises:
      UserError: a package or an input is missing, or the folder holds another build.
    """
    from capibara.builders.playbooks import build
    from capibara.builders.playbooks.reading import ENDINGS

    settings = build.Playbooks(
        **_settings_of(
            agents=agents, merging=merging, bullets=bullets, ranking=ranking, chats=chats, redaction=redaction
        )
    )
    return _manifest(build.build, ENDINGS, inputs, out, settings, num_workers)


def prepare_executions(
    inputs: str | Sequence[str],
    out: str,
    *,
    filter: ExecutionFilter | None = None,
    fixes: FixPairs | None = None,
    chats: ExecutionChats | None = None,
    redaction: Redaction | None = None,
    num_workers: int = 0,
) -> dict[str, Any]:
    """Makes training sets out of logs of executed code, as `capibara prepare executions` does; returns the manifest.

    Args:
      inputs: files, folders and globs of logs.
      out: the output folder; a build that was killed resumes there.
      filter, fixes, chats, redaction: what is kept and made; None: the defaults.
      num_workers: processes that read logs; 0: this one.

    Raises:
      UserError: a package or an input is missing, or the folder holds another build.
    """
    from capibara.builders.executions import build
    from capibara.builders.executions.reading import ENDINGS

    settings = build.ExecutionLogs(**_settings_of(filter=filter, fixes=fixes, chats=chats, redaction=redaction))
    return _manifest(build.build, ENDINGS, inputs, out, settings, num_workers)


def prepare_routing(
    inputs: str | Sequence[str], out: str, settings: RoutingSet | None = None, *, num_workers: int = 0
) -> dict[str, Any]:
    """Makes a training set for the hybrid expert router, as `capibara prepare routing` does; returns the manifest.

    Args:
      inputs: files, folders and globs of records: of `prepare_executions` and `prepare_playbooks`, conversations, documents.
      out: the output folder; a build that was killed resumes there.
      settings: how; None: the defaults.
      num_workers: processes that read files; 0: this one.

    Raises:
      UserError: a package or an input is missing, a domain has no examples, or the folder holds another build.
    """
    from capibara.builders.routing import build
    from capibara.builders.routing.settings import RoutingSet

    return _manifest(build.build, build.ENDINGS, inputs, out, settings or RoutingSet(), num_workers)


def _settings_of(**settings: object) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def _manifest(
    build: Callable[..., Manifest],
    endings: Sequence[str],
    inputs: str | Sequence[str],
    out: str,
    settings: object,
    num_workers: int,
) -> dict[str, Any]:
    """Builds a data set; returns its manifest, which counts and names what was skipped."""
    from capibara.builders.files import reading
    from capibara.builders.files.problems import Problems

    folder, problems = file_path(out, "out", "data/set"), Problems()
    paths = reading.expand(_patterns(inputs), endings, problems, folder)
    return build(paths, folder, settings, num_workers=num_workers, problems=problems).as_json()


def _patterns(inputs: str | Sequence[str]) -> Sequence[str]:
    patterns = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(patterns, Sequence) or not all(isinstance(item, str) for item in patterns):
        raise UserError(f"inputs is {inputs!r}, must be a file, folder, glob or address, or a list of them: try 'docs'")
    return patterns


def prepare_index(
    inputs: str | Sequence[str], out: str, model: Loaded | str, settings: IndexPreparation | None = None
) -> dict[str, Any]:
    """Makes an index of documents, as `capibara prepare index` does; returns its manifest.

    Args:
      inputs: files, folders, globs and addresses of documents.
      out: the output folder.
      model: embeds the chunks: a path or name, as for `load`, or a loaded model, which is read again from its path.
      settings: how; None: the defaults.

    Raises:
      UserError: there is no document, the model embeds no texts, or no index reaches the goal.
    """
    from capibara.cli.composition import retrieving
    from capibara.retrieval import build
    from capibara.retrieval.settings import IndexPreparation

    settings = IndexPreparation() if settings is None else settings
    if not isinstance(settings, IndexPreparation):
        raise UserError(f"settings is {settings!r}, must be cb.IndexPreparation(...), or None: the defaults")
    patterns = _patterns(inputs)
    embedder = retrieving.embedder(stored_path(model), settings.pooling)
    return build.prepare(
        patterns, file_path(out, "out", "data/docs"), settings, embedder, lambda topic, detail: None
    ).as_json()


def index(path: str | os.PathLike[str], model: Loaded | str | None = None) -> Index:
    """Opens an index: `capibara.index("data/docs").search("how are files locked?", k=4)`.

    Args:
      path: a folder of `capibara prepare index`.
      model: the model that has embedded it; None: where it was then.

    Raises:
      UserError: it is no index, a file of it has changed, or the model is another one.
    """
    from capibara.cli.composition import retrieving

    return retrieving.index(file_path(path, "path", "data/docs"), None if model is None else stored_path(model))
