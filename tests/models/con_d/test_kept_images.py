"""Cached outputs of Con-D's image encoder: each image is computed once, despite crashes, ranks,
epochs.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, mini_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image
from small_world import accept_half
from torch.utils.data import Subset
from two_forks import answers_of_a_group

from lavis_mafa import load_model
from lavis_mafa.algorithm.discriminator import VIEW
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.config.con_d import check_con_d
from lavis_mafa.datasets import TrainingSet
from lavis_mafa.models.con_d.discriminators import ModelDiscriminator
from lavis_mafa.models.con_d.kept_images import kept_images
from lavis_mafa.models.con_d.kept_rows import KeptRows
from lavis_mafa.runners.dry_run import dry_run
from lavis_mafa.runners.session import begin, build_runner

IMAGES = 12
SHAPE = (3, 2)
PAIRS = torch.tensor([0, 3, 3, 1, 5]), torch.tensor([1, 2, 2, 0, 4])


def rows_of(ids, dtype=torch.float32):
    """Return the fake encoder outputs of images: distinct rows with negative and fractional
    values.
    """
    within = torch.arange(6.0).view(1, *SHAPE) / 3 - 0.7
    return (torch.as_tensor(ids)[:, None, None] * 1.37 + within).to(dtype)


class CacheClient:
    """Requests mini-batches from the cache and records which images had to be computed."""

    def __init__(self, folder, rank=0, whose="mine", dtype=torch.float32, images=IMAGES):
        ids = np.arange(images).repeat(2)
        self.kept = KeptRows(Path(folder), {"whose": whose}, ids, SHAPE, dtype, rank).open()

    def computed_ids(self, *ids):
        """Request the rows of ``ids``, compare them, and return the ids that were computed."""
        computed = []

        def compute(which):
            requested = torch.tensor(ids)[which]
            computed.extend(requested.tolist())
            return rows_of(requested)

        rows = self.kept.get(torch.tensor(ids, dtype=torch.int64), compute)
        expected = rows_of(ids, self.kept.dtype)
        assert rows.dtype == expected.dtype and torch.equal(rows, expected)
        return computed


BATCH = st.lists(st.integers(0, IMAGES - 1), min_size=1, max_size=5)
STEPS = st.lists(st.tuples(st.sampled_from(["get", "get", "flush", "crash"]), st.booleans(), BATCH))


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_image_is_computed_once_unless_a_crash_loses_it(steps, dtype):
    with tempfile.TemporaryDirectory() as folder:
        ranks = [CacheClient(folder, rank, dtype=dtype) for rank in range(2)]
        known, pending, on_disk = [set(), set()], [set(), set()], set()
        for action, rank, batch in steps:
            if action == "get":
                computed = ranks[rank].computed_ids(*batch)
                assert computed == [i for i in dict.fromkeys(batch) if i not in known[rank]]
                known[rank] |= set(batch)
                pending[rank] |= set(computed)
            elif action == "flush":
                ranks[rank].kept.flush()
                known[rank] |= on_disk
                if pending[rank]:
                    on_disk |= known[rank]
                pending[rank] = set()
            else:
                ranks[rank] = CacheClient(folder, rank, dtype=dtype)
                known[rank], pending[rank] = set(on_disk), set()
            assert set(np.flatnonzero(ranks[rank].kept.stored)) == known[rank]


def test_close_flushes_and_later_rows_are_not_stored(tmp_path):
    first = CacheClient(tmp_path)
    first.computed_ids(1, 2)
    first.kept.close()
    assert first.computed_ids(1, 2) == [1, 2]
    assert CacheClient(tmp_path).computed_ids(2, 1, 0) == [0]


def test_flags_are_written_after_the_rows_are_on_disk(tmp_path, monkeypatch):
    first = CacheClient(tmp_path)
    first.computed_ids(0, 1)
    order = []
    fsync, replace = os.fsync, os.replace
    rows = first.kept._file.fileno()
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(fd == rows), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b)))
    first.kept.flush()
    # The rows, then the flags, the rename of the flags, and the folder.
    assert order == [True, False, f"there_rank0@{platform.node()}.bin", False]
    # if the rows cannot be synced, the flags are not written
    monkeypatch.setattr(os, "fsync", raise_disk_full)
    first.computed_ids(2)
    first.kept.flush()
    assert first.computed_ids(2, 0) == [2]
    monkeypatch.undo()
    assert CacheClient(tmp_path).computed_ids(0, 1, 2) == [2]


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "other"])
def test_damaged_flags_are_ignored(tmp_path, damage, caplog):
    first = CacheClient(tmp_path)
    first.computed_ids(3, 4)
    first.kept.close()
    (flags,) = tmp_path.glob("there_*")
    content = bytearray(flags.read_bytes())
    if damage == "bit":
        content[-1] ^= 1 << 5
    elif damage == "other":  # intact, but with another identity
        other = CacheClient(tmp_path / "other", whose="another's")
        other.computed_ids(3, 5)
        other.kept.close()
        content = next((tmp_path / "other").glob("there_*")).read_bytes()
    else:
        content = content[: -1 if damage == "cut" else 0]
    flags.write_bytes(content)
    reopened = CacheClient(tmp_path)
    assert ("is damaged" in caplog.text) == (damage != "empty")
    assert reopened.computed_ids(3, 4) == [3, 4]
    reopened.kept.close()
    assert CacheClient(tmp_path).computed_ids(3, 4) == []


@pytest.mark.parametrize("remaining_bytes", [0, 4096])
def test_truncated_row_file_is_rejected(tmp_path, remaining_bytes):
    first = CacheClient(tmp_path)
    first.computed_ids(0, 3)
    first.kept.close()
    with open(tmp_path / "rows.bin", "r+b") as file:
        file.truncate(remaining_bytes)
    with pytest.raises(ValueError, match=r"keep_images: .*rows.bin has \d+ bytes.*Remove"):
        CacheClient(tmp_path)


def test_rows_truncated_during_the_run_are_recomputed(tmp_path, caplog):
    first = CacheClient(tmp_path)
    first.computed_ids(0, 3)
    first.kept.flush()
    os.truncate(tmp_path / "rows.bin", 4096)
    assert first.computed_ids(0, 3) == [3] and first.computed_ids(0) == [0]
    assert "Nothing more is kept" in caplog.text
    first.kept.flush()  # the lost rows are no longer listed as stored
    assert first.computed_ids(0) == [0]


def test_rows_with_another_identity_are_rejected(tmp_path):
    CacheClient(tmp_path).kept.close()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        ValueError, match="keep_images: .*whose: mine recorded, another's expected.*another fo"
    ):
        CacheClient(tmp_path, whose="another's")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "identity.json").write_text("{")
    with pytest.raises(ValueError, match=r"keep_images: .*identity\.json is damaged"):
        CacheClient(tmp_path)


def test_rows_of_another_machine_are_used_from_the_next_start_on(tmp_path, monkeypatch):
    """On a network file system its flags may become visible before its rows."""
    local = CacheClient(tmp_path)
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    remote = CacheClient(tmp_path, rank=1)
    remote.computed_ids(5)
    remote.kept.flush()
    local.kept.flush()
    assert local.computed_ids(5) == [5]
    monkeypatch.undo()
    assert CacheClient(tmp_path).computed_ids(5) == []


# The disk


def raise_disk_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("part", [False, True])
def test_remaining_rows_are_computed_when_the_disk_is_full(tmp_path, monkeypatch, caplog, part):
    first = CacheClient(tmp_path)
    first.computed_ids(0, 1)
    write, partial_writes = os.pwrite, [1] * part

    def write_partially(fd, data, place):  # only a part of a row fits
        return (
            write(fd, data[:5], place)
            if partial_writes and partial_writes.pop()
            else raise_disk_full()
        )

    monkeypatch.setattr(os, "pwrite", write_partially)
    assert first.computed_ids(1, 2, 3) == [2, 3] and first.computed_ids(0, 2, 3) == [2, 3]
    assert caplog.text.count("No space left on device. Nothing more is kept") == 1
    first.kept.close()
    monkeypatch.undo()
    assert CacheClient(tmp_path).computed_ids(0, 1, 2, 3) == [2, 3]


def test_partial_writes_are_continued(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, place: write(fd, data[:7], place))
    first = CacheClient(tmp_path)
    assert first.computed_ids(2, 7) == [2, 7] and first.computed_ids(7, 2) == []


def test_required_space_is_reported_and_checked(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(IMAGES * 4096))
    first = CacheClient(tmp_path / "new" / "folder")
    summary = first.kept.summary
    assert "12 images of 4,096 bytes, 0.00 GB in total; 0 of them are in" in summary
    first.computed_ids(0)
    first.kept.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage((IMAGES - 1) * 4096 - 1))
    with pytest.raises(ValueError, match="keep_images: .*; 1 of them .* larger disk"):
        CacheClient(tmp_path / "new" / "folder")
    with pytest.raises(ValueError, match="larger disk"):
        CacheClient(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_folder_that_cannot_be_created_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        CacheClient(tmp_path / "file" / "folder")


# Con-D


def con_d_from(family, precision="fp32", samples=None):
    """Return an untrained model as Con-D, calibrated to accept half of the samples' pairs."""
    torch.manual_seed(7)
    model = load_model(family, "tiny")
    if samples is not None:
        accept_half(model, samples, 30.0)
    con_d = ModelDiscriminator(model, precision, processor=str, own_view=True)
    assert not con_d.share_encoder(model)  # because it has its own view
    return con_d


