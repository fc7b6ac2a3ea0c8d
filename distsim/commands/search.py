"""The command ``distsim search``: the best plans of a model on a cluster, or on several side by side."""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distsim.commands.attempt import OUT_OF_MEMORY
from distsim.commands.options.cluster import add_settings
from distsim.commands.options.json_output import PRINTED, add_json, check_json, teller, write_json
from distsim.commands.options.model import add_model_options, model_options
from distsim.commands.options.training_file import take_file
from distsim.console.terminal import complain, for_terminal, say
from distsim.errors import PlanError
from distsim.importer.configs import TrainingConfig
from distsim.plan_search.results import SearchResult
from distsim.plan_search.training.estimate import OBJECTIVES, PUE
from distsim.plan_search.training.goodput import FAILURES, RESTART, STORAGE
from distsim.plan_search.views.cluster_comparison import ClusterComparison
from distsim.plan_search.views.page import clusters_part, plans_part
from distsim.plan_search.views.text import describe
from distsim.report.figures import StepFigures
from distsim.report.output import PAGE, check_ending, check_target, replacing
from distsim.report.page import PageCase, write_page
from distsim.report.page.sources import NamedCluster
from distsim.report.progress import Progress
from distsim.schedule.refusals import count
from distsim.study.choices import Choices
from distsim.study.clusters import SizedCluster, sized_clusters
from distsim.study.options import options_of
from distsim.study.search import ClusterSearches
from distsim.study.search_options import SearchOptions


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model_options(parser)
    parser.add_argument(
        "--cluster",
        required=True,
        action="append",
        metavar="NAME,...",
        help="a preset such as dgx-a100 or dgx-h100:4, or a .toml; several, between commas or by several "
        "--cluster, are searched one after the other and compared",
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
        metavar="WHAT",
        help=f"by what plans and clusters rank, of {', '.join(OBJECTIVES)}: "
        "time of a step (default) or memory of the fullest device; of clusters also cost, tokens per "
        "dollar and energy, by which plans of one cluster rank as by time",
    )
    parser.add_argument(
        "--against",
        metavar="PLAN",
        help="a plan of your own, as `distsim simulate` has it: how the best differs from it, part by part",
    )
    _add_ways_to_run(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all plans as a table")
    add_json(parser)
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page to look at, one file, with the step of the best",
    )
    parser.add_argument(
        "--gpus", metavar="N,N,...", help="sizes to compare, in place of the counts of the clusters"
    )
    _add_training_options(parser)


