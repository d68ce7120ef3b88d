"""Train a model: python train.py --cfg-path projects/mafa/train/albef_toy.yaml"""

import sys

from lavis_mafa.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
