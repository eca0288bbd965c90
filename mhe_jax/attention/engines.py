"""One function for all softmax attention, and the ladder of engines that compute it.

| what the call asks for | `xla` | `cudnn` |
|---|---|---|
| device | any | NVIDIA GPU |
| type | any float | float16, bfloat16 |
| lengths | any | even |
| head width | any, values may differ | a multiple of 8, at most 128, values the same |
| fewer key heads than query heads | yes | yes |
| causal | yes | yes, skips what nobody sees where T = S |
| offset, padding, segments, dense mask | yes | yes, as a [B, H, T, S] bias in memory |
| dropout, sown weights, `precision` | yes | refused |

`auto` takes the first of `cudnn`, `xla` that does not refuse.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from mhe_jax.attention import cudnn, xla
from mhe_jax.attention.mask import Mask

LADDER = {"cudnn": cudnn, "xla": xla}

_log = logging.getLogger("mhe_jax.attention")
_choices: dict[str, str] = {}


@dataclass(frozen=True)
class Options:
    """What a call asks of an engine beside its arrays.

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
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    options: Options,
    engine: str = "auto",
) -> tuple[jax.Array, jax.Array, str]:
    """`O[t, h] = Σ_j softmax_j(q[t, h]·k[j, ⌊hK/H⌋] / √D) v[j, ⌊hK/H⌋]`, over the allowed keys j.

    Args:
      query: [B, T, H, D].
      key: [B, S, K, D], K divides H; query head h reads key head ⌊hK/H⌋.
      value: [B, S, K, E].
      mask: the allowed keys.
      options: dropout, precision and the like.
      engine: 'auto', 'xla' or 'cudnn'.

    Returns:
      The output [B, T, H, E], 0 where a query has no key; the sum of the weights that were kept
      [B, T, H, 1] or something that broadcasts to it (1, or 0 without a key, where there is no
      dropout); the name of the engine.

    Raises:
      ValueError: the engine refuses the call (for `auto`: every engine does), with each reason.
    """
    names = list(LADDER) if engine == "auto" else [engine]
    refusals = []
    for name in names:
        if name not in LADDER:
            raise ValueError(f"engine {name!r} is not one of auto, {', '.join(LADDER)}")
        reason = LADDER[name].refusal(query, key, value, mask, options)
        if reason is None:
            output, kept = LADDER[name].attend(query, key, value, mask, options)
            return output, kept, name
        refusals.append(f"{name}: {reason}")
    raise ValueError("no engine takes this attention call; " + "; ".join(refusals))


def record_choice(what: str, choice: str) -> None:
    """Log a static choice the first time it is made, and keep it for `choices`."""
    if _choices.get(what) != choice:
        _choices[what] = choice
        _log.info("%s runs as %s", what, choice)


def choices() -> dict[str, str]:
    """What each attention kind traced so far runs as, e.g. `{'mhe_mul': 'folded on xla'}`."""
    return dict(_choices)
