"""Measure each part of a MAFA step separately, in the authors' order of work and in ours.

The time of a part is that of its forward and backward pass, with the outputs of other parts given.
The optimiser's update is not measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.tokens import CON_D_TOKENS, TOKENS, Tokenizer, captions_of
from lavis_mafa.io.files import atomic_write
from lavis_mafa.models import AlbefMafa
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from research.benchmarks.harness import Row, Sizes, Timed, in_turn, progress
from research.benchmarks.reference_step import PlainAlbef, encode, fuse, masked_language
from research.benchmarks.step_models import albef_config, mini_batch
from research.benchmarks.steps import BATCH

PARTS = (
    "image encoder",
    "text encoder",
    "ITM",
    "MLM",
    "Con-D: images and captions",
    "Con-D: pairs",
)
Action = Callable[[], Any]


def rows(sizes: Sizes) -> list[Row]:
    """Time every part and their sum; the two sides take turns."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = albef_config(sizes, Path(folder))
        size = sizes.batch or BATCH[sizes.name]
        torch.manual_seed(0)
        plain, plain_con_d = (PlainAlbef(cfg).to(sizes.device).train() for _ in range(2))
        plain_con_d.eval().requires_grad_(False)
        ours = AlbefMafa.from_config(cfg).to(sizes.device).train()
        con_d = ModelDiscriminator(
            AlbefMafa.from_config(cfg).to(sizes.device), "bf16" if sizes.gpu else "fp32"
        )
        samples = mini_batch(size, cfg, sizes.device)
        reader = Tokenizer.of(ours)
        samples[TOKENS] = samples[CON_D_TOKENS] = reader(samples["text_input"]).to(sizes.device)
        pairs = _pairs(size, sizes.device)
        with torch.autocast(sizes.device, torch.bfloat16, enabled=sizes.gpu):
            both = {
                "ours": _parts_of_ours(ours, con_d, samples, pairs),
                "reference": _parts_of_reference(plain, plain_con_d, samples, pairs),
            }
        times: dict[str, dict[str, list[float]]] = {"ours": {}, "reference": {}}
        for part in PARTS:
            progress(part)
            actions = {side: _run(both[side][part], sizes) for side in both}
            for side, seconds in in_turn(actions, sizes.repeats, device=sizes.device).items():
                times[side][part] = seconds
    note = f"B = {size}, both {con_d.precision}; ours read tokens"
    found = [Timed.of(times["ours"][p], times["reference"][p]).row(p, note=note) for p in PARTS]
    sums = {
        side: [sum(turn) for turn in zip(*parts.values(), strict=True)]
        for side, parts in times.items()
    }
    return [*found, Timed.of(sums["ours"], sums["reference"]).row("all parts", note=note)]


def _pairs(size: int, device: str) -> tuple[Tensor, Tensor]:
    """Return every anchor's pair with one other caption and one other image, 2 B pairs."""
    own = torch.arange(size, device=device)
    other = (own + 1) % size
    return torch.cat([own, other]), torch.cat([other, own])


def _run(action: Action, sizes: Sizes) -> Action:
    def run() -> None:
        with torch.autocast(sizes.device, torch.bfloat16, enabled=sizes.gpu):
            output = action()
        if output is not None:
            output.float().square().mean().backward()

    return run


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _parts_of_reference(
    model: PlainAlbef, con_d: PlainAlbef, samples: dict[str, Any], pairs: tuple[Tensor, Tensor]
) -> dict[str, Action]:
    image_of, text_of = pairs
    own = torch.arange(len(samples["image"]), device=image_of.device)
    with torch.no_grad():
        image_embeds, text_embeds, text = encode(model, samples)
        judged = encode(con_d, samples)
    image_embeds, text_embeds, mask = _leaf(image_embeds), _leaf(text_embeds), text.attention_mask

    def itm() -> Tensor:
        positives = fuse(model, image_embeds, text_embeds, mask, own, own)
        return torch.cat(
            [positives, fuse(model, image_embeds, text_embeds, mask, image_of, text_of)]
        )

    @torch.no_grad()
    def judge() -> None:
        for rows in (slice(0, len(own)), slice(len(own), None)):
            fuse(con_d, *judged[:2], mask, image_of[rows], text_of[rows])

    return {
        "image encoder": lambda: model.visual_encoder.forward_features(samples["image"]),
        "text encoder": lambda: (
            model.text_encoder.bert(
                text.input_ids, attention_mask=mask, return_dict=True, mode="text"
            ).last_hidden_state
        ),
        "ITM": itm,
        "MLM": lambda: masked_language(model, image_embeds[own], text, own),
        "Con-D: images and captions": lambda: _nothing(torch.no_grad()(encode)(con_d, samples)),
        "Con-D: pairs": judge,
    }


