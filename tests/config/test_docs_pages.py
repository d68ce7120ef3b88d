"""README.md, CONTRIBUTING.md and docs/: links have targets, commands are accepted."""

from __future__ import annotations

import ast
import re

import commands as docs
import pytest
from conftest import ROOT

PAGES = docs.PAGES


def relative_name(page):
    return str(page.relative_to(ROOT))


def problem_of_link(page, target):
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"{relative_name(page)}: no {target}"
    if anchor and (file.suffix != ".md" or anchor not in docs.anchors(file)):
        return f"{relative_name(page)}: {target}: no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=relative_name)
def test_links_have_targets(page):
    found = [problem_of_link(page, target) for target in docs.links(page)]
    assert [problem for problem in found if problem] == []


def test_every_page_is_linked_from_the_index():
    index = ROOT / "docs/README.md"
    linked = {(index.parent / target).resolve() for target in docs.links(index)}
    pages = {page for page in PAGES if page.parent == index.parent} - {index}
    assert [relative_name(page) for page in pages - linked] == []
    readme = {(ROOT / target).resolve() for target in docs.links(ROOT / "README.md")}
    assert index in readme


def test_readme_links_the_pages_it_names():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"`docs/\w+\.md`", readme) == []


# The commands of docs/systems.md are tested in test_systems_table.py.
COMMANDS = {
    command: page
    for page in PAGES
    if page.name != "systems.md"
    for command in docs.commands(page.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_commands_are_accepted(command):
    problems = docs.problems_of(command)
    assert problems == [], f"{relative_name(COMMANDS[command])}: {command}"


def test_commands_are_found():
    scripts = {file for command in COMMANDS for file in docs.parse(command).files}
    assert {"train.py", "evaluate.py", "run_scripts/demo.sh"} <= scripts
    subcommands = {name for command in COMMANDS for name in docs.parse(command).subcommands}
    assert {
        "count",
        "advise",
        "mine",
        "report",
        "threshold",
        "label",
        "profile",
        "vision",
    } <= subcommands
    with_config = [command for command in COMMANDS if docs.parse(command).config]
    assert len(with_config) > 40
    assert any("--nproc_per_node" in command for command in with_config)
    assert any("=images" in docs.parse(command).options[0] for command in with_config
               if docs.parse(command).options)  # fmt: skip


def python_blocks():
    for page in PAGES:
        for number, code in enumerate(docs.blocks(page.read_text(encoding="utf-8"), "python")):
            yield pytest.param(code, id=f"{relative_name(page)}-{number}")


@pytest.mark.parametrize("code", python_blocks())
def test_python_blocks_compile(code):
    ast.parse(code)


def test_python_code_of_the_quick_start_runs(monkeypatch):
    text = (ROOT / "docs/quick_start.md").read_text(encoding="utf-8")
    (code,) = docs.blocks(text, "python")
    names: dict = {}
    exec(compile(code, "quick_start.md", "exec"), names)
    assert names["sim"].shape == (2, 2) and names["match"].shape == (2,)
    assert 0 <= float(names["match"].min()) <= float(names["match"].max()) <= 1


# Tests of the checks themselves


@pytest.mark.parametrize(
    "command, message",
    [
        ("python trian.py --cfg-path projects/mafa/train/albef_toy.yaml", "no such file"),
        ("python -m lavis_mafa.chek_data train.json", "no such module"),
        ("lavis-mafa cuont --output count", "no such subcommand"),
        ("lavis-mafa report output/run --outptu page", "unrecognized arguments: --outptu"),
        ("lavis-mafa count --cfg-path projects/mafa/train/nothing.yaml", "no such config"),
        ("lavis-mafa study projects/mafa/studies/nothing.yaml", "no such study"),
        ("bash run_scripts/mafa/nothing.sh", "no such file"),
        ("bash run_scripts/mafa/eval.sh nothing", "no such config"),
        ("python train.py --cfg-path projects/mafa/train/nothing.yaml", "no such config"),
        ("python evaluate.py --cfg-path projects/mafa/train/albef_toy.yaml", "is for train"),
        ("bash run_scripts/mafa/eval.sh retrieval_toy --options run.k_tset=3", "run.k_test"),
        (
            "python train.py --cfg-path projects/mafa/train/albef_toy.yaml --options run.sed=1",
            "run.seed",
        ),
    ],
)
def test_wrong_commands_are_reported(command, message):
    assert any(message in problem for problem in docs.problems_of(command))


def test_commands_of_a_page_are_found():
    text = """
Run `python train.py --cfg-path A.yaml`, not `train.py`.

```bash
DATA="a=1
      b=2"
GPUS=2 bash run.sh --options $DATA \\
    c=3   # comment
pip install x
```

```python
python = 1
```
"""
    assert docs.commands(text) == [
        "GPUS=2 bash run.sh --options a=1 b=2 c=3",
        "python train.py --cfg-path A.yaml",
    ]


def test_anchors_and_links_of_a_page_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n## Con-D: what?\n## A b c\n```bash\n# none\n```\n")
    assert docs.anchors(page) == {"a-b-c", "con-d-what", "a-b-c-1"}
    page.write_text("[a](x.md) ![b](y.svg) [c](https://z) `[d](no)` [e](#f)")
    assert docs.links(page) == ["x.md", "y.svg", "#f"]


def test_figure_is_small_and_contains_text():
    figure = (ROOT / "docs/figures/step.svg").read_text(encoding="utf-8")
    assert len(figure.splitlines()) <= 150
    words = " ".join(re.findall(r">([^<]+)<", figure))
    for word in ("encode", "compare", "pick", "judge", "mine", "ITC", "ITM", "MLM | LM", "collect"):
        assert word in words
