"""Features in files: all readable samples in order, mapped instead of held, resumed by blocks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavis_mafa.tools import corpus_features as encoding
from lavis_mafa.tools.analysed_pairs import Encoded
from lavis_mafa.tools.counting import _own_auc

linux = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's /proc")
CAPTIONS = st.text(max_size=6) | st.just("\udc80 caf\u00e9 \U0001f600")


class KnownFeatures:
    """A model and data whose features are known: those of sample n are rows of random tables."""

    def __init__(self, captions, unreadable=(), queries=0):
        rng = np.random.default_rng(0)
        self.captions, self.unreadable, self.asked = captions, unreadable, []
        self.vectors, self.texts = torch.from_numpy(
            rng.normal(size=(2, len(captions), 4)).astype(np.float32)
        )
        self.images = self.vectors
        if queries:
            shape = (len(captions), queries, 4)
            self.images = torch.from_numpy(rng.normal(size=shape).astype(np.float16))

    def load(self):
        """Return what `make_features` reads."""
        return SimpleNamespace(encode=self.encode, identity=lambda: {"model": "m"}, batch_size=3)

    def encode(self, batches):
        for part in batches:
            self.asked.append(part)
            captions = [self.captions[n] for n in part]
            errors = ["gone" if n in self.unreadable else "" for n in part]
            queries = self.images[part] if self.images.ndim == 3 else None
            yield Encoded(self.vectors[part], self.texts[part], queries, captions, errors)


@given(
    captions=st.lists(CAPTIONS, min_size=1, max_size=14),
    block=st.integers(1, 9),
    queries=st.sampled_from([0, 2]),
    data=st.data(),
)
@settings(max_examples=60)
def test_readable_samples_come_back_in_order(captions, block, queries, data, tmp_path_factory):
    numbers = st.integers(0, len(captions) - 1)
    unreadable = data.draw(st.sets(numbers, max_size=len(captions)))
    wanted = np.array(sorted(data.draw(st.sets(numbers, min_size=1))))
    folder, model = (
        tmp_path_factory.mktemp("features"),
        KnownFeatures(captions, unreadable, queries),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_LEAST_BLOCK", block)
        loaded = model.load()
        for _ in range(2):  # the second time from the files alone
            found = encoding.make_features(loaded, wanted, folder)
            good = [n for n in wanted.tolist() if n not in unreadable]
            assert found.numbers.tolist() == good and len(found) == len(good)
            assert found.unreadable == [(n, "gone") for n in wanted.tolist() if n in unreadable]
            assert list(found.captions) == [captions[n] for n in good]
            for name in ("images", "texts", "vectors"):
                expected = getattr(model, name)[good]
                stored = getattr(found, name)
                assert stored.dtype == expected.dtype and torch.equal(stored, expected)
    assert np.concatenate(model.asked).tolist() == wanted.tolist()
    with pytest.raises(IndexError):
        found.captions[len(good)]


def test_a_stopped_encoding_is_resumed(tmp_path, monkeypatch):
    model = KnownFeatures([f"caption {n}" for n in range(10)])
    monkeypatch.setattr(encoding, "_LEAST_BLOCK", 4)
    loaded, real = model.load(), model.encode

    def stop(batches):
        if len(model.asked) == 4:
            raise KeyboardInterrupt
        yield from real(batches)

    loaded.encode = stop
    with pytest.raises(KeyboardInterrupt):
        encoding.make_features(loaded, np.arange(10), tmp_path)
    loaded.encode = real
    (tmp_path / ".block_000000.npz.0.tmp").touch()
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "write_json", stop_writing)
        with pytest.raises(KeyboardInterrupt):
            encoding.make_features(loaded, np.arange(10), tmp_path)
    found = encoding.make_features(loaded, np.arange(10), tmp_path)
    assert np.concatenate(model.asked).tolist() == list(range(10)), "each sample once"
    assert torch.equal(found.texts, model.texts) and found.captions[-1] == "caption 9"
    assert not [path for path in tmp_path.iterdir() if "block" in path.name]


def stop_writing(*_):
    raise KeyboardInterrupt


@linux
def test_all_arrays_are_mapped_files(tmp_path, monkeypatch):
    loaded = KnownFeatures(["a", "b"], queries=2).load()
    found = encoding.make_features(loaded, np.arange(2), tmp_path)
    mapped = Path("/proc/self/maps").read_text()
    for name in ("images", "texts", "vectors", "numbers", "captions", "ends"):
        assert f"{tmp_path / name}.bin" in mapped
    assert len(found) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "texts.bin").unlink(),
        lambda folder: (folder / "texts.bin").write_bytes(b"1234"),
        lambda folder: (folder / "samples.json").write_text("{}"),
        lambda folder: (folder / "samples.json").write_text(
            json.dumps({"arrays": {"numbers": ["|O", 2]}, "unreadable": []})
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, monkeypatch, damage):
    loaded = KnownFeatures(["a", "b"]).load()
    encoding.make_features(loaded, np.arange(2), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=r"the features in .* are damaged.*remove the folder"):
        encoding.make_features(loaded, np.arange(2), tmp_path)


def test_captions_of_different_images_are_not_mixed():
    vectors = torch.nn.functional.normalize(torch.randn(40, 16), dim=1).repeat_interleave(5, 0)
    numbers, ids = np.arange(0, 400, 2), np.arange(400) // 10
    found = encoding.Features(numbers, vectors, vectors, vectors, [])
    assert _own_auc(found, ids, 0) == 1.0
    texts = vectors[torch.randperm(200)]
    shuffled = encoding.Features(numbers, vectors, texts, vectors, [])
    assert 0.2 < _own_auc(shuffled, ids, 0) < 0.75
    broken = encoding.Features(numbers, vectors, vectors * torch.nan, vectors, [])
    assert _own_auc(broken, ids, 0) == 0.0
