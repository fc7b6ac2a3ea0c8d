"""Timings as a table of comma-separated values, in the columns of this module.

The first line names the columns; ``op`` and ``seconds`` (of one call) are in every row, and of the others an
``op`` has those of its line here. Cells of columns that it does not have are empty; lines that begin with #
are remarks.

=============================== ======================================== ==============================
op                              columns                                  may be left empty
=============================== ======================================== ==============================
``product``                     m, n, k, dtype: [m, k] times [k, n]      batch: so many of them, 1
``attention``                   batch, heads, seq, head_dim, causal      kv_heads: as heads; dtype:
``attention_grad``              (true or false), forward or backward     bfloat16
``memory``                      bytes, those read and those written: a
                                copy, element-wise ops, a norm
``launch``                      kernels that the host issued in          mode: ``eager``, ``fused`` or
                                ``seconds``, waiting for none            ``compiled``; eager
``all_reduce``, ``all_gather``, ranks, bytes: of the whole tensor, as    nodes among which ranks are
``reduce_scatter``,             :mod:`distsim.hardware.collectives`      divided evenly, 1
``all_to_all``, ``broadcast``,  says
``scatter``, ``gather``,
``send``, ``shift``
=============================== ======================================== ==============================
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path

from distsim.calibration.files import read_text
from distsim.calibration.timings import (
    MAX_BYTES,
    MAX_RANKS,
    MAX_SIZE,
    AttentionShape,
    Call,
    CollectiveCall,
    LaunchCall,
    Timing,
    attention,
    check_dtype,
    check_seconds,
    memory,
    product,
)
from distsim.errors import TimingsError, shortened
from distsim.hardware import COLLECTIVES
from distsim.ir.kernel_rates import WAYS_TO_LAUNCH
from distsim.suggestions import did_you_mean

_ATTENTION = ("batch", "heads", "seq", "head_dim", "causal")
_NEEDED: dict[str, tuple[str, ...]] = {
    "product": ("m", "n", "k", "dtype"),
    "attention": _ATTENTION,
    "attention_grad": _ATTENTION,
    "memory": ("bytes",),
    "launch": ("kernels",),
    **dict.fromkeys(COLLECTIVES, ("ranks", "bytes")),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "product": ("batch",),
    "attention": ("kv_heads", "dtype"),
    "attention_grad": ("kv_heads", "dtype"),
    "launch": ("mode",),
    **dict.fromkeys(COLLECTIVES, ("nodes",)),
}
COLUMNS = (
    *("op", "seconds", "m", "n", "k", "dtype", "batch", "heads", "kv_heads", "seq", "head_dim", "causal"),
    *("bytes", "kernels", "mode", "ranks", "nodes"),
)
"""All columns, in the order in which a table is written."""

_MOST = {"bytes": MAX_BYTES, "kernels": 10**9, "ranks": MAX_RANKS, "nodes": MAX_RANKS}


def read_timings_csv(path: Path) -> list[Timing]:
    """Return the timings of a table; raises :class:`TimingsError` with the line and the column."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    names: list[str] | None = None
    found: list[Timing] = []
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            place = f"line {reader.line_num}"
            if not any(cells) or cells[0].startswith("#"):
                continue
            if names is None:
                names = _columns(cells, f"{path}, {place}")
                continue
            if len(cells) > len(names):
                raise TimingsError(
                    f"{path}, {place}: {len(cells)} cells in a table of {len(names)} columns; put quotes "
                    "around a cell with a comma"
                )
            row = {name: cell for name, cell in zip(names, cells, strict=False) if cell}
            found.append(_timing(row, path.name, place, f"{path}, {place}"))
    except csv.Error as error:
        raise TimingsError(f"{path}, line {reader.line_num}: {error}; is it comma-separated text?") from error
    if not found:
        raise TimingsError(f"{path} has no timings; give a line of names ({', '.join(COLUMNS[:3])}, ...)")
    return found


