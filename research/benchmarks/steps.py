"""Measure training steps: MAFA against GRIT-VLP, and both against independent implementations.

A step is the forward and the backward pass of the whole loss, in training mode; the optimiser's
update, which is the same on both sides, is not measured. Before timing, each comparison checks that
both sides compute the same losses from the same weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lavis_mafa.algorithm.cached_batch import CachedBatch
from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.output import COUNTS
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.models import AlbefMafa, Blip2Mafa
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from lavis_mafa.models.con_d.kept_rows import KeptRows
from research.benchmarks.harness import Row, Sizes, Timed, in_turn, peak_memory, progress
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
BLIP2_BATCH = {**BATCH, "cpu": 2}
MEMORY_BATCH = {**BATCH, "cpu": 4}
NOTHING = MiningRule(low=1.0, high=1.0)  # all pairs are judged, no probability is above
GRIT_VLP = StepSettings(soft_labels=SoftLabels("consistency"))
MAFA = StepSettings()
MAFA_FINDS_NOTHING = StepSettings(connections=NOTHING)
ALBEF_BASE = StepSettings(negatives="sampled", soft_labels=SoftLabels("one_hot"))
# BLIP-2: no re-sampling, no mined pairs in LM, see blip2_mafa's configs.
BLIP2 = SoftLabels(alpha=0.2, label_smoothing=0.1)
BLIP2_GRIT_VLP = StepSettings(soft_labels=SoftLabels("consistency", label_smoothing=0.1))
BLIP2_MAFA_FINDS_NOTHING = StepSettings(
    soft_labels=BLIP2,
    connections=MiningRule(low=1.0, high=1.0, resample=False, use_in=("itc", "itm")),
)
BLIP2_STAGE_1 = StepSettings(
    negatives="sampled", soft_labels=SoftLabels("one_hot", label_smoothing=0.1)
)
KEPT = "Con-D bf16, images kept"
SAME = 1e-4  # relative difference of losses that are the same in fp32


@dataclass
class Step:
    """Run the forward and backward pass of ``forward()["loss"]``.

    Attributes:
        bf16: under autocast to bf16.
        found: anchors with a mined positive in the last step.
    """

    model: torch.nn.Module
    forward: Callable[[], Mapping[str, Any]]
    device: str
    bf16: bool
    found: int = 0

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            output = self.forward()
        output["loss"].backward()
        if "counts" in output:
            self.found = int(output["counts"][:, COUNTS.index("found")].sum())
        elif "found" in output:
            self.found = int(output["found"].sum())


def rows(sizes: Sizes) -> Iterator[Row]:
    """Measure ALBEF with and without Con-D, against the authors' order and LAVIS, and BLIP-2."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from albef_rows(sizes, folder)
        with lavis_can_run(sizes.device):
            yield from lavis_albef_rows(sizes, folder)
            yield from blip2_rows(sizes, folder)


