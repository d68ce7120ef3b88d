"""Registries of pickers, soft labels, losses and the like, open to users' code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

T = TypeVar("T")
V = TypeVar("V")  # what a decorator takes and returns: its signature stays


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered object.

    Attributes:
        name: its name in a config.
        value: the object itself.
        settings: dataclass of its own settings, with fields made by `option`; None: it has none.
        source: paper and section, or the module that added it.
        traits: further properties that the registry needs, such as `_LabelTraits`; None: none.
    """

    name: str
    value: T
    settings: type | None
    source: str
    traits: Any = None

    def make(self, own: Any = None, *first: Any) -> Any:
        """Return the registered function or a new instance of the registered class, ready to use.

        A function has its settings bound as ``own``; a class is constructed with them.

        Args:
            own: the entry's settings; None: their defaults, if it has settings.
            first: arguments of a class's constructor before its settings.
        """
        if self.settings is not None and own is None:
            own = self.settings()
        value: Any = self.value
        if isinstance(value, type):
            return value(*first) if own is None else value(*first, own)
        return value if own is None else partial(value, own=own)


class Section:
    """A section of a config that holds the settings of entries, each under the entry's name.

    Args:
        path: dotted name of the section.
        keys: the section's other keys, see `reserve`.
    """

    def __init__(self, path: str, keys: Collection[str] = ()) -> None:
        self.path = path
        self.keys = frozenset(keys)
        self.registries: list[Registry[Any]] = []

    def reserve(self, keys: Iterable[str]) -> None:
        """Reserve keys of the section, so that no entry with settings can have these names.

        Raises:
            ValueError: if an entry has one of these names already.
        """
        self.keys |= set(keys)
        for one in self.registries:
            for name, entry in one.entries().items():
                if entry.settings is not None:
                    self._refuse_taken(name, one.kind)

    def _refuse_taken(self, name: str, kind: str) -> None:
        """Raise an error if something else in the section has the name of these settings.

        Raises:
            ValueError: if the name is taken.
        """
        taken = [f"the {self.path} key {name}"] if name in self.keys else []
        for other in self.registries:
            entry = other.entries().get(name)
            if other.kind != kind and entry is not None and entry.settings is not None:
                taken.append(f"the {other.kind} {name!r} of {_origin(entry.value)}")
        if taken:
            raise ValueError(
                f"the {kind} {name!r} cannot have settings: {self.path}.{name} would hold them, "
                f"which is already used by {taken[0]}; register it under another name"
            )


class Registry(Mapping[str, T]):
    """Names and the objects registered under them, in the order of registration.

    Args:
        kind: what is registered, in the singular, for messages: ``picker``.
        section: the config section of the entries' own settings; None: entries have none.
        traits: builds an entry's traits from further keyword arguments of `register`; None: there
            are none.
    """

    def __init__(
        self,
        kind: str,
        section: Section | None = None,
        traits: Callable[..., Any] | None = None,
    ) -> None:
        self.kind = kind
        self._section = section
        self._traits = traits
        self._entries: dict[str, Entry[T]] = {}
        if section is not None:
            section.registries.append(self)

    def register(
        self,
        name: str,
        *,
        settings: type | None = None,
        source: str = "",
        **traits: Any,
    ) -> Callable[[V], V]:
        """Return a decorator that registers a function or class and returns it unchanged.

        Args:
            name: its name in a config.
            settings: dataclass of its own settings; a config gives them under the same name.
            source: paper and section; the module if empty.
            traits: properties that the registry needs, such as ``needs_momentum`` of a soft label.

        Raises:
            ValueError: if another object has the name, or the key of its settings has another
                meaning.
            TypeError: for a trait that the registry does not have.
        """
        if traits and self._traits is None:
            raise TypeError(f"a {self.kind} has no {' or '.join(traits)}")
        found = None if self._traits is None else self._traits(**traits)

        def decorate(value: V) -> V:
            known = self._entries.get(name)
            # A module that is executed twice (reloaded, or run as a file) replaces its own entry.
            if known is not None and _origin(known.value) != _origin(value):
                raise ValueError(
                    f"the {self.kind} {name!r} is already registered by {_origin(known.value)}; "
                    f"register {_origin(value)} under another name"
                )
            if settings is not None and self._section is not None:
                self._section._refuse_taken(name, self.kind)
            origin = source or str(getattr(value, "__module__", ""))
            self._entries[name] = Entry(name, cast(T, value), settings, origin, found)
            return value

        return decorate

    def entry(self, name: str) -> Entry[T]:
        """Return the entry of a name: the object, its settings and source.

        Raises:
            KeyError: if the name is not registered; the message lists the registered names.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(
                f"no {self.kind} is called {name!r}; known: {', '.join(self._entries)}"
            ) from None

    def entries(self) -> dict[str, Entry[T]]:
        """Return all entries by name, in the order of registration."""
        return dict(self._entries)

    def __getitem__(self, name: str) -> T:
        return self.entry(name).value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _origin(value: Any) -> str:
    module = getattr(value, "__module__", "")
    return f"{module}.{getattr(value, '__qualname__', type(value).__name__)}"


# Pickers, soft labels, losses and the like have their settings in ``model.mafa``, whose other keys
# are the fields of `lavis_mafa.algorithm.settings.StepSettings` and the keys reserved there.
MAFA = Section("model.mafa")

# (step) or (step, own=settings) -> scalar; None: nothing to train in this step. The registry is
# defined here to avoid a circular import; `lavis_mafa.algorithm.losses` fills it.
LOSSES: Registry[Callable[..., Tensor | None]] = Registry("loss", MAFA)
