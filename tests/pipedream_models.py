"""Small models and plans that update weights without a flush."""

from functools import cache

from training_models import small_gpt, small_mlp

from distsim.compose import parallelize
from distsim.executor import CostModel
from distsim.hardware import load_cluster
from distsim.plan import Plan
from distsim.schedule import Schedule
from distsim.transforms import Adam, differentiate

MODELS = {
    "mlp": lambda batch: small_mlp(layers=8, batch=batch),
    "gpt": lambda batch: small_gpt(3, batch=batch),
}


BATCH = 16


@cache
def joint_of(model, optimizer):
    return differentiate(MODELS[model](BATCH), optimizer)


PLANS = [
    "pp=4,microbatches=8,schedule=pipedream",
    "pp=3,microbatches=16,schedule=pipedream_2bw:4",
    "dp=2,pp=2,microbatches=8,schedule=pipedream,zero=3,reshard=never",
    "dp=2,pp=2,microbatches=8,schedule=pipedream,zero=1",
    "dp=2,tp=2,pp=2,microbatches=8,schedule=pipedream_2bw,zero=2,remat=full",
    "dp=2,tp=2,pp=2,microbatches=8,schedule=pipedream_2bw,zero=3,remat=full",
]


@cache
def planned(text):
    costs = CostModel(load_cluster("dgx-a100"))
    joint = differentiate(small_gpt(4, batch=32), Adam())
    return parallelize(joint, Plan.parse(text), costs.topology, costs), costs


def replace_name(order, name):
    return Schedule(
        name, order.num_stages, order.num_microbatches, order.ranks, order.rank_of, weights=order.weights
    )