def open_cache(con_d, train_set, folder, device="cpu"):
    """Create the cache as a runner does."""
    cfg = OmegaConf.create({"mafa": {"con_d": {"keep_images": str(folder)}}})
    model = namedtuple("model", "con_d")(con_d)
    return kept_images(cfg, model, train_set, torch.device(device))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["albef_mafa", "blip_mafa", "blip2_mafa"])
def test_cached_verdicts_equal_computed_verdicts(
    toy_train, tmp_path, family, precision, monkeypatch
):
    samples, other = mini_batch(toy_train, range(6)), mini_batch(toy_train, range(3, 9))
    con_d = con_d_from(family, precision, samples)
    expected = con_d.judge(samples, *PAIRS)
    assert expected.max() - expected.min() > 0.02
    con_d.kept = open_cache(con_d, toy_train, tmp_path).open()
    assert con_d.kept.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    runs = count_runs(con_d, monkeypatch)
    verdicts = [con_d.judge(samples, *PAIRS) for _ in range(2)]
    con_d.judge(other, *PAIRS)
    assert torch.equal(*verdicts) and runs == [6, 3]
    tolerance = 0.02 if precision == "bf16" else 1e-6
    torch.testing.assert_close(verdicts[0], expected, atol=tolerance, rtol=0)
    con_d.kept.close()
    con_d.kept = open_cache(con_d, toy_train, tmp_path).open()
    assert runs.pop() == 1  # one image is encoded to get the shape
    assert torch.equal(con_d.judge(samples, *PAIRS), verdicts[0]) and runs == [6, 3]
    del samples["image_id"]
    assert torch.equal(con_d.judge(samples, *PAIRS), expected) and runs == [6, 3, 6]


