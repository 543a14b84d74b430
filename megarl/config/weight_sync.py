"""The settings of stage g. What they mean together with others is checked in `check_servers.py`."""

from __future__ import annotations

from typing import Literal

from megarl.config.group import Group, NonNegative, Positive


class WeightSyncConfig(Group):
    """Stage g."""

    mode: Literal["auto", "shared", "exact", "hf", "disk"] = "auto"
    """`exact`: megarl's loader in the server writes each rank's own intervals in place, through
    memory on one node, by messages between nodes, and proves them by checksums; refused where no
    test has shown it for such a server. `hf`: full tensors by SGLang's own calls, for servers that
    lack the loader; only log-probs show that they arrived. `disk`: a checkpoint in `disk_dir` that
    servers read. `auto`: `exact` where it is shown, else `hf`. `shared`: `exact`, refused unless
    all is on one node."""
    hf_route: Literal["auto", "broadcast", "request"] = "auto"
    """How tensors of mode `hf` get to a server. `broadcast`: from learner rank 0 in SGLang's own
    process group; `request`: in the request itself, once for each of the server's ranks, which is
    slow; `auto`: a broadcast where the server can reach the learner's address."""
    disk_dir: str = ""
    """Folder of mode `disk` on a file system that all nodes share; each run has a folder in it,
    with the newest version. Relative to the working directory."""
    bucket_mib: Positive = 64
    """Largest message between nodes, and of full tensors at one time, in MiB; one tensor, or what
    SGLang fuses into one, may be larger."""
    gpu_arenas: Literal["auto", "never"] = "auto"
    """`auto`: on GPUs, servers of the learner's node read its memory by CUDA IPC where the driver
    allows it. `never`: through host memory, for learner and servers in containers with PID
    namespaces of their own, between which CUDA IPC does not work."""
    shared_weights: bool = True
    """On CPUs: keep the learner's weights in shared memory (/dev/shm), where servers of its node
    read them without a copy made for that. `false`: copy them there for every sync."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """What becomes of requests that run on a server when it is synced; none gets a token meanwhile.
    `retract`: they wait and go on, their KV cache computed anew with the new weights. `in_place`:
    they go on with the KV cache of the old weights, which is not emptied; servers then share no
    prefix between requests and do not overlap scheduling. `abort`: they end, and are asked again.
    """
    probe_tokens: NonNegative = 16
    """Tokens that each server scores after a sync, and that must get the learner's log-probs
    before the server is used: in the mean within `parity.max_mean_abs_logprob`, or where that is 0
    within 1e-4 nats for fp32, 0.25 for bf16, 0.5 for float8 servers. With `placement.mode` =
    `colocated`, where a server has no KV cache during a sync, all that servers sampled is held to
    this instead, before it is learned from. 0 does without."""
