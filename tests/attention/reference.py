"""Attention of every kind in float64 numpy, written from the equations.

Nothing here calls `mhe_jax` or jax. One example and one head at a time; every MHE kind has heads of
its own. Each step returns its value and a `pull`, which takes the gradient of the value and adds to
the gradients of what the step was made of; `test_kinds` holds these against central differences.
"""

import numpy as np

NORMS = {"query_ln", "key_ln"}
EPSILON = 1e-6  # Flax's LayerNorm


def run(
    head,
    params,
    inputs_q,
    inputs_k,
    inputs_v,
    mask,
    *,
    heads,
    kept=None,
    rotary=None,
    positions=None,
    turned=None,
):
    """Output, weights, and the function from the output's gradient to all gradients.

    Args:
      head: queries, keys and values of a head, see `kind_references`.
      params: the parameter dict of the module.
      mask: booleans [B, H, T, S].
      heads: softmaxes; where they are a multiple of the heads, one branch of these after another.
      kept: what dropout multiplies the weights by [B, H, T, S]: 0 or 1/(1-rate).
      rotary: base, pairs and scaling of `rotated`, for tokens at `positions` [B, T].
      turned: how many features of queries and keys that turns, the last ones; None: all.
    """
    grads = _zeros(params), *(np.zeros_like(x) for x in (inputs_q, inputs_k, inputs_v))
    d_params, *d_inputs = grads
    w_o, d_w_o = params["out"]["kernel"], d_params["out"]["kernel"]
    outputs, weights, pulls = [], [], []
    for b in range(inputs_q.shape[0]):
        y, of_heads = 0.0, []
        for h in range(heads):
            x = [
                (x[b], d[b]) for x, d in zip((inputs_q, inputs_k, inputs_v), d_inputs, strict=True)
            ]
            (q, pull_q), (k, pull_k), (v, pull_v) = head(params, d_params, x, h, heads)
            bias, pull_bias = 0.0, None
            if "key_bias" in params:
                one = slice(h, h + 1)
                bias, pull_bias = projected(params["key_bias"], d_params["key_bias"], *x[1], one)
                bias = bias[:, 0]
            # Where a key has features that turn and others, the others have the norms.
            turning = normed = slice(None)
            if "rotary_key" in params:
                still = q.shape[-1] - params["rotary_key"]["kernel"].shape[-1]
                normed, turning = slice(still), slice(still, None)
            elif turned:
                turning = slice(-turned, None)
            of = {name: (params[name], d_params[name]) for name in params.keys() & NORMS}
            if "query_ln" in params:
                q, pull_q = partly(layer_norm, normed, q, pull_q, *of["query_ln"])
            if "key_ln" in params:
                k, pull_k = partly(layer_norm, normed, k, pull_k, *of["key_ln"])
            if rotary is not None:
                q, pull_q = partly(rotated, turning, q, pull_q, positions[b], *rotary)
                k, pull_k = partly(rotated, turning, k, pull_k, positions[b], *rotary)
            scale = 1 / np.sqrt(q.shape[-1])
            p = _softmax(q @ k.T * scale + bias, mask[b, h % mask.shape[1]])
            times = 1.0 if kept is None else kept[b, h]
            o = (p * times) @ v
            pull_gate = None
            if "gate" in params:
                o, pull_gate = gated(o, *projected(params["gate"], d_params["gate"], *x[0], h))
            to = h % len(w_o)
            y = y + o @ w_o[to]
            of_heads.append(p)

            def pull(dy, to=to, q=q, k=k, v=v, p=p, o=o, times=times, scale=scale,
                     pulls=(pull_q, pull_k, pull_v), pull_bias=pull_bias,
                     pull_gate=pull_gate):  # fmt: skip
                d_w_o[to] += o.T @ dy
                do = dy @ w_o[to].T
                if pull_gate is not None:
                    do = pull_gate(do)
                dp = (do @ v.T) * times
                dlogits = p * (dp - (p * dp).sum(-1, keepdims=True))
                if pull_bias is not None:
                    pull_bias(dlogits.sum(0)[:, None])
                dlogits = dlogits * scale
                pulls[0](dlogits @ k)
                pulls[1](dlogits.T @ q)
                pulls[2]((p * times).T @ do)

            pulls.append((b, pull))
        outputs.append(y + params["out"].get("bias", 0.0))
        weights.append(np.stack(of_heads))

    def pull_all(dy):
        for b, pull in pulls:
            pull(dy[b])
        if "bias" in params["out"]:
            d_params["out"]["bias"] += dy.sum((0, 1))
        return grads

    return np.stack(outputs), np.stack(weights), pull_all


def projected(p, grad, x, dx, head=None):
    """x W (+ b), with the kernel of one head where there are several."""

    def pull_x(d):
        dx[...] += d

    return mapped(p, grad, x, pull_x, head)


