"""Build the models and mini-batches of the training-step benchmarks, including LAVIS's models."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from lavis.models import eva_vit
from lavis.models.albef_models.albef_pretrain import AlbefPretrain
from lavis.models.blip2_models.blip2 import LayerNorm
from lavis.models.blip2_models.blip2_qformer import Blip2Qformer
from lavis.models.blip2_models.Qformer import BertLMHeadModel
from lavis.models.med import BertForMaskedLM
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import BertConfig

from lavis_mafa.algorithm import pickers
from lavis_mafa.families import AlbefMafa, Blip2Mafa
from lavis_mafa.families.blip2_parts import build_image_encoder
from lavis_mafa.families.tokenizers import add_dec_token, build_tokenizer
from lavis_mafa.io.project_files import find_config
from research.benchmarks.harness import Sizes
from research.benchmarks.reference_step import PlainAlbef, Verdicts, encode

WORDS = 30522  # the size of BERT's vocabulary
CAPTION_WORDS = (10.5, 2.4)  # of COCO's captions: mean and standard deviation


def albef_config(sizes: Sizes, folder: Path, **changes: Any) -> Any:
    """Return ALBEF base (ViT-B/16 at 256 px, BERT of 6 + 6 layers), or tiny; random weights."""
    return config_of(AlbefMafa, "tiny" if sizes.quick else "base", sizes, folder, changes)


def blip2_config(sizes: Sizes, folder: Path) -> Any:
    """Return BLIP-2 stage 1 with a frozen image encoder and random weights.

    The encoder is ViT-g on a GPU, CLIP's ViT-L on a CPU, or tiny.
    """
    name = {"quick": "tiny", "cpu": "pretrain_vitL", "gpu": "pretrain"}[sizes.name]
    changes: dict[str, Any] = {"freeze_vit": True, "vit_weights": None, "bert_weights": None}
    if not sizes.gpu:
        changes["vit_precision"] = "fp32"
    return config_of(Blip2Mafa, name, sizes, folder, changes)


def config_of(cls: Any, name: str, sizes: Sizes, folder: Path, changes: dict[str, Any]) -> Any:
    """Return a model type's config with changes, without downloads."""
    cfg = OmegaConf.load(cls.default_config_path(name)).model
    changes = {"load_pretrained": False, "load_finetuned": False, **changes}
    if not sizes.quick:
        changes["tokenizer"] = _vocabulary(folder)
    return OmegaConf.merge(cfg, changes)


def _vocabulary(folder: Path) -> str:
    """Write a vocabulary of BERT's size, so that language heads have their real cost.

    It is the vocabulary of the tiny models, filled with unused tokens.
    """
    file = folder / "vocab.txt"
    if not file.exists():
        tokens = Path(find_config("tiny_vocab.txt")).read_text("utf-8").split()
        tokens += [f"[unused{n}]" for n in range(WORDS - len(tokens))]
        file.write_text("\n".join(tokens) + "\n", "utf-8")
    return str(file)


def mini_batch(size: int, cfg: Any, device: str) -> dict[str, Any]:
    """Return random images, and captions of random words with lengths as in COCO."""
    side = cfg.image_size
    images = torch.randn(size, 3, side, side, generator=torch.Generator().manual_seed(0))
    draw = random.Random(0)
    vocabulary = Path(find_config("tiny_vocab.txt")).read_text("utf-8").split()
    words = [word for word in vocabulary if word.isalpha() and len(word) > 1]
    lengths = [min(33, max(5, round(draw.gauss(*CAPTION_WORDS)))) for _ in range(size)]
    captions = [" ".join(draw.choices(words, k=length)) for length in lengths]
    return {"image": images.to(device), "text_input": captions}


def first_quarter(image_of: Tensor, text_of: Tensor, probability: Tensor) -> Tensor:
    """Return verdicts by which the first quarter of the pairs match."""
    return (torch.arange(len(probability)) < round(len(probability) / 4)).to(probability)


def verdicts_by_pair(image_of: Tensor, text_of: Tensor, probability: Tensor) -> Tensor:
    """Return verdicts that depend only on the pair, so that all ranks and variants agree."""
    return ((7 * image_of + 3 * text_of) % 4 == 0).to(probability)


class FixedVerdicts:
    """A discriminator that judges as usual, but whose verdicts are replaced.

    Args:
        con_d: the discriminator that judges.
        verdicts: `first_quarter` or `verdicts_by_pair`.
    """

    def __init__(self, con_d: Any, verdicts: Verdicts = first_quarter) -> None:
        self.con_d, self.verdicts = con_d, verdicts

    def judge(
        self, samples: Any, image_of: Tensor, text_of: Tensor, *rest: Any, **options: Any
    ) -> Any:
        probability = self.con_d.judge(samples, image_of, text_of, *rest, **options)
        return self.verdicts(image_of, text_of, probability)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.con_d, name)


