"""Tokenizers lose nothing, keep text and control tokens apart, and are reproducible."""

import io
import random
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece
from text_for_tests import experiment, sentences, write_lines

from mhe_jax.config import InputError
from mhe_jax.data import (
    BOS,
    EOS,
    MASK,
    NUM_SPECIAL,
    PAD,
    UNK,
    Text,
    Tokenizer,
    train_tokenizer,
)
from mhe_jax.data import tokenizer as module
from mhe_jax.data.tokenizer_json import JsonTokenizer
from mhe_jax.tasks import check_sources, make_tokenizer


def items(lines):
    return [(Text.of("lines", [(line,) for line in lines]), 1.0)]


PARTS = [
    " ", "  ", "\t", "\n", "\r\n", "\0", "a", "haus", " groß", "ß", "é", "e\u0301", "語", "😀",
    "👩‍👩‍👧",
    "\u2581", "\u2581\u2581", "\ue000", "\ue001", "\ufffd", "\u2585", "\u2047", "\u00a0", "\u200b",
    "\ufeff", "<mask>", "</s>", "<s>", "<pad>", "<unk>", "<0x41>", "1", "...",
]  # fmt: skip


def test_lossless_for_any_text(tokenizer):
    draw = random.Random(0)
    texts = ["", *PARTS]
    texts += ["".join(draw.choices(PARTS, k=draw.randrange(12))) for _ in range(5000)]
    rows = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, rows, strict=True):
        assert tokenizer.decode(ids) == text
        assert all(NUM_SPECIAL <= i < tokenizer.vocabulary_size for i in ids)


def test_lossless_for_every_character(tokenizer):
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for start in range(0, len(characters), 997):
        text = " ".join(characters[start : start + 997])
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batches_and_threads_give_the_same(tokenizer):
    assert (PAD, UNK, BOS, EOS, MASK) == (0, 1, 2, 3, 4)
    assert tokenizer.decode([BOS, *tokenizer.encode("haus  und"), EOS, PAD, MASK]) == "haus  und"
    texts = [*sentences(200), "\u2581", ""]
    rows = tokenizer.encode_batch(texts, num_threads=-1)
    assert rows == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_deterministic_and_sized(tokenizer):
    again = train_tokenizer([(Text.of("words", [(x,) for x in sentences(300)]), 1.0)], 300)
    assert again.model == tokenizer.model
    assert again.key == tokenizer.key
    assert tokenizer.vocabulary_size == 300
    assert train_tokenizer(items(sentences(300)), 310).key != tokenizer.key


def test_vocabulary_that_does_not_fit_the_text():
    with pytest.raises(InputError, match="vocabulary_size=4: "):
        train_tokenizer(items(sentences(300)), 4)
    with pytest.raises(InputError, match=r"vocabulary_size=262: lines: .* \d+$") as low:
        train_tokenizer(items(sentences(300)), 262)
    with pytest.raises(
        InputError, match=r"vocabulary_size=9000: lines: .*vocabulary_size \d+, or less$"
    ) as high:
        train_tokenizer(items(sentences(300)), 9000)
    least = int(re.search(r"(\d+)$", str(low.value))[1])
    most = int(re.search(r"(\d+), or less$", str(high.value))[1])
    for size in (least, most):
        assert train_tokenizer(items(sentences(300)), size).vocabulary_size == size
    with pytest.raises(InputError, match="lines: has no text"):
        train_tokenizer(items(["", " "]), 300)


def test_no_text_is_lost_to_a_reserved_character(tokenizer):
    """sentencepiece itself leaves out each text that has one."""
    lines = [f"{line}\u2585" for line in sentences(300)]
    found = train_tokenizer(items(lines), 300)
    assert len({*found.vocabulary} & {*tokenizer.vocabulary}) > 290
    assert found.decode(found.encode(lines[0])) == lines[0]


def test_large_text_is_sampled_everywhere():
    lines = [f"line {i}" for i in range(20_000)]
    ((text, _),) = items(lines)
    sample = list(module.sample_text(text, 20_000))
    assert 18_000 <= sum(map(len, sample)) < 22_000
    numbers = [int(line.split()[1]) for line in sample]
    assert numbers == sorted(numbers)
    np.testing.assert_allclose(np.histogram(numbers, 4)[0] / len(numbers), 0.25, atol=0.03)
    assert sample == list(module.sample_text(text, 20_000))
    assert list(module.sample_text(text, 1 << 20)) == lines


def test_a_sample_is_in_proportion_to_the_weights(monkeypatch):
    """So only their ratio counts."""
    monkeypatch.setattr(module, "SAMPLE_BYTES", 20_000)
    (one, _), (other, _) = (*items(sentences(2000, 1)), *items(sentences(2000, 2)))
    found = [
        train_tokenizer([(one, a), (other, b)], 300).key for a, b in ((1, 2), (10, 20), (2, 1))
    ]
    assert found[0] == found[1] != found[2]


def test_saved_and_loaded(tokenizer, tmp_path):
    path = tmp_path / "deep" / "tokenizer.model"
    tokenizer.save(path)
    assert Tokenizer.load(path).encode("haus") == tokenizer.encode("haus")
    assert path.read_bytes() == tokenizer.model
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.model"]


def trained(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(300)),
        model_writer=model,
        model_type="bpe",
        minloglevel=3,
        **{"vocab_size": 100, "pad_id": PAD, "unk_id": UNK, "bos_id": BOS, "eos_id": EOS} | options,
    )
    return model.getvalue()


