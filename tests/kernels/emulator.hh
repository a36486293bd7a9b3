/* What kernels of files need of CUDA beyond tests/emit/cuda_emulator.hh: exchanges between the lanes
 * of a warp, dynamic shared memory, and, in place of cuda/mma_ptx.cuh and cuda/hopper.cuh, the
 * instructions of tensor cores. Memory checks: 16-byte accesses must be aligned; shared memory is
 * poisoned before each block. Copies and warpgroup products happen as late as they may: when their
 * thread waits for them. */
#include "tests/emit/cuda_emulator.hh"

#define __noinline__
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
#define __align__(n) __attribute__((aligned(n)))

static char *emulated_shared;
static unsigned long long emulated_box[EMULATED_THREADS];

static inline void __syncwarp(unsigned = ~0u) { __shfl_xor_sync(~0u, 0, 0); }
static inline int emulated_lane() { return (int)(threadIdx.x & 31); }
static inline int emulated_warp() { return (int)(threadIdx.x & ~31u); }
template <typename T> static inline T __shfl_up_sync(unsigned, T value, int by) {
    int lane = emulated_lane(), from = lane >= by ? lane - by : lane;
    memcpy(&emulated_box[threadIdx.x], &value, sizeof value);
    __syncwarp();
    memcpy(&value, &emulated_box[emulated_warp() + from], sizeof value);
    __syncwarp();
    return value;
}
static inline unsigned __match_any_sync(unsigned, unsigned value) {
    unsigned same = 0;
    emulated_box[threadIdx.x] = value;
    __syncwarp();
    for (int i = 0; i < 32; i++)
        same |= (unsigned)(emulated_box[emulated_warp() + i] == value) << i;
    __syncwarp();
    return same;
}
static inline unsigned __ballot_sync(unsigned lanes, int vote) {
    return __match_any_sync(lanes, vote != 0) ^ (vote ? 0 : ~0u);
}
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline unsigned atomicAdd(unsigned *to, unsigned by) {
    unsigned before = *to;
    *to += by;
    return before;
}

static inline void emulated_require_aligned(unsigned long long address) {
    if (address % 16 == 0) return;
    fprintf(stderr, "an unaligned 16-byte access\n");
    abort();
}
static inline void emulated_matrices(unsigned *r, unsigned from, bool transposed) {
    int lane = emulated_lane(), warp = emulated_warp();
    emulated_require_aligned(from);
    emulated_box[threadIdx.x] = from;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        unsigned short pair[2];
        for (int j = 0; j < 2; j++) {
            int row = transposed ? 2 * (lane % 4) + j : lane / 4;
            int column = transposed ? lane / 4 : 2 * (lane % 4) + j;
            memcpy(&pair[j], emulated_shared + emulated_box[warp + 8 * i + row] + 2 * column, 2);
        }
        r[i] = pair[0] | (unsigned)pair[1] << 16;
    }
    __syncwarp();
}
static inline float emulated_half(unsigned pair, int which) {
    return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
}
/* c += a b for a warp: lane 4 r + k / 2 % 4 holds a(r, k), lane 4 n + k / 2 % 4 holds b(k, n). */
static inline void emulated_mma(float *c, const unsigned *a, unsigned b0, unsigned b1) {
    static unsigned held[EMULATED_THREADS][6];
    unsigned *own = held[threadIdx.x], (*all)[6] = held + emulated_warp();
    for (int i = 0; i < 4; i++) own[i] = a[i];
    own[4] = b0, own[5] = b1;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        int row = emulated_lane() / 4 + i / 2 * 8, column = 2 * (emulated_lane() % 4) + i % 2;
        for (int k = 0; k < 16; k++)
            c[i] += emulated_half(all[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], k % 2) *
                    emulated_half(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    __syncwarp();
}
/* Groups of a thread's asynchronous work, the oldest first. */
struct emulated_copying {
    unsigned to;
    const void *from;
    int bytes;
};
struct emulated_product {
    float *c;
    unsigned long long left, right;
    int columns;
    bool left_flat, right_flat, add;
    const unsigned *registers[4]; /* the left operand where it is no memory */
    unsigned given[4];
    float held[2][16]; /* its two rows of this thread */
    unsigned long long mark; /* of what memory held when it began */
};
template <typename T> struct emulated_groups {
    struct entry {
        T work;
        unsigned group;
    } *at;
    unsigned first, count, room, closed; /* entries at[first .. count - 1]; groups that are whole */
    void push(const T &work) {
        if (count == room && first > 0) {
            memmove(at, at + first, sizeof *at * (count - first));
            count -= first, first = 0;
        }
        if (count == room) at = (entry *)realloc((void *)at, sizeof *at * (room = 2 * room + 16));
        at[count++] = {work, closed};
    }
    void commit() { closed++; }
    template <typename F> void wait(unsigned but, F body) {
        for (; first < count && at[first].group + but < closed; first++) body(at[first].work);
        if (first == count) first = count = 0;
    }
    void forget() {
        free((void *)at);
        *this = {};
    }
};
static emulated_groups<emulated_copying> emulated_copies[EMULATED_THREADS];
static emulated_groups<emulated_product> emulated_products[EMULATED_THREADS];

static inline void emulated_copy(unsigned to, const void *from, int bytes) {
    emulated_require_aligned(to);
    if (bytes) emulated_require_aligned((unsigned long long)from);
    memset(emulated_shared + to, 0xff, 16); /* neither what was there nor what will be */
    emulated_copies[threadIdx.x].push({to, from, bytes});
}
static inline void emulated_copies_wait(unsigned but) {
    emulated_copies[threadIdx.x].wait(but, [](const emulated_copying &c) {
        memset(emulated_shared + c.to, 0, 16);
        memcpy(emulated_shared + c.to, c.from, (size_t)c.bytes);
    });
}

/* Element (i, depth) of an operand of a warpgroup product, in the 128-byte mode. Depth innermost:
 * lines of 64 deep, eight lines a core matrix, `stride` bytes from one to the next. Flat: blocks of
 * 64 along i, `leading` bytes apart, with a line for each depth; eight of them are `stride` bytes.
 * Bits 4 to 6 of the address are exchanged by bits 7 to 9. */
static inline float emulated_element(unsigned long long operand, bool flat, int i, int depth) {
    unsigned start = (unsigned)(operand & 0x3fff) << 4;
    unsigned leading = (unsigned)(operand >> 16 & 0x3fff) << 4;
    unsigned stride = (unsigned)(operand >> 32 & 0x3fff) << 4, at;
    if (operand >> 62 != 1) abort();
    if (flat)
        at = start + i / 64 * leading + i % 64 * 2 + depth / 8 * stride + depth % 8 * 128;
    else
        at = start + i / 8 * stride + i % 8 * 128 + depth * 2;
    at ^= (at >> 7 & 7) << 4;
    unsigned short half;
    memcpy(&half, emulated_shared + at, 2);
    return emulated_half(half, 0);
}
static void emulated_complain(const char *what) {
    fprintf(stderr, "thread %u: %s\n", threadIdx.x, what);
    abort();
}
/* Sums of products under way: they may not be read (they are NaN), or written. */
enum { EMULATED_SUMS = 16 /* of a thread at once */, EMULATED_COLUMNS = 256 };
struct emulated_sum {
    float *c;
    int products; /* 0: the place is free */
    float value[EMULATED_COLUMNS / 2];
};
static emulated_sum emulated_sums[EMULATED_THREADS][EMULATED_SUMS];
static emulated_sum *emulated_sum_of(float *c) {
    emulated_sum *found = NULL;
    for (emulated_sum &sum : emulated_sums[threadIdx.x]) {
        if (sum.products > 0 && sum.c == c) return &sum;
        if (sum.products == 0) found = &sum;
    }
    if (!found) emulated_complain("more sums under way than the emulator has places for");
    found->c = c;
    return found;
}
static bool emulated_fenced[EMULATED_THREADS];

/* Of some elements that this thread's part reads: the same from the beginning to the end. */
static unsigned long long emulated_mark(const emulated_product &p) {
    int row = (int)threadIdx.x / 32 % 4 * 16 + emulated_lane() / 4;
    unsigned long long mark = 0;
    for (int k = 0; k < 16; k += 5) {
        for (int r = 0; r < 2 && !p.registers[0]; r++)
            mark = mark * 31 +
                   __float_as_uint(emulated_element(p.left, p.left_flat, row + 8 * r, k));
        for (int i = 0; i < p.columns / 4; i++) {
            int column = i / 2 * 8 + emulated_lane() % 4 * 2 + i % 2;
            mark = mark * 31 + __float_as_uint(emulated_element(p.right, p.right_flat, column, k));
        }
    }
    return mark;
}
static inline void emulated_begin() { emulated_fenced[threadIdx.x] = true; }
static inline void emulated_product_later(emulated_product p) {
    p.mark = emulated_mark(p);
    if (!emulated_fenced[threadIdx.x]) emulated_complain("a product without a fence before it");
    emulated_sum *sum = emulated_sum_of(p.c);
    if (sum->products++ == 0) {
        memcpy(sum->value, p.c, (size_t)p.columns * 2);
        memset(p.c, 0xff, (size_t)p.columns * 2);
    }
    emulated_products[threadIdx.x].push(p);
}
/* Of 64 x columns: lane l of warp w has rows 16 w + l / 4 and the eighth after it, columns
 * 2 (l % 4), the next, and so on in steps of eight. */
static inline void emulated_multiply(const emulated_product &p, float *c) {
    int row = (int)threadIdx.x / 32 % 4 * 16 + emulated_lane() / 4;
    bool held = p.registers[0] != NULL;
    for (int i = 0; !p.add && i < p.columns / 2; i++) c[i] = 0;
    for (int k = 0; k < 16; k++) {
        float left[2];
        for (int r = 0; r < 2; r++)
            left[r] = held ? p.held[r][k]
                           : emulated_element(p.left, p.left_flat, row + 8 * r, k);
        for (int i = 0; i < p.columns / 4; i++) {
            int column = i / 2 * 8 + emulated_lane() % 4 * 2 + i % 2;
            float right = emulated_element(p.right, p.right_flat, column, k);
            c[i / 2 * 4 + i % 2] += left[0] * right;
            c[i / 2 * 4 + 2 + i % 2] += left[1] * right;
        }
    }
}
static inline void emulated_products_wait(unsigned but) {
    emulated_fenced[threadIdx.x] = false;
    /* others go on first; one warpgroup in turn is slow, so that they drift apart */
    static unsigned waits[EMULATED_THREADS];
    bool slow = waits[threadIdx.x]++ / 3 % 2 == threadIdx.x / 128 % 2;
    for (int turns = slow ? 12 : 1; turns > 0; turns--) emulated_wait(EMULATED_READY);
    emulated_products[threadIdx.x].wait(but, [](const emulated_product &p) {
        emulated_sum *sum = emulated_sum_of(p.c);
        for (int i = 0; p.registers[0] && i < 4; i++)
            if (*p.registers[i] != p.given[i]) emulated_complain("an operand under way is written");
        if (emulated_mark(p) != p.mark) emulated_complain("an operand in memory changes under way");
        emulated_multiply(p, sum->value);
        if (--sum->products) return;
        for (int i = 0; i < p.columns / 2; i++)
            if (__float_as_uint(p.c[i]) != ~0u) emulated_complain("a sum under way is written");
        memcpy(p.c, sum->value, (size_t)p.columns * 2);
    });
}
static inline void emulated_shared_product(float *c, unsigned long long left,
                                           unsigned long long right, int columns, bool left_flat,
                                           bool right_flat, bool add) {
    emulated_product_later({c, left, right, columns, left_flat, right_flat, add, {}, {}, {}, 0});
}
/* Four lanes hold two rows of the left operand: lane l columns 2 (l % 4), the next, and the eighth
 * after them. */
static inline void emulated_held_product(float *c, const unsigned &a0, const unsigned &a1,
                                         const unsigned &a2, const unsigned &a3,
                                         unsigned long long right, int columns, bool right_flat,
                                         bool add) {
    static unsigned held[EMULATED_THREADS][4];
    emulated_product p = {c,   0,  right,           columns, false, right_flat,
                          add, {&a0, &a1, &a2, &a3}, {a0, a1, a2, a3}, {}, 0};
    memcpy(held[threadIdx.x], p.given, sizeof p.given);
    __syncwarp();
    for (int k = 0; k < 16; k++)
        for (int r = 0; r < 2; r++)
            p.held[r][k] = emulated_half(
                held[(threadIdx.x & ~3u) + (unsigned)k % 8 / 2][r + k / 8 * 2], k % 2);
    __syncwarp();
    emulated_product_later(p);
}
/* What cuda/hopper.cuh defines: products whose left operand is in shared memory, or in registers. */
#define EMULATED_WGMMA_SS(NAME, COLUMNS, SUMS, A, B, P, LEFT_FLAT, RIGHT_FLAT)                              \
    static inline void NAME(float (&c)[SUMS], unsigned long long left, unsigned long long right,   \
                            int add) {                                                             \
        emulated_shared_product(c, left, right, COLUMNS, LEFT_FLAT, RIGHT_FLAT, add);              \
    }
#define EMULATED_WGMMA_RS(NAME, COLUMNS, SUMS, A, B, C, D, E, P, RIGHT_FLAT)                                \
    static inline void NAME(float (&c)[SUMS], const unsigned &a0, const unsigned &a1,              \
                            const unsigned &a2, const unsigned &a3, unsigned long long right,      \
                            int add) {                                                             \
        emulated_held_product(c, a0, a1, a2, a3, right, COLUMNS, RIGHT_FLAT, add);                 \
    }

/* mbarrier: phases are numbered, the wait is for the one of this parity to end. */
struct emulated_mbarrier {
    unsigned at;
    int arrivals, here;
    unsigned phase;
};
static emulated_mbarrier emulated_mbarriers[64];
static int emulated_mbarrier_count;
static emulated_mbarrier *emulated_mbarrier_find(unsigned at) {
    for (int i = 0; i < emulated_mbarrier_count; i++)
        if (emulated_mbarriers[i].at == at) return &emulated_mbarriers[i];
    return NULL;
}
static emulated_mbarrier *emulated_mbarrier_at(unsigned at) {
    emulated_mbarrier *found = emulated_mbarrier_find(at);
    if (!found) emulated_complain("a barrier that was never initialised");
    return found;
}
static inline void emulated_mbarrier_arrive(unsigned at) {
    emulated_mbarrier *b = emulated_mbarrier_at(at);
    if (++b->here == b->arrivals) b->here = 0, b->phase++;
}
static inline void emulated_mbarrier_await(unsigned at, unsigned parity) {
    const emulated_mbarrier *b = emulated_mbarrier_at(at);
    for (long turns = 0; b->phase % 2 == parity; turns++) {
        if (turns > 100000) emulated_complain("waits at a barrier for ever");
        emulated_wait(EMULATED_READY);
    }
}
template <int LATER> static inline void copies_but() { emulated_copies_wait(LATER); }
template <int LATER> static inline void copies_landed() { emulated_copies_wait(LATER); }
static inline void wgmma_begin() { emulated_begin(); }
static inline void wgmma_commit() { emulated_products[threadIdx.x].commit(); }
template <int LATER> static inline void wgmma_wait() { emulated_products_wait(LATER); }
static inline void barrier_init(unsigned at, int arrivals) {
    emulated_mbarrier *b = emulated_mbarrier_find(at);
    if (!b && emulated_mbarrier_count == 64) emulated_complain("more barriers than places");
    if (!b) b = &emulated_mbarriers[emulated_mbarrier_count++];
    *b = {at, arrivals, 0, 0};
}
static inline void barrier_arrive(unsigned at) { emulated_mbarrier_arrive(at); }
static inline bool barrier_test(unsigned at, unsigned parity) {
    return emulated_mbarrier_at(at)->phase % 2 != parity;
}
static inline void barrier_wait(unsigned at, unsigned parity) {
    emulated_mbarrier_await(at, parity);
}
static inline void sync_warpgroup(int group) { emulated_barrier(1 + group, 128); }
static inline void wait_turn(int group) { emulated_barrier(5 + group, 256); }
static inline void pass_turn(int group) { emulated_arrived[5 + group]++; }
template <int BARRIER, int THREADS> static inline void sync_some() {
    emulated_barrier(BARRIER, THREADS);
}
template <int THREADS> static inline void sync_producers() { emulated_barrier(4, THREADS); }
static inline void fence_async_proxy() {}
template <int> static inline void decrease_registers() {}
template <int> static inline void increase_registers() {}
template <typename T> static inline void keep_in_registers(T &) {}
/* Bulk copies of f32 from shared memory, and turns to add in. */
static inline void bulk_store(float *to, unsigned from, int bytes, bool add) {
    emulated_require_aligned((unsigned long long)to | from | (unsigned)bytes);
    const float *values = (const float *)(emulated_shared + from);
    for (int i = 0; i < bytes / 4; i++) to[i] = add ? to[i] + values[i] : values[i];
}
static inline void bulk_wait_read() {}
static inline void bulk_wait() {}
static inline void acquire_turn(const unsigned *at, unsigned turn) {
    if (*at != turn) emulated_complain("another one's turn");
}
static inline void release_turn(unsigned *at, unsigned turn) { *at = turn; }
static inline void store_matrices_transposed(unsigned to, unsigned x0, unsigned x1, unsigned x2,
                                             unsigned x3) {
    const unsigned x[4] = {x0, x1, x2, x3};
    int lane = emulated_lane(), warp = emulated_warp();
    emulated_require_aligned(to);
    emulated_box[threadIdx.x] = to;
    __syncwarp();
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            unsigned short half = (unsigned short)(x[i] >> 16 * j);
            unsigned row = (unsigned)emulated_box[warp + 8 * i + 2 * (lane % 4) + j];
            memcpy(emulated_shared + row + 2 * (lane / 4), &half, 2);
        }
    __syncwarp();
}
static inline void sync_producer_warps() { emulated_barrier(5, 64); }
/* cuda/mma_ptx.cuh */
static inline unsigned shared_address(const void *shared) {
    return (unsigned)((const char *)shared - emulated_shared);
}
static inline void copy_async(unsigned to, const void *from, int bytes) {
    emulated_copy(to, from, bytes);
}
static inline void copies_commit() { emulated_copies[threadIdx.x].commit(); }
static inline void copies_wait() {
    emulated_copies[threadIdx.x].commit();
    emulated_copies_wait(0);
}
static inline void load_matrices(unsigned (&r)[4], unsigned from) {
    emulated_matrices(r, from, false);
}
static inline void load_matrices_transposed(unsigned (&r)[4], unsigned from) {
    emulated_matrices(r, from, true);
}
static inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulated_mma(c, a, b0, b1);
}
static inline unsigned pack_bf16(float low, float high) {
    return emulated_bf16(low) | (unsigned)emulated_bf16(high) << 16;
}
static inline unsigned permute_bytes(unsigned low, unsigned high, unsigned order) {
    const unsigned long long all = low | (unsigned long long)high << 32;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(all >> (order >> 4 * i & 7) * 8 & 255) << 8 * i;
    return r;
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned order) {
    return permute_bytes(low, high, order);
}
static inline unsigned fma_bf16_pair(unsigned x, unsigned y, unsigned z) {
    unsigned r = 0;
    for (int i = 0; i < 32; i += 16) {
        float f[3];
        const unsigned wide[3] = {x >> i << 16, y >> i << 16, z >> i << 16};
        memcpy(f, wide, sizeof f);
        r |= (unsigned)emulated_bf16(fmaf(f[0], f[1], f[2])) << i;
    }
    return r;
}
static inline float exp2_approx(float x) { return exp2f(x); }
static inline void kernel_begins() {} /* of prelude.cuh */
static inline void kernel_waits() {}
static inline void kernel_lets_next() {}
static inline void kernel_asks(const void *) {}
#define MLUA_EMULATED

static void (*emulated_body)(void *);
static long emulated_bytes;
static void emulated_poisoned(void *arguments) {
    if (threadIdx.x == 0) memset(emulated_shared, 0xff, (size_t)emulated_bytes);
    __syncthreads();
    emulated_body(arguments);
}
static void emulated_run(void (*body)(void *), void *arguments, unsigned grid, unsigned grid_y,
                         int block, long bytes) {
    emulated_body = body;
    emulated_bytes = bytes;
    emulated_shared = (char *)aligned_alloc(1024, (size_t)(bytes + 1024) / 1024 * 1024);
    emulated_launch(emulated_poisoned, arguments, grid, grid_y, block);
    for (int i = 0; i < block; i++) emulated_copies[i].forget(), emulated_products[i].forget();
    free(emulated_shared);
}
