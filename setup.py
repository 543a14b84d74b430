"""Kept for tools that call setup.py; everything stands in pyproject.toml."""

from setuptools import setup

setup()
