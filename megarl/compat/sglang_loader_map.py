"""Program: a server's layout read off SGLang's own loader, for models that have no family table.

    python -m megarl.compat.sglang_loader_map MODEL_DIR tp_size=2 [ep_size=2 ...] > layout.json

Owns the recording: checkpoint tensors that hold their elements' numbers go through the model's own
`load_weights` on every rank, and what each parameter then holds says where it came from. The other
words are fields of SGLang's ServerArgs. Of the model only config.json and the names and shapes in
its safetensors files are read; each rank is built on this machine's CPU, one after the other.
`megarl.reshard.recorded.from_json` makes a layout of the answer.

For: sglang 0.5.23. Ends when SGLang can tell where a loader puts what.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from megarl.compat import sglang_ranks
from megarl.reshard.numbering import PADDING, UNWRITTEN, Numbering, Numbers
from megarl.reshard.recorded import recorded_rank, to_json

MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7, "float8_e4m3fn": 3}
"""Of each type: whole numbers up to 2 ** (bits + 1) are exact in it."""


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in a folder's safetensors files."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def record(model: Any, numbering: Numbering) -> dict[str, Numbers]:
    """For each parameter of a model on one rank, the numbers of the elements that it holds.

    Numbers are loaded digit by digit, in as many digits as the narrowest parameter can hold
    exactly. Parameters that the loader leaves alone are not in the answer.
    """
    import torch

    held = {name: p for name, p in model.named_parameters() if p.dtype.is_floating_point}
    narrowest = min(MANTISSA_BITS[str(p.dtype).removeprefix("torch.")] for p in held.values())
    radix = 1 << (narrowest + 1)
    total = {name: np.zeros(tuple(p.shape), np.int64) for name, p in held.items()}
    unwritten: set[str] = set()
    unit = 1
    while unit <= numbering.last:
        with torch.no_grad():
            for parameter in held.values():
                parameter.fill_(UNWRITTEN)
            model.load_weights(_digits(numbering, unit, radix))
        for name, parameter in held.items():
            digits = parameter.detach().to(torch.float64).numpy()
            if (digits == UNWRITTEN).all():
                unwritten.add(name)
            elif (digits != np.floor(digits)).any():
                raise SystemExit(f"{name}: the loader computes with what it loads")
            total[name] += np.where(digits == UNWRITTEN, UNWRITTEN, digits * unit).astype(np.int64)
        unit *= radix
    for numbers in total.values():
        numbers[numbers < PADDING] = UNWRITTEN
    return {name: numbers for name, numbers in total.items() if name not in unwritten}


def _digits(numbering: Numbering, unit: int, radix: int) -> Iterator[tuple[str, Any]]:
    """Checkpoint tensors that hold one digit of each element's number."""
    import torch

    for name, shape in numbering.shapes.items():
        first = numbering.first(name)
        numbers = np.arange(first, first + int(np.prod(shape)), dtype=np.int64)
        digits = (numbers // unit % radix).astype(np.float32).reshape(shape)
        yield name, torch.from_numpy(digits)


def server_flags(words: list[str]) -> dict[str, Any]:
    """SGLang's settings from words of the command line.

    >>> server_flags(["tp_size=2", "enable_dp_lm_head=true", "moe_a2a_backend=none"])
    {'tp_size': 2, 'enable_dp_lm_head': True, 'moe_a2a_backend': 'none'}
    """
    flags = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            flags[name] = json.loads(value)
        except json.JSONDecodeError:
            flags[name] = value
    return flags


def layout_text(folder: str, flags: dict[str, Any]) -> str:
    """The JSON of the layout of a server of the model, all its ranks."""
    numbering = Numbering(checkpoint_shapes(Path(folder)))
    ranks = []
    for rank in range(flags.get("tp_size", 1) * flags.get("pp_size", 1)):
        config = sglang_ranks.become(folder, rank, "float32", flags)
        model = sglang_ranks.load(config, "dummy")
        ranks.append(recorded_rank(rank, record(model, numbering), numbering))
    words = " ".join(f"{name}={value}" for name, value in flags.items())
    return to_json(f"sglang recorded {words}".strip(), numbering, ranks)


def main() -> None:
    """Print the layout; what SGLang prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        text = layout_text(sys.argv[1], server_flags(sys.argv[2:]))
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sglang_ranks.prepare_process()
    main()
