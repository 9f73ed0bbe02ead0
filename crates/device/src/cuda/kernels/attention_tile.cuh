// Tiles of keys and values for mma.sync m16n8k16: how they come into shared memory and into registers.
//
// A tile is 64 tokens (32 for D = 256) of one kv head, with room for D columns: head_dim of them are real, the rest of
// the keys is zeros. Rows are padded to an odd number of 16-byte pieces, so that eight rows at one column lie in different
// banks. Eight-bit codes become bf16, which holds every one of them exactly, two at a time from the even and the odd
// bytes of a word. That sorts the columns of each unit of 16 into even and odd ones, of q and k alike, and of the output.
#pragma once
#include "attention_softmax.cuh"
#include "shared.cuh"

enum Format { BF16, FP8, INT8 };

template <int D, int F> struct Shape {
    static constexpr int TOKENS = D <= 128 ? 64 : 32;
    static constexpr int ROW_BYTES = F == BF16 ? 2 * D : D;
    static constexpr int ROW = ROW_BYTES + 16;
    static constexpr int SCALES_AT = TOKENS * ROW;
    static constexpr int BYTES = SCALES_AT + (F == BF16 ? 0 : TOKENS * 4);
    static constexpr int STEPS = D / 16;       // units of 16 columns
    static constexpr int EIGHTS = TOKENS / 8;  // groups of 8 tokens
};
template <int F> DEVICE u32 head_bytes_of(const AttentionArgs& args) { return F == BF16 ? 2 * args.head_dim : args.head_dim; }

// Copies 16 (or 4) bytes, or writes zeros.
DEVICE void copy_16(u32 to, const u8* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
DEVICE void copy_4(u32 to, const u8* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(real ? 4 : 0) : "memory");
}
DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `LEFT` of the groups this thread began are under way.
template <int LEFT> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Where one span's keys and values of one kv head are.
struct Source {
    const u32* table;
    i32 low, high;  // positions outside are not read: they may hold anything
    u32 kv_head;
};

// Which blocks this thread copies of a tile; read well before they are needed. A pass of all threads copies AT_ONCE
// tokens, a whole number of blocks or a whole part of one.
template <int D, int F, int THREADS> struct Blocks {
    static constexpr int PIECES = Shape<D, F>::ROW_BYTES / 16, AT_ONCE = THREADS / PIECES;
    static constexpr int STEP = AT_ONCE > BLOCK_TOKENS ? AT_ONCE / BLOCK_TOKENS : 1;  // blocks from one entry to the next
    static constexpr int NUM = Shape<D, F>::TOKENS / BLOCK_TOKENS / STEP;
    u32 block[NUM];
    u32 scales;
};
template <int D, int F, int THREADS>
DEVICE void read_blocks(Blocks<D, F, THREADS>& out, const Source& source, i32 start) {
    typedef Blocks<D, F, THREADS> B;
    i32 first = source.low / BLOCK_TOKENS, last = (source.high - 1) / BLOCK_TOKENS;
    i32 mine = start / BLOCK_TOKENS + (i32)(threadIdx.x / B::PIECES / BLOCK_TOKENS);
#pragma unroll
    for (int i = 0; i < B::NUM; i++) out.block[i] = __ldg(source.table + min(max(mine + i * B::STEP, first), last));
    mine = start / BLOCK_TOKENS + (i32)(threadIdx.x / BLOCK_TOKENS);
    if (F != BF16) out.scales = __ldg(source.table + min(max(mine, first), last));
}

