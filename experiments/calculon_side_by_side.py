"""Calculon's closed formulas and distsim in one run: plans a second, a search, errors of published steps.

``git clone https://github.com/calculon-ai/calculon`` and ``python experiments/calculon_side_by_side.py
calculon`` (it needs ``psutil``) write to ``results/``:

- ``calculon_rates.csv``: CPU seconds of both, in one process, of the 360 1F1B plans of ``plan_search.py``
  (GPT-3 175B on 1,024 A100), of distsim from cold and once more; and of a search of GPT-3 on that cluster
  with Megatron-LM's choices, of which Calculon evaluates all plans (its own search has 1.7 million, most of
  which differ in what it overlaps and over which network), and distsim those that its bounds leave: its plans
  a second are those that were decided. Imports and the compilation of loops are not counted. ``--small``:
  16 GPUs and a small model.
- ``calculon_rows.csv``, ``calculon.png``: the published steps on A100 (``distsim/truth/published.csv``) that
  Calculon can express: a GPT with attention written out, tensor, pipeline and data parallelism, 1F1B or
  interleaved, ZeRO 0 or 1. Calculon has its own figures of the A100 (``systems/a100_80g.json``), distsim its
  preset; neither was fitted to these rows by us. Calculon has no embedding and no output head.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import plan_search

import distsim
from distsim.cost import CostModel
from distsim.hardware import load_cluster
from distsim.models.parts.attention import GroupedHeads
from distsim.plan import Plan
from distsim.simulation import Simulator
from distsim.truth import Case, case_of, evaluated, published_rows
from distsim.truth.row import MissingFeatureError, Row, number

RECOMPUTED = {"none": "none", "full": "full", "selective": "attn_only", "attention": "attn_only"}
"""What Calculon calls a plan's ``remat``."""

SEARCHED = ("gpt3-175b", "dgx-a100:128", 1536), (96, 12288, 4 * 12288, 96, 2048)
SEARCHED_SMALL = ("gpt2-medium", "dgx-a100:2", 64), (24, 1024, 4 * 1024, 16, 1024)
"""What is searched: a model, a cluster and a batch; the model as :func:`application` has it."""


class Calculon:
    """Calculon of a checkout, on A100 of 80 GB in nodes of 8."""

    def __init__(self, folder: Path) -> None:
        """Import it. Exits where a folder is none of its checkouts."""
        if not (folder / "calculon" / "llm").is_dir():
            sys.exit(
                f"{folder} is no checkout of Calculon: git clone https://github.com/calculon-ai/calculon"
            )
        sys.path.insert(0, str(folder))
        from calculon import llm, system  # type: ignore[import-not-found]

        self._llm, self._system = llm.Llm, system.System
        self._log = logging.getLogger("calculon")
        self._figures = json.loads((folder / "systems" / "a100_80g.json").read_text())

    def seconds(self, app: dict[str, int], exe: dict[str, Any]) -> float | None:
        """Return the seconds of a step, None for one that Calculon refuses, too large for memory mostly."""
        llm = self._llm
        try:
            model = llm(llm.Application(app), self._log)
            machine = self._system(self._figures)
            model.compile(machine, llm.Execution.from_json(exe))
            model.run(machine)
        except (llm.Error, AssertionError):
            return None
        return model.get_total_time()


def execution(plan: Plan, batch: int, overlaps: bool, sequence: bool) -> dict[str, Any]:
    """Return a plan in the fields of Calculon: groups of up to 8 ranks within a node, others between.

    Ranks of tp are next to each other, then those of dp, then those of pp, as in distsim and Megatron-LM.
    """
    near = {"tensor": plan.tp, "data": plan.tp * plan.dp, "pipeline": plan.tp * plan.dp * plan.pp}
    size = batch // plan.dp // plan.microbatches
    return {
        **{"num_procs": plan.devices, "tensor_par": plan.tp, "pipeline_par": plan.pp, "data_par": plan.dp},
        **{f"{axis}_par_net": int(ranks > 8) for axis, ranks in near.items()},
        **{"batch_size": batch, "microbatch_size": size, "datatype": "float16", "fused_activation": True},
        **{"attention_type": "multihead", "activation_recompute": RECOMPUTED[str(plan.remat)]},
        **{"pipeline_interleaving": plan.chunks, "optimizer_sharding": plan.zero > 0 and plan.dp > 1},
        **{"tensor_par_comm_type": "rs_ag" if sequence else "p2p_rs_ag", "tensor_par_overlap": "none"},
        **{"seq_par_ag_redo": False, "data_par_overlap": overlaps and plan.dp > 1},
        **{"weight_offload": False, "activations_offload": False, "optimizer_offload": False},
        "training": True,
    }


