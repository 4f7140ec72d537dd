"""Ray's errors, translated once, at the border: the rooms above know hotpass's own errors only.

The map is complete over `ray.exceptions`, and a test asserts it: an error that a new Ray adds fails that test, not a campaign.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hotpass.errors import EngineDied, HotpassError, MachineError

DIED = (
    "ActorDiedError", "ActorUnavailableError", "ActorUnschedulableError", "ActorAlreadyExistsError", "RayActorError",
    "WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError", "OwnerDiedError", "TaskUnschedulableError",
    "RaySystemError",
)  # fmt: skip
"""The process behind a call is gone, or cannot be placed: the engine is made again."""

OTHER = (
    "ActorHandleNotFoundError", "ActorPlacementGroupRemoved", "AuthenticationError", "CrossLanguageError", "GetTimeoutError",
    "ObjectFetchTimedOutError", "ObjectFreedError", "ObjectLostError", "ObjectReconstructionFailedError",
    "ObjectRefStreamEndOfStreamError", "ObjectStoreFullError", "OufOfBandObjectRefSerializationException", "OutOfDiskError",
    "PendingCallsLimitExceeded", "PlasmaObjectNotAvailable", "RayCgraphCapacityExceeded", "RayChannelError",
    "RayChannelTimeoutError", "RayDirectTransportError", "RayTaskError", "ReferenceCountingAssertionError", "RpcError",
    "RuntimeEnvSetupError", "StreamingGeneratorReplayInconsistentError", "TaskCancelledError", "TaskPlacementGroupRemoved",
    "UserCodeException", "UnserializableException", "AsyncioActorExit",
)  # fmt: skip
"""Everything else that Ray raises: a MachineError that names it."""


def translated(error: BaseException) -> BaseException:
    """The hotpass error that a Ray error stands for; any other error as it is.

    An error raised inside an actor travels as RayTaskError with the original as its cause: hotpass's own come out unchanged.
    """
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, HotpassError | KeyboardInterrupt):
            return cause
        return MachineError(f"an actor failed: {_first_line(str(cause))}")
    if not isinstance(error, exceptions.RayError):
        return error
    if type(error).__name__ in DIED:
        return EngineDied(f"Ray: {type(error).__name__}: {_first_line(str(error))}")
    return MachineError(f"Ray: {type(error).__name__}: {_first_line(str(error))}")


@contextlib.contextmanager
def ray_errors() -> Iterator[None]:
    """Whatever Ray raises inside comes out as a hotpass error."""
    from ray import exceptions

    try:
        yield
    except exceptions.RayError as error:
        raise translated(error) from error


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no message"
