"""MAFA in one file: train two small encoders and a fusion layer on the toy world, in plain PyTorch.

Equations and Algorithm 1 are those of MAFA; section 4.1 of GRIT-VLP describes the grouping.
The toy world knows which pairs really match, so the oracle is the connection discriminator Con-D.

It is a reference to read, not a benchmark: it trains for half a minute, in which smoothed labels
slow ITC down, and ``--plain`` (no Con-D, one-hot labels) ends with a higher R@1.

    python examples/mafa_from_scratch.py [--epochs 14] [--pairs 2400] [--plain]
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa import (
    Connections,
    GritSchedule,
    GritSettings,
    MiningRule,
    contrastive_loss,
    find_connections,
    hardest,
    known_positives,
    labels_from_positives,
    mask_tokens,
    matching_losses,
    smooth,
)
from lavis_mafa.toyworld import (
    WorldConfig,
    make_captions,
    make_scenes,
    render,
    valid_matrix,
    vocabulary,
)

WIDTH, BATCH, ALPHA = 64, 48, 0.2
PAD, CLS, MASK = 0, 1, 2  # token ids; words follow


class World:
    """N images with one caption each, their tokens (N, L), and which pairs match (N, N)."""

    def __init__(self, size: int, seed: int, words: list[str]) -> None:
        rng, config = np.random.default_rng(seed), WorldConfig(grid=1, max_objects=1)
        scenes = make_scenes(config, size, rng)
        captions, texts = make_captions(config, scenes, rng)
        pixels = torch.from_numpy(render(config, scenes, rng)).permute(0, 3, 1, 2)
        self.images = pixels / 127.5 - 1.0
        self.truth = torch.from_numpy(valid_matrix(scenes, captions))
        ids = [[CLS, *(3 + words.index(word) for word in text.split())] for text in texts]
        self.tokens = torch.full((size, max(map(len, ids))), PAD)
        for row, one in zip(self.tokens, ids, strict=True):
            row[: len(one)] = torch.tensor(one)


class Model(nn.Module):
    """An image encoder, a text encoder, and a layer in which texts attend to images."""

    def __init__(self, words: int, length: int) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(3, WIDTH, 2, 2), nn.GELU(), nn.Conv2d(WIDTH, WIDTH, 2, 2), nn.GELU()
        )
        self.where = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.embed, self.place = nn.Embedding(words, WIDTH), nn.Embedding(length, WIDTH)
        layer = dict(nhead=4, dim_feedforward=2 * WIDTH, dropout=0.0, batch_first=True)
        self.see = nn.TransformerEncoderLayer(WIDTH, **layer)
        self.read = nn.TransformerEncoderLayer(WIDTH, **layer)
        self.fuse = nn.TransformerDecoderLayer(WIDTH, **layer)
        self.itm_head, self.mlm_head = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, words)
        self.temperature = nn.Parameter(torch.tensor(0.07))

    def image(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        embeds = self.see(self.patches(pixels).flatten(2).transpose(1, 2) + self.where)
        return embeds, F.normalize(embeds.mean(1), dim=1)

    def text(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        places = self.place(torch.arange(tokens.shape[1]))
        embeds = self.read(self.embed(tokens) + places, src_key_padding_mask=tokens == PAD)
        return embeds, F.normalize(embeds[:, 0], dim=1)

    def fused(self, images: Tensor, texts: Tensor, tokens: Tensor) -> Tensor:
        return self.fuse(texts, images, tgt_key_padding_mask=tokens == PAD)


def step(model: Model, world: World, index: Tensor, rule: MiningRule | None, alpha: float):
    """One mini-batch: losses, what was found, and the features that GRIT collects."""
    tokens, own = world.tokens[index], torch.arange(len(index))
    (v, image), (t, text) = model.image(world.images[index]), model.text(tokens)
    # Similarities over the temperature. The other modality is detached (MAFA 4.2): image to text
    # trains the image encoder, text to image the text encoder.
    sims = image @ text.detach().T / model.temperature, text @ image.detach().T / model.temperature

    # Algorithm 1: the hardest negative of every anchor is judged. p > high: a false negative, which
    # becomes a positive; low < p <= high: ambiguous, replaced by the second hardest.
    def judge(images: Tensor, texts: Tensor) -> Tensor:
        return world.truth[index[images], index[texts]].float()

    positives, chosen = known_positives({}, own, len(own)), rule or MiningRule()
    i2t, t2i, _ = find_connections(
        *(sim.detach() for sim in sims), positives, own, (hardest, hardest), chosen, rule and judge
    )
    # S-ITC, eq. 5: (1 - alpha) y + alpha / N, where y is 1 for the own pair, or 0.5 / 0.5 with a
    # mined one; eq. 1: its cross-entropy, the mean of both directions.
    itc: Tensor = torch.zeros(())
    for sim, found in zip(sims, (i2t, t2i), strict=True):
        labels = smooth(labels_from_positives(found.itc_targets(chosen)[0]), alpha)
        itc = itc + contrastive_loss(sim, labels) / 2
    # ITM, eq. 3: own pairs are positive, hard negatives as Con-D says.
    rows, texts, label_i2t = i2t.itm_pairs(chosen)
    columns, images, label_t2i = t2i.itm_pairs(chosen)
    image_of, text_of = torch.cat([own, rows, images]), torch.cat([own, texts, columns])
    labels = torch.cat([torch.ones(len(own)), label_i2t, label_t2i])
    states = model.fused(v[image_of], t[text_of], tokens[text_of])[:, 0]
    itm = matching_losses(model.itm_head(states), labels).mean()
    # MLM, eq. 4: own pairs, and mined ones from both sides, each pair once; half of the words are
    # masked (GRIT-VLP).
    pairs = torch.cat([torch.stack(i2t.mined(chosen)), torch.stack(t2i.mined(chosen)).flip(0)], 1)
    image_of, text_of = torch.cat([torch.stack([own, own]), torch.unique(pairs, dim=1)], 1)
    masked, targets = mask_tokens(tokens[text_of], 0.5, MASK, len(model.embed.weight), (PAD, CLS))
    states = model.fused(v[image_of], model.text(masked)[0], masked)
    mlm = F.cross_entropy(model.mlm_head(states).transpose(1, 2), targets)  # ignores unmasked words
    return {"itc": itc, "itm": itm, "mlm": mlm}, (i2t, t2i), image.detach(), text.detach()


def missed(found: Connections, truth: Tensor) -> tuple[int, int]:
    """Count the hard negatives that match, and those that ITM learns as "no match" all the same."""
    rows, candidates, labels = found.itm_pairs(MiningRule())
    in_itm = truth[rows, candidates] & (labels == 0)
    return int(truth[found.anchor, found.hard].sum()), int(in_itm.sum())


@torch.no_grad()
def recall(model: Model, world: World) -> float:
    """Return R@1 of texts for images in percent: the best text is true of the image."""
    best = (model.image(world.images)[1] @ model.text(world.tokens)[1].T).argmax(1)
    return 100.0 * world.truth[torch.arange(len(best)), best].float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--pairs", type=int, default=2400, help="training pairs")
    parser.add_argument("--plain", action="store_true", help="without Con-D and smoothing")
    args = parser.parse_args()
    torch.set_num_threads(1)  # matrices are small: threads would cost more than they save
    torch.manual_seed(0)
    words = vocabulary()
    train, test = World(args.pairs, 1, words), World(200, 2, words)
    model = Model(3 + len(words), 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # Every epoch's features decide which similar pairs share a mini-batch in the next (GRIT).
    schedule = GritSchedule(args.pairs, BATCH, GritSettings(enabled=True, search_space=480))
    rule = None if args.plain else MiningRule(low=0.5, high=0.8)
    print(f"before training: R@1 {recall(model, test):.1f}")
    for epoch in range(args.epochs):
        plan = schedule.begin(epoch)
        total, counts = dict.fromkeys(("itc", "itm", "mlm"), 0.0), np.zeros(2, int)
        for index in torch.from_numpy(plan.mini_batches(rank=0)):
            # Labels stay one-hot in the random first epoch.
            alpha = ALPHA if plan.grouped and not args.plain else 0.0
            losses, (i2t, t2i), image, text = step(model, train, index, rule, alpha)
            optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.temperature.clamp_(0.001, 0.5)
            schedule.collect(index, image, text)
            total = {name: total[name] + losses[name].item() / plan.steps for name in total}
            truth = train.truth[index][:, index]
            counts += np.add(missed(i2t, truth), missed(t2i, truth.T))
        schedule.end(epoch)
        print(
            f"epoch {epoch}: " + "  ".join(f"{name} {value:.3f}" for name, value in total.items()),
            f"  false negatives: {counts[0]} picked, {counts[1]} left in ITM",
        )
    print(f"after training: R@1 {recall(model, test):.1f}")


if __name__ == "__main__":
    main()