def _parts_of_ours(
    model: AlbefMafa,
    con_d: ModelDiscriminator,
    samples: dict[str, Any],
    pairs: tuple[Tensor, Tensor],
) -> dict[str, Action]:
    backbone, captions = model.backbone, captions_of(samples)
    image_of, text_of = pairs
    own = torch.arange(len(samples["image"]), device=image_of.device)
    everyone = torch.cat([own, image_of]), torch.cat([own, text_of])
    with torch.no_grad():
        embeds = _leaf(backbone.encode_images(samples["image"]).embeds)
        encoded = backbone.encode_texts(captions)
    assert encoded.embeds is not None
    texts = Texts(encoded.ids, encoded.mask, _leaf(encoded.embeds))

    def mlm() -> Tensor:
        # In a step, ITM has already computed keys and values of the images.
        images = Images(embeds, memory={key: (*map(_leaf, kv), None) for key, kv in kept.items()})
        return backbone.language_losses(images, texts, own, own)

    first = Images(embeds)
    backbone.match(first, texts, *everyone)
    kept: Mapping[Any, Sequence[Tensor]] = {
        made_by: (key.detach(), value.detach()) for made_by, (key, value, _) in first.memory.items()
    }
    judge = _judge(con_d, samples, pairs)
    return {
        "image encoder": lambda: backbone.image_tokens(samples["image"]),
        "text encoder": lambda: backbone.encode_texts(captions).embeds,
        "ITM": lambda: backbone.match(Images(embeds), texts, *everyone),
        "MLM": mlm,
        **judge,
    }


def _judge(
    con_d: ModelDiscriminator, samples: dict[str, Any], pairs: tuple[Tensor, Tensor]
) -> dict[str, Action]:
    """Split Con-D's work into encoding, which needs no pairs, and judging the pairs."""
    nothing = pairs[0][:0], pairs[1][:0]
    device = samples["image"].device.type
    encoded: list[Any] = []

    def keep_encoded() -> None:
        with (
            torch.inference_mode(),
            torch.autocast(device, torch.bfloat16, enabled=con_d.precision == "bf16"),
        ):
            images = con_d.backbone.encode_images(samples["image"], for_matching=True)
            texts = con_d.backbone.encode_texts(
                captions_of(samples, CON_D_TOKENS), for_matching=True
            )
            encoded[:] = [images, texts]

    def judge_pairs() -> None:
        images, texts = encoded
        with (
            torch.inference_mode(),
            torch.autocast(device, torch.bfloat16, enabled=con_d.precision == "bf16"),
        ):
            con_d.backbone.match(Images(images.embeds), texts, *pairs)

    keep_encoded()
    return {
        "Con-D: images and captions": lambda: _nothing(con_d.judge(samples, *nothing)),
        "Con-D: pairs": judge_pairs,
    }


def _nothing(result: Any) -> None:
    """Discard the result of a part without a backward pass."""


def draw(path: Path, found: Sequence[Row]) -> None:
    """Draw the parts of both sides as stacked bars in an SVG; the reference's sum is 100 %."""
    parts = [row for row in found if row.what in PARTS]
    whole_step = sum(row.reference or 0.0 for row in parts)
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for place, side in enumerate(("ours", "reference")):
            begin = 0.0
            for number, row in enumerate(parts):
                share = 100 * (getattr(row, side) or 0.0) / whole_step
                axes.barh(place, share, left=begin, color=f"C{number}", label=row.what)
                if share >= 3:
                    axes.text(begin + share / 2, place, f"{share:.0f}", ha="center", va="center")
                begin += share
            axes.text(begin + 0.5, place, f"{begin:.0f} %", va="center")
        axes.set_yticks([0, 1], ["lavis_mafa", "authors' order"])
        axes.set_xlabel("time of a step's parts, % of their sum in the authors' order of work")
        axes.set_title(parts[0].note, fontsize="small")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles[: len(parts)], labels[: len(parts)], loc="outside upper center", ncol=3
        )
        with atomic_write(path) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
