"""Captions tokenised by the data loader's workers equal those tokenised by the models."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from lavis.processors.blip_processors import BlipCaptionProcessor
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lavis_mafa import load_model
from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.algorithm.tokens import CON_D_TOKENS, CUT, TOKENS, Tokens
from lavis_mafa.data import TrainingSet
from lavis_mafa.data.pairs import TrainPairs
from lavis_mafa.families.family import tokenize
from lavis_mafa.judges.discriminators import ModelDiscriminator
from lavis_mafa.training.loaders import add_tokens, to_device

FAMILIES = ("albef_mafa", "blip_mafa", "blip2_mafa", "fne_retrieval")
CAPTIONS = [
    "two dogs play, near the old Harbour!",
    "-",
    "  ? ",
    "a",
    "a photo of 3 cafés — naïve façade 猫 🐈",
    "[SEP] is [MASK]ed by [CLS] and [DEC] [ENC]",
    "word " * 200,
    "supercalifragilistic" * 8,
    "tabs\tand\nlines\r\n",
]


class Captions(Dataset):
    """Captions with blank images."""

    def __init__(self, captions):
        self.captions = captions

    def __len__(self):
        return len(self.captions)

    def __getitem__(self, index):
        return {"image": torch.zeros(3, 2, 2), "text_input": self.captions[index]}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return load_model(request.param, "tiny")


def loader(train_set, workers, **options):
    keys = [[(index, 0) for index in range(len(train_set))]]
    return DataLoader(
        train_set,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=train_set.collater,
        timeout=30 if workers else 0,
        **options,
    )


def expected_tokens(model, captions):
    """Return the tokens as the models' forward methods compute them."""
    return model.tokenizer(
        list(captions),
        padding="longest",
        truncation=True,
        max_length=model.max_txt_len,
        return_tensors="pt",
    )


def equal_tokens(tokens, other):
    return torch.equal(tokens.input_ids, other.input_ids) and torch.equal(
        tokens.attention_mask, other.attention_mask
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("captions", [CAPTIONS, CAPTIONS[1:3], CAPTIONS[3:4]])
def test_workers_make_the_tokens_of_forward(model, captions, workers):
    train_set = TrainingSet(Captions(captions))
    add_tokens(train_set, model, [])
    (batch,) = loader(train_set, workers)
    expected = expected_tokens(model, captions)
    assert isinstance(batch[TOKENS], Tokens) and batch["text_input"] == captions
    assert equal_tokens(batch[TOKENS], expected)
    assert equal_tokens(tokenize(model, captions, None), expected)
    assert tokenize(model, batch[TOKENS], None)[0].dtype == torch.int64
    assert expected.input_ids.shape[1] <= model.max_txt_len


def test_replaced_samples_have_the_tokens_of_their_replacement(tmp_path):
    rows = [{"image": f"{k}.png", "caption": f"number {k} " * (k + 1)} for k in range(4)]
    for row in rows[:3]:
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / row["image"])
    (tmp_path / "3.png").write_bytes(b"no picture")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    model = load_model("albef_mafa", "tiny")
    data = TrainPairs(lambda image: torch.zeros(3, 2, 2), str, tmp_path, [tmp_path / "a.json"])
    train_set = TrainingSet(data)
    add_tokens(train_set, model, [])
    (batch,) = loader(train_set, 0)
    loaded = batch["loaded_index"].tolist()
    assert loaded[:3] == [0, 1, 2] and loaded[3] != 3
    assert torch.equal(batch[TOKENS].input_ids[3], batch[TOKENS].input_ids[loaded[3]])


def test_captions_that_the_processor_cuts_are_counted(tmp_path):
    captions = ["red " * 51, "red " * 50, "red, " * 51, "red " * 20 + "blue " * 31, "red " * 70]
    rows = [{"image": "a.png", "caption": caption} for caption in captions]
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    model = load_model("albef_mafa", "tiny")
    model.max_txt_len = 60
    counts = []
    for processor in (BlipCaptionProcessor(prompt="a "), str):
        files, cache = [tmp_path / "a.json"], {"cache_dir": tmp_path}
        data = TrainPairs(lambda _: torch.zeros(3, 2, 2), processor, tmp_path, files, **cache)
        train_set = TrainingSet(data)
        add_tokens(train_set, model, [])
        (batch,) = loader(train_set, 0)
        assert "was_cut" not in batch
        counts.append(batch[CUT])
    assert counts == [4, 2]  # 102 and 70 tokens are more than 60


class UncallableTokenizer:
    """A tokenizer whose attributes can be read but that must not tokenise."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **kwargs):
        raise AssertionError("captions are tokenised in forward")


@pytest.mark.parametrize("family", ["albef_mafa", "blip_mafa", "blip2_mafa"])
def test_step_with_tokens_equals_step_with_captions(toy, family):
    torch.manual_seed(0)
    model = load_model(family, "tiny").eval()
    judge = copy.deepcopy(model)
    judge.max_txt_len = 5
    con_d, momentum, settings = ModelDiscriminator(judge), None, StepSettings()
    if family == "albef_mafa":
        momentum = Momentum(model, backbone_of, model.vision_proj.out_features, 16)
        settings = StepSettings(soft_labels=SoftLabels("momentum"))
    train_set = TrainingSet(toy["train"])
    add_tokens(train_set, model, [con_d])
    batch = train_set.collater([train_set[index, 0] for index in range(8)])
    batch.update(epoch=1, iters=0, num_iters_per_epoch=10)
    plain = {key: value for key, value in batch.items() if key not in (TOKENS, CON_D_TOKENS)}
    outputs = []
    for samples in (plain, to_device(batch, torch.device("cpu"))):
        if samples is not plain:
            model.tokenizer, judge.tokenizer = (
                UncallableTokenizer(model.tokenizer),
                UncallableTokenizer(judge.tokenizer),
            )
        with torch.random.fork_rng():
            torch.manual_seed(1)
            state = copy.deepcopy(model.state_dict())
            outputs.append(run_step(model.backbone, samples, settings, con_d, momentum))
            model.load_state_dict(state)
    from_captions, from_tokens = outputs
    assert torch.equal(from_captions.loss, from_tokens.loss)
    assert torch.equal(from_captions.i2t.probability, from_tokens.i2t.probability)
    assert torch.equal(from_captions.text_features, from_tokens.text_features)


@pytest.mark.parametrize("parallelism", [None, "true"])
def test_forked_workers_neither_hang_nor_warn(monkeypatch, capfd, parallelism):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    model = load_model("albef_mafa", "tiny")
    model.tokenizer(CAPTIONS * 20)  # starts the tokenizer's threads in the main process
    if parallelism is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    train_set = TrainingSet(Captions(CAPTIONS * 20))
    add_tokens(train_set, model, [])
    (batch,) = loader(train_set, 2, multiprocessing_context="fork")
    assert equal_tokens(batch[TOKENS], expected_tokens(model, CAPTIONS * 20))
    assert "forked" not in capfd.readouterr().err
