"""What the demo shows of itself at its end."""

import json

import pytest

from mhe_jax.cli import commands
from mhe_jax.config import InputError
from mhe_jax.data import open_source


def evaluated(place, sources):
    scores = {"bleu": 90.0, "exact_match": 80.0, "sources": sources}
    (place / "eval_test.json").write_text(json.dumps(scores))
    text = "".join(f"{german}\n" for _, german in open_source(["demo:test"], "pair"))
    (place / "test.hypotheses.txt").write_text(text)


@pytest.mark.parametrize(
    ("wanted", "status"),
    [("", 0), ("--bleu 90 --exact_match 80", 0), ("--bleu 90.1", 1), ("--exact_match 80.1", 1)],
)
def test_too_low_a_score_is_status_1(tmp_path, capsysbinary, wanted, status):
    evaluated(tmp_path, ["demo:test"])
    try:
        commands.main(["demo", str(tmp_path), *wanted.split()])
        ended = 0
    except SystemExit as stop:
        ended = stop.code
    assert ended == status
    out = capsysbinary.readouterr().out.decode()
    assert "\n90.0 BLEU and 80.0 % exact match" in out


def test_a_run_of_other_text_is_refused(tmp_path):
    for given in ("s3://bucket/run", str(tmp_path)):
        with pytest.raises(InputError, match=given):
            commands.main(["demo", given])
    evaluated(tmp_path, ["x.tsv"])
    with pytest.raises(InputError, match="demo:test"):
        commands.main(["demo", str(tmp_path)])
