"""Every step over time: recorded at negligible cost, as a trace for Perfetto and as a table."""

from cbjax.timeline.layout import STEP as STEP
from cbjax.timeline.measures import BucketTimes as BucketTimes
from cbjax.timeline.measures import DeviceActivity as DeviceActivity
from cbjax.timeline.recorder import Compilation as Compilation
from cbjax.timeline.stays import Stay as Stay
from cbjax.timeline.timeline import DEFAULT_MAX_STEPS as DEFAULT_MAX_STEPS
from cbjax.timeline.timeline import Timeline as Timeline
