"""What is special of `mlra` and `ghla`, beside the battery: their papers' indices and sizes."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import B, Case, S, T, assert_close, f64, normal, random_parameters

from mhe_jax.attention import Rotary, cost, make_attention


def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_mlra_2_by_the_indices_of_the_paper():
    """Four latents: the first half of the heads reads 0 and 2, the second 1 and 3."""
    H, D, M, width = 6, 7, 42, 5
    fields = {"latent_features": 4 * width, "latent_branches": 2, "query_rank": 3}
    module = make_attention("mlra", num_heads=H, use_bias=False, **fields)
    x = normal(1, 1, T, M)
    params = random_parameters(module, x)
    p, X = f64(params), np.float64(x[0])

    def normed(c, scale):
        return c / np.sqrt((c**2).mean(-1, keepdims=True) + 1e-6) * scale

    rank = normed(X @ p["query_latent"]["kernel"], p["query_latent_norm"]["scale"])
    queries = np.einsum("tr,rhd->thd", rank * np.sqrt(M / 3), p["query"]["kernel"])
    c = (X @ p["latent"]["kernel"]).reshape(T, 4, width)
    c = normed(c, p["latent_norm"]["scale"]) * np.sqrt(M / width)
    wanted = 0
    for h in range(H):
        head = 0
        for branch, latent in enumerate((0, 2) if h < H // 2 else (1, 3)):
            W_uk, W_uv = (p[name]["kernel"][:, branch * H + h] for name in ("key", "value"))
            scores = queries[:, h] @ (c[:, latent] @ W_uk).T / np.sqrt(D)
            head = head + softmax(scores) @ c[:, latent] @ W_uv
        wanted = wanted + head / np.sqrt(2) @ p["out"]["kernel"][h]
    for form in ("absorbed", "materialized"):
        assert_close(module.clone(form=form).apply({"params": params}, x)[0], wanted)


def test_mlra_4_of_the_paper():
    """M = 768, 13 heads of 64, 32 rotary features, ranks 256 and 512; all of it without biases."""
    fields = {"latent_features": 256, "rotary_features": 32, "query_rank": 512}
    more = {"num_heads": 13, "qkv_features": 13 * 64, "use_bias": False, "rotary": Rotary()}
    module = make_attention("mlra", **fields, **more)
    assert cost.cached_numbers(module, 768) == 288
    of_queries = 768 * 512 + 512 + 512 * 13 * 96
    of_latents = 768 * (256 + 32) + 4 * 64 + 4 * 64 * 13 * 2 * 64
    assert cost.parameters(module, 768) == of_queries + of_latents + 13 * 64 * 768


def test_ghla_of_the_paper():
    """M = 1280: 20 heads, 5 score maps, one key of 64 and one latent of 128; W_o has no bias."""
    module = make_attention("ghla", num_heads=20)
    assert cost.cached_numbers(module, 1280) == 192
    # A latent is as wide as a head where an odd number of heads reads a map.
    assert cost.cached_numbers(make_attention("ghla", num_heads=20, num_groups=4), 1280) == 128
    made = 5 * 64 + 64 + 128 + 1280
    assert cost.parameters(module, 1280) == (1280 + 1) * made + 640 * 256 + 1280**2 + 1280
    plain = {"num_heads": 20, "num_groups": 5, "use_bias": False}
    one, two = (cost.forward_flops(make_attention("ghla", **plain), 1280, n) for n in (9, 10))
    assert two - one == 2 * 5 * (64 + 128)


def test_a_mask_of_ghla_is_one_of_its_maps():
    case = Case("ghla", heads=6, head_features=14, more=(("num_groups", 2),))
    q, k = normal(1, B, T, case.width), normal(2, B, S, case.width)
    params = random_parameters(case.module(), q, k)
    mask = normal(3, B, 2, T, S) > -0.5
    output = case.module().apply({"params": params}, q, k, mask=jnp.asarray(mask))
    assert_close(output, case.reference(params, q, k, k, np.repeat(mask, 3, 1))[0])
    with pytest.raises(ValueError, match="does not broadcast"):
        case.module().apply({"params": params}, q, k, mask=np.repeat(mask, 3, 1))
