"""Masking for MLM."""

import pytest
import torch

from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens

CLS, PAD, MASK = 2, 0, 4


def masked(probability, shape=(400, 30), vocab=1000):
    torch.manual_seed(0)
    ids = torch.randint(5, vocab, shape)
    ids[:, 0] = CLS
    ids[:, -6:] = PAD
    return ids, *mask_tokens(ids, probability, MASK, vocab, (CLS, PAD))


@pytest.mark.parametrize("probability", [0.15, 0.5, 0.75])
def test_share_of_hidden_tokens_and_their_fates(probability):
    ids, hidden, targets = masked(probability)
    asked = targets != IGNORED
    ordinary = (ids != CLS) & (ids != PAD)
    assert asked[ordinary].float().mean().item() == pytest.approx(probability, abs=0.02)
    assert torch.equal(targets[asked], ids[asked])
    assert torch.equal(hidden[~asked], ids[~asked])
    as_mask = (hidden[asked] == MASK).float().mean().item()
    left = (hidden[asked] == ids[asked]).float().mean().item()
    assert as_mask == pytest.approx(0.8, abs=0.02)
    assert left == pytest.approx(0.1, abs=0.02)


def test_special_tokens_are_never_hidden():
    ids, hidden, targets = masked(1.0)
    special = (ids == CLS) | (ids == PAD)
    assert (targets[special] == IGNORED).all() and torch.equal(hidden[special], ids[special])
    assert (targets[~special] != IGNORED).all()
