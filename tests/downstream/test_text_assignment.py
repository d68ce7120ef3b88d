"""The assignment of two images to each text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.downstream.albef_nlvr_mafa import FIRST, NEITHER, SECOND, _assign_texts

# Upper 99.9 % points of the chi-square distribution, by degrees of freedom.
CHI_SQUARE = {2: 13.8, 3: 16.3, 11: 31.3}


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def draws(ids, number, preference=None, seed=0):
    torch.manual_seed(seed)
    drawn = [_assign_texts(torch.tensor(ids), preference) for _ in range(number)]
    names = ("first", "second", "labels")
    return {
        name: torch.stack([getattr(assignment, name) for assignment in drawn]) for name in names
    }


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.integers(0, 99), st.booleans())
def test_invariants_of_every_assignment(ids, seed, prefers):
    if len(set(ids)) == 1:
        ids[0] += 1
    torch.manual_seed(seed)
    size = len(ids)
    preference = 9 * torch.randn(size, size) if prefers else None
    drawn = _assign_texts(torch.tensor(ids), preference)
    shown = len(set(ids))
    for own in range(size):
        label = int(drawn.labels[own])
        pair = [int(drawn.first[own]), int(drawn.second[own])]
        if label in (FIRST, SECOND):
            assert pair[label] == own
            assert ids[pair[1 - label]] != ids[own]
        else:
            assert label == NEITHER
            assert ids[own] not in (ids[pair[0]], ids[pair[1]])
            assert (ids[pair[0]] != ids[pair[1]]) == (shown > 2)


def test_labels_are_uniform():
    labels = draws(range(6), 1000)["labels"]
    counts = torch.bincount(labels.flatten(), minlength=3).double()
    assert counts.sum() == 6000
    assert chi_square(counts, 2000) < CHI_SQUARE[2]
    # A single text, and independence of the label before it.
    pairs = torch.bincount(3 * labels[:, 0] + labels[:, 1], minlength=9).double()
    assert chi_square(pairs, 1000 / 9) < 26.1  # 8 degrees of freedom


def test_preferred_images_are_drawn_with_their_softmax_probability():
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1])
    preference = torch.zeros(5, 5)
    # The own image is never drawn, however high its preference.
    preference[0] = torch.cat([torch.tensor([50.0]), shares.log() + 3])
    drawn = draws(range(5), 3000, preference)
    own_second = drawn["labels"][:, 0] == SECOND
    others = torch.bincount(drawn["first"][own_second, 0], minlength=5)[1:].double()
    assert chi_square(others, others.sum() * shares) < CHI_SQUARE[3]
    # Two draws without replacement: p_i * p_j / (1 - p_i).
    neither = drawn["labels"][:, 0] == NEITHER
    pairs = torch.stack([drawn["first"][neither, 0], drawn["second"][neither, 0]]) - 1
    counts = torch.bincount(4 * pairs[0] + pairs[1], minlength=16).view(4, 4).double()
    expected = shares[:, None] * shares[None] / (1 - shares[:, None])
    different = ~torch.eye(4, dtype=torch.bool)
    assert counts[~different].sum() == 0
    assert chi_square(counts[different], counts.sum() * expected[different]) < CHI_SQUARE[11]


@pytest.mark.parametrize("ids", [[3], [3, 3, 3]])
def test_a_single_image_is_rejected(ids):
    with pytest.raises(ValueError, match=f"two different images .* got {len(ids)} sample.*batch"):
        _assign_texts(torch.tensor(ids))
