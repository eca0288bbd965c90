"""Steps on a stand-in model: accumulation, devices, EMA, randomness; layers scanned or not."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mhe_jax.tasks import TASKS
from mhe_jax.training import sharding
from mhe_jax.training.optimizer import make_optimizer, make_schedule
from mhe_jax.training.state import make_initializer
from mhe_jax.training.step import make_eval_step, make_train_step, train_step_of

ROWS, LENGTH, VOCABULARY = 16, 5, 7


class Standin(nn.Module):
    """A model in the smallest sense: an embedding, dropout and a table."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens, *, deterministic=True):
        table = self.param(
            "table",
            nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocabulary", "embed")),
            (8, 6),
        )
        x = nn.Dropout(self.dropout)(jnp.tanh(table[tokens]), deterministic=deterministic)
        x = nn.with_logical_constraint(x, ("batch", "length", "activation_embed"))
        return jnp.einsum("btm,vm->btv", x, table)


def batch_of(seed, rows=ROWS):
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32),
        "labels": rng.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32),
        # Rows have very different numbers of counted positions, and one has none.
        "weights": (np.arange(rows)[:, None] % 6 > np.arange(LENGTH)).astype(np.float32),
    }


class Trainer:
    """State and step of a model on a mesh."""

    def __init__(self, model, optimizer=None, sizes=(1, 1, 1), ema=None, task="lm", **options):
        devices = jax.devices()[: int(np.prod(sizes))]
        self.mesh = jax.make_mesh(
            sizes, sharding.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=devices
        )
        optimizer = optimizer or optax.sgd(0.5)
        init = TASKS[task].initializer(model, LENGTH)
        initialize, self.abstract = make_initializer(init, optimizer, self.mesh, ema is not None)
        self.state = initialize(jax.random.key(0))
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        self.sums = TASKS[task].sums(model)
        self.step = make_train_step(
            self.sums, optimizer, self.mesh, self.shardings, ema_decay=ema, **options
        )

    def run(self, batch):
        self.state, metrics = self.step(self.state, sharding.global_batch(batch, self.mesh))
        return {name: value.item() for name, value in metrics.items()}

    def params(self):
        return jax.device_get(self.state.params)


def assert_close(a, b, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), a, b)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 1)])
def test_accumulation_is_the_big_batch(sizes):
    whole, split = Trainer(Standin()), Trainer(Standin(), sizes=sizes, accumulate_steps=4)
    for seed in range(3):
        one, many = whole.run(batch_of(seed)), split.run(batch_of(seed))
        assert one["count"] == many["count"]
        for name in one:
            assert one[name] == pytest.approx(many[name], rel=1e-6), name
    assert_close(whole.params(), split.params(), 1e-6)