def albef_rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Measure MAFA against GRIT-VLP, both ours, and against the authors' order of work."""
    cfg = albef_config(sizes, folder)
    size, bf16 = sizes.batch or BATCH[sizes.name], sizes.gpu
    samples = mini_batch(size, cfg, sizes.device)
    setting = f"ALBEF {vit_name(cfg)}, B={size}, {'bf16' if bf16 else 'fp32'}"
    torch.manual_seed(0)
    model = AlbefMafa.from_config(cfg).to(sizes.device).train()
    judge = AlbefMafa.from_config(cfg)
    con_d = {name: con_d_copy(judge, cfg, name, sizes) for name in ("fp32", "bf16")}
    keeping = con_d_copy(judge, cfg, "bf16", sizes)
    samples["image_id"] = torch.arange(size, device=sizes.device)
    with torch.no_grad():
        _, tokens, width = model.backbone.image_tokens(samples["image"][:1]).shape
    row = tokens, width
    keeping.kept = KeptRows(folder / "kept", {}, np.arange(size), row, torch.bfloat16).open()

    def ours(settings: StepSettings, discriminator: Any = None, half: bool = bf16) -> Step:
        forward = partial(run_step, model.backbone, samples, settings, discriminator)
        return Step(model, forward, sizes.device, half)

    chunks = CachedBatch(model.backbone, max(1, size // 3))

    progress("MAFA and GRIT-VLP")
    steps = {
        "grit": ours(GRIT_VLP),
        "grit, chunks": Step(
            model, partial(run_step, chunks, samples, GRIT_VLP), sizes.device, bf16
        ),
        "none": ours(MAFA_FINDS_NOTHING, con_d["bf16"]),
        "none, fp32": ours(MAFA_FINDS_NOTHING, con_d["fp32"]),
        "quarter": ours(MAFA, FixedVerdicts(con_d["bf16"])),
        "none, kept": ours(MAFA_FINDS_NOTHING, keeping),
        "quarter, kept": ours(MAFA, FixedVerdicts(keeping)),
    }
    times = in_turn(steps, sizes.repeats, device=sizes.device)
    keeping.kept.close()

    def against_grit(name: str, what: str, target: str = "") -> Row:
        note = (
            f"both of this package; {setting}; {steps[name].found} of {2 * size} anchors got a "
            "positive in the last step"
        )
        if KEPT in what:
            note += "; from an image's second time on, its file in the page cache; no second view"
        timed = Timed.of(times[name], times["grit"])
        return timed.row(f"MAFA / GRIT-VLP step, {what}", target, note)

    yield against_grit("none", "nothing converted, Con-D bf16", "<= 1.10")
    yield against_grit("none, fp32", "nothing converted, Con-D fp32")
    yield against_grit("quarter", "25 % converted, Con-D bf16", "<= 1.15")
    # No targets: the images are un-augmented, and their first encoding is not timed.
    yield against_grit("none, kept", f"nothing converted, {KEPT}")
    yield against_grit("quarter, kept", f"25 % converted, {KEPT}")
    yield Timed.of(times["grit, chunks"], times["grit"]).row(
        "GRIT-VLP step in chunks / whole mini-batch",
        "",
        f"run.cached_batch: {chunks.size}; {setting}",
    )

    plain = PlainAlbef(cfg).to(sizes.device).train()
    plain_judge = PlainAlbef(cfg).to(sizes.device).eval().requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    plain_judge.load_state_dict(judge.state_dict())
    require_equal_losses(
        "the authors' order",
        model,
        partial(
            run_step, model.backbone, samples, MAFA, FixedVerdicts(con_d["fp32"], verdicts_by_pair)
        ),
        plain,
        partial(reference_step, plain, plain_judge, samples, verdicts=verdicts_by_pair),
    )
    theirs = partial(reference_step, plain, plain_judge, samples, verdicts=first_quarter)
    progress("MAFA and the authors' order")
    steps = {
        "reference": Step(plain, theirs, sizes.device, False),
        "ours": ours(MAFA, FixedVerdicts(con_d["fp32"]), False),
        "ours, bf16": ours(MAFA, FixedVerdicts(con_d["bf16"]), True),
    }
    if bf16:
        steps["reference, bf16"] = Step(plain, theirs, sizes.device, True)
    times = in_turn(steps, sizes.repeats, device=sizes.device)
    note = (
        f"ALBEF {vit_name(cfg)}, B={size}, 25 % converted ({steps['ours'].found} of {2 * size} "
        f"anchors, in the reference {steps['reference'].found}); equal losses at equal weights; "
        "the reference tokenises with the same fast tokenizer"
    )
    what = "MAFA step / the authors' order of work"
    timed = Timed.of(times["ours"], times["reference"])
    yield timed.row(f"{what}, both fp32", "<= 0.72", note)
    timed = Timed.of(times["ours, bf16"], times["reference"])
    yield timed.row(f"{what}, ours bf16, theirs fp32", "<= 0.25", note)
    if bf16:
        timed = Timed.of(times["ours, bf16"], times["reference, bf16"])
        yield timed.row(f"{what}, both bf16", "<= 0.72", note)


def lavis_albef_rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
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
    yield against_lavis(
        ours,
        partial(run_step, ours.backbone, samples, ALBEF_BASE),
        theirs,
        partial(theirs, samples),
        f"ALBEF-base step / LAVIS albef_pretrain, B={size}",
        f"{vit_name(cfg)}; no momentum encoders, queue and distillation on both sides; LAVIS pads "
        f"to {cfg.max_txt_len} tokens; its slow tokenizer is left out (the same fast one on both)",
        sizes,
    )


def blip2_rows(sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Measure BLIP-2's stage 1 against LAVIS's, and MAFA against GRIT-VLP.

    For MAFA, Con-D shares the frozen image encoder.
    """
    cfg = blip2_config(sizes, folder)
    size = sizes.batch or BLIP2_BATCH[sizes.name]
    samples = mini_batch(size, cfg, sizes.device)
    torch.manual_seed(0)
    theirs = LavisBlip2(cfg).to(sizes.device).train()
    ours = Blip2Mafa.from_config(cfg).to(sizes.device).train()
    ours.load_state_dict(theirs.state_dict())
    yield against_lavis(
        ours,
        partial(run_step, ours.backbone, samples, BLIP2_STAGE_1),
        theirs,
        partial(theirs, samples),
        f"BLIP-2 stage 1 step / LAVIS blip2, B={size}",
        f"{vit_name(cfg)}, image encoder frozen; LAVIS pads to {cfg.max_txt_len} tokens; its slow "
        "tokenizer is left out (the same fast one on both)",
        sizes,
    )
    del theirs
    judge = Blip2Mafa.from_config(cfg)
    judge.visual_encoder.load_state_dict(ours.visual_encoder.state_dict())
    con_d = ModelDiscriminator(judge.to(sizes.device), precision="bf16")
    if not con_d.share_encoder(ours):
        raise AssertionError("Con-D should share the frozen image encoder")
    progress("BLIP-2: MAFA and GRIT-VLP")
    steps = {
        name: Step(
            ours,
            partial(run_step, ours.backbone, samples, settings, discriminator),
            sizes.device,
            sizes.gpu,
        )
        for name, settings, discriminator in (
            ("grit", BLIP2_GRIT_VLP, None),
            ("mafa", BLIP2_MAFA_FINDS_NOTHING, con_d),
        )
    }
    times = in_turn(steps, sizes.repeats, device=sizes.device)
    yield Timed.of(times["mafa"], times["grit"]).row(
        "BLIP-2: MAFA / GRIT-VLP step, shared frozen encoder",
        "<= 1.05",
        f"{vit_name(cfg)}, B={size}, {'bf16' if sizes.gpu else 'fp32'}; nothing converted, Con-D "
        "bf16",
    )


def against_lavis(
    ours: torch.nn.Module,
    our_forward: Callable[[], Any],
    theirs: torch.nn.Module,
    their_forward: Callable[[], Any],
    what: str,
    note: str,
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
    precision = "bf16" if sizes.gpu else "fp32"
    same = "5 %" if sizes.gpu else "0.01 %"
    note = f"{note}; losses equal within {same} at equal weights and draws"
    return Timed.of(times["ours"], times["theirs"]).row(f"{what}, {precision}", "<= 0.85", note)


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
        name: the reference, for the message.
        ours: this package's model.
        our_forward: its forward pass.
        theirs: the reference's model.
        their_forward: its forward pass.
        half: in bf16, where rounding may change which negative is drawn.

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


def memory_rows(sizes: Sizes) -> Iterator[Row]:
    """Measure the peak memory of a step with Con-D against one without."""
    size = sizes.batch or MEMORY_BATCH[sizes.name]
    progress("peak memory")

    def peak(system: str) -> float:
        return peak_memory(partial(one_step, sizes, system, size), sizes.device)

    grit = peak("GRIT-VLP")
    for system in ("nothing converted", "25 % converted"):
        yield Timed.of([peak(system)], [grit]).row(
            f"peak memory of a step, MAFA / GRIT-VLP, {system}, B={size}",
            # Con-D's weights are constant: in a small mini-batch they are a large share.
            "<= 1.08" if size >= BATCH["gpu"] else "",
            f"ALBEF in {'bf16' if sizes.gpu else 'fp32'}; weights, gradients and activations, and "
            "Con-D in bf16; without the optimiser's state, which both sides have; one run of each; "
            f"the target is of B={BATCH['gpu']}",
            "MiB",
        )
    many, chunk = 4 * size, size
    whole, chunks = (
        peak_memory(partial(one_step, sizes, "GRIT-VLP", many, at_once), sizes.device)
        for at_once in (None, chunk)
    )
    yield Timed.of([chunks], [whole]).row(
        f"peak memory of a step in chunks of {chunk} / whole mini-batch, B={many}",
        "",
        f"run.cached_batch; ALBEF in {'bf16' if sizes.gpu else 'fp32'}, weights and gradients "
        "included; one run of each",
        "MiB",
    )


def one_step(sizes: Sizes, system: str, size: int, cached_batch: int | None = None) -> None:
    """Build ALBEF, and Con-D if the system has it, and run one step, in chunks if wanted."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = albef_config(sizes, Path(folder))
        samples = mini_batch(size, cfg, sizes.device)
        torch.manual_seed(0)
        settings = GRIT_VLP
        con_d: Any = None
        if system != "GRIT-VLP":
            judge = AlbefMafa.from_config(cfg)
            con_d = ModelDiscriminator(judge.to(sizes.device), precision="bf16")
            settings = MAFA_FINDS_NOTHING
        if system == "25 % converted":
            settings, con_d = MAFA, FixedVerdicts(con_d)
        model = AlbefMafa.from_config(cfg).to(sizes.device).train()
        model.cached_batch = cached_batch
        forward = partial(run_step, model.step_backbone, samples, settings, con_d)
        Step(model, forward, sizes.device, sizes.gpu)()


def con_d_copy(model: Any, cfg: Any, precision: str, sizes: Sizes) -> ModelDiscriminator:
    """Return Con-D with a copy of the model's weights, because its precision may change them."""
    own = AlbefMafa.from_config(cfg)
    own.load_state_dict(model.state_dict())
    return ModelDiscriminator(own.to(sizes.device), precision=precision)


def vit_name(cfg: Any) -> str:
    """Describe the image encoder of a config."""
    if cfg.get("vit"):
        name = f"ViT of {cfg.vit.depth} layers, width {cfg.vit.width}"
    else:
        name = {"eva_clip_g": "ViT-g/14", "clip_L": "ViT-L/14"}.get(
            cfg.get("vit_model"), "ViT-B/16"
        )
    return f"{name} at {cfg.image_size} px"
