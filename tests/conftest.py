"""Shared fixtures: a small toy world, a tiny model, and the repository's paths."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# First: the newest transformers lack names that LAVIS imports, and this package lends them.
import lavis_mafa  # noqa: F401

# Under other load an example takes seconds.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

ROOT = Path(__file__).resolve().parents[1]
# Helpers that tests of other folders use.
sys.path += [
    str(ROOT / "tests" / folder) for folder in ("settings", "downstream", "faults", "training")
]
sys.path.append(str(ROOT / "run_scripts"))
# A small set of photographs with captions in the format of LAVIS's `flickr30k`, if present.
PHOTOGRAPHS = Path(
    os.environ.get("LAVIS_MAFA_PHOTOGRAPHS", ROOT.parent / "shared" / "flickr8k-700")
)

# `bash run_scripts/test.sh --core` runs without the room of downstream tasks.
WITHOUT_DOWNSTREAM = find_spec("lavis_mafa.downstream") is None
collect_ignore = ["downstream"] if WITHOUT_DOWNSTREAM else []


def pytest_collection_modifyitems(items):
    if WITHOUT_DOWNSTREAM:
        absent = pytest.mark.skip(reason="lavis_mafa.downstream is not there")
        for item in items:
            if item.get_closest_marker("downstream"):
                item.add_marker(absent)


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests must not use the network


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory):
    """Give the tests a cache folder of their own, separate from the user's."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("LAVIS_MAFA_CACHE")
    os.environ["LAVIS_MAFA_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["LAVIS_MAFA_CACHE"]
    else:
        os.environ["LAVIS_MAFA_CACHE"] = before


@pytest.fixture(autouse=True)
def _same_threads():
    """Restore the number of threads that commands and measurements change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def toy_config(**build_info):
    """Return a config of the toy world `dense` with a few hundred pairs."""
    from lavis.datasets.builders.base_dataset_builder import load_dataset_config

    from lavis_mafa.toyworld import ToyScenesBuilder

    cfg = load_dataset_config(ToyScenesBuilder.default_config_path("dense"))
    sizes = {"train_size": 240, "val_size": 20, "test_size": 40, **build_info}
    cfg.build_info.update(sizes)
    return cfg


@pytest.fixture(scope="session")
def toy():
    """The toy world's splits: 240 training pairs, 20 and 40 evaluation images."""
    from lavis_mafa.toyworld import ToyScenesBuilder

    return ToyScenesBuilder(toy_config()).build_datasets()


@pytest.fixture(scope="session")
def toy_train(toy):
    from lavis_mafa.data import TrainingSet

    return TrainingSet(toy["train"], seed=0)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Paths of three tiny ALBEFs, each of which can be the model and the discriminator."""
    from small_world import save_model, toy_pairs

    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / f"{seed}.pth", toy_pairs(), seed) for seed in range(3)]


@pytest.fixture
def tiny():
    """A new tiny ALBEF with the same weights every time."""
    from lavis_mafa import load_model

    torch.manual_seed(0)
    return load_model("albef_mafa", "tiny")


def tiny_config(cls, **changes):
    """Return the `model` config of a class's smallest type, with changes."""
    from omegaconf import OmegaConf

    return OmegaConf.merge(OmegaConf.load(cls.default_config_path("tiny")).model, changes)


@pytest.fixture(scope="session")
def photographs():
    """The folder of real photographs with captions; skip the test if it is missing."""
    if not PHOTOGRAPHS.is_dir():
        pytest.skip("the photographs are not there (LAVIS_MAFA_PHOTOGRAPHS names their folder)")
    return PHOTOGRAPHS


def mini_batch(train_set, indices, epoch=0, grouped=True):
    """Return a collated mini-batch with the entries that the runner adds."""
    samples = train_set.collater([train_set[int(i), epoch] for i in indices])
    samples.update(epoch=epoch, grouped=grouped, iters=0, num_iters_per_epoch=10)
    return samples


@pytest.fixture
def free_port():
    """Return a free port for the rendezvous of ranks."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]
