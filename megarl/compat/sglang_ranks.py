"""One process that is, as far as SGLang's models and loaders can see, any rank of a server.

Owns the way to a rank without processes, groups or devices: SGLang's own model classes then hold on
a CPU what they would hold on that rank. Knows nothing of what is loaded.

For: sglang 0.5.23 (https://github.com/sgl-project/sglang), whose runtime context takes a rank and
groups from outside. Ends when SGLang can tell its layouts without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from megarl.compat import sglang_cpu, sglang_server

_GROUPS = ("tp", "attn_tp", "moe_tp", "moe_ep", "pp")


def prepare_process() -> None:
    """What must happen before sglang is imported."""
    sglang_server.hide_megatron()
    sglang_cpu.install()


def become(
    folder: str, rank: int, dtype: str, flags: Mapping[str, Any], draft: bool = False
) -> Any:
    """Make this process rank `rank` of a server of the model in `folder`, started with `flags`.

    `flags` are fields of SGLang's ServerArgs, such as tp_size and ep_size. With `draft` the model
    is the draft that such a server loads besides. Returns SGLang's ModelConfig.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype=dtype,
        skip_tokenizer_init=True,
        **{"attention_backend": "torch_native", **flags},
    )
    get_parallel().clear_stamp()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    parallel = get_parallel()
    groups = {
        f"{name}_group": _group(
            getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size")
        )
        for name in _GROUPS
    }
    parallel.override_permanently(**groups)
    initialize_moe_config()
    initialize_dp_attention_flags(args)
    return ModelConfig.from_server_args(args, is_draft_model=draft)


def _group(rank: int, size: int) -> SimpleNamespace:
    """A process group of which only this rank's place is asked."""
    return SimpleNamespace(
        rank_in_group=rank,
        world_size=size,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        rank=0,
        ranks=[0],
        cpu_group=None,
        device_group=None,
    )


def load(config: Any, load_format: str = "auto", adjust: Callable[..., Any] | None = None) -> Any:
    """The model of `config` on this rank, its weights as the loaders leave them.

    What SGLang does to them afterwards for its kernels is left out: on a CPU it packs them for AMX.
    `adjust` is applied to config, load config before. "dummy" loads random weights.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    options = LoadConfig(load_format=load_format)
    if adjust is not None:
        config = adjust(config, options)
    with _weights_as_loaded():
        return get_model_loader(options, config).load_model(
            model_config=config, device_config=DeviceConfig("cpu", 0)
        )


@contextmanager
def _weights_as_loaded() -> Iterator[None]:
    """SGLang's loaders without their last step."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    last_step = DefaultModelLoader.postprocess_weights
    DefaultModelLoader.postprocess_weights = staticmethod(lambda *_, **__: None)
    try:
        yield
    finally:
        DefaultModelLoader.postprocess_weights = staticmethod(last_step)
