"""Reading models from files: ONNX, and the configurations of Hugging Face."""

from distsim.importer.decoders import import_from_hf, model_names
from distsim.importer.onnx_file import import_from_onnx, symbolic_dimensions
from distsim.importer.source import is_decoder, is_named, load_model
from distsim.importer.tensors import parse_tensor_from_file

__all__ = [
    "import_from_hf",
    "import_from_onnx",
    "is_decoder",
    "is_named",
    "load_model",
    "model_names",
    "parse_tensor_from_file",
    "symbolic_dimensions",
]
