"""Matrices as sums of Kronecker products, instead of dense ones.

    W = Σ_k A_k ⊗ B_k        W[a·m₂ + c, b·n₂ + e] = Σ_k A[k, a, b] B[k, c, e]

W is [m, n] with m ≤ m₁m₂ and n ≤ n₁n₂ (the excess is cut off), A [r, m₁, n₁], B [r, m₂, n₂]:
r(m₁n₁ + m₂n₂) parameters, 2r√(mn) where they are balanced, instead of mn. The rank of A_k ⊗ B_k is
that of A_k times that of B_k, so that even one term can have a high rank.

Rearranged as R(W)[(a, b), (c, e)] = W[a·m₂ + c, b·n₂ + e], [m₁n₁, m₂n₂], W is R(W) = AᵀB of rank r.

Source: Panahi, Saeedi and Arodz 2021, "Shapeshifter".
"""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from mhe_jax.attention.projection import Projection, flat, named

# For terms of a higher rank, sizes may have up to `NEAR` times the fewest parameters. Padding is
# taken if it saves the factor `SAVED`, or if terms without it have less of the full rank.
NEAR, SAVED, SHARE = 1.05, 1.25, 0.25
# How much longer a multiply-add takes in the small products of `product`, on two CPU cores, and a
# number that is looked up in the factors, with its gradient.
SMALL, LOOKED_UP = 2, 8
NAMES = ("kronecker_rank", None, None)


class Factors(NamedTuple):
    """Sizes of A [r, m1, n1] and B [r, m2, n2]."""

    m1: int
    n1: int
    m2: int
    n2: int

    @property
    def numbers(self) -> int:
        """Parameters of one term."""
        return self.m1 * self.n1 + self.m2 * self.n2

    @property
    def term_rank(self) -> int:
        """The highest rank of one term, as a matrix."""
        return min(self.m1, self.n1) * min(self.m2, self.n2)

    @property
    def full_rank(self) -> int:
        """The rank at which every W has exact factors."""
        return min(self.m1 * self.n1, self.m2 * self.n2)


