"""distsim: how fast a model trains on a cluster, whether it fits, and what holds it back.

>>> import distsim
>>> step = distsim.simulate("mlp:layers=4,width=64", "dgx-a100", plan="dp=2,tp=2", batch=16)
>>> step.fits
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distsim import models as models
    from distsim.compose import parallelize as parallelize
    from distsim.cost import CostModel as CostModel
    from distsim.errors import DistsimError as DistsimError
    from distsim.hardware import load_cluster as load_cluster
    from distsim.hardware import presets as presets
    from distsim.importer import import_from_hf as import_from_hf
    from distsim.importer import import_from_onnx as import_from_onnx
    from distsim.importer import load_model as load_model
    from distsim.importer import model_names as model_names
    from distsim.ir import Topology as Topology
    from distsim.plan import Plan as Plan
    from distsim.plan.stacks import Stack as Stack
    from distsim.plan_search import SearchResult as SearchResult
    from distsim.simulation import Simulation as Simulation
    from distsim.simulation import Simulator as Simulator
    from distsim.study.compare import compare as compare
    from distsim.study.search import search as search
    from distsim.study.simulate import simulate as simulate
    from distsim.transforms import differentiate as differentiate
    from distsim.transforms.autodiff.optimizers import SGD as SGD
    from distsim.transforms.autodiff.optimizers import Adam as Adam
    from distsim.transforms.autodiff.optimizers import AdamW as AdamW
    from distsim.transforms.autodiff.precision import Precision as Precision
    from distsim.transforms.kernels.policies import Kernels as Kernels

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CostModel",
    "DistsimError",
    "Kernels",
    "Plan",
    "Precision",
    "SearchResult",
    "Simulation",
    "Simulator",
    "Stack",
    "Topology",
    "__version__",
    "compare",
    "differentiate",
    "import_from_hf",
    "import_from_onnx",
    "load_cluster",
    "load_model",
    "model_names",
    "models",
    "parallelize",
    "presets",
    "search",
    "simulate",
]

_HOMES = {
    "simulate": "distsim.study.simulate",
    "search": "distsim.study.search",
    "compare": "distsim.study.compare",
    "Plan": "distsim.plan",
    "Simulation": "distsim.simulation",
    "Simulator": "distsim.simulation",
    "SearchResult": "distsim.plan_search",
    "Topology": "distsim.ir",
    "load_cluster": "distsim.hardware",
    "presets": "distsim.hardware",
    "load_model": "distsim.importer",
    "model_names": "distsim.importer",
    "import_from_hf": "distsim.importer",
    "import_from_onnx": "distsim.importer",
    "Precision": "distsim.transforms.autodiff.precision",
    "Kernels": "distsim.transforms.kernels.policies",
    "Stack": "distsim.plan.stacks",
    "SGD": "distsim.transforms.autodiff.optimizers",
    "Adam": "distsim.transforms.autodiff.optimizers",
    "AdamW": "distsim.transforms.autodiff.optimizers",
    "differentiate": "distsim.transforms",
    "parallelize": "distsim.compose",
    "CostModel": "distsim.cost",
    "DistsimError": "distsim.errors",
}
"""Where names are that are imported when they are first used: most take a tenth of a second and more."""


def __getattr__(name: str) -> Any:
    if name == "models":
        return import_module("distsim.models")
    if name not in _HOMES:
        raise AttributeError(f"module 'distsim' has no attribute {name!r}", name=name, obj=None)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
