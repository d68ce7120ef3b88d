"""Load the model and the data of a config for an analysis: no augmentation, no training."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.registry import registry
from lavis.common.utils import get_cache_path, is_url
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader

from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.algorithm.grit import GritSettings
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.data.data_identity import DataIdentity, listed_rows
from lavis_mafa.data.local_files import reads_as_lavis
from lavis_mafa.data.training_set import TrainingSet
from lavis_mafa.families.mafa_model import checkpoint_of
from lavis_mafa.families.many_pairs import ManyPairs
from lavis_mafa.io.identity import fingerprint
from lavis_mafa.judges.build import ORACLE, build_discriminator, view_of
from lavis_mafa.judges.discriminators import ModelDiscriminator, SampleJudge
from lavis_mafa.judges.frozen import FROZEN_MODELS
from lavis_mafa.judges.pair_reader import PairReader
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.settings.check import listed
from lavis_mafa.settings.config_of_run import LOG, is_trusted
from lavis_mafa.settings.load import Named, check_con_d, read_options
from lavis_mafa.tools.analysed_pairs import AnalysedPairs, Encoded, Usual, log_on_main
from lavis_mafa.tools.count_advice import TRUTH
from lavis_mafa.tools.judged_pairs import Judged
from lavis_mafa.training.launch import amp_dtype_of
from lavis_mafa.training.loaders import to_device, training_set
from lavis_mafa.training.session import begin, build_data, build_model
from lavis_mafa.training.termination import ignore_signals_to_job
from lavis_mafa.training.threads import workers_of

CPU = torch.device("cpu")
# An analysis evaluates no split, and has no logger.
_ONLY_DATA = ["run.valid_splits=[]", "run.test_splits=[]", "run.loggers=[]"]


@dataclass
class _ModelAndData(AnalysedPairs):
    """The objects that a config describes.

    Attributes:
        cfg: the checked config.
        model: in evaluation mode, on ``device``, without Con-D.
        data: the training pairs, whose image processors are replaced.
        device: where to compute.
        view: image processor of the model in evaluation; data sets that create images without a
            processor (``toy_scenes``) ignore it. None: that of the data.
        workers: number of loader processes.
    """

    cfg: Any
    model: Any
    data: TrainingSet
    device: torch.device
    view: Callable[[Any], Any] | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        own = (getattr(part, "vis_processor", None) for part in self.data.parts)
        self._views = [None if one is None else self.view or one for one in own]

    def _autocast(self) -> torch.autocast:
        """Return the mixed precision of ``run.amp`` and ``run.amp_dtype``."""
        dtype = amp_dtype_of(self.cfg.run_cfg)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """``run.batch_size_eval``."""
        return int(self.cfg.run_cfg.batch_size_eval)

    @property
    def usual(self) -> Usual:
        """What the config says, with the hardness q of the last epoch."""
        mafa = self.cfg.model_cfg.get("mafa") or {}
        return Usual(
            int(self.cfg.run_cfg.batch_size_train),
            _grouping_of(self.cfg.run_cfg),
            getattr(self.model, "settings", StepSettings()).connections,
            mafa.get("same_image", "positive") == "positive",
            mafa.get("same_group") != "negative",
        )

    def encode(self, batches: Sequence[NDArray[Any]]) -> Iterator[Encoded]:
        """Yield the features of mini-batches; an unreadable sample has those of another one."""
        backbone = backbone_of(self.model)
        for batch in self.batches(batches):
            samples = to_device(batch, self.device)
            with torch.inference_mode(), self._autocast():
                images = backbone.encode_images(samples["image"])
                texts = backbone.encode_texts(samples["text_input"])
                vectors, text_vectors = backbone.grit_vectors(images, texts)
            assert images.features is not None
            queries = images.features if images.features.ndim == 3 else None
            captions, errors = list(batch["text_input"]), list(batch["load_error"])
            yield Encoded(vectors, text_vectors, queries, captions, errors)

    def pictures(self, drawn: Sequence[NDArray[Any]], judge: Any) -> Iterator[dict[str, Any]]:
        """Yield mini-batches of samples with images in the discriminator's view."""
        for batch in self.batches(drawn, judge.processor):
            yield {**batch, "image": batch["image"].to(self.device)}

    def similarity(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return the similarities ``(I, T)`` of features, as the model compares them."""
        return backbone_of(self.model).similarity(images, texts)

    def identity(self) -> dict[str, str]:
        """Return what the features depend on, by name."""
        run = self.cfg.run_cfg
        precision = str(run.get("amp_dtype", "fp16")) if run.get("amp", False) else "fp32"
        return {
            "model": fingerprint(self.model),
            "data": f"{len(self.data)} samples, {self._fingerprint()}",
            "read with": f"{precision}, {getattr(self.model, 'max_txt_len', None)} tokens",
        }

    def _fingerprint(self) -> str:
        """Return a hash of the data and of how they are processed.

        It covers all image ids, image files and captions, and some processed samples, which depend
        on image size, augmentation and text processor.
        """
        found = hashlib.sha256(json.dumps(asdict(DataIdentity.of(self.data))).encode())
        if any(next(listed_rows(part), None) is None for part in self.data.parts):
            for number in range(len(self.data)):
                path, caption, *_ = self.data.source(number)
                found.update(json.dumps([path, caption]).encode())
        some = np.arange(0, len(self.data), max(1, len(self.data) // 16))
        for batch in self.batches([some]):
            found.update(np.ascontiguousarray(batch["image"].numpy()).tobytes())
            found.update(json.dumps(list(batch["text_input"])).encode())
        return found.hexdigest()[:16]

    def batches(
        self, batches: Sequence[NDArray[Any]], processor: Callable[[Any], Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Load mini-batches of the given samples, as in evaluation.

        Args:
            batches: sample numbers of each mini-batch.
            processor: image processor to use instead of ``view``.

        Yields:
            ``image`` ``(B, 3, H, W)``, ``text_input``, ``index``, ``load_error`` and whatever else
            the data set gives. ``load_error`` is a list of strings: "" for a sample that was read;
            a sample that cannot be read is replaced by another one.
        """
        for part, own in zip(self.data.parts, self._views, strict=True):
            if own is not None:
                part.vis_processor = processor or own
        loader: Any = DataLoader(
            self.data,
            batch_sampler=[[(int(i), 0) for i in batch] for batch in batches],  # as in epoch 0
            # Starting workers takes longer than reading a single mini-batch.
            num_workers=self.workers if len(batches) > 1 else 0,
            collate_fn=self.data.collater,
            worker_init_fn=ignore_signals_to_job,
            generator=torch.Generator(),  # must not draw from the global random stream
        )
        yield from loader


def _grouping_of(run: Any) -> GritSettings:
    """Return how a run's last epoch is grouped: ``grit`` with the hardness q of this epoch.

    A schedule with state is not known without the run's training state: ``grit.hardness`` replaces
    it, and a line in the log says so.

    Args:
        run: the section ``run`` of a config.
    """
    settings = GritSettings.from_config(run.grit)
    last = int(run.get("max_epoch") or 1) - 1
    schedule = settings.build_schedule()
    if schedule.learns:
        log_on_main(
            "run.grit.schedule %s has state of its run: mini-batches are formed with "
            "run.grit.hardness %g",
            settings.schedule,
            settings.hardness,
        )
        return settings
    return replace(settings, hardness=schedule.at(settings.grouped_before(last)))


def _options_of(args: argparse.Namespace) -> list[str]:
    """Return ``--options``, the config keys that ``--checkpoint`` stands for, and the folder of the
    results in the place of the run's, to which nothing is written."""
    options = [f"run.output_dir={args.output.parent}", *args.options, *_ONLY_DATA]
    if not args.checkpoint:
        return options
    if not is_url(args.checkpoint) and not os.path.exists(args.checkpoint):
        raise FileNotFoundError(f"--checkpoint: no such file: {args.checkpoint}")
    given = ["model.load_finetuned=True", f"model.finetuned={args.checkpoint}"]
    return [*given, *options]


def _load_model_and_data(args: argparse.Namespace) -> _ModelAndData:
    """Build the model and the pairs of a config; joins the processes of a launcher.

    Raises:
        ConfigError: with all problems of the config.
        ValueError: if there are no training pairs.
    """
    cfg = begin(args.cfg_path, _options_of(args))
    task, train = _build_pairs(cfg)
    mafa = cfg.model_cfg.get("mafa") or {}
    # The commands that need frozen models build them: here they would take memory for nothing.
    frozen = {name: mafa.get(name) for name in FROZEN_MODELS}
    mafa.update(dict.fromkeys(FROZEN_MODELS))
    model = build_model(cfg, task)
    mafa.update(frozen)
    if checkpoint_of(cfg.model_cfg) is None:
        logging.warning(
            "the weights of %s are random, and so are its similarities: give --checkpoint",
            cfg.model_cfg.arch,
        )
    run = cfg.run_cfg
    device = torch.device("cuda", int(run.get("gpu", 0))) if run.device == "cuda" else CPU
    view = view_of(cfg.model_cfg.arch, cfg.model_cfg.get("model_type"), model)
    return _ModelAndData(cfg, model.to(device).eval(), train, device, view, workers_of(run))


def load_judged(args: argparse.Namespace) -> AnalysedPairs:
    """Build the model, the pairs and the discriminators of a config.

    Raises:
        ConfigError: with all problems of the config.
        ValueError: if there are no training pairs, or for a user's discriminator.
    """
    configs = _discriminators_of(args)
    loaded = _load_model_and_data(args)
    model_cfg = loaded.cfg.model_cfg
    loaded.configs = configs
    loaded.judges = {name: _build_judge(con_d, model_cfg) for name, con_d in configs.items()}
    for judge in loaded.judges.values():
        if hasattr(judge, "know"):  # a model has it of the discriminator before it
            judge.know(loaded.data)
    options = [str(option) for option in args.options]
    loaded.about = {"cfg_path": str(args.cfg_path), "options": options}
    loaded.encoder = {"checkpoint": args.checkpoint}
    own = (model_cfg.get("mafa") or {}).get("con_d") or {}
    loaded.by_truth = not configs and own.get("arch") == ORACLE
    return loaded


def _discriminators_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the configs of the discriminators by name; {} if only the ground truth judges.

    Raises:
        ConfigError: with all problems of the configs.
    """
    cfg = load_config(args.cfg_path, _options_of(args), machine=False)
    model: Any = OmegaConf.to_container(cfg.model_cfg, resolve=True)
    if not args.con_d:
        own = (model.get("mafa") or {}).get("con_d")
        return {} if not own or own["arch"] == ORACLE else {"con_d": own}
    found: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    given = read_options(args.con_d, problems, {}, "--con-d")
    for name, one in given.items():
        if name == TRUTH or not str(name).isidentifier() or not isinstance(one, dict):
            problems.append(f"--con-d {name}: expected NAME.key=value, NAME other than {TRUTH}")
            continue
        found[name], wrong = check_con_d(one)
        problems += [f"--con-d {name}: {problem}" for problem in wrong]
        if one.get("arch") == ORACLE:
            problems.append(
                f"--con-d {name}.arch: {ORACLE} is given by --options model.mafa.con_d.arch"
            )
    if problems:
        raise ConfigError(str(args.cfg_path), problems)
    return found


def _build_judge(con_d: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """Build a discriminator from a config like ``model.mafa.con_d``, other than the oracle.

    Args:
        known: the ``model`` config of the command, as for `build_discriminator`.

    Raises:
        ValueError: for a user's discriminator, whose weights nobody knows.
    """
    judge: Any = build_discriminator(con_d, known)
    if isinstance(judge, ModelDiscriminator):
        matching: Any = ManyPairs(judge.backbone)  # more pairs at once than a mini-batch has
        judge.backbone = matching
    elif not isinstance(judge, PairReader | SampleJudge):
        raise ValueError(
            f"{con_d['arch']} judges only in training, because its verdicts cannot be identified; "
            "name a model"
        )
    return judge


def data_of_judged(judged: Judged, path: Path) -> TrainingSet:
    """Build the data that a file of judged pairs is about, by the config that it records.

    Raises:
        ValueError: if the file records no config.
        ConfigError: as in `_load_model_and_data`.
    """
    cfg_path = judged.about.get("cfg_path")
    if not cfg_path:
        raise ValueError(f"{path} does not record its config")
    named = Named(path, tuple(map(str, judged.about.get("options") or ())))
    # The page may be written on a machine without the GPU that the config asks for.
    cfg = load_config(str(cfg_path), _ONLY_DATA, machine=False, named=named, data_only=True)
    return _shown_pairs(cfg, path)


def recorded_data(folder: Path) -> TrainingSet:
    """Build the training pairs of the config that a run recorded, to show them to people.

    Its plugins are imported only if the user trusts the folder.

    Raises:
        ConfigError: if the config is wrong, or names places of data that are not used.
        ValueError: if there is no config; and whatever the builders raise.
    """
    plugins = [] if is_trusted(folder / LOG) else ["run.plugins=[]"]
    cfg = load_config(folder, [*_ONLY_DATA, *plugins], machine=False, data_only=True)
    return _shown_pairs(cfg, folder / LOG)


def _shown_pairs(cfg: Any, origin: Path) -> TrainingSet:
    """Build the pairs of a config that a file names, fetching nothing; say from where they are."""
    places: list[str] = []
    for builder, dataset in cfg.datasets_cfg.items():
        plain: Any = OmegaConf.to_container(dataset)
        info = plain.get("build_info") or {}
        files = (info.get("annotations") or {}).get("train")
        cls = registry.get_builder_class(builder)
        if files and cls and reads_as_lavis(cls):
            urls = listed(files.get("url"))
            if any(map(is_url, urls)):
                dataset.build_info.annotations.train.url, urls = None, []
            for file in urls or listed(files.get("storage")):
                if not os.path.isfile(file) and not os.path.isfile(get_cache_path(file)):
                    raise FileNotFoundError(f"no such annotation file: {file}")
        places += listed((info.get("images") or {}).get("storage"))
    if places:
        logging.warning("the page shows images of %s, which %s names", ", ".join(places), origin)
    return _build_pairs(cfg)[1]


def _build_pairs(cfg: Any) -> tuple[Any, TrainingSet]:
    """Build the task and the training pairs."""
    task, datasets = build_data(cfg, ["train"])
    pairs = training_set(datasets, int(cfg.run_cfg.seed))
    if pairs is None:
        raise ValueError(f"{cfg.args.cfg_path}: the data have no split train")
    return task, pairs
