"""BLEU of a sample while training: of the right parameters, compiled once, by all processes."""

import itertools
from pathlib import Path

import pytest

from mhe_jax.config import InputError
from mhe_jax.config.files import METRICS
from mhe_jax.data import open_split
from mhe_jax.evaluation import TranslatedSample, load, translator
from mhe_jax.training import tracking
from mhe_jax.training.loop import train


@pytest.fixture
def scored(monkeypatch):
    """What was translated each time, and its references; a score that tells the times apart."""
    found = []

    def score(hypotheses, references, _):
        found.append((hypotheses, references))
        return {"bleu": 10.0 * len(found)}

    monkeypatch.setattr(translator, "translation_scores", score)
    return found


@pytest.mark.whole_run
def test_it_is_what_eval_translates_with_these_parameters(tiny, scored, capsys):
    changes = {"train.eval_translate": 5, "train.num_steps": 12}
    changes |= {"optimizer.ema_decay": 0.9, "optimizer.learning_rate": 0.03}
    config = tiny("translation", **changes)
    result = train(config, sample=TranslatedSample)
    assert [len(hypotheses) for hypotheses, _ in scored] == [5] * 4
    source = open_split(config, "validation")
    texts, references = zip(*itertools.islice(source, 5), strict=True)
    run = load(config.workdir, checkpoint="last", beam_size=1)
    assert scored[-1] == (run.translate(list(texts)), list(references))
    assert scored[-1][0] != scored[-2][0]
    lines = tracking.read(Path(config.workdir) / METRICS)
    bleu = [(line["step"], line["bleu"]) for line in lines if line["split"] == "validation"]
    assert bleu == [(step, step * 10 / 3) for step in (3, 6, 9, 12)]
    assert result["best_validation"]["bleu"] in (10.0, 20.0, 30.0, 40.0)
    assert "bleu 40" in capsys.readouterr().err


def test_a_call_that_has_no_search_is_one_line(tiny):
    config = tiny("translation", **{"train.eval_translate": 5})
    with pytest.raises(InputError, match=r"needs train\(config, sample=TranslatedSample\)"):
        train(config)
    assert not Path(config.workdir).exists()
