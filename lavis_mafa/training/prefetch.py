"""Everything that a config fetches from elsewhere: list it, refuse it offline, fetch it ahead."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lavis.common.registry import registry
from lavis.common.utils import get_cache_path, is_url

from lavis_mafa.checkpoints.downloads import OfflineError, UrlFile, answers, go_offline, listing
from lavis_mafa.data.local_files import reads_as_lavis
from lavis_mafa.io.processes import on_main_process
from lavis_mafa.settings.contradictions import used_splits
from lavis_mafa.settings.schema import SPLITS
from lavis_mafa.training.sources import Source, sources_of_model


@contextmanager
def only_splits(cfg: Any, splits: set[str]) -> Iterator[None]:
    """Hide the annotation files of other splits from the builders of a config's data sets.

    They would be fetched and read for nothing. A data set with none of the splits is left as it is.
    """
    hidden: list[tuple[Any, str, Any]] = []
    for dataset in cfg.datasets_cfg.values():
        annotations = dataset.get("build_info", {}).get("annotations") or {}
        if not splits & set(annotations):
            continue
        for split in [one for one in annotations if one in SPLITS and one not in splits]:
            hidden.append((annotations, split, annotations.pop(split)))
    try:
        yield
    finally:
        for annotations, split, info in hidden:  # the run records its whole config
            annotations[split] = info


def _sources_of_data(cfg: Any) -> Iterator[Source]:
    """Yield the annotation files that LAVIS's builders download."""
    splits = used_splits(cfg.run_cfg.get)
    for name, dataset in cfg.datasets_cfg.items():
        if not reads_as_lavis(registry.get_builder_class(name)):
            continue
        annotations = dataset.get("build_info", {}).get("annotations") or {}
        for split, info in annotations.items():
            if info is None or (split in SPLITS and split not in splits):
                continue
            urls, stored = (
                [one] if isinstance(one, str) else list(one or [])
                for one in (info.get("url"), info.get("storage"))
            )
            for url, path in zip(urls, stored, strict=False):
                if is_url(url):
                    key = f"datasets.{name}.build_info.annotations.{split}"
                    place = path if os.path.isfile(path) else get_cache_path(path)
                    yield UrlFile(key, url, Path(os.path.abspath(place)))


def sources_of(cfg: Any) -> list[Source]:
    """Return everything that a run of a config fetches from elsewhere, or has fetched before."""
    found = [*sources_of_model(cfg.model_cfg), *_sources_of_data(cfg)]
    by_origin = {(type(one), one.origin, getattr(one, "weights", None)): one for one in found[::-1]}
    return list(by_origin.values())[::-1]


def require_sources(cfg: Any) -> None:
    """Check that what is missing can be fetched; all ranks must call it.

    Raises:
        OfflineError: if a server does not answer, listing everything that the config needs.
    """

    def check() -> None:
        sources = sources_of(cfg)
        missing = [one for one in sources if not one.is_there]
        # LAVIS's own models ask the hub even for cached files, which takes minutes without it.
        by_lavis = [one for one in sources if one.key.endswith(".arch")]
        if by_lavis and not missing and not answers(by_lavis[0].server):
            go_offline()
        if not missing:
            return
        lines = "\n".join(listing(sources))
        if all(answers(server) for server in {one.server for one in missing}):
            logging.info("this run needs these files, and downloads those missing:\n%s", lines)
            return
        raise OfflineError(
            f"{len(missing)} of {len(sources)} files that {cfg.args.cfg_path} needs are missing, "
            f"and cannot be downloaded now:\n{lines}\nRun the same command with --prefetch where "
            "there is a network and copy the files to the same places, or change the keys before "
            "the colons to files of your own (model.tokenizer: a vocab.txt, "
            "model.load_pretrained: False for random weights)"
        )

    on_main_process(check)


def prefetch(cfg: Any) -> list[str]:
    """Download everything that a config needs and this machine lacks; return the final listing.

    Raises:
        OfflineError: if a server does not answer.
    """
    require_sources(cfg)
    sources = sources_of(cfg)
    for source in sources:
        if not source.is_there:
            logging.info("downloading %s", source.origin)
            try:
                source.fetch()
            except Exception as error:  # each library has its own errors of connections
                raise OfflineError(
                    f"{source.key}: {source.origin} cannot be downloaded to {source.path}: {error}"
                ) from error
    return listing(sources) or ["this config needs no download"]
