"""TCL in the training step: its losses against loops over pairs, and the second view."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import mini_batch, tiny_config
from PIL import Image
from torchvision import transforms

from lavis_mafa.algorithm.momentum import SECOND_VIEW
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.data.training_set import TrainingSet
from lavis_mafa.families import AlbefMafa, BlipMafa

SIZE, QUEUE = 5, 7
THIRD = 1 / 3


def tcl_model(family, same_image="negative", **weights):
    weights = {"itc": THIRD, "imc": THIRD, "lmi": THIRD, **weights}
    mafa = {
        "soft_labels": {"type": "momentum"},
        "same_image": same_image,
        "loss_weights": weights,
    }
    torch.manual_seed(0)
    model = family.from_config(tiny_config(family, mafa=mafa, queue_size=QUEUE)).eval()
    with torch.no_grad():  # make the copies differ from the encoders
        for name, weight in model.named_parameters():
            if "_m." in name:
                weight.add_(0.02 * torch.randn_like(weight))
    model.momentum_encoders.rate = 1.0
    return model


@pytest.fixture
def samples(toy_train):
    batch = mini_batch(toy_train, range(SIZE), epoch=5)
    noise = torch.randn(batch["image"].shape, generator=torch.Generator().manual_seed(1))
    return {**batch, SECOND_VIEW: batch["image"] + noise, "num_iters_per_epoch": 10}


def nce(feature, targets, which, temperature):
    """-log of one target's share of all scores."""
    scores = [math.exp(float(feature @ x) / temperature) for x in targets]
    return -math.log(scores[which] / sum(scores))


@pytest.mark.parametrize("same_image", ["negative", "positive"])
def test_both_losses_equal_loops_over_pairs(samples, same_image):
    model = tcl_model(AlbefMafa, same_image)
    samples["image_id"] = torch.tensor([0, 0, 1, 2, 2])
    positives_of = [[0], [1], [2], [3], [4]]
    if same_image == "positive":
        positives_of = [[0, 1], [0, 1], [2], [3, 4], [3, 4]]
    queues = model.image_queue.t().clone(), model.text_queue.t().clone()
    output = model(samples)
    with torch.no_grad():
        images = model.backbone.encode_images(samples["image"])
        texts = model.backbone.encode_texts(samples["text_input"])
        driver = model.momentum_encoders.backbone
        images_m = driver.encode_images(samples[SECOND_VIEW])
        texts_m = driver.encode_texts(samples["text_input"])
    temperature = model.temp.item()
    imc, lmi = [], []
    for encoded, momentum, queue, head, kind in (
        (images, images_m, queues[0], model.vision_proj_m, "image"),
        (texts, texts_m, queues[1], model.text_proj_m, "text"),
    ):
        regions = []
        for b in range(SIZE):
            local = [F.normalize(head(x), dim=0) for x in momentum.embeds[b, 1:]]
            if kind == "text":
                words = int(texts.mask[b].sum()) - 1
                local = local[:words]
            else:  # a window of the tiny model is one patch, or its patches are averaged here
                side = math.isqrt(len(local))
                window = math.isqrt(side)
                grid = torch.stack(local).view(side, side, -1)
                cells = range(0, side - window + 1, window)
                local = [
                    grid[r : r + window, c : c + window].flatten(0, 1).mean(dim=0)
                    for r in cells
                    for c in cells
                ]
            regions.append(local)
        for b in range(SIZE):
            feature, rest = (
                encoded.features[b],
                [k for k in range(SIZE) if k not in positives_of[b]],
            )
            targets = [*momentum.features, *queue]
            found = [nce(feature, targets, k, temperature) for k in positives_of[b]]
            imc.append(sum(found) / len(found))
            regions_of_others = [x for k in rest for x in regions[k]]
            found = [nce(feature, [x, *regions_of_others], 0, temperature) for x in regions[b]]
            lmi.append(sum(found) / len(found))
    assert output.loss_imc.item() == pytest.approx(sum(imc) / len(imc), rel=1e-4)
    assert output.loss_lmi.item() == pytest.approx(sum(lmi) / len(lmi), rel=1e-4)
    aligned = output.loss_itc + output.loss_imc + output.loss_lmi
    expected = aligned / 3 + output.loss_itm + output.loss_lm
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_only_the_momentum_encoders_use_the_second_view(samples):
    """Its features are also used for ITC's soft labels and for the queue, as in TCL."""
    model = tcl_model(AlbefMafa)
    model(samples)
    momentum = model.momentum_encoders.backbone.encode_images(samples[SECOND_VIEW])
    assert torch.allclose(model.image_queue.t()[:SIZE], momentum.features, atol=1e-5)
    model = tcl_model(AlbefMafa)
    del samples[SECOND_VIEW]
    model(samples)
    momentum = model.momentum_encoders.backbone.encode_images(samples["image"])
    assert torch.allclose(model.image_queue.t()[:SIZE], momentum.features, atol=1e-5)


