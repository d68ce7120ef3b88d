"""Count the kernels that a training step launches, which limit its speed if a GPU waits for its
host.

A step is the forward pass with Con-D, backward pass, clipping and AdamW. Views, allocations and
metadata are not counted; dropout and attention count as one kernel each, as on a GPU. The count
depends on depth, not on width, so the models have the papers' depth and tiny widths.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.algorithm.step import run_step
from lavis_mafa.families import AlbefMafa, Blip2Mafa, BlipMafa
from lavis_mafa.io.project_files import find_config
from lavis_mafa.judges.discriminators import ModelDiscriminator
from research.benchmarks.harness import Row, Sizes
from research.benchmarks.reference_step import PlainAlbef, reference_step
from research.benchmarks.step_models import (
    FixedVerdicts,
    LavisAlbef,
    LavisBlip2,
    config_of,
    lavis_can_run,
    mini_batch,
    verdicts_by_pair,
)
from research.benchmarks.steps import BLIP2_MAFA, GRIT_VLP, MAFA

BATCH = 8
# The number of BERT's layers in the papers' models; ALBEF fuses in the last six. Dropout is .1.
_BERT = {
    "num_hidden_layers": 12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_NO_KERNEL = ("_unsafe_view", "_local_scalar_dense", "lift_fresh", "_reshape_alias")


class Launches(TorchDispatchMode):
    """Count operators by name while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or "record_function" in name):
            self.count[name] += name not in _NO_KERNEL
        return func(*args, **(kwargs or {}))


class _AsOnGpu(TorchFunctionMode):
    """Replace dropout, and attention with dropout, by one kernel, as on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            drops = given["training"] and given["p"]
            return torch.native_dropout(args[0], given["p"], True)[0] if drops else args[0]
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def launches_of(
    model: torch.nn.Module, forward: Callable[[], Mapping[str, Any]], half: bool = False
) -> Counter[str]:
    """Return the number of kernels by name in a whole step, the second one.

    Args:
        half: use autocast to bf16.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)  # as on a GPU
    for _ in range(2):
        with _AsOnGpu(), Launches() as launches:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                output = forward()
            output["loss"].backward()
            grads = [one for one in trained if one.grad is not None]
            torch.nn.utils.clip_grad_norm_(grads, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
    return launches.count


def rows(sizes: Sizes) -> Iterator[Row]:
    """Count a step of every family in fp32 and in bf16, whatever ``sizes``."""
    with tempfile.TemporaryDirectory() as name, lavis_can_run():
        for half in (False, True):
            yield from _albef_rows(Path(name), half)
            yield from _blip_rows(Path(name), half)


def _albef_rows(folder: Path, half: bool) -> Iterator[Row]:
    cfg = deep_config(AlbefMafa, folder, "med_config_tiny.json", 12)
    mafa, grit = (our_launches(AlbefMafa, cfg, settings, half) for settings in (MAFA, GRIT_VLP))
    samples = mini_batch(BATCH, cfg, "cpu")
    plain, judge = PlainAlbef(cfg).train(), PlainAlbef(cfg).eval().requires_grad_(False)
    step = partial(reference_step, plain, judge, samples, verdicts=verdicts_by_pair)
    yield _row("MAFA / the authors' order of work", mafa, launches_of(plain, step, half), half)
    lavis = LavisAlbef(cfg).train()
    lavis.set_momentum_outputs(samples)
    step = partial(lavis, {**samples, "epoch": 0, "iters": 0, "num_iters_per_epoch": 1})
    yield _row("GRIT-VLP / LAVIS albef_pretrain", grit, launches_of(lavis, step, half), half)


def _blip_rows(folder: Path, half: bool) -> Iterator[Row]:
    cfg = deep_config(BlipMafa, folder, "bert_config_tiny.json", 12)
    mafa, grit = (our_launches(BlipMafa, cfg, settings, half) for settings in (MAFA, GRIT_VLP))
    yield _row("BLIP: MAFA / GRIT-VLP", mafa, grit, half)
    cfg = deep_config(Blip2Mafa, folder, "bert_config_tiny.json", 39)
    mafa = our_launches(Blip2Mafa, cfg, BLIP2_MAFA, half)
    lavis = LavisBlip2(cfg).train()
    step = partial(lavis, mini_batch(BATCH, cfg, "cpu"))
    yield _row("BLIP-2: MAFA / LAVIS blip2", mafa, launches_of(lavis, step, half), half)


def deep_config(cls: Any, folder: Path, bert: str, depth: int) -> Any:
    """Return the tiny model type with BERT's 12 layers and an image encoder of ``depth``."""
    layers = {**json.loads(Path(find_config(bert)).read_text("utf-8")), **_BERT}
    if "fusion_layer" in layers:
        layers["fusion_layer"] = layers["num_hidden_layers"] // 2
    file = folder / bert
    file.write_text(json.dumps(layers), "utf-8")
    changes = {"vit": {"depth": depth}, "freeze_vit": True}
    changes |= {name: str(file) for name in ("med_config_path", "q_former_config")}
    return config_of(cls, "tiny", Sizes("quick"), folder, changes)


def our_launches(cls: Any, cfg: Any, settings: StepSettings, half: bool = False) -> Counter[str]:
    """Return `launches_of` for a model of this package, whose Con-D shares a frozen image
    encoder."""
    torch.manual_seed(0)
    model, judge = cls.from_config(cfg).train(), cls.from_config(cfg)
    if cls is Blip2Mafa:
        judge.visual_encoder.load_state_dict(model.visual_encoder.state_dict())
    con_d = ModelDiscriminator(judge)
    con_d.share_encoder(model)
    samples = {**mini_batch(BATCH, cfg, "cpu"), "image_id": torch.arange(BATCH)}
    judging = None if settings.soft_labels.type == "consistency" else FixedVerdicts(con_d)
    return launches_of(model, partial(run_step, model.backbone, samples, settings, judging), half)


def _row(what: str, ours: Counter[str], reference: Counter[str], half: bool) -> Row:
    counts = ours.total(), reference.total()
    kind = "bf16, with autocast's casts" if half else "fp32"
    note = f"a whole step, {kind}; 25 % converted, Con-D fp32"
    return Row.of(f"{what}, {kind[:4]}", note, *([count] for count in counts), unit="launches")
