"""Stage b, rollout: SGLang servers, and what is asked of them."""
