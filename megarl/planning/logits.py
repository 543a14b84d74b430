"""How many logits there may be at one time, on one rank: the output layer keeps to it, and a plan
counts on it."""

MAX_LOGITS = 1 << 26  # of one run of the output layer on one rank: 128 MiB in bf16
MAX_FP32_ELEMENTS = 1 << 24  # of one chunk's fp32 copy of the logits: 64 MiB
