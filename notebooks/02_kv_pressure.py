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
# # When the KV pool is too small
#
# Keys and values of every token lie in a pool of **blocks**. Requests grow and the pool does not, so sooner or later
# somebody has to wait, or to give back what it holds. This notebook makes the pool far too small, and looks at what
# the engine does about it: margins, evictions, host memory, shared prefixes, forks. Whatever it does, **no request
# gets another token for it**, and the notebook asserts that for every variant.

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
# ## A model, eight requests, 24 blocks
#
# The model is tiny and random: it talks nonsense, in no time, and that is all that this needs. The pool has 24 blocks
# of 8 tokens, 192 in all. The eight requests come to 487 tokens, so about three of them fit at a time.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from cbjax import ContinuousBatchingConfig, GenerationConfig
from cbjax.sampling import derive_seed
from cbjax.testing import ByteTokenizer, tiny_llama

BLOCKS, BLOCK_SIZE = 24, 8
lm = tiny_llama(tokenizer=ByteTokenizer())
pool = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE, "max_batch_tokens": 32, "max_requests_per_batch": 8, "seed": 0}


def serve(prompts, configs, **settings):
    """Outputs by request, the record of every step, and the run's summary."""
    # 0: decode steps run in the program of the mixed ones, so there is one to compile
    config = ContinuousBatchingConfig(**pool, max_blocks_per_request=0, **settings)
    with lm.recording() as steps:
        outputs = lm.generate_batch(prompts, configs, config, request_ids=list("ABCDEFGH"[: len(prompts)]))
    lm.close()  # the next variant begins with an empty pool
    return outputs, steps, lm.summary


def sampled(length, **settings):
    return GenerationConfig(max_new_tokens=length, temperature=1.0, eos_token_id=-1, **settings)


def tokens(outputs):
    return [output.generated_tokens for output in outputs.values()]


lengths = [(20, 40), (37, 24), (9, 60), (28, 36), (50, 20), (14, 44), (33, 30), (18, 24)]  # prompt, new tokens
prompts = [np.random.default_rng(i).integers(0, 256, size).tolist() for i, (size, _) in enumerate(lengths)]
configs = [sampled(length) for _, length in lengths]

runs = {margin: serve(prompts, configs, safety_margin=margin) for margin in (0.0, 0.15, 0.5)}
expected = tokens(runs[0.0][0])
print(f"{sum(map(sum, lengths))} tokens, {BLOCKS * BLOCK_SIZE} in the pool, on {jax.devices()[0]}")

# %% [markdown]
# ## What a block is
#
# This is the pool in the middle of a run. Each box is a block, its eight cells hold the keys and values of eight
# tokens in a row, and the number is the block's id. A request takes a block when its last one is full (pale cells are
# still to come), wherever there is one: its **block table** says where. Full blocks of requests that have gone stay
# **cached** (grey) until somebody needs the room. **Blank** ones (white; none is left here) hold nothing.

# %%
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
BLANK, CACHED, SHARED = "#F7F7F7", "#B8B8B8", "#222222"
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C564B"]
colour_of = dict(zip("ABCDEFGH", COLOURS, strict=True))


def mark(marker, label, colour="black"):
    return plt.Line2D([], [], marker=marker, color=colour, linestyle="", label=label)


def legend(figure, names, *more):
    handles = [Patch(facecolor=BLANK, edgecolor="grey", label="blank"), Patch(color=CACHED, label="cached")]
    handles += [Patch(color=colour_of[name], label=f"held by {name}") for name in names]
    figure.legend(handles=[*handles, *more], frameon=False, loc="outside right center")


