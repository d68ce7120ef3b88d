"""Judges from cross-encoders of sentence-transformers, and from BLIP-2, CLIP and SigLIP in
transformers.

Imports neither library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.integrations.rows import NO_NUMBERS, Rows, sides_of

PAIR_TEXTS = "pair_texts"  # of samples: the texts of all candidates, anchors and positives


def require_one_verdict(encoder: Any) -> None:
    """Raise ValueError if a CrossEncoder has more than two scores."""
    if encoder.num_labels > 2:
        raise ValueError(
            f"the cross-encoder has {encoder.num_labels} scores, expected one, or two of "
            "which the second means match"
        )


def match_probabilities(
    encoder: Any, pairs: Sequence[Any], batch_size: int, prompt: str | None = None
) -> Tensor:
    """Return the probabilities ``(P,)`` that pairs match: the sigmoid of a CrossEncoder's score, or
    with two scores the softmax's second.

    Args:
        batch_size: pairs in one forward pass.
        prompt: instruction to the model; None: its own.
    """
    two = encoder.num_labels == 2
    scores: Tensor = encoder.predict(
        list(pairs),
        prompt=prompt,
        batch_size=batch_size,
        show_progress_bar=False,
        # Not its own, which leaves the scores of some models as they are.
        activation_fn=nn.Softmax(dim=1) if two else nn.Sigmoid(),
        convert_to_tensor=True,
        device=str(next(encoder.parameters()).device),
    )
    return scores[:, 1] if two else scores.reshape(-1)


class _Judge:
    """Con-D from a model of another library."""

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Return the scores ``(P,)`` of pairs in float32, see `lavis_mafa.Discriminator`.

        Raises:
            ValueError: if a row is not in the data set, texts are needed and not known, or the
                model returns NaN, with which a pair would stay a negative.
        """
        if not len(image_of):
            return torch.zeros(0, device=image_of.device)
        scores = self._scores(samples, image_of, text_of)
        wrong = int(scores.isnan().sum())
        if wrong:
            raise ValueError(
                f"the judge returned NaN for {wrong} of {len(scores)} pairs: load it in float32 or "
                "bfloat16, and look for NaN among its weights"
            )
        return scores.float().to(image_of.device)

    def _scores(self, samples: dict[str, Any], image_of: Tensor, text_of: Tensor) -> Tensor:
        raise NotImplementedError


class PairJudge(_Judge):
    """Con-D from a CrossEncoder that reads anchors and positives; its scores are probabilities.

    Args:
        encoder: a ``CrossEncoder`` with one score, or with two of which the second means match; for
            images with captions also a `Blip2CrossEncoder` or a `DualEncoder`.
        dataset: from `numbered`, with all rows that are judged; its first two columns are anchor
            and positive. None: the texts of the mini-batch are judged, as `MinedLoss` decodes them
            from their tokens.
        batch_size: pairs in one forward pass.

    Attributes:
        rows: where the rows of the data set are; None: row numbers are places in ``columns``.
        columns: data sets of one column, anchors and positives; empty: texts are judged.

    Raises:
        ValueError: if the encoder has more than two scores, or the rows have no numbers.
    """

    def __init__(self, encoder: Any, dataset: Any = None, batch_size: int = 32) -> None:
        require_one_verdict(encoder)
        self.encoder, self.batch_size, self.reads_texts = encoder, batch_size, dataset is None
        self.rows = None if dataset is None else Rows(dataset)
        self.columns: list[Any] = [] if dataset is None else sides_of(dataset)

    def _scores(self, samples: dict[str, Any], image_of: Tensor, text_of: Tensor) -> Tensor:
        of = image_of, text_of
        if self.columns:
            if "loaded_index" not in samples:
                raise ValueError(NO_NUMBERS)
            places = samples["loaded_index"]
            if self.rows is not None:
                places = self.rows.require(places, "PairJudge")
            sides = [_values_at(one, places[n]) for one, n in zip(self.columns, of, strict=True)]
        else:
            texts = _texts_of(samples)
            sides = [[one[k] for k in n.tolist()] for one, n in zip(texts, of, strict=True)]
        return match_probabilities(self.encoder, list(zip(*sides, strict=True)), self.batch_size)


