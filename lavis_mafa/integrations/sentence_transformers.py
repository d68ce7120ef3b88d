"""A loss, grouped mini-batches and a judge for sentence-transformers' trainer, version 6 or later.

::

    train = numbered(train)  # columns: anchor, positive
    grit = Grit(train, GritSettings(enabled=True, search_space=1280))
    loss = MinedLoss(model, StepSettings(...), grit=grit)
    arguments = SentenceTransformerTrainingArguments(..., batch_sampler=grit.batch_sampler)
    SentenceTransformerTrainer(model, arguments, train, loss=loss, callbacks=[grit]).train()
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch import Tensor
from torch.utils.data import SequentialSampler
from tqdm.auto import tqdm
from transformers import TrainerCallback

from lavis_mafa.algorithm.cached_batch import recomputed
from lavis_mafa.algorithm.corpus_mining import BY_MARGIN, mine_corpus
from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.features_step import PLAIN, FeaturesLoss
from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.algorithm.grit.schedule import GritSchedule
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.integrations.cross_encoders import match_probabilities, require_one_verdict

_AT_ONCE = 1024  # rows of a column in memory
ROW = "label"  # the only column that the trainer gives to a loss and does not encode


def numbered(dataset: Any) -> Any:
    """Return a data set with the numbers of its rows as the column ``label``, which grouping and
    judging need.

    Raises:
        ValueError: if it has such a column already.
    """
    if ROW in dataset.column_names:
        raise ValueError(f"the data set has a column {ROW}; pairs of two columns have none")
    return dataset.add_column(ROW, list(range(len(dataset))))


class MinedLoss(FeaturesLoss):
    """ITC of pairs (anchor, positive) with every setting of this package.

    With the default settings it is ``MultipleNegativesRankingLoss`` in both directions.

    Args:
        model: the SentenceTransformer in training.
        settings, con_d: see `FeaturesLoss`. Numbers of rows (`numbered`) are the samples'
            ``loaded_index``.
        scale: 1 / temperature.
        grit: collects the features of the mini-batches, from which the next epoch is grouped.
        chunk: encode so many rows at a time, and compute their activations again in the backward
            pass, as ``CachedMultipleNegativesRankingLoss`` does; None: all at once.
    """

    def __init__(
        self,
        model: Any,
        settings: StepSettings = PLAIN,
        con_d: Discriminator | None = None,
        scale: float = 20.0,
        grit: Grit | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__(settings, con_d)
        self.model, self.scale, self.grit, self.chunk = model, scale, grit, chunk
        if grit is not None:  # for methods with state for each row, such as GloFND
            self.parts.allocate(grit.schedule.size)

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a mini-batch.

        Args:
            sentence_features: of the anchors and of the positives.
            labels: ``(B,)`` numbers of rows, see `numbered`; None: unknown.

        Raises:
            ValueError: if there are more than two columns, no numbers where they are needed, or the
                trainer does not know ``grit``.
        """
        columns = list(sentence_features)
        if len(columns) != 2:
            raise ValueError(
                f"got {len(columns)} columns, expected 2, anchor and positive: negatives are mined "
                "in the mini-batch"
            )
        schedule = None if self.grit is None else self.grit.schedule
        collecting = schedule if self.model.training else None
        if labels is None and (collecting is not None or self.parts.con_d is not None):
            raise ValueError(f"no numbers of rows; train on numbered(dataset), column {ROW}")
        if collecting is not None and self.grit is not None and not self.grit.in_use:
            raise ValueError(
                "grit groups no mini-batches: give the trainer the data set that Grit has, "
                "batch_sampler=grit.batch_sampler in its arguments, and callbacks=[grit]"
            )
        anchors, positives = (F.normalize(self._encode(one), dim=-1) for one in columns)
        samples: dict[str, Any] = {} if labels is None else {"loaded_index": labels.long()}
        if schedule is not None and schedule.plan is not None:
            samples |= {"epoch": schedule.epoch, "grouped": schedule.plan.grouped}
        temperature = torch.tensor(1 / self.scale, device=anchors.device)
        loss = self.loss(anchors, positives, temperature, samples)
        if collecting is not None:
            collecting.collect(samples["loaded_index"], anchors.detach(), positives.detach())
        return loss

    def _encode(self, rows: dict[str, Any]) -> Tensor:
        """Return the embeddings ``(B, E)`` of a column."""

        def encode(part: dict[str, Any]) -> Tensor:
            found: Tensor = self.model(dict(part))["sentence_embedding"]
            return found

        if not self.chunk:
            return encode(rows)
        from sentence_transformers.base.losses.gradcache import _create_minibatch, _get_batch_size

        count = _get_batch_size(rows)
        parts = [_create_minibatch(rows, k, k + self.chunk) for k in range(0, count, self.chunk)]
        place = next(self.model.parameters()).detach()
        return torch.cat([recomputed(place, encode, one) for one in parts])


