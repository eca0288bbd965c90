"""What goes through the battery: kinds and forms, sizes, parameters, masks of every sort."""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from kind_references import KINDS

from mhe_jax.attention import Mask, make_attention

# All different and prime, so that a swapped axis cannot pass.
B, T, S, H, D = 2, 5, 7, 3, 11
M = H * D


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind in one form."""

    kind: str
    form: str | None = None
    heads: int = H
    kv_heads: int | None = None
    groups: int | None = None
    score_groups: int | None = None
    score_features: int | None = None
    head_features: int = D
    more: tuple[tuple[str, int | bool], ...] = ()  # other fields of the module
    latent_groups: int | None = None
    rotated: bool = False  # has what a kind has with `rotary` only

    def __str__(self):
        parts = [
            self.kind,
            self.form,
            self.kv_heads and f"{self.heads}over{self.kv_heads}",
            self.groups and f"{self.groups}groups",
            self.score_groups and f"{self.score_groups}scores",
            self.latent_groups and f"{self.latent_groups}latents",
            self.kind == "mha" and self.score_features and "thin",
            *(f"{name}={value}" for name, value in self.more if not self.form),
        ]
        return "-".join(p for p in parts if p)

    @property
    def grouped(self):
        """Whether heads read projections of their group."""
        return bool(self.groups or self.score_groups or self.latent_groups)

    @property
    def mask_heads(self):
        """Heads that a mask may tell apart."""
        return 1 if self.kind in ("sha", "ghla") or self.form == "shared" else self.heads

    @property
    def readers(self):
        """Softmaxes: more than heads where these have several branches."""
        more = dict(self.more)
        groups = self.latent_groups or more.get("latent_groups", 4)
        branches = more.get("latent_branches", groups) if self.kind == "mlra" else 1
        return branches * self.heads

    @property
    def may_normalize(self):
        """Whether the form goes with `normalize_qk`."""
        return self.form in (None, "materialized") or self.kind == "mva"

    @property
    def width(self):
        return self.heads * self.head_features

    @property
    def one_source(self):
        return self.module().one_source

    def module(self, **fields):
        given = {"num_heads": self.heads, "qkv_features": self.width}
        if self.form:
            given["form"] = self.form
        own = {
            "num_kv_heads": self.kv_heads,
            "num_groups": self.groups,
            "score_groups": self.score_groups,
            "score_features": self.score_features,
            "latent_groups": self.latent_groups,
        }
        given |= {name: value for name, value in own.items() if value} | dict(self.more)
        return make_attention(self.kind, **(given | fields))

    def reference(self, params, q, k, v, mask, **more):
        """Output and weights."""
        return self._run(params, q, k, v, mask, **more)[:2]

    def reference_gradients(self, params, q, k, v, mask, cotangent, **more):
        return self._run(params, q, k, v, mask, **more)[2](np.float64(cotangent))

    def output_and_gradients(self, params, q, k, v, mask, cotangent, **more):
        output, _, pull = self._run(params, q, k, v, mask, **more)
        return output, pull(np.float64(cotangent))

    def _run(self, params, q, k, v, mask, **more):
        given = KINDS[self.kind].head, *f64((params, q, k, v)), np.asarray(mask)
        turned = KINDS[self.kind].turned(self)
        return reference.run(*given, heads=self.readers, turned=turned, **more)


CASES = [Case(kind, **fields) for kind in KINDS for fields in KINDS[kind].cases]
MHE = ["mhe_add", "mhe_mul"]
# Groupings of heads beside the first composite one of gqa go through `test_kinds` only.
BATTERY = [c for c in CASES if c.kv_heads in (None, 2) and not c.grouped]
every_case = pytest.mark.parametrize("case", BATTERY, ids=str)
every_kind = pytest.mark.parametrize(
    "case",
    [c for c in BATTERY if c.kind == "mva" or c.form in (None, "folded", "absorbed", "factored")],
    ids=str,
)
every_grouping = pytest.mark.parametrize("case", CASES, ids=str)


def f64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def normal(seed, *shape, dtype=np.float32):
    """Numbers as numpy holds them: slices of these compile nothing."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@functools.cache
def _shapes(module, *shapes):
    inputs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]


