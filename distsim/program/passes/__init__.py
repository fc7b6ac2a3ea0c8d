"""A stage's passes: backward in halves, two that overlap, one that goes on with its sums."""
