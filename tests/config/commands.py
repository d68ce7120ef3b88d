"""Commands in the documentation: find them, parse them, and check them without running."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT
from shipped import required_options

from lavis_mafa.cli import COMMANDS
from lavis_mafa.config import load_config
from lavis_mafa.io.project_files import project_file

# User-facing pages; the first is the entry.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(`{3,})(\w*)[^\n]*\n(.*?)^\1`*\s*$", re.MULTILINE | re.DOTALL)
ASSIGNED = re.compile(r'^(\w+)="([^"]*)"$', re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PROGRAMS = ("python", "bash", "sbatch", "lavis-mafa")
EVAL_SCRIPT = "run_scripts/mafa/eval.sh"  # followed by the name of a config
READERS_CONFIG = "CONFIG"  # stands for a file of the reader's, as CHECKPOINT does
EVALUATES = ("evaluate.py", "run_scripts/mafa/evaluate.sh")


def blocks(text: str, *languages: str) -> list[str]:
    """Return the code blocks of a page in one of the languages."""
    return [code for _, language, code in FENCE.findall(text) if language in languages]


def without_blocks(text: str) -> str:
    return FENCE.sub("", text)


def commands(text: str) -> list[str]:
    """Return the commands of a page: lines of bash blocks, with variables assigned in the page
    filled in, and code spans.
    """
    found = []
    for block in blocks(text, "bash", "sh", "shell"):
        known = {name: " ".join(value.split()) for name, value in ASSIGNED.findall(text)}
        for line in ASSIGNED.sub("", block).replace("\\\n", " ").splitlines():
            for name, value in known.items():
                line = re.sub(rf"\${name}\b", lambda _, value=value: value, line)
            found.append(shlex.join(shlex.split(line, comments=True)))
    spans = [span for span in SPAN.findall(without_blocks(text)) if " " in span]
    return [text for text in [*found, *spans] if program_of(text) in PROGRAMS]


def program_of(command: str) -> str:
    """Return the first word that is not an environment variable assignment."""
    words = (word for word in command.split() if not re.match(r"[A-Z_]+=", word))
    return next(words, "")


@dataclass
class Command:
    """The parts of a command: files, modules, subcommands of lavis-mafa, config, options, plugins
    that this project ships."""

    files: list[str]
    modules: list[str]
    subcommands: list[str]
    config: str | None
    options: list[str]
    evaluates: bool
    plugins: list[str]


def parse(command: str) -> Command:
    """Split a command into its parts."""
    words = shlex.split(command)
    modules = [following for word, following in zip(words, words[1:], strict=False) if word == "-m"]
    if program_of(command) == "lavis-mafa":
        following = words.index("lavis-mafa") + 1
        subcommands = words[following : following + 1] or [""]
    else:
        subcommands = []
    plugins = [
        following for word, following in zip(words, words[1:], strict=False) if word == "--plugin"
    ]
    files = [word for word in words if re.fullmatch(r"[\w./-]+\.(py|sh)", word)]
    files = [file for file in files if file not in plugins]
    # Other plugins are files of the reader.
    plugins = [plugin for plugin in plugins if plugin.startswith("examples/")]
    config = next(
        (following for w, following in zip(words, words[1:], strict=False) if w == "--cfg-path"), ""
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
    return Command(files, modules, subcommands, config or None, options, evaluates, plugins)


def problems_of(command: str) -> list[str]:
    """Return why a command cannot work, as far as is known without running it; [] if valid."""
    parsed = parse(command)
    problems = [f"no such file: {file}" for file in parsed.files if not (ROOT / file).is_file()]
    for module in parsed.modules:
        if not _importable(module):
            problems.append(f"no such module: {module}")
    for name in parsed.subcommands:
        if name in COMMANDS and len(shlex.split(command)) > 2:  # two words: a mention, not a call
            problems += errors_of_parser(name, shlex.split(command))
        elif name not in (*COMMANDS, "--help"):
            problems.append(f"no such subcommand: {name}")
    if parsed.subcommands == ["study"]:
        studies = [word for word in shlex.split(command) if word.endswith(".yaml")]
        problems += [
            f"no such study: {option}" for option in studies if not (ROOT / option).is_file()
        ]
    if parsed.config in (None, READERS_CONFIG):
        return problems
    path = project_file(parsed.config)
    if not path.is_file():
        return [*problems, f"no such config: {parsed.config}"]
    options = [option for option in parsed.options if option != "..."]
    options_given = [*required_options(path, options), *options]
    if parsed.plugins:
        return [*problems, *_problems_with_plugins(path, options_given, parsed.plugins)]
    try:
        cfg = load_config(str(path), options_given, machine=False)
    except ValueError as error:
        return [*problems, str(error)]
    if bool(cfg.run_cfg.evaluate) is not parsed.evaluates:
        problems.append(f"{parsed.config} is for {'evaluate' if cfg.run_cfg.evaluate else 'train'}")
    return problems


def _problems_with_plugins(path: Path, options: list[str], plugins: list[str]) -> list[str]:
    """Check a config in another process, so that what plugins register stays there."""
    given = json.dumps([str(path), [*options, f"run.plugins={json.dumps(plugins)}"]])
    program = (
        "import json, sys; from lavis_mafa.config import load_config; "
        "load_config(*json.loads(sys.argv[1]), machine=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, given], cwd=ROOT, capture_output=True, text=True
    )
    return [done.stderr] if done.returncode else []


def errors_of_parser(name: str, words: list[str]) -> list[str]:
    """Return the error of the subcommand's own parser, [] if it accepts the command."""
    parser = argparse.ArgumentParser(prog=f"lavis-mafa {name}")
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    parser.add_argument("--plugin", action="append")  # valid for every command
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
    """Return the anchors of a page: its headings as GitHub names them, and ids."""
    names: set[str] = set()
    text = page.read_text(encoding="utf-8")
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_blocks(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.replace("`", "").lower()).strip().replace(" ", "-")
        number = 0
        while (unique := f"{name}-{number}" if number else name) in names:
            number += 1
        names.add(unique)
    return names | set(re.findall(r'\bid="([^"]+)"', text))


def links(page: Path) -> list[str]:
    """Return the link and image targets of a page that are not external addresses."""
    text = SPAN.sub("", without_blocks(page.read_text(encoding="utf-8")))
    found = re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text)
    return [target for target in found if not re.match(r"[a-z]+:", target)]
