"""Whether a program fits into the memory of a machine or container."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.config import InputError
from mhe_jax.evaluation import programs

MEGABYTE = 2**20


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "", None])
def test_without_a_limit_it_is_the_machines(tmp_path, monkeypatch, limit):
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
    monkeypatch.setattr(programs, "LIMITS", (tmp_path / "memory.max",))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 11}.get)
    assert programs.machine_memory() == 4096 * 11


@pytest.mark.parametrize("which", [0, 1])
def test_a_containers_limit_counts(tmp_path, monkeypatch, mesh, which):
    paths = (tmp_path / "v2", tmp_path / "v1")
    monkeypatch.setattr(programs, "LIMITS", paths)
    compiled = jax.jit(lambda x: x * 2).lower(jnp.zeros(MEGABYTE)).compile()
    paths[which].write_text(f"{9 * MEGABYTE}\n")
    programs.check_fits(compiled, mesh, 1, 1)
    paths[which].write_text(f"{7 * MEGABYTE}\n")
    with pytest.raises(InputError, match=r"need 0\.0 GB of memory, the machine has 0\.0"):
        programs.check_fits(compiled, mesh, 1, 1)


def test_parameters_count(tmp_path, monkeypatch, mesh):
    """A large model with a short output."""
    monkeypatch.setattr(programs, "LIMITS", (tmp_path / "limit",))
    compiled = jax.jit(jnp.sum).lower(jnp.zeros(MEGABYTE)).compile()
    (tmp_path / "limit").write_text(str(3 * MEGABYTE))
    with pytest.raises(InputError, match="give shorter lines"):
        programs.check_fits(compiled, mesh, 1, 1)
