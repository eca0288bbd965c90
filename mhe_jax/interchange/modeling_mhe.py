"""Models of mhe_jax for transformers: language models, masked language models and translators.

This file needs PyTorch and transformers alone, and travels with the weights:

    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, trust_remote_code=True)

Letters: B batch, T queries, S keys, M model width, H heads, D head width, G groups.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import modeling_outputs as outputs
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
# What releases of transformers call the cache, in calls and in what a model returns.
CACHE = (
    "cache" if "cache" in outputs.CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
)
# A denominator above this has lost no digit to underflow.
SAFE = 1e-20
# Of what is not seen: a row of it alone has no NaN.
LOWEST = -1e30
# Queries whose scores are in memory at a time, of each example.
BLOCK = 256


class MHEConfig(PreTrainedConfig):
    """Sizes of a model; `attention` has kind and sizes of each role: encoder, decoder, cross."""

    model_type = "mhe"
    sizes = {  # noqa: RUF012
        "vocab_size": 8000,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,  # of the decoder, if there is one
        "num_encoder_layers": 0,
        "attention": {},
        "gated_mlp": False,
        "mlp_bias": True,
        "activation": "gelu",
        "norm": "layer",
        "norm_position": "pre",
        "norm_epsilon": 1e-6,
        "positions": "learned",
        "rotary_base": 10000.0,
        "rotary_pairs": "half",
        "rotary_scaling": 1.0,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "output_bias": False,
        "tie_word_embeddings": True,
    }

    def __init__(self, **given):
        for name, default in self.sizes.items():
            setattr(self, name, given.pop(name, default))
        super().__init__(tie_word_embeddings=self.tie_word_embeddings, **given)


def make_norm(config):
    norm = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_epsilon)


def rotate(x, positions, config):
    """Rotary positions of x [B, N, T, D], in float32: pair i of features turns by p ω_i."""
    width = x.shape[-1]
    pairs = torch.arange(width // 2, device=x.device, dtype=torch.float32)
    angles = config.rotary_base ** (-2 * pairs / width) / config.rotary_scaling
    angles = positions[:, None, :, None].float() * angles
    shape = (2, width // 2) if config.rotary_pairs == "half" else (width // 2, 2)
    axis = -2 if config.rotary_pairs == "half" else -1
    a, b = x.float().unflatten(-1, shape).unbind(axis)
    turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    return torch.stack(turned, axis).flatten(-2).to(x.dtype)


def shared_attention(query, key, value, bias, seen, causal=False):
    """`softmax(q kᵀ / √D + 1 b[h]ᵀ) v[h]` with one score matrix for the heads of each group.

    Where only a bias on keys tells heads apart, softmax factors: with P = softmax(q kᵀ / √D) and
    w = exp(b), a head's output is (P (w ⊙ v)) / (P w). Query [B, G, T, D], key [B, G, S, D],
    value [B, G or H, S, D'], bias [B, H, S], seen [B, 1, T, S] to [B, T, H, D']. With `causal`,
    the last query sees all keys, and each one before it a key less: others are not computed.
    """
    (G, T, D), H, S = query.shape[1:], bias.shape[1], key.shape[2]
    query, keys, bias = query * D**-0.5, key.transpose(-1, -2), bias.float()
    has_key = seen.any(-1).transpose(1, 2)[..., None]  # [B, T, 1, 1]
    if T > 1:
        w = torch.exp(bias - bias.detach().amax(-1, keepdim=True)).unflatten(1, (G, -1))
        of_keys = value.float().unflatten(1, (G, -1)).transpose(2, 3)  # [B, G, S, R or 1, D']
        columns = functional.pad(of_keys, (0, 1), value=1.0)
        columns = (w.transpose(2, 3)[..., None] * columns).flatten(3)
        sums = []
        for begin in range(0, T, BLOCK):
            end = min(begin + BLOCK, T)
            last = S - T + end if causal else S
            scores = (query[:, :, begin:end] @ keys[..., :last]).float()
            scores = scores.masked_fill_(~seen[:, :, begin:end, :last], LOWEST)
            sums.append(torch.softmax(scores, -1) @ columns[:, :, :last])
        sums = torch.cat(sums, 2).unflatten(-1, (H // G, -1)).transpose(1, 2).flatten(2, 3)
        output, below = sums[..., :-1], sums[..., -1:]
        if not bool((has_key & (below < SAFE)).any()):
            return (output / below.masked_fill(~has_key, torch.inf)).to(value.dtype)
    # One query, or one that sees only keys that others outweigh by far: a softmax for each head.
    scores = (query @ keys).float().repeat_interleave(H // G, 1) + bias[:, :, None]
    weights = torch.softmax(scores.masked_fill(~seen, LOWEST), -1).to(value.dtype)
    output = weights.unflatten(1, (value.shape[1], -1)) @ value[:, :, None]
    return output.flatten(1, 2).transpose(1, 2) * has_key


class Attention(nn.Module):
    """Attention of one kind.

    heads      softmax(q[h] k[g]ᵀ / √D_s) v[g], g the key and value head of h
    mva        softmax(q kᵀ / √D_s + 1 b[h]ᵀ) v[h], b = x U: queries and keys of all heads
    mhe_add    q + e_q[h], and v + e_v[h] after the sums: the same with b[h] = k e_q[h] / √D
    mhe_mul    q ⊙ e_q[h], and e_v[h] ⊙ after the sums
    """

    def __init__(self, config, role, layer):
        super().__init__()
        own, width = config.attention[role], config.hidden_size
        self.config, self.layer, self.causal = config, layer, role == "decoder"
        # Groups are of queries in mva and mhe, of keys and values in heads.
        self.kind, self.heads, self.groups = own["kind"], own["num_heads"], own["num_groups"]
        H, D, scored, bias = self.heads, own["head_dim"], own["score_dim"], own["use_bias"]
        self.queries = H if self.kind == "heads" else self.groups
        self.values = H if self.kind == "mva" else self.groups
        self.query = nn.Linear(width, self.queries * scored, bias)
        self.key = nn.Linear(width, self.groups * scored, bias)
        self.value = nn.Linear(width, self.values * D, bias)
        self.out = nn.Linear(H * D, width, bias)
        if self.kind == "mva":
            self.key_bias = nn.Linear(width, H, False)
        elif self.kind != "heads":
            self.query_head_embedding = nn.Parameter(torch.zeros(H, D))
            self.value_head_embedding = nn.Parameter(torch.zeros(H, D))

    def forward(self, x, y, seen, cache=None, positions=None):
        """x [B, T, M] and y [B, S, M], seen [B, 1, T, S], to [B, T, M]; y None: all is cached.

        The cache of `mva` has the bias of keys as one more column of the values.
        """
        (B, T), H, G, kind = x.shape[:2], self.heads, self.groups, self.kind
        query = self.query(x).unflatten(-1, (self.queries, -1)).transpose(1, 2)
        if positions is not None:
            query = rotate(query, positions, self.config)
        if y is None:
            key, value = cache.layers[self.layer].keys, cache.layers[self.layer].values
        else:
            key = self.key(y).unflatten(-1, (G, -1)).transpose(1, 2)
            value = self.value(y).unflatten(-1, (self.values, -1)).transpose(1, 2)
            if positions is not None:
                key = rotate(key, positions, self.config)
            if kind == "mva":
                value = torch.cat([value, self.key_bias(y).transpose(1, 2)[..., None]], -1)
            if cache is not None:
                key, value = cache.update(key, value, self.layer)
        scale, bias = query.shape[-1] ** -0.5, None
        if kind == "mva":
            value, bias = value[..., :-1], value[..., -1]
        elif kind == "mhe_add" and T > 1:
            e_q = self.query_head_embedding.unflatten(0, (G, -1))
            bias = torch.einsum("bgsd,grd->bgrs", key, e_q).flatten(1, 2) * scale
        has_key = seen.any(-1).transpose(1, 2)[..., None]
        if bias is not None:
            output = shared_attention(query, key, value, bias, seen, self.causal)
        else:
            if kind != "heads":
                query, e_q = query.repeat_interleave(H // G, 1), self.query_head_embedding[:, None]
                query = query * e_q if kind == "mhe_mul" else query + e_q
            if T == 1:  # the heads of a group are rows of one product
                query = query.reshape(B, G, H // G, -1)
            output = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=scale, enable_gqa=T > 1 and H != G
            )
            output = output.reshape(B, H, T, -1).transpose(1, 2).masked_fill(~has_key, 0)
        if kind == "mhe_add":
            output = output + self.value_head_embedding * has_key
        elif kind == "mhe_mul":
            output = output * self.value_head_embedding
        return self.out(output.flatten(2))


class MLP(nn.Module):
    """`down(activation(up(x)))`, or gated `down(activation(gate(x)) · up(x))`."""

    def __init__(self, config):
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up, self.down = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)
        self.gate = nn.Linear(width, inner, bias) if config.gated_mlp else None
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x):
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Self-attention, attention to an encoded source where there is one, and the MLP."""

    def __init__(self, config, role, layer, cross):
        super().__init__()
        self.pre = config.norm_position == "pre"
        self.self_attention = Attention(config, role, layer)
        self.self_attention_norm = make_norm(config)
        if cross:
            self.cross_attention = Attention(config, "cross", layer)
            self.cross_attention_norm = make_norm(config)
        self.mlp, self.mlp_norm = MLP(config), make_norm(config)

    def residual(self, x, norm, sublayer):
        return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))

    def forward(self, x, seen, cache, positions, encoded, encoded_seen, cross_cache):
        def attend(x):
            return self.self_attention(x, x, seen, cache, positions)

        def attend_across(x):
            return self.cross_attention(x, encoded, encoded_seen, cross_cache)

        x = self.residual(x, self.self_attention_norm, attend)
        if encoded_seen is not None:
            x = self.residual(x, self.cross_attention_norm, attend_across)
        return self.residual(x, self.mlp_norm, self.mlp)


