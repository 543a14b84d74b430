"""Stage e: the experience buffer, the group files, minibatches and their schedule."""
