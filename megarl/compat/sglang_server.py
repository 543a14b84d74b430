"""`python -m megarl.compat.sglang_server FLAGS`: SGLang's own server, prepared for megarl.

Owns what must happen in a server's processes before sglang is imported: megatron hidden, the CPU
substitutions where `--device cpu` is asked for, death with the parent, keys taken out of the
environment. All flags are SGLang's. Knows nothing of megarl's settings, prompts or weights.

Where SGLang spawns its scheduler and detokenizer, multiprocessing runs this module again there
under the name `__mp_main__` with the same sys.argv: that is how the children are prepared too.

For: sglang 0.5.23. It imports megatron.core wherever that is installed (srt/debug_utils/dumper.py),
and `megatron.core.__init__` replaces torch's storage loader globally. Ends when SGLang does not
import it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping, Sequence

from megarl.compat import (
    sglang_attention_dp,
    sglang_cpu,
    sglang_deepseek_config,
    sglang_expert_parallel,
    sglang_float8,
    sglang_fork,
    sglang_latent_attention,
    sglang_paused,
)
from megarl.linux import set_death_signal
from megarl.nodes import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE


def wants_cpu(argv: Sequence[str]) -> bool:
    """Whether SGLang's flags ask for the CPU.

    >>> wants_cpu(["--model-path", "m", "--device", "cpu"]), wants_cpu(["--device=cpu"])
    (True, True)
    >>> wants_cpu(["--device", "cuda"])
    False
    """
    words = list(argv)
    return "--device=cpu" in words or ("--device", "cpu") in zip(words, words[1:], strict=False)


def hide_megatron() -> None:
    """Make `import megatron` an ImportError in this process, which SGLang takes for absent."""
    sys.modules["megatron"] = None  # type: ignore[assignment]


def take_keys(environ: MutableMapping[str, str]) -> list[str]:
    """SGLang's key flags from megarl's variables, which leave the environment.

    SGLang reads keys from its arguments only, and those of a process are visible to every user of
    the machine; these are added after the process has started. Flag and key are one argument: a
    random key may begin with a dash.

    >>> take_keys({"MEGARL_ROLLOUT_API_KEY": "-a", "PATH": "p"})
    ['--api-key=-a']
    """
    flags: list[str] = []
    for variable, flag in (
        (API_KEY_VARIABLE, "--api-key"),
        (ADMIN_KEY_VARIABLE, "--admin-api-key"),
    ):
        key = environ.pop(variable, "")
        if key:
            flags.append(f"{flag}={key}")
    return flags


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    parent = os.getppid()
    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        sys.exit("the process that started this server has ended")


def prepare_process(argv: Sequence[str]) -> None:
    """What every process of a server needs before sglang is imported."""
    hide_megatron()
    if wants_cpu(argv):
        sglang_cpu.install()
        sglang_attention_dp.install()
        sglang_latent_attention.install()
        sglang_expert_parallel.install()
        sglang_float8.install()
        sglang_deepseek_config.install()
        sglang_fork.install()
        sglang_paused.install()


def main() -> None:
    """Serve until stopped, as `python -m sglang.launch_server` does, and leave no child behind."""
    flags = [*sys.argv[1:], *take_keys(os.environ)]
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(flags)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    die_with_parent()  # the children do so by themselves
if __name__ in ("__main__", "__mp_main__"):
    prepare_process(sys.argv)
if __name__ == "__main__":
    main()
