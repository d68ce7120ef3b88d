"""Wrong configs, generated from the schema and the shipped configs: none of them starts.

Each is refused by `load_config`, which builds nothing, with a message that begins with the key as
it is written, names the one that was meant, and says what was expected or what to do.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import mistakes as making
import pytest

from lavis_mafa.cli import main
from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.config.load import complete
from lavis_mafa.runners import session

sys.path.append(str(Path(__file__).resolve().parents[1] / "config"))
from shipped import SHIPPED, needed, parse_default_yamls_once  # noqa: E402, F401

# What was expected, or what to do.
CURE = re.compile(
    r"expected|did you mean|known: |use |name |set |leave |give |choose |"
    r"is not (a |one |True)|registered; |make |no such|have that|has the types"
)
TOY = next(path for path in SHIPPED if path.stem == "albef_toy")
KINDS = ["misspelt", "wrong type", "out of range", "empty", "unknown name", "unknown choice"]
KINDS += ["no such file"]


@functools.cache
def right(path):
    """Return a shipped config as plain data, without problems."""
    config = making.plain(path, needed(path))
    assert complete(config, machine=False)[1] == []
    return config


def anywhere(path):
    """Return a key without the name of its data set."""
    return re.sub(r"^datasets\.\w+\.", "datasets.*.", path)


@functools.cache
def all_mistakes(number=1, every_builder=False):
    """Different mistakes, by the shipped config that they are made in."""
    seen, found = set(), defaultdict(list)
    for path in SHIPPED:
        for mistake in making.mistakes(right(path), number):
            where = mistake.path if every_builder else anywhere(mistake.path)
            what = (where, mistake.kind, mistake.name, repr(mistake.value))
            if what not in seen:
                seen.add(what)
                found[path].append(mistake)
    return dict(found)


def singles(kind):
    """One mistake of a kind for every key that can have it."""
    chosen = {}
    for path, found in all_mistakes().items():
        for mistake in found:
            if mistake.kind == kind:
                chosen.setdefault(anywhere(mistake.path), (path, mistake))
    return list(chosen.values())


def missed(path, together):
    """Mistakes that nobody was told about when they were made together, and messages of no help."""
    machine = any(mistake.kind == "no such file" for mistake in together)
    told = making.refused(right(path), together, machine)
    lost = [one for one in together if not one.named_in(told)]
    return lost, [line for line in told if not CURE.search(line)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_s_mistakes_are_refused_by_name(kind, injected):
    cases = singles(kind)
    results = [(path.stem, mistake, *missed(path, [mistake])) for path, mistake in cases]
    unseen = [result for result in results if result[2]]
    injected(f"config: {kind}", survived=len(cases) - len(unseen), times=len(cases))
    assert unseen == []
    assert [helpless for *_, helpless in results if helpless] == []
    assert len(cases) >= (100 if kind in KINDS[:4] else 5)


def test_all_mistakes_are_reported_together(injected):
    """As many as there are keys in one config: each is named, whatever the others are."""
    made, lost = Counter(), []
    for path, found in all_mistakes().items():
        for batch in making.batches(found):
            unseen, helpless = missed(path, batch)
            lost += [(path.stem, *unseen, *helpless)] if unseen or helpless else []
            made["configs"] += 1
            made["mistakes"] += len(batch)
            made["named"] += len(batch) - len(unseen)
    injected("config: many mistakes at once", survived=made["named"], times=made["mistakes"])
    assert lost == []
    assert made["mistakes"] > 3000 and made["configs"] > 100


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_more_misspellings_of_every_key_of_every_data_set(injected):
    counts = Counter()
    for path, found in all_mistakes(2, every_builder=True).items():
        for mistake in found:
            unseen, helpless = missed(path, [mistake])
            assert not unseen and not helpless, (path.stem, mistake, helpless)
            counts[mistake.kind] += 1
    for kind, number in counts.items():
        injected(f"config: {kind}", survived=number, times=number)
    assert sum(counts.values()) > 10_000


@pytest.mark.parametrize("wrong, meant", [("lim", "lmi"), ("ict", "itc"), ("ml", "lm")])
def test_swapped_letters_of_short_names(wrong, meant):
    weights = "model.mafa.loss_weights"
    mistake = making.Mistake("misspelt", f"{weights}.{meant}", wrong, meant=f"{weights}.{meant}?")
    assert missed(TOY, [mistake]) == ([], [])


def test_every_key_has_a_type():
    """Or nothing wrong would be known of it; the toy world's builders check what may be null."""
    keys = [key for path in SHIPPED for key in making.keys_of(right(path))]
    untyped = {anywhere(path) for path, key, *_ in keys if key.kind == "any"}
    toy = {
        name for name in untyped if re.fullmatch(r"datasets\.\*\.build_info\.(p_\w+|zipf)", name)
    }
    assert untyped - toy == {"run.annotation_file"} and len(toy) == 7


