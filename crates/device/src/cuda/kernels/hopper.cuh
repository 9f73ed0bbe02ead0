// Hopper's own instructions under plain names: barriers in shared memory that count bytes, copies by the tensor memory
// engine, matrix products of a whole warpgroup. For sm_90a alone. Addresses of shared memory are 32-bit (`shared_address`).
#pragma once
#include "shared.cuh"

// What the host's cuTensorMapEncodeTiled fills in; a kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// One lane of a converged warp, the same each time.
DEVICE bool elect_one() {
    u32 chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}

// ---- barriers in shared memory (8 bytes each, 8-aligned) ----
// A phase ends when `count` threads have arrived and all announced bytes are there. Waiting on parity p returns once the
// phase of that parity has ended: a fresh barrier's first phase has parity 0, and waiting on parity 1 returns at once.

DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// After all inits, before the block's (or cluster's) barrier that publishes them: the copy engine sees them too.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that copies will complete in this phase.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE bool barrier_passed(u32 barrier, u32 parity) {
    u32 passed;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return passed != 0;
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_passed(barrier, parity)) {
    }
}

// Numbered barrier (1 to 15; 0 is __syncthreads) among `threads` of a block, a multiple of 32.
DEVICE void named_barrier(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Shared memory written by ordinary stores, read next by the copy engine or the tensor cores: every writer calls this
// before the barrier.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters ----
// All threads of all blocks of the cluster; what they wrote to shared memory is seen by the others.
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory"); }
// As above, but nothing that was written need be seen: before a block leaves whose memory others have used.
DEVICE void cluster_leave() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory"); }
// Where `address` lies in another block of the cluster.
DEVICE u32 cluster_address(u32 address, u32 block) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    return remote;
}
// At a barrier of any block of the cluster. It orders nothing but what the tensor cores have read: a release to the whole
// cluster would cost a fence each time.
DEVICE void barrier_arrive_cluster(u32 remote) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
DEVICE float4 load_cluster(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// ---- the copy engine ----

DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((u64)map) : "memory");
}
// For lines that nobody will read again: L2 gives them up first.
DEVICE u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// One box whose first element is (x, y), x along the contiguous dimension; its bytes count towards `barrier`. What lies
// outside the tensor arrives as zeros and counts as well. One thread issues it. With 128-byte swizzle `to` is
// 1024-aligned.
DEVICE void copy_box(u32 to, const TensorMap* map, i32 x, i32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"((u64)map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}
DEVICE void copy_box(u32 to, const TensorMap* map, i32 x, i32 y, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(to),
        "l"((u64)map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
        : "memory");
}
// To the same place in every block of the cluster whose bit is set in `blocks`; each one's own barrier counts the bytes.
DEVICE void copy_box_to(u16 blocks, u32 to, const TensorMap* map, i32 x, i32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
        "%4}], [%2], %5;" ::"r"(to),
        "l"((u64)map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}
// One box from shared memory; what lies outside the tensor is left out. The same thread commits and waits.
DEVICE void store_box(const TensorMap* map, i32 x, i32 y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"((u64)map), "r"(from),
                 "r"(x), "r"(y)
                 : "memory");
}
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory may be written again.
DEVICE void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Contiguous bytes (a multiple of 16, both ends 16-aligned), without a map.
DEVICE void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(barrier)
        : "memory");
}

