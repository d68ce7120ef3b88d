"""Wrong configs, generated from the schema and the shipped configs: none of them starts.

Each is rejected by `load_config`, which builds nothing, with a message that begins with the key as
written, names the intended one, and says what was expected or what to do.
"""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter, defaultdict

import mistakes as making
import pytest
from shipped import SHIPPED

from lavis_mafa.cli import main
from lavis_mafa.training import session

# What was expected, or what to do.
REMEDY = re.compile(
    r"expected|did you mean|known: |use |name |set |leave |give |choose |"
    r"is not (a |one |True)|registered; |make |no such|have that|has the types"
)
TOY = next(path for path in SHIPPED if path.stem == "albef_toy")
KINDS = ["misspelt", "wrong type", "out of range", "empty", "unknown name", "unknown choice"]
KINDS += ["no such file"]


def without_data_set(path):
    """Return a key without the name of its data set."""
    return re.sub(r"^datasets\.\w+\.", "datasets.*.", path)


@functools.cache
def all_mistakes():
    """Return distinct mistakes by the shipped config that they are made in."""
    known, found = set(), defaultdict(list)
    for path in SHIPPED:
        for mistake in making.mistakes(making.valid_config(path)):
            identity = (
                without_data_set(mistake.path),
                mistake.kind,
                mistake.name,
                repr(mistake.value),
            )
            if identity not in known:
                known.add(identity)
                found[path].append(mistake)
    return dict(found)


def one_per_key(kind):
    """Return one mistake of a kind for every key that can have it."""
    chosen = {}
    for path, found in all_mistakes().items():
        for mistake in found:
            if mistake.kind == kind:
                chosen.setdefault(without_data_set(mistake.path), (path, mistake))
    return list(chosen.values())


def missed_and_unhelpful(path, together):
    """Return the mistakes that were not reported when made together, and messages without a
    remedy.
    """
    machine = any(mistake.kind == "no such file" for mistake in together)
    messages = making.refused(making.valid_config(path), together, machine)
    missed = [mistake_ for mistake_ in together if not mistake_.named_in(messages)]
    return missed, [line for line in messages if not REMEDY.search(line)]


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_in_every_key_are_rejected_by_name(kind):
    found = one_per_key(kind)
    cases = found if kind == "no such file" else found[::24]  # --faults makes all of them
    results = [
        (path.stem, mistake, *missed_and_unhelpful(path, [mistake])) for path, mistake in cases
    ]
    missed = [result for result in results if result[2]]
    assert missed == []
    assert [helpless for *_, helpless in results if helpless] == []
    assert len(found) >= (100 if kind in KINDS[:4] else 5)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_all_mistakes_are_reported_together():
    """As many mistakes as one config can have: each is named, whatever the others are."""
    totals, failures = Counter(), []
    for path, found in all_mistakes().items():
        for batch in making.batches(found):
            missed, helpless = missed_and_unhelpful(path, batch)
            failures += [(path.stem, *missed, *helpless)] if missed or helpless else []
            totals["configs"] += 1
            totals["mistakes"] += len(batch)
            totals["named"] += len(batch) - len(missed)
    assert failures == []
    assert totals["mistakes"] > 3000 and totals["configs"] > 100


# Through the command line


def command_line(config, folder, *arguments):
    """Return the exit status of ``train.py``, or ``evaluate.py``, with a config."""
    file = folder / "config.yaml"
    file.write_text(making.as_yaml(config))
    run = config.get("run")
    evaluates = isinstance(run, dict) and run.get("evaluate") is True
    command = "evaluate" if evaluates else "train"
    return main([command, "--cfg-path", str(file), *arguments])


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_command_ends_before_anything_is_built(arguments, tmp_path, monkeypatch, caplog):
    for name in ("init_distributed", "build_data", "build_model"):
        monkeypatch.setattr(session, name, lambda *_: 1 / 0)
    cases = [case for kind in KINDS[:6] for case in one_per_key(kind)][:: 120 if arguments else 60]
    refused = 0
    for path, mistake in cases:
        config = copy.deepcopy(making.valid_config(path))
        mistake.put(config)
        caplog.clear()
        status = command_line(config, tmp_path, *arguments)
        lines = [line for record in caplog.records for line in record.getMessage().splitlines()]
        refused += status == 2 and bool(mistake.named_in(lines))
    assert refused == len(cases) >= (7 if arguments else 15)
    assert list(tmp_path.iterdir()) == [tmp_path / "config.yaml"]