def count_runs(con_d, monkeypatch):
    """Record the number of images in every call of the image encoder."""
    runs, image_tokens = [], con_d.backbone.image_tokens
    monkeypatch.setattr(
        con_d.backbone, "image_tokens", lambda x: (runs.append(len(x)), image_tokens(x))[1]
    )
    return runs


@pytest.mark.parametrize("change", ["weights", "size", "precision", "ids", "pictures", "processor"])
def test_rows_of_another_encoder_view_or_data_are_rejected(toy, tmp_path, change):
    train_set = TrainingSet(toy["train"], seed=0)
    open_cache(con_d_from("albef_mafa"), train_set, tmp_path).open()
    open_cache(con_d_from("albef_mafa"), TrainingSet(toy["train"], seed=1), tmp_path)
    con_d = con_d_from("albef_mafa", "bf16" if change == "precision" else "fp32")
    if change == "weights":
        with torch.no_grad():
            con_d.model.visual_encoder.blocks[1].mlp.fc1.bias[3] += 1e-4
    elif change == "size":
        con_d.model.visual_encoder.patch_embed.img_size = (32, 32)
        con_d.image_size = 64
        con_d.backbone.image_tokens = lambda images: torch.zeros(1, 5, 64)
    elif change == "ids":
        train_set.image_ids = train_set.image_ids // 2
    elif change == "pictures":
        train_set.image_bytes = lambda number: (b"another picture", "png")
    elif change == "processor":
        train_set = WithOwnView(train_set)
    with pytest.raises(ValueError, match="keep_images: .*was written for something else"):
        open_cache(con_d, train_set, tmp_path)


