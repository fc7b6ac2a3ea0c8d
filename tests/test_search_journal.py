"""Journals of searches: trials come back as they were, and more of the best can be asked for."""

import json
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from training_models import small_gpt

import distsim
from distsim.errors import SimulationError
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


# --- what others may have written ---------------------------------------------------------------------

STAGES, PASSAGE = [[0.5, 2, 7]], [0.1, 0.2, 0.0]
LAYERS = [1.0, 1.0, 0.5, 0.5, 0.0, 7, 2, 0.0, 0.0, STAGES, PASSAGE, 0.0, 0.5, 0.1]
RIGHT = {"text": "dp=8", "seconds": 2.0, "peak": 5, "layers": LAYERS, "parts": {"linear": 2.0}}


def layers(place, value):
    return [*LAYERS[:place], value, *LAYERS[place + 1 :]]


WRONG = {
    "layers": [
        *(5, [1], {}, "layers", [*LAYERS, 1.0], layers(0, "x"), layers(5, 1.5), layers(9, 5), layers(9, [5])),
        *(layers(9, [[0.5, 2]]), layers(9, [[0.5, 2.5, 7]]), layers(9, None), layers(6, None)),
        *(layers(10, 5), layers(10, [1.0]), layers(10, [None, 0.2, 0.0])),
    ],
    "text": [["dp=8"], None, 7],
    "seconds": ["x", "2.0", None, True, [2.0]],
    "peak": [None, 1.5, "5"],
    "parts": [[], None, {"linear": "x"}, {"linear": None}],
    "refused": [None, 5],
    "discarded": ["time", "because", None],
    "unheard": [1.0],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


def signed(record):
    """Return a record as a line, with the checksum that it should have."""
    return json.dumps({**record, "crc": zlib.crc32(json.dumps(record).encode())}) + "\n"


def test_a_record_of_wrong_types_is_damaged_though_its_checksum_is_right(tmp_path):
    journal = TrialJournal(tmp_path / "found", "a search", "its digest")
    for name, value in CASES:
        journal.path.unlink(missing_ok=True)
        journal.begin()
        with journal.path.open("a") as file:
            file.write(signed({**RIGHT, "text": "dp=4"}) + signed({**RIGHT, name: value}))
        content = journal.read()
        assert (set(content.trials), content.damaged) == ({"dp=4"}, 1), (name, value)
    assert content.trials["dp=4"].layers.stages[0].saved == 7
    assert content.trials["dp=4"].layers.passage.behind == 0.2
    without = {name: value for name, value in RIGHT.items() if name != "text"}
    journal.path.unlink()
    journal.begin()
    with journal.path.open("a") as file:
        file.write(signed(without) + signed({}) + signed(RIGHT))
    assert journal.read().damaged == 2


SEARCHED = (
    "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100",
    "dgx-a100",
    "dp=8|4,tp=1|2,pp=1,remat=none,zero=0",
    16,
)


def test_a_search_that_resumes_tries_again_what_is_no_record(tmp_path):
    journal = tmp_path / "found"
    whole = distsim.search(*SEARCHED, workers=1, journal=journal)
    head, *lines = journal.read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    del first["crc"]
    wrong = [signed({**first, name: value}) for name, value in CASES]
    journal.write_text("".join([head, *wrong, *lines[1:]]))
    again = distsim.search(*SEARCHED, workers=1, journal=journal, resume=True)
    assert again.rows() == whole.rows()
    after = journal.read_text().splitlines(keepends=True)
    assert after == [head, *wrong, *lines[1:], lines[0]], "that plan, and no other, was tried again"


def test_a_journal_of_another_version_is_refused(tmp_path, monkeypatch):
    journal, own = tmp_path / "found", distsim.__version__
    distsim.search(*SEARCHED, workers=1, journal=journal)
    written = journal.read_text()
    monkeypatch.setattr(distsim, "__version__", "99.1")
    said = rf"found is a journal of distsim {own}, and this is distsim 99\.1, .*; name another file"
    with pytest.raises(SimulationError, match=said):
        distsim.search(*SEARCHED, workers=1, journal=journal, resume=True)
    assert journal.read_text() == written
    # The first ones did not say what wrote them.
    head, *lines = written.splitlines(keepends=True)
    older = {name: value for name, value in json.loads(head).items() if name != "version"}
    journal.write_text("".join([json.dumps(older) + "\n", *lines]))
    with pytest.raises(SimulationError, match=r"of distsim without a version, and this is distsim 99\.1"):
        distsim.search(*SEARCHED, workers=1, journal=journal, resume=True)
