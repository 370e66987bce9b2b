"""Errors that reach the user.

Each carries one sentence that names what is wrong and where (option, file and line, tensor, rank), so that the program
can print the sentence without a traceback. Anything else that escapes is a defect and keeps its traceback.
"""


class RhymeMegError(Exception):
    """Base of every error that the user can act on. `str(error)` is the whole message."""


class ConfigError(RhymeMegError):
    """An option is unknown, has the wrong type or contradicts another. The message names the option."""


class DataError(RhymeMegError):
    """A data file or one of its lines cannot be used. The message names the file and the line."""


class CheckpointError(RhymeMegError):
    """A checkpoint is missing, incomplete, corrupt or of another model. The message names the file or tensor."""


class RewardError(RhymeMegError):
    """A reward function is unknown, raised, timed out or returned something that is not a finite number."""


class RolloutError(RhymeMegError):
    """A rollout engine cannot serve what is asked of it (KV space, sampling options, engine state)."""


class WeightSyncError(RhymeMegError):
    """Weights in an engine are not those of the actor. The message names the tensor."""


class TrainingError(RhymeMegError):
    """Training cannot go on: a loss or gradient that is not finite, a lost rank, a time-out."""
