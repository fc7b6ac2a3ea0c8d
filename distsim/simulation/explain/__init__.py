"""Why a step takes its time: critical path, shares, what-ifs."""
