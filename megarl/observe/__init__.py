"""What a run measures and shows: metrics, progress."""
