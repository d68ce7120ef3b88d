"""README.md, CONTRIBUTING.md and docs/: links resolve, commands and configs exist, code runs,
figures are those of the recorded results, and the rooms import as CONTRIBUTING.md says.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import budget
import lavis
import pytest
import torch
from conftest import ROOT
from omegaconf import OmegaConf
from simulated_gpu import host_waits
from typed_commands import refusal

from lavis_mafa.cli import COMMANDS
from lavis_mafa.io.project_files import project_file
from lavis_mafa.settings import ConfigError, load_config

sys.path.append(str(Path(__file__).resolve().parent / "settings"))
from shipped import required_options  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {
    page: page.read_text(encoding="utf-8") for page in [*PAGES, *ROOT.glob("docs/results/*.md")]
}
FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1`*\s*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PACKAGE = ROOT / "lavis_mafa"


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(text, language):
    return [code for _, found, code in FENCE.findall(text) if found == language]


# Links


def anchors(text):
    """Return the anchors of a page as GitHub names them, and its ids."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.append(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    repeated = [f"{one}-{found[:n].count(one)}" for n, one in enumerate(found) if one in found[:n]]
    return {*found, *repeated, *re.findall(r'<a id="([^"]+)"', text)}


def links(page):
    text = SPAN.sub("", FENCE.sub("", TEXTS[page]))
    return [one for one in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", one)]


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_have_targets(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


def test_every_page_is_linked_from_the_index():
    index = ROOT / "docs/README.md"
    linked = {(index.parent / target).resolve() for target in links(index)}
    assert {*PAGES[2:]} - {index} <= linked
    assert index in {(ROOT / target).resolve() for target in links(ROOT / "README.md")}


def test_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    done = subprocess.run(
        ["bash", str(ROOT / "run_scripts/docs.sh"), "build", "--site-dir", str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert all(
        (tmp_path / f"{page.stem}.html").is_file() for page in PAGES[2:] if page.stem != "README"
    )


# Commands, configs and options


def commands():
    """Return the commands of all pages: lines of bash blocks, and code spans."""
    found = {}
    for page, text in ((page, TEXTS[page]) for page in PAGES):
        values = dict(re.findall(r'^(\w+)="([^"]*)"$', text, re.MULTILINE))
        lines = [span for span in SPAN.findall(FENCE.sub("", text)) if " " in span]
        for block in blocks(text, "bash"):
            block = re.sub(r'^\w+="[^"]*"$', "", block, flags=re.MULTILINE)
            lines += block.replace("\\\n", " ").splitlines()
        for line in lines:
            for key, value in values.items():
                line = re.sub(rf"\${key}\b", " ".join(value.split()), line)
            words = [w for w in line.split() if not re.match(r"[A-Z_]+=", w)]
            if words and words[0] in ("python", "bash", "sbatch", "lavis-mafa"):
                found.setdefault(" ".join(line.split()), page)
    return found


def checked_config(path, options, evaluates):
    """Load a config with the options of a page, as train.py and evaluate.py do."""
    options = [*required_options(path, options), *options]
    cfg = load_config(str(path), options, machine=False)
    assert bool(cfg.run_cfg.evaluate) is evaluates, path
    return cfg


@pytest.mark.parametrize("command", commands(), ids=lambda command: command[:60])
def test_commands_are_accepted(command):
    if "-m research" in command and not (ROOT / "research").is_dir():
        pytest.skip("research/ is in a checkout only")
    words = shlex.split(command, comments=True)
    following = dict(zip(words, words[1:], strict=False))
    for previous, word in zip(["", *words], words, strict=False):
        if previous == "--plugin" and not word.startswith("examples"):
            continue  # a file of the reader's
        if re.fullmatch(r"(\./)?(run_scripts|projects|examples|\w+\.py$)[\w./-]*", word):
            assert project_file(word).exists() or (ROOT / word).exists(), word
    if module := following.get("-m"):
        assert importlib.util.find_spec(module), f"no such module: {module}"
    if module == "research" and "--help" not in words:
        research = importlib.import_module("research.__main__").COMMANDS
        assert refusal(research, following[module], words[words.index(module) + 2 :]) == ""
    name = following.get("lavis-mafa", "--help")
    assert name in (*COMMANDS, "--help")
    is_mention = all(word.isalpha() and word.islower() for word in words[2:])
    if name != "--help" and not is_mention:
        assert refusal(COMMANDS, name, words[words.index(name) + 1 :]) == ""
    config = following.get("--cfg-path")
    evaluates = name == "evaluate" or any(w.endswith("evaluate.py") for w in words)
    if script := following.get("run_scripts/mafa/eval.sh"):
        config, evaluates = f"projects/mafa/eval/{script}.yaml", True
    if not config or config == "CONFIG" or "--plugin" in words or "research" in words:
        return
    rest = words[words.index("--options") + 1 :] if "--options" in words else []
    stop = next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))
    checked_config(project_file(config), [w for w in rest[:stop] if w != "..."], evaluates)


def lavis_configs():
    """Yield each YAML block of docs/quick_start.md with the config that it changes."""
    text = TEXTS[ROOT / "docs/quick_start.md"]
    named = re.findall(r"For `lavis/projects/([^`]+)`.*?```yaml\n(.*?)```", text, re.DOTALL)
    for path, block in named:
        yield pytest.param(Path(lavis.__file__).parent / "projects" / path, block, id=path)
    assert len(named) == len(blocks(text, "yaml")) == 3


@pytest.mark.parametrize("base, block", lavis_configs())
def test_converted_lavis_configs_are_accepted(base, block, tmp_path):
    file = tmp_path / base.name
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(base), OmegaConf.create(block)), file)
    try:
        cfg = load_config(str(file), required_options(base), machine=False)
    except ConfigError as error:  # an optional package may be missing, nothing else
        assert "pip install" in str(error) and len(error.problems) == 1
    else:
        assert cfg.run_cfg.task == "mafa_pretrain"
        # The settings with which losses equal LAVIS's.
        mafa, sampled = cfg.model_cfg.mafa, "sampled" if "albef" in base.parts else "sampled_blip"
        assert (mafa.negatives, mafa.same_image) == (sampled, "negative")
        assert cfg.run_cfg.grit.enabled is False


