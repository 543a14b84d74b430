"""How a bucket of full tensors gets into a server by SGLang's own calls: in the request itself, or
by a broadcast beside it.

Owns the payload and the bodies of both calls. Knows nothing of the order of a sync.
"""

from __future__ import annotations

import base64
import pickle
from types import SimpleNamespace
from typing import Protocol

import torch

from megarl.weight_sync.formats import dtype_name
from megarl.weight_sync.full import FullBucket
from megarl.weight_sync.server_calls import SELECTOR, ServerCalls
from megarl.weight_sync.transport.broadcast import Broadcast

BUCKETS = "flattened_bucket"  # SGLang's load_format for tensors one behind the other in one


class BucketRoute(Protocol):
    """One way of buckets into one server. All of it raises WeightSyncError."""

    def open(self, calls: ServerCalls, until: float) -> None:
        """Do what must be done before the first bucket."""

    def send(
        self, calls: ServerCalls, bucket: FullBucket, data: torch.Tensor, flush: bool, until: float
    ) -> None:
        """Have every rank of the server load a bucket, and with `flush` empty the prefix cache."""


class RequestRoute:
    """Tensors in the request, once for each rank: needs nothing but the server's URL."""

    def __init__(self, tp: int) -> None:
        self._tp = tp

    def open(self, calls: ServerCalls, until: float) -> None:
        """Nothing is needed."""

    def send(
        self, calls: ServerCalls, bucket: FullBucket, data: torch.Tensor, flush: bool, until: float
    ) -> None:
        """One request, whose body has the bucket `tp` times in base64."""
        calls.update(
            {
                "serialized_named_tensors": [encode_bucket(bucket, data)] * self._tp,
                "load_format": BUCKETS,
                "flush_cache": flush,
            }
        )


class BroadcastRoute:
    """Tensors by broadcast in the process group of SGLang's calls, from `device`."""

    def __init__(self, group: Broadcast, device: torch.device) -> None:
        self._group = group
        self._device = device if group.backend == "nccl" else torch.device("cpu")

    def open(self, calls: ServerCalls, until: float) -> None:
        """Have the server join the group, unless it has."""
        if not self._group.is_open:
            body = self._group.body
            self._group.open(lambda: calls.post("/init_weights_update_group", body), until)

    def send(
        self, calls: ServerCalls, bucket: FullBucket, data: torch.Tensor, flush: bool, until: float
    ) -> None:
        """One call that says what comes, and the broadcast."""
        body = {
            "names": [tensor.name for tensor in bucket.tensors],
            "dtypes": [dtype_name(tensor.dtype) for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": self._group.name,
            "load_format": BUCKETS,
            "flush_cache": flush,
            "selector": SELECTOR,
        }
        there = data.to(self._device)
        route = "/update_weights_from_distributed"
        self._group.send(there, lambda: calls.post(route, body), until)


def encode_bucket(bucket: FullBucket, data: torch.Tensor) -> str:
    """One entry of `serialized_named_tensors`: base64 of {metadata, flattened_tensor}.

    SGLang unpickles only what is on its list. `import megatron.core` replaces torch's storage
    loader by a function that is not, and then the server ends: so the pickle is written with
    torch's own name for it, whatever stands there in this process. The metadata are plain
    namespaces, as sglang need not be installed here.
    """
    metadata = [
        SimpleNamespace(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=tensor.offset,
            end_idx=tensor.offset + tensor.num_bytes,
            numel=tensor.num_bytes,
        )
        for tensor in bucket.tensors
    ]
    stream = b"".join(
        (
            pickle.PROTO + b"\x03",
            pickle.EMPTY_DICT + pickle.MARK,
            _part("metadata") + _part(metadata),
            _part("flattened_tensor") + _tensor_part(data),
            pickle.SETITEMS + pickle.STOP,
        )
    )
    return base64.b64encode(stream).decode("ascii")


def _part(value: object) -> bytes:
    """A value's pickle without its beginning and end, so that several make one stream.

    Protocol 3 numbers what it remembers, and each part remembers before it recalls.
    """
    return pickle.dumps(value, 3)[2:-1]


def _tensor_part(data: torch.Tensor) -> bytes:
    """What torch pickles of a tensor, with the storage's loader named by hand."""
    _, (storage, *rest) = data.__reduce_ex__(3)
    _, (saved,) = storage.__reduce__()
    return b"".join(
        (
            pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n" + pickle.MARK,
            pickle.GLOBAL + b"torch.storage\n_load_from_bytes\n",
            _part(saved) + pickle.TUPLE1 + pickle.REDUCE,
            *map(_part, rest),
            pickle.TUPLE + pickle.REDUCE,
        )
    )
