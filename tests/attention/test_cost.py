"""The cost table against the published counts and against real modules."""

import functools
import typing

import jax
import jax.numpy as jnp
import pytest

from experiments.paper import published as paper
from mhe_jax.attention import KINDS, Rotary, cost, make_attention
from mhe_jax.config import FIELDS_OF_KINDS, Kind
from mhe_jax.shapeshifter import KroneckerProjection


def module(kind, heads, num_kv_heads=None, **fields):
    given = {"num_kv_heads": num_kv_heads} if kind in FIELDS_OF_KINDS["num_kv_heads"] else {}
    return make_attention(kind, num_heads=heads, **({"use_bias": False} | given | fields))


@pytest.mark.parametrize("kind", KINDS)
def test_counts_do_not_depend_on_how_it_is_computed(kind):
    """Nor on Kronecker products and norms of keys; biases and the output's width count."""
    assert set(KINDS) == set(typing.get_args(Kind))
    M, H, K = 42, 3, 3
    plain = module(kind, H, K)
    how = {"engine": "cudnn", "dropout_rate": 0.5, "projection": KroneckerProjection(2, "auto")}
    other = module(kind, H, K, **how, normalize_qk=True)
    for count in (cost.parameters, cost.cached_numbers):
        assert count(other, M) == count(plain, M)
    wide = plain.clone(out_features=M + 1)
    assert cost.parameters(wide, M) == cost.parameters(plain, M) + M  # a column of W_o
    assert cost.forward_flops(wide, M, 7) == cost.forward_flops(plain, M, 7) + 2 * M
    x = jnp.zeros((2, 5, M))
    biased = module(kind, H, K, use_bias=True, decode=True)
    shapes = jax.eval_shape(biased.init, jax.random.key(0), x)
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    assert cost.parameters(plain, M) < count == cost.parameters(biased, M)
    cached = sum(leaf.size for name, leaf in shapes["cache"].items() if name != "cache_index")
    assert cached == 2 * 5 * cost.cached_numbers(biased, M)


def test_encoder_counts_round_to_the_printed_figures_but_for_the_last_digit_of_mha():
    computed = {
        kind: cost.parameters(module(kind, paper.ENCODER_HEADS), paper.ENCODER_FEATURES)
        for kind in paper.ENCODER_MILLIONS
    }
    computed = {k: f"{n * paper.ENCODER_LAYERS / 1e6:.2f}" for k, n in computed.items()}
    assert computed.pop("mha") == "28.31"
    printed = dict(paper.ENCODER_MILLIONS)
    assert printed.pop("mha") == "28.32"
    assert computed == printed


@pytest.mark.parametrize("row", paper.TRANSLATION, ids=lambda row: row.name)
@pytest.mark.parametrize("kind", ["mha", "mhe_mul"])
def test_translation_counts_equal_the_printed_ones(kind, row):
    one = cost.parameters(module(kind, row.heads), row.features)
    assert one * paper.TRANSLATION_SUBLAYERS * row.layers == getattr(row, kind)


def test_flops_of_mhe_add_that_cannot_share_its_scores():
    """H score matrices where positions are rotary or keys have norms, one elsewhere."""
    M, H, T = 64, 4, 16
    flops = functools.partial(cost.forward_flops, features=M, keys=T)
    by_heads = flops(module("mhe_mul", H))
    assert flops(module("mhe_add", H)) == by_heads - 2 * T * (M - M // H - H)
    assert flops(module("mhe_add", H, rotary=Rotary())) == by_heads
    assert flops(module("mhe_add", H, normalize_qk=True)) == by_heads


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("sha", {}),
        ("mqa", {}),
        ("mhe_mul", {}),
        ("mha", {"score_features": 32}),
        ("gqa", {"num_kv_heads": 2, "score_features": 32}),
        ("collaborative", {"score_features": 24}),
        ("mfa", {"query_rank": 24}),
        ("mfa", {"reuse_keys": True}),
        ("gta", {"num_kv_heads": 2}),
        ("mla", {}),
        ("mla", {"form": "absorbed"}),
        ("mla", {"form": "absorbed", "latent_groups": 2}),
        ("mlra", {"latent_features": 32, "latent_branches": 2, "query_rank": 8}),
        ("mlra", {"form": "absorbed"}),
        ("ghla", {"num_groups": 2, "num_kv_heads": 1}),
        ("tpa", {}),
        ("tpa", {"form": "factored"}),
    ],
)
def test_flops_count_the_matrix_products_of_the_compiled_module(kind, fields):
    """Against XLA's own count of a module, whose softmax and scaling are the only difference."""
    M, H, T = 64, 4, 16
    of_kind, x = module(kind, H, **fields), jax.ShapeDtypeStruct((1, T, M), jnp.float32)
    variables = jax.eval_shape(of_kind.init, jax.random.key(0), x)
    counted = jax.jit(of_kind.apply).lower(variables, x).compile().cost_analysis()["flops"]
    expected = T * cost.forward_flops(of_kind, M, keys=T)
    assert expected <= counted <= 1.1 * expected


def test_operations_of_shared_scores_for_each_key():
    """One score for all heads of a group, their sums over values, and their denominators."""
    M, H, D = 30, 6, 5
    for kind, fields, scored in (
        ("mhe_add", {}, D),
        ("mhe_add", {"num_groups": 2}, 2 * D),
        ("mhe_add", {"score_groups": 3}, 3 * D),
        ("mva", {"score_features": 7}, 7),
        ("mva", {"num_groups": 2, "score_features": 7}, 2 * 7),
    ):
        of_kind = module(kind, H, **fields)
        one, two = (cost.forward_flops(of_kind, M, keys) for keys in (10, 11))
        assert two - one == 2 * (scored + H * D + H), (kind, fields)


