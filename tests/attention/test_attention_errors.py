"""What is refused, and that the message says why and what is allowed."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BATTERY, MHE, B, Case, H, S, T, every_case, every_kind, normal

from mhe_jax.attention import KINDS, Mask, engines, make_attention

X = normal(1, B, T, 33)
Y = normal(2, B, S, 33)


def start(module, *inputs, **more):
    """Trace a call: everything here is known before a number is computed."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, **more))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_fn", nn.dot_product_attention),
        ("qkv_dot_general", jax.lax.dot_general),
        ("out_dot_general", jax.lax.dot_general),
        ("qkv_dot_general_cls", object),
        ("out_dot_general_cls", object),
        ("qk_attn_weights_einsum_cls", object),
        ("attn_weights_value_einsum_cls", object),
    ],
)
def test_fields_of_flax_that_are_refused(kind, field, value):
    with pytest.raises(ValueError, match=f"{KINDS[kind].__name__}: {field} is refused: .{{10}}"):
        make_attention(kind, num_heads=H, **{field: value})


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="'mhx' is not one of mha, sha, .*mhe_mul"):
        make_attention("mhx", num_heads=H)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["head", "heads", "n_heads", "nheads", "num_head"])
def test_a_field_by_another_name_is_found(kind, name):
    with pytest.raises(ValueError, match=f"'{name}'.*did you mean .*num_heads"):
        make_attention(kind, **{name: H})


@pytest.mark.parametrize(
    ("name", "near"), [("mhe", "mhe_add, mhe_mul"), ("MHE", "mhe_add, mhe_mul"), ("mul", "mhe_mul")]
)
def test_kinds_that_begin_alike_are_named_first(name, near):
    with pytest.raises(ValueError, match=f"'{name}'.*did you mean {near}"):
        make_attention(name, num_heads=H)


def test_an_unknown_field_says_whose_it_is():
    with pytest.raises(ValueError, match="mha has no field 'num_kv_heads'; it belongs to gqa, gta"):
        make_attention("mha", num_heads=H, num_kv_heads=1)
    with pytest.raises(ValueError, match="sha has no field 'form'; it belongs to mhe_add, mhe_mul"):
        make_attention("sha", num_heads=H, form="folded")
    with pytest.raises(ValueError, match="mhe_mul has no field 'heads'; no module has it"):
        make_attention("mhe_mul", heads=H)


@every_kind
@pytest.mark.parametrize("value", ["all", "heads", 2, None])
def test_broadcast_dropout_has_three_values(case, value):
    with pytest.raises(ValueError, match="is not one of True, False, 'batch'"):
        case.module(broadcast_dropout=value)


@pytest.mark.parametrize("kind", MHE)
def test_forms(kind):
    with pytest.raises(ValueError, match="'flash' is not one of auto, .*folded, materialized"):
        start(Case(kind, "flash").module(), X)
    with pytest.raises(ValueError, match="'folded' cannot .*: normalize_qk.*'materialized'"):
        start(Case(kind, "folded").module(normalize_qk=True), X)


@every_kind
def test_engines(case):
    if case.form in engines.OF_FORMS:  # has engines of its own; 'auto' takes another form for these
        case = dataclasses.replace(case, form=None)
    x = normal(1, B, T, case.width)
    with pytest.raises(ValueError, match="'flash' is not one of auto, cudnn, splash, xla, blocked"):
        start(case.module(engine="flash"), x)
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="cudnn: needs an NVIDIA GPU, this is cpu"):
            start(case.module(engine="cudnn"), x)
        with pytest.raises(ValueError, match="splash: needs a TPU, this is cpu"):
            start(case.module(engine="splash"), x)


