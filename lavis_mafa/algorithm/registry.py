"""Registries of pickers, soft labels, losses and the like, open to users' code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
        doc: one line for listings.
        source: paper and section, or the module that added it.
    """

    name: str
    value: T
    settings: type | None
    doc: str
    source: str


class Registry(Mapping[str, T]):
    """Names and the objects registered under them, in the order of registration.

    Args:
        kind: what is registered, in the singular, for messages: ``picker``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(
        self, name: str, *, settings: type | None = None, doc: str = "", source: str = ""
    ) -> Callable[[V], V]:
        """Return a decorator that registers a function or class and returns it unchanged.

        Args:
            name: its name in a config.
            settings: dataclass of its own settings; a config gives them under the same name.
            doc: one line for listings; the first line of the docstring if empty.
            source: paper and section; the module if empty.

        Raises:
            ValueError: if the name is taken by another object.
        """

        def decorate(value: V) -> V:
            known = self._entries.get(name)
            # A module that is executed twice (reloaded, or run as a file) replaces its own entry.
            if known is not None and _origin(known.value) != _origin(value):
                raise ValueError(
                    f"the {self.kind} {name!r} is already registered by {_origin(known.value)}; "
                    f"register {_origin(value)} under another name"
                )
            text = doc or (getattr(value, "__doc__", None) or "").strip().split("\n")[0]
            origin = source or str(getattr(value, "__module__", ""))
            self._entries[name] = Entry(name, cast(T, value), settings, text.rstrip("."), origin)
            return value

        return decorate

    def entry(self, name: str) -> Entry[T]:
        """Return the entry of a name: the object, its settings and documentation.

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


# (step) or (step, own=settings) -> scalar; None: nothing to train in this step. It is here because
# losses are functions of settings, which read the registry; `lavis_mafa.algorithm.losses` fills it.
LOSSES: Registry[Callable[..., Tensor | None]] = Registry("loss")
