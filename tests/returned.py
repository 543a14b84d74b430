"""Program: prints, as JSON, what a function without arguments returns: MODULE FUNCTION."""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    """Call it."""
    module, function = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), function)()))
