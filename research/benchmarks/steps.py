"""Measure training steps: MAFA against GRIT-VLP, and both against independent implementations.

A step is the forward and the backward pass of the whole loss, in training mode; the optimiser's
update, which is the same on both sides, is not measured. Before timing, each comparison checks that
both sides compute the same losses from the same weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lavis_mafa.algorithm.cached_batch import in_chunks
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.families import AlbefMafa, Blip2Mafa
from lavis_mafa.judges.discriminators import ModelDiscriminator
from research.benchmarks.harness import Row, Sizes, compare
from research.benchmarks.reference_step import PlainAlbef, Verdicts, reference_step
from research.benchmarks.step_models import (
    FixedVerdicts,
    LavisAlbef,
    LavisBlip2,
    albef_config,
    blip2_config,
    deterministic_draws,
    first_quarter,
    lavis_can_run,
    mini_batch,
    verdicts_by_pair,
)

BATCH = {"quick": 8, "cpu": 3, "gpu": 96}
_BLIP2_BATCH = {**BATCH, "cpu": 2}
GRIT_VLP = StepSettings(soft_labels=SoftLabels("consistency"))
MAFA = StepSettings()
# With these thresholds, all pairs are judged and none is converted.
_MAFA_FINDS_NOTHING = StepSettings(connections=MiningRule(low=1.0, high=1.0))
_ALBEF_BASE = StepSettings(negatives="sampled", soft_labels=SoftLabels("one_hot"))
# BLIP-2: no re-sampling, no mined pairs in LM, see blip2_mafa's configs.
_BLIP2 = SoftLabels(alpha=0.2, label_smoothing=0.1)
_BLIP2_GRIT_VLP = StepSettings(soft_labels=SoftLabels("consistency", label_smoothing=0.1))
_BLIP2_RULE = MiningRule(resample=False, use_in=("itc", "itm"))
BLIP2_MAFA = StepSettings(soft_labels=_BLIP2, connections=_BLIP2_RULE)
_BLIP2_MAFA_FINDS_NOTHING = replace(BLIP2_MAFA, connections=replace(_BLIP2_RULE, low=1.0, high=1.0))
_BLIP2_STAGE_1 = StepSettings(
    negatives="sampled", soft_labels=SoftLabels("one_hot", label_smoothing=0.1)
)
SAME = 1e-4  # relative difference of losses that count as equal in fp32


@dataclass
class Step:
    """A forward pass of a model, which returns its ``loss``, and the backward pass."""

    model: torch.nn.Module
    forward: Callable[[], Mapping[str, Any]]
    sizes: Sizes

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.sizes.device, torch.bfloat16, enabled=self.sizes.gpu):
            output = self.forward()
        output["loss"].backward()


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure ALBEF with and without Con-D against the authors' order and LAVIS; then BLIP-2."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _albef_rows(sizes, folder)
        with lavis_can_run(sizes.device):
            yield _lavis_albef_row(sizes, folder)
            yield from _blip2_rows(sizes, folder)


def _albef_rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Measure our MAFA against our GRIT-VLP and against the authors' order of work."""
    cfg = albef_config(sizes, folder)
    size = sizes.batch or BATCH[sizes.name]
    samples = mini_batch(size, cfg, sizes.device)
    setting = f"ALBEF {_vit_name(cfg)}, B={size}"
    torch.manual_seed(0)
    model = AlbefMafa.from_config(cfg).to(sizes.device).train()
    judge = AlbefMafa.from_config(cfg)
    con_d = {name: _con_d_copy(judge, cfg, name, sizes) for name in ("fp32", "bf16")}
    samples["image_id"] = torch.arange(size, device=sizes.device)

    def ours(settings: StepSettings, discriminator: Any = None) -> Step:
        forward = partial(run_step, model.backbone, samples, settings, discriminator)
        return Step(model, forward, sizes)

    part = max(1, size // 3)
    chunked = partial(run_step, in_chunks(model.backbone, part), samples, GRIT_VLP)
    grit = ours(GRIT_VLP)
    for what, step in (
        ("nothing converted", ours(_MAFA_FINDS_NOTHING, con_d["bf16"])),
        ("25 % converted", ours(MAFA, FixedVerdicts(con_d["bf16"]))),
    ):
        note = f"both of this package; {setting}, {sizes.precision}"
        yield compare(f"MAFA / GRIT-VLP step, {what}, Con-D bf16", note, step, grit, sizes)
    yield compare(
        "GRIT-VLP step in chunks / whole mini-batch",
        f"run.cached_batch: {part}; {setting}, {sizes.precision}",
        Step(model, chunked, sizes),
        grit,
        sizes,
    )

    plain = PlainAlbef(cfg).to(sizes.device).train()
    plain_judge = PlainAlbef(cfg).to(sizes.device).eval().requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    plain_judge.load_state_dict(judge.state_dict())

    def theirs(verdicts: Verdicts) -> Step:
        forward = partial(reference_step, plain, plain_judge, samples, verdicts=verdicts)
        return Step(plain, forward, sizes)

    by_pair = ours(MAFA, FixedVerdicts(con_d["fp32"], verdicts_by_pair))
    require_equal_losses("the authors' order", by_pair, theirs(verdicts_by_pair))
    yield compare(
        f"MAFA step / the authors' order of work, both {sizes.precision}",
        f"{setting}, 25 % converted; equal losses at equal weights; the reference tokenises with "
        "the same fast tokenizer",
        ours(MAFA, FixedVerdicts(con_d[sizes.precision])),
        theirs(first_quarter),
        sizes,
    )


def _lavis_albef_row(sizes: Sizes, folder: Path) -> Row:
    """Measure ALBEF-base against LAVIS's ``albef_pretrain`` without momentum encoders."""
    cfg = albef_config(sizes, folder, mlm_mask_prob=0.15)
    size = sizes.batch or BATCH[sizes.name]
    samples = mini_batch(size, cfg, sizes.device)
    samples.update(epoch=0, iters=0, num_iters_per_epoch=1)
    torch.manual_seed(0)
    theirs = LavisAlbef(cfg).train()
    ours = AlbefMafa.from_config(cfg).train()
    state = theirs.state_dict()
    ours.load_state_dict({key: state[key] for key in ours.state_dict()})
    theirs.to(sizes.device).set_momentum_outputs(samples)
    ours.to(sizes.device)
    return _against_lavis(
        Step(ours, partial(run_step, ours.backbone, samples, _ALBEF_BASE), sizes),
        Step(theirs, partial(theirs, samples), sizes),
        f"ALBEF-base step / LAVIS albef_pretrain, B={size}",
        f"{_vit_name(cfg)}; no momentum encoders, queue and distillation on both sides",
        cfg,
    )


def _blip2_rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Measure BLIP-2's stage 1 against LAVIS's, and MAFA against GRIT-VLP.

    For MAFA, Con-D shares the frozen image encoder.
    """
    cfg = blip2_config(sizes, folder)
    size = sizes.batch or _BLIP2_BATCH[sizes.name]
    samples = mini_batch(size, cfg, sizes.device)
    torch.manual_seed(0)
    theirs = LavisBlip2(cfg).to(sizes.device).train()
    ours = Blip2Mafa.from_config(cfg).to(sizes.device).train()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        features = ours.backbone.image_tokens(samples["image"])
    of_features = {"image_encoder": "features", "feature_width": features.shape[-1]}
    reader = Blip2Mafa.from_config(OmegaConf.merge(cfg, of_features)).to(sizes.device).train()
    state = ours.state_dict()
    reader.load_state_dict({key: state[key] for key in reader.state_dict()})
    for model, images, what in (
        (ours, samples["image"], "step"),
        (reader, features, "step on kept features"),
    ):
        given = {**samples, "image": images}
        yield _against_lavis(
            Step(model, partial(run_step, model.backbone, given, _BLIP2_STAGE_1), sizes),
            Step(theirs, partial(theirs, samples), sizes),
            f"BLIP-2 stage 1 {what} / LAVIS blip2, B={size}",
            f"{_vit_name(cfg)}, image encoder frozen",
            cfg,
        )
    del theirs, reader
    judge = Blip2Mafa.from_config(cfg)
    judge.visual_encoder.load_state_dict(ours.visual_encoder.state_dict())
    con_d = ModelDiscriminator(judge.to(sizes.device), precision="bf16")
    if not con_d.share_encoder(ours):
        raise AssertionError("Con-D should share the frozen image encoder")
    mafa, grit = (
        Step(ours, partial(run_step, ours.backbone, samples, *given), sizes)
        for given in ((_BLIP2_MAFA_FINDS_NOTHING, con_d), (_BLIP2_GRIT_VLP, None))
    )
    yield compare(
        "BLIP-2: MAFA / GRIT-VLP step, shared frozen encoder",
        f"{_vit_name(cfg)}, B={size}, {sizes.precision}; nothing converted, Con-D bf16",
        mafa,
        grit,
        sizes,
    )


def _against_lavis(ours: Step, theirs: Step, what: str, note: str, cfg: Any) -> Row:
    """Time two models of equal weights, after checking that their losses are equal."""
    sizes = ours.sizes
    with deterministic_draws():
        require_equal_losses("LAVIS", ours, theirs, half=sizes.gpu)
    return compare(
        f"{what}, {sizes.precision}",
        f"{note}; LAVIS pads to {cfg.max_txt_len} tokens; its slow tokenizer is left out (the same "
        f"fast one on both); losses equal within {'5 %' if sizes.gpu else '0.01 %'} at equal "
        "weights and draws",
        ours,
        theirs,
        sizes,
    )


@torch.no_grad()
def require_equal_losses(name: str, ours: Step, theirs: Step, half: bool = False) -> None:
    """Compare the losses of both sides in evaluation mode, for the same draws.

    Args:
        name: name of the reference, for the message.
        half: whether both run in bf16, where rounding may change which negative is drawn.

    Raises:
        AssertionError: if a loss differs.
    """
    losses = []
    for step in (ours, theirs):
        was_training = step.model.training
        step.model.eval()
        torch.manual_seed(0)
        with torch.autocast(step.sizes.device, torch.bfloat16, enabled=half):
            output = step.forward()
        step.model.train(was_training)
        language = "loss_mlm" if "loss_mlm" in output else "loss_lm"
        losses.append([float(output[key]) for key in ("loss_itc", "loss_itm", language)])
    our_losses, their_losses = (torch.tensor(values) for values in losses)
    close = torch.isclose(our_losses, their_losses, rtol=5e-2 if half else SAME)
    if not bool(close.all()):
        raise AssertionError(
            f"not the same work as {name}: losses ITC, ITM, language {losses[0]} and {losses[1]}"
        )


def _con_d_copy(model: Any, cfg: Any, precision: str, sizes: Sizes) -> ModelDiscriminator:
    """Return Con-D with a copy of the model's weights, because its precision may change them."""
    own = AlbefMafa.from_config(cfg)
    own.load_state_dict(model.state_dict())
    return ModelDiscriminator(own.to(sizes.device), precision=precision)


def _vit_name(cfg: Any) -> str:
    """Describe the image encoder of a config."""
    name = "tiny ViT" if cfg.get("vit") else cfg.get("vit_model") or "ViT-B/16"
    return f"{name} at {cfg.image_size} px"
