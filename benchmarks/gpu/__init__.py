"""What `benchmarks/gpu_check.py` checks, a module for each concern. Nothing here is imported by the package."""
