"""Use of vision: predictions with and without the image, slow loops, the command."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from own_pairs import own_arguments
from small_world import CONFIG, arguments, save_model

from lavis_mafa import load_model
from lavis_mafa.algorithm.losses.language import IGNORED
from lavis_mafa.metrics.intervals import ratio
from lavis_mafa.models.families.family import tokenize
from research.__main__ import main
from research.vision import COUNTS, count_hits, figures_of, mask_captions, share_of, without_image

RATES = [0.3, 0.8]


def samples_of(toy_train, count=10):
    batch = toy_train.collater([toy_train[i, 0] for i in range(count)])
    return batch["image"], batch["text_input"], batch["index"].numpy()


def biased_model(captions):
    """Return a random tiny model that favours words of the captions and depends on the image."""
    torch.manual_seed(0)
    model = load_model("albef_mafa", "tiny").eval()
    for part, weight in model.named_parameters():
        if "crossattention" in part and part.endswith(("value.weight", "dense.weight")):
            weight.data *= 30.0
    words = tokenize(model, captions, None).input_ids.unique()
    model.text_encoder.cls.predictions.bias.data[words] += 2.0
    return model


@torch.no_grad()
def count(model, images, captions, numbers, seed=0):
    return count_hits(model, images, captions, numbers, RATES, seed)


def test_model_ignoring_images_predicts_the_same_with_and_without(toy_train):
    samples = samples_of(toy_train, 40)
    model = biased_model(samples[1])
    with_vision = count(model, *samples)
    assert not torch.equal(with_vision[:, 1:3], with_vision[:, 3:])
    assert torch.equal(count(model, *samples), with_vision), "the hooks must be removed"
    for part, weight in model.named_parameters():
        if "crossattention.self.value" in part:
            weight.data.zero_()
    blind = count(model, *samples)
    assert torch.equal(blind[:, 1:3], blind[:, 3:]) and blind[:, 0].sum() > 0
    assert torch.equal(blind[:, 3:], with_vision[:, 3:]), "without the image it must not matter"


def slow_counts(model, image, caption, number, rate, seed):
    """Count one sample token by token: rank the full vocabulary at every masked position."""
    tokens = tokenize(model, [caption], None)
    ids, targets = mask_captions(
        model, tokens.input_ids, tokens.attention_mask, np.array([number]), rate, seed
    )
    backbone = model.backbone
    embeds = backbone.encode_images(image[None]).embeds
    predicted, hits = 0, {key: 0 for key in COUNTS[1:]}
    for position in torch.nonzero(targets[0] != IGNORED)[:, 0]:
        predicted += 1
        for suffix in ("", "_without"):
            with without_image(model) if suffix else nullcontext():
                scores = backbone._predict(ids, tokens.attention_mask, embeds, position[None])[0]
            better = int((scores > scores[targets[0, position]]).sum())
            hits[f"hits_1{suffix}"] += better < 1
            hits[f"hits_5{suffix}"] += better < 5
    return [predicted, *hits.values()]


def test_counts_equal_slow_loop_for_any_batch(toy_train):
    images, captions, numbers = samples_of(toy_train, 12)
    model = biased_model(captions)
    together = count(model, images, captions, numbers, seed=4)
    with torch.no_grad():
        for index in range(12):
            own = [part[index : index + 1] for part in (images, captions, numbers)]
            assert torch.equal(count(model, *own, seed=4), together[:, :, [index]])
            for row, rate in enumerate(RATES):
                slow = slow_counts(model, *(part[0] for part in own), rate, seed=4)
                assert together[row, :, index].tolist() == slow
    predicted, _, among_5, *_ = together.sum(dim=(0, 2)).tolist()
    assert 0 < among_5 < predicted


def test_masks_depend_on_the_sample_and_grow_with_the_rate(tiny, toy_train):
    _, captions, numbers = samples_of(toy_train, 30)
    tokens = tokenize(tiny, captions, None)

    def masked(rate, seed=0, rows=slice(None)):
        ids, mask = tokens.input_ids[rows], tokens.attention_mask[rows]
        return mask_captions(tiny, ids, mask, numbers[rows], rate, seed)

    before = torch.get_rng_state()
    few, many = masked(0.2), masked(0.7)
    assert torch.equal(torch.get_rng_state(), before), "the global generator must not be used"
    hidden = [targets != IGNORED for _, targets in (few, many)]
    assert (hidden[1] | ~hidden[0]).all() and 0 < hidden[0].sum() < hidden[1].sum()
    assert torch.equal(few[0][hidden[0]], many[0][hidden[0]])
    words = tokens.attention_mask.bool()
    assert not hidden[1][~words].any() and not hidden[1][:, 0].any()
    backwards = masked(0.7, rows=np.arange(29, -1, -1))
    assert torch.equal(backwards[1].flip(0), many[1]) and torch.equal(backwards[0].flip(0), many[0])
    assert not torch.equal(masked(0.7, seed=1)[1], many[1])


def test_shares_and_intervals():
    predicted = np.array([4, 0, 6, 10])
    hits = np.array([2, 0, -1, 5])
    share = share_of(hits, predicted, np.arange(4), ratio)
    assert share["share"] == pytest.approx(6 / 20)
    residuals = [2 - 0.3 * 4, -1 - 0.3 * 6, 5 - 0.3 * 10]
    half = 1.959964 * np.sqrt(3 / 2 * sum(r * r for r in residuals)) / 20
    assert share["low"] == pytest.approx(0.3 - half) and share["high"] == pytest.approx(0.3 + half)
    joined = share_of(hits, predicted, np.array([7, 7, 7, 9]), ratio)
    assert joined["share"] == share["share"] and joined["low"] != share["low"]
    assert np.isnan(share_of(hits * 0, predicted * 0, np.arange(4), ratio)["low"])
    usage = figures_of(np.array([[4, 4], [3, 2], [4, 4], [1, 1], [2, 0]]), np.arange(2))
    shares = {key: usage[key]["share"] for key in usage if key != "tokens"}
    assert shares == {
        **{"uov_1": 3 / 8, "accuracy_1": 5 / 8, "without_1": 2 / 8},
        **{"uov_5": 6 / 8, "accuracy_5": 1.0, "without_5": 2 / 8},
    }
    assert usage["accuracy_5"]["high"] <= 1.0 and usage["tokens"] == 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, toy_train):
    return save_model(tmp_path_factory.mktemp("models") / "a.pth", toy_train, 0)


def rows_of(folder):
    rows = json.loads((folder / "vision.json").read_text())["rows"]
    return {row["rate"]: row for row in rows}


def test_command_with_other_mini_batches_gives_the_same(tmp_path, checkpoint, capsys):
    found = []
    for size in (16, 9):
        chosen = [f"run.batch_size_eval={size}"]
        more = ("--rates", 0.5, 0.15, "--samples", 70)
        folder = tmp_path / str(size)
        assert main(arguments("vision", folder, checkpoint, *more, options=chosen)) == 0
        found.append(rows_of(folder))
    assert found[0] == found[1] and list(found[0]) == [0.15, 0.5]
    assert "UoV@5" in capsys.readouterr().out
    assert "| 50 %" in (tmp_path / "9" / "vision.md").read_text()


def test_vision_command_skips_unreadable_photographs(tmp_path, photographs):
    rows = []
    for missing in (0, 3):
        output = tmp_path / str(missing)
        vision_arguments = own_arguments("vision", output, tmp_path, photographs, missing=missing)
        assert main(vision_arguments) == 0
        rows.append(rows_of(output))
    tokens = {rate: row["tokens"] for rate, row in rows[0].items()}
    assert list(tokens) == [0.15, 0.35, 0.5, 0.75]
    assert 0 < tokens[0.15] < tokens[0.35] < tokens[0.5] < tokens[0.75]
    assert rows[0] == rows[1], "unreadable samples must not be counted"


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (CONFIG, ("--rates", "0.2", "1.5"), "--rates"),
        (CONFIG, ("--samples", "0"), "--samples"),
        (CONFIG.replace("albef_toy", "blip_toy"), (), "blip_mafa has no masked language modelling"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, caplog, config, more, message):
    assert main(["vision", "--cfg-path", config, "--output", str(tmp_path), *more]) == 1
    assert message in caplog.text


def test_checkpoint_without_language_head_is_rejected(tmp_path, checkpoint, caplog):
    content = torch.load(checkpoint, weights_only=True)
    without_head = {
        k: v for k, v in content["model"].items() if not k.startswith("text_encoder.cls.")
    }
    path = tmp_path / "retrieval.pth"
    torch.save({"model": without_head}, path)
    assert main(arguments("vision", tmp_path / "out", path, "--samples", 5)) == 1
    assert "language loss" in caplog.text
