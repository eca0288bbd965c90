"""Parameters by name in a safetensors file, the form in which models travel; nothing is executed.

A name is the path of a parameter with dots between its parts, and layers are unrolled, as in
`encoder.layer_0.mlp.up.kernel`. The extra `export` has the library.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from mhe_jax.config import InputError, not_installed
from mhe_jax.config.files import cache_directory
from mhe_jax.data.cache import local_copy
from mhe_jax.model import unroll_layers
from mhe_jax.training.checkpoint.store import told

WEIGHTS = "model.safetensors"
# What the metadata have the SHA-256 of all tensors under, as the format itself has none.
DIGEST = "mhe_jax_sha256"
# The name of scanned layers, and of each that is not, in a path.
STACKED, LAYER = "layers", "layer_{}"


def by_name(params: Any) -> dict[str, np.ndarray]:
    """The parameters of a model by their names, on this host."""
    return flatten_dict(unroll_layers(jax.device_get(params)), sep=".")  # pyright: ignore


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, and in its metadata the SHA-256 of the tensors.

    Raises:
      InputError: the library is not installed.
      OSError: it cannot be written.
    """
    library = _library(Path(path.name))
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    # The library lets nobody but its owner read what it writes.
    path.touch()
    mode = path.stat().st_mode
    try:
        library.numpy.save_file(arrays, path, {**(metadata or {}), DIGEST: _digest(arrays)})
    except library.SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata.

    Raises:
      InputError: it cannot be read, its numbers are not those that `write_tensors` wrote, or the
        library is not installed.
    """
    library, local = _library(path), local_copy(path, cache_directory())
    with told(InputError, f"{path}: cannot be read"), library.safe_open(local, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if DIGEST in metadata and metadata[DIGEST] != _digest(tensors):
        raise InputError(f"{path}: its numbers have changed since it was written (SHA-256)")
    return tensors, metadata


def read_params(path: Path, abstract_params: Any) -> tuple[Any, dict[str, str]]:
    """Parameters of the shapes and shardings of `abstract_params`, and the file's metadata.

    Raises:
      InputError: as `read_tensors`; a tensor is missing, is unknown, has another shape or type, or
        holds NaN or infinity.
    """
    tensors, metadata = read_tensors(path)

    def take(name: str, leaf: Any, shape: tuple[int, ...]) -> np.ndarray:
        if name not in tensors:
            raise InputError(f"{path}: has no tensor {name}")
        array = tensors.pop(name)
        if array.shape != shape:
            raise InputError(f"{path}: {name} has shape {array.shape}: the config asks for {shape}")
        if array.dtype != leaf.dtype:
            raise InputError(f"{path}: {name} is {array.dtype}: takes {leaf.dtype}")
        if not np.isfinite(array).all():
            raise InputError(f"{path}: {name} holds NaN or infinity")
        return array

    placed = {}
    leaves = cast(dict[tuple[str, ...], Any], flatten_dict(abstract_params))
    for parts, leaf in leaves.items():
        if STACKED in parts:
            at = parts.index(STACKED)
            names = [
                ".".join((*parts[:at], LAYER.format(i), *parts[at + 1 :]))
                for i in range(leaf.shape[0])
            ]
            array = np.stack([take(name, leaf, leaf.shape[1:]) for name in names])
        else:
            array = take(".".join(parts), leaf, leaf.shape)
        placed[parts] = jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index, array=array: array[index]
        )
    for name in tensors:
        raise InputError(f"{path}: has a tensor {name}, which the config's model does not have")
    return unflatten_dict(placed), metadata


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name]
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _library(path: Path) -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        raise not_installed(f"{path} needs safetensors", "export") from None
    return safetensors
