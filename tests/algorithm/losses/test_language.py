"""Token masking for MLM."""

import pytest
import torch

from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens

CLS, PAD, MASK = 2, 0, 4


def mask_random_tokens(probability, shape=(400, 30), vocab=1000):
    torch.manual_seed(0)
    ids = torch.randint(5, vocab, shape)
    ids[:, 0] = CLS
    ids[:, -6:] = PAD
    return ids, *mask_tokens(ids, probability, MASK, vocab, (CLS, PAD))


@pytest.mark.parametrize("probability", [0.15, 0.5, 0.75])
def test_share_of_masked_tokens_and_their_replacements(probability):
    ids, hidden, targets = mask_random_tokens(probability)
    predicted = targets != IGNORED
    ordinary = (ids != CLS) & (ids != PAD)
    assert predicted[ordinary].float().mean().item() == pytest.approx(probability, abs=0.02)
    assert torch.equal(targets[predicted], ids[predicted])
    assert torch.equal(hidden[~predicted], ids[~predicted])
    as_mask = (hidden[predicted] == MASK).float().mean().item()
    unchanged = (hidden[predicted] == ids[predicted]).float().mean().item()
    assert as_mask == pytest.approx(0.8, abs=0.02)
    assert unchanged == pytest.approx(0.1, abs=0.02)


def test_special_tokens_are_never_masked():
    ids, hidden, targets = mask_random_tokens(1.0)
    special = (ids == CLS) | (ids == PAD)
    assert (targets[special] == IGNORED).all() and torch.equal(hidden[special], ids[special])
    assert (targets[~special] != IGNORED).all()