// Begins to copy the keys and the values of the tile at position `start`; all threads of the block take part.
template <int D, int F, int THREADS>
DEVICE void begin_tile(const AttentionArgs& args, const Source& source, const Blocks<D, F, THREADS>& blocks, i32 start,
                       u32 keys, u32 values) {
    typedef Shape<D, F> S;
    typedef Blocks<D, F, THREADS> B;
    u32 head_bytes = head_bytes_of<F>(args), column = threadIdx.x % B::PIECES, mine = threadIdx.x / B::PIECES;
    u32 offset = kv_head_at(source.kv_head, mine % BLOCK_TOKENS, head_bytes) + column * 16, to = mine * S::ROW + column * 16;
    u32 num_real = source.high - source.low;
    if (column * 16 < head_bytes) {
#pragma unroll
        for (int pass = 0; pass < S::TOKENS / B::AT_ONCE; pass++) {
            const int token = pass * B::AT_ONCE;
            bool real = (u32)(start + token + (i32)mine - source.low) < num_real;
            const u8* from = kv_section(args, blocks.block[token / BLOCK_TOKENS / B::STEP], 0) + offset +
                             token % BLOCK_TOKENS * head_bytes;
            copy_16(keys + to + token * S::ROW, from, real);
            copy_16(values + to + token * S::ROW, from + args.value_offset, real);
        }
    }
    if (F != BF16 && threadIdx.x < S::TOKENS) {
        u32 token = threadIdx.x;
        bool real = (u32)(start + (i32)token - source.low) < num_real;
        const u8* from = kv_section(args, blocks.scales, 0) + kv_scale_at(args, source.kv_head, token % BLOCK_TOKENS);
        copy_4(keys + S::SCALES_AT + token * 4, from, real);
        copy_4(values + S::SCALES_AT + token * 4, from + args.value_offset, real);
    }
    end_of_copies();
}

// Keys of heads smaller than D: columns that no copy writes become zeros, once.
template <int D, int F, int THREADS> DEVICE void clear_keys(const AttentionArgs& args, u8* keys, int num_tiles) {
    if (args.head_dim == D) return;
    for (int at = threadIdx.x * 16; at < num_tiles * Shape<D, F>::BYTES; at += THREADS * 16)
        *(uint4*)(keys + at) = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

DEVICE void load_matrices_transposed(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}
DEVICE u32 load_shared(u32 address) {
    u32 out;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(address) : "memory");
    return out;
}
DEVICE void load_scales(float& first, float& second, u32 address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}
// sums[16 x 8] += a[16 x 16] . b[16 x 8]
DEVICE void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The codes in bytes 0 and 2 of a word as two bf16, exactly.
template <int F> DEVICE u32 widen(u32 word) {
    u32 x, factor, offset, out;
    if (F == FP8) {
        // Exponent and mantissa move to where bf16 has them; a factor of 2^120 mends the exponent, of small numbers too.
        x = ((word << 4) & 0x07f007f0u) | ((word << 8) & 0x80008000u);
        factor = 0x7b807b80u;
        offset = 0x80008000u;
    } else {
        // 128 plus the low seven bits, less 128 or, with the sign, 256.
        x = (word & 0x007f007fu) | 0x43004300u;
        factor = 0x3f803f80u;
        offset = (word & 0x00800080u) | 0xc300c300u;
    }
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(factor), "r"(offset));
    return out;
}

// A tile of codes as a tile of bf16, columns sorted; all threads of the block take part.
template <int D, int F, int THREADS> DEVICE void widen_tile(u8* to, const u8* from) {
    typedef Shape<D, F> C;
    typedef Shape<D, BF16> S;
#pragma unroll 1
    for (int piece = threadIdx.x; piece < S::TOKENS * S::STEPS; piece += THREADS) {
        int token = piece / S::STEPS, unit = piece % S::STEPS;
        uint4 codes = *(const uint4*)(from + token * C::ROW + unit * 16);
        uint4* row = (uint4*)(to + token * S::ROW + unit * 32);
        row[0] = make_uint4(widen<F>(codes.x), widen<F>(codes.y), widen<F>(codes.z), widen<F>(codes.w));
        row[1] = make_uint4(widen<F>(codes.x >> 8), widen<F>(codes.y >> 8), widen<F>(codes.z >> 8), widen<F>(codes.w >> 8));
    }
}