def _columns(cells: list[str], where: str) -> list[str]:
    names = [cell.lower() for cell in cells]
    for name in names:
        if name not in COLUMNS:
            hint = did_you_mean(name, COLUMNS) or f"; choose from {', '.join(COLUMNS)}"
            raise TimingsError(f"{where}: there is no column {shortened(name)}{hint}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TimingsError(f"{where}: column {twice} is named twice")
    for needed in ("op", "seconds"):
        if needed not in names:
            raise TimingsError(f"{where}: the first line names the columns, {needed} among them")
    return names


def _timing(row: Mapping[str, str], file: str, place: str, where: str) -> Timing:
    op = row.get("op", "")
    if op not in _NEEDED:
        hint = did_you_mean(op, _NEEDED)
        raise TimingsError(f"{where}, column op: {shortened(op)} is not one of {', '.join(_NEEDED)}{hint}")
    for column in _NEEDED[op]:
        if column not in row:
            raise TimingsError(f"{where}, column {column}: it is empty; {op} needs {', '.join(_NEEDED[op])}")
    allowed = ("op", "seconds", *_NEEDED[op], *_OPTIONAL.get(op, ()))
    for column in row:
        if column not in allowed:
            raise TimingsError(
                f"{where}, column {column}: {op} has none; leave the cell empty (it has {', '.join(allowed)})"
            )
    try:
        seconds = check_seconds(_seconds(row.get("seconds", ""), f"{where}, column seconds"))
        return Timing(_call(op, row, where), seconds, file, place)
    except TimingsError as error:
        said = str(error)
        raise TimingsError(said if said.startswith(where) else f"{where}: {said}") from error


def _call(op: str, row: Mapping[str, str], where: str) -> Call:
    def whole(column: str, default: int | None = None) -> int:
        return _whole(row.get(column), f"{where}, column {column}", _MOST.get(column, MAX_SIZE), default)

    dtype = check_dtype(row.get("dtype", "bfloat16"))
    if op == "product":
        return product(whole("m"), whole("n"), whole("k"), dtype, whole("batch", 1))
    if op in ("attention", "attention_grad"):
        heads, causal = whole("heads"), row["causal"].lower()
        if causal not in ("true", "false"):
            raise TimingsError(f"{where}, column causal: {shortened(causal)} is neither true nor false")
        sizes = (whole("batch"), heads, whole("kv_heads", heads), whole("seq"), whole("head_dim"))
        return attention(AttentionShape(*sizes, causal == "true"), dtype, op == "attention_grad")
    if op == "memory":
        return memory(whole("bytes"))
    if op == "launch":
        mode = row.get("mode", "eager")
        if mode not in WAYS_TO_LAUNCH:
            raise TimingsError(
                f"{where}, column mode: {shortened(mode)} is not one of {', '.join(WAYS_TO_LAUNCH)}"
            )
        return LaunchCall(whole("kernels"), mode)
    return check_ranks(CollectiveCall(op, whole("bytes"), whole("ranks"), whole("nodes", 1)))


def check_ranks(call: CollectiveCall) -> CollectiveCall:
    """Return a collective as it is; raises :class:`TimingsError` for ranks that cannot be."""
    if call.kind == "send" and call.ranks != 2:
        raise TimingsError(f"ranks={call.ranks}: a send has 2, who sends and who receives")
    if not 2 <= call.ranks <= MAX_RANKS:
        raise TimingsError(f"ranks={call.ranks}: a collective has 2 to {MAX_RANKS}")
    if call.nodes is not None and call.ranks % call.nodes:
        raise TimingsError(
            f"nodes={call.nodes} does not divide ranks={call.ranks}: give as many to each node"
        )
    return call


def _whole(text: str | None, where: str, most: int, default: int | None) -> int:
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,15}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise TimingsError(f"{where}: {shortened(text)} is no whole number from 1 to {most}")
    return int(text)


def _seconds(text: str, where: str) -> float:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,20})?(e[+-]?[0-9]{1,3})?", text, re.ASCII | re.IGNORECASE):
        raise TimingsError(f"{where}: {shortened(text)} is no number of seconds, as 0.00125 or 1.25e-3 is")
    return float(text)
