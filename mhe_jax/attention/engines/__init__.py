"""Softmax attention, and the ladder of engines that compute it.

An engine is a file and an entry in `LADDER`, or in `OF_FORMS` for a form that has its own:

    refusal(query, key, value, key_bias, mask, options) -> why it cannot do the call, or None
    attend(query, key, value, key_bias, mask, options, *, scale) -> output, weight sum
    passed_by(...as refusal) -> why 'auto' leaves a call that it can do to another, if it ever does

| what the call asks for | `xla` | `blocked` | `cudnn` | `splash` |
|---|---|---|---|---|
| device | any | any | NVIDIA GPU, compute capability 8.0 or more | TPU |
| type | any float | any float | float16, bfloat16 | bfloat16, float32 |
| memory | B·H·T·S | linear in T | linear in T, but for masks | linear in T |
| lengths | any | any | even, where a mask is a bias | any |
| head width | any | any | at most 256, 128 before Hopper | at most 1,024 |
| values of another width | yes | yes | padded, as are widths to a multiple of 8 | yes |
| fewer key heads | yes | yes | yes, where no mesh splits the heads | yes |
| a key bias | added to the scores | likewise | columns of the keys | columns of the keys |
| a mesh that splits the heads | yes | yes | into parts of whole heads | yes |
| one that splits rows along their length | yes | yes | refused | yes |
| causal | yes | skips bands nobody sees | skips what nobody sees where T = S | likewise |
| windows | yes | skips bands nobody sees | causal, T = S, no lengths: so; else a bias | likewise |
| lengths of keys | yes | yes | skips what nobody sees | as segment ids |
| padding, segments | yes | yes | as a [B, H, T, S] bias in memory | as segment ids |
| offsets, dense mask | yes | yes | as a [B, H, T, S] bias in memory | refused |
| dropout, `precision` | yes | yes | refused | refused |
| sown weights | yes | refused | refused | refused |

Where a mesh splits rows along their length, a device attends for its queries, to keys gathered from
all (`length`). `blocked`, and `xla` in the form 'shared', compute their forward pass once more for
the gradient there, and take no `jax.jvp`. `splash` takes only windows in which each query has a
key. The three columns of a key bias count towards the head width. No band is skipped where offsets
are arrays of the call.

`auto` takes the first of `AUTO` that can do the call: of `cudnn`, `splash`, `blocked`, `xla`. It
passes over `splash` for fewer than 128 queries, and over `blocked` where storing the scores costs
less than computing them again: below 2^16 scores per head on a CPU and 2^18 on a TPU, else below
2^30 per device.

In the form 'shared', one score matrix for all heads, no engine takes what `shared_refusal` names:

| what the call asks for | `xla` | `pallas` | `mosaic` |
|---|---|---|---|
| device | any | TPU | NVIDIA GPU, compute capability 9.0 |
| type | bfloat16, float32, float64 | bfloat16, float32 | bfloat16 |
| head width | any | at most 1,024 | values a multiple of 16, at most 256 |
| memory | one score matrix of some queries | no score matrix | backward two of some queries |
| lengths, causal, windows, with offsets too | skips bands nobody sees | likewise | likewise |
| padding, segments | yes | yes | skips bands nobody sees |
| dropout | one mask of all three, whatever the blocks and devices | likewise | likewise |
| dense mask, `precision` | yes | refused | refused |

There `auto` takes the first of `pallas` and `xla`, but never `mosaic`, which no device has run. For
one query `mosaic` is `xla`. The form 'factored' has only `xla`, which takes every call.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mhe_jax.attention.engines import blocked, cudnn, splash, xla
from mhe_jax.attention.engines.blocks import KEPT
from mhe_jax.attention.engines.shared import mosaic, tpu
from mhe_jax.attention.engines.shared import xla as shared_xla
from mhe_jax.attention.mask import Mask
from mhe_jax.config import InputError

# Engines by name: of most calls, and of those in a form that has its own.
LADDER = {"cudnn": cudnn, "splash": splash, "xla": xla, "blocked": blocked}
SHARED = {"pallas": tpu, "mosaic": mosaic, "xla": shared_xla}
OF_FORMS = {"shared": SHARED, "factored": {"xla": xla}}
# The engines that 'auto' tries, in this order.
AUTO = ("cudnn", "splash", "pallas", "blocked", "xla")
_is_named = jax.checkpoint_policies.save_only_these_names(KEPT)

# Each choice is logged once.
log_once = functools.cache(logging.getLogger("mhe_jax.attention").info)
# The choices of each kind in the order they were made.
Made = dict[str, list[str]]
_made: ContextVar[Made | None] = ContextVar("made", default=None)


@dataclass(frozen=True)
class Options:
    """The demands of a call on an engine, beside its arrays.

    `broadcast_dropout`: True draws one dropout mask per example for all its heads, 'batch' one for
    the whole batch (Flax's default), False one for each head.
    """

    dropout_rate: float = 0.0
    dropout_rng: jax.Array | None = None
    broadcast_dropout: bool | str = True
    precision: Any = None
    float32_softmax: bool = False
    sow: Callable[[jax.Array], None] | None = None


def attend(
    query: jax.Array,
    key: Any,
    value: Any,
    key_bias: jax.Array | None,
    mask: Mask,
    options: Options,
    engine: str = "auto",
    *,
    form: str = "",
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, str]:
    """`O[t, h] = Σ_j softmax_j(scale · q[t, h]·k[j, g] + b[j, h]) v[j, g]`, g = ⌊hK/H⌋.

    In the form 'shared', scores of the heads of a group differ by a bias on the keys alone, so that
    one score matrix serves them all (see `engines.shared`, which also says what is guaranteed):

        O[t, h] = Σ_j softmax_j(scale · q[t, g]·k[j, g] + b[j, h]) v[j, h],    g = ⌊hG/H⌋

    Args:
      query: [B, T, H, D]; in the form 'shared' [B, T, G, D].
      key: [B, S, K, D], K divides H; query head h reads key head ⌊hK/H⌋. In the form 'factored',
        a [B, S, H, R] and b [B, S, R, D] of the keys `Σ_i a[j, h, i] b[j, i]`, which are not made.
      value: [B, S, K, E]; in the form 'shared' for each head or for each group, K = H or K = G; in
        the form 'factored' a [B, S, H, P] and b [B, S, P, E].
      key_bias: b [B, S, H], None for 0; in the form 'shared' float32 or the type of the others.
      mask: the allowed keys, over which softmax goes; in the form 'shared' the same for all heads.
      options: dropout, precision and the like.
      engine: 'auto', or one by its name in `LADDER` or in `OF_FORMS`.
      form: 'shared' or 'factored'; of any other, heads have scores of their own.
      scale: a finite number above 0; None for 1/√D.

    Returns:
      The output [B, T, H, E], 0 where a query has no key; the sum of the weights that dropout
      leaves, [B, T, H, 1] or something that broadcasts to it (without dropout 1, or 0 without a
      key); the name of the engine.

    Raises:
      ValueError: the engine refuses the call (for `auto`: all of `AUTO` do), with each reason.
    """
    if form == "shared" and (reason := shared_refusal(query.dtype, mask, options)):
        raise InputError(f"heads cannot share scores in this attention call: {reason}")
    call = query, key, value, key_bias, mask, options
    return _placed(OF_FORMS.get(form, LADDER), engine, scale, *call)


def _placed(ladder, engine: str, scale: float | None, *call) -> tuple[jax.Array, jax.Array, str]:
    """`_first`; where the axes of a mesh are explicit, its output is sharded as the queries."""
    scale = call[0].shape[-1] ** -0.5 if scale is None else scale
    placed = jax.typeof(call[0]).sharding
    if AxisType.Explicit not in placed.mesh.axis_types:
        return _first(ladder, engine, scale, *call)
    *arrays, mask, options = call
    # Engines leave the sharding of what they compute to XLA.
    ran = []

    def run(arrays, mask, rng):
        weights = []
        sow = options.sow and weights.append
        given = dataclasses.replace(options, dropout_rng=rng, sow=sow)
        output, weight_sum, name = _first(ladder, engine, scale, *arrays, mask, given)
        ran.append(name)
        # Selected by the output, as which what comes from the mask alone is not yet sharded.
        return output, jnp.where(output[..., :1] > 0, weight_sum, weight_sum), weights

    as_queries = NamedSharding(placed.mesh, PartitionSpec(*placed.spec[:3]))
    by_heads = NamedSharding(placed.mesh, PartitionSpec(*(placed.spec[i] for i in (0, 2, 1))))
    sown = [by_heads] if options.sow else []
    on_auto_axes: Any = jax.sharding.auto_axes(run, out_sharding=(as_queries, as_queries, sown))
    output, weight_sum, weights = on_auto_axes(arrays, mask, options.dropout_rng)
    for each in weights:
        options.sow(each)
    return output, weight_sum, ran[0]


def _first(ladder, engine: str, scale: float, *call) -> tuple[jax.Array, jax.Array, str]:
    names = [name for name in AUTO if name in ladder] if engine == "auto" else [engine]
    refusals = []
    for name in names:
        if name not in ladder:
            others = f"{', '.join(ladder)}, which calls of this form have"
            raise InputError(f"engine {name!r} is not one of auto, {others}")
        reason = ladder[name].refusal(*call)
        if reason is None and engine == "auto" and hasattr(ladder[name], "passed_by"):
            reason = ladder[name].passed_by(*call)
        if reason is None:
            return *ladder[name].attend(*call, scale=scale), name
        refusals.append(f"{name}: {reason}")
    raise InputError("no engine takes this attention call; " + "; ".join(refusals))


def shared_refusal(dtype, mask: Mask, options: Options) -> str | None:
    """Why no engine can do a call with one score matrix for all heads, or None."""
    if dtype == jnp.float16:
        return "float16 lacks the range for factored exponentials"
    if mask.allowed is not None and mask.allowed.shape[1] != 1:
        return "the mask differs from head to head"
    if options.sow is not None:
        return "there are no weights of each head to sow"
    if options.dropout_rate > 0 and options.broadcast_dropout is False:
        return "dropout differs from head to head (broadcast_dropout=False)"
    return None


def is_saved(primitive, *args, **params) -> bool:
    """The `jax.checkpoint` policy of scanned layers: saves what is `KEPT`, and what cuDNN gives."""
    return primitive.name in cudnn.SAVED or _is_named(primitive, *args, **params)


@contextlib.contextmanager
def recording() -> Iterator[Made]:
    """Collects the choices made inside it, the innermost one; nothing outlives it.

    Choices are made when a call is traced: a program that was compiled before makes none.

    Examples:
      >>> with recording() as made:
      ...     record_choice("mhe_add", "shared on xla")
      ...     record_choice("mhe_add", "folded on xla")
      ...     choices()
      {'mhe_add': 'shared on xla, folded on xla'}
      >>> made, choices()
      ({'mhe_add': ['shared on xla', 'folded on xla']}, {})
    """
    made: Made = {}
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


def record_choice(what: str, choice: str) -> None:
    """Keep a static choice for the open `recording`, and log it once per process."""
    made = _made.get()
    if made is not None and choice not in made.setdefault(what, []):
        made[what].append(choice)
    log_once("%s runs as %s", what, choice)


def choices() -> dict[str, str]:
    """Forms and engines of each kind in the innermost `recording`; empty without one."""
    return {what: ", ".join(known) for what, known in (_made.get() or {}).items()}
