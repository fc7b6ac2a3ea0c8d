"""A user's own machine: timings of its kernels and collectives become the figures of a cluster's file."""
