"""Names of places: local ones, those in buckets, and those that are refused."""

import sys
from pathlib import Path

import pytest

from mhe_jax.config import Config, DataConfig, InputError
from mhe_jax.config.fields import set_field
from mhe_jax.config.files import cache_directory
from mhe_jax.config.places import path_of, source_path
from mhe_jax.config.rules import check


def test_local_names_stay_paths():
    for name in ("runs/a", "/runs/a", "a:b", "gs:/a", "tfds:glue/cola:train"):
        assert path_of(name) == Path(name)
        assert type(path_of(name)) is type(Path())
    assert source_path("data", "a.txt") == Path("data/a.txt")
    assert source_path("~", "a.txt") == Path("~/a.txt").expanduser()


def test_names_in_buckets_keep_their_scheme(gs, s3):
    place = path_of(f"{gs}/runs") / "a" / "config.json"
    assert str(place) == f"{place}" == f"{gs}/runs/a/config.json"
    assert (place.name, str(place.parent.parent)) == ("config.json", f"{gs}/runs")
    assert path_of(place) is place
    for directory, name in [(s3, "a.txt"), (f"{s3}/", "a.txt"), ("data", f"{s3}/a.txt")]:
        assert str(source_path(directory, name)) == f"{s3}/a.txt"
    assert source_path(gs, "/local/a.txt") == Path("/local/a.txt")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("workdir", "s3://bucket/run", "a local path or gs://bucket/name"),
        ("workdir", "http://host/run", "a local path or gs://bucket/name"),
        ("workdir", "file:///run", "a local path or gs://bucket/name"),
        ("train.init_from", "s3://bucket/run", "a local path or gs://bucket/name"),
        ("data.train", ("hdfs://host/a",), "a local path or gs://bucket/name or s3://bucket/name"),
        ("data.validation", ("GS://bucket/a",), "or s3://bucket/name"),
        ("data.directory", "https://host/a", "or s3://bucket/name"),
        ("data.cache_directory", "gs://bucket/a", "takes a local path"),
        ("evaluation.sources", ("ftp://host/a",), "or s3://bucket/name"),
    ],
)
def test_any_other_scheme_is_refused(field, value, allowed):
    config = Config(task="lm", data=DataConfig(train=("a.txt",)))
    name = value if isinstance(value, str) else value[0]
    with pytest.raises(InputError) as error:
        check(set_field(config, field, value))
    scheme = name.partition(":")[0]
    assert str(error.value).startswith(f"{field}={name}: {scheme}:// is not supported here: takes ")
    assert str(error.value).endswith(allowed)


def test_a_url_without_a_bucket_is_refused():
    with pytest.raises(InputError, match="names no bucket: takes gs://bucket/name"):
        path_of("gs:///run")
    for name in ("gs:/bucket/run", "gs:bucket/run"):  # else a local directory of that name
        with pytest.raises(InputError, match=f"^workdir={name}: names no bucket: takes gs://b"):
            check(Config(task="lm", workdir=name, data=DataConfig(train=("a.txt",))))


def test_a_url_does_not_go_up():
    for directory, name in [("", "gs://bucket/a/../b"), ("s3://bucket/a", "../b")]:
        with pytest.raises(InputError, match=r"/a/\.\./b: takes a name without \.\.$"):
            source_path(directory, name)
    for name in ("gs://bucket/..", "gs://bucket/a/.."):
        with pytest.raises(InputError, match=r"\.\.: takes a name without \.\.$"):
            path_of(name)


def test_a_cache_is_local(monkeypatch):
    monkeypatch.setenv("MHE_JAX_CACHE", "gs://bucket/cache")
    with pytest.raises(InputError, match="gs:// is not supported here: takes a local path$"):
        cache_directory()


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    with pytest.raises(
        InputError, match=r"^gs://bucket/run needs google.cloud.storage: .*\[cloud\]"
    ):
        path_of("gs://bucket/run")