class Grit(TrainerCallback):
    """Mini-batches of similar pairs (GRIT-VLP 4.1): the trainer's batch sampler and a callback.

    The features that `MinedLoss` collects in an epoch group the next one. Checkpoints of the
    trainer get the state, so that a resumed run has the order of an uninterrupted one. A last
    incomplete mini-batch is left out, and its rows come first in the next epoch.

    Args:
        dataset: the training set, from `numbered`.
        settings: L, M, hardness; None: grouping with the defaults.
        seed: of all orders.
        image_ids: ``(N,)``, see `GritSchedule`.
    """

    def __init__(
        self,
        dataset: Any,
        settings: GritSettings | None = None,
        seed: int = 0,
        image_ids: Any = None,
    ) -> None:
        self.dataset, self.settings = dataset, settings
        self.seed, self.image_ids = seed, image_ids
        self._is_callback = False
        self.schedule: GritSchedule = self._schedule(1)

    @property
    def in_use(self) -> bool:
        """Whether the trainer has it as its sampler and as a callback."""
        return self._is_callback and self.schedule.plan is not None

    def __getstate__(self) -> dict[str, Any]:
        # The trainer saves its arguments, and with them this object, in every checkpoint.
        return {**vars(self), "dataset": None, "image_ids": None, "schedule": None}

    def _schedule(self, batch_size: int) -> GritSchedule:
        ranks = Ranks(together=True)
        return GritSchedule(
            *(len(self.dataset), batch_size, self.settings, ranks.rank, ranks.world, self.seed),
            image_ids=self.image_ids,
        )

    def batch_sampler(self, dataset: Any, batch_size: int, **rest: Any) -> DefaultBatchSampler:
        """Return the sampler of the training set; other data sets are read in their order."""
        if dataset is not self.dataset:
            return _InOrder(dataset, batch_size, **rest)
        self.schedule = self._schedule(batch_size)
        return _GritSampler(self.schedule, dataset, batch_size, **rest)

    def _file(self, args: Any, state: Any) -> Path:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        return folder / f"grit_{self.schedule.rank}.pth"

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state of the order beside the trainer's checkpoint, a file a rank."""
        path = self._file(args, state)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"epoch": self.schedule.epoch, "state": self.schedule.state_dict()}
        torch.save(content, path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state, if the trainer resumes.

        Raises:
            ValueError: if the checkpoint has none.
        """
        self._is_callback = True
        if not state.global_step:
            return
        path = self._file(args, state)
        if not path.is_file():
            raise ValueError(
                f"no {path}: the order of a resumed run is read from there; resume from a folder "
                "of output_dir that a run with the same number of processes and this callback wrote"
            )
        saved = torch.load(path, map_location="cpu", weights_only=True)
        self.schedule.load_state_dict(saved["state"], saved["epoch"])


class _InOrder(DefaultBatchSampler):
    def __init__(self, dataset: Any, *args: Any, **rest: Any) -> None:
        super().__init__(SequentialSampler(dataset), *args, **rest)


class _GritSampler(DefaultBatchSampler):
    """The mini-batches of all ranks in turn, of which the trainer gives each rank its own."""

    def __init__(self, schedule: GritSchedule, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.schedule = schedule

    def __len__(self) -> int:
        per_step = self.schedule.batch_size * self.schedule.world_size
        return self.schedule.size // per_step * self.schedule.world_size

    def __iter__(self) -> Iterator[list[int]]:
        schedule = self.schedule
        if schedule.epoch is not None and schedule.epoch != self.epoch:
            schedule.end(schedule.epoch)
        plan = schedule.begin(self.epoch)
        ranks = [plan.mini_batches(rank) for rank in range(schedule.world_size)]
        for step in range(plan.steps):
            for rows in ranks:
                yield rows[step].tolist()


class PairJudge:
    """Con-D from a CrossEncoder that reads the two columns of a data set.

    Args:
        encoder: a ``CrossEncoder`` with one score, or with two of which the second means match.
        dataset: the training set, from `numbered`: its first two columns are anchor and positive.
        batch_size: pairs in one forward pass.

    Raises:
        ValueError: if the encoder has more than two scores.
    """

    def __init__(self, encoder: Any, dataset: Any, batch_size: int = 32) -> None:
        require_one_verdict(encoder)
        self.encoder, self.batch_size = encoder, batch_size
        names = [name for name in dataset.column_names if name != ROW][:2]
        self.columns = {name: dataset.select_columns([name]) for name in names}

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Return the probabilities ``(P,)`` of pairs, see `lavis_mafa.Discriminator`."""
        rows = samples["loaded_index"]
        if not len(image_of):
            return torch.zeros(0, device=image_of.device)
        sides = [
            column[rows[of].tolist()][name]
            for (name, column), of in zip(self.columns.items(), (image_of, text_of), strict=True)
        ]
        pairs = list(zip(*sides, strict=True))
        found = match_probabilities(self.encoder, pairs, self.batch_size)
        return found.float().to(image_of.device)


def mine_hard_negatives(
    dataset: Any,
    model: Any,
    settings: StepSettings = BY_MARGIN,
    con_d: Discriminator | None = None,
    negatives: int = 4,
    search: int = 50,
    skip: int = 0,
    batch_size: int = 32,
) -> tuple[Any, Any]:
    """Mine a data set of pairs, texts or images, as `lavis_mafa.mine_corpus` does.

    Args:
        dataset: its first two columns beside ``label`` are anchor and positive.
        model: the SentenceTransformer whose similarities decide what is judged.
        settings, con_d, negatives, search, skip: see `lavis_mafa.mine_corpus`; `PairJudge` is such
            a ``con_d``.
        batch_size: rows in one forward pass of the model.

    Returns:
        Two data sets. The first has the rows with columns ``negative_1`` and so on; rows that have
        too few negatives are left out, and a warning counts them. The second has the missing pairs
        in the two columns; training on both converts the false negatives.
    """
    from datasets import concatenate_datasets

    names = [name for name in dataset.column_names if name != ROW][:2]
    anchor, positive = (dataset.select_columns([name]) for name in names)
    sides = [
        _read(anchor, names[0], model.encode_query, batch_size),
        _read(positive, names[1], model.encode_document, batch_size),
    ]
    (features, ids), (other, other_ids) = sides
    found = mine_corpus(
        *(features, other, settings, con_d, negatives, search, skip, ids, other_ids),
        progress=lambda parts: tqdm(parts, desc="mining"),
    )
    complete = (found.negatives >= 0).all(dim=1)
    if not bool(complete.all()):
        logging.warning(
            "%d of %d rows have fewer than %d negatives among the %d most similar: left out",
            *(int((~complete).sum()), len(dataset), negatives, search),
        )
    rows, table = complete.nonzero()[:, 0].tolist(), found.negatives[complete].t().tolist()
    columns = [
        positive.select(column).rename_column(names[1], f"negative_{number}")
        for number, column in enumerate(table, 1)
    ]
    anchors, positives = found.connections.t().tolist()
    missing = [anchor.select(anchors), positive.select(positives)]
    mined = [anchor.select(rows), positive.select(rows), *columns]
    return concatenate_datasets(mined, axis=1), concatenate_datasets(missing, axis=1)


def _read(
    column: Any, name: str, encode: Callable[..., Tensor], batch_size: int
) -> tuple[Tensor, Tensor]:
    """Return the embeddings ``(N, E)`` of a column, and equal numbers ``(N,)`` for equal values."""
    numbers: dict[Any, int] = {}
    features, ids = [], []
    for start in tqdm(range(0, len(column), _AT_ONCE), desc=f"encoding {name}"):
        values = column[start : start + _AT_ONCE][name]
        options = {"batch_size": batch_size, "convert_to_tensor": True, "show_progress_bar": False}
        features.append(encode(values, **options))
        ids += [numbers.setdefault(_identity(value), len(numbers)) for value in values]
    return torch.cat(features), torch.tensor(ids)


def _identity(value: Any) -> Any:
    if hasattr(value, "tobytes"):  # a picture or an array
        return hashlib.sha256(f"{getattr(value, 'size', '')}".encode() + value.tobytes()).digest()
    return value if isinstance(value, str) else repr(value)
