"""Settings: their schema, how they are read and checked, and how they are written."""
