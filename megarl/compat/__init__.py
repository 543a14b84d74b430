"""What the engines lack on a CPU; inert where the real thing is present."""