def _add_ways_to_run(parser: argparse.ArgumentParser) -> None:
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"processes (default: one for 50 plans, up to the {count(cores, 'core')} here)",
    )
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="the scheduler of a Dask cluster that tries the plans instead, as tcp://host:8786",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        metavar="FILE",
        help="a new file, to which what is found is appended as it comes, a line of JSON a plan; of several "
        "clusters or --gpus each has its own, with the cluster in its name: FILE-CLUSTER",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the --journal of a search that was stopped"
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of what a whole training takes."""
    group = parser.add_argument_group("what a training takes")
    group.add_argument(
        "--tokens", metavar="N", help="tokens to train on, as 1e12 or 300B: days, cost and energy"
    )
    group.add_argument(
        "--price",
        metavar="DOLLARS,...",
        help="of a GPU for an hour: one for all clusters, or one for each --cluster in their order (default: "
        "what the preset has, dated: `distsim clusters NAME`)",
    )
    group.add_argument(
        "--pue", type=float, default=PUE, metavar="X", help=f"what the building draws more (default {PUE:g})"
    )
    group.add_argument(
        "--failures",
        type=float,
        default=FAILURES,
        metavar="RATE",
        help=f"of a GPU-hour, each of which restarts the training (default {FAILURES:.3g}: Llama 3; 0: none)",
    )
    group.add_argument(
        "--storage",
        type=float,
        default=STORAGE / 1e9,
        metavar="GB/S",
        help=f"that a GPU writes of a checkpoint (default {STORAGE / 1e9:.3g}: Llama 3)",
    )
    group.add_argument(
        "--restart",
        type=float,
        default=RESTART / 60,
        metavar="MINUTES",
        help=f"from a failure to the next step (default {RESTART / 60:g}: MegaScale)",
    )


def run(options: argparse.Namespace) -> int:
    """Search, print what was found, and write what is asked for."""
    names = [name.strip() for text in options.cluster for name in text.split(",")]
    given = {**vars(options), "clusters": list(dict.fromkeys(names))}
    asked = options_of(SearchOptions, given)
    for path in filter(None, (options.csv, options.html, options.journal)):
        check_target(path)
    if options.html:
        check_ending(options.html, *PAGE)
    check_json(options.json)
    config = take_file(options)
    if config is not None:
        if options.batch is None:
            options.batch = _batch_of_file(config, asked)
        for line in (*config.describe(), f"{config.source}: its layout is left open: plans are searched"):
            complain(line)
    searches = ClusterSearches.of(model_options(options, plan=None), asked, complain)
    try:
        every = dict(_searched(options, searches))
    except KeyboardInterrupt:
        if any(path.exists() for path in searches.journals):
            complain(f"what was found is kept: add --resume to go on (--journal {options.journal} --resume)")
        raise
    found = {each: result for each, result in every.items() if isinstance(result, SearchResult)}
    refused = {each.shown: str(why) for each, why in every.items() if isinstance(why, PlanError)}
    shown = {each.shown: result for each, result in found.items()}
    comparison = ClusterComparison(shown, asked.objective, refused)
    if options.json != PRINTED and (len(found) > 1 or asked.asks_costs):
        say(for_terminal(str(comparison)))
    _write(options, comparison)
    if options.html:
        choices = searches.study.choices
        cases = [_page_case(options.model, each, result, choices) for each, result in found.items()]
        title = f"{options.model} on {', '.join(comparison)}"
        side_by_side = clusters_part(comparison) if len(cases) > 1 or asked.asks_costs else None
        Progress(sys.stderr).run(
            f"writing {options.html}", lambda: write_page(options.html, title, cases, side_by_side)
        )
        teller(options.json)(f"page: {options.html}")
    return 0 if any(result.fitting for result in comparison.values()) else OUT_OF_MEMORY


def _batch_of_file(config: TrainingConfig, asked: SearchOptions) -> int:
    """Return the batch that a file has: on the devices of the clusters, where it is said of a rank."""
    if config.batch.total is not None:
        return config.batch.total
    sized = sized_clusters(asked.clusters, asked.gpus, asked.set)
    counts = sorted({len(each.topology.devices) for each in sized})
    if len(counts) > 1:
        raise PlanError(
            f"{config.source} says the batch of a rank, and {', '.join(map(str, counts))} devices have other "
            "ranks: give --batch, the same for all"
        )
    try:
        total = config.laid_out(counts[0])[1]
    except PlanError as error:
        raise PlanError(f"what batch {config.source} has is not known, give --batch: {error}") from None
    complain(f"{config.source}: batch {total}, that of its own layout on {counts[0]} devices")
    return total


def _searched(
    options: argparse.Namespace, searches: ClusterSearches
) -> Iterator[tuple[SizedCluster, SearchResult | PlanError]]:
    """Yield the clusters with what was found on each, or why it has no plan, and say it."""
    choices = searches.study.choices
    for cluster, result in searches.run():
        if not isinstance(result, SearchResult):
            teller(options.json)(f"{options.model} on {cluster.shown}: {result}\n")
            yield cluster, result
            continue
        stack = f"; assumed: {', '.join(choices.assumed)}" if choices.assumed else ""
        if options.json != PRINTED:
            say(f"{options.model} on {cluster.shown}, batch {result.step.samples}{stack}")
            for line in choices.device_notes(cluster.topology):
                say(f"note: {line}")
            say("")
            say(for_terminal(describe(result)))
            say("")
        yield cluster, result


def _page_case(model: str, cluster: SizedCluster, result: SearchResult, choices: Choices) -> PageCase:
    """Return what a page shows of what was found on a cluster."""
    name, named = cluster.shown, NamedCluster(str(cluster.cluster), cluster.settings)
    about = {"model": model, "cluster": name, "batch": str(result.step.samples)}
    notes = [f"assumed: {', '.join(choices.assumed)}"] if choices.assumed else []
    notes += choices.device_notes(cluster.topology)
    if result.own is not None:
        about["your plan"] = result.own.text
    if not result.fitting:
        return PageCase(name, about, named, None, notes, plans_part(result))
    simulation, step = result.simulation, result.step
    figures = StepFigures.of(name, simulation, (step.tokens, step.unit), step.flops_by(result.best.plan))
    about["best plan"] = result.best.text
    notes += simulation.notes
    return PageCase(name, about, named, (simulation, figures), notes, plans_part(result))


def _write(options: argparse.Namespace, comparison: ClusterComparison) -> None:
    if options.csv:
        rows = [{"cluster": name, **row} for name, result in comparison.items() for row in result.rows()]
        with replacing(options.csv) as file:
            file.write(_csv(rows))
        teller(options.json)(f"table: {options.csv}")
    if options.json:
        write_json(options.json, {"model": options.model, **comparison.to_dict()})


def _csv(rows: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
