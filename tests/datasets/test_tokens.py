"""Captions are tokenised by the data loader's workers, as the models would do it themselves."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lavis_mafa import load_model
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.momentum import Momentum
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.algorithm.tokens import CON_D_TOKENS, TOKENS, Tokenizer, Tokens, tokens_of
from lavis_mafa.datasets import TrainingSet
from lavis_mafa.datasets.image_text_json import ImageTextTrain
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from lavis_mafa.models.families import backbone_of
from lavis_mafa.models.families.base import tokenize
from lavis_mafa.runners.loaders import add_tokens, to_device

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
    """Captions beside blank images."""

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


def as_in_forward(model, captions):
    """What the models' tokenizers were asked for before data loaders did it."""
    return model.tokenizer(
        list(captions),
        padding="longest",
        truncation=True,
        max_length=model.max_txt_len,
        return_tensors="pt",
    )


def equal(tokens, other):
    return torch.equal(tokens.input_ids, other.input_ids) and torch.equal(
        tokens.attention_mask, other.attention_mask
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("captions", [CAPTIONS, CAPTIONS[1:3], CAPTIONS[3:4]])
def test_workers_make_the_tokens_that_forward_made(model, captions, workers):
    train_set = TrainingSet(Captions(captions))
    add_tokens(train_set, model, None)
    (batch,) = loader(train_set, workers)
    expected = as_in_forward(model, captions)
    assert isinstance(batch[TOKENS], Tokens) and batch["text_input"] == captions
    assert equal(batch[TOKENS], expected)
    assert equal(tokenize(model, captions, None), expected)
    assert tokenize(model, batch[TOKENS], None)[0].dtype == torch.int64
    assert expected.input_ids.shape[1] <= model.max_txt_len


def test_the_length_of_a_caller_holds_for_captions(model):
    assert tokenize(model, CAPTIONS, 7).input_ids.shape[1] == 7
    assert tokens_of(model.tokenizer, CAPTIONS, 5).input_ids.shape[1] == 5


def test_a_spawned_worker_can_take_it_along(model):
    kept = Tokenizer.of(model)
    again = pickle.loads(pickle.dumps(kept))
    assert equal(again(CAPTIONS), kept(CAPTIONS)) and again.agrees_with(kept)


def test_tokens_are_those_of_the_sample_in_the_place_of_an_unreadable_one(tmp_path):
    rows = [{"image": f"{k}.png", "caption": f"number {k} " * (k + 1)} for k in range(4)]
    for row in rows[:3]:
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / row["image"])
    (tmp_path / "3.png").write_bytes(b"no picture")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    model = load_model("albef_mafa", "tiny")
    data = ImageTextTrain(lambda image: torch.zeros(3, 2, 2), str, tmp_path, [tmp_path / "a.json"])
    train_set = TrainingSet(data)
    add_tokens(train_set, model, None)
    (batch,) = loader(train_set, 0)
    loaded = batch["loaded_index"].tolist()
    assert loaded[:3] == [0, 1, 2] and loaded[3] != 3
    assert torch.equal(batch[TOKENS].input_ids[3], batch[TOKENS].input_ids[loaded[3]])


def test_con_d_gets_tokens_of_its_own_only_where_it_reads_otherwise():
    albef, blip = load_model("albef_mafa", "tiny"), load_model("blip_mafa", "tiny")
    shorter = copy.deepcopy(albef)
    shorter.max_txt_len = albef.max_txt_len - 3
    read = {}
    for name, judge in (("same", copy.deepcopy(albef)), ("shorter", shorter), ("blip", blip)):
        train_set = TrainingSet(Captions(CAPTIONS))
        tokenize(judge, CAPTIONS[:2], 4)  # leaves a length in its tokenizer
        add_tokens(train_set, albef, ModelDiscriminator(judge))
        (batch,) = loader(train_set, 0)
        assert equal(batch[CON_D_TOKENS], as_in_forward(judge, CAPTIONS))
        assert equal(batch[TOKENS], as_in_forward(albef, CAPTIONS))
        read[name] = batch[CON_D_TOKENS] is batch[TOKENS]
    assert read == {"same": True, "shorter": False, "blip": False}


def test_models_that_read_captions_themselves_get_no_tokens():
    train_set = TrainingSet(Captions(CAPTIONS))
    add_tokens(train_set, torch.nn.Linear(1, 1), None)
    (batch,) = loader(train_set, 0)
    assert TOKENS not in batch


