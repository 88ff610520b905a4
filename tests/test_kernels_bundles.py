"""What needs no compiler: listings as trees of loops, and cases that are none."""

import pytest

from pallas_kernels.aot.__main__ import main
from pallas_kernels.aot.bundles import Loop, Trips, parse

LISTING = """
= control target key start
LB: loop body
= control target key end

     0   :  { %1 = smov 1 }
   0x1   :  { %2 = smov 2 }
   0x2 LB: > { %3 = vst [vmem:[#allocation4_spill] sm:$0xff] %v1 }
   0x3 LB: >> { %4 = vadd }
   0x4   : > { %5 = sbr.rel (!%p1) target = $region9 }
   0x5   :  {}
   0x6 PF: > { %6 = vld [vmem:[#allocation4_spill] sm:$0xff]  ;;  %7 = sst [smem:[#allocation5_spill]] %s3 }
   0x7 LB: >> { %8 = vadd }
   0x8 PF:  { %9 = shalt }
"""


def test_a_listing_is_read_as_a_tree_of_loops():
    program = parse(LISTING)
    assert program.describe() == "3[2[3, 1]]"
    (outer,) = program.loops
    assert (outer.spills, outer.fills) == (1, 1)
    assert program.total((Trips(10, (Trips(4), Trips(0.5))),)) == 3 + 10 * (2 + 4 * 3 + 0.5 * 1)
    with pytest.raises(ValueError, match=r"2 loops where 1 were written: 2\[3, 1\]"):
        outer.total((Trips(1),))
    assert [loop.bundles for loop in program.walk()] == [3, 2, 3, 1]
    assert Loop().total(()) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["v9"], "chips are v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200; got 'v9'"),
        (
            ["v6e", "--op", "conv"],
            "kernels are paged_attention and kv_update, the first in the phases decode and prefill; got conv",
        ),
        (["v6e", "--heads", "9", "--kv-heads", "4"], "kv heads must divide query heads; got 4 and 9"),
        (["v6e", "--block-size", "48"], "block_size must be one of"),
        (["v6e", "--head-dim", "512"], "heads of at most 256; got head_dim 512"),
        (["v6e", "--chunk", "300"], "power of two"),
        (["v6e", "--dtype", "float16"], "got float16"),
        (["v6e", "--dtype", "nonsense"], "dtype must name a dtype; got 'nonsense'"),
        (["v6e", "--kv-dtype", "nonsense"], "kv_dtype must name a dtype"),
        (["v6e", "--heads", "0"], "heads must be at least 1; got 0"),
        (["v6e", "--block-size", "0"], "block_size must be at least 1; got 0"),
        (["v6e", "--window", "0"], "window must be an int of at least 1"),
        (["v6e", "--soft-cap", "nan"], "soft_cap must be a positive, finite number; got nan"),
        (["v6e", "--chunk", "1048576"], "a chunk has at most 8192 tokens"),
        (["v5p", "--cores", "2", "--rows", "17"], "multiple of 16 rows; got 2 and 17 rows"),
        (["v5p", "--cores", "0"], "cores is 1, or 2"),
        (["v6e", "--timeout", "nan"], "--timeout must be a positive number"),
        (["v6e", "--json", "no_folder/x.json"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_compiled_is_said(capsys, argv, message):
    assert main(argv) == 1
    assert message in capsys.readouterr().err
