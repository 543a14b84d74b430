"""Write the list of SGLang's server arguments that `[rollout.engine_args]` is checked against.

    python tools/make_engine_args.py            # with the pinned sglang installed

Reads the installed engine's own argument parser; run it when the pin moves. The test beside
`megarl/rollout/engine_args.py` compares the shipped list with the installed engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megarl.compat import sglang_cpu, sglang_server

TARGET = Path(__file__).parent.parent / "megarl" / "rollout" / "engine_args.json"


def kind_of(action: argparse.Action) -> str:
    """How an argument is written on the command line; empty where it is no setting of its own."""
    if action.dest in ("help", "config") or "StoreConst" in type(action).__name__:
        return ""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "yes_no"
    if action.nargs == 0:
        return "switch"
    return "list" if action.nargs in ("+", "*") else "value"


def installed_arguments() -> tuple[str, dict[str, list[str]]]:
    """The installed SGLang's version, and field -> [flag, kind] for every argument it takes."""
    sglang_server.hide_megatron()
    sglang_cpu.install()
    from sglang.srt.server_args import ServerArgs
    from sglang.version import __version__

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments: dict[str, list[str]] = {}
    for action in parser._actions:
        kind = kind_of(action)
        if kind and action.dest not in arguments:
            arguments[action.dest] = [action.option_strings[0], kind]
    return __version__, dict(sorted(arguments.items()))


def main() -> None:
    """Write the list beside the module that reads it."""
    version, arguments = installed_arguments()
    rows = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in arguments.items()
    )
    head = f'  "engine": "sglang",\n  "version": "{version}",\n  "arguments": {{\n'
    TARGET.write_text(f"{{\n{head}{rows}\n  }}\n}}\n")
    print(f"{TARGET}: {len(arguments)} arguments of sglang {version}")


if __name__ == "__main__":
    main()
