"""Stage c: scorers in worker processes; a reward is a value, a failure or a timeout."""
