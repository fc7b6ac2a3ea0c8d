"""A search's result as tables for people."""

from __future__ import annotations

import math
from dataclasses import replace

from distsim.plan_search.columns import plan_columns
from distsim.plan_search.results import SearchResult
from distsim.plan_search.training.columns import plan_cost_columns
from distsim.plan_search.trial import PlanTrial
from distsim.schedule.refusals import count
from distsim.simulation.explain.text import seconds_text, table
from distsim.simulation.quantities import bytes_label

_MOST_NEARLY, _MOST_FRONT, _MOST_REASONS = 3, 8, 4


def describe(result: SearchResult) -> str:
    """Return what a search found as a text: counts, the best plans, the front, what nearly fits, and why."""
    lines = _counts(result)
    if result.fitting:
        lines += ["", *best_table(result), *_few(result)]
        lines += ["", *_front(result)] if len(result.pareto) > 1 else []
    else:
        lines += ["", f"none of {count(len(result.trials), 'plan')} fits in memory", *_nearest(result)]
    lines += [*_nearly(result), *why(result)]
    return "\n".join(lines)


def _counts(result: SearchResult) -> list[str]:
    counts = result.counts
    proven = counts["discarded: slower"] + counts["discarded: too large"]
    lines = [
        f"{count(len(result.trials), 'plan')}: {counts['simulated']} simulated, {proven} discarded by proof "
        f"({counts['discarded: slower']} slower than the best {result.wanted}, "
        f"{counts['discarded: too large']} too large), {counts['too large']} built and too large, "
        f"{counts['refused']} refused"
    ]
    reasons = list(result.refusals.values())
    lines += [f"refused: {number} as {text}" for number, text in reasons[:_MOST_REASONS]]
    rest = sum(number for number, _ in reasons[_MOST_REASONS:])
    return [*lines, f"refused: {rest} for other reasons"] if rest else lines


def best_table(result: SearchResult) -> list[str]:
    """Return the table of the best plans, and below it what all of their plans say."""
    step, plans = result.step, [trial.short.split(",") for trial in result.winners]
    shared = [part for part in plans[0] if len(plans) > 1 and all(part in other for other in plans)]
    estimates = [result.estimate(trial) for trial in result.winners]
    costs = plan_cost_columns(estimates, result.step.unit) if result.costs.shown else {}
    columns = [column for column in plan_columns(result.step) if column.label]
    numbers, words = ([column for column in columns if column.words is own] for own in (False, True))
    header = ("", *(own.label for own in numbers), *costs, *(own.label for own in words), "plan")
    rows = [
        (
            str(place),
            *(column.text(trial) for column in numbers),
            *(cell(estimate) for cell in costs.values()),
            *(column.text(trial) for column in words),
            ",".join(part for part in own if part not in shared) or "as all",
        )
        for place, (trial, own, estimate) in enumerate(zip(result.winners, plans, estimates, strict=True), 1)
    ]
    return [
        *table(header, rows, len(words) + 1),
        *([f"all of them with {','.join(shared)}"] if shared else []),
        *([f"MFU is of {step.peak / 1e12:.4g} TFLOP/s a device ({step.dtype})"] if step.peak else []),
    ]


def _front(result: SearchResult) -> list[str]:
    front = result.pareto
    lines = ["less memory for more time (of the plans that were simulated):"]
    rows = [(seconds_text(t.seconds), bytes_label(t.peak), t.short) for t in front[:_MOST_FRONT]]
    lines += table(("step", "memory", "plan"), rows, 1)
    return [*lines, f"... and {len(front) - _MOST_FRONT} more"] if len(front) > _MOST_FRONT else lines


def _nearest(result: SearchResult) -> list[str]:
    """Say by how much a plan that needs little does not fit, and what to open that could make one fit."""
    nearest = result.nearest
    if nearest is None:
        return []
    lines = [
        f"one of those that need least has {bytes_label(nearest.peak)} on a device, "
        f"{bytes_label(nearest.missing)} too much: {nearest.short}"
    ]
    state, devices = result.step.state_bytes, len(result.step.topology.devices)
    if 0 < nearest.usable * devices < state:
        lines.append(
            f"parameters and optimizer state alone, divided over all {count(devices, 'device')}, are "
            f"{bytes_label(state / devices)} on each: use {math.ceil(state / nearest.usable)} devices or more"
        )
        return lines
    names = _not_tried(result)
    tried = f"not tried: {', '.join(names)} (--plan); or " if names else ""
    return [*lines, f"{tried}use more devices, a smaller batch or shorter sequences"]


def _few(result: SearchResult) -> list[str]:
    """Say what was not tried where fewer plans fit than were asked for, and others do not."""
    found, names = len(result.fitting), _not_tried(result)
    large = result.counts["too large"] + result.counts["discarded: too large"]
    if found >= result.wanted or not large or not names:
        return []
    return [f"{count(found, 'plan')} alone fit{'s' * (found == 1)}; not tried: {', '.join(names)} (--plan)"]


def _not_tried(result: SearchResult) -> list[str]:
    """Return what takes less memory and is in none of the plans."""
    plans = [trial.plan for trial in result.trials]
    several = max(plan.dp * plan.cp for plan in plans) > 1
    opened = {
        "zero=3": several and all(plan.zero < 3 for plan in plans),
        "remat=full": all(not plan.remat.startswith("full") for plan in plans),
        **{name: all(getattr(plan, name) == 1 for plan in plans) for name in ("tp", "pp")},
        "cp": bool(result.step.sequence) and all(plan.cp == 1 for plan in plans),
        "offload": all(not plan.offload for plan in plans),
    }
    return [name for name, is_closed in opened.items() if is_closed]


def _nearly(result: SearchResult) -> list[str]:
    """Say which plans do not fit by little; those that would be among the best, if any is there."""
    slowest = result.winners[-1].seconds if result.winners else float("inf")
    near = [trial for trial in result.nearly if trial.seconds <= slowest]
    if not near:
        return []
    rows = [
        (seconds_text(t.seconds), bytes_label(t.peak), f"{bytes_label(t.missing)} too much", t.short)
        for t in near[:_MOST_NEARLY]
    ]
    return ["", "nearly fits:", *table(("step", "memory", "", "plan"), rows, 1)]


def why(result: SearchResult) -> list[str]:
    """Say why the best is best, beside the second and beside the plan that it is searched against."""
    own, winners = result.own, result.winners[:2]
    mine = None if own is None else f"{own.short} (yours)"
    if not winners:
        return [] if own is None else ["", f"{mine}: {_lack(own)}"]
    names = {trial.text: trial.short for trial in winners}
    if own is not None and mine is not None:
        names[own.text] = mine
        winners = (*winners, *([] if own.text in {trial.text for trial in winners} else [own]))
    if len(winners) < 2:
        return []
    found = result.compare(*winners)
    steps = tuple(replace(step, name=names[step.name]) for step in found.steps)
    lines = ["", "why the best is best:", *str(replace(found, steps=steps)).splitlines()]
    return [*lines, "", f"{mine} is the best"] if own is not None and own.text == result.best.text else lines


def _lack(trial: PlanTrial) -> str:
    return f"{bytes_label(trial.missing)} too much" if trial.missing else seconds_text(trial.seconds)
