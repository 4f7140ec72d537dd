"""External engines as baselines, each in an environment of its own, run as a process over the same shape points."""
