"""Write the list of Megatron's fields that `[learner.transformer_config]` is checked against.

    python tools/make_transformer_fields.py     # with the pinned megatron-core installed

Reads the installed TransformerConfig; run it when the pin moves. The test beside
`megarl/config/transformer_fields.py` compares the shipped list with the installed engine.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import types
import typing
from pathlib import Path

from megarl.compat import placeholders

TARGET = Path(__file__).parent.parent / "megarl" / "config" / "transformer_fields.json"
WORDS = {bool: "flag", int: "integer", float: "number", str: "text"}


def kinds_of(annotation: object) -> list[str]:
    """Which values of a TOML file the field takes; empty where it takes none."""
    if isinstance(annotation, type) and annotation in WORDS:
        return [WORDS[annotation]]
    if typing.get_origin(annotation) is typing.Literal:
        return sorted({WORDS[type(v)] for v in typing.get_args(annotation) if type(v) in WORDS})
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return []
    return sorted({kind for arg in typing.get_args(annotation) for kind in kinds_of(arg)})


def installed_fields() -> tuple[str, dict[str, list[str]]]:
    """The installed Megatron-Core's version, and field -> kinds of value."""
    placeholders.install(["triton"])
    from megatron.core.transformer.transformer_config import TransformerConfig

    hints = typing.get_type_hints(TransformerConfig)
    found = {
        field.name: kinds_of(hints[field.name])
        for field in dataclasses.fields(TransformerConfig)
        if field.init
    }
    version = importlib.metadata.version("megatron-core")
    return version, {name: kinds for name, kinds in sorted(found.items()) if kinds}


def main() -> None:
    """Writes the list, one field a line."""
    version, fields = installed_fields()
    rows = ",\n".join(f"    {json.dumps(n)}: {json.dumps(kinds)}" for n, kinds in fields.items())
    TARGET.write_text(
        f'{{\n  "engine": "megatron-core",\n  "version": {json.dumps(version)},\n'
        f'  "fields": {{\n{rows}\n  }}\n}}\n'
    )


if __name__ == "__main__":
    main()
