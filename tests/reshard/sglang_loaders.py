"""Program: what SGLang's own loaders make of a checkpoint on each rank, without a server.

    python -m tests.reshard.sglang_loaders OUT_DIR < cases.json

Cases are [model folder, tp] pairs. The named_parameters() of each rank go to
OUT_DIR/<case>-<rank>.safetensors; OUT_DIR/<case>.json says to how many KV heads, and to what
intermediate size, a CPU server would pad.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from megarl.compat import sglang_cpu, sglang_server

sglang_server.hide_megatron()
sglang_cpu.install()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp  # noqa: E402
from sglang.srt.layers.moe import initialize_moe_config  # noqa: E402
from sglang.srt.model_loader.loader import get_model_loader  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

GROUPS = ("tp", "attn_tp", "moe_tp", "moe_ep", "pp")


def pretend_rank(folder: str, tp: int, rank: int) -> ModelConfig:
    """Make this process rank `rank` of `tp` as far as the loaders can see."""
    args = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        tp_size=tp,
    )
    get_parallel().clear_stamp()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    parallel = get_parallel()
    groups = {
        f"{name}_group": SimpleNamespace(
            rank_in_group=getattr(parallel, f"{name}_rank"),
            world_size=getattr(parallel, f"{name}_size"),
            is_first_rank=True,
            is_last_rank=True,
            rank=0,
            ranks=[0],
            cpu_group=None,
            device_group=None,
        )
        for name in GROUPS
    }
    parallel.override_permanently(**groups)
    initialize_moe_config()
    return ModelConfig.from_server_args(args)


def padded_sizes(config: ModelConfig, load: LoadConfig, tp: int) -> dict[str, int]:
    """What a CPU server makes of the sizes before it builds the model."""
    adjusted = adjust_config_with_unaligned_cpu_tp(copy.deepcopy(config), load, tp)
    return {
        "kv_heads": adjusted.get_total_num_kv_heads(),
        "intermediate_size": adjusted.hf_config.intermediate_size,
    }


def main() -> None:
    out = Path(sys.argv[1])
    load = LoadConfig(load_format="auto")
    for case, (folder, tp) in enumerate(json.load(sys.stdin)):
        for rank in range(tp):
            config = pretend_rank(folder, tp, rank)
            if rank == 0:
                sizes = padded_sizes(config, load, tp)
                (out / f"{case}.json").write_text(json.dumps(sizes))
            device = DeviceConfig("cpu", 0)
            model = get_model_loader(load, config).load_model(
                model_config=config, device_config=device
            )
            held = {name: tensor.detach() for name, tensor in model.named_parameters()}
            save_file(
                {name: tensor.to(torch.float32).clone() for name, tensor in held.items()},
                out / f"{case}-{rank}.safetensors",
            )


if __name__ == "__main__":
    main()