class Guide(_Judge):
    """Con-D from a SentenceTransformer: the cosine of a pair, as the guide of GISTEmbed.

    It is not a probability: with the rule ``margin`` it is compared with the own pair's.

    Args:
        model: the guide, which stays as it is.
    """

    reads_texts = True

    def __init__(self, model: Any) -> None:
        self.model = SentenceEncoder(model)

    def _scores(self, samples: dict[str, Any], image_of: Tensor, text_of: Tensor) -> Tensor:
        anchors, positives = _texts_of(samples)
        queries = _unit(self.model.encode_anchors(anchors))
        documents = _unit(self.model.encode_texts(positives))
        cosines = (queries.float() @ documents.float().t()).to(image_of.device)
        return cosines[image_of, text_of]


def _texts_of(samples: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the texts of anchors and positives, of all candidates."""
    if PAIR_TEXTS not in samples:
        raise ValueError(
            "the judge reads texts, but gets none from this mini-batch: use MinedLoss, or "
            "PairJudge(encoder, numbered(dataset))"
        )
    anchors, positives = samples[PAIR_TEXTS]
    return anchors, positives


def _values_at(column: Any, places: Tensor) -> list[Any]:
    """Return the values of a data set with one column at places ``(P,)``; each is read once."""
    read, number = torch.unique(places, return_inverse=True)
    values = column[read.tolist()][column.column_names[0]]
    return [values[n] for n in number.tolist()]


def pixels_of(processor: Any, images: Sequence[Any]) -> Tensor:
    """Return images as a processor makes them; pictures are read as viewers show them."""
    from lavis_mafa.io.pictures import to_rgb  # needs Pillow, and the losses do not

    shown = [to_rgb(one) if hasattr(one, "getpixel") else one for one in images]
    found: Tensor = processor.image_processor(shown, return_tensors="pt")["pixel_values"]
    return found


def tokens_of(processor: Any, texts: list[str], config: Any, padding: bool | str = True) -> Any:
    """Return tokens; captions are cut, and padded where asked, to the model's own length.

    Some tokenizers state none, or one that the model cannot read.

    Args:
        config: of the part of the model that reads them.
    """
    return processor.tokenizer(
        texts,
        padding=padding,
        truncation=True,
        max_length=config.max_position_embeddings,
        return_tensors="pt",
    )


class PairEncoder:
    """Encodes the anchors and the texts of pairs.

    Attributes:
        model: whose weights identify the features.
        reads_images, reads_texts: what anchors may be.
    """

    model: Any
    reads_images, reads_texts = True, False

    def prepare(self, anchor: Any) -> Any:
        """Return what `encode_anchors` needs of an anchor, small enough to hold many."""
        return anchor

    def encode_anchors(self, anchors: Sequence[Any]) -> Tensor:
        """Return the features ``(B, E)`` of prepared anchors."""
        raise NotImplementedError

    def encode_texts(self, texts: list[str]) -> Tensor:
        """Return the features ``(B, E)`` of texts."""
        raise NotImplementedError


class SentenceEncoder(PairEncoder):
    """A SentenceTransformer, by its prompts for queries and documents if it has some."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def encode_anchors(self, anchors: Sequence[Any]) -> Tensor:
        return self._encode(self.model.encode_query, anchors)

    def encode_texts(self, texts: list[str]) -> Tensor:
        return self._encode(self.model.encode_document, texts)

    def _encode(self, encode: Callable[..., Tensor], values: Sequence[Any]) -> Tensor:
        return encode(list(values), convert_to_tensor=True, show_progress_bar=False)


class _ImagesOnce:
    """A model of transformers, used as a CrossEncoder of images and captions.

    The image encoder runs once an image and call, not once a pair.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model.eval(), processor

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the model's weights."""
        found: Iterator[nn.Parameter] = self.model.parameters()
        return found

    @torch.no_grad()
    def predict(
        self,
        pairs: Sequence[tuple[Any, str]],
        batch_size: int = 32,
        activation_fn: nn.Module | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the scores ``(P, num_labels)`` of pairs as a tensor.

        Args:
            pairs: of a picture and a caption; a picture is encoded once if it is the same object.
            batch_size: images, and pairs, in one forward pass.
            activation_fn: of the logits; None: none.
        """
        self.model.eval()  # a trainer that holds the judge may have called train()
        images = {id(image): image for image, _ in pairs}
        place = {one: n for n, one in enumerate(images)}
        embeds = torch.cat([self._encode(part) for part in _parts([*images.values()], batch_size)])
        logits = [
            self._match(embeds[[place[id(image)] for image, _ in part]], [text for _, text in part])
            for part in _parts(pairs, batch_size)
        ]
        scores = torch.cat(logits).float()
        return scores if activation_fn is None else activation_fn(scores)

    def pixels(self, images: Sequence[Any]) -> Tensor:
        """Return images as the model's processor makes them, on its device."""
        weight = self.model.vision_model.embeddings.patch_embedding.weight
        return pixels_of(self.processor, images).to(weight.device, weight.dtype)

    def _encode(self, images: Sequence[Any]) -> Tensor:
        raise NotImplementedError

    def _match(self, embeds: Tensor, texts: list[str]) -> Tensor:
        raise NotImplementedError


class Blip2CrossEncoder(_ImagesOnce):
    """BLIP-2's matching head (ITM) in transformers; its two scores are "no match" and "match".

    Args:
        model: a ``Blip2ForImageTextRetrieval``, such as Salesforce/blip2-itm-vit-g.
        processor: its ``Blip2Processor``.
    """

    num_labels = 2

    def _encode(self, images: Sequence[Any]) -> Tensor:
        embeds: Tensor = self.model.vision_model(self.pixels(images)).last_hidden_state
        return embeds

    def _match(self, embeds: Tensor, texts: list[str]) -> Tensor:
        """Return the logits ``(P, 2)`` of pairs as ``Blip2ForImageTextRetrieval`` computes them."""
        model = self.model
        words = tokens_of(self.processor, texts, model.config.qformer_config).to(embeds.device)
        # In half precision, transformers keeps some of the parts in float32.
        inside = _dtype(model.qformer)
        queries = model.query_tokens.expand(len(texts), -1, -1).to(_dtype(model.embeddings))
        mask = torch.cat(
            [words["attention_mask"].new_ones(queries.shape[:2]), words["attention_mask"]], 1
        )
        both = model.embeddings(input_ids=words["input_ids"], query_embeds=queries)
        fused = model.qformer(
            query_embeds=both.to(inside),
            query_length=queries.shape[1],
            attention_mask=mask,
            encoder_hidden_states=embeds.to(inside),
        ).last_hidden_state
        seen = fused[:, : queries.shape[1]].to(_dtype(model.itm_head))
        logits: Tensor = model.itm_head(seen).mean(dim=1)
        return logits


class DualEncoder(_ImagesOnce, PairEncoder):
    """SigLIP or CLIP in transformers; its score is the logit of the pair's cosine.

    Args:
        model: a ``SiglipModel``, which has learned which cosine matches, or a ``CLIPModel``.
        processor: of the model.
        threshold: cosine from which on a pair matches with a probability of at least .5; None: the
            one that the model has learned.

    Raises:
        ValueError: if there is no threshold, and the model has none.
    """

    num_labels = 1

    def __init__(self, model: Any, processor: Any, threshold: float | None = None) -> None:
        super().__init__(model, processor)
        if threshold is None and not hasattr(model, "logit_bias"):
            raise ValueError(
                f"{type(model).__name__} ranks captions by their cosine and has learned no bound "
                "for a match: give a threshold, such as the mean cosine of your own pairs"
            )
        self.threshold = threshold

    def prepare(self, anchor: Any) -> Any:
        return self.pixels([anchor]).cpu()

    def encode_anchors(self, anchors: Sequence[Any]) -> Tensor:
        pixels = torch.cat(list(anchors)).to(next(self.parameters()).device)
        return _unit(self.model.get_image_features(pixel_values=pixels))

    def encode_texts(self, texts: list[str]) -> Tensor:
        # SigLIP has no attention mask: it was trained on captions of one padded length.
        words = tokens_of(self.processor, texts, self.model.config.text_config, "max_length")
        words = words.to(next(self.parameters()).device)
        return _unit(self.model.get_text_features(**words))

    def _encode(self, images: Sequence[Any]) -> Tensor:
        return self.encode_anchors([self.pixels(images)])

    def _match(self, embeds: Tensor, texts: list[str]) -> Tensor:
        cosines = (embeds * self.encode_texts(texts)).sum(dim=1)
        scale: Tensor = self.model.logit_scale.exp()
        if self.threshold is None:
            bias: Tensor = self.model.logit_bias
            return (cosines * scale + bias)[:, None]
        return (cosines - self.threshold)[:, None] * scale


def _unit(features: Any) -> Tensor:
    """Return normalised features; newer versions of transformers return them in an object."""
    found: Tensor = F.normalize(getattr(features, "pooler_output", features), dim=-1)
    return found


def _dtype(module: nn.Module) -> torch.dtype:
    found: torch.dtype = next(module.parameters()).dtype
    return found


def _parts(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[k : k + size] for k in range(0, len(rows), size)]
