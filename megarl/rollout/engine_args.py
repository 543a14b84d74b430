"""`[rollout.engine_args]`: SGLang's own server arguments, checked against the pinned engine's list.

Owns which of them a user may set, and how they are written on SGLang's command line. The list is
data (`engine_args.json`, made by `tools/make_engine_args.py`). Knows nothing of processes or of
HTTP.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path

from megarl.errors import ConfigError

LIST = Path(__file__).with_name("engine_args.json")

# Arguments that megarl sets, and the setting to use instead.
SET_BY = {
    "model_path": "actor.model",
    "device": "launch.device",
    "dtype": "learner.precision.params",
    "tp_size": "rollout.parallel.tp",
    "pp_size": "rollout.parallel.pp",
    "ep_size": "rollout.parallel.ep",
    "enable_dp_attention": "rollout.parallel.attention_dp",
    "quantization": "rollout.precision.weights",
    "max_total_tokens": "rollout.max_total_tokens",
    "port": "launch.rollout_port",
    "random_seed": "run.seed",
    "preferred_sampling_params": "rollout.sampling",
}
# Arguments that megarl sets or rules out with no setting of its own, and why.
REFUSED = {
    "host": "servers bind to the interface of the machine they are placed on",
    "api_key": "each run makes its own keys",
    "admin_api_key": "each run makes its own keys",
    "skip_tokenizer_init": "megarl speaks token ids with its servers",
    "skip_server_warmup": "megarl waits for health by itself",
    "custom_weight_loader": "it is megarl's weight sync",
    "weight_version": "the weight sync sets it when a version is proved",
    "dp_size": "use rollout.servers, or rollout.parallel.attention_dp with data parallel attention",
    "nnodes": "a server lives on one machine",
    "node_rank": "a server lives on one machine",
    "dist_init_addr": "a server lives on one machine",
    "enable_lora": "the weight sync writes the whole model",
    "speculative_algorithm": "the weight sync does not reach a draft model",
}


@functools.cache
def known_arguments() -> tuple[str, Mapping[str, tuple[str, str]]]:
    """The engine's version, and field -> (flag, kind); kinds are value, list, switch and yes_no."""
    data = json.loads(LIST.read_text())
    return data["version"], {name: (flag, kind) for name, (flag, kind) in data["arguments"].items()}


def violations(engine_args: Mapping[str, int | float | str | bool]) -> list[str]:
    """What is wrong with the arguments, one text each; empty where they can be used.

    >>> violations({"mem_fraction_static": 0.7})
    []
    >>> violations({"mem_fraction": 0.7})[0].partition(";")[2]
    ' did you mean mem_fraction_static?'
    """
    version, arguments = known_arguments()
    found: list[str] = []
    for name, value in engine_args.items():
        where = f"rollout.engine_args.{name}"
        if name in SET_BY:
            found.append(f"{where}: megarl sets it; use {SET_BY[name]}")
        elif name in REFUSED:
            found.append(f"{where}: cannot be set: {REFUSED[name]}")
        elif name not in arguments:
            nearest = difflib.get_close_matches(name, arguments, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "see its ServerArgs for the names"
            found.append(f"{where}: SGLang {version} has no such argument; {hint}")
        elif arguments[name][1] in ("switch", "yes_no") and not isinstance(value, bool):
            found.append(f"{where}: is {value!r}, but it is a switch; use true or false")
        elif arguments[name][1] in ("value", "list") and isinstance(value, bool):
            found.append(f"{where}: is {value}, but it takes a value; give it one")
    return found


def flags(engine_args: Mapping[str, int | float | str | bool]) -> list[str]:
    """The arguments on SGLang's command line. A list is one text, its items separated by spaces.

    Raises ConfigError with every violation found.

    >>> flags({"chunked_prefill_size": 2048, "disable_radix_cache": True})
    ['--chunked-prefill-size', '2048', '--disable-radix-cache']
    >>> flags({"cuda_graph_bs_decode": "1 2", "disable_overlap_schedule": False})
    ['--cuda-graph-bs-decode', '1', '2']
    """
    found = violations(engine_args)
    if found:
        raise ConfigError(found)
    words: list[str] = []
    for name, value in engine_args.items():
        flag, kind = known_arguments()[1][name]
        if kind == "value":
            words += [flag, str(value)]
        elif kind == "list":
            words += [flag, *str(value).split()]
        elif value:
            words.append(flag)
        elif kind == "yes_no":
            words.append("--no-" + flag.removeprefix("--"))
    return words