def test_gradient_is_of_the_mean_over_counted_positions():
    trainer = Trainer(Standin())
    before, batch = trainer.params(), batch_of(0)

    def mean_loss(params):
        logits = Standin().apply({"params": params}, batch["tokens"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.sum(nats * batch["weights"]) / batch["weights"].sum()

    gradients = jax.grad(mean_loss)(before)
    metrics = trainer.run(batch)
    wanted = jax.tree.map(lambda p, g: p - 0.5 * g, before, gradients)
    assert_close(trainer.params(), jax.device_get(wanted), 1e-6)
    assert metrics["gradient_norm"] == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-5)
    assert metrics["loss"] / metrics["count"] == pytest.approx(float(mean_loss(before)), rel=1e-6)
    assert metrics["finite"] is True


def test_batch_without_anything_to_predict_is_harmless():
    trainer = Trainer(Standin())
    before = trainer.params()
    metrics = trainer.run(batch_of(0) | {"weights": np.zeros((ROWS, LENGTH), np.float32)})
    assert metrics["finite"] is True
    assert_close(before, trainer.params(), 0)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_devices_change_nothing_not_even_dropout(sizes):
    if sizes == (1, 8, 1):
        sizes = (1, 2, 1)  # fsdp splits the width of 6
    one, many = Trainer(Standin(dropout=0.3)), Trainer(Standin(dropout=0.3), sizes=sizes)
    for seed in range(2):
        assert one.run(batch_of(seed)) == pytest.approx(many.run(batch_of(seed)), rel=1e-5)
    assert_close(one.params(), many.params(), 1e-5)


def test_state_is_donated():
    trainer = Trainer(Standin())
    old = trainer.state
    trainer.run(batch_of(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))


def test_dropout_is_a_function_of_key_and_step():
    def losses(steps, skip=0):
        trainer = Trainer(Standin(dropout=0.5), optax.sgd(0.0))
        state = trainer.state.replace(step=jnp.asarray(skip, jnp.int32))
        trainer.state = jax.device_put(state, trainer.shardings)
        return [trainer.run(batch_of(0))["loss"] for _ in range(steps)]

    all_of_them = losses(4)
    assert len(set(all_of_them)) == 4
    assert losses(2, skip=2) == all_of_them[2:]


def test_a_step_does_what_its_config_says(tiny):
    """The sum of its parts with smoothing, an average, the rate, and what is left out."""
    config = tiny(
        "lm",
        **{
            "optimizer.label_smoothing": 0.2,
            "optimizer.accumulate_steps": 2,
            "optimizer.ema_decay": 0.5,
            "train.skip_nonfinite": 3,
        },
    )
    model = Standin(dropout=0.5)
    trainer = Trainer(model, make_optimizer(config), ema=0.5)
    trainer.step = train_step_of(
        config, model, make_optimizer(config), trainer.mesh, trainer.shardings
    )
    sums = jax.jit(TASKS["lm"].sums(model, 0.2))
    key = jax.random.fold_in(jax.random.wrap_key_data(jax.device_get(trainer.state.key)), 0)
    before, batch = trainer.params(), batch_of(0)
    losses = [
        sums(before, {k: v[a::2] for k, v in batch.items()}, jax.random.fold_in(key, a))["loss"]
        for a in range(2)
    ]
    metrics = trainer.run(batch)
    assert metrics["loss"] == pytest.approx(float(sum(losses)), rel=1e-5)
    rate = make_schedule(config.optimizer, config.train.num_steps)(0)
    assert metrics["learning_rate"] == pytest.approx(float(rate))
    after = trainer.params()
    wanted = jax.tree.map(lambda e, p: 0.1 * e + 0.9 * p, before, after)
    assert_close(jax.device_get(trainer.state.ema_params), wanted, 1e-6)
    kept = jax.device_get(trainer.state)
    bad = batch | {"weights": np.full((ROWS, LENGTH), np.inf, np.float32)}
    assert trainer.run(bad)["finite"] is False
    assert_close(jax.device_get(trainer.state), kept.replace(step=kept.step + 1), 0)
    assert trainer.state.step == 2


def test_parameters_and_dropout_have_keys_of_their_own():
    mesh = Trainer(Standin()).mesh
    drawn = lambda key: {"of": jax.random.key_data(key).astype(jnp.float32)}  # noqa: E731
    initialize, _ = make_initializer(drawn, optax.sgd(0.1), mesh, False)
    given = jax.random.key(3)
    state = initialize(given)
    keys = [np.float32(k) for k in (jax.random.key_data(given), state.key, state.params["of"])]
    assert len({tuple(key) for key in keys}) == 3


def test_average_follows_its_formula():
    trainer = Trainer(Standin(), ema=0.5)
    wanted = trainer.params()
    for n in range(8):
        trainer.run(batch_of(n))
        d = min(0.5, (1 + n) / (10 + n))
        wanted = jax.tree.map(lambda e, p, d=d: d * e + (1 - d) * p, wanted, trainer.params())
    assert_close(jax.device_get(trainer.state.ema_params), wanted, 1e-6)


def test_average_counts_no_update_that_was_left_out():
    schedule = lambda n: 0.1 / (1 + n)  # noqa: E731
    bad = batch_of(0) | {"weights": np.full((ROWS, LENGTH), np.inf, np.float32)}
    found = []
    for batches in ([batch_of(0), batch_of(1)], [batch_of(0), bad, bad, batch_of(1)]):
        trainer = Trainer(
            Standin(), optax.adamw(schedule), schedule=schedule, ema=0.9, skip_nonfinite=True
        )
        for batch in batches:
            trainer.run(batch)
        found.append(jax.device_get(trainer.state.ema_params))
    assert_close(*found, 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_learning_rate_is_the_optimizers_own(tiny, name, parts):
    config = tiny("lm", **{"optimizer.name": name, "train.num_steps": 6})
    schedule = make_schedule(config.optimizer, 6)
    options = {"schedule": schedule, "accumulate_steps": parts, "skip_nonfinite": True}
    trainer = Trainer(Standin(), make_optimizer(config), **options)
    bad = batch_of(0) | {"weights": np.full((ROWS, LENGTH), np.inf, np.float32)}
    batches = [batch_of(0), bad, batch_of(1), batch_of(2)]
    found = [trainer.run(batch)["learning_rate"] for batch in batches]
    assert found == [float(schedule(n)) for n in (0, 1, 1, 2)]


@pytest.mark.parametrize("where", ["loss", "gradient", "update"])
def test_what_is_not_finite_is_reported(where):
    """Where it is one of them alone: an update of zeros hides the gradient it was made of."""
    optimizer = optax.sgd(float("inf")) if where == "update" else optax.set_to_zero()
    trainer = Trainer(Standin(), optimizer)

    def sums(params, batch, key):
        found = trainer.sums(params, batch, key)
        more = {"loss": jnp.inf, "gradient": jnp.sqrt(0 * jnp.sum(params["table"])), "update": 0.0}
        return found | {"loss": found["loss"] + more[where]}

    trainer.step = make_train_step(sums, optimizer, trainer.mesh, trainer.shardings)
    metrics = trainer.run(batch_of(0))
    assert metrics["finite"] is False
    assert np.isfinite(metrics["loss"]) == (where != "loss")
    assert np.isfinite(metrics["gradient_norm"]) == (where != "gradient")
    assert all(np.isfinite(p).all() for p in trainer.params().values()) == (where != "update")


def test_eval_step_is_without_dropout_and_sums_up():
    trainer = Trainer(Standin(dropout=0.5), sizes=(4, 1, 2))
    step = make_eval_step(trainer.sums, trainer.mesh, trainer.shardings.params)
    batch = batch_of(1)
    halves = [{k: v[part] for k, v in batch.items()} for part in (slice(0, 8), slice(8, 16))]
    whole, *parts = (
        jax.device_get(step(trainer.state.params, sharding.global_batch(b, trainer.mesh)))
        for b in (batch, *halves)
    )
    for name in whole:
        assert whole[name] == pytest.approx(sum(p[name] for p in parts), rel=1e-6)


def test_scanned_and_unrolled_layers_train_alike(tiny):
    from mhe_jax.model import stack_layers

    batch = batch_of(0, rows=8)
    config = tiny("lm", **{"model.num_layers": 2, "model.dropout_rate": 0.0})
    scanned = dataclasses.replace(config.model, scan_layers=True)
    trainers = [
        Trainer(TASKS["lm"].model(m), make_optimizer(config)) for m in (config.model, scanned)
    ]
    params = jax.tree.map(jnp.array, stack_layers(trainers[0].state.params))
    trainers[1].state = trainers[1].state.replace(params=params)
    for _ in range(2):
        one, two = (trainer.run(batch) for trainer in trainers)
        assert one == pytest.approx(two, rel=1e-5)
    assert_close(stack_layers(trainers[0].params()), trainers[1].params(), 1e-5)