class WithOwnView:
    """A training set with an additional view for Con-D."""

    def __init__(self, train_set):
        self.train_set = train_set

    def __getattr__(self, name):
        return getattr(self.train_set, name)

    def __getitem__(self, key):
        return {**self.train_set[key], VIEW: self.train_set[key]["image"]}


def test_augmented_images_are_rejected(toy, tmp_path):
    train_set = TrainingSet(toy["train"], seed=0)
    train_set.parts = [WholeSubset(toy["train"], False)]
    with pytest.raises(ValueError, match="needs images that are the same every time"):
        open_cache(con_d_from("albef_mafa"), train_set, tmp_path)
    train_set.parts = [WholeSubset(toy["train"], True)]
    train_set.parts[0].table = namedtuple("table", "meta")({"id_conflicts": 3})
    with pytest.raises(ValueError, match="3 pairs have an image_id that another file has too"):
        open_cache(con_d_from("albef_mafa"), train_set, tmp_path)


class WholeSubset(Subset):
    """All samples of a data set."""

    def __init__(self, dataset, deterministic):
        super().__init__(dataset, range(len(dataset)))
        self.deterministic = deterministic


@pytest.mark.parametrize(
    ("con_d", "problem"),
    [
        ({"own_view": True}, None),
        ({}, "needs images without augmentation; .*own_view: True"),
        ({"own_view": False}, "needs images without augmentation"),
    ],
)
def test_cache_needs_an_unaugmented_own_view(tmp_path, con_d, problem):
    torch.save({"temp": torch.ones(())}, tmp_path / "c.pth")
    base = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": str(tmp_path / "c.pth")}
    _, problems = check_con_d({**base, "keep_images": "folder", **con_d})
    assert len(problems) == (problem is not None)
    if problem:
        assert re.search(problem, problems[0])


def judge_on_rank(rank, folder, train_set):
    """Candidates of both ranks: each rank caches the images of its own mini-batch."""
    con_d = con_d_from("albef_mafa", samples=mini_batch(train_set, range(10, 18)))
    samples = mini_batch(train_set, range(10 + 4 * rank, 14 + 4 * rank))
    ranks = Ranks(together=True)
    own_ids = samples["image_id"].clone()
    samples["image_id"] = ranks.gather(own_ids)  # as in the step
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8)).unbind(1)
    expected = con_d.judge(samples, *pairs, ranks)
    con_d.kept = open_cache(con_d, train_set, folder).open()
    verdicts = [con_d.judge(samples, *pairs, ranks) for _ in range(2)]
    difference = max((result - expected).abs().max().item() for result in verdicts)
    kept = set(np.flatnonzero(con_d.kept.stored))
    con_d.kept.flush()
    dist.barrier()
    con_d.kept.flush()
    both = set(np.flatnonzero(con_d.kept.stored))
    return difference, kept == set(own_ids.tolist()), both


def test_two_ranks_share_a_folder(toy_train, tmp_path):
    answers = answers_of_a_group(judge_on_rank, tmp_path, tmp_path / "kept", toy_train)
    ids = set(toy_train.image_ids[10:18].tolist())
    for _, difference, own_images_only, both in answers:
        assert difference < 1e-6 and own_images_only and both == ids


