"""Which ops one kernel runs: attention as one op, or written out."""
