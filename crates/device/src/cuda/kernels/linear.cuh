// What the matrix kernels share: asynchronous copies, the matrix instruction, and small codes made bf16.
#pragma once
#include "shared.cuh"

// 16 bytes from global to shared memory, past the first-level cache; zeros where `valid` is false (`from` must still be
// an address of the array).
DEVICE void copy_async_16(u32 to, const void* from, bool valid = true) {
    u32 bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// 4 or 8 bytes.
template <int BYTES> DEVICE void copy_async_small(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `PENDING` of the groups committed last are under way.
template <int PENDING> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// What lies around `from` into the second-level cache.
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

DEVICE uint4 load_shared_16(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

// Left as it is where `valid` is false. Activations are written by the kernel before, which may still run when this one
// starts: never `.nc`.
DEVICE void load_16(uint4& v, const void* from, bool valid) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"((u32)valid));
}
DEVICE void load_8(u32& low, u32& high, const void* from, bool valid) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0;\n@p ld.global.v2.u32 {%0, %1}, [%2]; }"
                 : "+r"(low), "+r"(high) : "l"(from), "r"((u32)valid));
}

// What becomes of a sum: written as bf16, as f32, or added to the f32 that is there, scaled, once it has been bf16.
#define FINISH_BF16 0
#define FINISH_F32 1
#define FINISH_ADD 2

// acc[16 x 8] += a[16 x 16] . b[16 x 8]. Lane = 4 g + t holds of a: rows g and g + 8, columns 2t and 2t + 8 and their
// neighbours, as {row g low, row g+8 low, row g high, row g+8 high}; of b: rows 2t and 2t + 8 of column g; of acc:
// {row g, columns 2t and 2t+1; row g + 8, the same}.
DEVICE void multiply(float acc[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a * b + c on two bf16 at once.
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
DEVICE u32 pick_bytes(u32 low, u32 high, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}

#define BF16_ONES 0x3f803f80u
// In bf16 128 + v is 0x4300 | v for v of seven bits, so codes become numbers by an OR and an exact addition. The
// constant is passed in a register of which the compiler knows nothing: AND and OR are one instruction then.
#define BF16_128S 0x43004300u

// Two's complement bytes 0 and 2 of `word`; `above` is BF16_128S.
DEVICE u32 bytes_to_bf16(u32 word, u32 above) {
    u32 low = (word & 0x007f007fu) | above;
    // 128 + 128 if the sign is set: 256 is the next exponent, the very bit that the sign lies at.
    u32 high = (word & 0x00800080u) | above;
    // low - high
    return fma_bf16x2(high, 0xbf80bf80u, low);
}

// Nibbles 0 and 4 of `word`, evenly spaced levels; `offset` is two bf16 of the least level less 128.
DEVICE u32 nibbles_to_bf16(u32 word, u32 above, u32 offset) {
    return fma_bf16x2((word & 0x000f000fu) | above, BF16_ONES, offset);
}

// Two e4m3 codes in the high bytes of both halves. Their seven bits lie right for a bf16 that is 2^120 times too small,
// subnormals included.
DEVICE u32 e4m3_to_bf16(u32 halves) {
    u32 small = ((halves >> 4) & 0x07f007f0u) | (halves & 0x80008000u);
    return fma_bf16x2(small, 0x7b807b80u, 0x80008000u);
}

// The same of a word's first two codes and of its last two. A byte and its sign eight times over is the byte as sixteen
// bits; what is shifted into the other half is masked.
DEVICE u32 e4m3_pair(u32 pair) { return fma_bf16x2((pair * 16) & 0x87f087f0u, 0x7b807b80u, 0x80008000u); }
DEVICE u32 low_e4m3_to_bf16(u32 word) { return e4m3_pair(pick_bytes(word, 0, 0x9180)); }
DEVICE u32 high_e4m3_to_bf16(u32 word) { return e4m3_pair(pick_bytes(word, 0, 0xb3a2)); }

// The eight nibbles of `word` as four pairs, nibble j with nibble j + 4: evenly spaced levels times 2^-6, `least` being
// that of the least. The bits of a bf16 count up in steps of 2^-133 as far as bit 7, so a nibble in either half of the
// low byte is a number already, once 2^-133 and once 2^-129 times its code.
DEVICE void small_nibbles(u32 out[4], u32 word, u32 least) {
    u32 above = word >> 8;
    out[0] = fma_bf16x2(word & 0x000f000fu, 0x7f007f00u, least);
    out[1] = fma_bf16x2(word & 0x00f000f0u, 0x7d007d00u, least);
    out[2] = fma_bf16x2(above & 0x000f000fu, 0x7f007f00u, least);
    out[3] = fma_bf16x2(above & 0x00f000f0u, 0x7d007d00u, least);
}

// Sixteen levels as bf16, low and high bytes apart, four a word.
struct Levels {
    u32 low[4], high[4];
};
static_assert(sizeof(Levels) == 32, "as the host has it");
// The eight nibbles of `word`, lowest first, as four pairs.
DEVICE void look_up(const Levels& levels, u32 word, u32 out[4]) {
    u32 within = word & 0x77777777u, which = ((word >> 1) & 0x44444444u) | 0x32103210u;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 low = pick_bytes(pick_bytes(levels.low[0], levels.low[1], within),
                             pick_bytes(levels.low[2], levels.low[3], within), which);
        u32 high = pick_bytes(pick_bytes(levels.high[0], levels.high[1], within),
                              pick_bytes(levels.high[2], levels.high[3], within), which);
        out[2 * half] = pick_bytes(low, high, 0x5140);
        out[2 * half + 1] = pick_bytes(low, high, 0x7362);
        within >>= 16;
        which >>= 16;
    }
}