def test_gradients_reach_both_encoders_but_no_copy(samples):
    model = tcl_model(AlbefMafa, itc=0.0, itm=0.0, lm=0.0)
    model(samples).loss.backward()
    for part in ("visual_encoder", "vision_proj", "text_proj"):
        grads = [p.grad for p in getattr(model, part).parameters() if p.grad is not None]
        assert sum(float(g.abs().sum()) for g in grads) > 0, part
    assert model.temp.grad.abs() > 0
    assert all(p.grad is None for n, p in model.named_parameters() if "_m." in n)


def test_missing_momentum_encoders_are_rejected(samples):
    plain = AlbefMafa.from_config(tiny_config(AlbefMafa))
    settings = StepSettings(loss_weights={"itc": 1.0, "itm": 1.0, "lm": 1.0, "imc": 1.0})
    with pytest.raises(ValueError, match="imc and lmi .TCL. need soft_labels.type: momentum"):
        run_step(plain.backbone, samples, settings)


def test_blip_supports_only_the_intra_modal_loss(samples):
    assert tcl_model(BlipMafa, lmi=0.0)(samples).loss_imc > 0
    with pytest.raises(ValueError, match="needs states of words"):
        tcl_model(BlipMafa)(samples)


class NoiseImages(torch.utils.data.Dataset):
    """A noise image; counts how often an image is read."""

    def __init__(self, processor):
        self.vis_processor, self.reads = processor, 0
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(0, 256, (40, 50, 3), generator=generator, dtype=torch.uint8)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.reads += 1
        picture = Image.fromarray(self.pixels.numpy())
        return {"image": self.vis_processor(picture), "text_input": f"picture {index}"}


RANDOM = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])


def test_second_view_depends_on_seed_epoch_and_index():
    plain = TrainingSet(NoiseImages(RANDOM), seed=3)
    data = NoiseImages(RANDOM)
    train = TrainingSet(data, seed=3)
    assert train.add_view(SECOND_VIEW)
    sample = train[2, 1]
    assert data.reads == 1
    assert not torch.equal(sample["image"], sample[SECOND_VIEW])
    assert torch.equal(sample["image"], plain[2, 1]["image"]), "the first view is as without it"
    torch.manual_seed(99)
    assert torch.equal(sample[SECOND_VIEW], train[2, 1][SECOND_VIEW])
    for other in (train[2, 2], train[1, 1]):
        assert not torch.equal(sample[SECOND_VIEW], other[SECOND_VIEW])
    batch = train.collater([train[i, 0] for i in range(3)])
    assert batch[SECOND_VIEW].shape == (3, 3, 16, 16)


def test_several_views_of_one_sample():
    train = TrainingSet(NoiseImages(RANDOM), seed=3)
    size = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    assert train.add_view("con_d_image", size) and train.add_view(SECOND_VIEW)
    sample = train[0, 0]
    assert sample["con_d_image"].shape == (3, 8, 8) and sample[SECOND_VIEW].shape == (
        3,
        16,
        16,
    )
