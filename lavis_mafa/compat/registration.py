"""Register with LAVIS: at once if LAVIS is imported already, otherwise right after its import.

Registration imports nearly every module of this package, and those import LAVIS. It must therefore
not start during an import of either, when modules are only partly executed: ``import
lavis_mafa.families``, for example, imports LAVIS while that package is still empty. A finder at the
head of ``sys.meta_path`` notes when the import of LAVIS ends and when the outermost import of a
module of this package ends, and registers when both have ended.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lavis_mafa.compat.deferred import deferred_modules
from lavis_mafa.compat.names import lent_names
from lavis_mafa.compat.versions import check_versions

PACKAGE = "lavis_mafa"
# Packages that register their classes when imported, in this order.
_ROOMS = ("data", "families", "training", "tasks", "toyworld.builder")
# Imported when LAVIS's registry is asked for an unregistered name; may be absent.
ON_DEMAND = f"{PACKAGE}.downstream"


def register() -> None:
    """Register models, tasks, runners, processors and data sets with LAVIS; import LAVIS if needed.

    A second call does nothing.
    """
    if _finder.registered:
        return
    _finder.registered = True
    try:
        import lavis.common.optims
        import lavis.models
        import lavis.runners  # noqa: F401

        for room in _ROOMS:
            importlib.import_module(f"{PACKAGE}.{room}")
        _extend_registry()
        # LAVIS listed its models when it was imported.
        lavis.models.model_zoo.model_zoo = _ModelTypes()
    except BaseException:
        _finder.registered = False
        raise
    _finder.remove()


def _register_on_demand() -> None:
    """Import `ON_DEMAND` if it is installed, which registers its classes."""
    try:
        importlib.import_module(ON_DEMAND)
    except ModuleNotFoundError as error:
        if error.name != ON_DEMAND:
            raise


class _Names(MutableMapping[str, Any]):
    """A table of LAVIS's registry that calls `_register_on_demand` when a name is missing.

    Looking up an unregistered name and listing the names import `ON_DEMAND`. The operator ``in``
    does not, because LAVIS uses it before it registers a class.
    """

    def __init__(self, registered: Mapping[str, Any]) -> None:
        self._registered = dict(registered)

    def __getitem__(self, name: str) -> Any:
        if name not in self._registered:
            _register_on_demand()
        return self._registered[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._registered[name] = value

    def __delitem__(self, name: str) -> None:
        del self._registered[name]

    def __contains__(self, name: object) -> bool:
        return name in self._registered

    def __iter__(self) -> Iterator[str]:
        _register_on_demand()
        return iter(self._registered)

    def __len__(self) -> int:
        _register_on_demand()
        return len(self._registered)


class _ModelTypes(Mapping[str, Any]):
    """The model types of every registered model, for ``lavis.models.model_zoo``."""

    def __getitem__(self, name: str) -> list[str]:
        return list(_table("model")[name].PRETRAINED_MODEL_CONFIG_DICT)

    def __iter__(self) -> Iterator[str]:
        return iter(_table("model"))

    def __len__(self) -> int:
        return len(_table("model"))


def _table(kind: str) -> MutableMapping[str, Any]:
    from lavis.common.registry import registry

    table: MutableMapping[str, Any] = registry.mapping[f"{kind}_name_mapping"]
    return table


def _extend_registry() -> None:
    """Make LAVIS's registry find the names that `ON_DEMAND` registers."""
    from lavis.common.registry import registry

    for kind in ("builder", "model", "task"):
        registry.mapping[f"{kind}_name_mapping"] = _Names(_table(kind))


def register_with_lavis() -> None:
    """Register now if LAVIS has been imported, otherwise as soon as it is."""
    if _imported("lavis"):
        register()
    elif _finder not in sys.meta_path:
        # A package that is imported a second time (its modules were removed from ``sys.modules``,
        # as notebooks and test runners do) must remove the first import's finder, or the two would
        # ask each other without end.
        sys.meta_path[:] = [one for one in sys.meta_path if not _is_ours(one)]
        sys.meta_path.insert(0, _finder)


def _is_ours(finder: object) -> bool:
    """Return whether a finder is a `_Finder` of this or an earlier import of this module."""
    cls = finder if isinstance(finder, type) else type(finder)
    return (cls.__module__, cls.__qualname__) == (__name__, _Finder.__qualname__)


def _imported(name: str) -> bool:
    """Return whether the import of a module has ended."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _Finder:
    """A finder that delegates to the other finders and watches imports of LAVIS and this package.

    Attributes:
        registered: registration has been done or has begun.
        imported: the import of LAVIS has ended, if it began under this finder.
        depth: number of nested imports of this package's modules in progress.
    """

    def __init__(self) -> None:
        self.registered = False
        self.imported = False
        self.depth = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "lavis" and not name.startswith(f"{PACKAGE}."):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        if name == "lavis":
            check_versions()  # raises an error that says what to install
        return None

    def _watch(self, spec: ModuleSpec) -> None:
        """Make a spec's loader execute its module by way of `_load`."""
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:  # a namespace package has nothing to execute
            return

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            self._load(execute, module)

        # Every module has its own loader. Setting its attribute keeps its type, on which `inspect`
        # and `importlib.resources` depend.
        loader.exec_module = exec_module

    def _load(self, execute: Any, module: ModuleType) -> None:
        if module.__name__ == "lavis":
            check_versions()
            # LAVIS imports from deprecated places, which warn at every start.
            for module_name in ("fairscale", "timm", r"torch\.jit"):
                warnings.filterwarnings("ignore", category=FutureWarning, module=module_name)
            with deferred_modules(), lent_names():
                execute(module)
            from lavis_mafa.compat.adoption import adopt  # imports transformers

            adopt()
            self.imported = True  # although the import system has not marked it so yet
        else:
            self.depth += 1
            try:
                execute(module)
            finally:
                self.depth -= 1
        if not self.depth and (self.imported or _imported("lavis")):
            register()

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


_finder = _Finder()
