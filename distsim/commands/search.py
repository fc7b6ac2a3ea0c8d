"""The command ``distsim search``: the best plans of a model on a cluster, or on several side by side."""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim.commands.attempt import OUT_OF_MEMORY
from distsim.commands.options.cluster import SizedCluster, add_settings, sized_clusters
from distsim.commands.options.json_output import PRINTED, add_json, check_json, teller, write_json
from distsim.commands.options.model import add_model_options, model_options
from distsim.commands.options.training_file import take_file
from distsim.errors import PlanError
from distsim.plan_search.evaluation import PlanEvaluator
from distsim.plan_search.page import plans_part
from distsim.plan_search.results import SearchResult
from distsim.plan_search.run import progress_lines
from distsim.plan_search.text import describe
from distsim.plan_search.training.comparison import ClusterComparison
from distsim.plan_search.training.estimate import OBJECTIVES, PUE, DeviceRates, Training
from distsim.plan_search.training.goodput import FAILURES, RESTART, STORAGE, Reliability
from distsim.plan_search.workers import RemoteWorkers, dask_workers
from distsim.report.figures import StepFigures
from distsim.report.output import check_target, replacing
from distsim.report.page import PageCase, write_page
from distsim.report.page.sources import NamedCluster
from distsim.report.progress import Progress
from distsim.streams import complain, say
from distsim.study.search import PlanStudy, SearchWay
from distsim.terminal import for_terminal


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
        help="time of a step (default) or memory of the fullest device; of clusters also cost, tokens per "
        "dollar and energy, by which plans of one cluster rank as by time",
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
        "--workers", type=int, default=1, metavar="N", help=f"processes (default 1; {cores} cores here)"
    )
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="the scheduler of a Dask cluster that tries the plans instead, as tcp://host:8786",
    )
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="append what is found as it comes, a line of JSON a plan"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the --journal of a search")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of what a whole training takes."""
    group = parser.add_argument_group("what a training takes")
    group.add_argument(
        "--tokens", type=float, metavar="N", help="tokens to train on, as 1e12: days, cost and energy"
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
    prices = _prices(options.price, names)
    _check(options)
    config = take_file(options)
    if config is not None:
        options.batch = config.batch.total if options.batch is None else options.batch
        for line in (*config.describe(), f"{config.source}: its layout is left open: plans are searched"):
            complain(line)
    study = PlanStudy.of(model_options(options, plan=None), options.plan, options.max_tp, aloud=True)
    clusters = sized_clusters(list(dict.fromkeys(names)), options.gpus, options.set)
    rates = {each.shown: DeviceRates.of(each.figures, prices[each.place]) for each in clusters}
    objective = OBJECTIVES[options.objective]
    for name, own in rates.items():
        objective.check(name, own)
    with _workers(options) as workers:
        search = _ModelSearch(options, study, workers)
        found = dict(_searches(search, clusters))
    reliability = Reliability(options.failures, options.storage * 1e9, options.restart * 60)
    training = Training(options.tokens, options.pue, reliability)
    comparison = ClusterComparison(found, rates, training, objective)
    asked = options.tokens or options.price or options.objective not in ("time", "memory")
    if options.json != PRINTED and (len(found) > 1 or asked):
        say(for_terminal(str(comparison)))
    _write(options, comparison)
    if options.html:
        cases = [search.page_case(each, found[each.shown]) for each in clusters if each.shown in found]
        title = f"{options.model} on {', '.join(found)}"
        Progress(sys.stderr).run(f"writing {options.html}", lambda: write_page(options.html, title, cases))
        teller(options.json)(f"page: {options.html}")
    return 0 if any(result.fitting for result in found.values()) else OUT_OF_MEMORY


@contextmanager
def _workers(options: argparse.Namespace) -> Generator[int | RemoteWorkers]:
    """Give who tries the plans."""
    if options.dask is None:
        yield options.workers
        return
    remote = dask_workers(options.dask)
    try:
        yield remote
    finally:
        remote.close()


def _searches(search: _ModelSearch, clusters: Sequence[SizedCluster]) -> Iterator[tuple[str, SearchResult]]:
    """Yield the clusters that have plans with what was found on each, and say it."""
    any_has = False
    options, alone = search.options, len(clusters) == 1
    for cluster in clusters:
        try:
            result = search.run(cluster, alone)
        except PlanError as error:  # other clusters may have plans
            if alone:
                raise
            teller(options.json)(f"{options.model} on {cluster.shown}: {error}\n")
            continue
        any_has = True
        assumed = search.study.choices.assumed
        stack = f"; assumed: {', '.join(assumed)}" if assumed else ""
        if options.json != PRINTED:
            say(f"{options.model} on {cluster.shown}, batch {result.step.samples}{stack}\n")
            say(for_terminal(describe(result)))
            say("")
        yield cluster.shown, result
    if not any_has:
        raise PlanError(f"none of {', '.join(each.shown for each in clusters)} has a plan")


def _prices(text: str | None, names: Sequence[str]) -> list[float | None]:
    """Return the price of each cluster, None for those of which it is not given."""
    distinct = len(dict.fromkeys(names))
    if text is None:
        return [None] * distinct
    given: list[float | None] = []
    for part in text.split(","):
        try:
            given.append(float(part))
        except ValueError:
            raise PlanError(f"--price {part!r:.40}: a number of dollars, as 2.5") from None
    for price in given:
        _check_positive("price", price)
    if len(given) not in (1, distinct):
        raise PlanError(
            f"--price {text:.60}: {len(given)} prices for {distinct} clusters; give one for all, or one each"
        )
    return given * distinct if len(given) == 1 else given


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise PlanError(f"--{name} {value:g}: a number more than 0")


def _check(options: argparse.Namespace) -> None:
    """Refuse options that make no sense, or are without effect, before any work."""
    for name in ("top", "workers", "max_tp"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise PlanError(f"--{name.replace('_', '-')} {given}: at least 1")
    for name in ("tokens", "storage"):
        _check_positive(name, getattr(options, name))
    for name, least in (("pue", 1.0), ("failures", 0.0), ("restart", 0.0)):
        given = getattr(options, name)
        if not least <= given < math.inf:
            raise PlanError(f"--{name} {given:g}: a number of {least:g} or more")
    if options.dask is not None and options.workers != 1:
        raise PlanError(
            "--workers are processes of this machine, --dask those of a cluster: give one of them"
        )
    if options.resume and options.journal is None:
        raise PlanError("--resume goes on with a --journal: name its file")
    for path in filter(None, (options.csv, options.html, options.journal)):
        check_target(path)
    check_json(options.json)


@dataclass(frozen=True)
class _ModelSearch:
    """The search that a command line asks for."""

    options: argparse.Namespace
    study: PlanStudy
    workers: int | RemoteWorkers

    def run(self, cluster: SizedCluster, alone: bool) -> SearchResult:
        """Return what is found on a cluster, which may be ``alone``."""
        options, topology = self.options, cluster.topology
        complain(f"{len(self.study.space(topology).plans)} plans on {cluster.shown}")
        journal = _journal(options.journal, cluster, alone)
        watch = progress_lines(complain)
        way = SearchWay(self._objective, options.top, self.workers, journal, options.resume, watch, complain)
        return self.study.run(cluster.shown, topology, way)

    @property
    def _objective(self) -> str:
        return OBJECTIVES[self.options.objective].plan

    def page_case(self, cluster: SizedCluster, result: SearchResult) -> PageCase:
        """Return what a page shows of what was found; the best plan is simulated once more."""
        name, named = cluster.shown, NamedCluster(cluster.name, cluster.settings)
        about = {"model": self.options.model, "cluster": name, "batch": str(result.step.samples)}
        assumed = self.study.choices.assumed
        notes = [f"assumed: {', '.join(assumed)}"] if assumed else []
        plans = plans_part(result)
        if not result.fitting:
            return PageCase(name, about, named, None, notes, plans)
        problem = self.study.problem(cluster.topology, self._objective, self.options.top)
        simulation = PlanEvaluator(problem).simulate(result.best.plan)
        step = result.step
        figures = StepFigures.of(name, simulation, (step.tokens, step.unit), step.flops)
        about["best plan"] = result.best.text
        return PageCase(name, about, named, (simulation, figures), [*notes, *simulation.notes], plans)


def _journal(path: Path | None, cluster: SizedCluster, alone: bool) -> Path | None:
    """Return the journal of a cluster: each of several has its own."""
    if path is None or alone:
        return path
    name = re.sub(r"\W+", "-", cluster.shown).strip("-")
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


def _write(options: argparse.Namespace, comparison: ClusterComparison) -> None:
    found = comparison.results
    if options.csv:
        rows = [{"cluster": name, **row} for name, result in found.items() for row in result.rows()]
        with replacing(options.csv) as file:
            file.write(_csv(rows))
        teller(options.json)(f"table: {options.csv}")
    if options.json:
        searches = [
            {"cluster": name, **found[name].to_dict(), **(estimate.to_dict() if estimate else {})}
            for name, estimate in comparison.estimates.items()
        ]
        write_json(options.json, {"model": options.model, "searches": searches})


def _csv(rows: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
