"""Studies: a study file lists systems; one command trains them, measures and compares them.

    python -m research study projects/mafa/studies/table_4.yaml --at toy

A study file is YAML. What several studies share is in a base: the file that ``base`` names, next to
the study or among those of this project; ``{at}`` in its name stands for the NAME of ``--at NAME``
(``toy`` without it). A file overrides its base, and its section ``at: {NAME: ...}`` overrides both;
mappings are merged key by key, lists are replaced. Keys:

- ``title``, ``source`` (where a paper has the table), ``about``, ``notes``: text.
- ``parameters``: values by name, which ``--set NAME=VALUE`` overrides. In any text of the file
  ``{name}`` stands for the value; ``{name*2}``, ``{name/2}`` and ``{name-2}`` compute with it.
- ``shared``: runs by name that rows share: a training, ``{config, options, uses}``; a module of
  this package, ``{module, arguments, writes}``, which gets a row's options as ``key=value``; or an
  existing ``{checkpoint}``.
- ``stages``: by name, the trainings of each row: ``{config, options, uses}``. A row's options
  override those of the first stage.
- ``options``: of everything that has a config. ``settings``: options by name, for ``uses``.
- ``rows``: a list of ``{name, marks, source, uses, options, run}``. ``marks`` are cells of the
  table (true: a check mark); ``run`` names a shared run that the row shows instead of stages of its
  own, or of which it shows a variant, if it has ``uses`` or ``options``. ``vary``: values by key;
  every row is run with their full product. ``titles``: names of keys in tables.
- ``columns``: by name, ``{title, key, stage, kind, split, scale, digits, range}``: figures of a
  stage's ``log.jsonl`` (the mean, if there are several keys). Kind ``measured``: figures that the
  measuring function returned, and as ``by_image`` lists of those of every test image. ``range``:
  chance and ceiling. ``shows``: names of the columns of the table; ``tables``: the same by the
  title of their table. Stages that no shown column needs are not run.
- ``measure``: ``{function: module:name, judges}``: called with the completed runs of a seed and the
  shared runs that ``judges`` names (default: none), it yields each run with its figures.
- ``headline``: ``module:function`` that words the result; it is called with the mean of what was
  measured over seeds, by the name of the shared run, ``name`` being that of its row.
- ``gallery``: the shared run whose mined connections the page shows.
- ``claims``: a list of ``{claim, source, row, than, column, better}``: that one row is better than
  another in a figure, or in all of several (``better``: higher, the default, or lower). A table has
  the mean difference with the same seed, its 95 % interval, in how many seeds it is right, and a
  verdict, corrected for the number of claims.
- ``paper``: ``{about, columns, rows}``: the paper's table.
- ``seeds``, ``at_once`` (runs at the same time), ``processes`` (of each training).
- ``folders``: where shared runs write below the output folder (``shared/seed_{seed}/{name}``).

In options and arguments ``{name}`` also stands for the checkpoint of a shared run or earlier stage
with the same seed, ``{seed}`` for the seed, ``{folder}`` for the folder of the run.
"""
