"""Decoder-only transformers by name, or by the ``config.json`` of Hugging Face."""

from distsim.importer.decoders.described import (
    config_in,
    config_label,
    decoder_of,
    decoder_sizes,
    load_decoder,
    model_names,
    named_sizes,
)
from distsim.importer.decoders.huggingface import import_from_hf, sizes_from_hf

__all__ = [
    "config_in",
    "config_label",
    "decoder_of",
    "decoder_sizes",
    "import_from_hf",
    "load_decoder",
    "model_names",
    "named_sizes",
    "sizes_from_hf",
]
