"""JSON of the values in megarl.types, as they travel between client and service.

Owns encoding, decoding and their checks; never pickle. Knows nothing of HTTP or of what a value
means. Floats keep NaN and infinities: a metric that went bad must arrive as what it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megarl.errors import ShapeError

FORM = ConfigDict(ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # The wrapping tuple carries the setting: pydantic takes none for a dataclass itself.
    return TypeAdapter(tuple[kind], config=FORM)


def encode(kind: Any, value: object) -> bytes:
    """JSON of `value`, which is of type `kind` (a type annotation).

    >>> encode(dict[str, float], {"lr": 0.5})
    b'[{"lr":0.5}]'
    """
    return _adapter(kind).dump_json((value,))


def decode(kind: Any, data: bytes) -> Any:
    """The value of type `kind` that `encode` wrote.

    Raises ShapeError, naming the field, where the JSON does not fit.

    >>> decode(dict[str, float], b'[{"lr": NaN}]')
    {'lr': nan}
    """
    try:
        return _adapter(kind).validate_json(data)[0]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "the value"
        raise ShapeError(
            f"{field}: {first['msg']}; client and learner must run the same version of megarl"
        ) from None
