"""The policy as both engines share it: shape, parameter table, families. Pure."""
