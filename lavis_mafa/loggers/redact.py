"""Remove secrets from a config before it is sent elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

HIDDEN = "(hidden)"
# Words, or pairs of words, of the names of keys whose texts are secrets.
_SECRET = re.compile(
    r"(^|[^a-z])(password|passwd|passphrase|secret|secrets|token|credential|credentials|auth"
    r"|authorization|(api|access|private|secret)[_-]?key)($|[^a-z])"
)


def redact(value: Any, name: str = "") -> Any:
    """Return plain data without secrets.

    Hidden are texts below keys such as ``api_key`` or ``password``, texts ``<key>=<value>`` of such
    keys, and in URLs the user, the password, the query and the fragment, where signed URLs have
    their signature.

    Args:
        name: dotted path of the key that the data are under.
    """
    if isinstance(value, Mapping):
        return {str(key): redact(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    option = re.match(r"([-\w.]+)=", value)  # such as the options of a command line
    is_secret = _SECRET.search(name.lower()) or (option and _SECRET.search(option[1].lower()))
    return HIDDEN if is_secret else _without_credentials(value)


def _without_credentials(text: str) -> str:
    return re.sub(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"]+", lambda found: _clean_url(found[0]), text)


def _clean_url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:  # such as an unclosed bracket: nobody knows which part is the password
        return HIDDEN
    host = parts.netloc.rpartition("@")[2]
    if (host, "", "") == (parts.netloc, parts.query, parts.fragment):
        return url
    cleaned = urlunsplit((parts.scheme, host, parts.path, "", ""))
    return f"{cleaned}{'?' + HIDDEN if parts.query or parts.fragment else ''}"
