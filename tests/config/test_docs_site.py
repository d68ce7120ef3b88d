"""The documentation as a site: it builds without a warning, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from urllib.parse import unquote

import pytest
from conftest import ROOT

pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = ["bash", str(ROOT / "run_scripts/docs.sh"), "build", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHON": sys.executable, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def html(site, name):
    return (site / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_site_and_its_menu(site):
    pages = [page.stem for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    menu = html(site, "index.html").partition("<article")[0]
    for page in pages:
        assert (site / f"{page}.html").is_file()
        assert f'href="{page}.html"' in menu


def test_links_lead_to_files_and_anchors(site):
    wrong = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links begin at the root of a server
            continue
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r'<a [^>]*?href="([^"]+)"', text):
            path, _, anchor = unquote(unescape(link)).partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = (page.parent / path).resolve() if path else page
            found = target.is_file() and (
                not anchor
                or anchor.startswith("__")
                or f'id="{anchor}"' in target.read_text(encoding="utf-8")
            )
            if not found:
                wrong.append(f"{page.name}: {link}")
    assert wrong == []


def test_linked_files_of_the_repository_are_copied(site):
    config = html(site, "config.html")
    assert 'href="repository/lavis_mafa/configs/models/albef_mafa_base.yaml.txt"' in config
    assert (site / "repository/examples/method.ipynb").is_file()
    assert "../lavis_mafa" not in config


def test_reference_documents_the_listed_modules(site):
    api = html(site, "api.html")
    for name in (
        "algorithm.step.run_step",
        "algorithm.mining.MiningRule.high",
        "algorithm.grit.schedule.GritSchedule.collect",
        "models.loading.load_model",
    ):
        assert f'id="lavis_mafa.{name}"' in api, name


def test_nothing_is_loaded_from_other_servers(site):
    page = html(site, "index.html")
    assert re.findall(r'(?:src|<link[^>]*href)="(https?:[^"]+)"', page) == []