def balanced(m: int, n: int) -> Factors:
    """Factors of [m, n] with terms of the highest rank for (nearly) the fewest parameters.

    Sizes are divisors of m and n, or padded where divisors are much worse, as for primes.

    >>> balanced(512, 512).numbers, balanced(512, 2048).numbers, balanced(32768, 512).numbers
    (1024, 2048, 8192)
    >>> balanced(8009, 512)
    Factors(m1=46, n1=46, m2=175, n2=12)
    """
    exact = [
        Factors(m1, n1, m // m1, n // n1)
        for m1 in range(1, m + 1)
        if m % m1 == 0
        for n1 in range(1, n + 1)
        if n % n1 == 0
    ]
    padded = []
    for n1 in range(1, n + 1):
        n2 = -(-n // n1)
        middle = math.sqrt(m * n2 / n1)  # where m1·n1 = m2·n2
        for m1 in {max(1, math.floor(middle)), math.ceil(middle)}:
            padded.append(Factors(m1, n1, -(-m // m1), n2))

    def best(found: list[Factors]) -> Factors:
        fewest = min(f.numbers for f in found)
        near = [f for f in found if f.numbers <= NEAR * fewest]
        return min(near, key=lambda f: (-f.term_rank, f.numbers, f))

    one, other = best(exact), best(padded)
    poor = one.numbers > SAVED * other.numbers or one.term_rank < SHARE * min(m, n)
    return other if poor else one


def materialize(a: jax.Array, b: jax.Array, m: int, n: int, precision: Any = None) -> jax.Array:
    """W [m, n] of A [r, m1, n1] and B [r, m2, n2].

    >>> a, b = jnp.arange(6.0).reshape(1, 2, 3), jnp.arange(4.0).reshape(1, 2, 2)
    >>> bool((materialize(a, b, 4, 6) == jnp.kron(a[0], b[0])).all())
    True
    """
    (_, m1, n1), (_, m2, n2) = a.shape, b.shape
    whole = jnp.einsum("kab,kce->acbe", a, b, precision=precision).reshape(m1 * m2, n1 * n2)
    return whole[:m, :n]


def product(x: jax.Array, a: jax.Array, b: jax.Array, n: int, **how: Any) -> jax.Array:
    """x [..., m] times W, [..., n], without making W, by the factors in the cheaper order."""
    (_, m1, n1), (_, m2, n2) = a.shape, b.shape
    lead = x.shape[:-1]
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, m1 * m2 - x.shape[-1])]).reshape(*lead, m1, m2)
    if m1 * n2 * (m2 + n1) <= m2 * n1 * (m1 + n2):
        y = jnp.einsum("...ac,kce->...ake", x, b, **how).astype(x.dtype)
        y = jnp.einsum("...ake,kab->...be", y, a, **how)
    else:
        y = jnp.einsum("...ac,kab->...kbc", x, a, **how).astype(x.dtype)
        y = jnp.einsum("...kbc,kce->...be", y, b, **how)
    return y.reshape(*lead, n1 * n2)[..., :n]


def is_factored(apply: str, tokens: int, rank: int, factors: Factors, m: int, n: int) -> bool:
    """Whether `tokens` vectors are multiplied without W: 'auto' compares multiply-adds."""
    if apply != "auto":
        return apply == "factored"
    f = factors
    each = min(f.m1 * f.n2 * (f.m2 + f.n1), f.m2 * f.n1 * (f.m1 + f.n2))
    return SMALL * tokens * rank * each < (rank + tokens) * m * n


class KroneckerDense(Projection):
    """A `Projection` whose kernel is a sum of Kronecker products: `y = x W (+ b)`.

    Beside the fields of one:
      rank: the number of terms r, at most the full rank of the factors (more would add nothing).
      apply_as: 'factored' never makes W, 'materialized' makes it in each call, 'auto' takes
        whichever needs fewer operations for the tokens of the call.

    Parameters: `a [r, m1, n1]`, `b [r, m2, n2]` of `balanced` sizes, `bias`. A and B are drawn from
    normal(0, σ), where r·σ⁴ is the variance of what `kernel_init` draws. Where that variance is 0,
    only B is 0: with A = B = 0 both gradients would stay 0.
    """

    rank: int = 1
    apply_as: str = "auto"

    def __call__(self, x, features, names, in_axes=1):
        lead, inputs = x.shape[: x.ndim - in_axes], x.shape[-in_axes:]
        a, b, bias = self._parameters(inputs, features, names)
        x, a, b, bias = promote_dtype(x, a, b, bias, dtype=self.dtype)
        x, n = x.reshape(*lead, math.prod(inputs)), math.prod(features)
        y = multiply(self.apply_as, x, a, b, n, precision=self.precision)
        y = y.reshape(*lead, *features)
        return y if bias is None else y + bias.reshape((1,) * len(lead) + bias.shape)

    def matrix(self, inputs, features, names):
        a, b, _ = self._parameters(inputs, features, names)
        whole = materialize(a, b, math.prod(inputs), math.prod(features), self.precision)
        return whole.reshape(*inputs, *features)

    @nn.compact
    def _parameters(self, inputs, features, names):
        m, n = math.prod(inputs), math.prod(features)
        f = balanced(m, n)
        rank = min(self.rank, f.full_rank)

        def scaled(instead_of_0):
            def init(key, shape, dtype):
                variance = jnp.var(self.kernel_init(key, (m, n), jnp.float32))
                variance = jnp.where(variance > 0, variance, instead_of_0)
                scale = (variance / rank) ** 0.25
                return scale.astype(dtype) * jax.random.normal(key, shape, dtype)

            return named(init, NAMES)

        a = self.param("a", scaled(1 / m), (rank, f.m1, f.n1), self.param_dtype)
        b = self.param("b", scaled(0), (rank, f.m2, f.n2), self.param_dtype)
        if not self.use_bias:
            return a, b, None
        init = named(flat(self.bias_init, 0), names[len(inputs) :])
        return a, b, self.param("bias", init, features, self.param_dtype)


class KroneckerEmbed(nn.Module):
    """A table [V, M] as a sum of Kronecker products: rows by id, and logits.

        row v = Σ_k A[k, ⌊v / m₂⌋] ⊗ B[k, v mod m₂]        logits = h Wᵀ = Σ_k A_k H B_kᵀ

    `rank` and `apply_as` are as of `KroneckerDense`. 'auto' looks up few rows in the factors, and
    many in W.
    """

    num_embeddings: int  # V
    features: int  # M
    stddev: float  # of the table's numbers at the start
    rank: int = 1
    apply_as: str = "auto"

    def setup(self):
        f = balanced(self.num_embeddings, self.features)
        rank = min(self.rank, f.full_rank)
        init = named(nn.initializers.normal((self.stddev**2 / rank) ** 0.25), NAMES)
        self.a = self.param("a", init, (rank, f.m1, f.n1))
        self.b = self.param("b", init, (rank, f.m2, f.n2))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Ids [...] to rows [..., M] in the type of the parameters; NaN for an id past V."""
        (_, _, n1), (_, m2, n2) = self.a.shape, self.b.shape
        size = self.num_embeddings * self.features
        cost = LOOKED_UP * ids.size * (n1 + n2 + self.features)
        if self.apply_as == "materialized" or (self.apply_as == "auto" and cost > size):
            return jnp.take(self._table(self.a.dtype), ids, axis=0, mode="fill", fill_value=jnp.nan)
        a = jnp.take(self.a, ids // m2, axis=1, mode="fill", fill_value=jnp.nan)
        b = jnp.take(self.b, ids % m2, axis=1, mode="fill", fill_value=jnp.nan)
        rows = jnp.einsum("k...b,k...e->...be", a, b)
        rows = rows.reshape(*ids.shape, -1)[..., : self.features]
        # The padding of the factors is past V.
        return jnp.where((ids < self.num_embeddings)[..., None], rows, jnp.nan)

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits [..., V] of x [..., M], summed in float32."""
        (rank, m1, n1), (_, m2, n2) = self.a.shape, self.b.shape
        V, M, tokens = self.num_embeddings, self.features, math.prod(x.shape[:-1])
        how = {"preferred_element_type": jnp.float32}
        if is_factored(self.apply_as, tokens, rank, Factors(n1, m1, n2, m2), M, V):
            a, b = (p.swapaxes(1, 2).astype(x.dtype) for p in (self.a, self.b))
            return product(x, a, b, V, **how).astype(jnp.float32)
        # The same table that rows are looked up in: it is made once per step.
        return jnp.einsum("...m,vm->...v", x, self._table(x.dtype), **how)

    def _table(self, dtype: Any) -> jax.Array:
        a, b = self.a.astype(dtype), self.b.astype(dtype)
        return materialize(a, b, self.num_embeddings, self.features)


def multiply(apply: str, x: jax.Array, a: jax.Array, b: jax.Array, n: int, **how: Any) -> jax.Array:
    """`product`, or the same by W itself: see `is_factored`."""
    m, tokens = x.shape[-1], math.prod(x.shape[:-1])
    (rank, m1, n1), (_, m2, n2) = a.shape, b.shape
    if is_factored(apply, tokens, rank, Factors(m1, n1, m2, n2), m, n):
        return product(x, a, b, n, **how)
    return jnp.matmul(x, materialize(a, b, m, n, how.get("precision")), **how)


@dataclasses.dataclass(frozen=True)
class KroneckerProjection:
    """Makes a `KroneckerDense` of one rank in place of a `Projection`."""

    rank: int
    apply_as: str = "auto"

    def __call__(self, **fields: Any) -> KroneckerDense:
        return KroneckerDense(rank=self.rank, apply_as=self.apply_as, **fields)
