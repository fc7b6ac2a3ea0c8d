"""Orders that greedy algorithms find: list scheduling for given times, and squeezing of a repeated block."""
