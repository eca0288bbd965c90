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
        return 1 if self.kind == "sha" or self.form == "shared" else self.heads

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
        given = self._given(params, q, k, v, mask)
        return reference.attention(*given, **self._how, **more)

    def reference_gradients(self, params, q, k, v, mask, cotangent, **more):
        given = self._given(params, q, k, v, mask)
        return reference.gradients(*given, np.float64(cotangent), **self._how, **more)

    def _given(self, params, q, k, v, mask):
        return KINDS[self.kind].head, *f64((params, q, k, v)), np.asarray(mask)

    @property
    def _how(self):
        return {"heads": self.heads, "turned": KINDS[self.kind].turned(self)}


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


@functools.cache
def masks(queries, keys, heads):
    """{name: (what is passed, booleans [B, H, queries, keys])}."""
    rng = np.random.default_rng(3)
    full = (B, heads, queries, keys)
    t, s = np.arange(queries)[:, None], np.arange(keys)[None]
    causal = (s <= t)[None, None]
    valid = np.arange(keys)[None] < np.array([keys - 2, keys])[:, None]
    of_queries = np.sort(rng.integers(0, 3, (B, queries)), 1)
    of_keys = of_queries if queries == keys else np.sort(rng.integers(0, 3, (B, keys)), 1)
    same = (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
    other_q, other_k = rng.integers(0, 2, (B, queries)), rng.integers(0, 2, (B, keys))
    same_other = (other_q[:, :, None] == other_k[:, None, :])[:, None]
    dense = rng.random((B, 1, queries, keys)) < 0.6
    dense[:, :, :, 0] = True
    per_head = rng.random(full) < 0.6
    one_empty = dense.copy()
    one_empty[0, :, 2] = False
    empty_of_a_head = per_head.copy()
    empty_of_a_head[1, 0, 1] = False
    some_queries = np.arange(queries)[:, None] != 1

    def behind(offset):
        return (s[None] <= t[None] + np.array(offset)[:, None, None])[:, None]

    def offset(*places):
        return Mask.causal(jnp.array(places))

    def around(left, right, offset=(0,)):
        p = t + np.array(offset)[:, None, None]
        return ((p - left <= s) & (s <= p + right))[:, None]

    def of_length(lengths):
        return (s < np.array(lengths)[:, None, None])[:, None]

    A, P = Mask.array, Mask.padding(jnp.asarray(valid))
    G = Mask.segments(jnp.asarray(of_queries), jnp.asarray(of_keys))
    pad = valid[:, None, None]
    found = {
        "none": (None, np.ones(full, bool)),
        "empty Mask": (Mask(), np.ones(full, bool)),
        "causal": (Mask.causal(), causal),
        "causal offset": (offset(2, 0), behind([2, 0])),
        "causal offset below 0": (offset(-2, 1), behind([-2, 1])),
        "window": (Mask.local(1, 2), around(1, 2)),
        "window offset": (Mask.local(2, 0, jnp.array([3, -2])), around(2, 0, [3, -2])),
        "window & causal": (Mask.local(2, 1) & Mask.causal(), around(2, 1) & causal),
        "window & causal offset": (
            Mask.local(2, 1) & offset(-1, 1), around(2, 1) & behind([-1, 1])
        ),
        "window & window": (Mask.local(2, 0) & Mask.local(1, 3), around(1, 0)),
        "lengths": (Mask.lengths(jnp.array([keys - 2, keys])), pad),
        "lengths & lengths": (
            Mask.lengths(2) & Mask.lengths(jnp.array([1, keys])), of_length([1, 2])
        ),
        "window & lengths": (
            Mask.local(1, 1) & Mask.lengths(jnp.array([0, 3])), around(1, 1) & of_length([0, 3])
        ),
        "padding": (P, pad),
        "padding 0/1": (Mask.padding(jnp.asarray(valid, jnp.float32)), pad),
        "segments": (G, same),
        "bool": (jnp.asarray(dense), dense),
        "numpy bool": (dense, dense),
        "float 0/1": (jnp.asarray(dense, jnp.float32), dense),
        "int 0/1": (jnp.asarray(dense, jnp.int32), dense),
        "[T, S]": (jnp.asarray(dense[0, 0]), dense[:1]),
        "[1, T, S]": (jnp.asarray(dense[0]), dense[:1]),
        "[T, 1], a query without keys": (jnp.asarray(some_queries), some_queries[None, None]),
        "one row empty": (jnp.asarray(one_empty), one_empty),
        "all empty": (jnp.zeros((B, 1, 1, 1), bool), np.zeros(full, bool)),
        "an example empty": (
            Mask.padding(jnp.asarray(valid & [[False], [True]])), pad & [[[[False]]], [[[True]]]]
        ),
        "Flax padding": (
            nn.make_attention_mask(jnp.ones((B, queries)), jnp.asarray(valid, jnp.float32)), pad
        ),
        "Flax combined": (
            nn.combine_masks(jnp.asarray(dense, jnp.float32), jnp.asarray(pad, jnp.float32)),
            dense & pad,
        ),
        "causal & padding": (Mask.causal() & P, causal & pad),
        "padding & causal offset": (P & offset(2, 0), pad & behind([2, 0])),
        "causal & causal offset": (Mask.causal() & offset(2, -1), causal & behind([2, -1])),
        "offset & causal": (offset(2, -1) & Mask.causal(), causal & behind([2, -1])),
        "offset & offset": (offset(2, 0) & offset(0, 1), behind([0, 0])),
        "segments & segments": (
            G & Mask.segments(jnp.asarray(other_q), jnp.asarray(other_k)), same & same_other
        ),
        "padding & padding": (P & Mask.padding(jnp.asarray(valid[::-1])), pad & pad[::-1]),
        "array & array": (A(jnp.asarray(dense)) & A(jnp.asarray(one_empty)), dense & one_empty),
        "all of them": (
            Mask.causal() & P & G & A(jnp.asarray(dense)), causal & pad & same & dense
        ),
    }  # fmt: skip
    if heads > 1:
        found |= {
            "[B, H, T, S]": (jnp.asarray(per_head), per_head),
            "[H, T, S]": (jnp.asarray(per_head[0]), per_head[:1]),
            "a head's row empty": (jnp.asarray(empty_of_a_head, jnp.int32), empty_of_a_head),
            "heads & causal": (A(jnp.asarray(per_head)) & Mask.causal(), per_head & causal),
        }
    if queries == keys:
        found["segments of one"] = (Mask.segments(jnp.asarray(of_queries)), same)
        found["Flax causal"] = (nn.make_causal_mask(jnp.ones((B, queries))), causal)
    return {k: (m, np.broadcast_to(d, full)) for k, (m, d) in found.items()}


def mask_names(case, queries, keys):
    heads = case.mask_heads
    return list(masks(queries, keys, heads))


def mask_for(case, name, queries, keys):
    """The mask `name`, and its booleans over all of the case's heads."""
    passed, dense = masks(queries, keys, case.mask_heads)[name]
    return passed, np.broadcast_to(dense, (B, case.heads, queries, keys))


def kept_by_words(key, rate, rows, queries, keys):
    """What dropout of shared scores keeps [rows, queries, keys]: a hash of two random words."""
    words = [
        jax.random.bits(row, (queries + keys,), "uint32") for row in jax.random.split(key, rows)
    ]
    words = np.asarray(words, np.uint32)
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


def run_for_tpus(script, *arguments):
    """Runs a script that compiles for TPUs which are not here; libtpu takes it as on one host."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5e-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
