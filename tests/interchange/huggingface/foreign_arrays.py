"""Models of transformers made by hand, and their equations in float64: nothing of ours in them.

`FORWARDS[model_type](t, c, ids, ...)` computes what the class of transformers does from the tensors
`t` and the config `c` of a file, for one row: logits [T, V], or those of the head that `t` has.
"""

import json
import math

import numpy as np
from safetensors.numpy import save_file
from small_models import byte_level, word_piece

M, H, D, F, L, P = 12, 3, 4, 17, 2, 211
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
ENCODER = {
    **{"hidden_size": M, "num_attention_heads": H, "num_hidden_layers": L, "layer_norm_eps": 0.03},
    **{"intermediate_size": F, "hidden_act": "gelu", "max_position_embeddings": P},
}
GPT = {
    **{"n_embd": M, "n_head": H, "n_layer": L, "n_inner": F, "n_positions": P},
    **{"layer_norm_epsilon": 0.03, "bos_token_id": 0, "eos_token_id": 0},
}
LLAMA = {
    **{"hidden_size": M, "num_attention_heads": H, "num_hidden_layers": L, "rms_norm_eps": 0.03},
    **{"intermediate_size": F, "num_key_value_heads": 1, "hidden_act": "silu", "rope_theta": 70.0},
    **{"max_position_embeddings": P, "bos_token_id": 1, "eos_token_id": 2},
}
MARIAN = {
    **{"d_model": M, "encoder_layers": L, "decoder_layers": 1, "encoder_attention_heads": H},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": F, "decoder_ffn_dim": F},
    **{"activation_function": "swish", "scale_embedding": True, "max_position_embeddings": P},
    **{"pad_token_id": 2, "decoder_start_token_id": 2, "eos_token_id": 0},
}


def make(name, directory, **fields):
    """Writes the model of a class of transformers; its tensors, its config and its tokenizer."""
    directory.mkdir(exist_ok=True)
    kind = next(k for k in KINDS if name.lower().startswith(k.replace("_", "")))
    config, special = KINDS[kind]
    config = {"architectures": [name], "model_type": kind, **config, **fields}
    if kind == "roberta":
        pad = config.setdefault("pad_token_id", 1)
        config["max_position_embeddings"] = P + pad + 1
        special = [s for s in ROBERTA if s != "<pad>"]
        special.insert(pad, "<pad>")
    file = byte_level(directory, special) if special else word_piece(directory)
    config["vocab_size"] = file.get_vocab_size()
    draw = np.random.default_rng(0)
    shapes = SHAPES[kind](config, name)
    t = {key: 0.4 * draw.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(t, directory / "model.safetensors", {"format": "pt"})
    return t, config, file


def linear(name, i, o, bias=True):
    return {f"{name}.weight": (o, i)} | ({f"{name}.bias": (o,)} if bias else {})


def norm(name, bias=True):
    return {f"{name}.weight": (M,)} | ({f"{name}.bias": (M,)} if bias else {})


def gpt_shapes(c, name):
    one = c["model_type"] == "gpt_bigcode"
    found = {"transformer.wte.weight": (c["vocab_size"], M), "transformer.wpe.weight": (P, M)}
    for i in range(L):
        h = f"transformer.h.{i}"
        found |= norm(f"{h}.ln_1") | norm(f"{h}.ln_2")
        wide = M + 2 * D if one else 3 * M
        for part, (a, b) in {
            **{"attn.c_attn": (M, wide), "attn.c_proj": (M, M)},
            **{"mlp.c_fc": (M, F), "mlp.c_proj": (F, M)},
        }.items():
            found |= linear(f"{h}.{part}", a, b)
            if not one:  # Conv1D: [in, out]
                found[f"{h}.{part}.weight"] = (a, b)
    return found | norm("transformer.ln_f")


def llama_shapes(c, name):
    found = {"model.embed_tokens.weight": (c["vocab_size"], M)} | norm("model.norm", False)
    wide = D * c["num_key_value_heads"]
    for i in range(L):
        h = f"model.layers.{i}"
        found |= norm(f"{h}.input_layernorm", False)
        found |= norm(f"{h}.post_attention_layernorm", False)
        for part, size in {"q": M, "k": wide, "v": wide, "o": M}.items():
            found |= linear(f"{h}.self_attn.{part}_proj", M, size, False)
        for part, (a, b) in {"gate": (M, F), "up": (M, F), "down": (F, M)}.items():
            found |= linear(f"{h}.mlp.{part}_proj", a, b, False)
    return found | linear("lm_head", M, c["vocab_size"], False)


def encoder_shapes(c, name):
    b, V = c["model_type"], c["vocab_size"]
    e = f"{b}.embeddings"
    found = {f"{e}.word_embeddings.weight": (V, M)} | norm(f"{e}.LayerNorm")
    found[f"{e}.position_embeddings.weight"] = (c["max_position_embeddings"], M)
    found[f"{e}.token_type_embeddings.weight"] = (c["type_vocab_size"], M)
    for i in range(L):
        h = f"{b}.encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            found |= linear(f"{h}.attention.{part}", M, M)
        found |= norm(f"{h}.attention.output.LayerNorm") | norm(f"{h}.output.LayerNorm")
        found |= linear(f"{h}.intermediate.dense", M, F) | linear(f"{h}.output.dense", F, M)
    if name.endswith("QuestionAnswering"):
        return found | linear("qa_outputs", M, 2)
    if name.endswith("SequenceClassification"):
        if b == "bert":
            return found | linear("bert.pooler.dense", M, M) | linear("classifier", M, 3)
        return found | linear("classifier.dense", M, M) | linear("classifier.out_proj", M, 3)
    dense, last, head = HEADS[b]
    return found | linear(dense, M, M) | norm(last) | {f"{head}.bias": (V,)}


def marian_shapes(c, name):
    found = {"model.shared.weight": (c["vocab_size"], M), "final_logits_bias": (1, c["vocab_size"])}
    for side in ("encoder", "decoder"):
        for i in range(c[f"{side}_layers"]):
            h = f"model.{side}.layers.{i}"
            for a in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    found |= linear(f"{h}.{a}.{part}", M, M)
                found |= norm(f"{h}.{a}_layer_norm")
            found |= linear(f"{h}.fc1", M, F) | linear(f"{h}.fc2", F, M)
            found |= norm(f"{h}.final_layer_norm")
    return found


MLM = "cls.predictions"
HEADS = {
    "bert": (f"{MLM}.transform.dense", f"{MLM}.transform.LayerNorm", MLM),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
}
KINDS = {
    "gpt2": (GPT, ("<|endoftext|>",)),
    "gpt_bigcode": (GPT, ("<|endoftext|>",)),
    "llama": (LLAMA, ("<unk>", "<s>", "</s>")),
    "mistral": (LLAMA, ("<unk>", "<s>", "</s>")),
    "bert": ({**ENCODER, "pad_token_id": 1, "type_vocab_size": 2}, None),
    "roberta": ({**ENCODER, "type_vocab_size": 1}, ROBERTA),
    "marian": (MARIAN, ("</s>", "<unk>", "<pad>")),
}
SHAPES = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), gpt_shapes),
    **dict.fromkeys(("llama", "mistral"), llama_shapes),
    **dict.fromkeys(("bert", "roberta"), encoder_shapes),
    "marian": marian_shapes,
}