def expressible(plan: Plan) -> bool:
    """Whether Calculon has what a plan has."""
    known = plan.schedule in ("1f1b", "interleaved") and plan.zero <= 1 and plan.cp == plan.ep == 1
    return known and str(plan.remat) in RECOMPUTED


# --- plans a second -----------------------------------------------------------------------------------------


def rates(calculon: Calculon, small: bool) -> list[dict[str, Any]]:
    """Return the table of CPU seconds: the plans of ``plan_search.py``, and one search."""
    task = plan_search.SMALL if small else plan_search.GPT3
    topology = load_cluster(task.cluster)
    common.warm_up(topology)
    plans = task.plans("1f1b")
    app = application(task.layers, task.hidden, 4 * task.hidden, task.heads, task.seq)
    own = [execution(plan, task.batch, True, False) for plan in plans]
    function, costed = task.function(), Simulator(CostModel(topology))

    def simulate() -> None:
        for plan in common.progress(plans):
            plan_search.evaluate(function, plan, topology, costed)

    found = [
        timed("Calculon", f"{len(plans)} plans", len(plans), lambda: [calculon.seconds(app, x) for x in own]),
        timed("distsim, cold", f"{len(plans)} plans", len(plans), simulate),
        timed("distsim, again", f"{len(plans)} plans", len(plans), simulate),
    ]
    return found + searches(calculon, small)


def searches(calculon: Calculon, small: bool) -> list[dict[str, Any]]:
    """Return the rows of a search of distsim's, and of Calculon trying all plans of the same space."""
    (model, cluster, batch), sizes = SEARCHED_SMALL if small else SEARCHED
    seq = sizes[-1]
    results: list[Any] = []
    given: dict[str, Any] = {"stack": "megatron", "workers": 1, "batch": batch, "seq": seq}
    _, seconds = common.cpu_seconds(lambda: results.append(distsim.search(model, cluster, "", **given)))
    plans = [trial.plan for trial in results[0].trials]
    app = application(*sizes)
    own = [execution(plan, batch, False, plan.sp != "off") for plan in plans if expressible(plan)]
    tried = timed("Calculon", "search", len(own), lambda: [calculon.seconds(app, each) for each in own])
    return [tried, rate("distsim, cold", "search", len(plans), seconds)]


