"""A tiny model and Con-D saved in files, and calls of the analysis commands on the toy world."""

from __future__ import annotations

import os

import numpy as np
import torch
from conftest import ROOT, mini_batch, toy_config
from runs import finish, launcher, spawn

from lavis_mafa import load_model
from lavis_mafa.cli import main
from lavis_mafa.data import TrainingSet
from lavis_mafa.judges.discriminators import ModelDiscriminator
from lavis_mafa.tools.corpus_features import Features
from lavis_mafa.toyworld import ToyScenesBuilder

CONFIG = str(ROOT / "projects/mafa/train/albef_toy.yaml")
SIZE = 150
# This world has matching captions of other images even in so few pairs.
DENSE = "datasets.toy_scenes.type=dense"


def toy_pairs(size=SIZE, **build_info):
    """Return the training pairs of the toy world."""
    built = ToyScenesBuilder(toy_config(train_size=size, **build_info)).build_datasets()
    return TrainingSet(built["train"], seed=0)


def features_of(size, seed, width=3, queries=0):
    """Return random features on a coarse grid, so that many similarities are equal."""
    rng = np.random.default_rng(seed)
    vectors, texts = (
        torch.from_numpy(rng.integers(-2, 3, (size, width)).astype(np.float32)) for _ in range(2)
    )
    images = vectors
    if queries:
        images = torch.from_numpy(rng.integers(-2, 3, (size, queries, width)).astype(np.float16))
    captions = [str(k) for k in range(size)]
    return Features(np.arange(size) * 2, images, texts, vectors, captions, [])


def accept_half(model, samples, factor):
    """Scale the ITM head and set its bias so that Con-D accepts half of the samples' pairs."""
    numbers = torch.arange(len(samples["image"]))
    pairs = torch.cartesian_prod(numbers, numbers).unbind(1)
    model.itm_head.weight.data *= factor
    for _ in range(2):
        odds = torch.logit(ModelDiscriminator(model).judge(samples, *pairs).double(), eps=1e-12)
        model.itm_head.bias.data[1] -= odds.median().float()


def save_model(path, train_set, seed):
    """Save a random tiny ALBEF that accepts about half of all pairs as Con-D; return the path."""
    torch.manual_seed(seed)
    model = load_model("albef_mafa", "tiny")
    accept_half(model, mini_batch(train_set, range(20)), 100.0)
    torch.save({"model": load_model("albef_mafa", "tiny").state_dict() | model.state_dict()}, path)
    return str(path)


def arguments(command, output, model, *more, options=(), size=SIZE):
    """Return the command's arguments for ``size`` pairs of the toy world."""
    return [
        command,
        "--cfg-path",
        CONFIG,
        "--output",
        str(output),
        "--checkpoint",
        str(model),
        "--options",
        DENSE,
        f"datasets.toy_scenes.build_info.train_size={size}",
        *options,
        *map(str, more),
    ]


def con_d(name, path):
    return [f"{name}.arch=albef_mafa", f"{name}.model_type=tiny", f"{name}.checkpoint={path}"]


def call(*args):
    """Run a command in this process; it must succeed."""
    assert main([str(a) for a in args]) == 0


def call_ranks(ranks, *args, program="lavis_mafa"):
    """Run a command in processes of its own, on several ranks; return its output."""
    command = [*launcher(ranks if ranks > 1 else None), "-m", program, *args]
    return finish(spawn(os.getcwd(), command))
