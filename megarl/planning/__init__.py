"""What a run will need, before it starts: arithmetic over settings and shapes, no engine."""
