"""The report in a real browser, without a network: pictures are there, tables sort."""

import json
import re
import shutil
import subprocess

import pytest

from mhe_jax.report import plots
from mhe_jax.report.page import Atlas, Part, Picture, page
from mhe_jax.report.tables import Column, Table

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
# Runs after the page's own script; what it finds stands in the page that the browser gives back.
PROBE = """
<pre id="found"></pre>
<script>
window.addEventListener("load", () => {
  const first = () => [...document.querySelectorAll("tbody tr")].map(r => r.cells[0].textContent);
  const head = n => document.querySelectorAll("th")[n];
  const sorted = [];
  for (const n of [0, 1, 1, 2, 2]) {
    head(n).querySelector("button").click();
    sorted.push([n, head(n).getAttribute("aria-sort"), first()]);
  }
  const tops = () => [...document.querySelectorAll(".atlas figure")].map(f => f.offsetTop);
  const beside = tops();
  document.body.style.width = "360px";
  const below = tops();
  document.body.style.width = "";
  const spots = [...document.querySelectorAll(".spot")].slice(0, 2).map(spot => {
    const hidden = getComputedStyle(spot, "::after").display;
    spot.focus();
    const style = getComputedStyle(spot, "::after");
    const [box, mark] = [spot.parentElement, spot].map(e => e.getBoundingClientRect());
    const left = ((mark.left + mark.right) / 2 - box.left) / box.width;
    const top = ((mark.top + mark.bottom) / 2 - box.top) / box.height;
    return [hidden, style.display, style.content, left, top];
  });
  const images = [...document.images].map(i => [i.complete, i.naturalWidth, i.width, i.height]);
  const resources = performance.getEntriesByType("resource").map(r => r.name);
  const found = {
    sorted, images, beside, below, spots,
    resources: resources.filter(name => !name.startsWith("data:")),
    arrow: getComputedStyle(head(2).querySelector("button"), "::after").content,
    wide: document.documentElement.scrollWidth > window.innerWidth,
  };
  document.getElementById("found").textContent = JSON.stringify(found);
});
window.addEventListener("error", e => { document.title = "error: " + e.message; });
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome: apt-get install chromium")
def test_in_a_browser(tmp_path):
    table = Table(
        "t",
        "A table",
        [Column("name"), Column("number", 1), Column("count", 0)],
        [["b", 10.04, 1200], ["c", None, 3], ["a", 9.96, None], ["d", 1000.0, 45]],
        ["A note."],
    )
    memory = {"forward": {"a": {8: 1e6, 16: 2e6}}, "with gradients": {"a": {8: 3e6, 16: 5e6}}}
    picture = plots.svg(plots.memory_figure(memory))
    spots = [(25.0, 50.0, 'a "quoted" name\nbleu: 3'), (75.0, 50.0, "b")]
    atlas = Atlas([Picture("One.", picture, spots)] * 3, [(picture, "<b>")], "A note.")
    text = page("Title", "About.", [Part("Part", [table], [Picture("A picture.", picture)], atlas)])
    file = tmp_path / "page.html"
    file.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1300,900",
            "--virtual-time-budget=3000",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert "<title>Title</title>" in done.stdout
    match = re.search(r'<pre id="found">(.+?)</pre>', done.stdout)
    assert match is not None, done.stdout[-2000:]
    found = json.loads(match[1])
    assert found["resources"] == []
    *beside, mark, big = found["images"]
    assert len(beside) == 3
    for complete, natural, width, height in (*beside, big):
        assert complete
        assert natural > 500
        assert width > (500 if height > 200 else 350)
    assert mark[0]
    assert big[2] > 500
    # Three in a row, one below the other on a narrow screen.
    assert len({*found["beside"]}) == 1
    assert len({*found["below"]}) == 3
    first, second = found["spots"]
    assert first[:3] == ["none", "block", '"a \\"quoted\\" name\\a bleu: 3"']
    assert first[3:] == pytest.approx([0.25, 0.5], abs=0.01)
    assert second[3:] == pytest.approx([0.75, 0.5], abs=0.01)
    # As texts, then as numbers: 9.96 before 10.04, 1,200 after 45; what is missing stays last.
    assert found["sorted"] == [
        [0, "ascending", ["a", "b", "c", "d"]],
        [1, "ascending", ["a", "b", "d", "c"]],
        [1, "descending", ["d", "b", "a", "c"]],
        [2, "ascending", ["c", "d", "b", "a"]],
        [2, "descending", ["b", "d", "c", "a"]],
    ]
    assert "\u25bc" in found["arrow"]
    assert not found["wide"]


def test_a_tall_legend_leaves_the_axes_their_size():
    """Warnings are errors, and matplotlib warns where it can lay out no axes."""
    heights = []
    for count in (1, 60):
        lines = {f"{'long name ' * 9}{number}": {128: 1.0, 256: 2.0} for number in range(count)}
        figure = plots.memory_figure({"forward": lines})
        figure.draw_without_rendering()
        heights.append(figure.axes[0].get_window_extent().height)
    assert heights[1] == pytest.approx(heights[0], rel=0.1)


def test_many_groups_look_different():
    lines = {f"group {number}": {128: 1.0, 256: 2.0} for number in range(40)}
    drawn = plots.memory_figure({"forward": lines}).axes[0].get_lines()
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == len(lines)
