"""A user's family (a driver and a model of its own) and a data set for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder
from lavis.datasets.datasets.base_dataset import BaseDataset
from lavis.models.base_model import BaseModel
from torch import nn

from lavis_mafa.algorithm.backbone import FAMILIES, Images, Texts
from lavis_mafa.algorithm.options import option
from lavis_mafa.algorithm.tokens import Tokens, tokens_of
from lavis_mafa.families.mafa_model import MafaModel, step_parts
from lavis_mafa.families.tokenizers import build_tokenizer
from lavis_mafa.io.problems import Problem

HERE = Path(__file__).parent


@FAMILIES.register("averages", source="tests")
class AveragesDriver:
    """Drives models that average pixels and words."""

    @classmethod
    def drives(cls, model):
        """Return whether a model has the two linear encoders."""
        return hasattr(model, "pixel_encoder")

    def __init__(self, model):
        self.model = model

    @property
    def temperature(self):
        """The learnable temperature."""
        return self.model.temp

    def image_tokens(self, images):
        """Return one token an image, its encoded average colour."""
        return self.model.pixel_encoder(images.mean(dim=(2, 3)))[:, None]

    def encode_images(self, images, seen=None, for_matching=False):
        """Encode images."""
        seen = self.image_tokens(images) if seen is None else seen
        return Images(seen, F.normalize(seen[:, 0], dim=-1), seen=seen)

    def encode_texts(self, captions, max_length=None, for_matching=False):
        """Encode captions by the average of their words."""
        if not isinstance(captions, Tokens):
            captions = tokens_of(self.model.tokenizer, captions, max_length or 12)
        tokens = captions.to(self.model.device)
        words = self.model.words(tokens.input_ids) * tokens.attention_mask[..., None]
        average = words.sum(dim=1) / tokens.attention_mask.sum(dim=1, keepdim=True)
        features = F.normalize(average, dim=-1)
        return Texts(tokens.input_ids, tokens.attention_mask, words, features)

    def similarity(self, image_features, text_features):
        """Return cosine similarities."""
        return image_features @ text_features.t()

    def grit_vectors(self, images, texts):
        """Return the vectors that GRIT groups by."""
        return images.features.detach(), texts.features.detach()

    def match(self, images, texts, image_of, text_of):
        """Return ITM logits from the product of both encodings."""
        return self.model.itm_head(images.embeds[image_of, 0] * texts.features[text_of])

    def language_losses(self, images, texts, image_of, text_of, teacher=None):
        """Return the loss of predicting each word from the image."""
        logits = self.model.word_head(images.embeds[image_of, 0])[:, None]
        ids = texts.ids[text_of]
        logits = logits.expand(-1, ids.shape[1], -1).flatten(0, 1)
        return F.cross_entropy(logits, ids.flatten(), reduction="none")


@dataclass(frozen=True)
class AveragesOptions:
    """Keys of `model` that this model reads."""

    channels: int = option(16, "width of both encoders", low=1)


@registry.register_model("averages_tiny")
class Averages(MafaModel, BaseModel):
    """Averages of pixels and of words."""

    PRETRAINED_MODEL_CONFIG_DICT = {"tiny": str(HERE / "averages_tiny.yaml")}
    model_options = AveragesOptions
    family = "averages"

    def __init__(self, channels, tokenizer, settings, con_d):
        super().__init__()
        self.tokenizer, self.max_txt_len = tokenizer, 12
        self.pixel_encoder = nn.Linear(3, channels)
        self.words = nn.Embedding(len(tokenizer), channels)
        self.itm_head, self.word_head = nn.Linear(channels, 2), nn.Linear(channels, len(tokenizer))
        self.temp = nn.Parameter(torch.tensor(0.07))
        self.attach_step(AveragesDriver(self), settings, con_d)

    @classmethod
    def from_config(cls, cfg=None):
        """Build from a `model` config."""
        return cls(cfg.get("channels", 16), build_tokenizer(cfg.tokenizer), **step_parts(cfg))


@dataclass(frozen=True)
class SquaresOptions:
    """Keys of `build_info` that the builder reads."""

    count: int = option(doc="number of pairs", low=8)
    preset: str = option(doc="how fast colours change", choices=("slow", "fast"))


class Squares(BaseDataset):
    """Squares of one colour with a caption."""

    def __init__(self, count, step):
        super().__init__()
        self.count, self.step = count, step

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        shade = (index * self.step % self.count) / self.count
        image = torch.full((3, 8, 8), shade)
        return {"image": image, "text_input": f"a red square {index % 9}", "image_id": index}


@registry.register_builder("squares")
class SquaresBuilder(BaseDatasetBuilder):
    """Builds `train` of `Squares`."""

    DATASET_CONFIG_DICT = {"default": str(HERE / "squares.yaml")}
    build_options = SquaresOptions

    @classmethod
    def problems_of(cls, cfg):
        """Reject an odd number of pairs."""
        key = f"{cfg.section}.build_info.count"
        if cfg[key] is not None and cfg[key] % 2:
            yield Problem(key, f"{cfg[key]} is odd; use {cfg[key] + 1}")

    def build_datasets(self):
        """Build the only split."""
        info = self.config.build_info
        return {"train": Squares(info.count, 1 if info.preset == "slow" else 3)}
