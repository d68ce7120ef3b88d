"""Checkpoints with token types (ALBEF, GRIT-VLP, MAFA) load exactly, and what is dropped is said.

The reference is Hugging Face's BERT, which adds token types as the authors' code does.
"""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from lavis.common.registry import registry
from lavis.models.med import XBertEncoder
from test_against_lavis import LavisRetrieval
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertEncoder

from lavis_mafa import load_model
from lavis_mafa.checkpoints.weight_loading import _fold_token_types, complete_lavis_loading
from lavis_mafa.families import AlbefMafa, albef_mafa
from lavis_mafa.families.tokenizers import build_tokenizer
from lavis_mafa.io.project_files import CONFIGS
from lavis_mafa.judges.build import build_discriminator

BERT = "text_encoder.bert."
TYPES = "embeddings.token_type_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
CAPTIONS = ["a red circle", "big blue square on white", "cross"]


@pytest.fixture
def published(tmp_path):
    """A checkpoint as the authors save it: token types, momentum copies, queues."""
    torch.manual_seed(3)
    model = AlbefMafa.from_config(tiny_config(AlbefMafa))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state[BERT + TYPES] = torch.randn(2, 64)  # larger than trained ones, to be noticed
    for key in list(state):
        if key.startswith(("visual_encoder.", "text_encoder.", "vision_proj.", "text_proj.")):
            part, rest = key.split(".", 1)
            ids = rest.endswith("position_ids")
            state[f"{part}_m.{rest}"] = state[key] if ids else state[key] * 0.9
    state |= {"image_queue": torch.randn(64, 16), "queue_ptr": torch.zeros(1, dtype=torch.long)}
    path = tmp_path / "published.pth"
    torch.save({"model": state}, path)
    return str(path)


def part(state, prefix):
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


class Reference:
    """ALBEF's text side, by Hugging Face's BERT with token types."""

    def __init__(self, path, suffix=""):
        self.state = torch.load(path, weights_only=True)["model"]
        bert = part(self.state, f"text_encoder{suffix}.bert.")
        sizes = {
            "vocab_size": len(bert["embeddings.word_embeddings.weight"]),
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "max_position_embeddings": 64,
            "num_hidden_layers": 2,
            "attn_implementation": "eager",
        }
        self.embeddings = BertEmbeddings(BertConfig(**sizes))
        bert.pop("embeddings.position_ids")  # a constant
        self.embeddings.load_state_dict(part(bert, "embeddings."), strict=True)
        self.text = BertEncoder(BertConfig(**sizes)).eval()
        self.fusion = BertEncoder(BertConfig(**sizes, is_decoder=True, add_cross_attention=True))
        layers = part(bert, "encoder.")
        first = {k: v for k, v in layers.items() if int(k.split(".")[1]) < 2}
        later = {k.replace(f"layer.{n + 2}.", f"layer.{n}."): v for n in (0, 1)
                 for k, v in layers.items() if k.startswith(f"layer.{n + 2}.")}  # fmt: skip
        self.text.load_state_dict(first, strict=True)
        self.fusion.load_state_dict(later, strict=True)
        self.embeddings.eval(), self.fusion.eval()
        tokens = build_tokenizer("tiny_vocab.txt")(CAPTIONS, padding=True, return_tensors="pt")
        self.ids, self.mask = tokens.input_ids, tokens.attention_mask

    def states(self):
        hidden = self.embeddings(self.ids)
        return self.text(hidden, attention_mask=self.hidden_tokens()).last_hidden_state

    def hidden_tokens(self):
        return (1.0 - self.mask[:, None, None].float()) * -10000.0

    def features(self):
        weight, bias = self.state["text_proj.weight"], self.state["text_proj.bias"]
        return F.normalize(F.linear(self.states()[:, 0], weight, bias), dim=-1)

    def fused(self, images):
        return self.fusion(
            self.states(),
            attention_mask=self.hidden_tokens(),
            encoder_hidden_states=images,
            encoder_attention_mask=torch.zeros(len(images), 1, 1, images.shape[1]),
        ).last_hidden_state

    def probabilities(self, images):
        head = self.state["itm_head.weight"], self.state["itm_head.bias"]
        return F.linear(self.fused(images)[:, 0], *head).softmax(dim=1)[:, 1]


