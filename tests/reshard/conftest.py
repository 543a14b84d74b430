"""The programs here prepare their process for an engine as they are imported; pytest must not."""

collect_ignore = ["megatron_models.py", "sglang_loaders.py"]
