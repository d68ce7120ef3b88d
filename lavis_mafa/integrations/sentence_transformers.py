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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from lavis_mafa.algorithm.cached_batch import recomputed
from lavis_mafa.algorithm.corpus_mining import BY_MARGIN, mine_corpus
from lavis_mafa.algorithm.discriminator import Discriminator
from lavis_mafa.algorithm.features_step import PLAIN, FeaturesLoss
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.integrations.cross_encoders import Blip2CrossEncoder, DualEncoder, PairJudge
from lavis_mafa.integrations.grit_callback import ROW, Grit, numbered

__all__ = ["Blip2CrossEncoder", "DualEncoder", "Grit", "MinedLoss", "PairJudge"]
__all__ += ["mine_hard_negatives", "numbered"]

_AT_ONCE = 1024  # rows of a column in memory


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
    names = [name for name in dataset.column_names if name != ROW][:2]
    anchor, positive = (dataset.select_columns([name]) for name in names)
    features, ids = _read(anchor, names[0], model.encode_query, batch_size)
    other, other_ids = _read(positive, names[1], model.encode_document, batch_size)
    found = mine_corpus(
        features,
        other,
        settings,
        con_d,
        negatives,
        search,
        skip,
        ids,
        other_ids,
        progress=lambda parts: tqdm(parts, desc="mining"),
    )
    complete = (found.negatives >= 0).all(dim=1)
    if not bool(complete.all()):
        logging.warning(
            "%d of %d rows have fewer than %d negatives among the %d most similar: left out",
            int((~complete).sum()),
            len(dataset),
            negatives,
            search,
        )
    rows, table = complete.nonzero()[:, 0].tolist(), found.negatives[complete].t().tolist()
    columns = [
        positive.select(column).rename_column(names[1], f"negative_{number}")
        for number, column in enumerate(table, 1)
    ]
    anchors, positives = found.connections.t().tolist()
    mined = [anchor.select(rows), positive.select(rows), *columns]
    return _side_by_side(mined), _side_by_side([anchor.select(anchors), positive.select(positives)])


def _side_by_side(parts: Sequence[Any]) -> Any:
    """Return a data set with the columns of all parts."""
    from datasets import Dataset, Features, concatenate_datasets

    if len(parts[0]):
        return concatenate_datasets(parts, axis=1)
    # Of parts without rows `concatenate_datasets` keeps only the first.
    kinds = Features({name: kind for part in parts for name, kind in part.features.items()})
    return Dataset.from_dict({name: [] for name in kinds}, features=kinds)


def _read(
    column: Any, name: str, encode: Callable[..., Tensor], batch_size: int
) -> tuple[Tensor, Tensor]:
    """Return the embeddings ``(N, E)`` of a column, and equal numbers ``(N,)`` for equal values.

    Each value is encoded once.
    """
    numbers: dict[Any, int] = {}
    features, ids = [], []
    for start in tqdm(range(0, len(column), _AT_ONCE), desc=f"encoding {name}"):
        new = []
        for value in column[start : start + _AT_ONCE][name]:
            known = len(numbers)
            ids.append(numbers.setdefault(_identity(value), known))
            if len(numbers) > known:
                new.append(value)
        if new:
            options = {"convert_to_tensor": True, "show_progress_bar": False}
            features.append(encode(new, batch_size=batch_size, **options))
    of = torch.tensor(ids)
    return torch.cat(features)[of], of


def _identity(value: Any) -> Any:
    if hasattr(value, "tobytes"):  # a picture or an array
        return hashlib.sha256(f"{getattr(value, 'size', '')}".encode() + value.tobytes()).digest()
    return value if isinstance(value, str) else repr(value)