// q of one row, 16 columns of it from `at`, as this lane's part of an mma operand: the first and the second word.
template <bool SORTED> DEVICE void load_query(u32& first, u32& second, const bf16* at, int lane) {
    int quarter = lane % 4;
    if (!SORTED) {
        first = *(const u32*)(at + 2 * quarter);
        second = *(const u32*)(at + 2 * quarter + 8);
    } else {
        uint2 four = *(const uint2*)(at + 4 * quarter);
        first = __byte_perm(four.x, four.y, 0x5410);   // columns 0 and 2
        second = __byte_perm(four.x, four.y, 0x7632);  // columns 1 and 3
    }
}

// Dot products of the warp's 16 rows with `N` groups of 8 keys, the first of them group `group` of the tile.
template <int D, int F, int N>
DEVICE void dot_products(float (&dots)[N][4], const u32 (&q)[D / 16][4], u32 tile, int group, int lane) {
    typedef Shape<D, F> S;
#pragma unroll
    for (int n = 0; n < N; n++) dots[n][0] = dots[n][1] = dots[n][2] = dots[n][3] = 0.0f;
    u32 row = tile + (group * 8 + lane % 8) * S::ROW;
    if (F != BF16) {
        row = tile + (group * 8 + lane / 4) * S::ROW + lane % 4 * 4;
#pragma unroll
        for (int step = 0; step < S::STEPS; step++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                u32 word = load_shared(row + n * 8 * S::ROW + step * 16);
                multiply(dots[n], q[step], widen<F>(word), widen<F>(word >> 8));
            }
    } else if (N == 1) {
        row += lane / 8 * 16;
#pragma unroll
        for (int step = 0; step < S::STEPS; step += 2) {
            u32 k[4];
            load_matrices(k, row + step * 32);
            multiply(dots[0], q[step], k[0], k[1]);
            multiply(dots[0], q[step + 1], k[2], k[3]);
        }
    } else {
        row += lane / 16 * 8 * S::ROW + lane / 8 % 2 * 16;
#pragma unroll
        for (int step = 0; step < S::STEPS; step++)
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 k[4];
                load_matrices(k, row + n * 8 * S::ROW + step * 32);
                multiply(dots[n], q[step], k[0], k[1]);
                multiply(dots[n + 1], q[step], k[2], k[3]);
            }
    }
}

// sums[16 x 16] += weights[16 x tokens] . values[tokens x 16], the values being unit `unit` of the tile. With `AHEAD` all of
// them are read before the first product.
template <int D, int F, bool AHEAD>
DEVICE void add_values(float (&sums)[2][4], const u32 (&weights)[Shape<D, F>::TOKENS / 16][4], u32 tile, int unit, int lane) {
    typedef Shape<D, F> S;
    constexpr int LOADS = F == BF16 ? S::TOKENS / 16 : S::TOKENS / 32;
    u32 at = tile + (F == BF16 ? lane % 16 * S::ROW + unit * 32 + lane / 16 * 16 : lane * S::ROW + unit * 16);
    u32 v[LOADS][4];
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
        if (AHEAD) load_matrices_transposed(v[load], at + load * (S::TOKENS / LOADS) * S::ROW);
    }
#pragma unroll
    for (int load = 0; load < LOADS; load++) {
        if (!AHEAD) load_matrices_transposed(v[load], at + load * (S::TOKENS / LOADS) * S::ROW);
        if (F == BF16) {
            multiply(sums[0], weights[load], v[load][0], v[load][1]);
            multiply(sums[1], weights[load], v[load][2], v[load][3]);
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 low = v[load][2 * half], high = v[load][2 * half + 1];
                const int step = F == BF16 ? 0 : load * 2 + half;
                multiply(sums[0], weights[step], widen<F>(low), widen<F>(high));
                multiply(sums[1], weights[step], widen<F>(low >> 8), widen<F>(high >> 8));
            }
        }
    }
}
// The column of the output within a unit that `sums[half][i]` of this lane belongs to.
template <bool SORTED> DEVICE int column_of(int half, int i, int lane) {
    return SORTED ? lane % 4 * 4 + 2 * i + half : half * 8 + lane % 4 * 2 + i;
}
