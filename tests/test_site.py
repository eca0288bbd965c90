"""Links between the pages lead somewhere, in the repository and in the site; no page is left out.

`make site` builds the site itself, and refuses what leads nowhere in it.
"""

import importlib.util
import re
from pathlib import Path

import mutants
import pytest
from test_docs import NAVIGATION

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
assert SPEC is not None
assert SPEC.loader is not None
pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pages)

TEXTS = [*pages.PAGES, *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("**/*.md")))]


def anchors(text: str) -> set[str]:
    """Names of the headings of a page, as code hosts and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    words = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", word.lower()).replace(" ", "-") for word in words}


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_of_a_page_leads_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert {*re.findall(r"\]\(#([^)\s]+)\)", text)} <= anchors(text)
    for _, target, within in pages.LINK.findall(text):
        path = (ROOT / name).parent / target
        assert path.exists(), target
        assert not within or within[1:] in anchors(path.read_text(encoding="utf-8")), within


def test_every_page_is_in_the_navigation_once():
    found = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").glob("**/*.md")}
    made = {*pages.PAGES.values(), *pages.NOTEBOOKS.values()}
    assert sorted(NAVIGATION) == sorted(found | made)


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("index.md", "[a](docs/fit.md#the-largest-batch)", "[a](fit.md#the-largest-batch)"),
        ("experiments/fit.md", "[one](records/stored_v5e.json)", "one"),
        ("experiments/fit.md", "[a](../../docs/fit.md#here)", "[a](../fit.md#here)"),
        ("pods.md", "[a](../docker/tpu.Dockerfile)", "[a](files/docker/tpu.Dockerfile)"),
        ("fit.md", "[a](runs.md) [b](#here) [c](https://x.org/y.md)", None),
        ("fit.md", "[a](../setup.py)", "[a](../setup.py)"),  # MkDocs refuses it
    ],
)
def test_a_link_leads_to_the_same_page_of_the_site(page, link, there):
    assert pages.linked(link, page) == (there or link)


def test_the_stops_of_the_walks_are_there():
    """A function, class or method of each name is defined in its file."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    stops = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    assert len(stops) > 20
    for file, name in stops:
        mutants.span((ROOT / "mhe_jax" / file).read_text(encoding="utf-8"), name)