# The whole run


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """Images with two captions each, and a checkpoint of a Con-D."""
    folder, draw = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    pairs = []
    for number in range(IMAGES):
        values = draw.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        picture = Image.fromarray(values).resize((48, 40), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.jpg")
        words = ("a red circle", "two small blue squares", "a green triangle left of a circle")
        pairs += [{"image": f"{number}.jpg", "caption": words[(number + k) % 3]} for k in (0, 1)]
    (folder / "train.json").write_text(json.dumps(pairs))
    captions = [pair["caption"] for pair in pairs[::2]]
    images = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    con_d = con_d_from("albef_mafa", samples={"image": images, "text_input": captions})
    torch.save({"model": con_d.model.state_dict()}, folder / "con_d.pth")
    return folder


def build_small_runner(folder, image_folder, cache_folder=None, **overrides):
    info, con_d = "datasets.image_text_json.build_info", "model.mafa.con_d"
    options = {
        f"{info}.images.storage": image_folder,
        f"{info}.annotations.train.storage": image_folder / "train.json",
        f"{con_d}.arch": "albef_mafa",
        f"{con_d}.model_type": "tiny",
        f"{con_d}.checkpoint": image_folder / "con_d.pth",
        f"{con_d}.own_view": True,
        f"{con_d}.self_check": "skip",  # it would encode images that are not counted here
        f"{con_d}.keep_images": "null" if cache_folder is None else cache_folder,
        "model.mafa.connections": "{low: 0.45, high: 0.5}",
        "model.model_type": "tiny",
        "model.load_pretrained": False,
        "model.tokenizer": "tiny_vocab.txt",
        "model.image_size": 32,
        "run.device": "cpu",
        "run.amp": False,
        "run.num_workers": 0,
        "run.batch_size_train": 4,
        "run.grit.queue_size": 24,
        "run.grit.search_space": 12,
        "run.max_epoch": 2,
        "run.valid_splits": [],
        "run.test_splits": [],
        "run.loggers": "[]",
        "run.output_dir": folder,
        "run.job_id": "job",
        **overrides,
    }
    config = str(ROOT / "projects/mafa/train/albef_own_data.yaml")
    return build_runner(begin(config, [f"{key}={value}" for key, value in options.items()]))


def losses_of(runner):
    lines = map(json.loads, (runner.output_dir / "log.jsonl").read_text().splitlines())
    return [[one["loss"], one["found_i2t"]] for one in lines if one["kind"] == "step"]


@pytest.fixture(scope="module")
def losses_without_cache(image_folder, tmp_path_factory):
    """The losses of a run without the cache."""
    runner = build_small_runner(tmp_path_factory.mktemp("without"), image_folder)
    with pytest.MonkeyPatch.context() as patch:
        runs = count_runs(runner._model.con_d, patch)
        runner.train()
    assert sum(runs) == 48
    return losses_of(runner)


def test_run_encodes_every_image_once(image_folder, losses_without_cache, tmp_path, monkeypatch):
    runner = build_small_runner(tmp_path, image_folder, tmp_path / "kept")
    runs = count_runs(runner._model.con_d, monkeypatch)
    runner.train()
    assert runs[0] == 1 and sum(runs[1:]) == IMAGES  # plus one image to get the shape
    assert runner.kept._file is None, "closed"
    found = [one[1] for one in losses_without_cache]
    assert len(losses_without_cache) == 12 and 0 < sum(found) < 48, "Con-D must make a difference"
    np.testing.assert_allclose(losses_of(runner), losses_without_cache, rtol=1e-6)
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert names == {"identity.json", "rows.bin", f"there_rank0@{platform.node()}.bin"}


def test_resumed_run_uses_the_cache(image_folder, losses_without_cache, tmp_path, monkeypatch):
    kept = {"cache_folder": tmp_path / "kept"}
    stopped = build_small_runner(tmp_path / "a", image_folder, **kept, **{"run.max_steps": 4})
    stopped.train()
    resume = {"run.resume_ckpt_path": "auto"}
    runner = build_small_runner(tmp_path / "a", image_folder, **kept, **resume)
    stored = len({int(i) for i in np.flatnonzero(stopped.kept.stored)})
    runs = count_runs(runner._model.con_d, monkeypatch)
    runner.train()
    assert sum(runs[1:]) == IMAGES - stored < IMAGES
    np.testing.assert_allclose(losses_of(runner), losses_without_cache, rtol=1e-6)


def test_dry_run_writes_no_cache(image_folder, tmp_path):
    lines = dry_run(build_small_runner(tmp_path / "run", image_folder, tmp_path / "kept"))
    assert any("keep_images: 12 images of 4,096 bytes" in line for line in lines)
    assert not (tmp_path / "kept").exists()
