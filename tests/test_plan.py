"""A plan's text parses back to it, and what is no plan is refused with the field, value and choices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.errors import DistsimError, PlanError
from distsim.plan import RESHARD, STAGES, ZERO, Plan, parse_stages
from distsim.plan.rank_layout import MAX_DEGREE
from distsim.plan.recomputation import REMAT
from distsim.schedule import SCHEDULES

counts = st.integers(1, MAX_DEGREE)
shares = st.integers(0, 100).map(lambda n: f"budget:{n / 100}")
remats = st.sampled_from([r for r in REMAT if ":" not in r]) | counts.map("every:{}".format) | shares
remats |= st.lists(st.sampled_from(["MatMul", "Attention", "Gelu"]), min_size=1, unique=True).map(
    lambda ops: f"ops:{'+'.join(ops)}"
)


@st.composite
def named(draw):
    """Plans whose stages have a name, of a schedule that runs so many a rank."""
    schedule = draw(st.sampled_from([*SCHEDULES]))
    return Plan(
        *[draw(counts) for _ in range(4)],
        schedule,
        draw(st.sampled_from([s for s in STAGES if "N" not in s])),
        draw(remats),
        zero := draw(st.sampled_from(ZERO)),
        draw(st.sampled_from(RESHARD)) if zero == 3 else "always",
        SCHEDULES[schedule].stages_a_rank or draw(counts),
    )


@st.composite
def numbered(draw):
    """Plans that say how many blocks each stage holds."""
    pp, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 999), min_size=pp * chunks, max_size=pp * chunks))
    return Plan(pp=pp, stages="-".join(map(str, sizes)), chunks=chunks, schedule="interleaved")


plans = named() | numbered()


def test_parse_the_example():
    plan = Plan.parse("dp=2,tp=4,pp=2,microbatches=8,schedule=1f1b")
    assert plan == Plan(dp=2, tp=4, pp=2, microbatches=8, schedule="1f1b")
    assert plan.devices == 16


def test_a_field_left_out_has_its_default_and_spaces_do_not_count():
    assert Plan.parse(" pp = 4 , schedule = gpipe ") == Plan(pp=4, schedule="gpipe")
    assert str(Plan()) == "dp=1,tp=1,pp=1,microbatches=1,schedule=1f1b"
    assert str(Plan(stages="auto", remat="every:2")) == f"{Plan()},stages=auto,remat=every:2"
    chunked = Plan(pp=2, chunks=2, schedule="looped_bfs", stages="3-4-4-3")
    assert str(chunked).endswith("schedule=looped_bfs,stages=3-4-4-3,chunks=2")
    assert Plan().devices == 1


def test_a_pipeline_has_as_many_stages_as_its_ranks_have_chunks():
    plan = Plan.parse("pp=2,chunks=2,schedule=interleaved,stages=3-4-4-3,microbatches=4")
    assert (plan.num_stages, plan.devices, parse_stages(plan.stages)) == (4, 2, (3, 4, 4, 3))
    assert Plan(pp=4).num_stages == 4


@settings(deadline=None)
@given(plans)
def test_the_text_parses_back_to_the_plan(plan):
    assert Plan.parse(str(plan)) == plan
    assert hash(Plan.parse(str(plan))) == hash(plan)
    assert plan.devices == plan.dp * plan.tp * plan.pp


@settings(deadline=None)
@given(plans, st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_matter(plan, random):
    items = str(plan).split(",")
    random.shuffle(items)
    assert Plan.parse(",".join(items)) == plan


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from([*"dtp=,-0123456789 ", "dp=", "schedule="])).map("".join))
def test_any_text_is_a_plan_or_a_plan_error(text):
    try:
        plan = Plan.parse(text)
    except PlanError as error:
        assert len(str(error)) < 260
    else:
        assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hp=4", ["unknown field 'hp'", "dp, tp, pp, microbatches, schedule"]),
        ("DP=4", ["unknown field 'DP'", "dp, tp, pp, microbatches, schedule"]),
        ("dp=two", ["dp='two' is not an integer", f"1..{MAX_DEGREE}"]),
        ("dp=2.0", ["dp='2.0' is not an integer"]),
        ("dp=1_0", ["dp='1_0' is not an integer"]),
        ("dp=٣", ["is not an integer"]),
        ("dp=", ["dp='' is not an integer"]),
        ("tp=0", ["tp=0 is out of range", f"1..{MAX_DEGREE}"]),
        ("microbatches=-3", ["microbatches=-3 is out of range"]),
        (f"pp={MAX_DEGREE + 1}", [f"pp={MAX_DEGREE + 1} is out of range"]),
        ("pp=1" + "0" * 6000, ["pp='1000", "is out of range"]),
        ("dp=2,tp=1,dp=4", ["dp is given twice", "2 and '4'"]),
        ("schedule=2f2b", ["schedule='2f2b' is unknown", "choose one of 1f1b, gpipe"]),
        ("schedule=pipedream:2", ["pipedream takes no number; use schedule=pipedream"]),
        ("schedule=pipedream_2bw:1.5", ["takes the microbatches of an update, as in pipedream_2bw:8"]),
        ("schedule=pipedream_2bw:0", ["takes the microbatches of an update, as in pipedream_2bw:8"]),
        ("schedule=zb_auto:0", ["takes a share of the memory of 1F1B over 0", "zb_auto:2"]),
        ("schedule=1f1b:2", ["1f1b takes no number; use schedule=1f1b"]),
        ("pp=2,chunks=2", ["runs 1 stage a rank, not chunks=2"]),
        ("pp=2,schedule=zb_v", ["schedule=zb_v runs 2 stages a rank, not chunks=1"]),
        ("stages=best", ["stages='best' is unknown", "choose one of even, default, layers, auto, N-N-"]),
        ("stages=N-N-...", ["stages='N-N-...' is unknown", "as in 3-4-4-3"]),
        ("pp=2,stages=3-", ["stages='3-' is unknown"]),
        ("pp=2,stages=3-x", ["stages='3-x' is unknown"]),
        ("pp=2,stages=3-٣", ["is unknown"]),
        ("pp=2,stages=-3-4", ["stages='-3-4' is unknown"]),
        ("pp=2,stages=0-0", ["stages=0-0 has no layer on any stage"]),
        ("pp=3,stages=3-0-4", ["stages='3-0-4': each stage holds 1 to 9999999 blocks"]),
        ("pp=2,stages=03-4", ["stages='03-4': each stage holds 1 to"]),
        ("pp=2,stages=3-99999999", ["each stage holds 1 to 9999999 blocks"]),
        ("pp=2,stages=3-4-4-3", ["'3-4-4-3' has 4 numbers", "pp=2 with chunks=1 makes 2 stages"]),
        (
            "pp=2,chunks=2,schedule=interleaved,stages=7",
            ["'7' has 1 numbers", "pp=2 with chunks=2 makes 4 stages"],
        ),
        ("chunks=0", ["chunks=0 is out of range"]),
        ("chunks=two", ["chunks='two' is not an integer"]),
        ("zero=4", ["zero=4 is out of range", "choose one of 0..3"]),
        ("zero=on", ["zero='on' is not an integer", "choose one of 0..3"]),
        ("zero=3,reshard=keep", ["reshard='keep' is unknown", "choose one of always, never"]),
        ("zero=2,reshard=never", ["reshard=never", "zero=2 gathers none", "zero=3"]),
        ("fsdp=on", ["unknown field 'fsdp'", "zero=3", "zero=3,reshard=never", "zero=0"]),
        (
            "remat=some",
            [
                "remat='some' is unknown",
                f"choose one of {', '.join(REMAT)}",
            ],
        ),
        ("remat=every", ["remat='every' is unknown", "every:N"]),
        ("remat=full:2", ["remat='full:2' is unknown"]),
        ("remat=ops", ["remat='ops' is unknown", "ops:LIST"]),
        ("remat=ops:", ["ops takes the types of ops", "as in ops:MatMul+Attention"]),
        ("remat=ops:MatMul+", ["remat='ops:MatMul+': ops takes the types of ops"]),
        ("remat=ops:MatMul+Gelu+MatMul", ["names MatMul twice"]),
        ("remat=ops:MatMul/2+MatMul", ["names MatMul twice"]),
        ("remat=ops:MatMul/1", ["ops takes the types of ops", "ops:MatMul/2"]),
        ("remat=every:0", ["every takes an integer in 1..", "every:2"]),
        ("remat=every:1.5", ["every takes an integer in 1.."]),
        ("remat=budget:1.01", ["budget takes a number in 0..1", "budget:0.5"]),
        ("remat=budget:nan", ["budget takes a number in 0..1"]),
        ("schedule=", ["schedule='' is unknown", "choose one of 1f1b, gpipe"]),
        ("", ["'' is not key=value", str(Plan())]),
        ("dp=2,,tp=1", ["'' is not key=value"]),
        ("dp:2", ["'dp:2' is not key=value"]),
        ("dp=2=2", ["dp='2=2' is not an integer"]),
    ],
)
def test_bad_text_is_refused(text, parts):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 260


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"dp": 0}, "dp=0 is out of range"),
        ({"tp": 2.0}, "tp=2.0 is not an integer"),
        ({"pp": True}, "pp=True is not an integer"),
        ({"microbatches": "8"}, "microbatches='8' is not an integer"),
        ({"dp": 10**5000}, "more than 20 digits is out of range"),
        ({"schedule": "zb"}, "schedule='zb' is unknown"),
        ({"stages": None}, "stages=None is unknown"),
        ({"stages": ["even"]}, "stages=['even'] is unknown"),
        ({"stages": (3, 4)}, "stages=(3, 4) is unknown"),
        ({"chunks": 2.0}, "chunks=2.0 is not an integer"),
        ({"remat": 3}, "remat=3 is unknown"),
        ({"schedule": ["1f1b"]}, r"schedule=['1f1b'] is unknown"),
    ],
)
def test_a_bad_field_is_refused(fields, part):
    with pytest.raises(PlanError) as caught:
        Plan(**fields)
    assert part in str(caught.value)
    assert isinstance(caught.value, DistsimError) and isinstance(caught.value, ValueError)
