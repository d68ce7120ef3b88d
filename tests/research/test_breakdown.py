"""Check the breakdown of a step: all parts are timed and drawn, and equal the reference's."""

from __future__ import annotations

import pytest
import torch

from lavis_mafa.models import AlbefMafa
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from research.benchmarks.breakdown import PARTS, _parts_of_ours, _parts_of_reference, draw, rows
from research.benchmarks.harness import Row, Sizes
from research.benchmarks.reference_step import PlainAlbef
from research.benchmarks.step_models import albef_config, mini_batch

QUICK = Sizes("quick", 1)


def test_every_part_and_their_sum_are_timed():
    timed_rows = rows(QUICK)
    assert [row.what for row in timed_rows] == [*PARTS, "all parts"]
    *parts, total = timed_rows
    for side in ("ours", "reference"):
        assert all(getattr(row, side) > 0 for row in parts)
        assert getattr(total, side) == pytest.approx(sum(getattr(row, side) for row in parts))


def test_both_sides_compute_equal_outputs(tmp_path):
    cfg = albef_config(QUICK, tmp_path)
    plain = PlainAlbef(cfg).eval()
    ours = AlbefMafa.from_config(cfg).eval()
    ours.load_state_dict(plain.state_dict())
    judge = AlbefMafa.from_config(cfg)
    samples = mini_batch(4, cfg, "cpu")
    own = torch.arange(4)
    pairs = torch.cat([own, (own + 1) % 4]), torch.cat([(own + 1) % 4, own])
    reference_parts = _parts_of_reference(plain, PlainAlbef(cfg).eval(), samples, pairs)
    package_parts = _parts_of_ours(ours, ModelDiscriminator(judge), samples, pairs)
    assert tuple(reference_parts) == tuple(package_parts) == PARTS
    for part in ("image encoder", "text encoder", "ITM"):
        torch.testing.assert_close(
            package_parts[part](), reference_parts[part](), rtol=1e-4, atol=1e-5
        )
    losses = []
    for side in (package_parts, reference_parts):
        torch.manual_seed(5)
        losses.append(side["MLM"]().mean())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert package_parts["Con-D: pairs"]() is None and reference_parts["Con-D: pairs"]() is None
    package_parts["MLM"]().mean().backward()
    key = ours.text_encoder.bert.encoder.layer[-1].crossattention.self.key
    assert key.weight.grad is None, "keys and values are ITM's part"


def test_figure_shows_shares_of_the_reference(tmp_path):
    timed_rows = [
        Row(part, 1.0 + index, 3.5, 0.0, 0.0, 0.0) for index, part in enumerate(PARTS)
    ] + [Row("another part's", 1e9, 1e9, 1.0, 1.0, 1.0)]
    draw(tmp_path / "a.svg", timed_rows)
    text = (tmp_path / "a.svg").read_text()
    assert all(part in text for part in PARTS) and text.count("100 %") == 2
    draw(tmp_path / "b.svg", [*timed_rows[:-1], Row("x", 1.0, 1.0, 1.0, 1.0, 1.0)])
    assert "another" not in text
