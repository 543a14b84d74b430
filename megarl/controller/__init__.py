"""The loop over the seven stages, resuming, evaluation and the parity gate."""
