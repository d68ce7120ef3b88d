"""The pair memory against a list, and the momentum copies against their formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lavis_mafa.algorithm.pair_memory import EMPTY, MovingCopies, PairMemory


@settings(max_examples=50)
@given(st.integers(0, 7), st.lists(st.integers(1, 9), max_size=6))
def test_memory_holds_the_newest_pairs(size, batches):
    memory, seen = PairMemory(size, 2), []
    for batch in batches:
        numbers = torch.arange(len(seen), len(seen) + batch)
        features = torch.stack([numbers, numbers], dim=1).float()
        memory.remember(features, -features, numbers // 2, numbers)
        seen += numbers.tolist()
    newest = seen[-size:] if size else []
    stored = memory.indices[~memory.empty]
    assert sorted(stored.tolist()) == newest
    assert int(memory.empty.sum()) == size - len(newest)
    for slot in torch.nonzero(~memory.empty).flatten().tolist():
        number = int(memory.indices[slot])
        assert memory.images[slot].tolist() == [number] * 2
        assert memory.texts[slot].tolist() == [-number] * 2
        assert int(memory.image_ids[slot]) == number // 2


def test_forget_restores_the_initial_state():
    memory = PairMemory(4, 2)
    new = PairMemory(4, 2).state_dict()
    memory.remember(torch.ones(3, 2), torch.ones(3, 2), torch.arange(3), torch.arange(3))
    assert not bool(memory.empty.all())
    memory.forget()
    assert all(torch.equal(value, new[name]) for name, value in memory.state_dict().items())
    assert bool((memory.indices == EMPTY).all())


def test_copies_follow_the_moving_average_formula():
    model = nn.Module()
    model.encoder = nn.Linear(2, 1, bias=False)
    model.encoder.weight.data.fill_(1.0)
    copies = MovingCopies(model, ("encoder",), 0.75)
    model.encoder.weight.data.fill_(2.0)
    copies.move()
    copies.move()
    assert model.encoder_m.weight.tolist() == [[1.4375, 1.4375]]  # 1, 1.25, 1.4375
    assert not model.encoder_m.weight.requires_grad
    assert model.encoder.weight.tolist() == [[2.0, 2.0]]
    copies.rate = 0.0
    copies.move()
    assert torch.equal(model.encoder_m.weight, model.encoder.weight)


def test_invalid_sizes_and_rates_are_rejected():
    with pytest.raises(ValueError, match="momentum must be between 0 and 1, got 1.5"):
        MovingCopies(nn.Module(), (), 1.5)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        PairMemory(-1, 2)