class Stack(nn.Module):
    """Layers of a role, with one norm more after them in pre-norm order."""

    main_input_name = "input_ids"  # of an encoder, as `generate` asks with beams

    def __init__(self, config, role, num_layers, cross=False):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, role, i, cross) for i in range(num_layers))
        self.norm = make_norm(config) if config.norm_position == "pre" else None

    def forward(self, x, seen, positions, cache=None, encoded=None, encoded_seen=None, cross=None):
        positions = positions if self.config.positions == "rotary" else None
        for layer in self.layers:
            x = layer(x, seen, cache, positions, encoded, encoded_seen, cross)
        return x if self.norm is None else self.norm(x)


class Embeddings(nn.Module):
    """`√M (token + position + type)`, with sinusoidal positions added unscaled."""

    def __init__(self, config, normalize=False):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.token = nn.Embedding(config.vocab_size, width)
        if config.positions == "learned":
            self.position = nn.Embedding(config.max_position_embeddings, width)
        if config.type_vocab_size:
            self.types = nn.Embedding(config.type_vocab_size, width)
        self.norm = make_norm(config) if normalize else None

    def forward(self, ids, positions, types=None):
        config, x = self.config, self.token(ids)
        if config.type_vocab_size:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        if config.positions == "learned":
            x = x + self.position(positions)
        x = x * math.sqrt(config.hidden_size)
        if config.positions == "sinusoidal":
            half = config.hidden_size // 2
            rates = torch.arange(half, device=x.device, dtype=torch.float32) / max(half - 1, 1)
            angles = positions[..., None] * 10000.0**-rates
            x = x + torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        return x if self.norm is None else self.norm(x)


