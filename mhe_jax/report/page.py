"""One HTML page that needs nothing else: its style, its script and its pictures are inside."""

import base64
import html
from collections.abc import Sequence

from mhe_jax.report.tables import Table

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de;
        --head: #f3f5f7; --hover: #f8fafc; --link: #0969da; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181d; --text: #e3e8ee; --soft: #9aa5b1; --line: #343c45; --head: #20262d;
          --hover: #1b2127; --link: #6cb0ff; }
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
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
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
figure img { min-width: 40rem; max-width: 100%; height: auto; background: #fff;
             border-radius: 6px; }
@media (max-width: 40rem) {
  tr > :first-child { max-width: 9rem; min-width: 6rem; overflow-wrap: anywhere; }
}
"""
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


def page(
    title: str, about: str, parts: Sequence[tuple[str, Sequence[Table], Sequence[tuple[str, str]]]]
) -> str:
    """The page; each part has a title, tables, and pictures as (caption, SVG).

    Pictures come after the first table of a part, which they show.
    """
    links = "".join(
        f'<a href="#part{number}">{html.escape(name)}</a>'
        for number, (name, _, _) in enumerate(parts, 1)
    )
    body = []
    for number, (name, tables, pictures) in enumerate(parts, 1):
        body.append(f'<h2 id="part{number}">{html.escape(name)}</h2>')
        shown = [table.html() for table in tables]
        body += [*shown[:1], *(_figure(*picture) for picture in pictures), *shown[1:]]
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


def _figure(caption: str, svg: str) -> str:
    # As an image, so that names inside one picture mean nothing to another.
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<figure><div class=scroll><img alt="{html.escape(caption)}" '
        f'src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )
