"""Studies on real pictures whose valid pairs are partly known: their data and what is measured.

The folder of such data has, in the format of ``image_text_json``, ``train.json`` and
``test.json``, with image paths relative to the folder, and where they are known

- ``meta.json``: ``{"classes": {"a.jpg": "beach", ...}}``, a class for every image by its file name;
- ``judgements.json``: what people said of pairs, see `lavis_mafa.datasets.judgements`.
"""
