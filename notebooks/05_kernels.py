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
# # Paged attention on TPUs
#
# Decoding reads a row's keys and values once for every token. On a TPU that is a race between memory, which brings
# them, and the matrix unit, which takes them; the kernel is as fast as the slower of the two. This notebook draws both
# for the kernels of `pallas_kernels`: bytes are counted, and instruction bundles (one is a cycle of a core) are what
# the TPU's own compiler lists, without a TPU. **Figures of that kind are not times.** The first cell measures times,
# where there is a TPU.

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
# ## Measured, if there is a TPU
#
# 64 rows of 8,192 tokens, 32 query heads over 8 of 128, blocks of 64: 2 GiB of keys and values, read once a call.

# %%
import json
import time
from functools import partial
from importlib import resources

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from pallas_kernels.aot import CHIPS
from pallas_kernels.paged_attention import KVLayout, paged_attention


def measure(rows=64, context=8192, heads=32, kv_heads=8, head_dim=128, block_size=64, repeats=20):
    """Seconds of calls one after another, and the bytes of keys and values that each reads."""
    blocks = rows * context // block_size
    layout = KVLayout(num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, num_blocks=blocks)
    key = jax.random.key(0)
    q = jax.random.normal(key, (rows, heads, head_dim), jnp.bfloat16)
    k = v = jax.random.normal(key, (rows, kv_heads, head_dim), jnp.bfloat16)
    table = np.random.default_rng(0).permutation(blocks).astype(np.int32).reshape(rows, -1)
    table = np.concatenate([table, np.full_like(table[:1], blocks)])
    row = np.arange(rows, dtype=np.int32)
    step = (table, row, np.arange(rows + 1, dtype=np.int32), np.full(rows, context, np.int32), np.int32(rows))
    call = jax.jit(partial(paged_attention, single_token_rows=True), donate_argnums=3)
    kv, seconds = jnp.zeros(layout.shape, layout.dtype), []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        out, kv = call(q, k, v, kv, *step)
        jax.block_until_ready((out, kv))
        seconds.append(time.perf_counter() - start)
    return np.array(seconds[2:]), rows * context * layout.token_bytes


device = jax.devices()[0]
if device.platform == "tpu":
    seconds, moved = measure()
    print(f"{device.device_kind}: median {1e6 * np.median(seconds):.0f} us (from {1e6 * seconds.min():.0f} to "
          f"{1e6 * seconds.max():.0f}), {moved / np.median(seconds) / 1e9:.0f} GB/s of keys and values")  # fmt: skip
else:
    print(f"no TPU here, but a {device.platform}: nothing is measured")

# %% [markdown]
# ## What the compiler says
#
# The table that sizes are chosen by. Each line is a kernel compiled for a chip: bundles and bytes for 1,024 tokens of
# keys and values, by the length of the context, all that is done for a row included.

# %%
table = json.loads(resources.files("pallas_kernels.paged_attention.tpu").joinpath("tuned.json").read_text())
names = {(9, 3, 64): "SmolLM2-135M", (32, 8, 128): "Llama-3-8B", (32, 8, 64): "Llama-3.2-1B",
         (8, 4, 256): "Gemma-3-4B", (64, 8, 64): "gpt-oss-20b"}  # fmt: skip


def name_of(entry):
    return names[entry["heads"], entry["kv_heads"], entry["head_dim"]]


for entry in table:
    print(f"{entry['chip']:6} {name_of(entry):13} blocks of {entry['block_size']:3}: chunks of {entry['chunk']:4}, "
          f"{entry['bundles_per_1024_tokens'][-1]:5} bundles and {entry['bytes_per_1024_tokens'][-1] / 2**20:.2f} MiB "
          f"for 1,024 of {entry['contexts'][-1]} tokens")  # fmt: skip

# %% [markdown]
# ## Where memory is the limit
#
# A roofline over the clock: the time that 1,024 tokens take is the larger of bytes over bandwidth, which is flat, and
# bundles over clock. Where the lines meet is the clock above which the kernel waits for memory and cannot be faster.
# Known clocks are marked; those of v6e and TPU7x are not public.

# %%
clocks = np.linspace(0.3, 2.5, 200)
chips = [name for name in CHIPS if any(entry["chip"] == name for entry in table)]
figure, axes = plt.subplots(1, len(chips), figsize=(4 * len(chips), 3.6), sharey=True, squeeze=False)
for axis, chip in zip(axes[0], chips, strict=True):
    for size, style in ((128, "-"), (16, "--")):
        for number, name in enumerate(names.values()):
            for entry in table:
                if (entry["chip"], entry["block_size"]) == (chip, size) and name_of(entry) == name:
                    compute = entry["bundles_per_1024_tokens"][-1] / clocks / 1e3
                    time_us = np.maximum(compute, entry["memory_us"][-1])
                    axis.plot(clocks, time_us, style, color=f"C{number}", label=f"{name}, blocks of {size}")
    if CHIPS[chip].clock_hz:
        axis.axvline(CHIPS[chip].clock_hz / 1e9, color="grey", linewidth=1)
    axis.set(title=chip, xlabel="clock, GHz")
    axis.grid(alpha=0.3)
axes[0][0].set(ylabel="us for 1,024 tokens", yscale="log")
axes[0][-1].legend(fontsize=6)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Short contexts
#
# A row's own work (fetching its block ids, its query, completing and writing its last tokens) counts for more where
# there is less to read, and a last chunk that is not full is computed with as if it were, up to the next of 256, 512
# and 1,024 tokens.

# %%
figure, axis = plt.subplots(figsize=(6, 3.6))
for chip in chips:
    for entry in table:
        if entry["chip"] == chip and name_of(entry) == "Llama-3-8B" and entry["block_size"] == 128:
            axis.plot(entry["contexts"], entry["bundles_per_1024_tokens"], "o-", label=chip)
axis.set(title="Llama-3-8B, blocks of 128", xlabel="context, tokens", ylabel="bundles for 1,024 tokens", xscale="log")
axis.set_ylim(bottom=0)
axis.legend()
axis.grid(alpha=0.3)
plt.show()
