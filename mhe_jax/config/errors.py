"""Errors that a user can fix."""

import importlib.metadata
import json
from pathlib import Path
from urllib.parse import unquote, urlparse

CLONE = Path(__file__).parents[2]


class InputError(ValueError):
    """The user gave something wrong; the message is one line: what, and what is allowed."""


def not_installed(what: str, extra: str) -> InputError:
    """The error: `what` is missing, and how to get it, in a clone or from the installed wheel."""
    if (CLONE / "pyproject.toml").is_file():
        return InputError(f"{what}: in the clone, pip install -e '.[{extra}]' -c constraints.txt")
    return InputError(f"{what}: pip install '{_wheel() or 'THE_WHEEL_OF_mhe_jax'}[{extra}]'")


def _wheel() -> str | None:
    """The file that mhe_jax was installed from, as pip recorded it."""
    try:
        noted = importlib.metadata.distribution("mhe_jax").read_text("direct_url.json")
        return unquote(urlparse(json.loads(noted or "{}")["url"]).path)
    except (importlib.metadata.PackageNotFoundError, KeyError, ValueError):
        return None
