"""What benchmarks/weight_sync.py is made of."""
