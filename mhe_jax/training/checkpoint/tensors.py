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
from mhe_jax.model import stack_layers, unroll_layers
from mhe_jax.training.checkpoint.steps import told

WEIGHTS = "model.safetensors"
# What the metadata have the SHA-256 of all tensors under, as the format itself has none.
DIGEST = "mhe_jax_sha256"


def by_name(params: Any) -> dict[str, np.ndarray]:
    """The parameters of a model by their names, on this host."""
    return flatten_dict(unroll_layers(jax.device_get(params)), sep=".")  # pyright: ignore


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, and in its metadata the SHA-256 of the tensors."""
    library = _library(Path(path.name))
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    # The library lets nobody but its owner read what it writes.
    path.touch()
    mode = path.stat().st_mode
    library.numpy.save_file(arrays, path, {**(metadata or {}), DIGEST: _digest(arrays)})
    path.chmod(mode)


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata.

    InputError if it cannot be read, or its numbers are not those that `write_tensors` wrote.
    """
    library, local = _library(path), local_copy(path, cache_directory())
    with told(InputError, f"{path}: cannot be read"), library.safe_open(local, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if DIGEST in metadata and metadata[DIGEST] != _digest(tensors):
        raise InputError(f"{path}: its numbers have changed since it was written (SHA-256)")
    return tensors, metadata


def read_params(path: Path, abstract_params: Any) -> tuple[Any, dict[str, str]]:
    """Parameters of the shapes and shardings of `abstract_params`, and the file's metadata."""
    tensors, metadata = read_tensors(path)
    unrolled = jax.eval_shape(unroll_layers, abstract_params)
    wanted = cast(dict[str, Any], flatten_dict(unrolled, sep="."))
    for name in sorted(wanted.keys() ^ tensors.keys()):
        has = "has no" if name in wanted else "has a"
        raise InputError(f"{path}: {has} tensor {name}, unlike the config's model")
    for name, leaf in wanted.items():
        array = tensors[name]
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise InputError(
                f"{path}: {name} is {array.dtype}{[*array.shape]}: the config asks for "
                f"{leaf.dtype}{[*leaf.shape]}"
            )
        if not np.isfinite(array).all():
            raise InputError(f"{path}: {name} holds NaN or infinity")
    params: Any = unflatten_dict(tensors, sep=".")
    if jax.tree.structure(unrolled) != jax.tree.structure(abstract_params):  # scanned
        params = jax.device_get(stack_layers(params))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params)
    return jax.device_put(params, shardings), metadata


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
