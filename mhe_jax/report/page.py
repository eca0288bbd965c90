"""One HTML page that needs nothing else: its style, its script and its pictures are inside."""

import base64
import html
from collections.abc import Sequence
from typing import NamedTuple

from mhe_jax.report.tables import Table

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de;
        --head: #f3f5f7; --hover: #f8fafc; --link: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181d; --text: #e3e8ee; --soft: #9aa5b1; --line: #343c45; --head: #20262d;
          --hover: #1b2127; --link: #6cb0ff; }
  img { filter: invert(.92) hue-rotate(180deg); }  /* a white picture turns dark, blue stays blue */
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
       max-width: 1400px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: .2rem; }
h2 { font-size: 1.3rem; margin-top: 2.6rem; border-bottom: 1px solid var(--line); }
h2, h3 { overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
a { color: var(--link); }
nav a { display: inline-block; margin-right: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: left;
         vertical-align: top; }
th { background: var(--head); vertical-align: bottom; }
/* The name of a row stays in sight when a wide table moves. */
tr > :first-child { position: sticky; left: 0; max-width: 22rem; overflow-wrap: break-word; }
td:first-child { background: var(--back); }
.number, .number button { text-align: right; }
td.number { white-space: nowrap; }
tbody tr:hover, tbody tr:hover td { background: var(--hover); }
th button { all: unset; cursor: pointer; font-weight: 600; display: block; width: 100%; }
th button:focus-visible { outline: 2px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\25B2"; font-size: .7em; }
th[aria-sort=descending] button::after { content: " \\25BC"; font-size: .7em; }
.note, .about, figcaption { color: var(--soft); font-size: 13px; margin: .4rem 0;
                            max-width: 70rem; }
figure { margin: 1.6rem 0; }
/* A picture is never too small to be read: it moves, as a wide table does. */
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
.scroll img { min-width: 40rem; }
/* Side by side as far as there is room. */
.atlas { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
         gap: 0 1.5rem; }
.atlas figure { margin: 1.2rem 0 .6rem; }
.plot { position: relative; }
.plot img { display: block; width: 100%; }
.spot { position: absolute; width: 1.3rem; height: 1.3rem; border-radius: 50%;
        transform: translate(-50%, -50%); }
.spot::after { content: attr(aria-label); display: none; position: absolute; top: 100%; left: 50%;
               width: max-content; max-width: min(16rem, 46vw);
               padding: .3rem .6rem; border-radius: 6px; font-size: 13px;
               white-space: pre-line; overflow-wrap: anywhere;
               color: var(--back); background: var(--text); }
.spot.right::after { left: auto; right: 50%; }
.spot:hover, .spot:focus-visible { z-index: 1; outline: 2px solid var(--link); }
.spot:hover::after, .spot:focus::after { display: block; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin: 0;
          padding: 0; font-size: 14px; overflow-wrap: anywhere; }
.legend li { display: flex; align-items: flex-start; gap: .3rem; }
.legend img { flex: none; background: #fff; border-radius: 4px; }
@media (max-width: 40rem) {
  tr > :first-child { max-width: 9rem; min-width: 6rem; overflow-wrap: anywhere; }
}
"""


class Picture(NamedTuple):
    """Without `svg` the caption says why; a spot is % from the left, from the top, and a text."""

    caption: str
    svg: str = ""
    spots: Sequence[tuple[float, float, str]] = ()


class Atlas(NamedTuple):
    """Pictures side by side with one legend: (SVG of the mark, name)."""

    pictures: Sequence[Picture]
    legend: Sequence[tuple[str, str]]
    note: str


class Part(NamedTuple):
    """A part of the page: an atlas, tables, and pictures of the first table, which follow it."""

    title: str
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()
    atlas: Atlas | None = None


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
# A click sorts by the column: up, then down. Cells without a number stay last.
SCRIPT = """
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    const key = row => row.cells[head.cellIndex];
    const empty = row => key(row).textContent === "-";
    const order = (a, b) => {
      if (empty(a) || empty(b)) return empty(a) - empty(b);
      const [x, y] = [key(a).dataset.value, key(b).dataset.value];
      const sign = down ? -1 : 1;
      if (x !== undefined && y !== undefined) return sign * (x - y);
      return sign * key(a).textContent.localeCompare(key(b).textContent);
    };
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...[...body.rows].sort(order));
  });
}
"""


def page(title: str, about: str, parts: Sequence[Part]) -> str:
    """The page, with all its texts escaped."""
    links = "".join(
        f'<a href="#part{number}">{html.escape(part.title)}</a>'
        for number, part in enumerate(parts, 1)
    )
    body = []
    for number, part in enumerate(parts, 1):
        body.append(f'<h2 id="part{number}">{html.escape(part.title)}</h2>')
        if part.atlas:
            body.append(_atlas(part.atlas))
        shown = [table.html() for table in part.tables]
        body += [*shown[:1], *(_figure(each, "scroll") for each in part.pictures), *shown[1:]]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Nothing from a network: the browser itself refuses it, even an icon.
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            f"<h1>{html.escape(title)}</h1>\n<p class=about>{html.escape(about)}</p>",
            f"<nav>{links}</nav>",
            *body,
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _atlas(atlas: Atlas) -> str:
    legend = "".join(f"<li>{_image(svg)}{html.escape(name)}</li>" for svg, name in atlas.legend)
    figures = "\n".join(_figure(picture, "plot") for picture in atlas.pictures)
    return (
        f"<div class=atlas>\n{figures}\n</div>\n<ul class=legend>{legend}</ul>\n"
        f"<p class=note>{html.escape(atlas.note)}</p>"
    )


def _figure(picture: Picture, kind: str) -> str:
    spots = "".join(
        f'<span class="spot{" right" if left > 50 else ""}" tabindex=0 role=img '
        f'style="left:{left:.2f}%;top:{top:.2f}%" aria-label="{html.escape(text)}"></span>'
        for left, top, text in picture.spots
    )
    image = _image(picture.svg, picture.caption) if picture.svg else ""
    return (
        f"<figure><div class={kind}>{image}{spots}</div>"
        f"<figcaption>{html.escape(picture.caption)}</figcaption></figure>"
    )


def _image(svg: str, text: str = "") -> str:
    # As an image, so that names inside one picture mean nothing to another.
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{data}">'
