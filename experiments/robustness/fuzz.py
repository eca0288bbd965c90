"""Random attention calls against float64: nothing that is not finite, no more than twice the error.

    python experiments/robustness/fuzz.py                        # 2,000 calls
    python experiments/robustness/fuzz.py --calls 200 --seed 7

A program is a kind in a form, a mask, a type and sizes, 0 and 1 among them; each is called several
times, with queries and keys, values and cotangents from 1e-12 to 1e12 and biases of the keys that
spread over up to 200. The truth is the reference of tests/attention, written from the equations in
float64. Where it is finite (in float32's range), output and gradients must be. The root of their
mean square error may be twice that of the kind's 'materialized' form (an ordinary softmax) in the
same type: the largest for these inputs and for 30 that differ from them in the last bit (600 before
a call fails), since large logits that nearly tie may go either way. To that comes the type's
rounding of the largest number, and float32's of what is summed up (a gradient that is 0 because its
terms cancel is as exact as they are) and of biases so large.

The last line is one JSON object; exit status 1: some call failed, and is named.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).parents[2]))
sys.path.insert(0, str(ROOT / "tests" / "attention"))

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import (  # pyright: ignore[reportMissingImports]  # of the tests
    CASES,
    Case,
    f64,
    random_parameters,
)

from mhe_jax.attention import Mask

SIZES = [
    (2, 5, 7),
    (1, 1, 1),
    (2, 1, 11),
    (1, 37, 41),
    (2, 33, 33),
    (0, 3, 5),
    (2, 0, 3),
    (2, 3, 0),
]
MASKS = ["none", "causal", "causal offset", "lengths", "padding", "segments", "all of them"]
TYPES = [jnp.float32, jnp.bfloat16]
CALLS = 8  # of a program
NEARBY = 30  # inputs of the ordinary softmax
LARGEST = 1e36


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rng = np.random.default_rng(args.seed)
    done, failures, worst = 0, [], 0.0
    while done < args.calls:
        case = CASES[rng.integers(len(CASES))]
        program = Program(
            case,
            MASKS[rng.integers(len(MASKS))],
            TYPES[rng.integers(len(TYPES))],
            SIZES[rng.integers(len(SIZES))],
        )
        for _ in range(min(CALLS, args.calls - done)):
            call = program.draw(rng)
            ratio, reason = program.check(*call)
            if reason:  # logits that tie in one of hundreds of neighbours are not ours alone
                ratio, reason = program.check(*call, nearby=20 * NEARBY)
            worst = max(worst, ratio)
            if reason:
                failures.append(f"{program}, {call[0]}: {reason}")
                print(failures[-1], flush=True)
            done += 1
        print(f"{done} calls, {len(failures)} failed", file=sys.stderr, flush=True)
    found = {"calls": done, "failed": len(failures), "worst": round(worst, 3), "seed": args.seed}
    print(json.dumps(found | {"jax": jax.__version__, "device": jax.devices()[0].device_kind}))
    return int(bool(failures))


class Program:
    """One compiled call, and the ordinary softmax beside it."""

    def __init__(self, case: Case, mask: str, dtype, sizes: tuple[int, int, int]):
        self.case, self.mask, self.dtype, self.sizes = case, mask, dtype, sizes
        ordinary = {"form": "materialized"} if case.form else {}
        self.runs = jax.jit(self.call_of()), jax.jit(self.call_of(**ordinary))

    def __str__(self):
        return f"{self.case}, {self.mask}, {self.dtype.__name__}, {self.sizes}"

    def call_of(self, **fields):
        """Parameters, inputs, cotangent and mask to the output and all gradients."""
        module = self.case.module(dtype=self.dtype, use_bias=False, **fields)

        def run(params, inputs, cotangent, mask):
            def call(params, *inputs):
                return module.apply({"params": params}, *inputs, mask=mask)

            output, pull = jax.vjp(call, params, *inputs)
            return output, pull(cotangent.astype(output.dtype))

        return run

    def draw(self, rng):
        """Its name; parameters, inputs and cotangent that the type holds; mask, and booleans."""
        scales = (10 ** rng.uniform(-12, 12) if rng.random() < 0.7 else 1.0 for _ in range(3))
        return self.drawn(rng, *scales, spread=rng.uniform(0, 200))

    def drawn(self, rng, scale: float, of_values: float, of_cotangent: float, spread: float):
        """As `draw`, of this size."""
        B, T, S = self.sizes
        case, width = self.case, self.case.width
        inputs = [rng.normal(size=(B, n, width)) for n in (T, S, S)]
        inputs = [x * m for x, m in zip(inputs, (scale, scale, of_values), strict=True)]
        cotangent = rng.normal(size=(B, T, width)) * of_cotangent
        module = case.module(use_bias=False)
        params = random_parameters(
            module, *(np.zeros((1, 2, width)) for _ in inputs), seed=int(rng.integers(1 << 30))
        )
        self._spread(params, inputs[1], spread)
        given = jax.tree.map(
            lambda x: jnp.asarray(x, self.dtype).astype(jnp.float32), (params, inputs, cotangent)
        )
        about = f"inputs {scale:.1e}, values {of_values:.1e}, cotangent {of_cotangent:.1e}"
        return f"{about}, spread {spread:.0f}", given, *self._mask(rng), spread

    def _spread(self, params, keys, spread):
        """Scales what makes the bias of the keys, so that it spreads so far."""
        case = self.case
        if keys.size == 0 or case.kind not in ("mhe_add", "mva"):
            return
        x = keys.astype(np.float64)
        if case.kind == "mva":
            bias = np.einsum("bsm,mh->bsh", x, f64(params["key_bias"]["kernel"]))
            if np.ptp(bias, 1).max() > 0:
                params["key_bias"]["kernel"] *= spread / np.ptp(bias, 1).max()
            return
        kernel = f64(params["key"]["kernel"]).reshape(
            case.width, -1, params["out"]["kernel"].shape[1]
        )
        e = f64(params["query_head_embedding"])
        key = np.einsum("bsm,mgd->bsgd", x, kernel).repeat(len(e) // kernel.shape[1], 2)
        bias = np.einsum("bshd,hd->bsh", key, e) / np.sqrt(e.shape[1])
        if np.ptp(bias, 1).max() > 0:
            params["query_head_embedding"] *= spread / np.ptp(bias, 1).max()

    def _mask(self, rng):
        B, T, S = self.sizes
        causal, halves = Mask.causal(), jnp.arange(B) * S // 2
        padding = Mask.padding(jnp.asarray(rng.random((B, S)) < 0.7))
        segments = Mask.segments(*(jnp.asarray(rng.integers(0, 2, (B, n))) for n in (T, S)))
        mask = {
            "none": Mask(),
            "causal": causal,
            "causal offset": Mask.causal(jnp.asarray(rng.integers(-3, max(S - T, 0) + 3, B))),
            "lengths": Mask.lengths(jnp.asarray(rng.integers(0, S + 1, B))),
            "padding": padding,
            "segments": segments,
            # Some queries see no key.
            "window and lengths": causal & Mask(window=(50, 0)) & Mask.lengths(halves),
            "all of them": causal & padding & segments,
        }[self.mask]
        allowed = mask.to_dense(T, S)
        allowed = True if allowed is None else np.asarray(allowed)
        return mask, np.broadcast_to(allowed, (B, self.case.heads, T, S))

    def check(self, about, given, mask, allowed, spread, nearby=NEARBY):
        """The largest error, in terms of what is allowed, and what is wrong."""
        params, inputs, cotangent = given
        run, plain = self.runs
        found = jax.tree_util.tree_leaves_with_path(run(*given, mask))
        if 0 in self.sizes:
            wrong = [jax.tree_util.keystr(p) for p, x in found if np.any(np.asarray(x))]
            return 0.0, f"not 0: {', '.join(wrong)}" if wrong else ""
        with np.errstate(all="ignore"):
            truth, terms = self.truth(given, allowed), self._terms(*given)
        ordinary = [
            jax.tree.leaves(plain(params, [self._shaken(x, i) for x in inputs], cotangent, mask))
            for i in range(nearby)
        ]
        worst, reasons = 0.0, []
        eps = float(jnp.finfo(self.dtype).eps)
        leaves = zip(found, zip(*ordinary, strict=True), jax.tree.leaves(truth), strict=True)
        for (path, x), others, z in leaves:
            x, *others = (np.asarray(a, np.float64) for a in (x, *others))
            largest = np.abs(z).max(initial=0)
            if not largest < LARGEST or not np.isfinite(others[0]).all():
                continue
            name = jax.tree_util.keystr(path)
            if not np.isfinite(x).all():
                reasons.append(f"{name} is not finite")
                continue
            error, *of_others = (np.sqrt(((a - z) ** 2).mean()) for a in (x, *others))
            rounding = max(eps, spread * np.finfo(np.float32).eps / 2) * largest
            allowance = 2 * np.nanmax(of_others) + rounding + terms(name)
            ratio = error / allowance if allowance else 0.0
            worst = max(worst, ratio)
            if ratio > 1:
                reasons.append(f"{name} errs by {error:.2e}, allowed {allowance:.2e}")
        return worst, "; ".join(reasons)

    def truth(self, given, allowed):
        """Output and gradients in float64."""
        params, inputs, cotangent = given
        output = self.case.reference(params, *inputs, allowed)[0]
        return output, self.case.reference_gradients(params, *inputs, allowed, cotangent)

    def _shaken(self, x, seed):
        """Inputs that differ by a rounding; with seed 0 these."""
        if seed == 0:
            return x
        steps = np.random.default_rng(seed).integers(-1, 2, x.shape)
        shaken = x * (1 + steps * float(jnp.finfo(self.dtype).eps))
        return shaken.astype(self.dtype).astype(jnp.float32)

    def _terms(self, params, inputs, cotangent):
        """Rounding in float32 of the terms that gradients of queries and keys are sums of."""
        q, k, v = (np.abs(np.float64(x)).max(initial=0) for x in inputs)
        weights = {n: np.abs(np.float64(x)).max() for n, x in _flat(params).items()}
        of_logits = np.abs(np.float64(cotangent)).max() * weights["out/kernel"] * v
        of_logits *= weights.get("value/kernel", weights.get("key_value/kernel", 1.0))
        w_q, w_k = weights["query/kernel"], weights.get("key/kernel", 1.0)
        e = weights.get("query_head_embedding", 0.0)
        eps = float(np.finfo(np.float32).eps)
        of_queries, of_keys = of_logits * k * w_k, of_logits * (q * w_q + e)
        size = self.case.width

        def terms(name):
            if name.startswith("[1][0]") and "query" in name:
                return eps * size * of_queries * max(q, 1.0)
            if name.startswith("[1][0]") and "key" in name:
                return eps * size * max(of_keys, of_logits) * max(k, 1.0)
            if name.startswith("[1][1]"):
                return eps * size * of_queries * w_q
            if name.startswith("[1][2]"):
                return eps * size * (of_keys * w_k + of_logits * weights.get("key_bias/kernel", 0))
            return 0.0

        return terms


def _flat(params):
    return {
        "/".join(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


if __name__ == "__main__":
    sys.exit(main())
