"""All that leans on an engine's inside: what it lacks on a CPU, and what it has no public call for.

Substitutions for a CPU are inert where the real thing is present. The rest holds everywhere: a
server's start with its keys, Megatron's buffers and checkpoints, tables read off either engine.
"""

SGLANG_VERSION = "0.5.23"
"""The one that megarl, and each cure of SGLang here, is written for."""
