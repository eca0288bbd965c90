"""Peers of attention: MHA of the same H and D, as other libraries compute it.

Each of `PEERS` gives the cases of its forward run and of that with gradients, or raises where it is
not there or refuses. `args` are those of experiments/speed/attention.py.
"""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments import pytorch, timing

RUNS = ("forward", "with gradients")


def jax_cases(about: dict, function: Callable, inputs: tuple, flops: float) -> list[timing.Case]:
    """The runs of a function of arrays; its gradients by `jax.vjp` with the cotangent given."""

    def with_gradients(cotangent, *inputs):
        output, pull = jax.vjp(function, *inputs)
        return output, pull(cotangent)

    shape = jax.eval_shape(function, *inputs)
    cotangent = draw(jax.random.key(1), shape)
    cases = []
    for run, timed, given, times in zip(
        RUNS, (function, with_gradients), (inputs, (cotangent, *inputs)), (1, 3), strict=True
    ):
        compiled = jax.jit(timed).lower(*given).compile()
        call = functools.partial(compiled, *given)
        memory = timing.memory_of(compiled)
        cases.append(timing.Case({**about, "run": run}, call, times * flops, memory))
    return cases


def draw(key, shape) -> jax.Array:
    return jax.random.normal(key, shape.shape, shape.dtype)


def core_flops(shapes: dict[str, tuple[int, ...]], causal: bool) -> float:
    """2·B·T·S·(G·D + H·E), and 2·B·T·S·H more for the denominators of heads that share scores.

    G is the number of score matrices: that of the query heads, which is H where none is shared.
    """
    (B, T, G, D), S, E = shapes["query"], shapes["key"][1], shapes["value"][-1]
    H = shapes["key_bias"][-1] if "key_bias" in shapes else G
    sums = H * (E + 1) if "key_bias" in shapes else H * E
    seen = (S + 1) / 2 if causal else S
    return 2.0 * B * T * seen * (G * D + sums)


def peer_shape(args, length: int) -> tuple[int, int, int, int]:
    return args.tokens // length, length, args.heads, args.head_features


def peer_flops(args, length: int) -> float:
    shape = peer_shape(args, length)
    return core_flops({"query": shape, "key": shape, "value": shape}, args.causal)


def peer_cases(about, args, length, function, heads_first=False) -> list[timing.Case]:
    B, T, H, D = peer_shape(args, length)
    shape = (B, H, T, D) if heads_first else (B, T, H, D)
    shape = jax.ShapeDtypeStruct(shape, args.dtype)
    qkv = tuple(draw(key, shape) for key in jax.random.split(jax.random.key(0), 3))
    return jax_cases(about, function, qkv, peer_flops(args, length))


def needs(backend: str) -> None:
    if jax.default_backend() != backend:
        raise ValueError(f"needs a {backend.upper()}")


def plain_xla(about, args, length):
    def attend(q, k, v):
        logits = jnp.einsum("bhtd,bhsd->bhts", q * args.head_features**-0.5, k)
        if args.causal:
            logits = jnp.where(jnp.tri(length, dtype=bool), logits, -jnp.inf)
        weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(q.dtype)
        return jnp.einsum("bhts,bhsd->bhtd", weights, v)

    return peer_cases(about, args, length, attend, heads_first=True)


def jax_nn(implementation, about, args, length):
    if implementation == "cudnn":
        needs("gpu")
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=args.causal, implementation=implementation
    )
    return peer_cases(about, args, length, lambda q, k, v: attend(q, k, v))


def torch_sdpa(backend, about, args, length):
    if backend is not None:
        needs("gpu")
    torch, device = pytorch.with_device()
    from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
        SDPBackend,
        sdpa_kernel,
    )

    B, T, H, D = peer_shape(args, length)
    how = {"dtype": getattr(torch, args.dtype), "device": device}
    make = functools.partial(torch.randn, B, H, T, D, **how)
    qkv, cotangent = [make(requires_grad=True) for _ in range(3)], make()

    def sdpa(*qkv):
        chosen = sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext()
        with chosen:
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=args.causal)

    def forward():
        with torch.no_grad():
            return pytorch.Result(torch, sdpa(*qkv))

    def with_gradients():
        output = sdpa(*qkv)
        gradients = torch.autograd.grad(output, qkv, cotangent)
        return pytorch.Result(torch, (output, gradients))

    flops = peer_flops(args, length)
    with pytorch.ALONE:
        return [
            timing.Case({**about, "run": run}, call, times * flops, pytorch.memory(torch, call))
            for run, call, times in zip(RUNS, (forward, with_gradients), (1, 3), strict=True)
        ]


PEERS: dict[str, Callable] = {
    "plain XLA MHA": plain_xla,
    "jax.nn xla": functools.partial(jax_nn, "xla"),
    "jax.nn cudnn": functools.partial(jax_nn, "cudnn"),
    "PyTorch SDPA": functools.partial(torch_sdpa, None),
    "PyTorch cuDNN": functools.partial(torch_sdpa, "CUDNN_ATTENTION"),
}