def application(layers: int, hidden: int, ffn: int, heads: int, seq: int) -> dict[str, int]:
    """Return a GPT in the fields of Calculon."""
    return {
        **{"hidden": hidden, "feedforward": ffn, "seq_size": seq, "attn_heads": heads},
        **{"attn_size": hidden // heads, "num_blocks": layers},
    }


def timed(who: str, what: str, plans: int, work: Callable[[], object]) -> dict[str, Any]:
    """Return a row of the table: how many CPU seconds some work takes."""
    return rate(who, what, plans, common.cpu_seconds(work)[1])


def rate(who: str, what: str, plans: int, seconds: float) -> dict[str, Any]:
    """Return a row of the table, and print it."""
    print(f"{what}, {who}: {plans} plans in {seconds:.2f} CPU s, {plans / seconds:,.0f} plans/s")
    return {"of": what, "by": who, "plans": plans, "cpu_s": seconds, "plans_per_s": plans / seconds}


# --- published steps ----------------------------------------------------------------------------------------


def asked_of(row: Row) -> tuple[Case, dict[str, int], dict[str, Any]] | None:
    """Return what Calculon takes for a row, None for one that it cannot express."""
    try:
        case = case_of(row)
    except MissingFeatureError:
        return None
    heads = case.sizes.attention
    plain = isinstance(heads, GroupedHeads) and not case.sizes.feed_forward.gated
    written_out = case.attention in ("math", "fused_softmax")
    a100 = row["hw_gpu"].startswith("A100") and row.get("iter_time_s")
    if not (plain and written_out and a100 and expressible(case.plan)) or case.sizes.experts:
        return None
    ffn = case.sizes.feed_forward.ffn or 4 * case.sizes.hidden
    app = application(case.sizes.layers, case.sizes.hidden, ffn, heads.heads, number(row, "seq"))
    return case, app, execution(case.plan, case.batch, case.plan.overlap_grads == "on", case.plan.sp != "off")


def compare(calculon: Calculon, small: bool) -> list[dict[str, Any]]:
    """Return a line for each published step that both have, with the seconds of both."""
    asked = [(row, found) for row in published_rows() if (found := asked_of(row))]
    asked = asked[:3] if small else asked
    outcomes = dict(evaluated([row for row, _ in asked], 1 if small else 2, 600))
    table: list[dict[str, Any]] = []
    for place, (row, (_, app, exe)) in enumerate(asked):
        measured, seconds = float(row["iter_time_s"]), calculon.seconds(app, exe)
        own = outcomes[place].seconds
        table.append(
            {
                **{"id": row["id"], "source": row["source"], "measured_s": measured},
                **{"distsim_s": own, "distsim_error": own / measured - 1},
                **{"calculon_s": seconds or "", "calculon_error": seconds / measured - 1 if seconds else ""},
            }
        )
    return table


def print_errors(table: Sequence[dict[str, Any]]) -> None:
    """Print the errors by source, over the rows that Calculon does not refuse."""
    both = [row for row in table if row["calculon_s"]]
    print(f"{len(table)} published steps asked of both; Calculon refuses {len(table) - len(both)}")
    for source in [*dict.fromkeys(row["source"] for row in both), ""]:
        own = [row for row in both if row["source"] == source or not source]
        shares = [
            f"{who} mean {statistics.mean(abs(row[f'{who}_error']) for row in own):6.1%}, bias "
            f"{statistics.mean(row[f'{who}_error'] for row in own):+6.1%}"
            for who in ("distsim", "calculon")
        ]
        print(f"{source or 'all':52.52} {len(own):3d} rows: {'; '.join(shares)}")


def draw(table: Sequence[dict[str, Any]]) -> Any:
    """Predicted over measured seconds, of both."""
    figure, (axis,) = common.panels(1, 6.5, 4.5)
    for who, marker, colour in (("calculon", "x", "C1"), ("distsim", "o", "C0")):
        own = [row for row in table if row["calculon_s"]]
        places = [row["measured_s"] for row in own], [row[f"{who}_s"] / row["measured_s"] for row in own]
        axis.scatter(*places, marker=marker, color=colour, s=24, label={"calculon": "Calculon"}.get(who, who))
    axis.axhline(1, color="0.4", linewidth=1)
    axis.set(xscale="log", xlabel="measured seconds of a step", ylabel="predicted / measured")
    axis.legend(frameon=False)
    return figure


def main() -> None:
    """Compare, and write the tables and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("calculon", type=Path, help="a checkout of github.com/calculon-ai/calculon")
    parser.add_argument("--small", action="store_true", help="small sizes, done in seconds")
    parser.add_argument("--out", type=Path, help="folder for what is written (default: results)")
    given = parser.parse_args()
    out = given.out or (common.RESULTS / "small" if given.small else common.RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    calculon = Calculon(given.calculon)
    common.write_csv(out / "calculon_rates.csv", rates(calculon, given.small))
    table = compare(calculon, given.small)
    common.write_csv(out / "calculon_rows.csv", table)
    common.save(draw(table), out / "calculon.png")
    print_errors(table)


if __name__ == "__main__":
    main()
