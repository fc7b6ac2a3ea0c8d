"""Options in the text that names a model: ``name=value,...``, each value read as what it must be."""

from __future__ import annotations

import re

from distsim.errors import ImportModelError

MAX_SIZE = 2**31


def split_options(text: str, what: str) -> dict[str, str]:
    """Return the options in a text; ``what`` begins the errors."""
    found: dict[str, str] = {}
    for item in text.split(",") if text else ():
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ImportModelError(f"{what}: {item!r} must be name=number")
        if found.setdefault(key, value.strip()) != value.strip():
            raise ImportModelError(f"{what}: {item!r} after {key}={found[key]}; give {key} once")
    return found


def read_number(key: str, text: str, least: int = 1) -> int:
    """Return a whole number."""
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not least <= int(text) <= MAX_SIZE:
        raise ImportModelError(f"{key}={text} must be a whole number from {least} to {MAX_SIZE}")
    return int(text)


def read_decimal(key: str, text: str) -> float:
    """Return a positive number."""
    if not _is_decimal(text) or not 0 < float(text) <= MAX_SIZE:
        raise ImportModelError(f"{key}={text} must be a positive decimal number of at most {MAX_SIZE}")
    return float(text)


def read_coefficient(key: str, text: str) -> float:
    """Return a number of at least 0."""
    if not _is_decimal(text) or not float(text) <= MAX_SIZE:
        raise ImportModelError(f"{key}={text} must be a decimal number from 0 to {MAX_SIZE}")
    return float(text)


def read_rate(key: str, text: str) -> float:
    """Return a number from 0 to below 1."""
    if not _is_decimal(text) or not float(text) < 1:
        raise ImportModelError(f"{key}={text} must be a decimal number from 0 to below 1")
    return float(text)


def read_flag(key: str, text: str) -> bool:
    """Return true or false."""
    if text not in ("true", "false"):
        raise ImportModelError(f"{key}={text} must be true or false")
    return text == "true"


def _is_decimal(text: str) -> bool:
    return len(text) <= 12 and re.fullmatch(r"[0-9]+(\.[0-9]+)?", text, re.ASCII) is not None
