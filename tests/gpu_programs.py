"""Small programs with Mosaic GPU kernels, which tests compile for GPUs that are not there."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.aot.gpu_program import GpuProgram

_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def _multiply(*, blocks, width, live):
    """Tiles [64, 64] of a and [64, width] of b fetched by TMA, multiplied by wgmma, and stored by TMA.

    Args:
      live: products that a thread holds at a time, each in `width / 2` of its registers; 0 stores tiles of b.
    """

    def kernel(a, b, out, a_tile, b_tile, out_tile, barrier):
        block = jax.lax.axis_index("block")
        plgpu.copy_gmem_to_smem(a.at[block], a_tile, barrier)
        plgpu.copy_gmem_to_smem(b.at[block], b_tile, barrier)
        plgpu.barrier_wait(barrier)

        def product(acc):
            plgpu.wgmma(acc, a_tile, b_tile)
            return acc[...]

        products = [pl.run_scoped(product, plgpu.ACC((64, width), jnp.float32)) for _ in range(live)]
        if products:
            total = sum((jnp.exp(each) * products[0] for each in products[1:]), products[0])
            out_tile[...] = total.astype(jnp.bfloat16)
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile if products else b_tile, out.at[block])
        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((blocks, 64, width), jnp.bfloat16),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((64, 64), jnp.bfloat16, transforms=_TILED),
            plgpu.SMEM((64, width), jnp.bfloat16, transforms=_TILED),
            plgpu.SMEM((64, width), jnp.bfloat16, transforms=_TILED),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    arrays = ((blocks, 64, 64), (blocks, 64, width))
    return call, [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in arrays]


def multiply(*, blocks=2, width=64, live=1):
    """One kernel."""
    function, arguments = _multiply(blocks=blocks, width=width, live=live)
    return GpuProgram(function=function, arguments=arguments)


def multiply_twice():
    """Two kernels of one name and other sizes, one of them called twice, and a store that is written in place."""
    narrow, arguments = _multiply(blocks=2, width=64, live=1)
    wide, (_, wide_tile) = _multiply(blocks=3, width=128, live=1)
    store = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)

    def function(a, b, c, store):
        product = narrow(a, narrow(a, b))
        return wide(jnp.concatenate([product, product[:1]]), c), store.at[7].set(1.0)

    return GpuProgram(function=function, arguments=[*arguments, wide_tile, store], donate=[3])


def add():
    """No kernel of Mosaic GPU's."""
    return GpuProgram(function=jnp.add, arguments=[jax.ShapeDtypeStruct((8,), jnp.float32)] * 2)


def nothing():
    """No program."""
