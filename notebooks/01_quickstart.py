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
# # Continuous batching in JAX, looked at from inside
#
# A batch of requests rarely ends at once. **Continuous batching** lets requests join and leave at every step; a
# **paged KV cache** gives each of them blocks as it grows; nothing is padded to the longest one. This notebook runs a
# real model (SmolLM2-135M-Instruct, 98 MB) on whatever JAX finds, a laptop's CPU included, and looks at what the
# engine does.

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
# ## Load
#
# `from_pretrained` takes `"demo"`, a Hugging Face folder, a GGUF file, or an `"org/name"` of the hub. The pool is
# small on purpose, 24 blocks of 16 tokens, so that requests have to share it.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from cbjax import CausalLM, ContinuousBatchingConfig, GenerationConfig

lm = CausalLM.from_pretrained("demo", progress_bar=True)
lm.continuous_batching_config = ContinuousBatchingConfig(
    block_size=16, num_blocks=24, max_batch_tokens=64, max_requests_per_batch=8, seed=0
)
print(f"{lm.config.num_layers} layers, {lm.vocab_size} ids, on {jax.devices()[0]}")

# %% [markdown]
# ## Generate
#
# Prompts are text, chat messages, or token ids. Each may have settings of its own. `lm.recording()` keeps a record of
# every step, for the plots below.


# %%
def ask(question):
    return [{"role": "user", "content": question}]


jobs = [
    (ask("What is the capital of France?"), 12),
    (ask("Name three colours of the rainbow."), 24),
    (ask("Write a short poem about the sea."), 48),
    ("Once upon a time there was a fox who", 40),
    (ask("Explain in two sentences why the sky is blue."), 40),
    ("1, 2, 3, 4, 5, 6, 7, 8,", 16),
    (ask("Give me a recipe for pancakes: " + "list the ingredients first, then every step. " * 4), 48),
    (ask("Translate to French: good morning."), 16),
    ("The most important result of the paper is that", 32),
    (ask("Who wrote Hamlet?"), 16),
    ("def fibonacci(n):\n", 40),
    (ask("What is 7 times 8?"), 16),
]
prompts = [prompt for prompt, _ in jobs]
configs = [GenerationConfig(max_new_tokens=length) for _, length in jobs]

with lm.recording() as steps:
    outputs = lm.generate_batch(prompts, configs, progress_bar=True)

for request_id, output in outputs.items():
    print(f"{request_id:>6} {output.finish_reason:>6}  {' '.join(output.text.split())[:90]}")
print(f"\n{lm.summary}")

# %% [markdown]
# ## The block tables
#
# A request's keys and values lie in blocks anywhere in the pool; its **block table** says where. These are the tables
# half-way through the run. A block that stands in several of them holds what their prompts have in common:

