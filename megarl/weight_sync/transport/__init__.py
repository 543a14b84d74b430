"""How bytes travel from learner ranks to server ranks."""