def pictures():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def check(model, reference, tolerance=1e-6):
    with torch.no_grad():
        images = model.visual_encoder.forward_features(pictures())
        texts = albef_mafa.AlbefBackbone(model).encode_texts(CAPTIONS)
        assert torch.allclose(texts.features, reference.features(), atol=tolerance)
        bert = getattr(model.text_encoder, "bert", model.text_encoder)
        fused = bert(
            encoder_embeds=texts.embeds,
            attention_mask=texts.mask,
            encoder_hidden_states=images,
            encoder_attention_mask=torch.ones(images.shape[:2]),
            return_dict=True,
            mode="fusion",
        ).last_hidden_state
        probability = model.itm_head(fused[:, 0]).softmax(dim=1)[:, 1]
        assert torch.allclose(probability, reference.probabilities(images), atol=tolerance)


def test_pretrained_and_load_model_equal_bert_with_token_types(published):
    reference = Reference(published)
    cfg = tiny_config(AlbefMafa, load_pretrained=True, pretrained=published)
    check(AlbefMafa.from_config(cfg).eval(), reference)
    check(load_model("albef_mafa", "tiny", is_eval=True, checkpoint=published), reference)


def test_momentum_copies_have_token_types_of_their_own(published):
    cfg = tiny_config(
        AlbefMafa,
        load_pretrained=True,
        pretrained=published,
        mafa={"con_d": None, "soft_labels": {"type": "momentum"}},
        queue_size=16,
    )
    model = AlbefMafa.from_config(cfg).eval()
    reference = Reference(published, "_m")
    reference.state |= {k: reference.state[k.replace(".", "_m.", 1)]
                        for k in ("text_proj.weight", "text_proj.bias")}  # fmt: skip
    with torch.no_grad():
        texts = model.momentum_encoders.backbone.encode_texts(CAPTIONS)
    assert torch.allclose(texts.features, reference.features(), atol=1e-6)


