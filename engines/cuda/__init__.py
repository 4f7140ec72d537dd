"""What a GPU needs beyond torch: weights shared between processes and checked, the memory's level, clocks, the L2 cache. Not tried on a GPU."""
