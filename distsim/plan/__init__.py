"""How a training step is laid out on the devices, as one line of text; what frameworks choose by default."""

from distsim.plan.plan import (
    RESHARD,
    STAGES,
    SWITCH,
    TP_OVERLAP,
    ZERO,
    Plan,
    parse_schedule,
    parse_stages,
)

__all__ = ["RESHARD", "STAGES", "SWITCH", "TP_OVERLAP", "ZERO", "Plan", "parse_schedule", "parse_stages"]
