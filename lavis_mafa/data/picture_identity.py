"""Decide which rows show the same picture: the one rule of check, holdout, training and evaluation.

Rows with the same image id show the same picture. Rows without one do if they have

- the same file: ``a.jpg``, ``./a.jpg``, ``sub/../a.jpg``, the absolute path, a symbolic link to the
  file and its name in another Unicode form (NFC, NFD) are one picture;
- in parquet and Arrow files the same bytes;
- in tar shards the same ``sha256``, ``sha512`` or ``md5`` in ``.json``, as img2dataset writes them,
  else the same place.

By content, the same bytes take the place of the same file and the same place.
"""

from __future__ import annotations

import hashlib
import logging
import os
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

from lavis_mafa.data.annotation_rows import Row
from lavis_mafa.data.image_reading import read_file

_KNOWN_FILES = 2**18  # whose digests are kept, so that a file with several captions is read once
_COMPARED = 50_000  # pictures among which copies are looked for


def digest_of(letter: bytes, content: Any) -> bytes:
    """Return 16 bytes that identify a content; the letter distinguishes kinds of content, b"" if
    there is one kind."""
    found = hashlib.blake2b(letter, digest_size=16)
    found.update(content)
    return found.digest()


class PictureFolder:
    """Find pictures by the names that annotations give them.

    Every folder is listed once: no file has to be asked whether it is a link.

    Args:
        root: folder that names are relative to; None: unknown, names are compared as they are.
    """

    def __init__(self, root: str | os.PathLike[str] | None) -> None:
        self.root = None if root is None else os.path.abspath(root)
        self._real_root = os.path.join(os.path.realpath(self.root or ""), "")
        self._real: dict[str, str] = {}  # resolved folders
        self._listed: dict[str, tuple[set[str], dict[str, list[str]]]] = {}

    def path(self, name: str) -> str:
        """Return the path of a picture, in the Unicode form that its name has on disk."""
        path = os.path.join(self.root or "", name)
        if name.isascii() or self.root is None or os.path.lexists(path):
            return path
        found = "/" if os.path.isabs(name) else self.root
        for part in name.split("/"):
            if not os.path.lexists(os.path.join(found, part)):
                _, forms = self._content(found)
                part = forms.get(unicodedata.normalize("NFC", part), [part])[0]
            found = os.path.join(found, part)
        return found if os.path.lexists(found) else path

    def identity(self, name: str) -> str:
        """Return a text that is equal for all names of a file: its path below the root."""
        if self.root is None or "\0" in name:  # which no file has in its name
            return unicodedata.normalize("NFC", os.path.normpath(name))
        folder, base = os.path.split(self.path(name))
        if folder not in self._real:
            self._real[folder] = os.path.realpath(folder)
        path = os.path.join(self._real[folder], base)
        links, forms = self._content(self._real[folder])
        if base in links:
            path = os.path.realpath(path)
        if path.startswith(self._real_root):
            path = path[len(self._real_root) :]
        else:  # of a link that leads elsewhere
            path = os.path.relpath(path, self._real_root)
        composed = unicodedata.normalize("NFC", base)
        # Two files may have names that differ in their form only.
        return path if len(forms.get(composed, ())) > 1 else unicodedata.normalize("NFC", path)

    def _content(self, folder: str) -> tuple[set[str], dict[str, list[str]]]:
        """Return a folder's links, and its names beyond ASCII by their composed form."""
        if folder not in self._listed:
            links: set[str] = set()
            forms: dict[str, list[str]] = {}
            # Pictures in a folder that is missing are reported when they are read.
            with suppress(OSError, ValueError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        links.add(entry.name)
                    if not entry.name.isascii():
                        composed = unicodedata.normalize("NFC", entry.name)
                        forms.setdefault(composed, []).append(entry.name)
            self._listed[folder] = links, forms
        return self._listed[folder]


def read_picture(row: Row, source: str | os.PathLike[str], folder: PictureFolder) -> bytes:
    """Return the image file of a row of the file ``source``.

    Raises:
        OSError: if it cannot be read, or lies outside of the folder.
        ValueError: if there is no folder.
    """
    if row.stored is None:
        if folder.root is None:
            raise ValueError(f"{row.image}: the folder of its picture is not known")
        return read_file(folder.path(row.image), folder.root)
    if row.stored.content is not None:
        return bytes(row.stored.content)
    with open(source, "rb") as file:
        return os.pread(file.fileno(), row.stored.size, row.stored.start or 0)


class PictureIdentity:
    """Give rows the digests of their pictures.

    Args:
        root: folder that image paths are relative to; None: unknown.
        by_content: compare pictures by their bytes, for which every one is read.

    Attributes:
        unread: number of pictures that could not be read and are compared by their place.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, by_content: bool = False
    ) -> None:
        self.folder, self.by_content = PictureFolder(root), by_content
        self.unread = 0
        self._known: dict[bytes, bytes] = {}

    def of(self, row: Row, number: int, source: str | os.PathLike[str]) -> tuple[bytes, bytes]:
        """Return the digest that all rows of an image share, and that of this row's picture.

        Both are equal unless the row has an image id.

        Args:
            number: of the source among all.
            source: file of the row.
        """
        stored = row.stored
        if stored is not None and stored.content is not None:
            picture = digest_of(b"c", stored.content)
        elif stored is None:
            picture = digest_of(b"p", os.fsencode(self.folder.identity(row.image)))
        elif stored.digest:
            picture = digest_of(b"h", stored.digest.encode())
        else:
            picture = digest_of(b"p", f"{number},{stored.start}".encode())
        if self.by_content and (stored is None or stored.content is None):
            picture = self._content(picture, row, source)
        key = picture if row.image_id is None else digest_of(b"i", row.image_id.encode())
        return key, picture

    def _content(self, picture: bytes, row: Row, source: str | os.PathLike[str]) -> bytes:
        """Return the digest of a picture's bytes; that of its place if it cannot be read."""
        if picture not in self._known:
            if len(self._known) >= _KNOWN_FILES:
                self._known.clear()
            try:
                self._known[picture] = digest_of(b"c", read_picture(row, source, self.folder))
            except (OSError, ValueError):
                self._known[picture] = picture
                self.unread += 1
        return self._known[picture]


class Copies:
    """Count pictures that are equal to another one, but count as different images.

    Only pictures of equal size are read, of the first `_COMPARED` images; check-data reads all.
    """

    def __init__(self, folder: PictureFolder) -> None:
        self.folder = folder
        # By image and picture: a row, its source, and the digest of the bytes if it is known.
        self._images: dict[tuple[bytes, bytes], tuple[Row, str, bytes | None]] = {}

    def add(self, key: bytes, picture: bytes, row: Row, source: str) -> None:
        """Add a row with the digests that `PictureIdentity.of` gives it."""
        if (key, picture) in self._images or len(self._images) >= _COMPARED:
            return
        if row.stored is None or row.stored.content is None:
            self._images[key, picture] = row, source, None
        else:  # its bytes are gone with the next row
            stored = row.stored._replace(content=None)
            self._images[key, picture] = row._replace(stored=stored), source, picture

    def pairs(self) -> list[tuple[str, str]]:
        """Return every copy's name, and that of the picture that it equals."""
        sizes: dict[int, list[tuple[bytes, Row, str, bytes | None]]] = {}
        for (key, _), (row, source, digest) in self._images.items():
            with suppress(OSError, ValueError):  # a missing picture
                size = (
                    row.stored.size if row.stored else os.stat(self.folder.path(row.image)).st_size
                )
                sizes.setdefault(size, []).append((key, row, source, digest))
        found = []
        for alike in sizes.values():
            first: dict[bytes, tuple[bytes, str]] = {}
            for key, row, source, digest in alike if len(alike) > 1 else ():
                with suppress(OSError, ValueError):
                    digest = digest or digest_of(b"c", read_picture(row, source, self.folder))
                    other, name = first.setdefault(digest, (key, row.image))
                    if other != key:
                        found.append((row.image, name))
        return found


def warn_of_copies(paths: Iterable[str]) -> None:
    """Warn of files with equal bytes among the first pictures of data sets that have no table."""
    copies = Copies(PictureFolder("/"))
    for path in islice(paths, _COMPARED):
        name = path.encode(errors="surrogatepass")  # JSON may hold half of a pair of surrogates
        copies.add(name, name, Row("", path, [""], None), "")
    if found := copies.pairs():
        logging.warning(
            "%d pictures are copies of another one, first %r of %r: they count as different "
            "images, which can be negatives of each other; name one file in the rows of all",
            len(found),
            *found[0],
        )