def test_con_d_judges_as_bert_with_token_types(published):
    reference = Reference(published)
    con_d = build_discriminator(
        {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": published}
    )
    pairs = torch.arange(3)
    given = con_d.judge({"image": pictures(), "text_input": CAPTIONS}, pairs, pairs)
    with torch.no_grad():
        images = con_d.model.visual_encoder.forward_features(pictures())
    assert torch.allclose(given, reference.probabilities(images), atol=1e-6)


@pytest.fixture
def local_tokenizer(tmp_path, monkeypatch):
    # LAVIS loads this tokenizer by name; a local folder of that name takes precedence.
    build_tokenizer("tiny_vocab.txt").save_pretrained(tmp_path / "bert-base-uncased")
    monkeypatch.chdir(tmp_path)


@pytest.mark.downstream
@pytest.mark.parametrize("arch", ["albef_ve_mafa", "albef_vqa_mafa", "albef_nlvr_mafa"])
def test_fine_tuning_starts_from_positions_with_token_types(published, local_tokenizer, arch):
    cls = registry.get_model_class(arch)
    state = torch.load(published, weights_only=True)["model"]
    cfg = tiny_config(cls, load_pretrained=True, pretrained=published, use_distill=True)
    model = cls.from_config(cfg)
    own = {key: value for key, value in model.state_dict().items() if key.endswith(POSITIONS)}
    assert len(own) >= 2  # with momentum copies, and with a decoder in VQA
    for key, value in own.items():
        copy = "_m" if "_m." in key and arch != "albef_nlvr_mafa" else ""
        bert = f"text_encoder{copy}.bert."
        assert torch.equal(value, state[bert + POSITIONS] + state[bert + TYPES][0]), key


def small_lavis():
    source = AlbefMafa.from_config(tiny_config(AlbefMafa))
    torch.manual_seed(1)
    encoder = XBertEncoder(config=source.text_encoder.config, add_pooling_layer=False)
    return LavisRetrieval(source.visual_encoder, encoder, queue_size=16, embed_dim=64).eval()


def test_models_that_lavis_loads_equal_bert_with_token_types(published, caplog):
    model = small_lavis()
    model.load_from_pretrained(published)
    with caplog.at_level(logging.WARNING):
        complete_lavis_loading(model, published)
    assert "text_encoder.bert.cls" not in caplog.text and "text_encoder (" in caplog.text
    check(model, Reference(published))
    complete_lavis_loading(model, published)  # a second call changes nothing
    check(model, Reference(published))


def test_what_lavis_did_not_find_in_a_file_is_loaded(published, tmp_path):
    """LAVIS's `load_checkpoint` ignores every name that does not match."""
    content = torch.load(published, weights_only=True)
    wrapped = {f"module.{key}": value for key, value in content["model"].items()}
    torch.save({"state_dict": wrapped}, tmp_path / "wrapped.pth")
    model = small_lavis()
    model.load_state_dict({"state_dict": wrapped}, strict=False)
    complete_lavis_loading(model, str(tmp_path / "wrapped.pth"))
    check(model, Reference(published))
    torch.save({"model": {"other.weight": torch.ones(2, 2)}}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="other.pth holds no weight of"):
        complete_lavis_loading(model, str(tmp_path / "other.pth"))


def without_types(weights):
    return {key: value for key, value in weights.items() if not key.endswith(TYPES)}


@pytest.mark.parametrize("with_types", [True, False])
def test_bert_that_a_model_starts_from_keeps_its_token_types(
    published, tmp_path, monkeypatch, with_types
):
    folder = tmp_path / "bert"
    source = AlbefMafa.from_config(tiny_config(AlbefMafa)).text_encoder
    weights = part(torch.load(published, weights_only=True)["model"], "text_encoder.")
    types = weights["bert." + TYPES][0] if with_types else 0.0
    source.config.save_pretrained(folder)
    torch.save(weights if with_types else without_types(weights), folder / "pytorch_model.bin")
    monkeypatch.setattr(albef_mafa, "BERT", str(folder))
    config = BertConfig.from_json_file(CONFIGS / "models" / "med_config_tiny.json")
    config.vocab_size = source.config.vocab_size
    started = albef_mafa._published_bert(config).state_dict()
    assert not any("token_type" in key for key in started)
    assert torch.equal(started["bert." + POSITIONS], weights["bert." + POSITIONS] + types)
    word = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(started[word], weights[word])


def test_dropped_weights_are_said_once_by_group(published, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        build_discriminator({"arch": "albef_mafa", "model_type": "tiny", "checkpoint": published})
    said = [text for text in caplog.messages if "dropped" in text]
    assert len(said) == 1 and published in said[0]
    for group in ("visual_encoder_m (", "text_encoder_m (", "vision_proj_m (", "AlbefMafa lacks"):
        assert group in said[0]
    assert "token_type" not in said[0] and "position_ids" not in said[0]
    caplog.clear()
    model = load_model("albef_mafa", "tiny")
    torch.save({"model": model.state_dict()}, tmp_path / "whole.pth")
    with caplog.at_level(logging.WARNING):
        model.load_checkpoint(str(tmp_path / "whole.pth"))
    assert not [text for text in caplog.messages if "dropped" in text]


def test_token_types_stay_where_the_model_has_them():
    state = {BERT + TYPES: torch.ones(2, 4), BERT + POSITIONS: torch.zeros(6, 4)}
    assert _fold_token_types(state, state)[BERT + TYPES] is state[BERT + TYPES]
    shorter = {key.replace("bert.", ""): value for key, value in state.items()}
    kept = _fold_token_types(state, shorter)
    assert torch.equal(kept[BERT + POSITIONS], state[BERT + POSITIONS])


@pytest.mark.parametrize("shape", [(2, 5), (0, 4), (4,)])
def test_token_types_that_do_not_fit_are_named(shape):
    state = {BERT + TYPES: torch.ones(shape), BERT + POSITIONS: torch.zeros(6, 4)}
    with pytest.raises(ValueError, match="token_type_embeddings.*does not fit"):
        _fold_token_types(state, ())


def test_half_precision_is_summed_in_float32():
    state = {BERT + TYPES: torch.full((2, 4), 1e-3).half(), BERT + POSITIONS: torch.ones(6, 4)}
    state = {key: value.half() for key, value in state.items()}
    total = _fold_token_types(state, ())[BERT + POSITIONS]
    assert total.dtype == torch.float32 and (total != total.half().float()).all()
