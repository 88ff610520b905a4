"""Recordings of what an engine's scheduler was given, and their replay with no engine, no model and no device.

The scheduler is pure, so its config and its inputs in order are the whole run: fed to it again they give the same
plans. A recording holds these inputs and a digest of each plan, so a replay proves it. Never imports jax.
"""

from cbjax.recording.anonymous import anonymise as anonymise
from cbjax.recording.compare import Differences as Differences
from cbjax.recording.compare import compare as compare
from cbjax.recording.digest import plan_digest as plan_digest
from cbjax.recording.encoding import RecordingError as RecordingError
from cbjax.recording.inputs import Add as Add
from cbjax.recording.inputs import Cancel as Cancel
from cbjax.recording.inputs import Input as Input
from cbjax.recording.inputs import Journal as Journal
from cbjax.recording.inputs import Renew as Renew
from cbjax.recording.inputs import Reset as Reset
from cbjax.recording.inputs import Schedule as Schedule
from cbjax.recording.inputs import Start as Start
from cbjax.recording.inputs import Update as Update
from cbjax.recording.live import LiveScheduler as LiveScheduler
from cbjax.recording.player import ReplayedStep as ReplayedStep
from cbjax.recording.player import ReplayMismatch as ReplayMismatch
from cbjax.recording.player import replay as replay
from cbjax.recording.reader import Recording as Recording
from cbjax.recording.reader import read_recording as read_recording
from cbjax.recording.writer import RecordingWriter as RecordingWriter
