"""The page: one file, whose figures are those of the result, whatever names contain; and in a browser."""

import importlib.util
import json
import re
import shutil
from collections import Counter
from datetime import date
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli_cases import run
from training_models import small_gpt, small_mlp

import distsim.report.page.step as boxes
from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.errors import SimulationError
from distsim.hardware import load_cluster
from distsim.plan import Plan
from distsim.plan_search import search
from distsim.plan_search.views.cluster_comparison import ClusterComparison
from distsim.plan_search.views.page import clusters_part, plans_part
from distsim.report import page as pages
from distsim.report.figures import StepFigures
from distsim.report.page.document import SCRIPTS, embedded, page_text
from distsim.report.page.sources import NamedCluster, published_part
from distsim.simulation import Simulator
from distsim.transforms import SGD, differentiate
from distsim.transforms.kernels import KERNELS
from distsim.truth.row import published_rows
from distsim.truth.score import source_of

DGX = load_cluster("dgx-a100")
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>{{data}} & \u2028'


class Outline(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open:
            self.texts[self.open] = self.texts.get(self.open, "") + data


def document_of(path):
    return json.loads(Outline(path.read_text(encoding="utf-8")).texts["data"])


def simulated(plan, model=small_mlp):
    costs, kernels = CostModel(DGX, kernels="eager"), KERNELS["eager"]
    program = parallelize(differentiate(model(), SGD()), Plan.parse(plan), DGX, costs, None, kernels)
    return Simulator(costs).simulate(program)


def case(simulation, name="a case", **fields):
    figures = StepFigures.of(name, simulation, (16, "samples"), 1e9)
    return pages.PageCase(name, {"model": name}, NamedCluster("dgx-a100"), (simulation, figures), **fields)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search's page of a model and a file whose names want out, and what the search found."""
    path = tmp_path_factory.mktemp("page") / "evil <b>&.html"
    step = differentiate(small_gpt(), SGD())
    found = search(step, DGX, "dp=8|4|2,tp=1|2,pp=1|2,remat=none,microbatches=1|2,zero=0|1", top=3)
    best = simulated(found.best.text, small_gpt)
    cases = [case(best, EVIL, notes=[EVIL], plans=plans_part(found)), case(best, "second")]
    clusters = clusters_part(ClusterComparison({EVIL: found, "second": found}))
    pages.write_page(path, EVIL, cases, clusters)
    return path, found, best


def test_a_page_is_one_file_without_references(searched):
    text = searched[0].read_text(encoding="utf-8")
    page = Outline(text)
    assert [tag for tag, _ in page.elements].count("script") == 2  # the data and the one script
    allowed = {"html", "head", "meta", "title", "style", "body", "main", "noscript", "script"}
    assert {tag for tag, _ in page.elements} == allowed
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "action", "data", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "@import" not in page.texts["style"] and "url(" not in page.texts["style"]
    links = set(re.findall(r"https?://[^\s\"'`<>)]+", page.texts["script"]))
    assert links == {"http://www.w3.org/2000/svg"}  # the name of a namespace
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", page.texts["script"])
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


def test_names_of_strangers_stay_text(searched):
    page = Outline(searched[0].read_text(encoding="utf-8"))
    data = page.texts["data"]
    assert not set("<>&") & set(data)
    document = json.loads(data)
    assert page.texts["title"] == document["title"] == EVIL
    assert document["cases"][0]["name"] == document["cases"][0]["notes"][0] == EVIL


def test_what_is_embedded_comes_back():
    value = {"a": [1, 0.1, None, True, EVIL], "b": {"nested": [2**60]}}
    assert json.loads(embedded(value)) == value
    assert json.loads(embedded([float("inf"), float("nan"), (1, 2)])) == [None, None, [1, 2]]


def test_the_figures_are_those_of_the_search(searched):
    path, found, best = searched
    document = document_of(path)
    plans, step = document["cases"][0]["plans"], document["cases"][0]["step"]
    rows = [dict(zip(plans["columns"], row, strict=True)) for row in plans["rows"]]
    assert len(rows) == len(found.trials) == plans["plans"] and plans["counts"] == found.counts
    fitting = [row for row in rows if row["status"] == "fits"]
    assert [row["step"] for row in fitting] == [trial.seconds for trial in found.fitting]
    assert [row["memory"] for row in fitting] == [trial.peak for trial in found.fitting]
    assert len(plans["pareto"]) == len(found.pareto)
    for each, trial in zip(plans["differences"], found.winners[1:], strict=True):
        assert each["seconds"] == trial.seconds - found.best.seconds
        gaps = sum(second - first for _, first, second in each["parts"])
        assert gaps == pytest.approx(each["seconds"], abs=1e-12)
    figures = step["figures"]
    assert figures["step_s"] == best.step_period == found.best.seconds
    assert figures["peak_bytes"] == max(use.peak for use in best.memory.values())
    for parts in step["breakdowns"].values():
        assert sum(parts.values()) == pytest.approx(best.step_time)
    assert step["memory"]["ranks"][0]["usable"] == DGX.devices[0].usable
    assert sum(step["memory"]["ranks"][0]["peak"]) == figures["peak_bytes"]


def test_the_timeline_and_the_path_cover_the_step():
    simulation = simulated("pp=2,dp=2,microbatches=4,schedule=interleaved,chunks=2")
    step = case(simulation).to_dict()["step"]
    timeline, path = step["timeline"], step["path"]
    assert timeline["end"] == round(simulation.step_time * 1e9) and not timeline["left_out"]
    kinds = [name for name, _ in timeline["kinds"]]
    for row in timeline["rows"]:
        starts, lengths, numbers = (row["boxes"][at::3] for at in range(3))
        assert starts == sorted(starts) and starts[-1] + lengths[-1] <= timeline["end"] + 1
        marks = [mark for number in numbers for mark in timeline["marks"][number]]
        forwards = {(m, chunk) for kind, m, chunk in marks if kinds[kind] == "forward"}
        assert forwards == {(m, chunk) for m in range(4) for chunk in range(2)}
    starts, lengths = path["segments"][0::4], path["segments"][1::4]
    assert starts[0] == 0 and sum(lengths) == pytest.approx(timeline["end"], abs=len(lengths))


def test_a_long_timeline_is_thinned_and_says_so(monkeypatch):
    simulation = simulated("pp=4,microbatches=8")
    whole = boxes.timeline_part(simulation)
    monkeypatch.setattr(boxes, "MOST_BOXES", 20)
    monkeypatch.setattr(boxes, "MOST_STRIPS", 20)
    monkeypatch.setattr(boxes, "MOST_ROWS", 3)
    thin = boxes.timeline_part(simulation)
    assert len(whole["rows"]) == 4 and len(thin["rows"]) == 3
    count = sum(len(row["boxes"]) // 3 + len(row["strips"]) // 2 for row in thin["rows"])
    assert count < sum(len(row["boxes"]) // 3 + len(row["strips"]) // 2 for row in whole["rows"])
    said = " ".join(thin["left_out"])
    assert re.match(
        r"1 group of devices of \d+ calls, .* joined .* of \d+ spans of communication, gaps", said
    )


def test_a_search_of_nothing_that_fits_has_a_page(tmp_path):
    little = load_cluster("dgx-a100", ["device.memory=2MiB", "device.context=0GiB"])
    found = search(differentiate(small_gpt(), SGD()), little, "dp=8,remat=none")
    path = tmp_path / "none.html"
    about = pages.PageCase("little", {}, NamedCluster("dgx-a100"), None, (), plans_part(found))
    pages.write_page(path, "none", [about])
    (only,) = document_of(path)["cases"]
    assert only["step"] is None and only["accuracy"] is None and only["plans"]["pareto"] == []


def test_commands_write_pages(capsys, tmp_path):
    model = ("gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100", "--cluster", "dgx-a100", "--batch", 16)
    out, _ = run(capsys, "simulate", *model, "--plan", "dp=2,tp=2", "--html", tmp_path / "a.html")
    (first,) = document_of(tmp_path / "a.html")["cases"]
    assert f"page: {tmp_path / 'a.html'}" in out and first["plans"] is None
    assert f"MFU           {first['step']['figures']['mfu']:.1%}" in out
    sets = ("--plan", "tp=1|2,pp=1,remat=none,zero=0,microbatch_size=1", "--gpus", "2,4", "--top", 2)
    out, _ = run(capsys, "search", *model, *sets, "--html", tmp_path / "b.html")
    document = document_of(tmp_path / "b.html")
    two = document["cases"]
    assert [len(each["step"]["stages"]) for each in two] == [1, 1]
    assert [each["step"]["figures"]["devices"] for each in two] == [2, 4]
    assert {row[0] for row in document["clusters"]["rows"]} == {each["name"] for each in two}
    assert all(cell in out for row in document["clusters"]["rows"] for cell in row[1:])
    assert document["clusters"]["header"][:3] == ["cluster", "step", "tokens/s"]
    assert document["clusters"]["notes"] and all(note in out for note in document["clusters"]["notes"])
    run(capsys, "search", *model, *sets[:2], "--html", tmp_path / "c.html")
    assert document_of(tmp_path / "c.html")["clusters"] is None
    out, _ = run(capsys, "search", *model, *sets[:2], "--tokens", 1e9, "--html", tmp_path / "d.html")
    (row,) = document_of(tmp_path / "d.html")["clusters"]["rows"]
    assert all(cell in out for cell in row)


def test_a_page_needs_a_folder(tmp_path):
    with pytest.raises(SimulationError, match="there is no folder"):
        pages.write_page(tmp_path / "no" / "a.html", "a", [])


def test_the_accuracy_is_that_of_the_device_by_source():
    """Its rows are the published steps, each once; a device without any has those of all."""
    own, none = (published_part(NamedCluster(name)) for name in ("aws-p4de:2", "mi300x"))
    assert own["device"] == "A100-SXM4-80GB" and own["rows"] and not none["rows"]
    steps = [steps for _, steps, *_ in own["rows"]]
    assert own["own"]["rows"] == sum(steps) < own["all"]["rows"] == none["all"]["rows"]
    means = [mean for _, _, mean, *_ in own["rows"]]
    whole = sum(n * mean for n, mean in zip(steps, means, strict=True)) / sum(steps)
    assert own["own"]["mean"] == pytest.approx(whole) and min(means) <= whole <= max(means)
    published = Counter(source_of(row) for row in published_rows())
    assert all(n <= published[source] for source, n, *_ in own["rows"])
    assert 0 <= sum(published.values()) - own["all"]["rows"] <= 1, "one cannot be expressed"
    assert own["own"]["inside"] <= own["own"]["intervals"] <= own["own"]["rows"]
    assert date.fromisoformat(own["date"])


def test_every_asset_is_in_the_package():
    folder = Path(pages.__file__).parent / "assets"
    assert {path.name for path in folder.iterdir()} == {
        "page.html",
        "page.css",
        "errors.csv",
        *(f"{n}.js" for n in SCRIPTS),
    }
    assert "report/page/assets/*" in (folder.parents[3] / "pyproject.toml").read_text()
    assert "</" not in (folder / "page.css").read_text()
    assert not re.search(
        r"</script", page_text({"title": "", "cases": []}).split("<script>")[1].split("</body>")[0][:-10]
    )


# --- in a browser -------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None or importlib.util.find_spec("playwright") is None, reason="no Chromium, or no playwright"
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["desktop", "phone"])
def opened(request, browser, searched):
    """A page that is open, and what its console says."""
    width, scheme = request.param
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=width < 600
    )
    tab, said = context.new_page(), []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("dialog", lambda dialog: said.append("a dialog"))
    tab.goto(searched[0].as_uri())
    tab.wait_for_selector("#accuracy")
    yield tab
    assert said == []
    context.close()


def column(tab, number):
    return tab.eval_on_selector_all(
        f"#plans .scroll >> nth=0 >> tbody tr td:nth-child({number})", "cells => cells.map(c => c.innerText)"
    )


@needs_browser
def test_it_opens_soon_and_is_as_wide_as_the_screen(opened):
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    took = opened.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert took < 2000
    assert EVIL[:60] in opened.inner_text("h1")
    assert opened.query_selector("img") is None


@needs_browser
def test_plans_sort_and_filter(opened, searched):
    found = searched[1]
    assert column(opened, 1)[0].replace("\n", "").startswith("dp=")
    steps = [trial.seconds for trial in found.fitting]
    opened.click("#plans th button:has-text('step')")
    opened.click("#plans th button:has-text('step')")  # the slowest first
    first = opened.inner_text("#plans tbody tr:first-child td:nth-child(2)")
    number, unit = first.split()
    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit] == pytest.approx(max(steps), rel=1e-3)
    opened.fill("#plans input", "tp=2")
    rows = column(opened, 1)
    assert rows and all("tp=2" in row.replace("\n", "").split(",") for row in rows)
    opened.fill("#plans input", "no such plan")
    assert column(opened, 1) == [] and "0 of 0 shown" in opened.inner_text("#plans")
    opened.fill("#plans input", "")
    opened.click("#plans tbody tr >> nth=1")
    assert opened.get_attribute("#plans tbody tr >> nth=1", "aria-selected") == "true"
    assert "a step" in opened.inner_text("#plans output")
    opened.select_option("#plans .controls select >> nth=0", "fits")
    assert set(column(opened, 7)) == {"fits"}


