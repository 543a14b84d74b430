"""The launcher with the toy learner as its ranks."""

import sys

from megarl.learner import ranks

if __name__ == "__main__":
    sys.exit(ranks.main(module="tests.learner.toy_service"))