@every_kind
def test_heads_divide_the_width(case):
    kv = {"num_kv_heads": 1} if case.kv_heads else {}
    x = normal(1, B, T, 16)
    with pytest.raises(
        ValueError,
        match="qkv_features=16, the width of the inputs, must be a multiple of num_heads=3",
    ):
        start(KINDS[case.kind](num_heads=3, **kv), x)
    with pytest.raises(ValueError, match="qkv_features=20 must be a multiple of num_heads=3"):
        start(KINDS[case.kind](num_heads=3, qkv_features=20, **kv), x)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_widths_ranks_and_groups_are_whole_numbers(kind):
    """Before a call, so that costs are refused too; None stands for a default alone."""
    kv = {"num_kv_heads": 1} if "num_kv_heads" in KINDS[kind].__dataclass_fields__ else {}
    kinds_of_number = "heads", "features", "groups", "rank"
    fields = [f for f in dataclasses.fields(KINDS[kind]) if f.name.endswith(kinds_of_number)]
    assert {"num_heads", "qkv_features", "out_features"} <= {f.name for f in fields}
    for field in fields:
        never = [] if field.default is None else [None]
        for value in (0, -4, 4.0, "4", True, *never):
            says = f"{field.name}={value!r} must be a whole number of 1 or more"
            with pytest.raises(ValueError, match=says):
                make_attention(kind, **{"num_heads": 4, **kv, field.name: value})
        make_attention(kind, **{"num_heads": np.int64(4), **kv, field.name: np.int64(4)})


def test_inputs_are_arrays_of_two_axes_or_more():
    module = Case("mha").module()
    with pytest.raises(
        ValueError, match=r"inputs_q has shape \(33,\): it must be an array \[\.\.\."
    ):
        start(module, X[0, 0])
    with pytest.raises(ValueError, match="inputs_k is a list: it must be an array"):
        start(module, X, [[1.0] * 33])


def test_an_array_that_fits_no_call_is_told_by_its_axes():
    said = r"array \[batch, heads, queries, keys\] has shape \(1, 1, 2, 5\), .* to \(2, 3, 5, 5\)"
    with pytest.raises(ValueError, match=said):
        start(Case("mha").module(), X, mask=jnp.ones((B, T)))


def test_groups_that_are_not_set():
    with pytest.raises(ValueError, match="num_kv_heads is not set: it must divide num_heads=3"):
        start(make_attention("gqa", num_heads=3), X)


@pytest.mark.parametrize("mask", ["causal", Mask.causal, {}, [[1], [1, 0]], [[None]], [["1"]]])
def test_what_is_no_mask(mask):
    call = functools.partial(make_attention("mha", num_heads=3).init, jax.random.key(0), X)
    for make in (lambda: call(mask=mask), lambda: Mask.array(mask), lambda: Mask.padding(mask)):
        with pytest.raises(ValueError, match=f"mask of type {type(mask).__name__} ") as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kv_heads", [-1, 0, 2, 6])
def test_groups(kv_heads):
    says = f"num_kv_heads={kv_heads} must "
    says += "divide num_heads=3" if kv_heads > 0 else "be a whole number of 1 or more"
    with pytest.raises(ValueError, match=says):
        start(make_attention("gqa", num_heads=3, num_kv_heads=kv_heads), X)


def test_el_needs_hidden_states_as_wide_as_its_heads():
    with pytest.raises(ValueError, match="width 21 must be qkv_features=33"):
        start(Case("el").module(), X, normal(2, B, S, 21))


@pytest.mark.parametrize("case", [c for c in BATTERY if c.one_source], ids=str)
def test_a_cache_of_one_array_takes_one_input(case):
    module, x = case.module(decode=True), normal(1, B, T, case.width)
    message = f"{case.kind} keeps one array .* in its cache: leave inputs_v"
    with pytest.raises(ValueError, match=message):
        start(module, x, x, x)
    with pytest.raises(ValueError, match=message):
        start(module, x, method="fill_cache", inputs_v=x)


def test_one_matrix_needs_one_width():
    with pytest.raises(ValueError, match="inputs_v is 7 wide and must be as wide as inputs_k, 33"):
        start(Case("skv").module(), X, Y, Y[..., :7])
    with pytest.raises(ValueError, match="width 7 must be qkv_features=33"):
        start(Case("el").module(), X, Y, Y[..., :7])


def test_what_flax_has_deprecated():
    """Flax takes both with a warning; see also benchmarks/flax_tests.py."""
    with pytest.raises(ValueError, match="inputs_kv is refused, deprecated in Flax: pass inputs_k"):
        start(Case("mha").module(), X, inputs_kv=Y)
    with pytest.raises(ValueError, match=r"inputs_v has shape .*; a mask is passed as mask=\.\.\."):
        start(Case("mha").module(), X, Y, jnp.ones((B, 1, T, S)))


@every_kind
def test_values_without_keys(case):
    x = normal(1, B, T, case.width)
    with pytest.raises(ValueError, match="inputs_v is given without inputs_k"):
        start(case.module(), x, None, x)