@needs_browser
def test_clusters_are_side_by_side_and_chosen(opened, searched):
    rows = opened.query_selector_all("#clusters tbody tr")
    assert [row.inner_text().split("\t")[0] for row in rows] == [EVIL, "second"]
    assert "tokens/s" in opened.inner_text("#clusters thead")
    opened.click("#clusters tbody tr >> nth=1")
    assert opened.query_selector("#plans") is None
    opened.click("#clusters tbody tr >> nth=0")
    assert opened.query_selector("#plans") is not None
    assert opened.input_value("#page > .controls select") == "0"


@needs_browser
def test_a_point_of_the_picture_names_its_plan(opened):
    dots = opened.query_selector_all("#plans circle")
    dots[len(dots) - 2].scroll_into_view_if_needed()
    box = dots[len(dots) - 2].bounding_box()  # the last is the ring
    opened.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert re.match(r"dp=\S+: .* a step", opened.inner_text("#plans output"))


@needs_browser
def test_the_timeline_zooms_and_pans_and_tells(opened):
    def picture():
        return opened.evaluate("document.querySelector('#timeline canvas').toDataURL()")

    canvas = opened.query_selector("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    seen = {picture()}
    for label in ("zoom in", "zoom in", "later", "zoom out"):
        opened.click(f"#timeline button[aria-label='{label}']")
        seen.add(picture())
    opened.click("#timeline button[aria-label='the whole step']")
    assert len(seen) == 5 and picture() in seen
    opened.select_option("#timeline select", "microbatch")
    assert picture() not in seen
    box = canvas.bounding_box()
    opened.mouse.click(box["x"] + box["width"] / 2, box["y"] + 24 + 30 + 10)
    assert re.search(
        r"of microbatch \d|idle|update|other|communication", opened.inner_text("#timeline output")
    )
    opened.mouse.click(box["x"] + box["width"] / 2, box["y"] + 24 + 12)
    assert "critical path: " in opened.inner_text("#timeline output")
    opened.focus("#timeline canvas")
    before = picture()
    opened.keyboard.press("+")
    zoomed = picture()
    assert zoomed != before
    opened.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60)
    opened.mouse.down()
    opened.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
    opened.mouse.up()
    assert picture() not in (before, zoomed)
    opened.keyboard.press("0")
    assert picture() == before


@needs_browser
def test_the_other_parts_answer(opened, searched):
    picture = opened.query_selector("#memory svg")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    opened.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "in use" in opened.inner_text("#memory output")
    for way in searched[2].breakdown("kind"):
        opened.select_option("#bound select", "kind")
        assert way in opened.inner_text("#bound")
    opened.fill("#assumptions input", "slowdown")
    assert "device.slowdown" in opened.inner_text("#assumptions tbody")
    assert "published step" in opened.inner_text("#accuracy").lower()
    assert "within their 90 % intervals" in opened.inner_text("#accuracy")
    opened.select_option("#page > .controls select", "1")  # the other case, which has no plans
    assert opened.query_selector("#plans") is None and opened.query_selector("#what-ifs")