class _Constant(nn.Module):
    """A module that returns the same output for every input."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


class _WithoutTeacher(BertForMaskedLM):
    def forward(self, *args: Any, soft_labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class LavisAlbef(AlbefPretrain):
    """LAVIS's ``albef_pretrain`` with its forward pass, without the work of momentum encoders.

    Their outputs for ITC are computed once, by the encoders themselves, for one mini-batch. There
    is no queue and no distillation of MLM.

    Args:
        cfg: a ``model`` config of ``albef_mafa``.
    """

    def __init__(self, cfg: Any) -> None:
        self.vocabulary = cfg.tokenizer
        plain = PlainAlbef(cfg)
        super().__init__(
            plain.visual_encoder,
            plain.text_encoder,
            queue_size=0,
            embed_dim=cfg.embed_dim,
            mlm_mask_prob=cfg.mlm_mask_prob,
            temp=cfg.temp,
            max_txt_len=cfg.max_txt_len,
        )
        self.text_encoder.__class__ = _WithoutTeacher

    def init_tokenizer(self) -> Any:
        return build_tokenizer(self.vocabulary)

    @torch.no_grad()
    def set_momentum_outputs(self, samples: dict[str, Any]) -> None:
        """Replace the momentum encoders by constant outputs for this mini-batch."""
        was_training = self.training
        images, texts, _ = encode(self.eval(), samples)
        self.train(was_training)
        self.visual_encoder_m = _Constant(images)
        self.text_encoder_m = _Constant(torch.zeros(1, 1, 1))  # the teacher of MLM is not used
        self.text_encoder_m.bert = _Constant(SimpleNamespace(last_hidden_state=texts))
        self.vision_proj_m.load_state_dict(self.vision_proj.state_dict())
        self.text_proj_m.load_state_dict(self.text_proj.state_dict())

    def _momentum_update(self) -> None:
        pass

    def _dequeue_and_enqueue(self, *args: Any) -> None:
        pass

    def mask(
        self, ids: Tensor, vocabulary: int, device: Any, targets: Tensor, **options: Any
    ) -> Any:
        # LAVIS draws on the CPU and uses the draws as an index on the device.
        drawn = super().mask(ids.cpu(), vocabulary, "cpu", targets=targets.cpu(), **options)
        return tuple(tensor.to(device) for tensor in drawn)


class LavisBlip2(Blip2Qformer):
    """LAVIS's ``blip2`` with its forward pass and modules, without downloads.

    Args:
        cfg: a ``model`` config of ``blip2_mafa``.
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        names = (
            "vit_model",
            "drop_path_rate",
            "use_grad_checkpoint",
            "vit_precision",
            "freeze_vit",
            "num_query_token",
            "cross_attention_freq",
            "embed_dim",
            "max_txt_len",
        )
        super().__init__(img_size=cfg.image_size, **{name: cfg[name] for name in names})

    def init_tokenizer(self) -> Any:
        return add_dec_token(build_tokenizer(self.cfg.tokenizer))

    def init_vision_encoder(
        self, name: str, size: int, drop_path_rate: float, checkpoint: bool, precision: str
    ) -> tuple[nn.Module, nn.Module]:
        encoder = build_image_encoder(name, size, drop_path_rate, checkpoint, self.cfg.get("vit"))
        if precision == "fp16":
            eva_vit.convert_weights_to_fp16(encoder)
        return encoder, LayerNorm(encoder.num_features)

    def init_Qformer(  # noqa: N802  (LAVIS's name)
        self, queries: int, vision_width: int, cross_attention_freq: int = 2
    ) -> tuple[nn.Module, nn.Parameter]:
        file = self.cfg.get("q_former_config")
        config = BertConfig.from_json_file(find_config(file)) if file else BertConfig()
        config.encoder_width = vision_width
        config.add_cross_attention = True
        config.cross_attention_freq = cross_attention_freq
        config.query_length = queries
        config.vocab_size = len(self.tokenizer)
        tokens = torch.zeros(1, queries, config.hidden_size).normal_(std=config.initializer_range)
        return BertLMHeadModel(config), nn.Parameter(tokens)


@contextmanager
def lavis_can_run(device: str = "cpu") -> Iterator[None]:
    """Provide what LAVIS's models need: a process group of one for BLIP-2, ``np.Inf`` for ALBEF."""
    backend = "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            with mock.patch.object(np, "Inf", np.inf, create=True):
                yield
        finally:
            dist.destroy_process_group()


@contextmanager
def deterministic_draws() -> Iterator[None]:
    """Make random draws deterministic, because LAVIS draws in another order and with other shapes.

    The most probable negative is drawn, and MLM masks every word.
    """
    with ExitStack() as stack:
        for name, draw in (
            ("multinomial", lambda weights, count: weights.argmax(dim=-1, keepdim=True)),
            ("rand", lambda *shape, **options: torch.zeros(*shape, **options)),
            ("bernoulli", lambda probabilities: torch.ones_like(probabilities)),
        ):
            stack.enter_context(mock.patch.object(torch, name, draw))
        ours = mock.patch.object(pickers, "one_of", lambda weights: weights.argmax(dim=-1))
        stack.enter_context(ours)
        yield