BAD_MASKS = {
    "queries": jnp.ones((B, 1, T + 1, S), bool),
    "keys": jnp.ones((B, 1, T, T), bool),
    "batch": jnp.ones((B + 1, 1, T, S), bool),
    "heads": jnp.ones((B, 2, T, S), bool),
    "rank": jnp.ones((1, B, 1, T, S), bool),
    "padding": Mask.padding(jnp.ones((B, S - 1), bool)),
    "padding of another batch": Mask.padding(jnp.ones((B + 1, S), bool)),
    "padding of rank 3": Mask.padding(jnp.ones((1, B, S), bool)),
    "offset of another batch": Mask.causal(jnp.zeros(B + 1, int)),
    "segments of queries for keys": Mask.segments(jnp.ones((B, T), int)),
    "segments of another batch": Mask.segments(jnp.ones((3, T), int), jnp.ones((3, S), int)),
    "segments of rank 1": Mask.segments(jnp.ones(T, int), jnp.ones(S, int)),
}


@every_case
@pytest.mark.parametrize("name", BAD_MASKS)
def test_masks_of_the_wrong_shape(case, name):
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    with pytest.raises(ValueError, match=r"mask.*(broadcast to|differs from head)"):
        start(case.module(), q, k, mask=BAD_MASKS[name])


def test_parts_of_a_mask_are_named_with_their_own_shape():
    for mask, message in (
        (Mask.causal(jnp.zeros((B, 1), int)), rf"offset has shape \({B}, 1\).* to \({B},\)"),
        (Mask.padding(jnp.ones((B, T + 1), bool)), rf"key_valid has shape \({B}, {T + 1}\)"),
        (Mask.padding(jnp.ones((B, T - 1), bool)), rf"key_valid has shape \({B}, {T - 1}\)"),
        (Mask.segments(jnp.ones(T, int)), rf"segments of queries has shape \({T},\)"),
    ):
        with pytest.raises(ValueError, match=f"mask: {message}"):
            start(Case("mha").module(), X, mask=mask)


@pytest.mark.parametrize("offset", [2, jnp.array(2), jnp.array([2])], ids=["int", "0-d", "1-d"])
def test_an_offset_may_be_one_number(offset):
    wanted = jnp.arange(S)[None, :] <= jnp.arange(T)[:, None] + 2
    assert (Mask.causal(offset).to_dense(T, S) == wanted[None, None]).all()
    start(Case("mha").module(), X, Y, mask=Mask.causal(offset))


def test_a_mask_and_an_array():
    tril = jnp.tril(jnp.ones((T, T)))
    for mask in (Mask() & tril, Mask.causal() & tril, Mask(allowed=tril) & Mask()):
        assert (mask.to_dense(T, T) == tril[None, None]).all()
    start(Case("mha").module(), X, mask=Mask(allowed=tril))


@every_kind
@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan")])
def test_dropout_rate(case, rate):
    with pytest.raises(ValueError, match=rf"dropout_rate={rate} is not in \[0, 1\)"):
        case.module(dropout_rate=rate)


@pytest.mark.parametrize("no", [np.bool_(False), 0])
def test_any_false_is_a_dropout_mask_for_each_head(no):
    """The form `shared` refuses it."""
    module = Case("mhe_add", "shared").module(dropout_rate=0.1, broadcast_dropout=no)
    with pytest.raises(ValueError, match="dropout differs from head to head"):
        start(module, X, deterministic=False)


def test_leading_axes_of_a_mask_are_named():
    x = normal(1, 2, 3, T, 33)
    with pytest.raises(ValueError, match="mask"):
        start(Case("mha").module(), x, mask=jnp.ones((4, 1, T, T), bool))


@pytest.mark.parametrize("batch", [(3, 2), (6,), (1,)], ids=str)
def test_leading_axes_of_queries_and_keys_agree(batch):
    q = normal(1, 2, 3, T, 33)
    with pytest.raises(ValueError, match="batch"):
        start(Case("mha").module(), q, normal(2, *batch, S, 33))


def test_a_single_head_has_no_mask_per_head():
    with pytest.raises(ValueError, match="mask: the array .batch, heads, queries, keys. has"):
        start(Case("sha").module(), X, Y, mask=jnp.ones((B, H, T, S), bool))
    start(Case("sha").module(), X, Y, mask=jnp.ones((B, 1, T, S), bool))
