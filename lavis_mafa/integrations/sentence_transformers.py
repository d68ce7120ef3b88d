"""A loss, grouped mini-batches and a judge for sentence-transformers' trainer, version 6 or later.

::

    train = numbered(train)  # columns: anchor, positive
    grit = Grit(train, GritSettings(enabled=True, search_space=1280))
    loss = MinedLoss(model, judge=CrossEncoder(...), grit=grit)
    arguments = SentenceTransformerTrainingArguments(..., batch_sampler=grit.batch_sampler)
    SentenceTransformerTrainer(model, arguments, train, loss=loss, callbacks=[grit]).train()
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from lavis_mafa.algorithm.cached_batch import recomputed
from lavis_mafa.algorithm.corpus_mining import mine_corpus, mining_settings
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.integrations.cross_encoders import (
    PAIR_TEXTS,
    Blip2CrossEncoder,
    DualEncoder,
    PairJudge,
)
from lavis_mafa.integrations.grit_callback import Grit, KeepLoss
from lavis_mafa.integrations.pair_loss import PairLoss, numbers_of
from lavis_mafa.integrations.rows import numbered, require_table, sides_of
from lavis_mafa.io.processes import all_gather_objects

__all__ = [
    "Blip2CrossEncoder",
    "DualEncoder",
    "Grit",
    "KeepLoss",
    "MinedLoss",
    "PairJudge",
    "mine_hard_negatives",
    "numbered",
]

_AT_ONCE = 1024  # rows of a column in memory
_SEARCH, _MOST_SEARCHED = 50, 500  # candidates of an anchor


# Arguments of the library's losses that this one has not, and what to do instead.
_REFUSED = {
    "similarity_fct": "the features are compared by their cosine",
    "directions": "it contrasts anchors with positives, and positives with anchors",
    "partition_mode": "each direction has a softmax of its own",
    "hardness_mode": "use MultipleNegativesRankingLoss",
    "hardness_strength": "use MultipleNegativesRankingLoss",
    "contrast_anchors": "use GISTEmbedLoss, which contrasts anchors with anchors",
    "contrast_positives": "use GISTEmbedLoss, which contrasts positives with positives",
    "guide": "give the guide as judge",
    "margin_strategy": "give margin={'margin': 0.1, 'kind': 'relative'}",
    "temperature": "give scale, which is 1 / temperature",
}


class MinedLoss(PairLoss):
    """ITC of pairs (anchor, positive) in which false negatives are found.

    Without judge and settings it is ``MultipleNegativesRankingLoss`` with the directions
    ``query_to_doc`` and ``doc_to_query`` and the partition mode ``per_direction``. Further columns
    are negatives of all anchors; they are not judged.

    Where something judges, rows with an equal anchor or an equal positive are positives of each
    other. In evaluation, pairs are judged where the judge can read them: by their texts, or in its
    data set. Otherwise the loss of an evaluation set is that without mining.

    Args:
        model: the SentenceTransformer in training.
        settings: all settings of the step; None: from ``options``.
        judge: a CrossEncoder or, as a guide, a SentenceTransformer, which read the texts of the
            mini-batch; a `PairJudge`, which can also read rows of a data set; or another
            `lavis_mafa.Discriminator`, which finds the numbers of the rows (`numbered`) in
            ``samples["loaded_index"]``.
        scale: 1 / temperature, above 0.
        grit: collects the features of the mini-batches, from which the next epoch is grouped.
        gather_across_devices: compare with the mini-batches of all processes.
        mini_batch_size: encode so many rows at a time, and compute their activations again in the
            backward pass, as ``CachedMultipleNegativesRankingLoss`` does; None: all at once.
        mini_batch_num_tokens: the same, with a largest number of tokens instead.
        options: plain settings such as ``rule``, ``margin``, ``high``, ``action`` and
            ``soft_labels``, see `lavis_mafa.integrations.pair_loss.settings_of`.

    Raises:
        TypeError: for an unknown argument.
        ValueError: if an argument is out of range, or the settings need ``grit``.
    """

    def __init__(
        self,
        model: Any,
        settings: StepSettings | None = None,
        judge: Any = None,
        *,
        scale: float = 20.0,
        grit: Grit | None = None,
        gather_across_devices: bool = False,
        mini_batch_size: int | None = None,
        mini_batch_num_tokens: int | None = None,
        **options: Any,
    ) -> None:
        for name in _REFUSED.keys() & options.keys():
            raise TypeError(f"MinedLoss has no argument {name!r}: {_REFUSED[name]}")
        own = options if settings is not None else {"same_group": "positive", **options}
        super().__init__(
            settings,
            judge,
            grit=grit,
            all_ranks=gather_across_devices,
            arguments=signature(MinedLoss.__init__).parameters,
            **own,
        )
        sizes = (mini_batch_size, mini_batch_num_tokens)
        if not scale > 0 or any(size is not None and size < 1 for size in sizes):
            raise ValueError(
                f"scale, mini_batch_size and mini_batch_num_tokens must be above 0, got {scale}, "
                f"{mini_batch_size} and {mini_batch_num_tokens}"
            )
        self.model, self.scale = model, scale
        self.mini_batch_size, self.mini_batch_num_tokens = sizes

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a mini-batch.

        Args:
            sentence_features: of the anchors, of the positives, and of columns of negatives.
            labels: ``(B,)`` numbers of rows, see `numbered`; None: unknown.

        Raises:
            ValueError: if there are fewer than two columns, no numbers where they are needed, or
                the trainer does not know ``grit``.
        """
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ValueError(f"got {len(columns)} columns, expected anchor, positive, negatives")
        # The trainer evaluates the model inside of DDP's wrapper, whose own flag stays.
        training, numbers = _unwrapped(self.model).training, numbers_of(labels)
        mines = self.judges(numbers, training)
        samples: dict[str, Any] = {"loaded_index": numbers}
        if mines or not self.parts.settings.connections.by_con_d:
            samples |= self._equal(columns[:2])
        if self.reads_texts:
            samples[PAIR_TEXTS] = self._candidates(columns[:2])
        anchors, positives, *hard = (_unit(self._encode(one)) for one in columns)
        negatives = torch.cat(hard) if hard else None
        return self.itc(
            (anchors, positives), self.scale, samples, training, mines, negatives=negatives
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Return what the model card says of the loss."""
        judge = self.parts.con_d
        return {
            "scale": self.scale,
            "settings": str(self.parts.settings),
            "judge": None if judge is None else type(getattr(judge, "encoder", judge)).__name__,
            "grouped": self.grit is not None,
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
        }

    @property
    def citation(self) -> str:
        """The paper, in BibTeX, for the model card."""
        return """
@inproceedings{byun2024mafa,
    title={MAFA: Managing False Negatives for Vision-Language Pre-training},
    author={Byun, Jaeseok and Kim, Dohoon and Moon, Taesup},
    booktitle={CVPR},
    year={2024}
}
"""

    def _candidates(self, columns: Sequence[dict[str, Any]]) -> list[list[str]]:
        """Return the texts of two columns, of the mini-batches of all processes that are compared.

        Raises:
            ValueError: if a column has no tokens.
        """
        if any("input_ids" not in rows for rows in columns):
            raise ValueError(
                "a judge of texts got a column without texts: use PairJudge(encoder, "
                "numbered(dataset)), which reads the rows of the data set"
            )
        tokenizer = _unwrapped(self.model).tokenizer
        # The tokenizer of StaticEmbedding is one of the library tokenizers.
        decode = getattr(tokenizer, "batch_decode", None) or tokenizer.decode_batch
        own = [decode(_ids(one), skip_special_tokens=True) for one in columns]
        of_ranks = all_gather_objects(own) if self.parts.settings.all_ranks else [own]
        return [[text for one in of_ranks for text in one[side]] for side in range(2)]

    def _equal(self, columns: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return numbers ``(B,)`` of the tokens of anchors and positives, equal for equal ones."""
        found = {}
        for name, rows in zip(("image_id", "group_id"), columns, strict=True):
            if "input_ids" in rows:
                digests = [
                    int.from_bytes(hashlib.blake2b(repr(one).encode(), digest_size=7).digest())
                    for one in _ids(rows)
                ]
                found[name] = torch.tensor(digests, device=rows["input_ids"].device)
        return found

    def _encode(self, rows: dict[str, Any]) -> Tensor:
        """Return the embeddings ``(B, E)`` of a column."""

        def encode(part: dict[str, Any]) -> Tensor:
            found: Tensor = self.model(part)["sentence_embedding"]
            return found

        size, tokens = self.mini_batch_size, self.mini_batch_num_tokens
        if size is None and tokens is None:
            return encode(rows)
        model = _unwrapped(self.model)
        wrappers = "sentence_transformers.sentence_transformer.losses"
        wrapped = any(
            type(one.forward).__module__.startswith(wrappers) for one in (model, model[0])
        )
        if wrapped or "offsets" in rows:
            raise ValueError(
                "mini_batch_size and mini_batch_num_tokens do not work inside MatryoshkaLoss, "
                "Matryoshka2dLoss and AdaptiveLayerLoss, nor with StaticEmbedding: leave them out"
            )
        from sentence_transformers.base.losses.gradcache import _create_minibatch, _minibatch_ranges

        # A pooling that leaves out the prompt changes the mask in place: each pass gets a copy.
        parts = [
            _create_minibatch(rows, *one) for one in _minibatch_ranges(rows, size or 1, tokens)
        ]
        place = next(self.model.parameters()).detach()
        return torch.cat([recomputed(place, lambda one: encode(dict(one)), one) for one in parts])


def _unit(embeddings: Tensor) -> Tensor:
    """Return normalised embeddings, in float32 if they have half precision, as the library does."""
    return F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=-1)


