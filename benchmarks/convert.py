"""How fast `megarl convert` is against `cp` of the same bytes, and how much memory it takes.

    .venv/bin/python benchmarks/convert.py [--gb 16] [--runs 3] [--workers N] [--folder DIR]

A model of Qwen3's form is written with random numbers, in bf16. Each turn copies its folder, makes
a torch_dist checkpoint of it, and a Hugging Face folder of that, each by a command of its own,
start and all. Before each the disk is let finish and the page cache lets go of all these files, so
that everybody reads from the disk. What is written may stay in the cache, as the kernel likes.
megarl ends when its files are on the disk; so the copy is timed twice, when `cp` ends and when its
files are on the disk too. Needs three times the bytes on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.linux import tree_rss_bytes
from megarl.reshard.files import INDEX
from megarl.reshard.shard_files import SHARD_BYTES, TensorToStore, shard_files, write_index

LAYER_BYTES = 385_900_000  # of one layer below
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
RANDOM_BYTES = 1 << 26  # drawn once, written again and again
SAMPLED_EVERY_S = 0.05


def main() -> None:
    """Measure, and print one line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=16.0, help="of the model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="where to write; default the temp folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="megarl-convert-") as name:
        print(json.dumps(measured(Path(name), given.gb, given.runs, given.workers)))


def measured(folder: Path, gigabytes: float, runs: int, workers: int) -> dict[str, object]:
    """All figures. Seconds are of whole commands, their start included."""
    source, copy, made, back = (folder / name for name in ("source", "copy", "made", "back"))
    shape = write_model(source, gigabytes)
    convert = [sys.executable, "-m", "megarl", "convert", "--workers", str(workers)]
    turns: dict[str, list[float]] = {"cp": [], "cp_synced": [], "to_torch_dist": [], "to_hf": []}
    peak, loads = 0, []
    for turn in range(runs):
        for way, command in (
            ("cp", ["cp", "-r", str(source), str(copy)]),
            ("to_torch_dist", [*convert, str(source), str(made)]),
            ("to_hf", [*convert, str(made), str(back)]),
        ):
            settle(folder)
            begun = time.monotonic()
            took_s, most = run(command)
            turns[way].append(took_s)
            if way == "cp":
                sync(copy)
                turns["cp_synced"].append(time.monotonic() - begun)
                shutil.rmtree(copy)
            else:
                peak = max(peak, most)
            loads.append(os.getloadavg()[0])
            print(f"turn {turn + 1} {way}: {took_s:.1f} s", file=sys.stderr)
        for path in (made, back):
            shutil.rmtree(path)
    seconds = {way: statistics.median(all_s) for way, all_s in turns.items()}
    slower = max(seconds["to_torch_dist"], seconds["to_hf"])
    slowest = map(max, turns["to_torch_dist"], turns["to_hf"])
    each = [took_s / cp_s for took_s, cp_s in zip(slowest, turns["cp"], strict=True)]
    return {
        "gigabytes": sum(path.stat().st_size for path in source.iterdir()) / 1e9,
        "num_parameters": sum(p.num_elements for p in block_table(shape).parameters),
        "workers": workers,
        "convert_over_cp": slower / seconds["cp"],
        "convert_over_cp_synced": slower / seconds["cp_synced"],
        "convert_over_cp_each": each,
        "peak_gib": peak / 2**30,
        **{f"{way}_s": value for way, value in seconds.items()},
        **{f"{way}_s_all": values for way, values in turns.items()},
        "load_average_of_each": loads,
    }


def settle(folder: Path) -> None:
    """Have all that is written on the disk, and none of the files below the folder in memory."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def sync(folder: Path) -> None:
    """Have the files of the folder on the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_model(folder: Path, gigabytes: float) -> ModelShape:
    """A Hugging Face folder of about that size, of random bits that are all finite numbers."""
    folder.mkdir()
    layers = max(1, round((gigabytes * 1e9 - 2 * 151_936 * 4096) / LAYER_BYTES))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    shape = read_shape(folder)
    files = shard_files(
        {p.name: TensorToStore("BF16", p.shape) for p in block_table(shape).parameters},
        SHARD_BYTES,
    )
    drawn = np.random.default_rng(1).integers(0, 0x3F80, RANDOM_BYTES // 2, dtype=np.uint16)
    block = drawn.tobytes()
    for file in files:
        with (folder / file.name).open("wb") as opened:
            opened.write(file.header)
            for start in range(len(file.header), file.num_bytes, len(block)):
                opened.write(block[: file.num_bytes - start])
    write_index(files, folder)
    assert (folder / INDEX).is_file() == (len(files) > 1)
    return shape


def run(command: list[str]) -> tuple[float, int]:
    """(seconds, most resident bytes of all its processes, shared pages counted for each)."""
    begun, most = time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, tree_rss_bytes([process.pid]))
            time.sleep(SAMPLED_EVERY_S)
    assert process.returncode == 0, command
    return time.monotonic() - begun, most


if __name__ == "__main__":
    main()