class Arrays:
    """Tensors by name, and layers that take them by name."""

    def __init__(self, t, eps, by_row=False):
        self.t = {name: array.astype(np.float64) for name, array in t.items()}
        self.eps, self.by_row = eps, by_row  # matrices are [in, out]

    def __getitem__(self, name):
        return self.t[name]

    def dense(self, x, name):
        matrix = self.t[f"{name}.weight"]
        return x @ (matrix if self.by_row else matrix.T) + self.t.get(f"{name}.bias", 0)

    def norm(self, x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
        return x * self.t[f"{name}.weight"] + self.t[f"{name}.bias"]

    def rms(self, x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps) * self.t[f"{name}.weight"]


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def attend(q, k, v, heads, causal=False):
    """q [T, H D], k and v [S, K D] -> [T, H D]."""
    q, k, v = (x.reshape(len(x), -1, q.shape[-1] // heads).swapaxes(0, 1) for x in (q, k, v))
    k, v = (np.repeat(x, heads // len(x), 0) for x in (k, v))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[1:]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ v
    return out.swapaxes(0, 1).reshape(out.shape[1], -1)


def gpt(t, c, ids):
    one = c["model_type"] == "gpt_bigcode"
    t = Arrays(t, c["layer_norm_epsilon"], by_row=not one)
    x = t["transformer.wte.weight"][ids] + t["transformer.wpe.weight"][: len(ids)]
    for i in range(L):
        h = f"transformer.h.{i}"
        both = t.dense(t.norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn")
        q, k, v = np.split(both, [M, M + D] if one else 3, -1)
        x = x + t.dense(attend(q, k, v, H, True), f"{h}.attn.c_proj")
        up = gelu_tanh(t.dense(t.norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"))
        x = x + t.dense(up, f"{h}.mlp.c_proj")
    return t.norm(x, "transformer.ln_f") @ t["transformer.wte.weight"].T


def turned(x, base):
    """Features i and i + D/2 of each head as a point, turned by p base^(-2i/D)."""
    x = x.reshape(len(x), -1, 2, D // 2)
    angle = (np.arange(len(x))[:, None] * base ** (-2 * np.arange(D // 2) / D))[:, None]
    a, b, cos, sin = x[:, :, 0], x[:, :, 1], np.cos(angle), np.sin(angle)
    return np.stack([a * cos - b * sin, b * cos + a * sin], 2).reshape(len(x), -1)


def llama(t, c, ids):
    t = Arrays(t, c["rms_norm_eps"])
    x = t["model.embed_tokens.weight"][ids]
    for i in range(L):
        h = f"model.layers.{i}"
        y = t.rms(x, f"{h}.input_layernorm")
        q, k, v = (t.dense(y, f"{h}.self_attn.{part}_proj") for part in "qkv")
        q, k = turned(q, c["rope_theta"]), turned(k, c["rope_theta"])
        x = x + t.dense(attend(q, k, v, H, True), f"{h}.self_attn.o_proj")
        y = t.rms(x, f"{h}.post_attention_layernorm")
        gate, up = silu(t.dense(y, f"{h}.mlp.gate_proj")), t.dense(y, f"{h}.mlp.up_proj")
        x = x + t.dense(gate * up, f"{h}.mlp.down_proj")
    return t.dense(t.rms(x, "model.norm"), "lm_head")


def encoder(t, c, ids, types=0):
    kind, t = c["model_type"], Arrays(t, c["layer_norm_eps"])
    e, word = f"{kind}.embeddings", t[f"{kind}.embeddings.word_embeddings.weight"]
    first = c["pad_token_id"] + 1 if kind == "roberta" else 0
    positions = t[f"{e}.position_embeddings.weight"][first : first + len(ids)]
    x = word[ids] + positions + t[f"{e}.token_type_embeddings.weight"][types]
    x = t.norm(x, f"{e}.LayerNorm")
    for i in range(L):
        h = f"{kind}.encoder.layer.{i}"
        q, k, v = (t.dense(x, f"{h}.attention.self.{p}") for p in ("query", "key", "value"))
        y = t.dense(attend(q, k, v, H), f"{h}.attention.output.dense")
        x = t.norm(x + y, f"{h}.attention.output.LayerNorm")
        y = t.dense(gelu(t.dense(x, f"{h}.intermediate.dense")), f"{h}.output.dense")
        x = t.norm(x + y, f"{h}.output.LayerNorm")
    if "qa_outputs.weight" in t.t:
        return t.dense(x, "qa_outputs").T
    if "classifier.weight" in t.t:
        return t.dense(np.tanh(t.dense(x[0], "bert.pooler.dense")), "classifier")
    if "classifier.dense.weight" in t.t:
        return t.dense(np.tanh(t.dense(x[0], "classifier.dense")), "classifier.out_proj")
    dense, last, head = HEADS[kind]
    return t.norm(gelu(t.dense(x, dense)), last) @ word.T + t[f"{head}.bias"]


def marian(t, c, sources, targets):
    t, rates = Arrays(t, 1e-5), 10000.0 ** (-2 * np.arange(M // 2) / M)
    angles = np.arange(P)[:, None] * rates
    places = np.concatenate([np.sin(angles), np.cos(angles)], -1)

    def attention(x, y, name, heads, causal=False):
        q = t.dense(x, f"{name}.q_proj")
        k, v = (t.dense(y, f"{name}.{part}_proj") for part in "kv")
        x = x + t.dense(attend(q, k, v, heads, causal), f"{name}.out_proj")
        return t.norm(x, f"{name}_layer_norm")

    def side(name, ids, memory=None):
        x = t["model.shared.weight"][ids] * math.sqrt(M) + places[: len(ids)]
        for i in range(c[f"{name}_layers"]):
            h, heads = f"model.{name}.layers.{i}", c[f"{name}_attention_heads"]
            x = attention(x, x, f"{h}.self_attn", heads, memory is not None)
            if memory is not None:
                x = attention(x, memory, f"{h}.encoder_attn", heads)
            y = t.dense(silu(t.dense(x, f"{h}.fc1")), f"{h}.fc2")
            x = t.norm(x + y, f"{h}.final_layer_norm")
        return x

    x = side("decoder", targets, side("encoder", sources))
    return x @ t["model.shared.weight"].T + t["final_logits_bias"]


FORWARDS = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), gpt),
    **dict.fromkeys(("llama", "mistral"), llama),
    **dict.fromkeys(("bert", "roberta"), encoder),
    "marian": marian,
}
