"""Registries of pickers, soft labels, losses and the like, open to users' code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

T = TypeVar("T")
V = TypeVar("V")  # what a decorator gets, it returns: a registered function keeps its signature


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered object.

    Attributes:
        name: its name in a config.
        value: the object itself.
        settings: dataclass of its own settings, with fields made by `option`; None: it has none.
        source: paper and section, or the module that added it.
        traits: what else its registry must know of it, such as `LabelTraits`; None: nothing.
    """

    name: str
    value: T
    settings: type | None
    source: str
    traits: Any = None

    def make(self, own: Any = None, *first: Any) -> Any:
        """Return what the entry names, ready to be used.

        This is a function with its settings bound as ``own``, or a new object of a class.

        Args:
            own: its settings; None: their defaults, if it has any.
            first: what a class is constructed with before its settings.
        """
        if self.settings is not None and own is None:
            own = self.settings()
        value: Any = self.value
        if isinstance(value, type):
            return value(*first) if own is None else value(*first, own)
        return value if own is None else partial(value, own=own)


class Section:
    """A section of a config in which entries have their own settings, each under its name.

    Args:
        path: dotted name of the section.
        keys: the section's other keys, see `reserve`.
    """

    def __init__(self, path: str, keys: Collection[str] = ()) -> None:
        self.path = path
        self.keys = frozenset(keys)
        self.registries: list[Registry[Any]] = []

    def reserve(self, keys: Iterable[str]) -> None:
        """Add keys of the section, which no entry with settings may be called.

        Raises:
            ValueError: if one is.
        """
        self.keys |= set(keys)
        for one in self.registries:
            for name, entry in one.entries().items():
                if entry.settings is not None:
                    self._refuse_taken(name, one.kind)

    def _refuse_taken(self, name: str, kind: str) -> None:
        """Refuse settings under a name that something else in the section has.

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
        section: where a config gives the entries' own settings; None: entries have none.
        traits: makes an entry's traits of further keyword arguments of `register`; None: there are
            no further ones.
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
            traits: what the registry must know of it, such as ``needs_momentum`` of a soft label.

        Raises:
            ValueError: if the name is taken by another object, or its settings would be given by a
                key that has another meaning.
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
            KeyError: if the name is not registered; the message lists those that are.
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
# are the fields of `lavis_mafa.algorithm.settings.StepSettings` and what else is reserved there.
MAFA = Section("model.mafa")

# (step) or (step, own=settings) -> scalar; None: nothing to train in this step. It is here because
# losses are functions of settings, which read the registry; `lavis_mafa.algorithm.losses` fills it.
LOSSES: Registry[Callable[..., Tensor | None]] = Registry("loss", MAFA)
