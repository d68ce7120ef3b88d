"""Compare judging offline (`lavis_mafa.analysis`) with judging in the training loop.

Both use the same discriminator and the same nominations, of five captions an image in random
mini-batches. In the loop, Con-D encodes every mini-batch's images and captions and judges its
nominations; offline, an image is encoded once for all that its samples and captions nominated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from lavis_mafa.analysis.corpus import Corpus
from lavis_mafa.analysis.features import Features
from lavis_mafa.analysis.hard_negatives import HardNegatives, Sampling, hardest_negatives, order_of
from lavis_mafa.analysis.judged_pairs import pair_keys
from lavis_mafa.analysis.judging import judge, matching_offline
from lavis_mafa.analysis.loading import ModelAndData
from lavis_mafa.datasets.training_set import TrainingSet
from lavis_mafa.models import AlbefMafa
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from research.benchmarks.harness import Row, Sizes, Timed, side_by_side
from research.benchmarks.retrieval import CAPTIONS, WIDTH, captions, sized_config

# Images, mini-batch size, mini-batches judged in the loop.
WORK = {"quick": (8, 8, 5), "cpu": (10, 8, 1), "gpu": (1000, 96, 20)}
SAME = 1e-3  # largest difference of probabilities that are equal in fp32


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the seconds for a thousand judged pairs; one row for each number of nominations."""
    images, batch, batches = WORK[sizes.name]
    with tempfile.TemporaryDirectory() as folder:
        opened, features, in_loop, offline = parts(sizes, images, Path(folder))
        for top_k in (1, 5):
            yield _row(sizes, opened, features, in_loop, offline, (batch, batches, top_k))


def _row(
    sizes: Sizes,
    model_and_data: ModelAndData,
    features: Features,
    in_loop: ModelDiscriminator,
    offline: ModelDiscriminator,
    work: tuple[int, int, int],
) -> Row:
    batch, batches, top_k = work
    ids = model_and_data.data.image_ids
    order = order_of(Sampling("random", batch), features.vectors, features.texts, 0)
    nominations = hardest_negatives(order, batch, features, lambda a, b: a @ b.t(), ids, top_k)
    keys = pair_keys(nominations.image, nominations.text, len(features))
    distinct = np.unique(keys)  # `judge` is given distinct pairs
    shares = [nominations.batch == number for number in range(batches)]
    loaded = [
        model_and_data.data.pairs.collater([model_and_data.data.pairs[int(n), 0] for n in places])
        for places in order.reshape(-1, batch)[:batches]
    ]

    def loop() -> np.ndarray:
        parts = [
            _in_loop(in_loop, samples, nominations, share, model_and_data.device)
            for samples, share in zip(loaded, shares, strict=True)
        ]
        return torch.cat(parts).cpu().numpy()

    def offline_run() -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            pairs = distinct // len(features), distinct % len(features)
            return judge(model_and_data, features, *pairs, offline, Path(folder))

    in_loop_pairs = np.any(shares, axis=0)
    difference = np.abs(
        offline_run()[np.searchsorted(distinct, keys[in_loop_pairs])] - loop()
    ).max()
    if difference > (0.05 if sizes.gpu else SAME):
        raise AssertionError(f"probabilities differ by {difference:.2g}")
    timed = side_by_side(offline_run, loop, sizes.repeats, 0, sizes.device)
    in_the_loop = len(np.unique(keys[in_loop_pairs]))
    per_pair = Timed(
        1000 * timed.ours / len(distinct),
        1000 * timed.reference / in_the_loop,
        tuple(r * in_the_loop / len(distinct) for r in timed.ratios),
    )
    width = WIDTH.get(sizes.name, "tiny")
    return per_pair.row(
        f"judging, {CAPTIONS} captions an image, top_k {top_k}, width {width}: 1000 pairs",
        "<= 0.5",
        f"ours {len(distinct)} different pairs of {len(ids) // CAPTIONS} images, offline, verdicts "
        f"written; the loop {in_the_loop} of them, mini-batches of {batch}; ALBEF, "
        f"{in_loop.precision}, images in memory; probabilities equal within "
        f"{0.05 if sizes.gpu else SAME:g}"
        f"{'' if sizes.gpu else '; all in one chunk: larger data encode a caption more than once'}",
    )


def _in_loop(
    con_d: ModelDiscriminator,
    samples: dict[str, Any],
    nominations: HardNegatives,
    share: np.ndarray,
    device: torch.device,
) -> torch.Tensor:
    row_of = {int(number): k for k, number in enumerate(samples["index"])}
    image_of, text_of = (
        torch.tensor([row_of[int(n)] for n in column[share]], device=device)
        for column in (nominations.image, nominations.text)
    )
    inputs = {"image": samples["image"].to(device), "text_input": samples["text_input"]}
    return con_d.judge(inputs, image_of, text_of)


def parts(
    sizes: Sizes, images: int, folder: Path
) -> tuple[ModelAndData, Features, ModelDiscriminator, ModelDiscriminator]:
    """Build the data with features, and the discriminators of the loop and of the offline run."""
    cfg = OmegaConf.load(AlbefMafa.default_config_path("tiny")).model
    if not sizes.quick:
        cfg = OmegaConf.merge(cfg, sized_config(WIDTH[sizes.name], folder))
    torch.manual_seed(0)
    model = AlbefMafa.from_config(cfg)
    precision = "bf16" if sizes.gpu else "fp32"
    in_loop = ModelDiscriminator(model, precision)
    offline = matching_offline(ModelDiscriminator(model, precision))
    data = TrainingSet(_Pairs(images, cfg.image_size))
    device = torch.device(sizes.device)
    model.to(device)
    model_and_data = ModelAndData(None, model, Corpus(data, None), device)
    # Captions are near their image, as with a trained model.
    centre = torch.randn(images, 256).repeat_interleave(CAPTIONS, dim=0)
    feature_pair = [F.normalize(centre + torch.randn_like(centre), dim=1) for _ in range(2)]
    numbers = np.arange(len(data))
    features = Features(
        numbers, feature_pair[0], feature_pair[1], feature_pair[0], data.dataset.texts, []
    )
    return model_and_data, features, in_loop, offline


class _Pairs:
    """Random images with captions, in memory."""

    deterministic = True

    def __init__(self, images: int, side: int) -> None:
        self.images = torch.randn(images, 3, side, side)
        self.texts = captions(images * CAPTIONS)
        self.image_ids = np.repeat(np.arange(images), CAPTIONS)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {
            "image": self.images[self.image_ids[number]],
            "text_input": self.texts[number],
        }

    def caption(self, number: int) -> str:
        return self.texts[number]
