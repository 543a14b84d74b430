"""megarl: reinforcement learning for language models; Megatron-Core learns, SGLang generates."""

__version__ = "0.1.0"