# %%
middle = steps[len(steps) // 2]
for request_id, table in middle.block_tables().items():
    print(f"{request_id:>6}  {' '.join(f'{block:2d}' for block in table)}")
print(f"{len(middle.state.waiting)} requests wait, and {middle.state.pool.num_free} blocks are free")

# %% [markdown]
# And this is the whole run: every block of the pool, at every step. A request takes blocks as it grows and gives all
# of them back in the step after its last token; whoever waits moves in. (A shared block has the colour of one of its
# holders.)

# %%
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
names = list(outputs)
colours = plt.get_cmap("tab20").colors[: len(names)]

num_blocks = lm.continuous_batching_config.num_blocks
owner = np.zeros((num_blocks, len(steps)), int)  # 0: free
for i, step in enumerate(steps):
    for request_id, table in step.block_tables().items():
        owner[table, i] = 1 + names.index(request_id)

figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
palette = ListedColormap([(0.95, 0.95, 0.95), *colours])
axes.imshow(
    owner, cmap=palette, vmin=-0.5, vmax=len(names) + 0.5, aspect="auto", interpolation="nearest", origin="lower"
)
for i, step in enumerate(steps):
    if step.plan.soft_resets:
        axes.axvline(i, color="black", linewidth=0.8, linestyle=":")
axes.set(xlabel="step", ylabel="block of the pool", title="Who holds which block (16 tokens each)")
handles = [Patch(color=palette(0), label="free")]
for colour, (name, output) in zip(colours, outputs.items(), strict=True):
    handles.append(Patch(color=colour, label=f"{name}: {len(output.prompt_ids)} + {len(output.generated_tokens)}"))
axes.legend(handles=handles, title="prompt + new tokens", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
plt.show()

# %% [markdown]
# ## What a step computes
#
# Prefill of new prompts and decoding of running requests share a step. The dashed line is the size of the compiled
# program (*bucket*) that ran it: a handful of shapes serves every step.

# %%
prefill = np.array([step.prefill_tokens for step in steps])
decode = np.array([step.decode_tokens for step in steps])
bucket = np.array([step.bucket.tokens for step in steps])
held = np.array([num_blocks - step.state.pool.num_free for step in steps])
running = np.array([step.state.num_active for step in steps])
waiting = np.array([len(step.state.waiting) for step in steps])
x = np.arange(len(steps))

figure, (above, below) = plt.subplots(2, figsize=(9, 5), sharex=True, layout="constrained")
above.bar(x, decode, width=1.0, color="#0072B2", label="decode")
above.bar(x, prefill, width=1.0, bottom=decode, color="#E69F00", label="prefill")
above.step(x, bucket, where="mid", color="black", linewidth=0.9, linestyle="--", label="bucket")
above.set(ylabel="tokens per step", title="Tokens computed")
above.legend(frameon=False, ncols=3)
below.fill_between(x, 100 * held / num_blocks, step="mid", color="#009E73", alpha=0.3, label="pool in use")
below.set(xlabel="step", ylabel="pool in use (%)", ylim=(0, 105), title="Occupancy")
requests = below.twinx()
requests.step(x, running, where="mid", color="#0072B2", label="running")
requests.step(x, waiting, where="mid", color="#D55E00", label="waiting")
requests.set(ylabel="requests", ylim=(0, len(jobs)))
requests.spines["right"].set_visible(True)
lines = [*below.get_legend_handles_labels()[0], *requests.get_legend_handles_labels()[0]]
requests.legend(handles=lines, frameon=False, loc="upper right")
plt.show()

# %% [markdown]
# ## The padding that is not there
#
# A rectangular batch pads every row to the longest. When a prompt of $n$ tokens joins $B - 1$ requests that decode
# one token each, the rectangle wastes $(n - 1)(B - 1)$ slots: linear in either, and 693 of 800 for $n = 100$, $B =
# 8$. Packed rows waste only what rounds a step up to its bucket.


# %%
def padding_waste(batch, prompt_tokens):
    return (prompt_tokens - 1) * (batch - 1)


longest_prompt = max(len(output.prompt_ids) for output in outputs.values())
longest_output = max(len(output.generated_tokens) for output in outputs.values())
useful = int((prefill + decode).sum())
slots = {
    "padded generate:\nall rows to the longest": len(jobs) * (longest_prompt + longest_output - 1),
    "padded steps:\nrows to the step's longest": sum(step.rectangle for step in steps),
    "this run:\npacked, in buckets": int(bucket.sum()),
    "needed": useful,
}

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
n = np.arange(1, 201)
for batch, colour in zip((2, 4, 8, 16), ("#56B4E9", "#009E73", "#0072B2", "#CC79A7"), strict=True):
    left.plot(n, padding_waste(batch, n), color=colour, label=f"B = {batch}")
left.plot(100, padding_waste(8, 100), "o", color="black")
left.annotate("693", (100, 693), textcoords="offset points", xytext=(4, -12))
left.set(xlabel="prompt tokens n", ylabel="wasted token slots", title="One prompt joins B - 1 decodes")
left.legend(frameon=False)
bars = right.barh(list(slots), list(slots.values()), color=["#D55E00", "#E69F00", "#0072B2", "#009E73"])
right.bar_label(bars, labels=[f"{count} ({count / useful:.1f}x)" for count in slots.values()], padding=3)
right.set(xlabel="token slots computed", title="This run", xlim=(0, 1.3 * max(slots.values())))
right.invert_yaxis()
plt.show()

# %% [markdown]
# ## Stream
#
# `stream` yields a snapshot after each token. Characters once shown never change. Store and programs are those of the
# batch: nothing is compiled again.

# %%
shown = 0
for output in lm.stream(ask("Tell me one fact about owls."), GenerationConfig(max_new_tokens=32)):
    print(output.text[shown:], end="", flush=True)
    shown = len(output.text)
print(f"\n\n{lm.summary.compiled} programs compiled for this call")

# %% [markdown]
# ## Sample, reproducibly
#
# Greedy is the default; `temperature`, `top_k` and `top_p` draw. A draw depends on the request's seed and on which of
# its tokens is drawn, never on the batch: the same request gives the same tokens alone and among others.

# %%
story = "The old lighthouse keeper opened the door and"
sampled = [GenerationConfig(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)]
together = list(lm.generate_batch([story] * 4, sampled).values())
for seed, output in enumerate(together):
    print(f"seed {seed}: {story} {' '.join(output.text.split())}")

(alone,) = lm.generate_batch([story], sampled[3]).values()
assert alone.generated_tokens == together[3].generated_tokens

# %% [markdown]
# ## Every setting, and why
#
# What was asked for, what is used, and the reason: also where something asked for could not be had.

# %%
print(lm.session.resolved.report())
lm.close()

# %% [markdown]
# ## Further
#
# - Serve a Flax module of your own: `docs/your_own_model.md`.
# - How a step goes, and what holds at every step: `docs/how_it_works.md`, `docs/invariants.md`.
