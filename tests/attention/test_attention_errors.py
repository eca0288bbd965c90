"""What is refused, and that the line names the field or the array and what is allowed."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BATTERY, B, Case, H, S, T, every_kind, normal

from mhe_jax.attention import KINDS, Mask, engines, make_attention
from mhe_jax.config import FIELDS_OF_KINDS

X = normal(1, B, T, 33)
Y = normal(2, B, S, 33)


def start(module, *inputs, **more):
    """Trace a call: everything here is known before a number is computed."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, **more))


REFUSED = {
    "attention_fn": nn.dot_product_attention,
    "qkv_dot_general": jax.lax.dot_general,
    "out_dot_general": jax.lax.dot_general,
    "qkv_dot_general_cls": object,
    "out_dot_general_cls": object,
    "qk_attn_weights_einsum_cls": object,
    "attn_weights_value_einsum_cls": object,
}


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_no_kind_takes(kind):
    kv = {"num_kv_heads": 1} if kind in FIELDS_OF_KINDS["num_kv_heads"] else {}
    make = functools.partial(make_attention, kind)
    for field, value in REFUSED.items():
        says = f"{KINDS[kind].__name__}: {field} is refused: .{{10}}"
        with pytest.raises(ValueError, match=says):
            make(num_heads=H, **{field: value})
    for value in ("all", 2, None):
        with pytest.raises(ValueError, match="broadcast_dropout.*True, False, 'batch'"):
            make(num_heads=H, broadcast_dropout=value)
    for value in (-0.1, 1, float("nan")):
        with pytest.raises(ValueError, match=rf"dropout_rate={value} is not in \[0, 1\)"):
            make(num_heads=H, dropout_rate=value)
    with pytest.raises(ValueError, match="'n_heads'.*num_heads"):
        make(n_heads=H)
    # Widths, before a call, so that costs are refused too; None stands for a default alone.
    numbers = "heads", "features", "groups", "branches", "rank"
    fields = [f for f in dataclasses.fields(KINDS[kind]) if f.name.endswith(numbers)]
    assert {"num_heads", "qkv_features", "out_features"} <= {f.name for f in fields}
    for field in fields:
        for value in (0, -4, 4.0, "4", True, *([] if field.default is None else [None])):
            says = f"{field.name}={value!r} must be a whole number of 1 or more"
            with pytest.raises(ValueError, match=says):
                make(**{"num_heads": 4, **kv, field.name: value})
        make(**{"num_heads": np.int64(4), **kv, field.name: np.int64(4)})


@every_kind
def test_calls_that_no_kind_takes(case):
    x = normal(1, B, T, case.width)
    with pytest.raises(ValueError, match="inputs_v is given without inputs_k"):
        start(case.module(), x, None, x)
    kv = {"num_kv_heads": 1} if case.kv_heads else {}
    whose = "qkv_features=16, the width of the inputs, must be a multiple of num_heads=3"
    with pytest.raises(ValueError, match=whose):
        start(KINDS[case.kind](num_heads=3, **kv), normal(1, B, T, 16))
    with pytest.raises(ValueError, match="qkv_features=20 must be a multiple of num_heads=3"):
        start(KINDS[case.kind](num_heads=3, qkv_features=20, **kv), normal(1, B, T, 16))
    if case.form in engines.OF_FORMS:  # has engines of its own; 'auto' takes another form for these
        case = dataclasses.replace(case, form=None)
    with pytest.raises(ValueError, match="'flash' is not one of auto, cudnn, splash, xla, blocked"):
        start(case.module(engine="flash"), x)
    if jax.default_backend() == "cpu":
        for engine, device in (("cudnn", "an NVIDIA GPU"), ("splash", "a TPU")):
            with pytest.raises(ValueError, match=f"{engine}: needs {device}, this is cpu"):
                start(case.module(engine=engine), x)