def random_parameters(module, *inputs, seed=0, embedding=0.5):
    """Parameters whose every leaf is random: biases and head embeddings matter."""
    shapes = _shapes(module, *(x.shape for x in inputs))
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        name = path[-1].key
        values = rng.normal(size=like.shape)
        if name == "kernel":
            out = path[-2].key == "out"
            values /= np.sqrt(np.prod(like.shape[:-1]) if out else like.shape[0])
        elif name == "scale":
            values = 1 + 0.3 * values
        else:
            values *= embedding
        return jnp.asarray(values.astype(np.float32))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def assert_close(actual, wanted, tolerance=1e-5):
    """Each leaf to `tolerance` of its largest number; of the tree's, where it is 0 by algebra.

    A key bias moves all scores of a row alike, so its gradient is 0, and rounding in float32.
    """
    noise = 1e-9 if all(x.dtype == np.float64 for x in jax.tree.leaves(wanted)) else 2e-6
    actual, wanted = f64(actual), f64(wanted)
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    largest = max(np.abs(w).max() for w in jax.tree.leaves(wanted))
    for (path, w), a in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(actual), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.shape == w.shape, (name, a.shape, w.shape)
        assert np.isfinite(a).all(), name
        scale = np.abs(w).max()
        scale = scale if scale > noise * largest else largest
        np.testing.assert_array_less(np.abs(a - w), tolerance * scale + 1e-30, err_msg=name)


