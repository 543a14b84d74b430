"""What benchmarks/reshard_plan.py is made of."""
