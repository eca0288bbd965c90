"""Models of transformers as runs: what a loaded run does with texts, in the file's own numbers."""

import json
from operator import attrgetter

import jax
import numpy as np
import pytest
from small_models import apply, byte_level, foreign, model_config

import mhe_jax
from mhe_jax.cli import commands
from mhe_jax.config.data import BOS, EOS, MASK, PAD, UNK
from mhe_jax.config.fields import set_field
from mhe_jax.data import JsonTokenizer
from mhe_jax.interchange.huggingface import bert, gpt2, llama, marian
from mhe_jax.interchange.huggingface.fields import Fields
from mhe_jax.interchange.huggingface.reading import read
from mhe_jax.tasks.labelled.examples import Example
from mhe_jax.tasks.labelled.rows import LabelledRows
from mhe_jax.tasks.labelled.table import row_of

ROBERTA = ("<s>", "</s>", "<unk>", "<pad>", "<mask>")
TEXTS = ["a small dog", "A man with a red hat watches him", "Größe"]


@pytest.fixture
def come_in(tmp_path, capsys):
    """`come_in(name)`: a model as others see it, and the loaded run that `convert` makes of it."""

    def make(name, **fields):
        theirs = foreign(name, tmp_path / "source", **fields)
        commands.main(["convert", str(tmp_path / "source"), str(tmp_path / "run")])
        told = json.loads(capsys.readouterr().out)
        run = mhe_jax.load(tmp_path / "run", devices=jax.devices()[:1])
        assert (told["task"], told["absent"]) == (theirs[0].task, [*run.config.model.absent_tokens])
        assert told["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(run.params))
        return *theirs, run

    return make


SIZES = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("n_embd", "n_layer", "n_head", "n_positions", "d_model", "encoder_layers", "decoder_layers"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
]
# Our field, theirs, and what transformers takes where a config does not name it.
FIELDS = {
    bert: {
        "layer_norm_epsilon": ("layer_norm_eps", 1e-12),
        "dropout_rate": ("hidden_dropout_prob", 0.1),
        "attention.dropout_rate": ("attention_probs_dropout_prob", 0.1),
        "num_token_types": ("type_vocab_size", 2),
    },
    gpt2: {
        "layer_norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "dropout_rate": ("resid_pdrop", 0.1),
        "attention.dropout_rate": ("attn_pdrop", 0.1),
        "mlp_features": ("n_inner", 16),
    },
    llama: {
        "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
        "attention.dropout_rate": ("attention_dropout", 0.0),
        "rotary_base": ("rope_theta", 10_000.0),
        "max_length": ("max_position_embeddings", 2048),
    },
    marian: {
        "dropout_rate": ("dropout", 0.1),
        "attention.dropout_rate": ("attention_dropout", 0.0),
    },
}


@pytest.mark.parametrize("module", FIELDS, ids=lambda module: module.__name__.split(".")[-1])
def test_each_field_is_read_and_has_the_default_of_transformers(module, tmp_path):
    def taken(**given):
        values = {"model_type": module.__name__.split(".")[-1], **dict.fromkeys(SIZES, 4), **given}
        values["scale_embedding"] = True  # of Marian
        if module in (bert, marian):  # which have no default
            values["max_position_embeddings"] = 4
        (tmp_path / "config.json").write_text(json.dumps(values))
        model = module.model_of(Fields(tmp_path))
        return {name: attrgetter(name)(model) for name in FIELDS[module]}

    assert taken() == {name: default for name, (_, default) in FIELDS[module].items()}
    values = {
        theirs: default + i if isinstance(default, int) else default + i / 64
        for i, (theirs, default) in enumerate(FIELDS[module].values(), 1)
    }
    assert taken(**values) == {name: values[theirs] for name, (theirs, _) in FIELDS[module].items()}


def log_probs(config, params, *ids):
    """Of what follows each of the ids, which are the file's, of one row."""
    # Of one length, as one program; zeros are padding in ours.
    rows = [np.pad(np.array([row]), ((0, 0), (0, 40 - len(row)))) for row in ids]
    return np.array(jax.nn.log_softmax(apply(config, params, *rows))[0, : len(ids[-1])])


@pytest.mark.parametrize(("name", "special"), [("gpt2", (1,)), ("llama", (1, 2, 3))])
def test_a_language_model(come_in, name, special):
    config, params, file, run = come_in(name)
    *never, end = special
    begin = never[-1] if never else end
    for text, scored in zip(TEXTS, run.log_probs(TEXTS), strict=True):
        ids = [*file.encode(text).ids, end]
        found = log_probs(config, params, [begin, *ids[:-1]])
        np.testing.assert_allclose(scored.log_probs, found[range(len(ids)), ids], atol=1e-4)
        assert scored.pieces == [file.id_to_token(i) for i in ids]
    if name == "gpt2":
        return
    continued = run.generate(TEXTS, extra_length=6, temperature=0.0, details=True)
    for text, found in zip(TEXTS, continued, strict=True):
        ids, new = [begin, *file.encode(text).ids], []
        while len(new) < 6 and end not in new:
            following = log_probs(config, params, [*ids, *new])[-1]
            following[never] = -np.inf
            new.append(int(following.argmax()))
        assert run.tokenizer.of_file[found.tokens].tolist() == new
    assert len({tuple(found.tokens) for found in continued}) > 1


def test_a_translator(come_in):
    config, params, file, run = come_in("marian")
    translated = run.translate(TEXTS, beam_size=1, extra_length=4, details=True)
    for text, found in zip(TEXTS, translated, strict=True):
        source, new = [*file.encode(text).ids, 1], []
        while 1 not in new:
            following = log_probs(config, params, source, [3, *new])[-1]
            following[[2, 3]] = -np.inf
            last = len(new) + 1 == len(source) + 4
            new.append(1 if last else int(following.argmax()))
        assert run.tokenizer.of_file[found.tokens].tolist() == new


def marked(file, *texts):
    """Tokens and token types of a row of BERT, and where the last text is."""
    ids, types, marks = [4], [0], [0]
    for number, text in enumerate(texts):
        more = [*file.encode(text).ids, 5]
        ids, types = ids + more, types + [number] * len(more)
        marks += [int(number == len(texts) - 1)] * (len(more) - 1) + [0]
    return tuple(np.array([row]) for row in (ids, types, marks))


def test_a_classifier(come_in):
    config, params, file, run = come_in("labels")
    assert run.config.data.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    for text, found in zip(TEXTS, run.predict(TEXTS), strict=True):
        expected = jax.nn.softmax(apply(config, params, *marked(file, text))[0])
        np.testing.assert_allclose(list(found.probabilities.values()), expected, atol=1e-4)
        assert found.label == f"LABEL_{expected.argmax()}"


def test_a_regression(tmp_path):
    config, params, file = foreign("number", tmp_path / "source")
    run, back, tokenizer = read(tmp_path / "source")
    ids, *others = marked(file, TEXTS[0])
    ours = np.array([[BOS, *tokenizer.encode(TEXTS[0]), EOS]])
    expected = apply(config, params, ids, *others)
    assert (run.task, run.data.labels, expected.shape) == ("regression", (), (1,))
    np.testing.assert_allclose(apply(run, back, ours, *others), expected, atol=1e-4)


def test_one_who_answers(come_in):
    config, params, file, run = come_in("span", max_length=220)
    question, context = TEXTS[0], f"{TEXTS[1]} {TEXTS[2]}"
    [answer] = run.predict([(question, context)])
    logits = apply(config, params, *marked(file, question, context))[0]
    before = 1 + len(file.encode(question).ids) + 1
    offsets = file.encode(context).offsets
    # Beginning and end of the best span of the context.
    count = len(offsets)
    both = logits[0, before : before + count, None] + logits[1, None, before : before + count]
    first, last = np.unravel_index(np.triu(both).argmax(), both.shape)
    assert (answer.start, answer.end) == (offsets[first][0], offsets[last][1])
    assert answer.text == context[answer.start : answer.end]


# The tokenizer.


def test_pieces_are_those_of_the_file(tmp_path):
    file = byte_level(tmp_path, ("<s>", "</s>"))
    tokenizer = JsonTokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.absent == (PAD, UNK, MASK)
    ids = tokenizer.encode("a red dog")
    assert tokenizer.pieces(ids) == file.encode("a red dog").tokens
    assert tokenizer.pieces([PAD, UNK, BOS, EOS, MASK]) == [
        "<pad>",
        "<unk>",
        "<s>",
        "</s>",
        "<mask>",
    ]
    assert tokenizer.pieces([]) == []
    assert not {BOS, EOS} & {*tokenizer.encode("</s> is no end<s>")}
    assert tokenizer.decode([BOS, *ids, EOS, PAD]) == "a red dog"
    assert tokenizer.pieces(np.array(ids)) == tokenizer.pieces(ids)


@pytest.mark.parametrize(
    ("pair", "count"),
    [
        ("<s> $A </s> </s> $B </s>", 2),
        ("<s> $A </s> $B </s>", 1),
        (None, 1),
    ],
)
def test_how_many_eos_stand_between_two_texts(tmp_path, pair, count):
    """As RoBERTa has two, and files that put none between leave it to us."""
    import tokenizers

    file = byte_level(tmp_path, ROBERTA)
    if pair is not None:
        file.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer = JsonTokenizer(file.to_str().encode())
    assert tokenizer.separators == count
    config = model_config("classification", vocabulary_size=tokenizer.vocabulary_size)
    config = set_field(config, "data.fields", ("one", "other"))
    rows = LabelledRows(row_of(config), tokenizer, [Example(None, ("a", "dog"), None)], 24)
    first, second = tokenizer.encode("a"), tokenizer.encode("dog")
    expected = [BOS, *first, *[EOS] * count, *second, EOS]
    assert rows.lengths.tolist() == [len(expected)]
    row = rows.row(0, 13)["tokens"]
    assert row.tolist() == expected + [PAD] * (13 - len(expected))
    if count == 2:
        assert tokenizer.of_file[expected].tolist() == file.encode("a", "dog").ids
