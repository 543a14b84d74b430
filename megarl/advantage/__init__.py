"""Stage d: advantages from the rewards of a group."""