def test_a_tokenizer_in_python_agrees_with_itself_alone():
    from transformers import BertTokenizer

    from lavis_mafa.io.checkpoints import find_config

    slow = BertTokenizer(find_config("tiny_vocab.txt"), do_lower_case=True)
    assert Tokenizer(slow, 9).agrees_with(Tokenizer(slow, 9))
    assert not Tokenizer(slow, 9).agrees_with(Tokenizer(copy.deepcopy(slow), 9))


class Unasked:
    """A tokenizer whose rules may be looked up, but that may not tokenise."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **kwargs):
        raise AssertionError("captions are tokenised in forward")


@pytest.mark.parametrize("family", ["albef_mafa", "blip_mafa", "blip2_mafa"])
def test_a_step_on_tokens_is_the_step_on_captions(toy, family):
    torch.manual_seed(0)
    model = load_model(family, "tiny").eval()
    judge = copy.deepcopy(model)
    judge.max_txt_len = 5
    con_d, momentum, settings = ModelDiscriminator(judge), None, StepSettings()
    if family == "albef_mafa":
        momentum = Momentum(model, backbone_of, model.vision_proj.out_features, 16)
        settings = StepSettings(soft_labels=SoftLabels("momentum"))
    train_set = TrainingSet(toy["train"])
    add_tokens(train_set, model, con_d)
    batch = train_set.collater([train_set[index, 0] for index in range(8)])
    batch.update(epoch=1, iters=0, num_iters_per_epoch=10)
    plain = {key: value for key, value in batch.items() if key not in (TOKENS, CON_D_TOKENS)}
    outputs = []
    for samples in (plain, to_device(batch, torch.device("cpu"))):
        if samples is not plain:
            model.tokenizer, judge.tokenizer = Unasked(model.tokenizer), Unasked(judge.tokenizer)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            state = copy.deepcopy(model.state_dict())
            outputs.append(run_step(model.backbone, samples, settings, con_d, momentum))
            model.load_state_dict(state)
    one, other = outputs
    assert torch.equal(one.loss, other.loss)
    assert torch.equal(one.i2t.probability, other.i2t.probability)
    assert torch.equal(one.text_features, other.text_features)


def test_fne_reads_tokens(toy):
    torch.manual_seed(0)
    model = load_model("fne_retrieval", "tiny")
    train_set = TrainingSet(toy["train"])
    add_tokens(train_set, model, None)
    batch = train_set.collater([train_set[index, 0] for index in range(8)])
    batch["epoch"] = 1
    other = copy.deepcopy(model.eval())
    other.tokenizer = Unasked(model.tokenizer)
    plain = {key: value for key, value in batch.items() if key != TOKENS}
    losses = []
    for read, samples in ((model, plain), (other, batch)):
        torch.manual_seed(1)
        losses.append(read(samples).loss)
    assert torch.equal(*losses)


def test_tokens_are_moved_and_kept_by_pinning():
    from torch.utils.data._utils.pin_memory import pin_memory

    tokens = Tokens(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))
    moved = to_device({TOKENS: tokens, "text_input": ["a", "b"]}, torch.device("meta"))
    assert {tensor.device.type for tensor in moved[TOKENS]} == {"meta"}
    assert moved["text_input"] == ["a", "b"]

    class Pinned(torch.Tensor):
        def pin_memory(self):
            return self + 1

    kept = pin_memory({TOKENS: Tokens(*(tensor.as_subclass(Pinned) for tensor in tokens))})
    assert isinstance(kept[TOKENS], Tokens)
    assert kept[TOKENS].input_ids.sum() == 6 and kept[TOKENS].attention_mask.sum() == 12


@pytest.mark.parametrize("parallelism", [None, "true"])
def test_forked_workers_neither_hang_nor_complain(monkeypatch, capfd, parallelism):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    model = load_model("albef_mafa", "tiny")
    model.tokenizer(CAPTIONS * 20)  # starts the threads of the main process
    if parallelism is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    train_set = TrainingSet(Captions(CAPTIONS * 20))
    add_tokens(train_set, model, None)
    (batch,) = loader(train_set, 2, multiprocessing_context="fork")
    assert equal(batch[TOKENS], as_in_forward(model, CAPTIONS * 20))
    assert "forked" not in capfd.readouterr().err
