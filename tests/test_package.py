"""The configs that come along, by their names; `make package` tries the wheel itself."""

from test_config import message

from mhe_jax.cli import commands
from mhe_jax.config import loading


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


def test_configs_are_listed_and_shown(capsysbinary):
    commands.main(["configs"])
    assert set(loading.shipped_configs()) <= {*capsysbinary.readouterr().out.decode().split()}
    commands.main(["configs", "show", "demo"])
    shown = capsysbinary.readouterr().out
    assert shown == loading.shipped_configs()["demo"].read_bytes()
