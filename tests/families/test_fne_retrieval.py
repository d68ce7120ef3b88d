"""FNE's step against a loop over anchors; several ranks as one; exclusion of positives."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from conftest import mini_batch, tiny_config, toy_config
from torch.nn.parallel import DistributedDataParallel
from two_ranks import on_two_ranks

from lavis_mafa.algorithm.pair_memory import EMPTY
from lavis_mafa.checkpoints import downloads
from lavis_mafa.data import TrainingSet
from lavis_mafa.families.fne_retrieval import FneRetrieval
from lavis_mafa.toyworld import ToyScenesBuilder

BATCH = 6
MARGIN = 0.2


def model_of(**settings):
    torch.manual_seed(3)
    return FneRetrieval.from_config(tiny_config(FneRetrieval, **{"memory_size": 20, **settings}))


@pytest.fixture
def batches(toy_train):
    """Four mini-batches of an epoch with memory; in each, two pairs share an image."""
    found = [mini_batch(toy_train, range(i, i + BATCH), epoch=1) for i in range(0, 24, BATCH)]
    for samples in found:
        samples["image_id"] = samples["image_id"].clone()
        samples["image_id"][1] = samples["image_id"][0]
    found[2]["image_id"][3] = found[0]["image_id"][0]
    return found


def features(model, samples):
    with torch.no_grad():
        return (
            model.backbone.encode_images(samples["image"]).features,
            model.backbone.encode_texts(samples["text_input"]).features,
        )


def slow_hardest_loss(anchors, candidates, own, ids, candidate_ids):
    """One direction: the mean over anchors of the margin loss with the hardest negative."""
    losses = []
    for b, anchor in enumerate(anchors):
        sims = [
            float(anchor @ candidate)
            for candidate, candidate_id in zip(candidates, candidate_ids, strict=True)
            if candidate_id != ids[b]
        ]
        if sims:
            losses.append(max(0.0, MARGIN + max(sims) - float(anchor @ own[b])))
    return sum(losses) / len(losses)


def assert_hardest(output, images, texts, all_images, all_texts, ids, known):
    """Assert the losses of both directions; candidates ``known`` show the images of these ids."""
    expected = slow_hardest_loss(images, all_texts, texts, ids, known)
    assert float(output.loss_i2t) == pytest.approx(expected, rel=1e-5)
    expected = slow_hardest_loss(texts, all_images, images, ids, known)
    assert float(output.loss_t2i) == pytest.approx(expected, rel=1e-5)


def test_plain_epoch_is_hardest_triplet_of_the_mini_batch(batches):
    model, samples = model_of(), {**batches[0], "epoch": 0}
    images, texts = features(model, samples)
    ids = samples["image_id"].tolist()
    output = model(samples)
    assert_hardest(output, images, texts, images, texts, ids, ids)
    assert float(output.loss) == pytest.approx(float(output.loss_i2t + output.loss_t2i))
    assert bool(model.memory.empty.all()) and int(model.picker.positive.count) == 0


def test_negatives_come_from_mini_batch_and_memory(batches):
    """The copies, updated at once here, encode the candidates; none is of the own image."""
    model = model_of(momentum=0.0, negatives="hardest")
    memory, from_memory = [], 0
    for samples in batches:
        images, texts = features(model, samples)
        ids = samples["image_id"].tolist()
        known = [*ids, *(image_id for _, _, image_id in memory)]
        all_images = [*images, *(image for image, _, _ in memory)]
        all_texts = [*texts, *(text for _, text, _ in memory)]
        output = model(samples)
        assert_hardest(output, images, texts, all_images, all_texts, ids, known)
        from_memory += int((output.negatives_i2t < samples["loaded_index"][0]).sum())
        memory = [*memory, *zip(images, texts, ids, strict=True)][-20:]
    assert from_memory, "no negative came from the memory"


def test_caption_of_the_own_image_is_never_picked(batches):
    """Neither from the memory nor from its empty slots."""
    model = model_of(posterior={"minimum": 1}, margin=5.0)  # the margin removes no negative
    image_of = torch.cat([samples["image_id"] for samples in batches])
    torch.manual_seed(0)
    all_picked = set()
    for _ in range(15):
        for samples in batches:
            output = model(samples)
            for picked in (output.negatives_i2t, output.negatives_t2i):
                assert bool((picked != EMPTY).all())
                assert not bool((image_of[picked] == samples["image_id"]).any())
                all_picked |= set(picked.tolist())
    assert model.picker._ready and len(all_picked) > 15


def test_nothing_is_picked_if_all_pairs_share_an_image(batches):
    samples = {**batches[0], "image_id": torch.zeros(BATCH, dtype=torch.long)}
    for epoch in (0, 1):
        output = model_of()({**samples, "epoch": epoch})
        assert float(output.loss) == 0.0
        assert output.negatives_i2t.tolist() == [EMPTY] * BATCH
        output.loss.backward()


def test_random_negatives_in_plain_epochs(batches):
    model, samples = model_of(plain_negatives="random"), {**batches[0], "epoch": 0}
    torch.manual_seed(0)
    picked = torch.stack([model(samples).negatives_i2t for _ in range(40)])
    ids = samples["image_id"].tolist()
    for row, column in enumerate(picked.t()):
        allowed = [index for index, one in enumerate(ids) if one != ids[row]]
        assert set(column.tolist()) == set(samples["loaded_index"][allowed].tolist())


def test_padding_does_not_change_features():
    model = model_of()
    single = model.backbone.encode_texts(["a red circle"]).features
    padded = model.backbone.encode_texts(["a red circle", "two large blue squares on a white"])
    assert padded.mask[0].sum() < padded.mask.shape[1]
    assert torch.allclose(single[0], padded.features[0], atol=1e-5)
    assert torch.allclose(single.norm(dim=1), torch.ones(1))


def test_loading_weights_starts_with_an_empty_memory(batches, tmp_path):
    model = model_of()
    for samples in batches:
        model(samples)
    assert not bool(model.memory.empty.all()) and int(model.picker.epoch) == 1
    torch.save({"model": model.state_dict()}, tmp_path / "one.pth")
    for size in (20, 8):
        other = model_of(memory_size=size, load_finetuned=True, finetuned=str(tmp_path / "one.pth"))
        assert bool(other.memory.empty.all()) and int(other.picker.epoch) == -1
        for name, value in model.named_parameters():
            assert torch.equal(value, other.get_parameter(name))
    model.load_checkpoint(str(tmp_path / "one.pth"))  # a model that was already in use
    assert bool(model.memory.empty.all()) and int(model.picker.positive.count) == 0


def test_invalid_settings_are_rejected(batches):
    samples = {key: value for key, value in batches[0].items() if key != "image_id"}
    with pytest.raises(ValueError, match="samples need image_id"):
        model_of()(samples)
    for wrong, message in (
        ({"negatives": "harder"}, "model.negatives must be posterior or hardest, got 'harder'"),
        ({"plain_negatives": "none"}, "model.plain_negatives must be hardest or random, got"),
        ({"plain_epochs": -1}, "model.plain_epochs must be >= 0, got -1"),
        ({"posterior": {"prior": 2.0}}, "model.posterior: prior must be > 0"),
        ({"posterior": {"priors": 0.1}}, "model.posterior: .*priors"),
        ({"vit": {"patch_size": 16, "width": 32, "depth": 1, "heads": 2}}, "width 32 and texts 64"),
    ):
        with pytest.raises(ValueError, match=message):
            model_of(**wrong)


def test_image_encoder_starts_from_a_file_in_the_names_of_timm(tmp_path):
    """As FNE starts from Google's ViT; the file's classifier is not used."""
    source = model_of(image_size=64).visual_encoder.state_dict()
    state = {**source, "head.weight": torch.zeros(1000, 64), "head.bias": torch.zeros(1000)}
    torch.save(state, tmp_path / "vit.pth")
    encoder = model_of(vit_weights=str(tmp_path / "vit.pth")).visual_encoder
    loaded = encoder.state_dict()
    for key, value in loaded.items():
        if key != "pos_embed":
            assert torch.equal(value, source[key]), key
    grid = source["pos_embed"][:, 1:].transpose(1, 2).reshape(1, 64, 4, 4)
    smaller = torch.nn.functional.interpolate(grid, (2, 2), mode="bicubic", align_corners=False)
    assert torch.allclose(loaded["pos_embed"][:, 1:], smaller.flatten(2).transpose(1, 2))
    with pytest.raises(FileNotFoundError, match="no checkpoint at some/file"):
        model_of(vit_weights="some/file")
    del state["norm.weight"]
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(ValueError, match="does not fit this image encoder"):
        model_of(vit_weights=str(tmp_path / "part.pth"))


TIMM = "timm/vit_tiny.for_tests"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The folder of `TIMM` in a cache of the Hugging Face hub, without files."""
    folder = tmp_path / f"models--{TIMM.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    cached = functools.partial(downloads.cached_file, cache_dir=str(tmp_path))
    monkeypatch.setattr(downloads, "cached_file", cached)
    return snapshot


