"""What is on the disk before it is counted on. Imports nothing of megarl."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Have the disk hold the bytes of a file, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