class MHEModel(PreTrainedModel):
    """What all models share: embeddings, an encoder, a decoder, the logits."""

    config_class = MHEConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _tied_weights_keys = {"output.weight": "embeddings.token.weight"}  # noqa: RUF012
    encodes, decodes, has_head = True, False, False

    def __init__(self, config):
        super().__init__(config)
        normalize = config.norm_position == "post" and not self.decodes
        self.embeddings = Embeddings(config, normalize)
        if self.encodes:
            self.encoder = Stack(config, "encoder", config.num_encoder_layers)
        if self.decodes:
            layers = config.num_hidden_layers
            self.decoder = Stack(config, "decoder", layers, cross=self.encodes)
        if self.has_head:
            self.head_dense = nn.Linear(config.hidden_size, config.hidden_size)
            self.head_norm = make_norm(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, config.output_bias)
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings.token

    def get_output_embeddings(self):
        return self.output

    def encode(self, ids, mask, types=None):
        mask = torch.ones_like(ids) if mask is None else mask
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        seen = mask.bool()[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        return self.encoder(self.embeddings(ids, positions, types), seen, positions)

    def decode(self, ids, mask, positions, cache, encoded=None, encoded_mask=None, cross=None):
        """ids [B, T] after those of the cache; mask [B, all tokens so far]."""
        past = 0 if cache is None else cache.get_seq_length()
        T, S = ids.shape[1], past + ids.shape[1]
        at = torch.arange(S, device=ids.device)
        seen = (at[None] <= at[past:, None])[None, None].expand(len(ids), 1, T, S)
        if mask is not None:
            seen = seen & mask.bool()[:, None, None, :S]
        if positions is None and mask is None:
            positions = at[past:].expand(len(ids), T)
        elif positions is None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:S]
        encoded_seen = None
        if encoded_mask is not None:
            encoded_seen = encoded_mask.bool()[:, None, None, :].expand(-1, 1, T, -1)
        x = self.embeddings(ids, positions)
        return self.decoder(x, seen, positions, cache, encoded, encoded_seen, cross)

    def loss_of(self, logits, labels):
        """Mean cross-entropy where labels are not -100; None without labels."""
        if labels is None:
            return None
        return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


