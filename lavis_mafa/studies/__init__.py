"""Ablations as one command: a study file runs all rows of a paper's table and ends in a table.

    python -m lavis_mafa.studies projects/mafa/studies/table_4.yaml --at toy

A study file is YAML. What several tables share stands in a base, ``base_NAME.yaml`` beside the
file, chosen by ``--at NAME``; the file goes before its base, its section ``at: {NAME: ...}`` before
both (mappings key by key, lists as a whole). Keys:

- ``title``, ``source`` (where a paper has the table), ``about``, ``notes``: text.
- ``shared``: by name, what rows share: a training, ``{config, options, uses}``; a module of this
  package, ``{module, arguments, writes}``; or a ``{checkpoint}`` that is given.
- ``stages``: by name, what is run for each row: ``{script (train.py), config, options, uses}``. A
  row's options go to the first.
- ``options``: of everything that has a config. ``settings``: options that ``uses`` names.
- ``rows``: a list of ``{name, marks, uses, options}``, marks being cells of the table (true: a
  check mark). ``vary``: by key, its values; every row is run with their full product. ``titles``:
  what keys are called in tables.
- ``columns``: by name, ``{title, key, stage, kind, split, scale, digits}``: figures of a stage's
  ``log.jsonl`` (the mean, if there are several keys). ``shows``: names of the columns of the table;
  stages that none of them needs are not run.
- ``figure``: ``{x, y}``: a key of ``vary`` or ``row``, and names of columns.
- ``paper``: ``{about, columns, rows}``: the paper's numbers for the rows of the file, in their
  order or by name; a table of its own beside ours.
- ``seeds``, ``at_once`` (runs beside each other), ``processes`` (of each training).

In options and arguments ``{name}`` stands for the checkpoint of a shared run or earlier stage with
the same seed, ``{seed}`` for the seed, ``{folder}`` for where the run writes.
"""
