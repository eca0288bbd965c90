"""Embeddings of hashed words: equations, invariances, published counts, and whole encoders."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mhe_jax.config import AttentionConfig, KroneckerConfig, ModelConfig
from mhe_jax.hashformers.embeddings import EMBEDDINGS, Add, HashEmbedding, Pool, Proj, chunk_numbers
from mhe_jax.hashformers.embeddings import unpack_bits as bits_of
from mhe_jax.model import count_parameters
from mhe_jax.tasks import TASKS

THE = np.frombuffer(bytes.fromhex("b9386d96710ddd52bc49ff0033ead10f"), np.uint8)
CHUNKS_OF_THE = [741, 903, 870, 626, 56, 470, 176, 74, 1021, 4, 251, 722, 16]
M = 11
# RoBERTa-base with each embedding, with a pooler and three classes (Xue & Aletras 2022 and their
# code); Emb by itself is a table [50265, 768].
WHOLE = {"emb": 124_647_939, "pool": 86_846_211, "add": 86_245_635, "proj": 86_147_331}


@pytest.fixture(scope="module")
def signatures():
    """[2, 3, 16]; the last of each row is that of a special token."""
    found = np.random.default_rng(0).integers(0, 256, (2, 3, 16), np.uint8)
    found[:, 2] = 0
    return found


@pytest.fixture(scope="module")
def inputs(signatures):
    bits = np.unpackbits(signatures, axis=-1)
    return jnp.asarray(bits, jnp.int32), jnp.asarray(bits.any(axis=-1))


def parameters(module, *inputs, seed=0):
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)


def test_bits_and_chunks_of_a_word(signatures):
    bits = bits_of(jnp.asarray(signatures))
    np.testing.assert_array_equal(bits, np.unpackbits(signatures, axis=-1))
    assert chunk_numbers(bits_of(jnp.asarray(THE))).tolist() == CHUNKS_OF_THE


def test_pool_is_its_equation(inputs, signatures):
    params = parameters(Pool(M), *inputs)
    found = Pool(M).apply({"params": params}, *inputs)
    table, A = np.float64(params["table"]), np.float64(params["weights"])
    a = np.exp(A) / np.exp(A).sum(axis=0)
    for row, place in np.ndindex(2, 3):
        text = "".join(map(str, np.unpackbits(signatures[row, place])))
        numbers = [1 + int(text[10 * k : 10 * k + 10], 2) for k in range(13)]
        if place == 2:
            numbers = [0] * 13
        right = sum(a[k] * table[number] for k, number in enumerate(numbers))
        np.testing.assert_allclose(found[row, place], right, rtol=1e-5, atol=1e-6)


def test_add_is_its_equation(inputs):
    params = parameters(Add(M), *inputs)
    found = Add(M).apply({"params": params}, *inputs)
    bits, one, zero = (np.float64(x) for x in (inputs[0], params["one"], params["zero"]))
    right = (bits @ one.T + (1 - bits) @ zero.T) / np.sqrt(128)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    # Of special tokens no bit is set.
    np.testing.assert_allclose(found[0, 2], zero.sum(axis=1) / np.sqrt(128), rtol=1e-5)


def test_proj_is_the_correlation_of_pearson(inputs):
    params = parameters(Proj(M), *inputs)
    found = Proj(M).apply({"params": params}, *inputs)
    for row, place in np.ndindex(2, 2):
        right = [np.corrcoef(inputs[0][row, place], w)[0, 1] for w in params["kernel"]]
        np.testing.assert_allclose(found[row, place], right, atol=1e-6)
    assert not found[:, 2].any()


def test_special_tokens_have_a_row_each(signatures):
    config = ModelConfig(features=M, hashing="md_proj")
    types = jnp.array([[0, 1, 2], [3, 4, 5]])
    zeros = jnp.zeros((2, 3, 16), jnp.uint8).at[1, 2].set(signatures[0, 0])
    params = parameters(HashEmbedding(config), types, zeros)
    found = HashEmbedding(config).apply({"params": params}, types, zeros)
    np.testing.assert_array_equal(found.reshape(6, M)[:5], params["special"][:5])
    E = Proj(M).apply({"params": params["hash"]}, bits_of(zeros), types > 4)
    np.testing.assert_allclose(found[1, 2], params["special"][5] + E[1, 2], rtol=1e-6)


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_gradients_are_finite_and_dropout_is_drawn(inputs, kind):
    module = EMBEDDINGS[kind](M, 0.3)
    params = parameters(module, *inputs)

    def total(params, key):
        fixed = {"deterministic": False, "rngs": {"dropout": key}}
        return jnp.sum(jnp.square(module.apply({"params": params}, *inputs, **fixed)))

    one, two = (jax.value_and_grad(total)(params, jax.random.key(seed)) for seed in (0, 1))
    for leaf in jax.tree.leaves(one[1]):
        assert jnp.isfinite(leaf).all()
        assert leaf.any()
    assert (one[0] == two[0]) == (kind == "proj")  # which has no dropout


def test_dropout_of_pool_is_drawn_for_each_of_13_rows(inputs):
    """Of 13 equal rows any number may be left."""
    params = {"table": jnp.full((1025, M), 1.0), "weights": jnp.zeros((13, M))}
    fixed = {"deterministic": False, "rngs": {"dropout": jax.random.key(0)}}
    left = Pool(M, 0.5).apply({"params": params}, *inputs, **fixed) * 13 / 2
    np.testing.assert_allclose(left, np.round(left), atol=1e-5)
    assert len(np.unique(np.round(left))) > 5


def test_dropout_of_add_is_of_its_matrices(inputs):
    """One for a batch: a word is the same wherever it stands."""
    bits, ordinary = (jnp.concatenate([x, x], axis=1) for x in inputs)
    params = parameters(Add(M), bits, ordinary)
    fixed = {"deterministic": False, "rngs": {"dropout": jax.random.key(0)}}
    found = Add(M, 0.5).apply({"params": params}, bits, ordinary, **fixed)
    np.testing.assert_array_equal(found[:, :3], found[:, 3:])
    # Each of the two matrices has its own: bits that are all 1 see W1, bits that are all 0 see W0.
    both = jnp.stack([jnp.ones((1, 128), jnp.int32), jnp.zeros((1, 128), jnp.int32)], axis=1)
    ones = {"one": jnp.eye(M, 128), "zero": jnp.eye(M, 128)}
    one, zero = Add(M, 0.5).apply({"params": ones}, both, jnp.ones((1, 2), bool), **fixed)[0]
    assert (one != zero).any()


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_activations_begin_as_those_of_a_table(kind):
    """With variance 1/M, of which proj has 1/127 whatever M is."""
    bits = jnp.asarray(np.random.default_rng(0).integers(0, 2, (5, 40, 128)))
    found, _ = EMBEDDINGS[kind](127).init_with_output(jax.random.key(1), bits, bits[..., 0] > -1)
    assert float(jnp.std(found)) == pytest.approx(127**-0.5, rel=0.15)


@pytest.mark.parametrize("kind", WHOLE)
def test_parameters_of_the_published_models(kind):
    config = ModelConfig(
        hashing=f"md_{kind}",  # type: ignore[arg-type]
        vocabulary_size=50265,
        features=768,
        mlp_features=3072,
        num_layers=12,
        attention=AttentionConfig(num_heads=12, use_bias=True),
        norm_position="post",
        max_length=514,
        num_token_types=1,
        num_classes=3,
        scan_layers=True,
    )
    initialize = TASKS["classification"].initializer(TASKS["classification"].model(config), 2)
    params = jax.eval_shape(initialize, jax.random.key(0))
    assert count_parameters(params, config)["total"] == WHOLE[kind]
    if kind == "emb":
        assert count_parameters(params["embeddings"]["token"])["total"] == 38_603_520


def encoder(tiny, hashing="md_proj", kind="mha", **changes):
    return tiny.config(kind, hashing=hashing, num_classes=3, **changes)


def hashed_inputs(task):
    rng = np.random.default_rng(3)
    tokens = np.array([[2, 5, 5, 1, 5, 5, 3], [2, 5, 5, 3, 0, 0, 0]])
    signatures = rng.integers(0, 256, (2, 7, 16), np.uint8) * (tokens == 5)[..., None]
    positional = [tokens]
    if task == "classification":
        positional += [np.zeros_like(tokens)] * 2
    return [jnp.asarray(x) for x in positional], jnp.asarray(signatures.astype(np.uint8))


def drawn(model, positional, signatures):
    shapes = jax.eval_shape(
        lambda key: model.init(key, *positional, signatures=signatures), jax.random.key(0)
    )["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape)), shapes)


def read_by(tiny, config):
    """What tells the words of a batch apart, its inputs, logits, and which a bit of a word changes.

    The function takes changes of the config.
    """
    (tokens,), signatures = hashed_inputs("shuffle_random")
    params = drawn(TASKS["shuffle_random"].model(config), [tokens], signatures)

    def read(tokens, signatures, **changes):
        model = TASKS["shuffle_random"].model(dataclasses.replace(config, **changes))
        return model.apply({"params": params}, tokens, signatures=signatures)

    logits = read(tokens, signatures)
    other = read(tokens, signatures.at[0, 1, 0].add(1))
    return read, tokens, signatures, logits, (jnp.abs(other - logits) > 1e-7).any(axis=-1)


def test_hashes_go_with_any_kind_of_attention(tiny):
    """And with factorised matrices; padding changes nothing, each word something."""
    kronecker = KroneckerConfig(attention=2, mlp=2)
    config = encoder(tiny, "lsh_add", "mva", kronecker=kronecker, num_layers=1)
    read, tokens, signatures, logits, changed = read_by(tiny, config)
    assert logits.shape == (2, 7, 3)
    shorter = read(tokens[1:, :4], signatures[1:, :4])
    np.testing.assert_allclose(shorter[0], logits[1, :4], atol=1e-5)
    assert changed[0].all()
    assert not changed[1].any()


@pytest.mark.parametrize("kind", ["mha", "mva"])
def test_a_token_by_itself_sees_no_other(tiny, kind):
    config = encoder(tiny, kind=kind, context="token", num_layers=1)
    read, tokens, signatures, logits, changed = read_by(tiny, config)
    assert changed.sum() == 1
    assert changed[0, 1]
    # Beside that it is the same model: a text of one token is read alike.
    one = read(tokens[:, :1], signatures[:, :1], context="text")
    np.testing.assert_allclose(one, logits[:, :1], atol=1e-5)


@pytest.mark.parametrize("task", ["classification", "shuffle_random"])
def test_signatures_are_asked_for(tiny, task):
    positional, signatures = hashed_inputs(task)
    model = TASKS[task].model(encoder(tiny))
    params = jax.eval_shape(model.init, jax.random.key(0), *positional)
    with pytest.raises(ValueError, match="signatures are for model.hashing without a table"):
        jax.eval_shape(model.apply, params, *positional)
    model = TASKS[task].model(encoder(tiny, hashing="md_emb"))
    with pytest.raises(ValueError, match="signatures are for model.hashing without a table"):
        jax.eval_shape(lambda: model.init(jax.random.key(0), *positional, signatures=signatures))
