"""Tile layouts of the many-heads kernel, and the conversions that never leave registers.

The layouts are the design: one assignment of a key's bytes to threads serves the gather, the conversion, the tensor
cores' register operand and the store to shared memory, so that no element ever moves between threads.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from .gluon_names import reinterpret

# A piece is 64 bytes of each of 64 rows, as 32-bit words: four lanes a row, 16 bytes a lane, rows r and r + 8. It is at
# once a 16-byte gather of whole sectors, a conflict-free 16-byte store of the converted halves into 128-byte swizzled
# rows, and, up to an order of the inner dimension that Q shares, the tensor cores' register operand.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
REQUESTS = gl.constexpr(gl.BlockedLayout([1, 1], [16, 2], [4, 1], [1, 0]))
ROW = gl.constexpr(gl.SliceLayout(1, WORDS))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HEAD = gl.constexpr(gl.SliceLayout(0, SCORES))
KEY = gl.constexpr(gl.SliceLayout(1, SCORES))
KEY_OPERAND = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROWS_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [0, 128], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
ROPE_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCALAR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

NO_SCORE_YET = gl.constexpr(-1.0e30)


@gluon.jit
def both_halves(x):
    """float32 -> the same float16 in both halves of an int32."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def convert_piece(words, scale2):
    """int32 [64, 16] of four e4m3 -> float16 [64, 64] times the scale of its row, as the tensor cores' operand."""
    scale2, words = gl.broadcast(scale2[:, None], words)
    e0, e1, e2, e3 = gl.inline_asm_elementwise(
        """{
        .reg .b16 l, h;
        .reg .b32 a, b;
        mov.b32 {l, h}, $4;
        cvt.rn.f16x2.e4m3x2 a, l;
        cvt.rn.f16x2.e4m3x2 b, h;
        mul.rn.f16x2 a, a, $5;
        mul.rn.f16x2 b, b, $5;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }""",
        "=h,=h,=h,=h,r,r",
        [words, scale2],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    x = gl.join(gl.join(e0, e1), gl.join(e2, e3)).permute((0, 1, 3, 2))
    return gl.convert_layout(latent_order(x), KEY_OPERAND)


@gluon.jit
def latent_order(x):
    """A 64-wide piece with its inner dimension in the order in which the four lanes of a row hold it."""
    return x.reshape([64, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([64, 64])


@gluon.jit
def rope_order(x):
    """The same for 32 RoPE dims."""
    return x.reshape([64, 4, 2, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([64, 32])


@gluon.jit
def rope_operand(words, down2):
    """int32 [64, 16] of two bfloat16 each, times the row's power of two -> the tensor cores' operand [64, 32]."""
    down2, words = gl.broadcast(down2[:, None], words)
    e0, e1 = gl.inline_asm_elementwise(
        """{
        .reg .b32 a;
        mul.rn.bf16x2 a, $2, $3;
        mov.b32 {$0, $1}, a;
        }""",
        "=h,=h,r,r",
        [words, down2],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(rope_order(gl.join(e0, e1)), KEY_OPERAND)


@gluon.jit
def find_block(index, table_row, table_width, BLOCK_SIZE: gl.constexpr, HAS_TABLE: gl.constexpr):
    """Cache block of an index, by the request's block table where there is one; -1 where there is none."""
    if HAS_TABLE:
        column = index // BLOCK_SIZE
        block = gl.load(table_row + column, mask=(index >= 0) & (column < table_width), other=-1)
    else:
        block = gl.where(index >= 0, index // BLOCK_SIZE, -1)
    return block


@gluon.jit
def row_pointers(kv_cache, zero_row, index, block, num_blocks, block_stride_16, BLOCK_SIZE: gl.constexpr):
    """Where the 656 bytes of each key are; of one that is not attended, a row of zeros: loads need no mask."""
    valid = (block >= 0) & (block < num_blocks)
    base = kv_cache + block.to(gl.int64) * block_stride_16 * 4 + (index % BLOCK_SIZE) * 164
    return valid, gl.where(valid, base, zero_row)


@gluon.jit
def prefetch_rows(
    kv_cache, index, table_row, table_width, num_cache_blocks, block_stride_16,
    BLOCK_SIZE: gl.constexpr, HAS_TABLE: gl.constexpr,
):  # fmt: skip
    """Brings 64 rows to L2, one bulk request a row: the load pipe, which the scores keep busy, sees nothing of it."""
    which = gl.arange(0, 2, gl.SliceLayout(0, REQUESTS))
    block = find_block(index, table_row, table_width, BLOCK_SIZE, HAS_TABLE)
    valid, base = row_pointers(kv_cache, kv_cache, index, block, num_cache_blocks, block_stride_16, BLOCK_SIZE)
    wanted = (valid[:, None] & (which == 0)[None, :]).to(gl.int32)
    base, wanted = gl.broadcast(base[:, None], wanted)
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.b32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], 656;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [base, wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def any_over(x):
    """Whether any of the 128 threads' elements exceeds 8; every thread gets the answer.

    The softmax's reference moves only when a score exceeds it by 2**8; float16 holds 2**15. Barrier 15 is one that the
    compiler, which counts from 0, does not reach with three warpgroups.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred mine, any;
        setp.gt.f32 mine, $1, 0f41000000;
        barrier.cta.red.or.pred any, 15, 128, mine;
        selp.b32 $0, 1, 0, any;
        }""",
        "=r,f",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def touch_rows(base):
    """Brings the rows of the first turn to L2 at once: the four lanes of a row ask for 64 bytes each, three times."""
    gl.inline_asm_elementwise(
        """{
        .reg .b32 lane;
        .reg .b64 a;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 3;
        mul.wide.u32 a, lane, 64;
        add.u64 a, a, $1;
        prefetch.global.L2 [a];
        prefetch.global.L2 [a + 256];
        mul.wide.u32 a, lane, 48;
        add.u64 a, a, $1;
        prefetch.global.L2 [a + 511];
        mov.u32 $0, 0;
        }""",
        "=r,l",
        [base],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_first_pair(base, lane):
    """The four scales of each row and its first two pieces, latent dims 0..63 and 256..319."""
    group = gl.arange(0, 4, gl.SliceLayout(0, SCALES))
    scale_base = gl.convert_layout(base, gl.SliceLayout(1, SCALES))
    scales = gl.load(scale_base[:, None] + (128 + group)[None, :], cache_modifier=".cg")
    p = base[:, None] + lane[None, :]
    return scales, gl.load(p, cache_modifier=".cg"), gl.load(p + 64, cache_modifier=".cg")


@gluon.jit
def larger_halves(x, y):
    """Maximum of the magnitudes of two pairs of bfloat16, as bits."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        and.b32 a, $1, 0x7fff7fff;
        and.b32 b, $2, 0x7fff7fff;
        max.u16x2 $0, a, b;
        }""",
        "=r,r,r",
        [x, y],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def largest_bits(x):
    """Largest magnitude in a tile of bfloat16 pairs, as bits (0x7F80 and above: not finite)."""
    return gl.max(gl.max(gl.maximum(x & 0x7FFF, (x >> 16) & 0x7FFF), 1), 0)


@gluon.jit
def largest_finite_bits(x):
    """The same among the finite ones."""
    low = x & 0x7FFF
    high = (x >> 16) & 0x7FFF
    return gl.max(gl.max(gl.maximum(gl.where(low < 0x7F80, low, 0), gl.where(high < 0x7F80, high, 0)), 1), 0)


@gluon.jit
def pairs_to_float16(x, scale):
    """Pairs of bfloat16 -> pairs of float16, times scale in float32."""
    scale, x = gl.broadcast(scale, x)
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 l, h;
        shl.b32 l, $1, 16;
        and.b32 h, $1, 0xffff0000;
        mul.f32 l, l, $2;
        mul.f32 h, h, $2;
        cvt.rn.f16x2.f32 $0, h, l;
        }""",
        "=r,r,f",
        [x, scale],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def scale_bfloat16_pairs(x, scale2):
    """Pairs of bfloat16 times a power of two."""
    scale2, x = gl.broadcast(scale2, x)
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, scale2], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def store_queries(tile, x):
    """A 64-wide piece of Q as pairs, its inner dimension in the order of the key operand."""
    x = x.reshape([64, 4, 4, 2]).permute((0, 2, 3, 1)).reshape([64, 32])
    reinterpret(tile, gl.int32, [64, 32], gl.NVMMASharedLayout(128, 32, 2)).store(x)
