"""What the site has beside the pages of docs/, and where links between files lead in it.

README.md, CONTRIBUTING.md and the pages of experiments/ lie where a reader of the repository looks
for them. Here they become pages, as notebooks do, and the files that a page names become files of
the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# By their place in the repository, the pages that lie outside of docs/.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "experiments/README.md": "experiments/index.md",
} | {
    (place := f"experiments/{path.parent.name}/{path.name}"): place.replace("/README", "")
    for path in sorted((ROOT / "experiments").glob("*/*.md"))
}
NOTEBOOKS = {
    f"docs/notebooks/{path.name}": f"notebooks/{path.stem}.md"
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
}
FILES = {
    path: posixpath.join("files", path)
    for path in ("docker/gpu.Dockerfile", "docker/tpu.Dockerfile")
}
# A link to another file, with its text; the place within the file, if any, stands apart.
LINK = re.compile(r"\[([^]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path, place in [*PAGES.items(), *FILES.items()]:
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for path, place in NOTEBOOKS.items():
        text = notebook((ROOT / path).read_text(encoding="utf-8"))
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    text = linked(markdown, page.file.src_uri)
    if page.file.src_uri in NOTEBOOKS.values():
        file = f"{Path(page.file.src_uri).stem}.ipynb"
        title, rest = text.split("\n", 1)
        text = f"{title}\n\n[{file}]({file}) is this page as a notebook.\n{rest}"
    return text


def notebook(text: str) -> str:
    """The cells of a notebook as one page, code in fences, each with its outputs below."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if image := data.get("image/png"):
                image = "".join(image).replace("\n", "")
                parts.append(f"![What the cell draws](data:image/png;base64,{image})")
            elif said := "".join(output.get("text") or data.get("text/plain", ())):
                parts.append(f"```text\n{said.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def linked(markdown: str, page: str) -> str:
    """A page's text with links that lead to pages and files of the site.

    One to a directory or a record becomes its text. What else is not in the site stays, for MkDocs
    to refuse.
    """
    origin = {place: path for path, place in PAGES.items()}.get(page, f"docs/{page}")
    here = posixpath.dirname(f"docs/{page}")

    def link(found: re.Match) -> str:
        text, target, within = found.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if (ROOT / path).is_dir() or path.startswith("experiments/") and path not in PAGES:
            return text
        place = PAGES.get(path) or NOTEBOOKS.get(path) or FILES.get(path)
        path = f"docs/{place}" if place else path
        return f"[{text}]({posixpath.relpath(path, here)}{within or ''})"

    return LINK.sub(link, markdown)
