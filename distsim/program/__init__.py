"""Program: the stages of a pipeline, their order, what passes between them; written out as one Function."""

from distsim.program.program import Program

__all__ = ["Program"]
