"""What LAVIS needs of transformers and newer versions lack, compared with what this version has."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from lavis.models import med
from lavis.models.blip_models import blip
from transformers import BertConfig, modeling_utils

from lavis_mafa.compat.adoption import _LavisPreTrainedModel
from lavis_mafa.compat.names import PARALLEL, lent_names
from lavis_mafa.families.tokenizers import build_tokenizer

NAMES = ("apply_chunking_to_forward", "find_pruneable_heads_and_indices", "prune_linear_layer")


def bert(**changes):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=11, intermediate_size=16, **sizes, **changes)
    config.encoder_width, config.fusion_layer, config.add_type_embeddings = 16, 0, False
    return med.BertForMaskedLM(config)


@pytest.fixture(scope="module")
def model():
    return bert()


def test_missing_names_are_lent_and_taken_back(monkeypatch):
    for name in NAMES:
        monkeypatch.delattr(modeling_utils, name, raising=False)
    monkeypatch.setitem(sys.modules, PARALLEL, None)  # importing it is an error
    with lent_names():
        chunked = modeling_utils.apply_chunking_to_forward
        assert torch.equal(chunked(lambda x: -x, 0, 1, torch.ones(2)), -torch.ones(2))
        lent = importlib.import_module(PARALLEL)
        with pytest.raises(NotImplementedError, match=r"get_device_map .* Install transformers"):
            lent.get_device_map(1, [0])
    assert not any(hasattr(modeling_utils, name) for name in NAMES)
    assert PARALLEL not in sys.modules


def test_lavis_is_imported_without_decord(monkeypatch):
    monkeypatch.setitem(sys.modules, "decord", None)
    for name in [n for n in sys.modules if n == "lavis.datasets.data_utils"]:
        monkeypatch.delitem(sys.modules, name)
    with lent_names():
        without = importlib.import_module("lavis.datasets.data_utils")
    assert "decord" not in sys.modules or sys.modules["decord"] is None
    with pytest.raises(NotImplementedError, match="LAVIS reads videos with decord"):
        without.VideoReader("a.mp4")


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5)])
def test_inverted_mask_equals_transformers(model, shape):
    mask = torch.randint(2, shape)
    ours = _LavisPreTrainedModel.invert_attention_mask(model, mask)
    assert torch.equal(ours, model.invert_attention_mask(mask)) and ours.ndim == 4


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("shape, length", [((2, 5), 5), ((2, 5), 2), ((2, 5, 5), 5)])
def test_extended_mask_equals_transformers(is_decoder, shape, length):
    """Also with fewer tokens than the mask has: the others' keys and values are kept."""
    model = bert(is_decoder=is_decoder)
    mask = torch.randint(2, shape)
    theirs = getattr(modeling_utils.PreTrainedModel, "get_extended_attention_mask", None)
    if theirs is None:
        pytest.skip("not in this version of transformers")
    ours = _LavisPreTrainedModel.get_extended_attention_mask(model, mask, (2, length))
    expected = theirs(model, mask, (2, length))
    assert torch.equal(ours, expected.expand_as(ours))


def test_output_embeddings_are_tied_to_input_embeddings(model):
    bias = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    expected = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight", **bias}
    assert _LavisPreTrainedModel.get_expanded_tied_weights_keys(model) == expected
    output, given = model.get_output_embeddings(), model.get_input_embeddings()
    assert output.weight is given.weight, "in every version of transformers"
    assert _LavisPreTrainedModel.get_expanded_tied_weights_keys(model.bert) == {}
    untied = bert(tie_word_embeddings=False)
    assert _LavisPreTrainedModel.get_expanded_tied_weights_keys(untied) == bias


def test_saved_models_keep_shared_weights(tmp_path):
    """Of a head, published files have the bias under one of its two names."""
    saved = bert()
    with torch.no_grad():
        for weight in saved.parameters():
            weight.normal_()
    saved.save_pretrained(tmp_path, safe_serialization=False)
    loaded = med.BertForMaskedLM.from_pretrained(tmp_path, config=saved.config)
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    for name, weight in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    head = loaded.cls.predictions
    assert head.decoder.weight is loaded.get_input_embeddings().weight
    assert torch.equal(head.decoder.bias, head.bias) and head.bias.any()


def test_tokenizer_without_vocabulary_is_refused(tmp_path):
    """Newer versions return one to which every word is unknown."""
    with pytest.raises(OSError, match="vocabulary|Can.t load"):
        build_tokenizer(str(tmp_path))
    if hasattr(modeling_utils.PreTrainedModel, "get_head_mask"):
        return
    with pytest.raises(OSError, match="has no vocabulary"):
        blip.BertTokenizer.from_pretrained(str(tmp_path))


def test_lavis_finds_the_tokens_it_adds(tmp_path, monkeypatch):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "circle"]
    (tmp_path / "bert-base-uncased").mkdir()
    (tmp_path / "bert-base-uncased/vocab.txt").write_text("\n".join(words) + "\n")
    monkeypatch.chdir(tmp_path)
    tokenizer = blip.BlipBase.init_tokenizer()
    assert tokenizer.convert_ids_to_tokens([tokenizer.bos_token_id]) == ["[DEC]"]
    assert tokenizer.convert_ids_to_tokens([tokenizer.enc_token_id]) == ["[ENC]"]
