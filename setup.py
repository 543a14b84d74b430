"""Compiles the inner loop of weight sync's checksum; everything else stands in pyproject.toml.

Where there is no C compiler the install goes on without it (megarl/weight_sync/compiled.py).
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "megarl.weight_sync._sums",
            sources=["megarl/weight_sync/sums.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
