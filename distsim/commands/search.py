"""The command ``distsim search``: the best plans of a model on a cluster, or on several sizes of it."""

from __future__ import annotations

import argparse
import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim.commands.attempt import OUT_OF_MEMORY
from distsim.commands.cluster import add_settings
from distsim.commands.json_output import PRINTED, add_json, check_json, teller, write_json
from distsim.commands.model import add_model_options, model_options
from distsim.errors import PlanError
from distsim.hardware import load_cluster
from distsim.ir import Topology
from distsim.plan_search.results import SearchResult
from distsim.plan_search.run import progress_lines
from distsim.plan_search.sizes import Training, sizes_table
from distsim.plan_search.text import describe
from distsim.report.output import check_target, replacing
from distsim.streams import complain, say
from distsim.study.search import PlanStudy, SearchWay
from distsim.terminal import for_terminal

OBJECTIVES = {"time": "time", "memory": "memory", "cost": "time"}
"""What may be asked for, and by what plans of one size are ranked: on so many devices cost is time."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model_options(parser)
    parser.add_argument(
        "--cluster", required=True, help="a preset such as dgx-a100 or dgx-h100:4, or a .toml"
    )
    add_settings(parser)
    parser.add_argument(
        "--plan",
        default="",
        metavar="SETS",
        help="sets of values for fields of a plan, 'tp=1|2|4,zero=1|3,remat=*', * being all; what is left "
        "open has the sensible ones (see below); microbatch_size=1|2 is another way to give microbatches",
    )
    parser.add_argument("--max-tp", type=int, metavar="N", help="the largest tp (default: a node)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many are wanted (default 10)")
    parser.add_argument(
        "--objective",
        choices=[*OBJECTIVES],
        default="time",
        help="time of a step (default), memory of the fullest device, or with --gpus cost of the tokens",
    )
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help=f"processes (default 1; {cores} cores here)"
    )
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="append what is found as it comes, a line of JSON a plan"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the --journal of a search")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all plans as a table")
    add_json(parser)
    parser.add_argument(
        "--gpus",
        metavar="N,N,...",
        help="sizes of the cluster to compare, in place of the count of --cluster",
    )
    parser.add_argument(
        "--tokens", type=float, metavar="N", help="tokens to train on, as 1e12: hours and cost"
    )
    parser.add_argument("--price", type=float, metavar="DOLLARS", help="of a GPU for an hour, with --tokens")


def run(options: argparse.Namespace) -> int:
    """Search, print what was found, and write what is asked for."""
    _check(options)
    # Where it reads a model it says so once for each that plans divide in another way.
    study = PlanStudy.of(model_options(options, plan=None), options.plan, options.max_tp, aloud=True)
    choices, tell = study.choices, teller(options.json)
    found: dict[str, SearchResult] = {}
    for size in _sizes(options):
        try:
            found[size.name] = result = _searched(options, study, size)
        except PlanError as error:  # other sizes may have plans
            if size.alone:
                raise
            tell(f"{options.model} on {size.name}: {error}\n")
            continue
        stack = f"; assumed: {', '.join(choices.assumed)}" if choices.assumed else ""
        if options.json != PRINTED:
            say(f"{options.model} on {size.name}, batch {result.step.samples}{stack}\n")
            say(for_terminal(describe(result)))
            say("")
    if not found:
        raise PlanError(f"--gpus {options.gpus}: none of these sizes has a plan")
    training = Training(options.tokens, options.price)
    if options.json != PRINTED and (len(found) > 1 or options.tokens is not None):
        say(for_terminal("\n".join(sizes_table(found, training, options.objective == "cost"))))
    _write(options, found, training)
    return 0 if any(result.fitting for result in found.values()) else OUT_OF_MEMORY


def _check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, or are without effect, before any work."""
    for name in ("top", "workers", "max_tp"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise PlanError(f"--{name.replace('_', '-')} {given}: at least 1")
    for name in ("tokens", "price"):
        given = getattr(options, name)
        if given is not None and not 0 < given < float("inf"):
            raise PlanError(f"--{name} {given:g}: a number more than 0")
    if options.price is not None and options.tokens is None:
        raise PlanError("--price is of the hours that --tokens take: give --tokens, as 1e12")
    if options.objective == "cost" and (options.tokens is None or options.gpus is None):
        raise PlanError(
            "--objective cost compares sizes by what tokens cost: give --gpus 8,16 and --tokens 1e12"
        )
    if options.resume and options.journal is None:
        raise PlanError("--resume goes on with a --journal: name its file")
    for path in filter(None, (options.csv, options.journal)):
        check_target(path)
    check_json(options.json)


@dataclass(frozen=True)
class _Size:
    """A cluster under the name that it is loaded by."""

    name: str
    topology: Topology
    alone: bool


def _sizes(options: argparse.Namespace) -> list[_Size]:
    """Return the clusters to search on: the one that is named, or those of the sizes of ``--gpus``."""
    if options.gpus is None:
        return [_Size(options.cluster, load_cluster(options.cluster, options.set), True)]
    base, colon, nodes = options.cluster.rpartition(":")
    name = base if colon and nodes.isdigit() else options.cluster
    node = len(load_cluster(name, options.set).devices)
    found: list[_Size] = []
    for text in dict.fromkeys(part.strip() for part in options.gpus.split(",")):
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**20):
            raise PlanError(f"--gpus {options.gpus!r:.60} is not numbers of GPUs between commas, as 8,16,32")
        count = int(text)
        if count > node and count % node:
            raise PlanError(
                f"--gpus {count}: a node of {name} has {node}; take a multiple, or fewer than {node}"
            )
        sizes = [f"devices_per_node={count}"] if count < node else []
        whole = name if count <= node else f"{name}:{count // node}"
        shown = f"{whole} ({count} GPUs)"
        found.append(
            _Size(shown, load_cluster(whole, [*options.set, *sizes]), len(options.gpus.split(",")) == 1)
        )
    return found


def _searched(options: argparse.Namespace, study: PlanStudy, size: _Size) -> SearchResult:
    """Search on a cluster; each of several has a journal of its own."""
    complain(f"{len(study.space(size.topology))} plans on {size.name}")
    journal: Path | None = options.journal
    if journal is not None and not size.alone:
        journal = journal.with_name(f"{journal.stem}-{len(size.topology.devices)}{journal.suffix}")
    objective, watch = OBJECTIVES[options.objective], progress_lines(complain)
    way = SearchWay(objective, options.top, options.workers, journal, options.resume, watch)
    return study.run(size.name, size.topology, way)


def _write(options: argparse.Namespace, found: dict[str, SearchResult], training: Training) -> None:
    if options.csv:
        rows = [{"cluster": name, **row} for name, result in found.items() for row in result.rows()]
        with replacing(options.csv) as file:
            file.write(_csv(rows))
        teller(options.json)(f"table: {options.csv}")
    if options.json:
        sizes = [
            {"cluster": name, **result.to_dict(), **training.to_dict(result)}
            for name, result in found.items()
        ]
        write_json(options.json, {"model": options.model, "searches": sizes})


def _csv(rows: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