@pytest.mark.parametrize(
    ("M", "H", "rank", "groups", "millions", "cached"),
    [
        (768, 12, 384, 1, "1.94", 288),
        (768, 12, 384, 2, "1.74", 288),
        (4096, 32, 1536, 1, "39.1", 576),
        (4096, 32, 1536, 2, "37.0", 576),
    ],
)
def test_counts_of_latents(M, H, rank, groups, millions, cached):
    """DeepSeek-V2 and GLA, with r = 4D and R = D/2; the scales of both norms are numbers too."""
    D = M // H
    r, R = 4 * D, D // 2
    of_query = M * rank + rank * H * (D + R)
    wanted = of_query + M * (r + R) + 2 * (r // groups) * H * D + H * D * M
    fields = {"query_rank": rank, "latent_groups": groups, "rotary": Rotary()}
    of_kind = module("mla", H, **fields)
    assert cost.parameters(of_kind, M) == wanted + r + rank
    assert f"{wanted / 1e6:#.3g}" == millions
    assert cost.cached_numbers(of_kind, M) == cached
    # Without a latent of queries, without turns, and with biases of W_dkv and W_o.
    plain = M * H * D + M * r + 2 * (r // groups) * H * D + H * D * M + r
    assert cost.parameters(module("mla", H, latent_groups=groups), M) == plain
    biased = module("mla", H, latent_groups=groups, use_bias=True)
    assert cost.parameters(biased, M) == plain + r + M


def test_operations_where_heads_have_no_keys():
    """With a cache those of the form of one query; without one those of heads that are made."""
    M, H, D = 48, 4, 12
    for kind, fields, of_heads, of_one in (
        ("mla", {"latent_features": 20}, 2 * H * D, 2 * H * 20),
        ("mla", {"latent_features": 20, "latent_groups": 2}, 2 * H * D, 2 * H * 10),
        ("mla", {"latent_features": 20, "rotary": Rotary()}, H * (2 * D + 6), 2 * H * 26),
        ("tpa", {}, 2 * H * D, H * 4 * (D + 1)),
    ):
        for decode, wanted in ((False, of_heads), (True, of_one)):
            of_kind = module(kind, H, decode=decode, **fields)
            one, two = (cost.forward_flops(of_kind, M, keys) for keys in (10, 11))
            assert two - one == 2 * wanted, (kind, fields, decode)


def test_operations_of_a_token_without_keys():
    """Each number of a kernel once, but N of MFA-KR for each head; and what mixes products."""
    M, H, D = 64, 4, 16
    made = 10 * M * (H + D) + H * D * M
    for kind, fields, wanted in (
        ("mfa", {"reuse_keys": True}, 2 * M * D + D * H * D + H * D * D + H * D * M),
        ("tpa", {}, made + 10 * H * D),
        ("tpa", {"decode": True}, made + 6 * H * D),
    ):
        assert cost.forward_flops(module(kind, H, **fields), M, 0) == 2 * wanted, (kind, fields)


def table(capsys, *arguments):
    """By row, the cells that `python -m mhe_jax.attention.cost` prints."""
    cost.main(arguments)
    _, _, _, *rows = capsys.readouterr().out.replace(",", "").splitlines()
    return {name: rest for name, *rest in map(str.split, rows)}


def test_the_command_counts_what_is_asked_for(capsys):
    """As published at M = 768, with 12 heads of 64; mfa with the scale of its norm."""
    found = table(capsys)
    assert len(found) == len(KINDS)
    assert found["mha"] == ["2359296", "100%", "1536", "100%", "101", "7.86"]
    assert found["mhe_mul"][:4] == ["739584", "31%", "128", "8%"]
    assert found["mva"][0:3:2] == ["1287168", "844"]
    published = {"collaborative": 1_287_936, "mfa": 786_496, "tpa": 1_173_504}
    assert {name: int(found[name][0]) for name in published} == published
    assert found["gtanum_kv_heads=3"][0] == "1351680"
    assert found["gqanum_kv_heads=3"][2] == "384"
    sizes = "--features", "128", "--num_heads", "8", "--keys", "128"
    narrow = {"score_features": 48, "qkv_features": 64}
    found = table(capsys, "mva,score_features=48,qkv_features=64", *sizes)
    parameters = cost.parameters(make_attention("mva", num_heads=8, use_bias=False, **narrow), 128)
    assert list(found.values())[0][:4] == [str(parameters), "45%", "120", "47%"]
    # 2·128·48 + 2·128·64 numbers, of a token 48 + 64; mva has 128·8 and 8 more.
    for row in ("mha,score_features=48", "mva,score_features=48,use_key_bias=False"):
        found = table(capsys, f"{row},qkv_features=64", *sizes)
        assert list(found.values())[0][:4] == ["28672", "44%", "112", "44%"]
    assert parameters == 28672 + 128 * 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mhx"], "mhx: kind 'mhx' is not one of mha, sha"),
        (["mhe_add,num_groups=5"], "num_groups=5 must divide num_heads=12"),
        (["gqa,num_kv_heads="], "gqa,num_kv_heads=: takes KIND,FIELD"),
        (["mha", "--rotary", "--features", "36"], "an even number of features of a head, not 3"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit):
        cost.main(arguments)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_layers_and_the_cache_of_32k_tokens(capsys):
    """Of 3 layers that cache 2·64 numbers each, 2 bytes a number."""
    cost.main(["--features", "64", "--num_heads", "4", "--layers", "3", "mha"])
    kind, made, _, cached, _, megabytes, _ = capsys.readouterr().out.splitlines()[-1].split()
    assert (kind, made, cached) == ("mha", f"{3 * 4 * 64 * 64:,}", "384")
    assert megabytes == f"{384 * 32_768 * 2 / 1e6:.0f}"
