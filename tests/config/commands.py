"""Commands in the documentation: found, taken apart, and checked without running them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT
from shipped import needed

from lavis_mafa.cli import COMMANDS
from lavis_mafa.config import load_config
from lavis_mafa.io.project_files import project_file

# Pages that a user reads; the first is the entry.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1`*\s*$", re.MULTILINE | re.DOTALL)
ASSIGNED = re.compile(r'^(\w+)="([^"]*)"$', re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PROGRAMS = ("python", "bash", "sbatch", "lavis-mafa")
EVAL_SCRIPT = "run_scripts/mafa/eval.sh"  # followed by the name of a config
EVALUATES = ("evaluate.py", "run_scripts/mafa/evaluate.sh")


def blocks(text: str, *languages: str) -> list[str]:
    """Code blocks of a page in one of the languages."""
    return [code for _, language, code in FENCE.findall(text) if language in languages]


def without_blocks(text: str) -> str:
    return FENCE.sub("", text)


def commands(text: str) -> list[str]:
    """Commands of a page: lines of its bash blocks, with ``$NAME`` filled in from lines
    ``NAME="..."`` before them, and whole code spans outside of them."""
    found = []
    for block in blocks(text, "bash", "sh", "shell"):
        known = {name: " ".join(value.split()) for name, value in ASSIGNED.findall(text)}
        for line in ASSIGNED.sub("", block).replace("\\\n", " ").splitlines():
            for name, value in known.items():
                line = re.sub(rf"\${name}\b", lambda _, value=value: value, line)
            found.append(shlex.join(shlex.split(line, comments=True)))
    spans = [span for span in SPAN.findall(without_blocks(text)) if " " in span]
    return [one for one in [*found, *spans] if program_of(one) in PROGRAMS]


def program_of(command: str) -> str:
    """The first word that is no assignment to a variable of the environment."""
    words = (word for word in command.split() if not re.match(r"[A-Z_]+=", word))
    return next(words, "")


@dataclass
class Command:
    """What a command names: files, modules, subcommands of lavis-mafa, and a config."""

    files: list[str]
    modules: list[str]
    subcommands: list[str]
    config: str | None
    options: list[str]
    evaluates: bool


def parse(command: str) -> Command:
    """Take a command apart."""
    words = shlex.split(command)
    modules = [after for word, after in zip(words, words[1:], strict=False) if word == "-m"]
    if program_of(command) == "lavis-mafa":
        after = words.index("lavis-mafa") + 1
        subcommands = words[after : after + 1] or [""]
    else:
        subcommands = []
    # A plugin is the reader's own file.
    own = {after for word, after in zip(words, words[1:], strict=False) if word == "--plugin"}
    files = [word for word in words if re.fullmatch(r"[\w./-]+\.(py|sh)", word)]
    files = [file for file in files if file not in own]
    config = next(
        (after for w, after in zip(words, words[1:], strict=False) if w == "--cfg-path"), ""
    )
    options: list[str] = []
    if "--options" in words:
        for word in words[words.index("--options") + 1 :]:
            if word.startswith("--"):
                break
            options.append(word)
    evaluates = any(file in EVALUATES for file in files) or subcommands == ["evaluate"]
    if EVAL_SCRIPT in files:
        name = words[words.index(EVAL_SCRIPT) + 1]
        config, evaluates = f"projects/mafa/eval/{name}.yaml", True
    return Command(files, modules, subcommands, config or None, options, evaluates)


def problems_of(command: str) -> list[str]:
    """What keeps a command from working, [] for nothing that can be told without running it."""
    found = parse(command)
    problems = [f"no such file: {file}" for file in found.files if not (ROOT / file).is_file()]
    for module in found.modules:
        if not _importable(module):
            problems.append(f"no such module: {module}")
    for name in found.subcommands:
        if name in COMMANDS and len(shlex.split(command)) > 2:  # two words: only a mention
            problems += _refused(name, shlex.split(command))
        elif name not in (*COMMANDS, "--help"):
            problems.append(f"no such subcommand: {name}")
    if found.subcommands == ["study"]:
        studies = [word for word in shlex.split(command) if word.endswith(".yaml")]
        problems += [f"no such study: {one}" for one in studies if not (ROOT / one).is_file()]
    if found.config is None:
        return problems
    path = project_file(found.config)
    if not path.is_file():
        return [*problems, f"no such config: {found.config}"]
    options = [one for one in found.options if one != "..."]
    told = [*needed(path, options), *options]
    try:
        cfg = load_config(str(path), told, machine=False)
    except ValueError as error:
        return [*problems, str(error)]
    if bool(cfg.run_cfg.evaluate) is not found.evaluates:
        problems.append(f"{found.config} is for {'evaluate' if cfg.run_cfg.evaluate else 'train'}")
    return problems


def _refused(name: str, words: list[str]) -> list[str]:
    """What the subcommand's own parser says against a command, [] if it accepts it."""
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    parser.add_argument("--plugin", action="append")  # of every command
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(words[words.index(name) + 1 :])
    except SystemExit as stop:
        return [error.getvalue().strip().splitlines()[-1]] if stop.code else []
    return []


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def anchors(page: Path) -> set[str]:
    """What ``#...`` may name in a page: its headings as GitHub names them, and ids."""
    names: set[str] = set()
    text = page.read_text(encoding="utf-8")
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_blocks(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.replace("`", "").lower()).strip().replace(" ", "-")
        number = 0
        while (own := f"{name}-{number}" if number else name) in names:
            number += 1
        names.add(own)
    return names | set(re.findall(r'\bid="([^"]+)"', text))


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures that are no addresses elsewhere."""
    text = SPAN.sub("", without_blocks(page.read_text(encoding="utf-8")))
    found = re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text)
    return [target for target in found if not re.match(r"[a-z]+:", target)]