def _unwrapped(model: Any) -> Any:
    """Return the SentenceTransformer inside of a compiled model, or of DDP's."""
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "module", model)


def _ids(rows: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of every row without padding, also of flattened mini-batches."""
    ids, starts = rows["input_ids"].cpu(), rows.get("offsets")  # of StaticEmbedding
    if "cu_seq_lens_q" in rows:
        starts = rows["cu_seq_lens_q"][:-1]
    if starts is not None:
        return [one.tolist() for one in ids.flatten().tensor_split(starts[1:].cpu())]
    if "attention_mask" not in rows:
        return list(ids.tolist())
    mask = rows["attention_mask"].bool().cpu()
    return [one[kept].tolist() for one, kept in zip(ids, mask, strict=True)]


def mine_hard_negatives(
    dataset: Any,
    model: Any,
    settings: StepSettings | None = None,
    judge: Any = None,
    negatives: int = 4,
    search: int | None = None,
    skip: int = 0,
    batch_size: int = 32,
) -> tuple[Any, Any]:
    """Mine a data set of pairs, texts or images, as `lavis_mafa.mine_corpus` does.

    Args:
        dataset: its first two columns beside ``label`` are anchor and positive.
        model: the SentenceTransformer whose similarities decide what is judged.
        settings, negatives, search, skip: see `lavis_mafa.mine_corpus`; search: None for 50, and
            without a judge as many more as rows share an anchor, at most 500.
        judge: a CrossEncoder or another encoder of `PairJudge`; or a `lavis_mafa.Discriminator`,
            which gets the places 0 to N - 1 of the rows as ``samples["loaded_index"]``.
        batch_size: rows in one forward pass of the model, and pairs in one of the CrossEncoder.

    Returns:
        Two data sets. The first has the rows with columns ``negative_1`` and so on; rows that have
        too few negatives are left out, and a warning counts them; a pair that is listed several
        times is mined once. The second has the missing pairs in the two columns; training on both
        converts the false negatives.

    Raises:
        TypeError: if the judge is something else.
        ValueError: if the data set is something else, or has no two columns or no rows, and as
            `lavis_mafa.mine_corpus`.
    """
    require_table(dataset)
    encoder = getattr(judge, "encoder", judge)
    if judge is not None and not (hasattr(encoder, "predict") or hasattr(judge, "judge")):
        raise TypeError(
            f"judge: got a {type(judge).__name__}, expected a CrossEncoder or an object with the "
            "method judge of lavis_mafa.Discriminator"
        )
    least = negatives if search is None else search
    settings = mining_settings(settings, judge, negatives, least, skip)
    anchor, positive = sides_of(dataset)
    names = [*anchor.column_names, *positive.column_names]
    if _encodes_alike(model):
        features, (ids, other_ids) = _encoded([anchor, positive], model.encode_query, batch_size)
        other = features
    else:
        features, (ids,) = _encoded([anchor], model.encode_query, batch_size)
        other, (other_ids,) = _encoded([positive], model.encode_document, batch_size)
    if search is None:
        # As the library's range_max, where each candidate does not cost a judgement.
        more = 0 if judge is not None else int(ids.bincount().max())
        search = min(_SEARCH + more, _MOST_SEARCHED)
    if hasattr(encoder, "predict"):
        judge = PairJudge(encoder, batch_size=batch_size)
        judge.columns = [anchor, positive]
    found = mine_corpus(
        features[ids],
        other[other_ids],
        settings,
        judge,
        negatives,
        search,
        skip,
        ids,
        other_ids,
        progress=lambda parts: tqdm(parts, desc="mining"),
    )
    # Of a pair that is listed several times, only the first row is kept.
    first = torch.from_numpy(np.unique((ids * len(dataset) * 2 + other_ids).numpy(), True)[1])
    complete = (found.negatives >= 0).all(dim=1).cpu()
    if not bool(complete.all()):
        logging.warning(
            "%d of %d rows have fewer than %d negatives among the %d most similar: left out",
            int((~complete).sum()),
            len(dataset),
            negatives,
            search,
        )
    rows = first[complete[first]].sort().values
    kept, table = rows.tolist(), found.negatives[rows].t().tolist()
    mined = dict(zip(names, ((anchor, kept), (positive, kept)), strict=True))
    for number, column in enumerate(table, 1):
        mined[f"negative_{number}"] = positive, column
    anchors, positives = found.connections.t().tolist()
    missing = dict(zip(names, ((anchor, anchors), (positive, positives)), strict=True))
    return _table(mined), _table(missing)


def _table(parts: Mapping[str, tuple[Any, list[int]]]) -> Any:
    """Return a data set of columns by name: some rows of data sets with one column."""
    import pyarrow as pa
    from datasets import Dataset, Features, Value, concatenate_datasets

    columns = []
    for name, (data, rows) in parts.items():
        (own,) = data.column_names
        if isinstance(data.features[own], Value):
            # Texts are copied at once: joining columns would copy selected rows one by one.
            texts = data.with_format("arrow")[:].take(pa.array(rows, pa.int64()))
            columns.append(Dataset(texts.rename_columns([name])))
        else:
            columns.append(data.select(rows).rename_columns({own: name}))
    if len(columns[0]):
        return concatenate_datasets(columns, axis=1)
    # Of columns without rows `concatenate_datasets` keeps only the first.
    kinds = Features({name: kind for one in columns for name, kind in one.features.items()})
    return Dataset.from_dict({name: [] for name in kinds}, features=kinds)


def _encodes_alike(model: Any) -> bool:
    """Return whether a model encodes anchors as positives, so that one pass serves both."""
    from sentence_transformers.base.modules import Router

    known = [name for name in ("document", "passage", "corpus") if name in model.prompts]
    of_documents = model.prompts[known[0]] if known else ""
    if (model.prompts.get("query") or "") != (of_documents or ""):
        return False
    return not any(isinstance(one, Router) for one in model.modules())


def _encoded(
    columns: Sequence[Any], encode: Callable[..., Tensor], batch_size: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the embeddings ``(U, E)`` of distinct values, each encoded once, and the number
    ``(N,)`` of the value of every row of each column."""
    numbers: dict[Any, int] = {}
    features: list[Tensor] = []
    ids: list[list[int]] = [[] for _ in columns]
    new: list[Any] = []

    def encode_new() -> None:
        features.append(encode(new, batch_size=batch_size, convert_to_tensor=True))
        new.clear()

    for column, of in zip(columns, ids, strict=True):
        (name,) = column.column_names
        for start in range(0, len(column), _AT_ONCE):
            for value in column[start : start + _AT_ONCE][name]:
                known = len(numbers)
                of.append(numbers.setdefault(_identity(value), known))
                if len(numbers) > known:
                    if new and isinstance(new[-1], str) != isinstance(value, str):
                        encode_new()  # a call takes values of one kind
                    new.append(value)
            # Texts wait: sorted by length all at once, they are padded least. Pictures may not fit.
            if new and not isinstance(new[-1], str):
                encode_new()
    if new:
        encode_new()
    return torch.cat(features), [torch.tensor(of) for of in ids]


def _identity(value: Any) -> Any:
    """Return what is equal for equal texts and arrays, and for pictures that look equal."""
    if not hasattr(value, "tobytes"):
        return value if isinstance(value, str) else repr(value)
    if hasattr(value, "getpixel"):  # a picture; its bytes may be numbers of a palette
        form, value = f"{value.size}", value.convert("RGBA")
    else:
        form = f"{value.shape} {value.dtype}"
    return hashlib.sha256(form.encode() + value.tobytes()).digest()
