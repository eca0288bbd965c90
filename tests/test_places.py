"""Names of places: local ones, those in buckets, and those that are refused."""

import sys
from pathlib import Path

import pytest

from mhe_jax.config import InputError
from mhe_jax.config.files import cache_directory
from mhe_jax.config.places import path_of, source_path


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
    ("read", "name"),
    [
        (path_of, "s3://bucket/run"),
        (path_of, "gs:///run"),
        (path_of, "gs://bucket/a/../b"),
        (path_of, "http://host/run"),
        (lambda name: source_path("data", name), "hdfs://host/a"),
        (lambda name: source_path(name, "a.txt"), "https://host/a"),
        (cache_directory, "gs://bucket/a"),
    ],
)
def test_what_cannot_be_a_place_is_refused(read, name):
    with pytest.raises(InputError, match=rf"^(data\.cache_directory=)?{name}.*: .*takes ") as error:
        read(name)
    assert "\n" not in str(error.value)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    with pytest.raises(
        InputError, match=r"^gs://bucket/run needs google.cloud.storage: .*\[cloud\]"
    ):
        path_of("gs://bucket/run")
