"""A search on a Dask cluster of two processes finds what one process finds, also when one is killed."""

import os
import signal
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

import pytest
from training_models import topology_of

from distsim.cli import main
from distsim.errors import SimulationError
from distsim.models import mlp
from distsim.plan_search import RemoteWorkers, dask_workers, describe, search
from distsim.transforms import Adam, differentiate

SETS = "tp=1|2,pp=1,remat=none|full,zero=0|1"


@pytest.fixture(scope="module")
def step():
    return differentiate(mlp(layers=4, width=64, batch=16), Adam())


@pytest.fixture(scope="module")
def whole(step):
    return describe(search(step, topology_of(4), SETS))


def test_any_executor_finds_the_same(step, whole):
    with ThreadPoolExecutor(3) as pool:
        assert describe(search(step, topology_of(4), SETS, workers=RemoteWorkers(pool))) == whole


def test_without_a_cluster_it_says_how_to_start_one(capsys):
    pytest.importorskip("distributed")
    with pytest.raises(SimulationError, match="no Dask scheduler answers at tcp://127.0.0.1:9"):
        dask_workers("tcp://127.0.0.1:9", 0.5)
    small = ["search", "gpt2", "--cluster", "dgx-a100", "--batch", "8", "--dask", "x", "--workers", "2"]
    assert main(small) == 2 and "give one" in capsys.readouterr().err


class Killer(Executor):
    """Hands calls on to another executor, and kills a process after the second of them."""

    def __init__(self, executor, process):
        self.executor, self.process, self.calls = executor, process, 0

    def submit(self, *call):
        future = self.executor.submit(*call)
        self.calls += 1
        if self.calls == 2:
            os.kill(self.process, signal.SIGKILL)
        return future


def test_a_worker_that_is_killed_loses_nothing(step, whole):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster:
        workers = dask_workers(cluster.scheduler_address)
        killer = Killer(workers.executor, cluster.workers[0].pid)
        found = search(step, topology_of(4), SETS, workers=replace(workers, executor=killer))
        workers.close()
    assert killer.calls > 2 and describe(found) == whole