def test_image_encoder_starts_from_a_name_of_timm(hub_cache):
    """From the cache of the hub; a model that is neither there nor reachable is named."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    with pytest.raises(OSError, match=f"vit_weights: {TIMM} is not in the Hugging Face cache"):
        model_of(vit_weights=TIMM)
    source = model_of().visual_encoder.state_dict()
    state = {key: torch.randn_like(value) for key, value in source.items()}
    save_file({**state, "head.weight": torch.zeros(10, 64)}, hub_cache / "model.safetensors")
    loaded = model_of(vit_weights=TIMM).visual_encoder.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.items())
    (hub_cache / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="model.safetensors"):
        model_of(vit_weights=TIMM)


# Several ranks

CASES = {"plain": 0, "with memory": 1}


def steps_of(model, train_set, epoch, first_sample, size, stride):
    """Run two steps; return the losses of both, gradients of the second, and the state."""
    losses = []
    for step in range(2):
        first = first_sample + step * stride
        model.zero_grad()
        output = model(mini_batch(train_set, range(first, first + size), epoch=epoch))
        output.loss.backward()
        losses.append(torch.stack([output.loss_i2t, output.loss_t2i]).detach())
    inner = getattr(model, "module", model)
    return {
        "losses": torch.stack(losses),
        "gradients": {n: p.grad for n, p in inner.named_parameters() if p.grad is not None},
        "state": dict(inner.state_dict()),
    }


def run_rank(rank):
    data = TrainingSet(ToyScenesBuilder(toy_config()).build_datasets()["train"], seed=0)
    results = {}
    for name, epoch in CASES.items():
        model = DistributedDataParallel(observing_model())
        results[name] = steps_of(model, data, epoch, rank * BATCH, BATCH, 2 * BATCH)
        dist.all_reduce(results[name]["losses"])
        results[name]["losses"] /= 2
    return results


def observing_model():
    """A model that picks the hardest, which needs no random draw, and still observes
    similarities.
    """
    return model_of(posterior={"beginning": "hardest"})


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory):
    return on_two_ranks(run_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_on_the_joined_batch(rank_results, toy_train, name):
    expected = steps_of(observing_model(), toy_train, CASES[name], 0, 2 * BATCH, 2 * BATCH)
    one, other = (rank[name] for rank in rank_results)
    for rank in (one, other):
        assert torch.allclose(rank["losses"], expected["losses"], rtol=1e-4)
        assert rank["gradients"].keys() == expected["gradients"].keys()
        for parameter, gradient in expected["gradients"].items():
            found = rank["gradients"][parameter]
            assert torch.allclose(found, gradient, rtol=1e-3, atol=2e-6), parameter
        for key, value in expected["state"].items():
            found = rank["state"][key]
            assert torch.allclose(found, value, rtol=1e-4, atol=1e-5), key
    assert int(expected["state"]["picker.positive.count"]) > 0 or not CASES[name]
    assert int((expected["state"]["memory.indices"] != EMPTY).sum()) == (20 if CASES[name] else 0)
