"""Stage g, weight sync: the learner's weights into running servers, with a proof of arrival."""
