"""The launcher with the toy learner as its ranks."""

from megarl.learner import agent
from megarl.learner.parent import leave

if __name__ == "__main__":
    leave(agent.main(module="tests.learner.toy_service"))
