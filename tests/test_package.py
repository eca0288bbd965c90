"""The configs that come along, by their names; `make package` tries the wheel itself."""

import pytest
from test_config import message

import mhe_jax
from mhe_jax.cli import commands, configs
from mhe_jax.config import InputError, loading


def test_a_name_means_the_shipped_file(monkeypatch, tmp_path):
    file = loading.shipped_configs()["multi30k"]
    monkeypatch.chdir(tmp_path)
    assert loading.load_config("multi30k:small") == loading.load_config(f"{file}:small")
    assert loading.load_config("multi30k") != loading.load_config("multi30k:small")
    assert loading.about_config("multi30k:small")[0].startswith("Multi30k")


def test_a_wrong_name_suggests_the_right_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = message(loading.load_config, "multi3k")
    assert text == "no config file multi3k; did you mean multi30k?"
    assert "zzz" in message(loading.load_config, "zzz")
    assert "no variant 'smal'" in message(loading.load_config, "multi30k:smal")


def test_a_file_of_the_same_name_wins(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text("def get_config():\n    raise ValueError('mine')\n")
    assert "mine" in message(loading.load_config, "demo")


def test_configs_are_listed_and_shown(capsysbinary):
    commands.main(["configs"])
    lines = capsysbinary.readouterr().out.decode().splitlines()
    named = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[0] for line in named] == list(loading.shipped_configs())
    assert all(len(line.split()) > 3 for line in named)
    assert lines[lines.index(*(line for line in named if "wikitext2_lm" in line)) + 1].split() == [
        ":local",
        ":large",
    ]
    commands.main(["configs", "show", "demo"])
    shown = capsysbinary.readouterr().out
    assert shown == loading.shipped_configs()["demo"].read_bytes()


@pytest.mark.parametrize("arguments", [["--help"], ["show", "--help"], ["show", "-h"]])
def test_configs_explains_itself(arguments, capsys):
    commands.main(["configs", *arguments])
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("arguments", [["shw", "demo"], ["show"], ["show", "demo", "glue"]])
def test_configs_takes_nothing_else(arguments):
    assert "usage: " in message(configs.main, arguments)
    assert "did you mean demo?" in message(configs.main, ["show", "dmo"])


def test_the_version_is_that_of_the_package():
    assert mhe_jax.__version__.count(".") == 2
    assert issubclass(InputError, ValueError)
