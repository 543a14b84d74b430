"""Stage f, the learner: Megatron-Core ranks under torchrun, and the client that asks them."""
