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
# # How large a KV pool?
#
# A pool that is too small makes requests wait, or throws them out. One that is too large costs memory, which on an
# accelerator is most of the money. The scheduler is a pure function, so it can be asked beforehand: `cbjax.simulate`
# runs **the engine's own scheduler** over a workload, with a clock in place of the model. No weights, no device, no
# jax.

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
# ## Three workloads
#
# - **chat**: prompts of about 1,300 tokens, answers of about 250 (after the Azure LLM inference trace);
# - **agents**: every turn sends the whole conversation again, so prompts begin alike;
# - **reasoning**: short questions and answers of thousands of tokens, of which nobody knows the length beforehand
#   (after ServeGen's clients of deepseek-r1).
#
# So that this notebook runs in seconds, everything is made a sixteenth: lengths, times between arrivals, and blocks,
# which have 4 tokens in place of 64. A request still takes as many blocks, and times are shown as they come to at
# full size, roughly. Requests that the smallest pool below could not hold are left out, so that every pool serves the
# same ones.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from cbjax.scheduler import EVICTION_MAPPING
from cbjax.simulate import ConstantCost, make_trace, read_trace, run_sweep, simulate, simulation_config, workload_named
from cbjax.simulate.reserve_model import LONG, SHORT, reserve_in_scheduler, reserve_model

SHRINK, BLOCK_SIZE = 16, 4


