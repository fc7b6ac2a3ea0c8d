"""Files of frameworks that train: Megatron-LM's arguments, torchtitan's TOML, DeepSpeed's JSON."""

from distsim.importer.configs.deepspeed import read_deepspeed
from distsim.importer.configs.megatron import read_megatron_args
from distsim.importer.configs.torchtitan import read_torchtitan
from distsim.importer.configs.training import BatchSizes, TrainingConfig

__all__ = ["BatchSizes", "TrainingConfig", "read_deepspeed", "read_megatron_args", "read_torchtitan"]
