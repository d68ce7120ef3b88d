"""Remove secrets from what is written: logs, checkpoints, pages, model cards and loggers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

HIDDEN = "(hidden)"
# Last words of the names of secrets: of those that are nothing else, and of others.
_SURE = frozenset(
    "password passwords passwd passphrase passcode pwd secret secrets apikey authorization "
    "credential credentials".split()
)
_OTHER = frozenset("token pass pw auth bearer cookie sig".split())
# Words before "key", and those before "token" that mean a piece of text.
_KEYS = frozenset(
    "api access private secret ssh encryption signing account session master deploy auth "
    "subscription shared".split()
)
_TEXT_TOKENS = frozenset(
    "mask pad sep cls bos eos unk special query text image start end decoder encoder prompt dec "
    "enc yes no per".split()
)
# Secrets that are known by their form, whatever they stand below.
_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bsk-(?:[a-z0-9]+-)*\w{20,}|\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{16,}"
    r"|\b[sr]k_(?:live|test)_\w{10,}|\bA[KS]IA[0-9A-Z]{16}\b|\bxox[a-z]-[\w-]{8,}"
    r"|\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]*|\bAIza[\w-]{30,}|\b(?:nvapi|pypi)-[\w-]{20,}"
    r"|(?i:(?<=bearer )(?=\S*\d)\S{8,}|(?<=authorization: basic )\S+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"]+")
# A user with a password before a host, in a text without "://".
_LOGIN = re.compile(r"(?<![\w:/])[A-Za-z_][\w.+%-]*:[^\s/@:'\"]+@(?=\d+\.\d+\.\d+\.\d+|[A-Za-z])")
_NAMED = re.compile(r"([\w.-]+)(['\"]?\s*[=:]\s*['\"]?)([^\s'\",;&)\]}]+)")
_OPTION = re.compile(r"(?<!\S)(--[\w.-]+)(\s+)([^\s-]\S*)")


def redact(value: Any, name: str = "") -> Any:
    """Return plain data without secrets.

    Hidden are values below keys such as ``api_key`` or ``password``, in texts ``<key>=<value>`` and
    ``--<key> <value>`` of such keys, tokens of well-known forms, what an environment variable of
    such a name holds, passwords before a host, and in URLs also the query and the fragment, where
    signed URLs have their signature.

    Args:
        name: dotted path of the key that the data are under.
    """
    if isinstance(value, Mapping):
        return {str(key): redact(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        before = ["", *value]
        return [
            HIDDEN if _is_option(one) and isinstance(item, str) and item[:2] != "--"
            else redact(item, name)
            for one, item in zip(before, value, strict=False)
        ]  # fmt: skip
    strength = max(map(_strength, name.split(".")))
    if isinstance(value, bool | None):
        return value
    if not isinstance(value, str):  # such as `pairs_per_pass`
        return HIDDEN if strength == 2 else value
    if not value:
        return value
    option = re.match(r"([-\w.]+)=", value)  # such as the options of a command line
    if option and _strength_of_value(option[1], value[option.end() :]):
        return HIDDEN
    return HIDDEN if strength and _strength_of_value(name, value) else _without_secrets(value)


def _strength(name: str) -> int:
    """Return 2 if a name is surely one of a secret, 1 if it is for a text, 0 otherwise."""
    snake = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    *before, last = ["", "", *re.findall(r"[a-z]+", snake)][-2:]
    if last in _SURE or (last in ("key", "keys") and before[0] in _KEYS):
        return 2
    return int(last in _OTHER and not (last in ("token", "pass") and before[0] in _TEXT_TOKENS))


def _strength_of_value(name: str, text: str) -> int:
    """Return the `_strength` of a dotted name; 0 if its text is a number, but no password."""
    strength = max(map(_strength, name.split(".")))
    plain = re.fullmatch(r"[-+.\de]+|None|null|True|False", text)
    return 0 if plain and strength < 2 else strength


def _is_option(word: Any) -> bool:
    """Return whether the word of a command line is an option of a secret, without its value."""
    named = isinstance(word, str) and re.fullmatch(r"--?[\w.-]+|[\w-]+(\.[\w-]+)+", word)
    return bool(named) and _strength(word.rpartition(".")[2]) > 0


def _without_secrets(text: str) -> str:
    """Hide the secrets inside a text."""
    text = _URL.sub(lambda found: _clean_url(found[0]), text)
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    text = _TOKENS.sub(HIDDEN, text)
    text = _OPTION.sub(_hide_named, text)
    text = _NAMED.sub(_hide_named, text)
    for name, value in os.environ.items():
        if len(value) >= 6 and value in text and name not in ("PWD", "OLDPWD") and _strength(name):
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, text)
    return text


def _hide_named(found: re.Match[str]) -> str:
    name, between, value = found[1], found[2], found[3]
    strength = _strength_of_value(name, value)
    # "a token: ..." may be a caption.
    return f"{name}{between}{HIDDEN}" if strength > (":" in between) else found[0]


def _clean_url(url: str) -> str:
    # A password may contain a slash; what follows a port may contain an @.
    url = re.sub(r"://[^/@\s:]*:(?!\d+[/?#])[^@\s]*@", "://", url)
    try:
        parts = urlsplit(url)
    except ValueError:  # such as an unclosed bracket: nobody knows which part is the password
        return HIDDEN
    host = parts.netloc.rpartition("@")[2]
    if (host, "", "") == (parts.netloc, parts.query, parts.fragment):
        return url
    cleaned = urlunsplit((parts.scheme, host, parts.path, "", ""))
    return f"{cleaned}{'?' + HIDDEN if parts.query or parts.fragment else ''}"
