"""Evaluate a model: python evaluate.py --cfg-path projects/mafa/eval/retrieval_toy.yaml"""

import sys

from lavis_mafa.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
