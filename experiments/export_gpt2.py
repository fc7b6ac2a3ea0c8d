"""Export Hugging Face's GPT-2 to ONNX without its weights: `python experiments/export_gpt2.py OUT.onnx`.

Development only: needs torch 2.13, transformers, onnx and onnxscript, which distsim does not.
Nothing is downloaded: the model is built from `GPT2Config()` with random weights. Batch and
sequence are symbolic. Weights stay references to an external file that is not kept.
"""

import argparse
import math
import tempfile
from pathlib import Path

import onnx
import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Logits(torch.nn.Module):
    """The language model as a function of token ids to logits, without the cache of keys and values."""

    def __init__(self, model: GPT2LMHeadModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch, seq, vocabulary) of token ids (batch, seq)."""
        return self.model(input_ids=input_ids, use_cache=False).logits


def make_model() -> Logits:
    """GPT-2 small in evaluation mode, with no two parameters equal.

    GPT-2's fresh biases are all zero and its norm scales all one. The exporter merges equal
    constants, so untouched layers would come out sharing one bias: 52 parameters instead of 148.
    """
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    return Logits(model).eval()


def export(path: Path) -> None:
    """Write the graph to `path`; its initializers of more than 1 KiB refer to a file that is left out."""
    # Two different sizes, none of them 1: a size of 1 or equal sizes would be taken for constants.
    tokens = torch.randint(0, 50257, (2, 16))
    program = torch.onnx.export(
        make_model(),
        (tokens,),
        dynamo=True,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_shapes={"input_ids": {0: "batch", 1: "seq"}},
    )
    with tempfile.TemporaryDirectory() as folder:
        full = Path(folder) / path.name
        program.save(full, external_data=True)
        model = onnx.load(full, load_external_data=False)
    strip(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def strip(model: onnx.ModelProto) -> None:
    """Drop what only a debugger reads (stack traces, graph listings); keep each node's module path."""
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key == "namespace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    for value in [*model.graph.value_info, *model.graph.input, *model.graph.output, *model.graph.initializer]:
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    del model.metadata_props[:]


def check(path: Path) -> None:
    """Refuse a file that is not the GPT-2 that was asked for.

    Raises:
        ValueError: a dimension was made static, or parameters are missing.
        onnx.checker.ValidationError: the graph is not valid ONNX.
    """
    model = onnx.load(path, load_external_data=False)
    # The checker opens external files, so it gets a copy whose weights are ordinary inputs.
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for tensor in [t for t in bare.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]:
        bare.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
        bare.graph.initializer.remove(tensor)
    onnx.checker.check_model(bare, full_check=True)
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }
    if shapes != {"input_ids": ["batch", "seq"], "logits": ["batch", "seq", 50257]}:
        raise ValueError(f"{path}: inputs and outputs are {shapes}; batch and seq must be symbolic")
    sizes = [tuple(tensor.dims) for tensor in model.graph.initializer if tensor.name.startswith("model.")]
    parameters = sum(map(math.prod, sizes))
    if (len(sizes), parameters) != (148, 124_439_808):
        raise ValueError(f"{path}: {len(sizes)} parameters of {parameters} elements, not 148 of 124439808")
    print(f"{path}: {path.stat().st_size} bytes, {len(model.graph.node)} nodes, {len(sizes)} parameters")


def main() -> None:
    """Export and check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="where to write the ONNX file")
    path = parser.parse_args().path
    export(path)
    check(path)


if __name__ == "__main__":
    main()
