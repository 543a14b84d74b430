"""What `benchmarks/learner.py` measures: packing, one optimizer step, and memory of log-probs."""
