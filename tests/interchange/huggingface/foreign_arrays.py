"""Models of transformers made by hand, and their equations in float64: nothing of ours in them.

`FORWARDS[model_type](t, c, ids, ...)` computes what the class of transformers does from the tensors
`t` and the config `c` of a file, for one row: logits [T, V], or those of the head of its class.
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
    t, row = Drawn(), np.arange(3)
    FORWARDS[kind](t, config, *(row, row)[: 1 + (kind == "marian")])
    t = dict(t)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(t, directory / "model.safetensors", {"format": "pt"})
    return t, config, file


MLM = "cls.predictions"
HEADS = {
    "bert": (f"{MLM}.transform.dense", f"{MLM}.transform.LayerNorm", MLM),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
}
CLASSIFIERS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
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


class Drawn(dict):
    """Tensors that are drawn when they are first asked for."""

    def __init__(self):
        super().__init__()
        self.draw = np.random.default_rng(0)


class Arrays:
    """Tensors by name, and layers that take them by name."""

    def __init__(self, t, eps, by_row=False):
        self.t, self.eps, self.by_row = t, eps, by_row  # matrices are [in, out]

    def __call__(self, name, *shape):
        if isinstance(self.t, Drawn) and name not in self.t:
            self.t[name] = 0.4 * self.t.draw.normal(size=shape).astype(np.float32)
        assert self.t[name].shape == shape, name
        return self.t[name].astype(np.float64)

    def dense(self, x, name, width, bias=True):
        shape = (x.shape[-1], width)
        if self.by_row:
            y = x @ self(f"{name}.weight", *shape)
        else:
            y = x @ self(f"{name}.weight", *shape[::-1]).T
        return y + self(f"{name}.bias", width) if bias else y

    def rms(self, x, name):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
        return x * self(f"{name}.weight", M)

    def norm(self, x, name):
        return self.rms(x - x.mean(-1, keepdims=True), name) + self(f"{name}.bias", M)


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
    one, V = c["model_type"] == "gpt_bigcode", c["vocab_size"]
    t = Arrays(t, c["layer_norm_epsilon"], by_row=not one)
    words = t("transformer.wte.weight", V, M)
    x = words[ids] + t("transformer.wpe.weight", P, M)[: len(ids)]
    for i in range(L):
        h = f"transformer.h.{i}"
        wide = M + 2 * D if one else 3 * M
        both = t.dense(t.norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn", wide)
        q, k, v = np.split(both, [M, M + D] if one else 3, -1)
        x = x + t.dense(attend(q, k, v, H, True), f"{h}.attn.c_proj", M)
        up = gelu_tanh(t.dense(t.norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc", F))
        x = x + t.dense(up, f"{h}.mlp.c_proj", M)
    return t.norm(x, "transformer.ln_f") @ words.T


def turned(x, base):
    """Features i and i + D/2 of each head as a point, turned by p base^(-2i/D)."""
    x = x.reshape(len(x), -1, 2, D // 2)
    angle = (np.arange(len(x))[:, None] * base ** (-2 * np.arange(D // 2) / D))[:, None]
    a, b, cos, sin = x[:, :, 0], x[:, :, 1], np.cos(angle), np.sin(angle)
    return np.stack([a * cos - b * sin, b * cos + a * sin], 2).reshape(len(x), -1)


def llama(t, c, ids):
    t, wide = Arrays(t, c["rms_norm_eps"]), D * c["num_key_value_heads"]
    x = t("model.embed_tokens.weight", c["vocab_size"], M)[ids]
    for i in range(L):
        h = f"model.layers.{i}"
        y = t.rms(x, f"{h}.input_layernorm")
        q = t.dense(y, f"{h}.self_attn.q_proj", M, False)
        k, v = (t.dense(y, f"{h}.self_attn.{part}_proj", wide, False) for part in "kv")
        q, k = turned(q, c["rope_theta"]), turned(k, c["rope_theta"])
        x = x + t.dense(attend(q, k, v, H, True), f"{h}.self_attn.o_proj", M, False)
        y = t.rms(x, f"{h}.post_attention_layernorm")
        gate, up = (t.dense(y, f"{h}.mlp.{part}_proj", F, False) for part in ("gate", "up"))
        x = x + t.dense(silu(gate) * up, f"{h}.mlp.down_proj", M, False)
    return t.dense(t.rms(x, "model.norm"), "lm_head", c["vocab_size"], False)


def encoder(t, c, ids, types=0):
    kind, name, t = c["model_type"], c["architectures"][0], Arrays(t, c["layer_norm_eps"])
    e, V = f"{kind}.embeddings", c["vocab_size"]
    first = c["pad_token_id"] + 1 if kind == "roberta" else 0
    words = t(f"{e}.word_embeddings.weight", V, M)
    positions = t(f"{e}.position_embeddings.weight", c["max_position_embeddings"], M)
    x = words[ids] + positions[first : first + len(ids)]
    x = x + t(f"{e}.token_type_embeddings.weight", c["type_vocab_size"], M)[types]
    x = t.norm(x, f"{e}.LayerNorm")
    for i in range(L):
        h = f"{kind}.encoder.layer.{i}"
        q, k, v = (t.dense(x, f"{h}.attention.self.{p}", M) for p in ("query", "key", "value"))
        y = t.dense(attend(q, k, v, H), f"{h}.attention.output.dense", M)
        x = t.norm(x + y, f"{h}.attention.output.LayerNorm")
        y = t.dense(gelu(t.dense(x, f"{h}.intermediate.dense", F)), f"{h}.output.dense", M)
        x = t.norm(x + y, f"{h}.output.LayerNorm")
    if name.endswith("QuestionAnswering"):
        return t.dense(x, "qa_outputs", 2).T
    if name.endswith("SequenceClassification"):
        dense, last = CLASSIFIERS[kind]
        return t.dense(np.tanh(t.dense(x[0], dense, M)), last, 3)
    dense, last, head = HEADS[kind]
    return t.norm(gelu(t.dense(x, dense, M)), last) @ words.T + t(f"{head}.bias", V)


def marian(t, c, sources, targets):
    t, V, rates = Arrays(t, 1e-5), c["vocab_size"], 10000.0 ** (-2 * np.arange(M // 2) / M)
    angles = np.arange(P)[:, None] * rates
    places = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    words = t("model.shared.weight", V, M)

    def attention(x, y, name, heads, causal=False):
        q = t.dense(x, f"{name}.q_proj", M)
        k, v = (t.dense(y, f"{name}.{part}_proj", M) for part in "kv")
        x = x + t.dense(attend(q, k, v, heads, causal), f"{name}.out_proj", M)
        return t.norm(x, f"{name}_layer_norm")

    def side(name, ids, memory=None):
        x = words[ids] * math.sqrt(M) + places[: len(ids)]
        for i in range(c[f"{name}_layers"]):
            h, heads = f"model.{name}.layers.{i}", c[f"{name}_attention_heads"]
            x = attention(x, x, f"{h}.self_attn", heads, memory is not None)
            if memory is not None:
                x = attention(x, memory, f"{h}.encoder_attn", heads)
            y = t.dense(silu(t.dense(x, f"{h}.fc1", F)), f"{h}.fc2", M)
            x = t.norm(x + y, f"{h}.final_layer_norm")
        return x

    x = side("decoder", targets, side("encoder", sources))
    return x @ words.T + t("final_logits_bias", 1, V)


FORWARDS = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), gpt),
    **dict.fromkeys(("llama", "mistral"), llama),
    **dict.fromkeys(("bert", "roberta"), encoder),
    "marian": marian,
}
