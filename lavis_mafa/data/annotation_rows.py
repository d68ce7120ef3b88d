"""One record of an annotation file: its columns, its check, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lavis_mafa.data.data_folders import IMAGE_SUFFIXES

IMAGE_KEYS = (
    "image",
    "image_path",
    "filename",
    "filepath",
    "file_name",
    "path",
    "img",
    *IMAGE_SUFFIXES,  # as in webdataset
)
CAPTION_KEYS = ("caption", "text", "title", "captions", "sentence", "sentences", "txt")
_IMAGE_ID_KEY = "image_id"
_LISTED_KINDS, _LISTED_PLACES = 20, 10  # of problems, and places of each, in a message
MAX_UNUSABLE = 0.01  # default of the share of records that may be left out
_LONGEST_PATH = 1000  # characters; an image in base64 has more, and no space
_CONVERSATIONS = (
    "conversations, as of LLaVA or ShareGPT, which are not read: write a record for each picture, "
    "with the answer as its caption"
)
# What a file with such a column holds, and what to do.
_NOT_READ = {
    "conversations": _CONVERSATIONS,
    "messages": _CONVERSATIONS,
    "url": (
        "metadata of pictures, which are not downloaded: get them by img2dataset, and name the "
        ".tar files or the folder that it writes"
    ),
    "images": (
        "a list inside an object, as in Karpathy's format (dataset_coco.json): write the list of "
        "one split itself, with 'image' ('filepath' and 'filename' joined) and 'caption' (the "
        "'raw' of each of the 'sentences')"
    ),
}


class StoredImage(NamedTuple):
    """An image inside a parquet, Arrow or tar file.

    Attributes:
        name: the path that the row gives with the bytes, else file and row.
        start: first byte of the image in the file; None if its bytes lie nowhere in it as they are.
        size: in bytes.
        row: number of the row in the file, from 0.
        content: the bytes of the image file, a buffer of pyarrow; None if they are not read.
        digest: of the picture, by a shard's ``.json``, such as img2dataset's ``sha256``.
    """

    name: str
    start: int | None
    size: int
    row: int
    content: Any = None
    digest: str | None = None


class Row(NamedTuple):
    """One record. `captions` has at least one entry; an absent caption is an empty string."""

    where: str
    image: str
    captions: list[str]
    image_id: str | None
    stored: StoredImage | None = None  # None: `image` is the path of a file
    group_id: str | None = None


class Problem(NamedTuple):
    """A record that cannot be used.

    Attributes:
        where: its place in the file.
        message: what was expected, equal for all records with the same fault.
        got: what was found, shortened; "" if the message says it.
        fatal: whether it concerns more than this record, such as a damaged file: how many records
            are lost is unknown, so that none may be left out.
    """

    where: str
    message: str
    got: str = ""
    fatal: bool = False

    def __str__(self) -> str:
        found = f", got {self.got}" if self.got else ""
        return f"{self.where}: {self.message}{found}"


class PassedOver(NamedTuple):
    """Files of a folder, or members of a tar file, that belong to no sample: their number and the
    name of the first."""

    members: int
    first: str


class NoGroups(NamedTuple):
    """A file none of whose records has the column of groups, and the message if no file has."""

    problem: Problem


class Refusals:
    """Counts problems, and tells those of one kind in one line.

    Attributes:
        count: of all problems.
        fatal: whether one of them is.
    """

    def __init__(self) -> None:
        self.count, self.fatal = 0, False
        # The first problem and the first places of each kind, and their number.
        self._kinds: dict[tuple[str, str], tuple[Problem, list[str]]] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._others = 0

    def add(self, source: Any, problem: Problem) -> None:
        """Add a problem of a file, or of another source; "" for none."""
        self.count += 1
        self.fatal |= problem.fatal
        kind = str(source), problem.message
        if kind not in self._kinds and len(self._kinds) == _LISTED_KINDS:
            self._others += 1
            return
        _, places = self._kinds.setdefault(kind, (problem, []))
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if len(places) < _LISTED_PLACES:
            places.append(problem.where)

    def lines(self) -> list[str]:
        """Return a line for each kind, with the places of its first problems."""
        lines = []
        for kind, (problem, places) in self._kinds.items():
            where = ", ".join(filter(None, [kind[0], *places]))
            if self._counts[kind] > len(places):
                where += f" and {self._counts[kind] - len(places)} more"
            lines.append(str(problem._replace(where=where)))
        return [*lines, f"and {self._others} others"] if self._others else lines

    def end(self, what: str, hint: str = "") -> None:
        """Raise ValueError, "``what`` cannot be used", if there is any problem."""
        if self.count:
            lines = [f"{what} cannot be used:", *self.lines(), *filter(None, [hint])]
            raise ValueError("\n  ".join(lines))

    def end_with_share(self, records: int, allowed: float) -> None:
        """Raise ValueError for a fatal problem, or if more than a share of the records has one."""
        if not self.fatal and self.count <= allowed * records:
            return
        # How many records of a damaged file are lost is unknown.
        what = "the data" if self.fatal else f"{self.count} of {records} records"
        if self.fatal or self.count == records:
            raise ValueError(f"{what} cannot be used: " + "\n  ".join(self.lines()))
        self.end(what, f"repair them: a share of {allowed:g} may be left out (max_unusable)")


class PairColumns:
    """Names of the columns of image, caption and ids, and the check of a record against them.

    Args:
        image_key, caption_key: None: the first of `IMAGE_KEYS` and of `CAPTION_KEYS` that exists.
        image_id_key: None: `_IMAGE_ID_KEY`, if it exists.
        group_id_key: None: there are no groups.
    """

    def __init__(
        self,
        image_key: str | None = None,
        caption_key: str | None = None,
        image_id_key: str | None = None,
        group_id_key: str | None = None,
    ) -> None:
        self.image_key = image_key
        self.caption_key = caption_key
        self.image_id_key = image_id_key or _IMAGE_ID_KEY
        self.group_id_key = group_id_key
        self._needs_id = image_id_key is not None
        self._records = self._with_group = 0
        self._names: list[str] = []  # columns, where they had to be chosen

    def choose(self, names: Sequence[str]) -> str | None:
        """Choose the columns of a header; return what is wrong with it, None if nothing is."""
        wrong = self._choose(names)
        read = (self.image_key, self.caption_key, self.image_id_key, self.group_id_key)
        twice = next((name for name in read if names.count(name) > 1), None)
        if wrong is None and twice is not None:  # only the last would be read
            wrong = f"column {short(twice)} occurs {names.count(twice)} times; rename or remove one"
        return wrong

    def missing_at_end(self) -> NoGroups | None:
        """Return what is missing if no record had the column of groups; call it after the last.

        A single record or file may lack it: its samples are in no group.
        """
        if self.group_id_key is None or self._with_group or not self._records:
            return None
        found = f" (found {', '.join(self._names)})" if self._names else ""
        message = (
            f"no group_id column: {short(self.group_id_key)} is in none of {self._records} "
            f"records{found}; set group_id_key to its name"
        )
        return NoGroups(Problem("whole file", message, fatal=True))

    def _choose(self, names: Collection[str]) -> str | None:
        self._names = list(map(short, names))[:10]
        chosen = []
        for kind, key, known in (
            ("image", self.image_key, IMAGE_KEYS),
            ("caption", self.caption_key, CAPTION_KEYS),
            ("image_id", self.image_id_key, ()),
        ):
            wanted = known if key is None else (key,)
            name = next((name for name in wanted if name in names), None)
            if name is None and (kind != "image_id" or self._needs_id):
                return _no_column(kind, wanted, names, self._records > 0)
            chosen.append(name)
        self.image_key, self.caption_key = chosen[:2]
        return None

    def row(self, where: str, record: Any) -> Row | Problem:
        """Return the checked content of a record, or what is wrong with it."""
        if not isinstance(record, dict):
            return Problem(where, "expected an object with an image and a caption", short(record))
        needed = {self.image_key, self.caption_key}
        if self._needs_id:
            needed.add(self.image_id_key)
        if not needed <= record.keys():
            missing = self._choose(record)
            if missing:
                return Problem(where, missing)
        image, captions = record[self.image_key], record[self.caption_key]
        stored = image if isinstance(image, StoredImage) else None
        name = stored.name if stored else image
        if not isinstance(name, str) or not name.strip() or _is_base64(name):
            expected = "expected the path of an image file, or in parquet its bytes"
            if isinstance(name, list):
                expected += "; write a record for each picture"
            return Problem(where, f"{self.image_key!r}: {expected}", short(name))
        if not isinstance(captions, list):
            captions = [captions]
        captions = ["" if caption is None else caption for caption in captions] or [""]
        if not all(isinstance(caption, str) for caption in captions):
            expected = "expected a string or strings"
            return Problem(where, f"{self.caption_key!r}: {expected}", short(captions))
        self._records += 1
        self._with_group += self.group_id_key in record
        ids: list[str | None] = []
        for key in (self.image_id_key, self.group_id_key):
            value = None if key is None else record.get(key)
            if isinstance(value, bool) or not isinstance(value, (str, int, type(None))):
                expected = (
                    "expected a string or an integer (pandas makes floats of integers with gaps: "
                    "use Int64)"
                )
                return Problem(where, f"{key!r}: {expected}", short(value))
            # 7 and "7" are equal, as CSV cannot tell them apart.
            ids.append(None if value in (None, "") else str(value))
        try:
            "".join((name, *captions, *filter(None, ids))).encode("utf-8")
        except UnicodeEncodeError:
            return Problem(where, "expected text in UTF-8", short([name, *captions]))
        return Row(where, name, captions, ids[0], stored, ids[1])


def _is_base64(name: str) -> bool:
    return len(name) > _LONGEST_PATH and name.isascii() and " " not in name


def _no_column(kind: str, wanted: Collection[str], names: Collection[str], in_others: bool) -> str:
    """Return the message that a record has none of the wanted columns, which others may have."""
    found = ", ".join(map(short, list(names)[:10])) or "nothing"
    cure = (
        f'write records such as {{"image": "a.jpg", "caption": "a dog"}}, or set {kind}_key (an '
        f"option --{kind}-key, or in build_info) to the column's name"
    )
    if len(wanted) == 1:  # the user has named it, or the first record has it
        cure = "name one of them"
    if in_others:
        cure = "records before it have that: use one name in all of them"
    seems = next((_NOT_READ[name] for name in map(str.lower, names) if name in _NOT_READ), None)
    if seems is not None:
        cure = f"this seems to be {seems}"
    return f"no {kind} column: expected {' or '.join(wanted)}, found {found}; {cure}"


def short(value: Any) -> str:
    """Return a value for a message, shortened and printable."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