def draw_blocks(axes, steps, moment):
    """The pool at a step, cell by cell."""
    written = {}  # KV cells of each request
    for step in steps[: moment + 1]:
        batch = step.plan.batch
        ends = (batch.start + batch.count).tolist()
        written |= {step.request_ids[uid]: end for uid, end in zip(batch.uid.tolist(), ends, strict=True)}
    owner = {}
    for name, table in steps[moment].block_tables().items():
        for column, block in enumerate(table.tolist()):
            owner[block] = name, written[name] - column * BLOCK_SIZE
    cached = set(steps[moment].state.pool.cached.blocks().tolist())
    for block in range(BLOCKS):
        x, y = block % 8 * (BLOCK_SIZE + 1.5), -(block // 8) * 1.8
        name, filled = owner.get(block, (None, 0))
        for cell in range(BLOCK_SIZE):
            colour = colour_of[name] if name else CACHED if block in cached else BLANK
            alpha = 0.25 if name and cell >= filled else 1.0
            axes.add_patch(Rectangle((x + cell, y), 1, 1, facecolor=colour, alpha=alpha, edgecolor="white"))
        axes.add_patch(Rectangle((x, y), BLOCK_SIZE, 1, fill=False, edgecolor="black", linewidth=0.8))
        axes.text(x, y + 1.1, str(block), fontsize=7)
    axes.set(xlim=(-0.5, 8 * (BLOCK_SIZE + 1.5)), ylim=(-3.9, 1.8))
    axes.axis("off")


middle = 30
outputs, steps, _ = runs[0.15]
figure, axes = plt.subplots(figsize=(9, 2), layout="constrained")
draw_blocks(axes, steps, middle)
axes.set_title(f"The pool at step {middle}: 24 blocks of 8 tokens")
legend(figure, steps[middle].block_tables())
plt.show()
for name, table in steps[middle].block_tables().items():
    print(f"block table of {name}: {table.tolist()}")

# %% [markdown]
# ## What a margin is, and an eviction
#
# Now the whole run: one line for each block, one column for each step. A request that needs a block and finds none is
# *starved* and pauses. Once everyone is, the newest lose their blocks (crosses) so that the others can go on. That is
# an **eviction**. Here it is a *soft reset*: the request waits again, keeps its tokens, and has their KV computed
# again when it returns. What it had filled is cached, and whatever of it nobody took meanwhile is found.
#
# The **safety margin** is what prevents that: no *waiting* request is admitted (triangles) while fewer blocks are free
# than this fraction of the pool. Those that run may use the reserve. The lower strips show it: free blocks are blank or
# cached ones, and no triangle stands in the reserve (one could only where nobody else runs).
#
# A line that goes from a colour to grey is a block given back. Where it goes from grey to a colour, the block has been
# handed on: what was cached in it is gone, unless it was found there by the request that holds it now.


# %%
def lost(steps):
    """(step, name, its blocks) of every eviction."""
    for i, step in enumerate(steps):
        for victim in (*step.plan.soft_resets, *step.plan.offloads):
            name = step.request_ids[victim.uid]
            yield i, name, steps[i - 1].block_tables()[name]


def draw_pool(axes, steps):
    """One line for each block, one column for each step; crosses where a request lost it."""
    grid = np.full((BLOCKS, len(steps)), -1)  # 0: blank, 1: cached, 2 to 9: held by A to H, 10: by several
    for i, step in enumerate(steps):
        blocks = step.state.pool
        grid[blocks.blank[: blocks.num_blank], i] = 0
        grid[blocks.cached.blocks(), i] = 1
        tables = step.block_tables()
        for name, table in tables.items():
            grid[table, i] = 2 + "ABCDEFGH".index(name)
        held = np.concatenate(list(tables.values()))
        grid[np.bincount(held, minlength=BLOCKS) > 1, i] = 10
    assert (grid >= 0).all()  # a block is blank, cached or held: there is nothing else
    axes.imshow(
        grid,
        cmap=ListedColormap([BLANK, CACHED, *COLOURS, SHARED]),
        vmin=-0.5,
        vmax=10.5,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
    )
    for i, _, blocks in lost(steps):
        axes.plot([i - 0.5] * len(blocks), blocks, "x", color="black", markersize=5)
    axes.set(ylabel="block")


def free_at_admission(step, free):
    """Blocks that were free when the step's last admission was decided; `free`: once the step had all of its own."""
    last = step.plan.admitted[-1]
    return free + len(step.block_tables()[step.request_ids[last.uid]]) - last.num_cached // BLOCK_SIZE


def draw_free(axes, steps, margin):
    """Free blocks once each step has its own, and at admissions; the margin's reserve below."""
    free = [step.state.pool.num_free for step in steps]
    axes.step(range(len(steps)), free, where="mid", color="black", linewidth=0.9)
    axes.axhspan(0, margin * BLOCKS, color="#D55E00", alpha=0.25, linewidth=0)
    for i, step in enumerate(steps):
        if step.plan.admitted:
            seen = free_at_admission(step, free[i])
            assert seen >= margin * BLOCKS or step.plan.batch.num_rows == 1
            axes.plot(i, seen, "v", color="#0072B2", markersize=4)
    axes.set(ylim=(0, BLOCKS + 2), yticks=(0, BLOCKS // 2, BLOCKS), ylabel="free")


longest = max(len(steps) for _, steps, _ in runs.values())
figure, panels = plt.subplots(
    6, figsize=(9, 9.5), sharex=True, layout="constrained", gridspec_kw={"height_ratios": [3, 1] * 3}
)
for (margin, (outputs, steps, summary)), above, below in zip(runs.items(), panels[::2], panels[1::2], strict=True):
    assert tokens(outputs) == expected
    draw_pool(above, steps)
    draw_free(below, steps, margin)
    above.set(
        xlim=(-1, longest),
        title=f"safety_margin={margin}: {summary.soft_resets} evictions, {summary.recomputed_tokens} tokens computed "
        f"again, {len(steps)} steps",
    )
panels[-1].set(xlabel="step")
reserve = Patch(color="#D55E00", alpha=0.25, label="reserve")
legend(figure, "ABCDEFGH", mark("x", "lost"), mark("v", "admission", "#0072B2"), reserve)
plt.show()

# %% [markdown]
# Without a margin everybody is let in and some are thrown out again. With half of the pool in reserve nobody is, but
# more of the pool lies idle and the run takes longer. The tokens are the same; this is what they cost:

# %%
for margin, (_, steps, summary) in runs.items():
    starved = sum(step.plan.num_starved for step in steps)
    held = np.mean([BLOCKS - step.state.pool.num_free for step in steps])
    print(
        f"margin {margin:<4}  {len(steps):3d} steps  {summary.soft_resets} evictions  "
        f"{summary.recomputed_tokens:3d} tokens computed again  {starved:2d} pauses  {held:4.1f} blocks held on average"
    )

# %% [markdown]
# ## Host memory instead of computing again
#
# With `cpu_offload_space` (GiB) the KV of a victim is copied to host memory and comes back with the request. The
# evictions then cost bytes over the bus instead of tokens. Which is cheaper depends on the model, the machine and the
# length of the context.

# %%
offloaded = serve(prompts, configs, safety_margin=0.0, cpu_offload_space=0.01)
pressure = {"soft reset": runs[0.0], "offload": offloaded}
for how, (outputs, steps, summary) in pressure.items():
    assert tokens(outputs) == expected
    evictions = summary.soft_resets + summary.offloads
    print(
        f"{how:>10}: {evictions} evictions, {summary.recomputed_tokens:3d} tokens computed again, "
        f"{summary.copied_bytes:5d} bytes copied, {len(steps)} steps"
    )

# %%
WAITS, PAUSES, PREFILLS, DECODES, RETURNS = range(5)
ACTIVITY = {
    "waits": "#F2F2F2",
    "holds blocks, starved": "#B8B8B8",
    "prefill": "#E69F00",
    "decode": "#0072B2",
    "after an eviction: back, or computed again": "#D55E00",
}


def activity(steps, names):
    """What each request does in each step; -1 after its end."""
    grid = np.full((len(names), len(steps)), -1)
    for i, step in enumerate(steps):
        grid[[names.index(name) for name in step.request_ids.values()], i] = WAITS
        grid[[names.index(name) for name in step.block_tables()], i] = PAUSES
        batch = step.plan.batch
        for uid, carried, incarnation in zip(batch.uid, batch.carried, batch.incarnation, strict=True):
            row = names.index(step.request_ids[int(uid)])
            grid[row, i] = DECODES if carried else RETURNS if incarnation else PREFILLS
    return grid


figure, panels = plt.subplots(2, figsize=(9, 5), sharex=True, layout="constrained")
for axes, (how, (outputs, steps, _)) in zip(panels, pressure.items(), strict=True):
    names = list(outputs)
    axes.imshow(
        activity(steps, names),
        cmap=ListedColormap(["white", *ACTIVITY.values()]),
        vmin=-1.5,
        vmax=4.5,
        aspect="auto",
        interpolation="nearest",
    )
    for i, name, _ in lost(steps):
        axes.plot(i - 0.5, names.index(name), "x", color="black")
    axes.set(yticks=range(len(names)), yticklabels=names, ylabel="request", title=f"Who runs when: {how}")
panels[-1].set(xlabel="step")
handles = [Patch(color=colour, label=label) for label, colour in ACTIVITY.items()]
figure.legend(handles=[*handles, mark("x", "evicted")], frameon=False, loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# ## What a shared prefix saves
#
# Eight questions behind the same worked examples. With `allow_block_sharing` the full blocks of what prompts have in
# common are computed once and held by all (black), which also leaves room for more requests at a time. The last,
# unfinished block is never shared: a shared block is full and nobody writes to it.

# %%
examples = "2+3=5\n4+4=8\n7+2=9\n1+6=7\n5+3=8\n6+3=9\n8+1=9\n3+3=6\n2+2=4\n1+7=8\n"
questions = [examples + question for question in ("4+5=", "3+4=", "6+2=", "1+1=", "5+4=", "2+6=", "3+2=", "7+1=")]
few_shot = {
    f"allow_block_sharing={sharing}": serve(questions, sampled(12), allow_block_sharing=sharing)
    for sharing in (False, True)
}
apart, together = few_shot.values()
assert tokens(apart[0]) == tokens(together[0])
for label, (outputs, steps, summary) in few_shot.items():
    computed = sum(step.plan.batch.num_tokens for step in steps)
    running = max(step.state.num_active for step in steps)
    print(f"{label}: {computed} tokens computed in {len(steps)} steps, at most {running} requests at a time")
    print(f"  blocks held at most: {summary.peak_blocks}")
    print(f"  num_cached_tokens: {[output.num_cached_tokens for output in outputs.values()]}")

# %%
figure, panels = plt.subplots(2, figsize=(9, 5.5), sharex=True, layout="constrained")
for axes, (label, (_, steps, _)) in zip(panels, few_shot.items(), strict=True):
    draw_pool(axes, steps)
    axes.set(xlim=(-1, len(apart[1])), title=label)
panels[-1].set(xlabel="step")
legend(figure, "ABCDEFGH", Patch(color=SHARED, label="held by several"), mark("x", "lost"))
plt.show()

# %% [markdown]
# ## Forks
#
# `num_return_sequences=4` continues one prompt four times. The prompt is computed once; the continuations share its
# full blocks and each gets a **copy** of the one that is not full, since from there on each writes tokens of its own.
# (Each also computes the prompt's last token itself, for the logits to draw from.) Each is what a request of its own
# with that seed would be.

# %%
prompt = "Once upon a time a fox"  # with its first token (BOS) 23 tokens: two full blocks, and seven cells of a third
outputs, steps, summary = serve([prompt], sampled(16, seed=7, num_return_sequences=4))
seeds = [7, *(derive_seed(7, continuation) for continuation in (1, 2, 3))]
alone, alone_steps, _ = serve([prompt] * 4, [sampled(16, seed=seed) for seed in seeds], allow_block_sharing=False)
assert tokens(outputs) == tokens(alone)

(forked,) = (step for step in steps if len(step.plan.copies))
copies = dict(zip(forked.plan.copies.destinations.tolist(), forked.plan.copies.sources.tolist(), strict=True))
for name, table in forked.block_tables().items():
    print(f"{name:>10}  {table.tolist()}")
print("copied:", ", ".join(f"block {source} to {copy}" for copy, source in copies.items()))
for label, run in (("forked", steps), ("four requests", alone_steps)):
    print(f"{label}: {sum(step.prefill_tokens for step in run)} prompt tokens computed")

# %%
KINDS = {"full, held by all four": "#0072B2", "not full at the fork: copied": "#E69F00", "its own": "#009E73"}


def draw_tables(axes, step):
    tables = step.block_tables()
    held = np.bincount(np.concatenate(list(tables.values())))
    for row, (name, table) in enumerate(tables.items()):
        for column, block in enumerate(table.tolist()):
            kind = 0 if held[block] > 1 else 1 if block in copies or block in copies.values() else 2
            axes.add_patch(Rectangle((column + 0.04, row + 0.08), 0.92, 0.84, color=list(KINDS.values())[kind]))
            label = f"{block}\n= copy of {copies[block]}" if block in copies else str(block)
            axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", color="white", fontsize=8)
        axes.text(-0.1, row + 0.5, name, ha="right", va="center")
    axes.set(xlim=(0, 5), ylim=(4, 0), yticks=[], xticks=np.arange(5) + 0.5, xticklabels=range(5))
    axes.set(xlabel="column of the block table")


grown = [step for step in steps if len(step.block_tables()) == 4][-1]
figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
for axes, step, title in zip(panels, (forked, grown), ("At the fork", "When the first is about to end"), strict=True):
    draw_tables(axes, step)
    axes.set_title(title)
handles = [Patch(color=colour, label=label) for label, colour in KINDS.items()]
figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# ## Further
#
# - The quickstart, with a real model: `notebooks/01_quickstart.ipynb`.
# - How a step goes, and what holds at every step: `docs/how_it_works.md`, `docs/invariants.md`.