def test_the_generator_sees_what_passes():
    """Right values are no mistakes: of them nothing is told, so that a miss would be seen."""
    for key, value in (("run.seed", 7), ("run.amp", False), ("run.grit.first_order", None)):
        fine = making.Mistake("out of range", key, key.rsplit(".", 1)[-1], value)
        assert missed(TOY, [fine])[0] == [fine]


# Through the command line


class Built(Exception):
    """Something was built that must not be."""


BUILDERS = ("init_distributed", "build_data", "build_model")


def refuse_to(monkeypatch, names):
    def refuse(name):
        def build(*_):
            raise Built(name)

        return build

    for name in names:
        monkeypatch.setattr(session, name, refuse(name))


def command_line(config, folder, *arguments):
    """Exit status of ``train.py`` with a config, or of ``evaluate.py`` with one for it."""
    file = folder / "config.yaml"
    file.write_text(making.as_yaml(config))
    evaluates = (config.get("run") or {}).get("evaluate") is True
    command = "evaluate" if evaluates else "train"
    return main([command, "--cfg-path", str(file), *arguments])


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_the_command_ends_before_anything_is_built(
    arguments, tmp_path, monkeypatch, caplog, injected
):
    refuse_to(monkeypatch, BUILDERS)
    cases = [case for kind in KINDS[:6] for case in singles(kind)][:: 40 if arguments else 9]
    refused = 0
    for path, mistake in cases:
        config = copy.deepcopy(right(path))
        mistake.put(config)
        caplog.clear()
        status = command_line(config, tmp_path, *arguments)
        lines = [line for record in caplog.records for line in record.getMessage().splitlines()]
        refused += status == 2 and bool(mistake.named_in(lines))
    injected("config: refused by the command", survived=refused, times=len(cases))
    assert refused == len(cases) >= (20 if arguments else 100)
    assert list(tmp_path.iterdir()) == [tmp_path / "config.yaml"]


@pytest.mark.parametrize("name", BUILDERS)
def test_valid_config_is_built(name, tmp_path, monkeypatch):
    """Where there is something to refuse, it is met."""
    config = copy.deepcopy(right(TOY))
    sizes = {"train_size": 64, "val_size": 2, "test_size": 2}
    config["datasets"]["toy_scenes"]["build_info"] = sizes
    monkeypatch.chdir(tmp_path)
    refuse_to(monkeypatch, [name])
    with pytest.raises(Built, match=name):
        command_line(config, tmp_path)


def test_options_are_checked_like_the_file(tmp_path, injected, caplog):
    """Mistakes in ``--options``, as they are typed."""
    cases = [mistake for where, mistake in singles("misspelt") if where == SHIPPED[0]]
    cases = [one for one in cases if one.path.startswith(("run.", "model.mafa."))][::6]
    refused = 0
    with caplog.at_level(logging.CRITICAL):
        for mistake in cases:
            with pytest.raises(ConfigError) as caught:
                load_config(TOY, [f"{mistake.written}=1"])
            refused += bool(mistake.named_in(caught.value.problems))
    injected("config: misspelt option", survived=refused, times=len(cases))
    assert refused == len(cases) > 15


def test_mistakes_survive_a_file():
    """What is written as a file is what was meant: types are kept."""
    mistake = making.Mistake("wrong type", "run.seed", "seed", {"a": 1})
    config = {"run": {}}
    mistake.put(config)
    assert json.loads(making.as_yaml(config)) == {"run": {"seed": {"a": 1}}}