# Code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_compile(page):
    for code in blocks(TEXTS[page], "python"):
        ast.parse(code)


def test_python_code_runs():
    """That of the quick start and README; tests/algorithm/test_your_trainer.py runs other loops."""
    (code,) = blocks(TEXTS[ROOT / "docs/quick_start.md"], "python")
    names: dict = {}
    exec(compile(code, "quick_start.md", "exec"), names)
    assert names["sim"].shape == (2, 2) and names["match"].shape == (2,)
    (code,) = blocks(TEXTS[ROOT / "README.md"], "python")
    with host_waits():  # its judge answers on the CPU
        x = torch.eye(3, device="cuda")
        names = {"image_features": x, "text_features": x, "logit_scale": x[0, 0]}
        names["captions"] = ["a dog", "a dog", "a cat"]
        exec(compile(code, "README.md", "exec"), names)
    # Own and connected pair of the two dogs have half of the label each, of similarity 1 and 0.
    assert names["loss"].item() == pytest.approx(math.log(math.e + 2) - 2 / 3)


def test_listed_modules_have_the_listed_names():
    rows = re.findall(
        r"^\| `(lavis_mafa[\w.]*)` \| (.+) \|$", TEXTS[ROOT / "docs/api.md"], re.MULTILINE
    )
    assert len(rows) > 20
    for module, content in rows:
        found = importlib.import_module(module)
        names = [name for name in SPAN.findall(content.split(":")[0]) if name.isidentifier()]
        assert all(hasattr(found, name) for name in names), module


def test_promises_name_tests_that_exist():
    table = TEXTS[ROOT / "docs/reliability.md"].split("|---|---|---|\n")[1].split("\n\n")[0]
    rows = [cells_of(line) for line in table.splitlines() if not line.startswith("| **")]
    assert len(rows) > 30
    for event, promise, test in rows:
        file, name = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", test).groups()
        assert promise, event
        if file.startswith("research/") and not (ROOT / "research").is_dir():
            continue  # in a checkout only
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


# Figures


MARK = re.compile(r"<!-- (figures|claims): (.+) -->\n((?:\|.*\n)+)")
TABLES = [(page, *mark) for page, text in TEXTS.items() for mark in MARK.findall(text)]


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.parametrize("page, kind, sources, table", TABLES)
def test_figures_are_those_of_the_recorded_runs(page, kind, sources, table):
    """A mark names files of results, separated by " + ", for figures each with its columns."""
    expected: dict[str, list] = {}
    claims: list[list[str]] = []
    for file, *columns in (part.split() for part in sources.split(" + ")):
        text = (page.parent / file).read_text(encoding="utf-8")
        if kind == "claims":
            rows = map(cells_of, text.split("## Claims\n\n")[1].split("\n\n")[0].splitlines())
            claims += [[row[0], *row[3:]] for row in rows]  # without source and figure
            continue
        recorded = json.loads(text)
        for name, row in recorded["rows"].items():
            for column in columns:
                digits, spread = recorded["columns"][column]["digits"], row["spread"].get(column)
                text = spread and f"{spread['mean']:.{digits}f} ± {spread['sd']:.{digits}f}"
                expected.setdefault(name, []).append(text or "–")
    for name, *cells in map(cells_of, table.splitlines()[2:]):
        if kind == "figures":
            assert cells == expected[name]
        else:  # a table of claims may leave out its last columns
            assert [name, *cells] in [claim[: max(len(cells), 2) + 1] for claim in claims]


# Rooms


def imports_of(file):
    """Yield the modules that a file imports, with the names taken from packages."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_room_imports_only_rooms_below_it():
    """And the floor plan of CONTRIBUTING.md has exactly these rooms."""
    assert budget.upward_imports() == [] and budget.circles() == []
    table = TEXTS[ROOT / "CONTRIBUTING.md"].split("|---|---|---|\n")[1].split("\n\n")[0]
    listed = {room for line in table.splitlines() for room in SPAN.findall(line.split("|")[1])}
    rooms = {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
    assert {one.rstrip("/") for one in listed} - {"cli.py"} == rooms == set(budget.FLOORS)
    for file in sorted(PACKAGE.rglob("*.py")):
        for module in imports_of(file):
            assert not module.startswith("research"), file
            # Downstream tasks are imported when LAVIS is asked for their names, by nothing else.
            own = file.relative_to(PACKAGE).parts[0]
            assert own == "downstream" or "downstream" not in module.split(".")[:2], file


ALGORITHM = sorted((PACKAGE / "algorithm").rglob("*.py"))


def test_algorithm_needs_torch_and_numpy_only():
    allowed = {"torch", "numpy", *sys.stdlib_module_names}
    for file in ALGORITHM:
        outside = [one for one in imports_of(file) if not one.startswith("lavis_mafa.algorithm")]
        assert {one.split(".")[0] for one in outside} <= allowed, file
