"""The errors this product raises on purpose. Anything else that escapes is a bug.

Every message names the field or item, the value seen, and what to do about it.
"""


class SeqrelayError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(SeqrelayError, ValueError):
    """The configuration cannot be run as written. The command line exits with code 2."""


class RolloutRejected(SeqrelayError):
    """The engine returned a completion whose log-probabilities cannot be trusted (missing, NaN, misaligned)."""


class GroupTimeout(SeqrelayError):
    """A group took longer than rollout.group_timeout_s."""


class RewardError(SeqrelayError):
    """A reward function returned something that is not one finite number (or None) per completion."""


class WeightSyncError(SeqrelayError):
    """A weight update was refused: digest, coverage, name, shape or space. The engine keeps its old version."""


class WeightsRefused(WeightSyncError):
    """A worker got wrong weights twice in a row and serves no more; names worker, version, check and figures."""


class WeightsLost(SeqrelayError):
    """A publication's buckets can no longer be fetched: the learner that held them is gone. The next one counts."""


class EngineDied(SeqrelayError):
    """A process of the engine ended. Its worker cannot go on; a new one can."""


class SchemaError(SeqrelayError):
    """Rollout data or a ledger file that does not follow this release's schema; names column, value and remedy."""


class CheckpointError(SeqrelayError):
    """A checkpoint holds other bytes than were written; names the file."""


class HubError(SeqrelayError):
    """A call to the hub breaks the group or step protocol."""


class SeatTaken(HubError):
    """Another learner trains this run; says which one. The run goes on with that one."""


class RunFailed(SeqrelayError):
    """One side of the run reported a failure; carries that side's traceback so that nobody waits in silence."""


class LockHeld(ConfigError):
    """Another process holds the lock; the message says which one."""


class ClusterError(SeqrelayError):
    """The Ray cluster did not start, or cannot be joined; says where to look."""
