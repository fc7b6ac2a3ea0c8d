"""model + Plan + Topology -> Program, the one composition; each piece of it is made once."""

from distsim.compose.compose import build_program, parallelize

__all__ = ["build_program", "parallelize"]
