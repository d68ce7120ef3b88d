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
from research.benchmarks.harness import Row, Sizes, in_turn, progress
from research.benchmarks.reference_step import PlainAlbef, reference_step
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
    """Run the forward and backward pass of ``forward()["loss"]``.

    Attributes:
        bf16: use autocast to bf16.
    """

    model: torch.nn.Module
    forward: Callable[[], Mapping[str, Any]]
    device: str
    bf16: bool

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
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
    setting = f"ALBEF {_vit_name(cfg)}, B={size}, {'bf16' if sizes.gpu else 'fp32'}"
    torch.manual_seed(0)
    model = AlbefMafa.from_config(cfg).to(sizes.device).train()
    judge = AlbefMafa.from_config(cfg)
    con_d = {name: _con_d_copy(judge, cfg, name, sizes) for name in ("fp32", "bf16")}
    samples["image_id"] = torch.arange(size, device=sizes.device)

    def ours(settings: StepSettings, discriminator: Any = None, half: bool = sizes.gpu) -> Step:
        forward = partial(run_step, model.backbone, samples, settings, discriminator)
        return Step(model, forward, sizes.device, half)

    progress("MAFA and GRIT-VLP")
    part = max(1, size // 3)
    chunked = partial(run_step, in_chunks(model.backbone, part), samples, GRIT_VLP)
    grit = ours(GRIT_VLP)
    steps = {
        "nothing converted, Con-D bf16": ours(_MAFA_FINDS_NOTHING, con_d["bf16"]),
        "25 % converted, Con-D bf16": ours(MAFA, FixedVerdicts(con_d["bf16"])),
    }
    both = {"grit": grit, "chunks": Step(model, chunked, sizes.device, sizes.gpu)}
    times = in_turn({**both, **steps}, sizes.repeats, device=sizes.device)
    for what in steps:
        note = f"both of this package; {setting}"
        yield Row.of(f"MAFA / GRIT-VLP step, {what}", note, times[what], times["grit"])
    yield Row.of(
        "GRIT-VLP step in chunks / whole mini-batch",
        f"run.cached_batch: {part}; {setting}",
        times["chunks"],
        times["grit"],
    )

    plain = PlainAlbef(cfg).to(sizes.device).train()
    plain_judge = PlainAlbef(cfg).to(sizes.device).eval().requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    plain_judge.load_state_dict(judge.state_dict())
    by_pair = FixedVerdicts(con_d["fp32"], verdicts_by_pair)
    require_equal_losses(
        "the authors' order",
        model,
        partial(run_step, model.backbone, samples, MAFA, by_pair),
        plain,
        partial(reference_step, plain, plain_judge, samples, verdicts=verdicts_by_pair),
    )
    progress("MAFA and the authors' order")
    half, precision = sizes.gpu, "bf16" if sizes.gpu else "fp32"
    theirs = partial(reference_step, plain, plain_judge, samples, verdicts=first_quarter)
    reference = Step(plain, theirs, sizes.device, half)
    mafa = ours(MAFA, FixedVerdicts(con_d[precision]))
    times = in_turn({"ours": mafa, "theirs": reference}, sizes.repeats, device=sizes.device)
    yield Row.of(
        f"MAFA step / the authors' order of work, both {precision}",
        f"ALBEF {_vit_name(cfg)}, B={size}, 25 % converted; equal losses at equal weights; the "
        "reference tokenises with the same fast tokenizer",
        *times.values(),
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
        ours,
        partial(run_step, ours.backbone, samples, _ALBEF_BASE),
        theirs,
        partial(theirs, samples),
        f"ALBEF-base step / LAVIS albef_pretrain, B={size}",
        f"{_vit_name(cfg)}; no momentum encoders, queue and distillation on both sides",
        cfg,
        sizes,
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
        yield _against_lavis(
            model,
            partial(run_step, model.backbone, {**samples, "image": images}, _BLIP2_STAGE_1),
            theirs,
            partial(theirs, samples),
            f"BLIP-2 stage 1 {what} / LAVIS blip2, B={size}",
            f"{_vit_name(cfg)}, image encoder frozen",
            cfg,
            sizes,
        )
    del theirs, reader
    judge = Blip2Mafa.from_config(cfg)
    judge.visual_encoder.load_state_dict(ours.visual_encoder.state_dict())
    con_d = ModelDiscriminator(judge.to(sizes.device), precision="bf16")
    if not con_d.share_encoder(ours):
        raise AssertionError("Con-D should share the frozen image encoder")
    progress("BLIP-2: MAFA and GRIT-VLP")
    mafa, grit = (
        Step(ours, partial(run_step, ours.backbone, samples, *given), sizes.device, sizes.gpu)
        for given in ((_BLIP2_MAFA_FINDS_NOTHING, con_d), (_BLIP2_GRIT_VLP, None))
    )
    times = in_turn({"mafa": mafa, "grit": grit}, sizes.repeats, device=sizes.device)
    yield Row.of(
        "BLIP-2: MAFA / GRIT-VLP step, shared frozen encoder",
        f"{_vit_name(cfg)}, B={size}, {'bf16' if sizes.gpu else 'fp32'}; nothing converted, Con-D "
        "bf16",
        *times.values(),
    )


def _against_lavis(
    ours: torch.nn.Module,
    our_forward: Callable[[], Any],
    theirs: torch.nn.Module,
    their_forward: Callable[[], Any],
    what: str,
    note: str,
    cfg: Any,
    sizes: Sizes,
) -> Row:
    """Time two models of equal weights, after checking that their losses are equal."""
    with deterministic_draws():
        require_equal_losses("LAVIS", ours, our_forward, theirs, their_forward, half=sizes.gpu)
    progress(what)
    steps = {
        "ours": Step(ours, our_forward, sizes.device, sizes.gpu),
        "theirs": Step(theirs, their_forward, sizes.device, sizes.gpu),
    }
    times = in_turn(steps, sizes.repeats, device=sizes.device)
    return Row.of(
        f"{what}, {'bf16' if sizes.gpu else 'fp32'}",
        f"{note}; LAVIS pads to {cfg.max_txt_len} tokens; its slow tokenizer is left out (the same "
        f"fast one on both); losses equal within {'5 %' if sizes.gpu else '0.01 %'} at equal "
        "weights and draws",
        *times.values(),
    )


@torch.no_grad()
def require_equal_losses(
    name: str,
    ours: torch.nn.Module,
    our_forward: Callable[[], Any],
    theirs: torch.nn.Module,
    their_forward: Callable[[], Any],
    half: bool = False,
) -> None:
    """Compare the losses of both sides in evaluation mode, for the same draws.

    Args:
        name: name of the reference, for the message.
        ours: this package's model.
        our_forward: its forward pass.
        theirs: the reference's model.
        their_forward: its forward pass.
        half: whether both run in bf16, where rounding may change which negative is drawn.

    Raises:
        AssertionError: if a loss differs.
    """
    losses = []
    for model, forward in ((ours, our_forward), (theirs, their_forward)):
        was_training = model.training
        model.eval()
        torch.manual_seed(0)
        device = next(model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=half):
            output = forward()
        model.train(was_training)
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
    if cfg.get("vit"):
        name = f"ViT of {cfg.vit.depth} layers, width {cfg.vit.width}"
    else:
        name = {"eva_clip_g": "ViT-g/14", "clip_L": "ViT-L/14"}.get(
            cfg.get("vit_model"), "ViT-B/16"
        )
    return f"{name} at {cfg.image_size} px"
