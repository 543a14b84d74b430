"""Measurements of megarl. Programs, not part of the package; see README.md."""
