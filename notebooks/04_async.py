# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The host is never in the way
#
# Between two steps of the model the host decides who runs next, builds the batch and reads tokens back. While it does,
# an accelerator has nothing to do, unless it was given work beforehand. There are two ways to give it some:
#
# - **steps in flight** (`use_async_batching`): step n + 1 is planned and dispatched before the tokens of step n have
#   been read. The input of a decode row is the last token drawn for it, and that never leaves the device;
# - **decode windows** (`decode_window`): one dispatch is several decode steps, and the device goes on by itself.
#
# Neither changes a token. This notebook runs one workload in three ways, draws what host and device did, and measures
# how much of the time the device was at work.

# %%
import sys

if "google.colab" in sys.modules:  # elsewhere nothing is installed
    import glob
    import shutil
    import subprocess

    # Colab's jax is a year old. "jax<0.12" leaves its numpy alone, so the session need not be restarted.
    if "jax" in sys.modules:
        raise RuntimeError("jax has been imported: restart the session and run this cell first")
    on_tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    extra = "[tpu]" if on_tpu else "[cuda12]" if shutil.which("nvidia-smi") else ""
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"cbjax{extra}", "jax<0.12"], check=True)

# %% [markdown]
# ## A device that takes five milliseconds
#
# On a CPU host and device are the same cores, so a model that keeps them busy has nothing to overlap with. To see what
# happens elsewhere, here is a **stand-in for a device**: the model is tiny and its answers are held back until a clock
# says that a device which takes 5 ms a step, one step after another, would be done. The host's work is real, all of it.
# (`python -m benchmarks.overlap` does this with a separate process as the device, and with a real model.)

# %%
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig
from cbjax.testing import tiny_llama

STEP_SECONDS = 0.005


class Later:
    """An array that can be read from a moment on."""

    def __init__(self, array, ready):
        self.array, self.ready = array, ready

    def is_ready(self):
        return time.perf_counter() >= self.ready

    def __array__(self, dtype=None, copy=None):
        time.sleep(max(0.0, self.ready - time.perf_counter()))
        return np.asarray(self.array)


class Clock:
    """Wraps a session's device: each step is ready `STEP_SECONDS` after it began, which is after the one before."""

    def __init__(self, device):
        self.forward, self.spans = device.forward, []
        device.forward = self.slow_forward

    def slow_forward(self, batch, bucket):
        answer = self.forward(batch, bucket)
        begin = max(time.perf_counter(), self.spans[-1][1] if self.spans else 0.0)
        self.spans.append((begin, begin + STEP_SECONDS * int(batch.window)))
        return type(answer)(*(Later(array, self.spans[-1][1]) for array in answer))


def active_fraction(spans):
    """Between the begin of the first step and the end of the last."""
    return sum(end - begin for begin, end in spans) / (spans[-1][1] - spans[0][0])


MODES = {
    "sync": {"use_async_batching": False, "decode_window": 1},
    "async": {"use_async_batching": True, "decode_window": 1},
    "windows": {"use_async_batching": True, "decode_window": 8},
}
ROWS, NEW_TOKENS, REPEATS = 32, 96, 3
rng = np.random.default_rng(0)


def wave(lm, mode):
    """32 requests at once; their outputs, the timeline, and tokens/s."""
    settings = ContinuousBatchingConfig(
        block_size=16, max_batch_tokens=512, max_requests_per_batch=ROWS, allow_block_sharing=False, **MODES[mode]
    )
    greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    with lm.timeline() as timeline:
        outputs = lm.generate_batch(prompts, greedy, settings)
    return outputs, timeline, ROWS * NEW_TOKENS / lm.summary.seconds


lm = tiny_llama()
prompts = [rng.integers(0, lm.vocab_size, rng.integers(16, 128)).tolist() for _ in range(ROWS)]
reference = [output.generated_tokens for output in wave(lm, "sync")[0].values()]  # as it is, and compiles
clock = Clock(lm.session.device)

runs = {mode: [] for mode in MODES}
for _ in range(REPEATS):
    for mode in MODES:  # in turns, so that a busy moment of the machine hits all alike
        clock.spans = []
        outputs, timeline, rate = wave(lm, mode)
        assert [output.generated_tokens for output in outputs.values()] == reference
        runs[mode].append((clock.spans, timeline, rate))
print(f"{REPEATS} runs of each way: the same tokens every time")
for mode, repeats in runs.items():
    fractions = sorted(100 * active_fraction(spans) for spans, _, _ in repeats)
    rates = sorted(rate for _, _, rate in repeats)
    print(
        f"{mode:<8} device active {fractions[1]:5.1f}% ({fractions[0]:.1f} to {fractions[-1]:.1f}), "
        f"{rates[1]:,.0f} tokens/s ({rates[0]:,.0f} to {rates[-1]:,.0f})"
    )
print(f"\n{ROWS} requests of 16 to 127 prompt tokens, {NEW_TOKENS} new ones each; host: Python on one core")