ONES = functools.partial(jnp.ones, dtype=bool)
CALLS = [
    (lambda: make_attention("mhx", num_heads=H), "'mhx' is not one of mha, sha, .*mhe_mul"),
    (lambda: make_attention("mha", num_heads=H, num_kv_heads=1), "'num_kv_heads'; .*gqa, gta"),
    (lambda: make_attention("sha", num_heads=H, form="folded"), "'form'; it belongs to mhe_add"),
    (lambda: start(make_attention("gqa", num_heads=3), X), "num_kv_heads is not set"),
    (lambda: start(Case("gqa", kv_heads=2).module(), X), "num_kv_heads=2 must divide num_heads"),
    (lambda: start(Case("mha").module(), X[0, 0]), r"inputs_q.* have shapes \(33,\)"),
    (lambda: start(Case("mha").module(), X, [[1.0] * 33]), r"inputs_k.* have shapes .*\(1, 33\)"),
    (lambda: start(Case("el").module(), X, Y[..., :21]), "qkv_features=33 must be 21"),
    (lambda: start(Case("skv").module(), X, Y, Y[..., :7]), "inputs_v, 7 wide, must be 33"),
    (lambda: start(Case("mha").module(), X, Y, ONES((B, 1, T, S))), r"inputs_v .* mask=\.\.\."),
    (lambda: start(Case("mha").module(), normal(1, 2, 3, T, 33), normal(2, 3, 2, S, 33)), "axes"),
    (lambda: start(Case("mha").module(), normal(1, 2, 3, T, 33), mask=ONES((4, 1, T, T))), "mask"),
    (lambda: start(Case("sha").module(), X, Y, mask=ONES((B, H, T, S))), r"array .batch, heads, q"),
    (
        lambda: start(Case("mha").module(), X, mask=ONES((B, T))),
        r"array \[batch, heads, queries, keys\] has shape \(1, 1, 2, 5\), .* to \(2, 3, 5, 5\)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("case", [c for c in BATTERY if c.one_source], ids=str)
def test_a_cache_of_one_array_takes_one_input(case):
    module, x = case.module(decode=True), normal(1, B, T, case.width)
    message = f"{case.kind} has one array .* left out with decode=True"
    with pytest.raises(ValueError, match=message):
        start(module, x, x, x)
    with pytest.raises(ValueError, match=message):
        start(module, x, method="fill_cache", inputs_v=x)


@pytest.mark.parametrize("mask", ["causal", Mask.causal, {}, [[1], [1, 0]], [["1"]]])
def test_what_is_no_mask(mask):
    call = functools.partial(make_attention("mha", num_heads=3).init, jax.random.key(0), X)
    for make in (lambda: call(mask=mask), lambda: Mask.array(mask), lambda: Mask.padding(mask)):
        with pytest.raises(ValueError, match=f"mask: {type(mask).__name__} ") as caught:
            make()
        assert "\n" not in str(caught.value)


BAD_MASKS = {
    "array": ONES((B, 1, T + 1, S)),
    "heads": ONES((B, 2, T, S)),
    "must broadcast": ONES((1, B, 1, T, S)),
    "key_valid": Mask.padding(ONES((B, S - 1))),
    "offset": Mask.causal(jnp.zeros(B + 1, int)),
    "offset of the window": Mask.local(1, 2, jnp.zeros((B, 1), int)),
    "key_lengths": Mask.lengths(jnp.zeros(B + 1, int)),
    "segments of keys": Mask.segments(jnp.ones((B, T), int)),
    "segments of queries": Mask.segments(jnp.ones((3, T), int), jnp.ones((3, S), int)),
}


@pytest.mark.parametrize("case", [Case("mha"), Case("mva", "shared")], ids=str)
def test_masks_of_the_wrong_shape(case):
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    for part, mask in BAD_MASKS.items():
        with pytest.raises(ValueError, match=rf"mask.*({part.strip()}|differs from head)"):
            start(case.module(), q, k, mask=mask)
