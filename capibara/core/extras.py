"""Imports optional dependencies, with an install hint where one is missing."""

from __future__ import annotations

import importlib
import types

from capibara.core.types import UserError


def require(package: str, *, extra: str | None = None, why: str = "") -> types.ModuleType:
    """Imports and returns `package` (a dotted module name), an optional dependency.

    Args:
      package: what to import, such as "datasets" or "jax.experimental.topologies".
      extra: the extra of capibara that installs it ("hf", "seqio", "tpu", "gcs", "encryption", ...); None: none does.
      why: what needs it, for the message: "a Hugging Face source".

    Raises:
      UserError: it is not installed; the message holds the command that installs it. If the package is installed but
        fails while it is imported, its own error is raised.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        top = package.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise
        target = f'"capibara[{extra}]"' if extra else top
        needed = f" (needed for {why})" if why else ""
        raise UserError(f"{package} is not installed{needed}: pip install {target}") from None


def version(package: str) -> str | None:
    """The installed version of a distribution; None: it is not installed."""
    import importlib.metadata  # a fifth of the time of `train --help`

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
