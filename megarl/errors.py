"""The one hierarchy of errors that megarl raises for its users. Knows nothing of any component.

Each error's text names the thing, what was found, and what to do. `exit_status` is what the command
line ends with: 2 where the user's input is wrong, 1 where a run failed.
"""


class MegarlError(Exception):
    """Base of every error that a user is meant to read; printed without a traceback."""

    exit_status = 1


class ConfigError(MegarlError):
    """A setting, or a combination of settings, cannot be run. `violations` lists all of them."""

    exit_status = 2

    def __init__(self, violations: str | list[str]) -> None:
        self.violations = [violations] if isinstance(violations, str) else list(violations)
        super().__init__("\n".join(self.violations))


class ModelError(MegarlError):
    """A model folder is missing, broken, or describes mathematics that megarl does not compute."""

    exit_status = 2


class DataError(MegarlError):
    """A prompt file or one of its rows cannot be used; names the file and the line."""

    exit_status = 2


class LayoutError(MegarlError):
    """A parallel layout is impossible, or a plan between two layouts is not exactly-once."""

    exit_status = 2


class ShapeError(MegarlError):
    """Tensors that belong together differ in shape."""


class RewardError(MegarlError):
    """A reward function cannot be loaded, or fails on every sample."""


class RolloutError(MegarlError):
    """A rollout server cannot be started, does not answer, or answers what it must not."""


class StalenessError(MegarlError):
    """A sample is older, in policy versions, than the learner may use; names the sample."""


class LearnerError(MegarlError):
    """The learner failed or did not answer within its deadline; names verb, phase and ranks."""


class WeightSyncError(MegarlError):
    """A policy version was not proved to have arrived; no server is routable at it."""


class NoAnswerError(WeightSyncError):
    """A server did not answer in time, or has ended: it is started anew rather than asked again."""


class DeviceMemoryError(MegarlError):
    """Learner or servers keep device memory that they gave back before; names what it is of."""


class ParityError(MegarlError):
    """Learner and rollout engine disagree on log-probs by more than the bound."""


class CheckpointError(MegarlError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


class LaunchError(MegarlError):
    """A process could not be started or died; names process, host, rank, signal and last phase."""


MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)
"""What reading JSON, and taking values out of it, raises where it is not what was asked for."""


def in_words(error: Exception) -> str:
    """What to tell of an error: the sentence of one of ours, another's type and text.

    >>> in_words(LayoutError("7 heads do not split over 2 ranks")), in_words(KeyError("x"))
    ('7 heads do not split over 2 ranks', "KeyError('x')")
    >>> in_words(FileNotFoundError(2, "No such file or directory", "/models/m"))  # repr has no path
    "[Errno 2] No such file or directory: '/models/m'"
    """
    is_sentence = isinstance(error, MegarlError) or (isinstance(error, OSError) and error.filename)
    return str(error) if is_sentence else repr(error)
