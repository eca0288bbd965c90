"""PyTorch beside JAX: on the same device, and waited for in the same way."""

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

# Names of JAX's backends here.
DEVICES = {"cpu": "cpu", "gpu": "cuda"}
# Held while a case is made: the memory of one is counted while no other is there to take any.
ALONE = threading.Lock()
MODELING = Path(__file__).parents[1] / "mhe_jax/interchange/modeling_mhe.py"


def with_device() -> tuple[Any, str]:
    """PyTorch, and its name of the device that JAX runs on.

    Raises:
      ImportError: it is not installed.
      ValueError: it has no such device.
    """
    import torch  # pyright: ignore[reportMissingImports]

    device = DEVICES.get(backend := jax.default_backend())
    if device is None or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"this PyTorch has no {backend.upper()}")
    return torch, device


def here() -> tuple[Any, str] | None:
    """As `with_device`; None where that raises."""
    try:
        return with_device()
    except (ImportError, ValueError):
        return None


def build(torch) -> str:
    """Its version with the build, its threads, and its libraries for matrix products on a CPU."""
    has = {"MKL": torch.backends.mkl, "oneDNN": torch.backends.mkldnn}
    libraries = [name for name, library in has.items() if library.is_available()]
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join(
        [str(torch.__version__), f"{torch.get_num_threads()} threads", capability, *libraries]
    )


class Result:
    """Waits for the work that PyTorch has queued, as for JAX's arrays."""

    def __init__(self, torch, value):
        self.torch, self.value = torch, value

    def block_until_ready(self):
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()


def memory(torch, call: Callable[[], Any]) -> int | None:
    """Most bytes that a call holds beyond what is there before it; only a GPU counts them."""
    if not torch.cuda.is_available():
        return None
    jax.block_until_ready(call())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    jax.block_until_ready(call())
    return torch.cuda.max_memory_allocated() - before


def modeling() -> Any:
    """The module that goes with an export `--to transformers`."""
    spec: Any = importlib.util.spec_from_file_location("modeling_mhe", MODELING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
