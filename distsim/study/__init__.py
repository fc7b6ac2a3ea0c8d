"""A study: a model trained in some way on a cluster, as people say it, in Python or on the command line."""