def mapped(p, grad, x, pull_x, head=None):
    """`projected`, of an x that is made of something else."""
    at = (slice(None),) if head is None else (slice(None), head)
    w = p["kernel"][at]
    y = x @ w
    if "bias" in p:
        y = y + p["bias"][at[1:]]

    def pull(dy):
        grad["kernel"][at] += x.T @ dy
        pull_x(dy @ w.T)
        if "bias" in p:
            grad["bias"][at[1:]] += dy.sum(0)

    return y, pull


def partly(step, cut, x, pull_x, *args):
    """`step` of the features `cut` of x; the others stay."""
    of_cut = []
    part, pull_part = step(x[:, cut], of_cut.append, *args)
    y = x.copy()
    y[:, cut] = part

    def pull(dy):
        pull_part(dy[:, cut])
        dx = dy.copy()
        dx[:, cut] = of_cut.pop()
        pull_x(dx)

    return y, pull


def part(x, pull_x, cut):
    """The features `cut` of x."""

    def pull(dy):
        dx = np.zeros_like(x)
        dx[:, cut] = dy
        pull_x(dx)

    return x[:, cut], pull


def times(x, pull_x, number):
    """x times a number."""
    return x * number, lambda dy: pull_x(dy * number)


def gated(x, gate, pull_gate):
    """x over 1 + e^-gate; the pull gives the gradient of x."""
    open_ = 1 / (1 + np.exp(-gate))

    def pull(dy):
        pull_gate(dy * x * open_ * (1 - open_))
        return dy * open_

    return x * open_, pull


def joined(x, pull_x, y, pull_y):
    """[x, y]."""

    def pull(dz):
        pull_x(dz[:, : x.shape[-1]])
        pull_y(dz[:, x.shape[-1] :])

    return np.concatenate([x, y], -1), pull


def mixed(a, pull_a, terms):
    """1/R Σ_i a_i b_i, a [T, R] numbers of R terms b_i [T, D]."""
    R = len(terms)

    def pull(dy):
        pull_a(np.stack([(dy * b).sum(-1) for b, _ in terms], -1) / R)
        for i, (_, pull_b) in enumerate(terms):
            pull_b(a[:, i : i + 1] * dy / R)

    return sum(a[:, i : i + 1] * b for i, (b, _) in enumerate(terms)) / R, pull


def rms_norm(x, pull_x, scale, d_scale):
    """x over the root of its mean square, times the scale."""
    size = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    z = x / size

    def pull(dy):
        d_scale[...] += (dy * z).sum(0)
        dz = dy * scale
        pull_x((dz - z * (dz * z).mean(-1, keepdims=True)) / size)

    return z * scale, pull


def sliced(x, dx, h, heads):
    """The slice of head h."""
    width = x.shape[-1] // heads
    cut = slice(h * width, (h + 1) * width)

    def pull(dy):
        dx[:, cut] += dy

    return x[:, cut], pull


def add(x, pull_x, e, de):
    """x + e."""

    def pull(dy):
        de[...] += dy.sum(0)
        pull_x(dy)

    return x + e, pull


def multiply(x, pull_x, e, de):
    """x ⊙ (1 + e)."""

    def pull(dy):
        de[...] += (dy * x).sum(0)
        pull_x(dy * (1 + e))

    return x * (1 + e), pull


def rotated(x, pull_x, positions, base, pairs, scaling):
    """Two features as one complex number, times e^{i p ω}, ω = base^(-2i/D) of pair i."""
    D = x.shape[-1]
    i = np.arange(D // 2)
    a, b = (i, i + D // 2) if pairs == "half" else (2 * i, 2 * i + 1)
    turn = np.exp(1j * np.asarray(positions)[:, None] / scaling * base ** (-2 * i / D))

    def times(x, turn):
        z = (x[:, a] + 1j * x[:, b]) * turn
        y = np.empty_like(x)
        y[:, a], y[:, b] = z.real, z.imag
        return y

    def pull(dy):
        pull_x(times(dy, turn.conj()))

    return times(x, turn), pull


def layer_norm(x, pull_x, p, grad):
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    z = centred / deviation

    def pull(dy):
        grad["scale"] += (dy * z).sum(0)
        dz = dy * p["scale"]
        dz = dz - dz.mean(-1, keepdims=True) - z * (dz * z).mean(-1, keepdims=True)
        pull_x(dz / deviation)

    return z * p["scale"], pull


def _softmax(logits, allowed):
    """Softmax over the allowed keys; 0 in a row without any."""
    p = np.zeros_like(logits)
    for t, row in enumerate(allowed):
        if row.any():
            e = np.exp(logits[t, row] - logits[t, row].max())
            p[t, row] = e / e.sum()
    return p


def _zeros(tree):
    if isinstance(tree, dict):
        return {name: _zeros(branch) for name, branch in tree.items()}
    return np.zeros_like(tree)