def small(name, count, *, rate, most_blocks, seed=1):
    """Requests of a model, a sixteenth of their size."""
    trace = workload_named(name).sample(count, rate=rate, seed=seed)
    tokens = np.maximum(1, trace.segment_tokens // SHRINK)
    segments = [
        list(zip(trace.segment_ids[a:b].tolist(), tokens[a:b].tolist(), strict=True))
        for a, b in zip(trace.offsets[:-1], trace.offsets[1:], strict=True)
    ]
    prompt = np.array([sum(size for _, size in own) for own in segments])
    output = np.maximum(1, trace.output_tokens // SHRINK)
    kept = np.flatnonzero(prompt + output <= most_blocks * BLOCK_SIZE)
    return make_trace(
        trace.arrival[kept] / SHRINK,
        prompt[kept],
        output[kept],
        segments=[segments[i] for i in kept],
        output_ids=trace.output_ids[kept],
        name=name,
    )


def config(num_blocks, **settings):
    budgets = {"max_batch_tokens": 8192 // SHRINK, "max_requests_per_batch": 64}
    return simulation_config(num_blocks=num_blocks, block_size=BLOCK_SIZE, **budgets, **settings)


POOLS = {"chat": (64, 128, 256, 512), "agents": (256, 512, 1024, 2048), "reasoning": (96, 192, 384, 768)}
traces = {
    "chat": small("chat", 40, rate=20, most_blocks=64),
    "agents": small("agents", 28, rate=4, most_blocks=256),
    "reasoning": small("reasoning", 28, rate=20, most_blocks=96),
}
for name, trace in traces.items():
    blocks = -(-trace.num_cells // BLOCK_SIZE)
    print(
        f"{name:<10}{len(trace):3d} requests in {SHRINK * trace.span:4.1f} s, {blocks.mean():5.1f} blocks each on "
        f"average, {blocks.max()} at most, {blocks.sum():,} together"
    )

# %% [markdown]
# ## Capacity
#
# The same requests through larger and larger pools, each twice the last, with the scheduler's own margin. The clock
# is that of an 8B model on an H100, worked out from its data sheet; `--hardware`, `--parameters` and `--cost` of the
# command take others. *First token* is how long nine of ten users wait at most until their answer begins.

# %%
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
COLOURS = {"chat": "#0072B2", "agents": "#E69F00", "reasoning": "#009E73"}


def first_token(result):
    """Seconds, roughly as at full size, until nine of ten requests have their first token."""
    return SHRINK * result.quantiles()["first_token"][1]


def draw(sweeps, x, rows, xlabel):
    """A column for each workload, a row for each figure of its runs."""
    figure, panels = plt.subplots(len(rows), 3, figsize=(9, 1.9 * len(rows)), sharex="col", layout="constrained")
    for column, (name, results) in zip(panels.T, sweeps.items(), strict=True):
        column[0].set_title(name)
        column[-1].set_xlabel(xlabel)
        for axes, (label, value) in zip(column, rows.items(), strict=True):
            axes.plot(
                [x(result) for result in results], [value(result) for result in results], "o-", color=COLOURS[name]
            )
            axes.set_ylim(bottom=0)
            axes.set_ylabel(label if name == "chat" else "")
    return figure, panels


by_pool = {name: [simulate(trace, config(n)) for n in POOLS[name]] for name, trace in traces.items()}
figure, panels = draw(
    by_pool,
    lambda result: result.num_blocks,
    {
        "evictions": lambda result: result.evictions,
        "first token p90, s": first_token,
        "tokens/s": lambda result: result.tokens_per_second,
    },
    "blocks of the pool",
)
for axes in panels[-1]:
    axes.set_xscale("log", base=2)
plt.show()

# %% [markdown]
# Evictions go away, waiting goes away, and throughput rises, since more rows share each reading of the weights. The
# point where a curve becomes flat is the pool to buy: beyond it blocks lie idle (chat's still rises). Agents evict
# nobody even in the smallest pool: a long prompt with a short answer comes with nearly all the blocks it will ever
# need. They only wait.
#
# ## Margins
#
# Now the pool stays at its smallest size, and the **safety margin** grows: the fraction of the pool that waiting
# requests may not take, kept for those that run and grow.

# %%
MARGINS = (0.0, 0.2, 0.5)
by_margin = {
    name: [simulate(trace, config(POOLS[name][0], safety_margin=margin)) for margin in MARGINS]
    for name, trace in traces.items()
}
draw(
    by_margin,
    lambda result: result.safety_margin,
    {
        "evictions": lambda result: result.evictions,
        "computed again": lambda result: result.recomputed_tokens,
        "first token p90, s": first_token,
    },
    "safety margin",
)
plt.show()

# %% [markdown]
# A margin buys fewer evictions, a small one for nothing and a large one with longer waiting. How much it takes depends
# on how much requests *grow* once they run: little where prompts are long and answers short, much for reasoning, whose
# requests begin with a few blocks and end with dozens. There is no best margin, only an exchange. And look back at the
# picture above: no margin does for a pool what twice its size does.
#
# ## A reserve delays, capacity cures
#
# The smallest example that shows it: a request arrives every 5 steps and generates one token in each. Short requests
# grow by one block (200 + 200 tokens, blocks of 256), long ones by three (200 + 800). The pool has 64 blocks.
#
# `reserve_model` is a **loss model**: who is not admitted on arrival is lost, and so is who finds the pool empty. It
# shares its admission rule with the scheduler and nothing else. The **scheduler** loses nobody: who is not admitted
# waits, who gets no block stands still, and only when nobody at all can go on are the newest evicted, to come back
# later.

# %%
RESERVES = (0.0, 0.15, 0.5)
workloads = {"short": SHORT, "long": LONG}
model = {name: [reserve_model(each, reserve) for reserve in RESERVES] for name, each in workloads.items()}
real = {name: [reserve_in_scheduler(each, reserve) for reserve in RESERVES] for name, each in workloads.items()}

figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained", sharex=True)
print("admitted, evictions, step of the first one     loss model           scheduler")
for axes, name in zip(panels, workloads, strict=True):
    for runs, label, style, colour in (
        (model[name], "loss model", "s--", "grey"),
        (real[name], "scheduler", "o-", "C0"),
    ):
        axes.plot(RESERVES, [run.evictions for run in runs], style, color=colour, label=f"{label}: evictions")
        axes.plot(RESERVES, [run.admitted for run in runs], style, color=colour, alpha=0.35, label=f"{label}: admitted")
    axes.set(title=f"{name} requests, 600 steps", xlabel="reserve", ylabel="requests")
    for reserve, *runs in zip(RESERVES, model[name], real[name], strict=True):
        cells = [f"({run.admitted}, {run.evictions}, {run.first_eviction or 'never'})" for run in runs]
        print(f"{name:<6} reserve {reserve:<30} {cells[0]:<20} {cells[1]}")
panels[0].legend(fontsize=7)
plt.show()

# %% [markdown]
# With short answers a reserve of 15% is enough, since everyone needs one more block: the loss model has no eviction
# left, and it pays with a fifth of its admissions. With long ones the same reserve only *delays* the first eviction,
# from step 187 to 212 in the model and from 438 to 463 in the scheduler. What cures is capacity: forty of the long
# requests, to the end.

# %%
arrival = np.arange(0, 200, LONG.every)
long_trace = make_trace(arrival, np.full(len(arrival), LONG.prompt), np.full(len(arrival), LONG.generated), name="long")
cures = {}
for label, blocks, margin in (("64 blocks", 64, 0.0), ("64 blocks, reserve 15%", 64, 0.15), ("160 blocks", 160, 0.0)):
    pool = simulation_config(num_blocks=blocks, block_size=256, safety_margin=margin, shares_blocks=False)
    cures[label] = simulate(long_trace, pool, cost=ConstantCost(step=1.0))

figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
for label, run in cures.items():
    axes.plot(
        run.timeline.seconds, run.timeline.live, label=f"{label}: {run.evictions} evictions, {run.num_steps} steps"
    )
axes.set(title="Blocks held, 40 long requests", xlabel="step", ylabel="blocks")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Which cached blocks go first
#
# Blocks of requests that have gone stay cached until somebody needs the room, and prompts that begin alike find them.
# Which go first is the eviction policy's. It matters where prompts share something and the pool is too small for all
# of it: for agents, whose next turn comes a while after the last, and for questions behind one of many sets of
# examples (`few_shot`). Prompts of chat and reasoning have nothing in common here.

# %%
shared = {
    "agents": (small("agents", 40, rate=0.5, most_blocks=512), (1024, 2048, 4096)),
    "few_shot": (small("few_shot", 100, rate=20, most_blocks=256), (256, 512)),
}
policies = sorted(EVICTION_MAPPING)
cached = {
    name: {policy: [simulate(trace, config(n, eviction=policy)) for n in pools] for policy in policies}
    for name, (trace, pools) in shared.items()
}
figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
for axes, (name, by_policy) in zip(panels, cached.items(), strict=True):
    for policy, results in by_policy.items():
        axes.plot(shared[name][1], [100 * result.hit_rate for result in results], "o-", label=policy)
    axes.set(title=name, xlabel="blocks of the pool", ylabel="% of prompt tokens found", ylim=(0, None))
    axes.set_xscale("log", base=2)
panels[0].legend()
plt.show()

# %% [markdown]
# Policies are apart where some of what is wanted again has to go; in a pool that holds it all none has anything to
# decide. In one much too small for its sessions `lifo` finds most, since it keeps some of them whatever comes. These
# are two workloads: docs/eviction.md has more, and why the default is what it is. Again it is capacity that moves the
# curve most.

# %% [markdown]
# ## Your own trace
#
# A trace is a CSV file with the columns `arrival_s`, `prompt_tokens` and `output_tokens`, which most servers' logs
# have in one form or another. (If prompts begin alike, JSON lines can say which blocks they have in common: see
# `read_trace`.) Here is one, at full size, and the question: what is the smallest pool in which nine of ten wait less
# than two seconds?

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "mine.csv"
    mine = workload_named("chat").sample(30, rate=10, seed=7)
    columns = zip(mine.arrival, mine.prompt_tokens, mine.output_tokens, strict=True)
    lines = [f"{when:.3f},{prompt},{output}" for when, prompt, output in columns]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    sweep = run_sweep(read_trace(path), simulation_config(num_blocks=192), {"num_blocks": [192, 256, 384]})
print(sweep)

good = [point for point in sweep.points if point.result is not None and point.result.quantiles()["waiting"][1] < 2]
smallest = good[0].settings["num_blocks"]
print(f"\nthe smallest of these: {smallest} blocks, {smallest * 64:,} tokens")

# %% [markdown]
# In a shell, with a picture:
#
# ```bash
# cbjax simulate mine.csv --num-blocks 192 256 384 --margin 0 0.15 0.3 --plot pools.png
# ```
#
# The counts (steps, admissions, evictions, hits) are exact as long as the order of events is: they come from the same
# code. The seconds are as good as the cost of a step. For those of your model on your machine, measure it once:
#
# ```python
# cost = cbjax.measure_cost(lm)
# Path("cost.json").write_text(cost.to_json())  # then: cbjax simulate mine.csv --cost cost.json ...
# ```
