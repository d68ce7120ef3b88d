"""Hooks of MkDocs (mkdocs.yml): what pages written for GitHub need to work in the site as well."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
INDEX, API = "README.md", "api.md"
COPIES = "repository"  # folder of the site with the linked files of the repository
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)]*)?\)")
ROW = re.compile(r"^\| \[[^\]]*\]\(([\w./]+\.md)\)", re.MULTILINE)
MODULE = re.compile(r"^\| `(lavis_mafa[\w.]*)` \|", re.MULTILINE)
FENCE = re.compile(r"^(`{3,}).*?^\1`*\s*$", re.MULTILINE | re.DOTALL)


class KnownWarnings(logging.Filter):
    """Drop griffe's warning that `lavis_mafa.__all__` is computed, which does no harm here."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "lavis_mafa.__all__: EXPORTS" not in record.getMessage()


logging.getLogger("mkdocs.plugins.griffe").addFilter(KnownWarnings())


def on_config(config: Any) -> Any:
    """Order the pages as the table of the index does, and name anchors as GitHub does."""
    docs = Path(config.docs_dir)
    index = (docs / INDEX).read_text(encoding="utf-8")
    results = sorted(path.relative_to(docs).as_posix() for path in docs.glob("results/*.md"))
    config.nav = [INDEX, *ROW.findall(index), {"Tables of results": results}]
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files of the repository that pages link to."""
    linked = set()
    for page in files.documentation_pages():
        if "/" not in page.src_uri:
            text = FENCE.sub("", Path(page.abs_src_path).read_text(encoding="utf-8"))
            linked |= {target for _, target, _ in OUTSIDE.findall(text)}
    for target in sorted(linked):
        if (ROOT / target).is_file():
            content = (ROOT / target).read_text(encoding="utf-8")
            files.append(File.generated(config, copy_of(target), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link to the copies of files, and write the API reference of the listed modules."""
    if page.file.src_uri == API:
        modules = "\n\n".join(f"::: {name}" for name in MODULE.findall(markdown))
        markdown = f"{markdown}\n\n## Reference\n\n{modules}\n"
    return OUTSIDE.sub(_copy, markdown)


def copy_of(target: str) -> str:
    """Return the place in the site of a file of the repository."""
    # Browsers show a .txt and download most other files, which is right for a notebook only.
    return f"{COPIES}/{target}" + ("" if target.endswith(".ipynb") else ".txt")


def _copy(link: re.Match[str]) -> str:
    text, target, _ = link.groups()
    # A folder has no page of its own: its name remains.
    return f"[{text}]({copy_of(target)})" if (ROOT / target).is_file() else text
