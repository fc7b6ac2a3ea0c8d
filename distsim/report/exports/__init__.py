"""What other programs open: traces by rank, memory as PyTorch's viewer has it, Chakra execution traces."""

from distsim.report.exports.chakra import write_chakra
from distsim.report.exports.memory_snapshot import write_memory_snapshot
from distsim.report.exports.rank_traces import write_rank_traces

__all__ = ["write_chakra", "write_memory_snapshot", "write_rank_traces"]