# %% [markdown]
# ## What host and device did
#
# Forty milliseconds out of the middle of one run each. Above the host: it **plans** (schedule and build),
# **dispatches**, **waits** for an answer, and **reads** it into its books. Below the device.

# %%
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
PARTS = {
    "plans": (("schedule", "build"), "#0072B2"),
    "dispatches": (("dispatch", "account"), "#E69F00"),
    "waits": (("read",), "#DDDDDD"),
    "reads": (("update",), "#009E73"),
}
SHOWN = 0.040


def spans_of(steps, names, origin):
    """(begin, length) in milliseconds of these phases, of all steps."""
    return [
        (1e3 * (begin - origin), 1e3 * (end - begin))
        for name in names
        for begin, end in zip(steps[f"{name}_begin"], steps[f"{name}_end"], strict=True)
    ]


figure, panels = plt.subplots(len(MODES), 1, figsize=(9, 4.6), sharex=True, layout="constrained")
for axes, (mode, repeats) in zip(panels, runs.items(), strict=True):
    spans, timeline, _ = repeats[0]
    steps = timeline.steps
    origin = (steps["schedule_begin"][0] + steps["update_end"][-1]) / 2
    for label, (names, colour) in PARTS.items():
        axes.broken_barh(spans_of(steps, names, origin), (1.1, 0.8), color=colour, label=label)
    device_spans = [(1e3 * (begin - origin), 1e3 * (end - begin)) for begin, end in spans]
    axes.broken_barh(device_spans, (0.1, 0.8), color="#CC79A7", edgecolor="white", label="device")
    axes.set(title=mode, yticks=[0.5, 1.5], yticklabels=["device", "host"], xlim=(0, 1e3 * SHOWN))
panels[-1].set_xlabel("ms")
panels[0].legend(ncols=5, fontsize=7, loc="upper right", bbox_to_anchor=(1, 1.6))
plt.show()

# %% [markdown]
# In the first panel the device has a gap after every step, in which the host wakes up, reads, plans and dispatches. In
# the second the next step is in its queue before the last one ends, and the host's work lies under it. In the third
# the host comes by once in eight steps, so even a device much faster than this one would not wait for it.
#
# ## The same as figures

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.4), layout="constrained")
for place, repeats in enumerate(runs.values()):
    left.plot([100 * active_fraction(spans) for spans, _, _ in repeats], [place] * REPEATS, "o", alpha=0.6)
    right.plot([rate for _, _, rate in repeats], [place] * REPEATS, "o", alpha=0.6)
for axes, xlabel in ((left, "device-active % of wall clock"), (right, "tokens/s")):
    axes.set(yticks=range(len(MODES)), yticklabels=MODES, xlabel=xlabel, ylim=(len(MODES) - 0.5, -0.5))
left.set_title("Device at work, every run")
right.set_title("Throughput, every run")
plt.show()

# %% [markdown]
# *Device-active* says that the device had work, not that it used it well: a step of one row keeps it as active as a
# step of a thousand.
#
# ## What it costs
#
# - With steps in flight a request that ends by an EOS token is found out one step late, so its row runs once in vain.
#   Its answer is dropped, and nothing else can see it.
# - Inside a window nobody is admitted and no cancel is heard, so a window opens only while nobody waits or prefills,
#   and only as long as `max_window_latency` allows where tokens are followed as they come.
# - Under pressure, victims are chosen with nothing in flight: the engine reads what is on its way, and then decides.
#
# ## Your device
#
# The same on this machine with nothing held back. The table is that of `lm.timeline()`, whose device intervals are
# seen from the host; `timeline.save("trace.json")` makes a file for https://ui.perfetto.dev.

# %%
own = CausalLM.from_pretrained("demo", dtype="bfloat16") if jax.default_backend() != "cpu" else tiny_llama(seed=1)
prompts = [rng.integers(0, own.vocab_size, rng.integers(16, 128)).tolist() for _ in range(ROWS)]
for mode in MODES:
    wave(own, mode)  # compiles
own_runs = {mode: [] for mode in MODES}
for _ in range(REPEATS):
    for mode in MODES:
        own_runs[mode].append(wave(own, mode)[1:])
print(f"on {jax.devices()[0].device_kind}:")
for mode, repeats in own_runs.items():
    activity = sorted(100 * timeline.device_activity.fraction for timeline, _ in repeats)
    rates = sorted(rate for _, rate in repeats)
    print(
        f"{mode:<8} device active {activity[1]:5.1f}%, {rates[1]:,.0f} tokens/s ({rates[0]:,.0f} to {rates[-1]:,.0f})"
    )
print()
print(own_runs["sync"][-1][0])

# %% [markdown]
# On an accelerator both are on unless you say otherwise. On a CPU neither is, since the host's work and the steps share
# the cores: a model as small as this one, whose steps leave cores idle, gains all the same, and one whose products fill
# them (SmolLM2) gains nothing. `print(lm.session.resolved.report())` says what is used, and why.
