"""Checkpoints as files: what is in one, whether two are equal, and one made from another.

Formats are Hugging Face's safetensors and Megatron-Core's torch_dist. Files are layouts of
`reshard/`, and its planner says what goes where. Knows nothing of training.
"""
