"""Runs with tokens from the data loader equal runs that tokenise in forward."""

from __future__ import annotations

import pytest
from runs import run_here, same_weights, weights

from lavis_mafa.algorithm.tokens import TOKENS, Tokens
from lavis_mafa.families import family as base
from lavis_mafa.training import loaders

# Momentum encoders and the separate pass of naive GRIT read captions as well.
CHANGES = {
    "run__max_steps": 6,
    "run__grit__naive": True,
    "run__grit__start_epoch": 0,
    "model__mafa__soft_labels__type": "momentum",
    "model__queue_size": 16,
}


@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_from_the_loader_are_used_and_change_nothing(tmp_path, monkeypatch, workers):
    with monkeypatch.context() as patch:
        patch.setattr(loaders, "add_tokens", lambda *arguments: None)
        plain = run_here(tmp_path / "plain", run__num_workers=workers, **CHANGES)
    batch = next(iter(plain.loaders.train(plain.schedule.plan, 0, 0)))
    assert TOKENS not in batch
    monkeypatch.setattr(base, "tokens_of", None)
    runner = run_here(tmp_path / "tokens", run__num_workers=workers, **CHANGES)
    assert same_weights(weights(tmp_path / "plain"), weights(tmp_path / "tokens"))
    batch = next(iter(runner.loaders.train(runner.schedule.plan, 0, 0)))
    assert isinstance(batch[TOKENS], Tokens) and len(batch[TOKENS].input_ids) == 8
