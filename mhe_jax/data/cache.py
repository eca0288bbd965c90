"""What is built once and kept: where it lies, under which name, and how it appears all at once."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mhe_jax.config import InputError


def cache_directory(configured: str | None = None) -> Path:
    """`configured`, else $MHE_JAX_CACHE, else ~/.cache/mhe_jax; made if it is not there.

    Raises:
      InputError: it cannot be made or written.
    """
    given = configured or os.environ.get("MHE_JAX_CACHE") or "~/.cache/mhe_jax"
    path = Path(os.path.expanduser(given))
    if path.parts[0].startswith("~"):
        raise InputError(f"data.cache_directory={path}: there is no such home")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"data.cache_directory={path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise InputError(f"data.cache_directory={path}: not writable")
    return path


def key_of(*parts: object) -> str:
    """A short name for what `parts` (anything JSON can hold) describe.

    >>> key_of("a", 1) == key_of("a", 1), key_of("a", 1) == key_of("a", 2)
    (True, False)
    """
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def publish(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` when the block ends well, and vanishes when not.

    Nobody ever sees half a file, and of two processes that build the same one, both are right.

    Raises:
      InputError: it cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files that only their owner reads
        temporary.replace(path)
    except OSError as error:
        # A disk that fills up names no file; another file is what the block reads.
        if temporary is None or error.filename in (None, str(temporary)):
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