class MHEForCausalLM(MHEModel, GenerationMixin):
    """Logits of the token after each."""

    encodes, decodes = False, True

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **_: Any,
    ):
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        x = self.decode(input_ids, attention_mask, position_ids, cache)
        logits = self.output(x[:, -logits_to_keep:])
        loss = self.loss_of(logits[:, :-1], None if labels is None else labels[:, 1:])
        return outputs.CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})


class MHEForMaskedLM(MHEModel):
    """Logits of the tokens at each position."""

    has_head = True

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None, **_: Any):
        x = self.encode(input_ids, attention_mask, token_type_ids)
        x = self.head_norm(ACTIVATIONS[self.config.activation](self.head_dense(x)))
        logits = self.output(x)
        return outputs.MaskedLMOutput(loss=self.loss_of(logits, labels), logits=logits)


class Encoder(nn.Module):
    """The encoder of a translator, as `generate` calls it."""

    main_input_name = "input_ids"

    def __init__(self, model):
        super().__init__()
        self.model = [model]  # not its parent in the tree of modules

    def forward(self, input_ids, attention_mask=None, **_: Any):
        return outputs.BaseModelOutput(
            last_hidden_state=self.model[0].encode(input_ids, attention_mask)
        )


class MHEForConditionalGeneration(MHEModel, GenerationMixin):
    """Logits of the target's token after each, given a source."""

    encodes, decodes = True, True

    def get_encoder(self, *_: Any, **__: Any):
        return Encoder(self)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        encoder_outputs=None,
        cache=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        **_: Any,
    ):
        cache = past_key_values if cache is None else cache
        if decoder_input_ids is None:  # the labels, moved to the right
            start = labels.new_full((len(labels), 1), self.config.decoder_start_token_id)
            decoder_input_ids = torch.cat([start, labels[:, :-1]], 1)
            decoder_input_ids = decoder_input_ids.masked_fill(
                decoder_input_ids == -100, self.config.pad_token_id
            )
        if encoder_outputs is None:
            encoder_outputs = (self.encode(input_ids, attention_mask),)
        if attention_mask is None:
            attention_mask = torch.ones_like(encoder_outputs[0][..., 0])
        if cache is None and use_cache:
            cache = EncoderDecoderCache(*(DynamicCache(config=self.config) for _ in range(2)))
        own = getattr(cache, "self_attention_cache", None)
        cross = getattr(cache, "cross_attention_cache", None)
        # The source is projected once, in the first call.
        encoded = None if own is not None and own.get_seq_length() else encoder_outputs[0]
        given = decoder_input_ids, decoder_attention_mask, decoder_position_ids
        x = self.decode(*given, own, encoded, attention_mask, cross)
        logits = self.output(x)
        return outputs.Seq2SeqLMOutput(
            loss=self.loss_of(logits, labels),
            logits=logits,
            encoder_last_hidden_state=encoder_outputs[0],
            **{CACHE: cache},
        )