// ---- registers of a warpgroup: kernel with __launch_bounds__(threads, 1), each role one branch ----
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- four 8x8 matrices of 16-bit values, into shared memory ----
// As `load_matrices` the other way round, each matrix turned: the address of lane l is where column l % 8 of matrix l / 8
// goes.
DEVICE void store_matrices_turned(u32 column, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

// ---- matrix products of a warpgroup (128 threads, warp index a multiple of 4) ----
// d[64, N] = (keep ? d : 0) + a[64, K] * b[N, K]^T, K = 16 for bf16 and 32 for e4m3. Thread t of the group, warp w = t / 32,
// lane l: d[j * 4 + i] is row 16 w + l / 4 + (i / 2) * 8, column 8 j + l % 4 * 2 + i % 2. An `a` from registers is held the
// same way: a[0] row l / 4, columns l % 4 * 2 and the next; a[1] row + 8; a[2] columns + 8; a[3] both.
// Order: group_fence, products, group_commit, group_wait<0> (all done) or group_wait<1> (all but the last commit), and only
// then the accumulators (and `a` in registers) may be touched. Any write to them before a product needs a group_fence.

// Operand in shared memory whose contiguous dimension is k ("K-major"), rows of 128 bytes in 128-byte swizzle (as the
// copy engine writes them with a box 64 bf16 wide): the 16-byte unit c of row r lies at r * 128 + ((c ^ r % 8) * 16). A tile
// starts 1024-aligned, eight rows are 1024 bytes. The next 16 bf16 (32 e4m3) of k are 32 bytes further on.
DEVICE u64 k_major_128(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
// `b` whose contiguous dimension is n ("MN-major", values of attention: rows are tokens = k): boxes of 64 bf16 (128 bytes)
// by k rows in 128-byte swizzle. Eight k rows are 1024 bytes; the next 64 columns lie `next_columns` bytes further on.
// The next 16 of k are 2048 bytes further on. Needs TRANSPOSE_B.
DEVICE u64 n_major_128(u32 address, u32 next_columns) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(next_columns >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
// Moves a descriptor on by bytes.
DEVICE u64 advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

DEVICE void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void group_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of accumulators over a wait or a fence.
template <int COUNT> DEVICE void pin(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// Keeps it from making fragments of `a` later, in the middle of the products.
DEVICE void pin(u32 (&fragments)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(fragments[i])::"memory");
}

template <int N> struct Product;

#define W4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define W8(i) W4(i), W4(i + 4)
#define W16(i) W8(i), W8(i + 8)
#define W32(i) W16(i), W16(i + 16)
#define R4_0 "%0,%1,%2,%3"
#define R8_0 R4_0 ",%4,%5,%6,%7"
#define R16_0 R8_0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R32_0 R16_0 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R8_32 "%32,%33,%34,%35,%36,%37,%38,%39"
#define R16_32 R8_32 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define R16_48 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R16_64 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define R16_80 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define R16_96 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define R16_112 "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define DEFINE_PRODUCT(N, NAMES, VALUES, O0, O1, O2, O3, O4, O5, O6)                                                   \
    template <> struct Product<N> {                                                                                    \
        static __device__ __forceinline__ void bf16_shared(float (&d)[N / 2], u64 a, u64 b, u32 keep) {                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, %" #O0 ", %" #O1       \
                         ", p, 1, 1, 0, 0;\n}"                                                                         \
                         : VALUES                                                                                      \
                         : "l"(a), "l"(b), "r"(keep));                                                                 \
        }                                                                                                              \
        static __device__ __forceinline__ void e4m3_shared(float (&d)[N / 2], u64 a, u64 b, u32 keep) {                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES "}, %" #O0 ", %" #O1       \
                         ", p, 1, 1;\n}"                                                                               \
                         : VALUES                                                                                      \
                         : "l"(a), "l"(b), "r"(keep));                                                                 \
        }                                                                                                              \
        template <int TRANSPOSE_B>                                                                                     \
        static __device__ __forceinline__ void bf16_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, u32 keep) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5 ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {%" #O0 ", %" #O1      \
                         ", %" #O2 ", %" #O3 "}, %" #O4 ", p, 1, 1, %" #O6 ";\n}"                                      \
                         : VALUES                                                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TRANSPOSE_B));           \
        }                                                                                                              \
    };

DEFINE_PRODUCT(8, R4_0, W4(0), 4, 5, 6, 7, 8, 9, 10)
DEFINE_PRODUCT(16, R8_0, W8(0), 8, 9, 10, 11, 12, 13, 14)
DEFINE_PRODUCT(32, R16_0, W16(0), 16, 17, 18, 19, 20, 21, 22)
#define NAMES_64 R32_0
DEFINE_PRODUCT(64, NAMES_64, W32(0), 32, 33, 34, 35, 36, 37, 38)
#define NAMES_80 NAMES_64 "," R8_32
#define VALUES_80 W32(0), W8(32)
DEFINE_PRODUCT(80, NAMES_80, VALUES_80, 40, 41, 42, 43, 44, 45, 46)
#define NAMES_96 NAMES_64 "," R16_32
#define VALUES_96 W32(0), W16(32)
DEFINE_PRODUCT(96, NAMES_96, VALUES_96, 48, 49, 50, 51, 52, 53, 54)
#define NAMES_128 NAMES_96 "," R16_48
#define VALUES_128 W32(0), W32(32)
DEFINE_PRODUCT(128, NAMES_128, VALUES_128, 64, 65, 66, 67, 68, 69, 70)
#define NAMES_192 NAMES_128 "," R16_64 "," R16_80
#define VALUES_192 VALUES_128, W32(64)
DEFINE_PRODUCT(192, NAMES_192, VALUES_192, 96, 97, 98, 99, 100, 101, 102)
#define NAMES_256 NAMES_192 "," R16_96 "," R16_112
#define VALUES_256 VALUES_192, W32(96)
DEFINE_PRODUCT(256, NAMES_256, VALUES_256, 128, 129, 130, 131, 132, 133, 134)
