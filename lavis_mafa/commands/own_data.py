"""Write a config that suits the user's own pairs: ``lavis-mafa train --data``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LARGE = 100_000  # number of pairs from which on ViT-B is trained on a GPU
_STEPS = 600  # minimum for the small model, within `_EPOCHS`
_EPOCHS = (3, 30)
_HELD_OUT = (0.1, 0.3)  # held-out share of many images, and of few
_IMAGES = (20, 30, 1000)  # minimum; held out of few, and of many


def write_config(data: Sequence[str], images: Path | None, **keys: Any) -> tuple[Path, str]:
    """Write a config that trains on the pairs in files, and the vocabulary of a small model.

    The config mines in random mini-batches, because grouping after a short warm-up breaks ITM
    (docs/results.md). Its Con-D compares captions and needs no weights. Where images have several
    captions, the config of a second run, which groups, is written too. The files are written to
    ``output/NAME``, named after the first file, and replace those of an earlier call, except
    vocabularies: earlier runs need theirs.

    Args:
        data: annotation files, shards, a folder written by ``save_to_disk`` of Hugging Face's
            ``datasets``, or a folder of pictures, each with a text file of the same name.
        images: folder that the paths of images are relative to; None: see `folder_of_images`.
        keys: names of the columns, as of `PairColumns`.

    Returns:
        The path of the config, and a text that says what was chosen and why.

    Raises:
        FileNotFoundError, ValueError: if the files cannot be read, or have too few images.
    """
    import torch
    from omegaconf import OmegaConf

    from lavis_mafa.commands.arguments import folder_of_images
    from lavis_mafa.data.annotation_files import TAR, require_files
    from lavis_mafa.data.make_vocab import make_vocab
    from lavis_mafa.data.pair_conversion import CONTENT, converted
    from lavis_mafa.io.files import write_text
    from lavis_mafa.io.project_files import project_file

    first = Path(data[0]).expanduser()
    name = first.resolve().name if first.is_dir() else re.split(r"[.*?{\[]", first.name)[0]
    output = Path("output", name or "pairs").absolute()
    output.mkdir(parents=True, exist_ok=True)
    files = [os.path.abspath(os.path.expanduser(one)) for one in data]
    shards = all(path.suffix.lower() == TAR for path in require_files(files))
    kind = "image_text_shards" if shards else "image_text_json"
    folder = None if shards else folder_of_images(images, data)
    root = folder and os.path.abspath(folder)
    table = converted(files, root=root, identity=CONTENT, **keys)
    if root is None and table.meta["with_paths"]:
        raise ValueError(
            f"{files[0]} and the other files lie in several folders: give --images, the folder "
            "that the paths of images are relative to"
        )
    count, found = len(table), table.meta["images"]
    without = table.meta["passed_over"]
    least, few, many = _IMAGES
    if found < least:
        raise ValueError(f"{found} images: at least {least} are needed, since some are held out")
    held = float(f"{min(max(_HELD_OUT[0], few / found), _HELD_OUT[1], many / found):.4g}")

    gpu = torch.cuda.is_available()
    large = gpu and count >= _LARGE
    base = "albef_own_data" if large else "albef_small_own_data"
    config: Any = OmegaConf.load(project_file(f"mafa/train/{base}"))
    config.datasets = {kind: config.datasets.image_text_json}
    section = config.datasets[kind]
    info = {"annotations": {split: {"storage": files} for split in ("train", "val")}}
    section.build_info = OmegaConf.merge(section.get("build_info", {}), info)
    section.build_info.holdout, section.build_info.identity = held, CONTENT
    section.build_info.update({name: key for name, key in keys.items() if key is not None})
    if not shards:
        section.build_info.images = {"storage": root}
    run = config.run
    run.valid_splits, run.test_splits = ["val"], []
    run.output_dir, run.device, run.amp = str(output), "cuda" if gpu else "cpu", gpu
    run.grit.enabled, config.model.mafa.negatives = False, "sampled"
    config.model.mafa.con_d = {"arch": "captions"}
    config.model.mafa.soft_labels = {"type": "one_hot"}
    model = "ALBEF with ViT-B (loads DeiT and BERT), as there are a GPU and many pairs"
    if not large:
        vocabulary = output / f"vocab_{table.folder.name[:8]}.txt"
        make_vocab(files, vocabulary, size=min(8000, max(600, count // 5)), **keys)
        config.model.tokenizer = str(vocabulary)
        trained = int(count * (1 - held))
        batch = next(size for size in (64, 32, 16, 8, 4) if size <= max(trained // 10, 4))
        epochs = -(-_STEPS * batch // max(trained, 1))
        run.batch_size_train, run.max_epoch = batch, min(max(epochs, _EPOCHS[0]), _EPOCHS[1])
        run.rerank_by = "odds"  # LAVIS's choice is worse for small models
        run.grit.search_space = min(run.grit.search_space, max(trained // 2 // batch, 2) * batch)
        why = f"{count:,} pairs are too few for a large one" if gpu else "there is no GPU"
        model = f"a small ALBEF from random weights (96 pixels, 1 M weights), as {why}"
    file = output / "config.yaml"
    write_text(file, OmegaConf.to_yaml(config))
    left_out = f"{without:,} files belong to no sample and are left out\n" if without else ""
    chosen = (
        f"{left_out}{count:,} pairs of {found:,} images, about {held * found:,.0f} of which are "
        "held out for validation\n"
        f"model: {model}; {run.max_epoch} epochs of mini-batches of {run.batch_size_train}\n"
        "Con-D: compares captions by word statistics, no weights; mini-batches are not grouped\n"
        f"config: {file}; edit it and pass it as --cfg-path"
    )
    if count >= 2 * found:
        checkpoint = f"{output}/RUN/checkpoint_last.pth"
        _train_on(config, checkpoint)
        second = output / "train_on.yaml"
        write_text(second, OmegaConf.to_yaml(config))
        command = ["lavis-mafa", "train", "--cfg-path", str(second), "--options"]
        chosen += (
            "\nif the captions of an image are specific, as of photographs, train on in grouped "
            "mini-batches afterwards (RUN: the folder of this run; repeat your --options):\n"
            + shlex.join([*command, f"model.pretrained={checkpoint}"])
        )
    return file, chosen


def _train_on(config: Any, checkpoint: str) -> None:
    """Change the config to that of a second run, which groups by the 95 % quantile and mines.

    This is the second stage of a recipe that was better than ALBEF on photographs with several
    captions each; its first stage was ITC alone and then ITM with uniform negatives
    (docs/results.md).
    """
    run = config.run
    run.output_dir = os.path.join(run.output_dir, "train_on")  # where `auto` looks for checkpoints
    config.model.load_pretrained, config.model.pretrained = True, checkpoint
    config.model.mafa.negatives = "hardest"
    config.model.mafa.soft_labels = {"type": "consistency", "start_epoch": 0}
    run.grit.merge_with({"enabled": True, "naive": True, "start_epoch": 0, "hardness": 0.95})
    run.init_lr, run.max_epoch = run.init_lr / 2, -(-run.max_epoch // 5)
    run.rerank_by = "odds"
