"""The train steps that are timed: ours, and those of peers."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from experiments import pytorch, timing
from mhe_jax.attention import MultiHeadAttention
from mhe_jax.config import Config
from mhe_jax.data import NUM_SPECIAL
from mhe_jax.data.examples import num_predictions
from mhe_jax.model import count_parameters, layers
from mhe_jax.tasks import TASKS
from mhe_jax.training import sharding
from mhe_jax.training.optimizer import make_optimizer
from mhe_jax.training.state import initializer_of
from mhe_jax.training.step import train_step_of

FLAX = "flax MultiHeadDotProductAttention"
# Held while a model is traced: see `flax_layers`.
TRACING = threading.Lock()


def our_step(
    name: str,
    config: Config,
    rows: int,
    peer: bool = False,
    layers: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> list[timing.Case]:
    """The step of `train.py`, over one random batch, traced inside `layers()`."""
    with TRACING, layers():
        model, optimizer = TASKS[config.task].model(config.model), make_optimizer(config)
        mesh = sharding.make_mesh(config, jax.devices()[:1])
        initialize, abstract = initializer_of(config, model, optimizer, mesh)
        of_state = sharding.shardings_of(abstract)
        step: Any = train_step_of(config, model, optimizer, mesh, of_state)
        batch = sharding.global_batch(random_batch(config, rows), mesh)
        lowered, state = step.lower(abstract, batch), initialize(jax.random.key(0))
        flops = TASKS[config.task].step_flops(config, rows)
    compiled = lowered.compile()

    def call():
        nonlocal state  # the state that goes in is given up
        state, metrics = compiled(state, batch)
        return metrics

    about = about_step(name, config, rows, count_parameters(abstract.params), peer)
    return [timing.Case(about, call, flops, timing.memory_of(compiled))]


def about_step(name: str, config: Config, rows: int, parameters: dict, peer: bool) -> dict:
    sides = 2 if config.task == "translation" else 1
    return {
        "task": config.task,
        "case": name,
        "peer": peer,
        "parameters": parameters,
        "tokens": sides * rows * config.data.sequence_length,
    }


def random_batch(config: Config, rows: int) -> dict[str, np.ndarray]:
    """Ordinary tokens everywhere; mlm predicts as many a row as in training."""
    generator = np.random.default_rng(0)
    T, V = config.data.sequence_length, config.model.vocabulary_size

    def tokens(width):
        return generator.integers(NUM_SPECIAL, V, (rows, width), np.int32)

    if config.task == "translation":
        batch = {"source": tokens(T), "target": tokens(T), "labels": tokens(T)}
    else:
        P = num_predictions(T, config.data.mask_rate)
        places = np.stack([np.sort(generator.permutation(T)[:P]) for _ in range(rows)])
        batch = {"tokens": tokens(T), "positions": places.astype(np.int32), "labels": tokens(P)}
    return {**batch, "weights": np.ones(batch["labels"].shape, np.float32)}


class FlaxAttention(nn.MultiHeadDotProductAttention):
    """Flax's attention called as the layers call ours."""

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs_q, inputs_k=None, *, mask=None, positions=None, deterministic=None
    ):
        assert positions is None, "Flax's attention rotates nothing"
        keys = inputs_q if inputs_k is None else inputs_k
        dense = None if mask is None else mask.to_dense(inputs_q.shape[-2], keys.shape[-2])
        return super().__call__(inputs_q, keys, mask=dense, deterministic=deterministic)

    def check(self, head_features: int, features: int) -> None:
        """Flax itself checks."""

    def core(self, head_features: int) -> tuple[int, int, int]:
        """Its cost, that of `mha`."""
        return MultiHeadAttention(self.num_heads, parent=None).core(head_features)

    def untrained(self) -> tuple[str, ...]:
        """None of its parameters."""
        return ()


@contextlib.contextmanager
def flax_layers() -> Iterator[None]:
    """Layers traced inside have Flax's attention: the library itself has no such choice."""

    def make_attention(kind, *, engine, projection, **fields):
        return FlaxAttention(**fields)

    original = layers.make_attention
    layers.make_attention = make_attention  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        layers.make_attention = original


def hugging_face_step(name: str, config: Config, rows: int, compiled: bool) -> list[timing.Case]:
    """`compiled`: the loss by `torch.compile`, else all of it eager."""
    with pytorch.ALONE:
        torch, device = pytorch.with_device()
        m, o = config.model, config.optimizer
        dtype = getattr(torch, m.dtype)
        model, logits_of, inputs, labels = bert(config, random_batch(config, rows))
        model = model.to(device).train()
        inputs = {name: torch.from_numpy(x).long().to(device) for name, x in inputs.items()}
        labels = torch.from_numpy(labels).long().to(device).flatten()
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=o.learning_rate,
            betas=(o.beta1, o.beta2),
            eps=o.epsilon,
            weight_decay=o.weight_decay,
            fused=device == "cuda",
        )

        def loss_of(inputs, labels):
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                logits = logits_of(model, **inputs).flatten(0, 1)
                return torch.nn.functional.cross_entropy(
                    logits, labels, label_smoothing=o.label_smoothing
                )

        if compiled:
            loss_of = torch.compile(loss_of)

        def call():
            loss = loss_of(inputs, labels)
            loss.backward()
            if o.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            return pytorch.Result(torch, loss.detach())

        jax.block_until_ready(call())
        most = pytorch.memory(torch, call)
    sizes = {path: p.numel() for path, p in model.named_parameters()}
    own = [n for path, n in sizes.items() if ".attention." in path and "LayerNorm" not in path]
    parameters = {"total": sum(sizes.values()), "attention": sum(own)}
    about = about_step(name, config, rows, parameters, peer=True)
    with TRACING:
        flops = TASKS[config.task].step_flops(config, rows)
    return [timing.Case(about, call, flops, most)]


def bert(config: Config, batch: dict[str, np.ndarray]):
    """The model, what makes its logits of its inputs, the inputs, and the labels."""
    import transformers  # pyright: ignore[reportMissingImports]

    m = config.model
    shape = transformers.BertConfig(
        vocab_size=m.vocabulary_size,
        hidden_size=m.features,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.attention.num_heads,
        intermediate_size=m.mlp_features,
        max_position_embeddings=m.max_length,
        hidden_dropout_prob=m.dropout_rate,
        attention_probs_dropout_prob=m.attention.dropout_rate,
        layer_norm_eps=m.layer_norm_epsilon,
    )
    model = transformers.AutoModelForMaskedLM.from_config(shape, attn_implementation="sdpa")
    inputs = {"tokens": batch["tokens"], "positions": batch["positions"]}
    return model, masked_logits, inputs, batch["labels"]


def masked_logits(model, tokens, positions):
    """Head and vocabulary at the masked tokens alone, as ours: the call of the model has all."""
    hidden = model.bert(tokens).last_hidden_state
    return model.cls(hidden.take_along_dim(positions[..., None], 1))
