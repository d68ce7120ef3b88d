"""Profiles of soft labels: closed forms, slow loops, the labels of training, the command."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from conftest import mini_batch
from small_world import CONFIG, arguments, save_model

from lavis_mafa import load_model
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.losses.contrastive import contrastive_loss
from lavis_mafa.algorithm.mining import find_connections
from lavis_mafa.algorithm.pickers import hardest
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.mining.features import Features
from lavis_mafa.models.con_d.discriminators import _Oracle
from lavis_mafa.models.families.albef.albef_driver import AlbefBackbone
from research.__main__ import main
from research.label_profile import LabelProfile, Stream, labels_of

CPU = torch.device("cpu")


class FeatureBackbone(AlbefBackbone):
    """A backbone that only compares features."""

    temperature = torch.tensor(0.2)

    def __init__(self):
        super().__init__(torch.nn.Module())


def random_stream(size, batch, queue, seed=0, images=None):
    """Return random features of the model and of different momentum encoders; images repeat."""
    rng = torch.Generator().manual_seed(seed)

    def features():
        vectors, texts = (
            torch.nn.functional.normalize(torch.randn(size, 6, generator=rng), dim=1)
            for _ in range(2)
        )
        return Features(np.arange(size), vectors, texts, vectors, [""] * size, [])

    order = np.random.default_rng(seed).permutation(size)
    ids = np.random.default_rng(seed + 1).integers(0, images or 10**6, size)
    return Stream(order, batch, queue, features(), features(), ids)


def soft_labels(kind, alpha, stream, step, same_image="positive", judge=None):
    """Return the labels of a mini-batch ``(2 B, N)``."""
    compared, positives = stream.compare(
        step, FeatureBackbone(), same_image, kind == "momentum", CPU
    )
    own = torch.arange(len(positives))
    chosen = StepSettings(same_image=same_image)
    i2t, t2i, _ = find_connections(
        compared.i2t[:, : len(own)],
        compared.t2i[:, : len(own)],
        *(positives, own, [hardest, hardest], chosen.connections, judge),
    )
    return labels_of(kind, alpha, compared, i2t, t2i, chosen)


def profile_of(given_labels, bounds):
    profile = LabelProfile(given_labels.shape[1], bounds)
    profile.add(given_labels)
    return profile


def test_one_hot_labels_are_concentrated_in_the_first_place():
    profile = profile_of(soft_labels("one_hot", 0.0, random_stream(12, 12, 0), 0), (5, 12))
    assert profile.mean[0] == 1.0 and profile.groups() == [(1.0, 0.0), (0.0, 0.0)]


def test_smoothed_labels_reproduce_the_paper():
    profile = profile_of(soft_labels("smoothed", 0.5, random_stream(96, 96, 0), 0), (5, 96))
    (top, no_spread), (rest, _) = profile.groups()
    assert top == pytest.approx(0.5 + 0.5 * 5 / 96, abs=1e-6)
    assert (f"{top:.4f}", f"{rest:.4f}") == ("0.5260", "0.4740"), "MAFA Table 2"
    assert no_spread == pytest.approx(0.0, abs=1e-6) and profile.anchors == 192


def slow_labels(stream, step, alpha, momentum):
    """The labels of a mini-batch anchor by anchor, as in MAFA 4.2."""
    mini_batch = stream.mini_batch(step).tolist()
    first = step * stream.batch_size
    queue = stream.order[first - stream.queue_size : first].tolist() if momentum else []
    features = stream.momentum_features if momentum else stream.features
    candidates, ids, rows = mini_batch + queue, stream.image_ids, []
    for of_image in (True, False):
        for anchor in mini_batch:
            weights = []
            for candidate in candidates:
                # p~: the same direction by the momentum encoders, otherwise the opposite one.
                pair = (anchor, candidate) if of_image == momentum else (candidate, anchor)
                image, text = features.images[pair[0]], features.texts[pair[1]]
                weights.append(math.exp(sum(map(math.prod, zip(image, text, strict=True))) / 0.2))
            same = [ids[candidate] == ids[anchor] for candidate in candidates]
            both = zip(same, weights, strict=True)
            rows.append([(1 - alpha) * s / sum(same) + alpha * w / sum(weights) for s, w in both])
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["consistency", "momentum"])
@pytest.mark.parametrize("alpha", [0.2, 0.9])
def test_model_labels_equal_slow_loop(kind, alpha):
    stream = random_stream(40, 8, 20 if kind == "momentum" else 0, images=15)
    step = 3
    fast = soft_labels(kind, alpha, stream, step)
    slow = slow_labels(stream, step, alpha, kind == "momentum")
    assert fast.shape == (16, 28 if kind == "momentum" else 8)
    assert torch.allclose(fast, slow, atol=1e-6)
    profile = profile_of(fast, (3, 8))
    ordered = np.array([sorted(row, reverse=True) for row in slow.tolist()])
    ends = [0, 3, 8, 28][: 4 if kind == "momentum" else 3]
    for (mean, sd), start, end in zip(profile.groups(), ends[:-1], ends[1:], strict=True):
        sums = ordered[:, start:end].sum(axis=1)
        assert mean == pytest.approx(sums.mean(), abs=1e-6)
        assert sd == pytest.approx(sums.std(), abs=1e-5)


def test_queued_pairs_of_one_image_are_negatives_with_same_image_negative():
    stream = random_stream(24, 8, 16, images=4)
    assert int((soft_labels("momentum", 0.0, stream, 2, "negative") > 0).sum()) == 16
    assert int((soft_labels("momentum", 0.0, stream, 2, "positive") > 0).sum()) > 40


def test_labels_equal_those_of_training(toy_train, tiny):
    """With converted hard negatives: the loss of a step is the cross-entropy with these labels."""
    count = 24
    samples = mini_batch(toy_train, range(count))
    con_d = _Oracle()
    con_d.truth = toy_train.truth
    for kind, alpha in (("one_hot", 0.0), ("smoothed", 0.3)):
        chosen = StepSettings(soft_labels=SoftLabels(kind, alpha=alpha))
        with torch.no_grad():
            output = run_step(tiny.eval().backbone, samples, chosen, con_d)
            images = tiny.backbone.encode_images(samples["image"]).features
            texts = tiny.backbone.encode_texts(samples["text_input"]).features
        encoded = Features(np.arange(count), images, texts, images, samples["text_input"], [])
        ids = samples["image_id"].numpy()
        stream = Stream(np.arange(count), count, 0, encoded, encoded, ids)
        compared, _ = stream.compare(0, tiny.backbone, "positive", False, CPU)
        both_sides = labels_of(kind, alpha, compared, output.i2t, output.t2i, chosen)
        assert int((output.i2t.state == 2).sum()) > 0, "something must be converted"
        losses = [
            contrastive_loss(sim, side_labels)
            for sim, side_labels in zip(
                (compared.i2t, compared.t2i), both_sides.chunk(2), strict=True
            )
        ]
        assert output.loss_itc.item() == pytest.approx(sum(losses).item() / 2, rel=1e-5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, toy_train):
    return save_model(tmp_path_factory.mktemp("models") / "model.pth", toy_train, 0)


OPTIONS = ("run.batch_size_train=16", "run.grit.search_space=48", "run.grit.queue_size=96")
MORE = ("--mini-batches", 4, "--queue-size", 40)


def rows_of(folder):
    rows = json.loads((folder / "profile.json").read_text())["rows"]
    return {(row["labels"], row["sampling"]): row for row in rows}


def test_command_on_the_toy_world(tmp_path, checkpoint, capsys):
    main(arguments("profile", tmp_path, checkpoint, *MORE, options=OPTIONS))
    rows = rows_of(tmp_path)
    assert "S-ITC" in capsys.readouterr().out and len(rows) == 2 * 4
    for (kind, _), row in rows.items():
        assert row["anchors"] == 2 * 4 * 16
        assert sum(group["sum"] for group in row["groups"]) == pytest.approx(1.0, abs=1e-5)
        assert len(row["groups"]) == (3 if kind == "momentum" else 2)
    alpha = rows["smoothed", "grit"]["alpha"]
    assert rows["one_hot", "grit"]["mean_sorted"][0] == pytest.approx(1.0)
    top = rows["smoothed", "grit"]["groups"][0]["sum"]
    assert top == pytest.approx(1 - alpha + alpha * 5 / 16)
    text = (tmp_path / "profile.md").read_text()
    assert "momentum distillation" in text and "0.9822" in text


def test_labels_use_the_momentum_encoders_of_the_checkpoint(tmp_path):
    torch.manual_seed(1)
    model = load_model("albef_mafa", "tiny")
    torch.manual_seed(2)
    other = load_model("albef_mafa", "tiny")
    copies = {
        f"{part}_m.{name}": value
        for part in ("visual_encoder", "text_encoder", "vision_proj", "text_proj")
        for name, value in getattr(other, part).state_dict().items()
    }
    path = tmp_path / "with_copies.pth"
    torch.save({"model": {**model.state_dict(), **copies}}, path)
    profiles = {}
    for kind in ("momentum", "smoothed"):
        chosen = (*OPTIONS, f"model.mafa.soft_labels.type={kind}")
        main(arguments("profile", tmp_path / kind, path, *MORE, options=chosen))
        profiles[kind] = rows_of(tmp_path / kind)["momentum", "random"]["mean_sorted"]
    assert profiles["momentum"] != pytest.approx(profiles["smoothed"], rel=1e-3)


def test_invalid_arguments_are_rejected(tmp_path, caplog, capsys):
    given_arguments = ["profile", "--cfg-path", CONFIG, "--output", str(tmp_path)]
    size = "datasets.toy_scenes.build_info.train_size=150"
    options = ["--options", *OPTIONS, "run.batch_size_train=5", size]
    assert main([*given_arguments, *options]) == 1
    assert "run.batch_size_train 5: expected more than 5" in caplog.text
    with pytest.raises(SystemExit):
        main([*given_arguments, "--mini-batches", "0"])
    assert "--mini-batches: 0: expected" in capsys.readouterr().err