def test_a_foreign_model_is_refused(tokenizer, tmp_path):
    (tmp_path / "no.model").write_bytes(b"nothing")
    for name, said in (("no", "is not a sentencepiece model"), ("none", "no such file")):
        with pytest.raises(InputError, match=f"{name}.model: {said}"):
            Tokenizer.load(tmp_path / f"{name}.model")
    for model, said in (
        (trained(pad_id=3, unk_id=0, bos_id=1, eos_id=2), "pieces 0 to 4"),
        (trained(control_symbols=["<mask>"]), "has no piece for some bytes"),
        (tokenizer.model.replace("\u2581".encode(), b"\xe2\x96 "), "not a sentencepiece model"),
    ):
        with pytest.raises(InputError, match=said):
            Tokenizer(model)


def test_no_offsets_where_the_text_is_changed():
    """Here by as many bytes more as fewer."""
    model = trained(
        vocab_size=300,
        pad_piece="<pad>",
        control_symbols=["<mask>"],
        normalization_rule_name="nfkc",
        remove_extra_whitespaces=False,
        byte_fallback=True,
    )
    changing = Tokenizer(model, "given.model")
    assert changing.offsets("haus", changing.encode("haus"))[-1, 1] == 4
    text = "e\u0301 " * 3 + "\u00bd"  # each letter with its accent becomes one, a half becomes 1/2
    assert len(changing.decode(changing.encode(text)).encode()) == len(text.encode())
    with pytest.raises(InputError, match="given.model"):
        changing.offsets(text, changing.encode(text))


def test_the_tokenizer_of_a_run(tokenizer, tmp_path):
    write_lines(tmp_path / "a.txt", sentences(300))
    config = experiment(tmp_path, "lm", train=("a.txt",))
    made = make_tokenizer(config, tmp_path / "run" / "tokenizer.model")
    assert made.model == tokenizer.model
    # A run that resumes keeps what it has.
    write_lines(tmp_path / "a.txt", sentences(300, seed=1))
    assert make_tokenizer(config, tmp_path / "run" / "tokenizer.model").key == made.key
    train_tokenizer(items(sentences(300)), 310).save(tmp_path / "given.model")
    config = experiment(tmp_path, "lm", train=("a.txt",), tokenizer="given.model")
    for use in (check_sources, lambda config: make_tokenizer(config, tmp_path / "run.model")):
        with pytest.raises(InputError, match="given.model: has 310 pieces"):
            use(config)
    assert not (tmp_path / "run.model").exists()


# Words whose characters are composed, decomposed, dropped, or become several.
WORDS = ["haus", "서울", "café", "\ufb01ne", "İzmir", "\u00bd", "ｶﾞｽ", "ที่นี่", "❤\ufe0f"]
WORDS += ["👩\u200d👩\u200d👧", "q\u0323\u0307", "ΣΑΣ", "\u0301a", "ﷺ", "don't", "日本"]
FORMS = ("NFC", "NFD", "NFKC", "NFKD")


def json_tokenizer(t, normalizer, kind):
    special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    trainer, split = t.trainers.BpeTrainer, t.pre_tokenizers.Metaspace()
    options, model = {"limit_alphabet": 40}, t.models.BPE(unk_token="<unk>")
    if kind == "bytes":
        split = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
        options, model = {"initial_alphabet": split.alphabet()}, t.models.BPE()
    elif kind == "fallback":
        special = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        model = t.models.BPE(unk_token="<unk>", byte_fallback=True)
    elif kind == "words":
        trainer, split = t.trainers.WordPieceTrainer, t.pre_tokenizers.BertPreTokenizer()
        model = t.models.WordPiece(unk_token="<unk>")
    made = t.Tokenizer(model)
    made.normalizer, made.pre_tokenizer = normalizer, split
    trainer = trainer(vocab_size=330, special_tokens=special, show_progress=False, **options)
    texts = [unicodedata.normalize(form, f"der {word} ist") for word in WORDS for form in FORMS]
    made.train_from_iterator(texts, trainer)
    made.enable_truncation(2)  # is ignored
    return JsonTokenizer(made.to_str().encode())


@pytest.mark.parametrize("kind", ["pieces", "bytes", "fallback", "words"])
def test_the_tokens_of_a_word_lead_back_to_it(kind):
    t = pytest.importorskip("tokenizers")
    n = t.normalizers
    normalizers = [n.Sequence([]), n.NFC(), n.NFKD(), n.BertNormalizer(lowercase=True)]
    normalizers.append(n.Sequence([n.NFD(), n.StripAccents(), n.Strip()]))
    if kind != "words":  # no spaces would be left there to split at
        spaces = (n.Prepend("\u2581"), n.Replace(" ", "\u2581"))
        normalizers.append(n.Sequence([n.NFKC(), *spaces]))
    for normalizer in normalizers:
        made = json_tokenizer(t, normalizer, kind)
        for word in (unicodedata.normalize(form, word) for word in WORDS for form in FORMS):
            for text in (f"der  {word} ist", f"{word} ist", f"der {word}"):
                ids, begin = made.encode(text), text.index(word)
                offsets = made.offsets(text, ids)
                assert offsets.shape == (len(ids), 2)
                end = begin + len(word)
                inside = np.flatnonzero((offsets[:, 1] > begin) & (offsets[:, 0] < end))
                found = text[offsets[inside[0], 0] : offsets[inside[-1], 1]]
                assert found.strip() == word, (normalizer, text)
