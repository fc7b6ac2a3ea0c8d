"""A row of a table of measurements: reading it, its cells as numbers and as text in one spelling.

Tables are files of others: what is not understood is refused by name, and nothing is taken on trust.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from distsim.errors import DistsimError, shortened

Row = Mapping[str, str]
"""Cells by the name of their column; a column that a table lacks is an empty cell."""

MAX_FILE_BYTES = 1 << 26
"""Far more than all published measurements of training are."""

NOTHING = ("", "-", "--", "?", "n/a", "na", "nan", "none given", "not given", "not stated", "unknown")
"""What tables write where a source says nothing."""


REQUIRED = (
    *(("framework",), ("hw_gpu",), ("seq",), ("model", "n_layers")),
    *(("global_batch", "n_microbatches"), ("n_gpus", "dp")),
)
"""Columns that a table must have, of each of these one."""

FIGURES = ("iter_time_s", "peak_mem_gb")
"""Columns of what was measured."""


class MissingFeatureError(DistsimError, ValueError):
    """What a row needs, and distsim or the row lacks: a layout, a model, a figure; the text says it."""


def read_rows(paths: Sequence[Path]) -> list[dict[str, str]]:
    """Return the rows of tables (CSV with a line of names); ``table`` is the name of the file of each.

    Names of columns are taken in any case; a row without ``id`` gets the number of its line. Raises
    :class:`DistsimError` for a file that is none, lacks a column of ``REQUIRED``, or is larger than
    ``MAX_FILE_BYTES``, and for rows of the same id and what was measured that is no number.
    """
    return [row for path in paths for row in _read(path)]


def published_rows() -> list[dict[str, str]]:
    """Return the published steps that come with distsim: each names its ``source`` and ``source_url``."""
    with as_file(files("distsim.truth") / "published.csv") as path:
        return _read(path)


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise DistsimError(f"{path} is not a file; give the path of a table of measurements (.csv)")
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise DistsimError(
            f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; give its rows in smaller files"
        )
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        names = [name.strip().lower() for name in next(reader, list[str]())]
        if any(set(names).isdisjoint(group) for group in REQUIRED) or len(set(names)) < len(names):
            needed = ", ".join(" or ".join(group) for group in REQUIRED)
            raise DistsimError(
                f"{path}: the first line must name the columns, each once, among them {needed}; it names "
                f"{shortened(', '.join(names), 200)}"
            )
        found: dict[str, dict[str, str]] = {}
        for cells in reader:
            if any(cells):
                row = dict(zip(names, map(str.strip, cells), strict=False))
                own = row.get("id") or f"line {reader.line_num}"
                if own in found:
                    raise DistsimError(
                        f"{path}, line {reader.line_num}: the id {shortened(own)} is that of a row before "
                        "it; give each row its own"
                    )
                found[own] = {**row, "id": own, "table": path.stem}
                _check_figures(found[own], path)
        return [*found.values()]
    except UnicodeDecodeError as error:
        raise DistsimError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise DistsimError(f"{path} is not a table of comma-separated values: {error}") from error


def _check_figures(row: Row, path: Path) -> None:
    """Raise :class:`DistsimError` where what was measured is no number: it would count as not measured."""
    for column in FIGURES:
        try:
            decimal(row, column)
        except MissingFeatureError:
            raise DistsimError(
                f"{path}, row {row['id']}: {column} is {shortened(row[column])}, and must be a positive "
                "number; leave it empty where it was not measured"
            ) from None


def cell(row: Row, column: str) -> str:
    """Return a cell, nothing for one that says that its source says nothing.

    A ? behind marks what was inferred, and is left out.
    """
    text = row.get(column, "").strip().rstrip("?").strip()
    return "" if text.lower() in NOTHING else text


def plain(row: Row, column: str) -> str:
    """Return a cell in lower case, with - for all dashes and underscores, and single spaces.

    >>> plain({"schedule": "Zero Bubble  ZB_1P?"}, "schedule")
    'zero bubble zb-1p'
    """
    text = re.sub(r"[_\u2010-\u2015\u2212]", "-", cell(row, column).lower())
    return re.sub(r"\s+", " ", text)


def without_remark(text: str) -> str:
    """Return a text without what stands in brackets, or behind a comma or a semicolon.

    >>> without_remark("1f1b (as in megatron), 4 layers a stage")
    '1f1b'
    """
    return re.split(r"[,;]", re.sub(r"\([^()]*\)", "", text))[0].strip()


def number(row: Row, column: str, default: int | None = None) -> int:
    """Return the whole number in a column, or ``default`` if it is empty.

    Raises :class:`MissingFeatureError` where there is neither.

    >>> number({"global_batch": "1,536?"}, "global_batch")
    1536
    """
    text = cell(row, column)
    if not text and default is not None:
        return default
    if not re.fullmatch(r"([0-9]{1,12}|[0-9]{1,3}(,[0-9]{3}){1,3})(\.0*)?", text, re.ASCII):
        raise MissingFeatureError(f"a number in column {column}, not {text!r:.60}")
    return int(text.partition(".")[0].replace(",", ""))


def decimal(row: Row, column: str) -> float | None:
    """Return the positive number in a column, None if it is empty.

    Raises :class:`MissingFeatureError` for anything else.
    """
    text = cell(row, column)
    if not text:
        return None
    if not re.fullmatch(
        r"([0-9]{1,12}\.?[0-9]{0,20}|\.[0-9]{1,20})(e[+-]?[0-9]{1,2})?", text, re.ASCII | re.IGNORECASE
    ):
        raise MissingFeatureError(f"a number in column {column}, not {text!r:.60}")
    return float(text) or None


def says_zero(row: Row) -> bool:
    """Whether a column says what is divided over data-parallel ranks."""
    return bool(cell(row, "zero") or plain(row, "fsdp"))


def zero_of(row: Row, usual: int = 0) -> int:
    """Return ZeRO's stage, by its column, else by the strategy of FSDP; ``usual`` where both are empty."""
    sharding = plain(row, "fsdp")
    if cell(row, "zero") or not sharding:
        return number(row, "zero", usual)
    if re.search(r"no-shard|\bddp\b|^no(ne)?$", sharding):
        return 0
    if re.search(r"full-shard|hybrid|hsdp|fsdp|shard-grad-op|zero-?3|^yes", sharding):
        return 3
    raise MissingFeatureError(f"fsdp {sharding!r:.60}")