def parts(T, S):
    """Masks of parts alone and together, for engines that take no array; some rows see no key."""
    rng = np.random.default_rng(3)
    valid = rng.random((B, S)) < 0.7
    of_queries, of_keys = (np.sort(rng.integers(0, 3, (B, n)), 1) for n in (T, S))
    padding, segments = Mask.padding(valid), Mask.segments(of_queries, of_keys)
    near = S // 5
    return {
        "none": Mask(),
        "causal": Mask.causal(),
        "offset": Mask.causal(jnp.array([-3, S // 3])),
        "offset of all": Mask.causal(2) & padding,
        "window": Mask.local(near, 2),
        "window & causal": Mask.local(near, 2) & Mask.causal() & padding,
        "window & offset": Mask.local(near, 2) & Mask.causal(jnp.array([-2, 3])),
        "window, offset": Mask.local(near, 1, jnp.array([S // 2, -2])) & Mask.lengths([S, S // 2]),
        "lengths": Mask.lengths(jnp.array([S - 2, S // 2 + 1], jnp.uint8 if S < 256 else int)),
        "nothing of one": Mask.lengths(jnp.array([0, S // 2])) & Mask.causal(),
        "length of all": Mask.lengths(5) & segments & Mask.local(S, 3),
        "padding": padding,
        "segments": segments,
        "segments of all": Mask.segments(of_queries[:1], of_keys[:1]) & Mask.causal(),
        "one mark of queries": Mask.padding([[True], [False]])
        & Mask.segments(of_queries[:, -1:], of_keys),
        "one mark of keys": Mask.segments(of_queries, of_keys[:, :1]),
        "all of them": Mask.causal(1) & padding & segments & Mask.lengths([S - 1, S]),
    }


@functools.cache
def masks(queries, keys, heads):
    """What callers pass: masks of parts, and arrays of all shapes and types."""
    rng = np.random.default_rng(3)
    valid = np.arange(keys)[None] < np.array([keys - 2, keys])[:, None]
    dense = rng.random((B, 1, queries, keys)) < 0.6
    dense[:, :, :, 0] = True
    per_head = rng.random((B, heads, queries, keys)) < 0.6
    one_empty, empty_of_a_head = dense.copy(), per_head.copy()
    one_empty[0, :, 2] = False
    empty_of_a_head[1, 0, 1] = False
    found = parts(queries, keys) | {
        "none": None,
        "empty Mask": Mask(),
        "an example empty": Mask.padding(valid & [[False], [True]]),
        "causal & padding": Mask.causal() & Mask.padding(valid),
        "bool": jnp.asarray(dense),
        "numpy bool": dense,
        "float 0/1": jnp.asarray(dense, jnp.float32),
        "int 0/1": jnp.asarray(dense, jnp.int32),
        "[T, S]": jnp.asarray(dense[0, 0]),
        "[1, T, S]": jnp.asarray(dense[0]),
        "[T, 1], a query without keys": jnp.asarray(np.arange(queries)[:, None] != 1),
        "one row empty": jnp.asarray(one_empty),
        "all empty": jnp.zeros((B, 1, 1, 1), bool),
        "Flax padding": nn.make_attention_mask(jnp.ones((B, queries)), valid.astype(np.float32)),
        "causal & array": Mask.causal() & dense,
    }
    if heads > 1:
        found |= {
            "[B, H, T, S]": jnp.asarray(per_head),
            "[H, T, S]": jnp.asarray(per_head[0]),
            "a head's row empty": jnp.asarray(empty_of_a_head, jnp.int32),
        }
    return found


def mask_names(case, queries, keys):
    return list(masks(queries, keys, case.mask_heads))


def mask_for(case, name, queries, keys):
    """The mask `name`, and its booleans, which test_mask.py holds, over all heads of the case."""
    passed = masks(queries, keys, case.mask_heads)[name]
    dense = passed.to_dense(queries, keys) if isinstance(passed, Mask) else passed
    dense = np.asarray(True if dense is None else dense, bool)
    return passed, np.broadcast_to(dense, (B, case.heads, queries, keys))


def kept_by_words(key, rate, rows, queries, keys):
    """What dropout of shared scores keeps [rows, queries, keys]: a hash of two random words."""
    words = np.asarray(jax.random.bits(key, (rows, queries + keys), "uint32"))
    x = words[:, :queries, None] ^ words[:, None, queries:]
    x ^= x >> 16
    x *= np.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= np.uint32(0x846CA68B)
    x ^= x >> 16
    return x.view(np.int32) < (1 - rate) * 2.0**32 - 2.0**31


@contextlib.contextmanager
def on_mesh(data, tensor):
    """Examples over `data` devices and heads over `tensor`."""
    if len(jax.devices()) < data * tensor:
        pytest.skip(f"needs {data * tensor} devices, see tests/conftest.py")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=auto)
    rules = [("batch", "data"), ("activation_heads", "tensor")]
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield mesh


AHEAD_OF_TIME = """
import sys
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mhe_jax.attention import Mask, engines
from mhe_jax.attention.engines import Options

name, chip, where, dtype, T, Q, K, H, D, E = *sys.argv[1:5], *map(int, sys.argv[5:])
engine = engines.LADDER.get(name) or engines.SHARED[name]
devices = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices
shape = (2, 2) if where == "mesh" else (1, 1)
devices = np.array(devices[: np.prod(shape)]).reshape(shape)
mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
rules = [("batch", "data"), ("activation_heads", "tensor")]

def loss(query, key, value, key_bias, valid, segments):
    mask = Mask.padding(valid) & Mask.segments(segments)
    mask = {"lengths": Mask.local(150, 9) & Mask.lengths(segments[:, 0]), "whole": mask}.get(
        where, mask & Mask.causal()
    )
    call = query, key, value, key_bias, mask, Options()
    assert engine.refusal(*call) is None, engine.refusal(*call)
    return (engine.attend(*call, scale=0.1)[0].astype(jnp.float32) ** 2).sum()

shapes = (4, T, Q, D), (4, T, K, D), (4, T, K, E), (4, T, H), (4, T), (4, T)
dtypes = *[jnp.dtype(dtype)] * 3, jnp.float32, jnp.bool_, jnp.int32
rows = NamedSharding(mesh, P("data"))
args = [jax.ShapeDtypeStruct(s, d, sharding=rows) for s, d in zip(shapes, dtypes)]
with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*args).compile()
print("kernels", compiled.as_text().count('custom_call_target="tpu_custom_call"'))
"""


def kernels_for_tpus(engine, call):
    """How many kernels an engine and its gradient compile to, for a TPU which is not here.

    `call` is the chips, "one", "mesh" or a mask, the type, length, heads of queries, of keys and of
    the output, and widths of keys and values.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5e-8",  # libtpu takes it as on one host
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", AHEAD_OF_TIME, engine, *call.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "kernels " in done.stdout, done.stdout + done.stderr[-3000:]
    return int(done.stdout.split()[-1])
