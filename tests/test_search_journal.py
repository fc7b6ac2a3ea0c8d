"""Journals of searches: trials come back as they were, and more of the best can be asked for."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from training_models import small_gpt

from distsim.hardware import load_cluster
from distsim.plan_search import SearchRun, describe, parse_sets
from distsim.plan_search.evaluation import SearchProblem
from distsim.plan_search.journal import JournalWriter, TrialJournal, format_of
from distsim.plan_search.run import FixedModel
from distsim.plan_search.space import PlanSpace
from distsim.plan_search.trial import PlanTrial
from distsim.transforms import SGD, differentiate
from distsim.transforms.kernels.policies import KERNELS

DGX = load_cluster("dgx-a100")
SETS = "dp=8|4|2,tp=1|2,pp=1|2,remat=none,microbatches=1|2,zero=0|1"


@dataclass(frozen=True)
class CountedTrial(PlanTrial):
    """One of which nothing counted is another thing than not counted."""

    messages: int | None = None
    share: float = 1.0


def test_a_trial_says_a_zero_where_that_is_not_the_default():
    own = CountedTrial("dp=1", seconds=2.0, messages=0, share=0.0, missing=0.0)
    assert own.to_dict() == {"text": "dp=1", "seconds": 2.0, "messages": 0, "share": 0.0}
    assert CountedTrial(**json.loads(json.dumps(own.to_dict()))) == own


class Inner(NamedTuple):
    """A record in a record."""

    seconds: float
    saved: int


class Turned(NamedTuple):
    """The same, in another order, which is as it is written."""

    saved: int
    seconds: float


def test_the_format_is_the_names_of_the_fields_also_inside():
    def record(inner: type, name: str = "parts") -> type:
        return NamedTuple("Outer", [("text", str), (name, tuple[inner, ...] | None)])

    formats = [format_of(record(*own)) for own in ((Inner,), (Turned,), (Inner, "layers"), (int,))]
    assert len(set(formats)) == 4 and format_of(record(Inner)) == formats[0]
    assert format_of(CountedTrial) != format_of(PlanTrial)


@pytest.fixture(scope="module")
def run():
    """Search, with how many wanted and the journal."""
    model = FixedModel(differentiate(small_gpt(), SGD()))
    plans = PlanSpace.of(model.function, DGX, parse_sets(SETS)).plans

    def search(top, journal=None, resume=False):
        problem = SearchProblem(model, DGX, KERNELS["eager"], "time", top)
        return SearchRun(problem, plans, 1, journal, resume).run()

    return search


def test_more_of_the_best_are_known_as_a_search_of_its_own_knows_them(run, tmp_path):
    journal = tmp_path / "found"
    run(1, journal)
    records = {own["text"]: own for own in map(json.loads, journal.read_text().splitlines()[1:])}
    more, alone = run(6, journal, resume=True), run(6)
    winners = [records.get(trial.text) for trial in more.winners]
    assert [own for own in winners if own is not None and "parts" not in own], "all were the best for a while"
    assert all(trial.parts and trial.high for trial in more.winners)
    assert list(more.winners) == list(alone.winners) and more.rows() == alone.rows()
    assert describe(more) == describe(alone) and more._repr_html_() == alone._repr_html_()


def test_every_trial_of_a_search_comes_back(run, tmp_path):
    trials = [trial for trial in run(3).trials if not trial.discarded]
    journal = TrialJournal(tmp_path / "found", "a search", "its digest")
    journal.begin()
    writer = JournalWriter(journal.path)
    for trial in trials:
        writer.append(trial)
    writer.close()
    assert journal.read() == ({trial.text: trial for trial in trials}, 0)
    assert any(trial.layers and trial.layers.stages for trial in trials)
