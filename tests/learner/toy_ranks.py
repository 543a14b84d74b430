"""The launcher with the toy learner as its ranks."""

from megarl.learner import ranks
from megarl.learner.parent import leave

if __name__ == "__main__":
    leave(ranks.main(module="tests.learner.toy_service"))
