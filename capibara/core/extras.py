"""Imports optional dependencies, with an install hint where one is missing."""

from __future__ import annotations

import importlib
import pathlib
import types

from capibara.core.types import UserError

DISTRIBUTION = "capibara-tpu"  # the name capibara on PyPI is a package of others
CHECKOUT = pathlib.Path(__file__).resolve().parents[2]  # if the package is run from one


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
        command = install_command(extra) if extra else f"pip install {top}"
        needed = f" (needed for {why})" if why else ""
        raise UserError(f"{package} is not installed{needed}: {command}") from None


def install_command(extra: str) -> str:
    """The shell command that installs an extra: from the checkout that this package is run from, else of the distribution."""
    if (CHECKOUT / "pyproject.toml").is_file():
        return f'pip install -e "{CHECKOUT}[{extra}]"'
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def missing(extra: str) -> list[str] | None:
    """The distributions of an extra that are not installed; None: nothing here says what they are."""
    from packaging.requirements import Requirement

    if (texts := _requirements(extra)) is None:
        return None
    requirements = [Requirement(text) for text in texts]
    return sorted(
        {
            item.name
            for item in requirements
            if (item.marker is None or item.marker.evaluate({"extra": extra})) and not version(item.name)
        }
    )


def _requirements(extra: str) -> list[str] | None:
    """What an extra requires, by the checkout or the installed distribution."""
    import importlib.metadata
    import tomllib

    if (project := CHECKOUT / "pyproject.toml").is_file():
        return list(tomllib.loads(project.read_text("utf-8"))["project"]["optional-dependencies"].get(extra, ()))
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return [line for line in lines if "extra ==" in line]


def version(package: str) -> str | None:
    """The installed version of a distribution; None: it is not installed."""
    import importlib.metadata  # a fifth of the time of `train --help`

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
