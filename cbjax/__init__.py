"""Continuous-batching inference for JAX. Public names are imported when they are first used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbjax.cache import PagedAttentionCache as PagedAttentionCache
    from cbjax.calibration import measure_cost as measure_cost
    from cbjax.calibration import measure_steps as measure_steps
    from cbjax.causal_lm import CausalLM as CausalLM
    from cbjax.config import ContinuousBatchingConfig as ContinuousBatchingConfig
    from cbjax.config import GenerationConfig as GenerationConfig
    from cbjax.config import WorkloadHints as WorkloadHints
    from cbjax.manager import ContinuousBatchingManager as ContinuousBatchingManager
    from cbjax.mixin import ContinuousMixin as ContinuousMixin
    from cbjax.models import DecoderConfig as DecoderConfig
    from cbjax.recording import Recording as Recording
    from cbjax.recording import ReplayedStep as ReplayedStep
    from cbjax.recording import read_recording as read_recording
    from cbjax.recording import replay as replay
    from cbjax.requests import GenerationOutput as GenerationOutput
    from cbjax.requests import RequestState as RequestState
    from cbjax.requests import RequestStatus as RequestStatus
    from cbjax.scheduler import FIFOScheduler as FIFOScheduler
    from cbjax.scheduler import PrefillFirstScheduler as PrefillFirstScheduler
    from cbjax.scheduler import Scheduler as Scheduler
    from cbjax.step_record import StepRecord as StepRecord
    from cbjax.timeline import Timeline as Timeline

__version__ = "0.1.0"

_HOMES = {
    "CausalLM": "cbjax.causal_lm",
    "ContinuousBatchingConfig": "cbjax.config",
    "ContinuousBatchingManager": "cbjax.manager",
    "ContinuousMixin": "cbjax.mixin",
    "DecoderConfig": "cbjax.models",
    "FIFOScheduler": "cbjax.scheduler",
    "GenerationConfig": "cbjax.config",
    "GenerationOutput": "cbjax.requests",
    "PagedAttentionCache": "cbjax.cache",
    "PrefillFirstScheduler": "cbjax.scheduler",
    "Recording": "cbjax.recording",
    "ReplayedStep": "cbjax.recording",
    "RequestState": "cbjax.requests",
    "RequestStatus": "cbjax.requests",
    "Scheduler": "cbjax.scheduler",
    "StepRecord": "cbjax.step_record",
    "Timeline": "cbjax.timeline",
    "WorkloadHints": "cbjax.config",
    "measure_cost": "cbjax.calibration",
    "measure_steps": "cbjax.calibration",
    "read_recording": "cbjax.recording",
    "replay": "cbjax.recording",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'cbjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
