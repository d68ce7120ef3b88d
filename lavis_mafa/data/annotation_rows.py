"""One record of an annotation file: its columns, its check, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

IMAGE_KEYS = (
    "image",
    "image_path",
    "filename",
    "filepath",
    "file_name",
    "path",
    "img",
    "jpg",
    "jpeg",
    "png",
    "webp",
)
CAPTION_KEYS = ("caption", "text", "title", "captions", "sentence", "sentences", "txt")
_IMAGE_ID_KEY = "image_id"
_LISTED_PROBLEMS = 20
MAX_UNUSABLE = 0.01  # default of the share of records that may be left out
# Beginnings of JPEG, PNG, WebP and GIF files in base64; the shortest that are an image's are longer
# than this.
_BASE64 = ("data:image/", "/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")
_SHORTEST_BASE64 = 80
_CONVERSATIONS = {"conversations", "messages", "conversation"}
_EXPECTED = 'write an array of records: [{"image": "a.jpg", "caption": "a dog"}, ...]'


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
    """A record that cannot be used: its place in the file and what was expected.

    Attributes:
        fatal: whether it concerns more than this record, such as a damaged file: how many records
            are lost is unknown, so that none may be left out.
    """

    where: str
    message: str
    fatal: bool = False


class PassedOver(NamedTuple):
    """Files of a folder, or members of a tar file, that belong to no sample: their number and the
    name of the first."""

    members: int
    first: str


class Refusals:
    """Collects problems: counts all, and lists the first 20.

    Attributes:
        first: the first 20, and the number of the others, in lines.
    """

    def __init__(self) -> None:
        self.count = 0
        self._fatal = False
        self._first: list[str] = []

    def add(self, problem: str, fatal: bool = False) -> None:
        """Add a problem; `fatal` as in `Problem`."""
        self.count += 1
        self._fatal |= fatal
        if len(self._first) < _LISTED_PROBLEMS:
            self._first.append(problem)

    @property
    def first(self) -> list[str]:
        left = self.count - len(self._first)
        return [*self._first, f"and {left} more"] if left else self._first

    def end(self, what: str, hint: str = "") -> None:
        """Raise ValueError, "``what`` cannot be used", if there is any problem."""
        if self.count:
            lines = [f"{what} cannot be used:", *self.first, *filter(None, [hint])]
            raise ValueError("\n  ".join(lines))

    def end_with_share(self, records: int, allowed: float) -> None:
        """Raise ValueError for a fatal problem, or if more than a share of the records has one."""
        what = f"{self.count} of {records} records"
        if self._fatal and self.count == 1:
            raise ValueError(f"{what} cannot be used: {self._first[0]}")
        if self._fatal or self.count > allowed * records:
            share = f"max_unusable: {allowed:g} is the share that may be left out; repair the data"
            self.end(what, "" if self._fatal else f"{share}, or raise it (build_info)")


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

    def choose(self, names: Sequence[str]) -> str | None:
        """Choose the columns of a header; return what is wrong with it, None if nothing is."""
        wrong = self._choose(names)
        if wrong is not None:
            return wrong
        if self.group_id_key not in (None, *names):
            return _no_column("group_id", (str(self.group_id_key),), names)
        read = (self.image_key, self.caption_key, self.image_id_key, self.group_id_key)
        twice = next((name for name in read if names.count(name) > 1), None)
        if twice is None:
            return None
        # Only the last would be read.
        return f"column {short(twice)} occurs {names.count(twice)} times; rename or remove one"

    def missing_at_end(self) -> str | None:
        """Return what is missing if no record had the column of groups; call it after the last.

        A single JSON record may lack it: its sample is in no group.
        """
        if self.group_id_key is None or self._with_group or not self._records:
            return None
        return (
            f"no group_id column: {short(self.group_id_key)} is in none of {self._records} "
            "records; set group_id_key to its name"
        )

    def _choose(self, names: Collection[str]) -> str | None:
        chosen = []
        for kind, key, known in (
            ("image", self.image_key, IMAGE_KEYS),
            ("caption", self.caption_key, CAPTION_KEYS),
            ("image_id", self.image_id_key, ()),
        ):
            wanted = known if key is None else (key,)
            name = next((name for name in wanted if name in names), None)
            if name is None and (kind != "image_id" or self._needs_id):
                return _no_column(kind, wanted, names)
            chosen.append(name)
        self.image_key, self.caption_key = chosen[:2]
        return None

    def row(self, where: str, record: Any) -> Row | Problem:
        """Return the checked content of a record, or what is wrong with it."""
        if not isinstance(record, dict):
            return Problem(
                where, f"expected an object with an image and a caption, got {short(record)}"
            )
        needed = {self.image_key, self.caption_key}
        if self._needs_id:
            needed.add(self.image_id_key)
        if not needed <= record.keys():
            missing = self._choose(record)
            if missing:
                return Problem(where, missing)
        image_key, caption_key = self.image_key, self.caption_key
        image, captions = record[image_key], record[caption_key]
        stored = image if isinstance(image, StoredImage) else None
        name = stored.name if stored else image
        if not isinstance(name, str) or not name.strip():
            why = f"expected the path of an image, got {short(name)}"
            return Problem(where, f"{image_key!r}: {why}")
        if len(name) > _SHORTEST_BASE64 and name.startswith(_BASE64):
            why = f"got an image in base64, {short(name)}: store image files, or bytes in parquet"
            return Problem(where, f"{image_key!r}: expected the path of an image, {why}")
        if not isinstance(captions, list):
            captions = [captions]
        captions = ["" if caption is None else caption for caption in captions] or [""]
        if not all(isinstance(caption, str) for caption in captions):
            why = f"expected a string or strings, got {short(captions)}"
            return Problem(where, f"{caption_key!r}: {why}")
        try:
            image_id, group_id = self.ids(record)
            "".join((name, *captions)).encode("utf-8")
        except UnicodeEncodeError:
            return Problem(where, f"text is not valid UTF-8: {short([name, *captions])}")
        except ValueError as error:
            return Problem(where, str(error))
        return Row(where, name, captions, image_id, stored, group_id)

    def ids(self, record: dict[str, Any]) -> tuple[str | None, str | None]:
        """Return the ids of a record's image and of its group as text, None for none.

        7 and "7" are equal, as CSV cannot tell them apart.

        Raises:
            ValueError: if an id is neither a string nor an integer.
        """
        self._records += 1
        self._with_group += self.group_id_key in record
        found: list[str | None] = []
        for key in (self.image_id_key, self.group_id_key):
            value = None if key is None else record.get(key)
            if isinstance(value, bool) or not isinstance(value, (str, int, type(None))):
                raise ValueError(f"{key!r}: expected a string or an integer, got {short(value)}")
            found.append(None if value in (None, "") else str(value))
            (found[-1] or "").encode()  # fails for half of a surrogate pair
        return found[0], found[1]


def what_it_seems(record: Any) -> str | None:
    """Return what a record or a document is that cannot be read, and what to do; None if it is not
    one of the formats that people often have."""
    if isinstance(record, list):
        texts = len(record) > 1 and all(isinstance(one, str) for one in record)
        return f"a list in place of a record; {_EXPECTED}" if texts else None
    if not isinstance(record, dict) or not record:
        return None
    if record.keys() & _CONVERSATIONS:
        return (
            "conversations, as of LLaVA or ShareGPT, which are not read; " + _EXPECTED + ", with "
            "the answer's text as the caption and a record for each picture"
        )
    if _is_karpathy(record) or any(map(_is_karpathy, _list_in(record, "images"))):
        return (
            "Karpathy's format (dataset_coco.json, dataset_flickr30k.json), whose file has all "
            "splits; write a file for each 'split', with a record for each image: 'image', its "
            "'filepath' and 'filename' joined, and 'caption', the list of 'raw' of its 'sentences'"
        )
    wrapped = [key for key in record if any(isinstance(one, dict) for one in _list_in(record, key))]
    if wrapped and not record.keys() & {*IMAGE_KEYS}:
        return (
            f"lists of records under {', '.join(map(short, wrapped))}; write each list itself into "
            "a file of its own"
        )
    values = list(record.values())
    for kind in (list, dict):
        alike = all(isinstance(one, kind) for one in values)
        if alike and record.keys() & {*IMAGE_KEYS} and len(values) > 1:
            return (
                "columns in place of records, as pandas writes them; write records: "
                'DataFrame.to_json(orient="records")'
            )
    if _list_in(record, "image") or _list_in(record, "images"):
        return f"several images in one record, which are not read; {_EXPECTED}, one for each image"
    named = all("." in str(key).rsplit("/", 1)[-1] for key in record)
    named |= len(values) > 1 and all(isinstance(one, list | dict) for one in values)
    if named and not record.keys() & {*IMAGE_KEYS, *CAPTION_KEYS}:
        return f"a mapping from names in place of an array of records; {_EXPECTED}"
    return None


def _list_in(record: dict[str, Any], key: str) -> list[Any]:
    found = record.get(key)
    return found if isinstance(found, list) else []


def _is_karpathy(record: Any) -> bool:
    sentences = _list_in(record, "sentences") if isinstance(record, dict) else []
    return any(isinstance(one, dict) and "raw" in one for one in sentences)


def _no_column(kind: str, wanted: Collection[str], names: Collection[str]) -> str:
    found = ", ".join(map(short, list(names)[:10])) or "nothing"
    cure = f"rename the column, or name it by --{kind}-key or build_info.{kind}_key"
    if kind == "image" and "url" in map(str.lower, names):
        cure = (
            "this is metadata of pictures, which are not downloaded: get them by img2dataset, and "
            "name the .tar files or the folder that it writes"
        )
    if _CONVERSATIONS & set(names):
        cure = "conversations are not read: write a caption for each picture"
    return f"no {kind} column: expected {' or '.join(wanted)}, found {found}; {cure}"


def short(value: Any) -> str:
    """Return a value for a message, shortened and printable."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
