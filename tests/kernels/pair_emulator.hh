/* Runs cuda/ragged_tma.cu on the CPU: the two blocks of one cluster, a thread of the system for each
 * of their threads. In place of cuda/tma.cuh and cuda/hopper.cuh: tensor maps and copies that
 * swizzle, barriers that count arrivals and bytes, warpgroup products, which happen as late as they
 * may. A wait of half a minute never ends: the process does. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
struct uint4 {
    unsigned x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

enum { THREADS = 384, WARPS = THREADS / 32, ARENA = 512 << 10, DYNAMIC = 256 << 10 };
enum { STATIC = 64 << 10, BARRIERS = 16 };
static struct { unsigned x; } gridDim = {2};
static thread_local struct { unsigned x; } threadIdx, blockIdx;
static char *arena[2]; /* shared memory: addresses count from its begin */
static pthread_barrier_t of_warp[2][WARPS], of_block[2], of_pair;
static uint64_t exchanged[2][WARPS][32];

static inline void __syncthreads() { pthread_barrier_wait(&of_block[blockIdx.x]); }
static inline void __syncwarp() {
    pthread_barrier_wait(&of_warp[blockIdx.x][threadIdx.x / 32]);
}
template <class T> static T exchange(T value, int from) {
    uint64_t *box = exchanged[blockIdx.x][threadIdx.x / 32];
    memcpy(&box[threadIdx.x % 32], &value, sizeof value);
    __syncwarp();
    memcpy(&value, &box[from & 31], sizeof value);
    __syncwarp();
    return value;
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) {
    return exchange(value, (int)(threadIdx.x % 32) ^ mask);
}
template <class T> static T __shfl_sync(unsigned, T value, int from) {
    return exchange(value, from);
}
template <class T> static T __shfl_up_sync(unsigned, T value, int by) {
    int lane = threadIdx.x % 32;
    return exchange(value, lane >= by ? lane - by : lane);
}

/* As tests/kernels/emulate_pair.c fills it. */
struct alignas(64) emulated_map {
    const char *base;
    int64_t size[3], stride[3];
    int64_t lines, bytes; /* bytes: of an element */
    char unused[56];
};
static_assert(sizeof(emulated_map) == 128, "a tensor map has 128 bytes");

struct emulated_barrier {
    int count, pending, bytes;
    unsigned phase, at;
    pthread_mutex_t mutex;
    pthread_cond_t passed;
};
static emulated_barrier barriers[2][BARRIERS];
static int barrier_count[2];

[[noreturn]] static void emulated_fail(const char *what) {
    fprintf(stderr, "emulated pair of blocks: %s\n", what);
    _exit(9);
}
static emulated_barrier *emulated_find(unsigned block, unsigned at) {
    for (int i = 0; i < barrier_count[block]; i++)
        if (barriers[block][i].at == at) return &barriers[block][i];
    emulated_fail("there is no such barrier");
}
static void emulated_make_barrier(unsigned at, int count) {
    emulated_barrier *b = &barriers[blockIdx.x][barrier_count[blockIdx.x]++];
    b->at = at, b->count = b->pending = count;
    pthread_mutex_init(&b->mutex, NULL);
    pthread_cond_init(&b->passed, NULL);
}
static void emulated_arrive(unsigned block, unsigned at, int arrivals, int bytes) {
    emulated_barrier *b = emulated_find(block, at);
    pthread_mutex_lock(&b->mutex);
    b->pending -= arrivals, b->bytes += bytes;
    if (b->pending < 0) emulated_fail("more arrive than a barrier counts");
    if (b->pending == 0 && b->bytes == 0) {
        b->phase++, b->pending = b->count;
        pthread_cond_broadcast(&b->passed);
    }
    pthread_mutex_unlock(&b->mutex);
}
static void emulated_await(unsigned at, unsigned parity) {
    emulated_barrier *b = emulated_find(blockIdx.x, at);
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 30;
    pthread_mutex_lock(&b->mutex);
    while ((b->phase & 1) == parity)
        if (pthread_cond_timedwait(&b->passed, &b->mutex, &limit))
            emulated_fail("a thread waits for ever");
    pthread_mutex_unlock(&b->mutex);
}

static inline unsigned emulated_swizzle(unsigned at) { return at ^ (at >> 7 & 7) << 4; }
static void emulated_box(const emulated_map *map, unsigned to, int x, int y, int z,
                         unsigned barrier, bool both) {
    for (unsigned block = 0; block < 2; block++) {
        if (!both && block != blockIdx.x) continue;
        for (int line = 0; line < map->lines; line++)
            for (int i = 0; i < 128 / map->bytes; i++) {
                bool in = x + i < map->size[0] && y + line < map->size[1] && z < map->size[2];
                in = in && x >= 0 && y >= 0 && z >= 0;
                int64_t from = x + i + (y + line) * map->stride[1] + z * map->stride[2];
                unsigned at = emulated_swizzle(to + line * 128 + i * (int)map->bytes);
                for (int k = 0; k < map->bytes; k++)
                    arena[block][at + k] = in ? map->base[from * map->bytes + k] : 0;
            }
        emulated_arrive(block, barrier, 0, (int)-map->lines * 128);
    }
}

struct emulated_product {
    float *sums;
    unsigned long long left, right;
    int group;
    bool left_flat, right_flat;
    float (*load[2])(unsigned char); /* of 8 bits: how each operand is read; else NULL */
    int columns;
    bool add;
};
enum { PRODUCTS = 64 /* of a thread under way */ };
static thread_local emulated_product products[PRODUCTS];
static thread_local int product_count, groups;

/* Element (i, depth) of an operand in the 128-byte mode, as cuda/ragged_wgmma.cuh says. */
static float emulated_element(unsigned long long operand, int i, int depth, bool flat) {
    unsigned at = (operand & 0x3fff) << 4, block = (operand >> 16 & 0x3fff) << 4;
    at += flat ? i / 64 * block + depth * 128 + i % 64 * 2 : i * 128 + depth * 2;
    return ml_load_bf16(*(unsigned short *)(arena[blockIdx.x] + emulated_swizzle(at)));
}
static float emulated_byte(const emulated_product &p, int which, int i, int depth) {
    unsigned at = ((which ? p.right : p.left) & 0x3fff) << 4;
    return p.load[which](arena[blockIdx.x][emulated_swizzle(at + i * 128 + depth)]);
}
/* Of 8 bits: lines of 128 deep. */
static void emulated_multiply_bytes(const emulated_product &p) {
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; !p.add && i < p.columns / 2; i++) p.sums[i] = 0;
    for (int depth = 0; depth < 32; depth++) {
        float left[2] = {emulated_byte(p, 0, row, depth), emulated_byte(p, 0, row + 8, depth)};
        for (int u = 0; u < p.columns / 8; u++)
            for (int j = 0; j < 2; j++) {
                float x = emulated_byte(p, 1, u * 8 + column + j, depth);
                p.sums[u * 4 + j] += left[0] * x, p.sums[u * 4 + 2 + j] += left[1] * x;
            }
    }
}
static void emulated_multiply(const emulated_product &p) {
    if (p.load[0]) return emulated_multiply_bytes(p);
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int depth = 0; depth < 16; depth++) {
        float left[2] = {emulated_element(p.left, row, depth, p.left_flat),
                         emulated_element(p.left, row + 8, depth, p.left_flat)};
        for (int u = 0; u < 32; u++)
            for (int j = 0; j < 2; j++) {
                float x = emulated_element(p.right, u * 8 + column + j, depth, p.right_flat);
                p.sums[u * 4 + j] += left[0] * x, p.sums[u * 4 + 2 + j] += left[1] * x;
            }
    }
}
static void emulated_product_later(const emulated_product &p) {
    if (product_count == PRODUCTS) {
        fprintf(stderr, "more products under way than the emulator has places for\n");
        abort();
    }
    products[product_count++] = p;
}
/* All but the last `running` groups. The warp stays together, as wgmma has it. */
static void emulated_finish(int running) {
    int done = 0;
    for (; done < product_count && products[done].group < groups - running; done++)
        emulated_multiply(products[done]);
    memmove(products, products + done, sizeof *products * (size_t)(product_count -= done));
    __syncwarp();
}

#define MLUA_EMULATED
static unsigned shared_address(const void *p) {
    return (unsigned)((const char *)p - arena[blockIdx.x]);
}
static unsigned pack_bf16(float low, float high) {
    return ml_store_bf16(low) | (unsigned)ml_store_bf16(high) << 16;
}
static int cluster_rank() { return (int)blockIdx.x; }
static void cluster_sync() { pthread_barrier_wait(&of_pair); }
static void barrier_init(unsigned at, int count) { emulated_make_barrier(at, count); }
static void barriers_visible() {}
static void barrier_spin(unsigned at, unsigned parity) { emulated_await(at, parity); }
static void barrier_expect(unsigned at, int bytes) { emulated_arrive(blockIdx.x, at, 1, bytes); }
static void barrier_release(unsigned at, unsigned rank) { emulated_arrive(rank, at, 1, 0); }
template <class MAP>
static void load_box(const MAP *map, unsigned to, int x, int y, int z, unsigned barrier, bool both) {
    emulated_box((const emulated_map *)map, to, x, y, z, barrier, both);
}
static void wgmma_begin() {}
static void wgmma_commit() { groups++; }
template <int LATER> static void wgmma_wait() { emulated_finish(LATER); }
#define EMULATED_WGMMA_SS(NAME, COLUMNS, SUMS, A, B, P, LEFT_FLAT, RIGHT_FLAT)                     \
    static void NAME(float (&c)[SUMS], unsigned long long left, unsigned long long right, int) {   \
        emulated_product_later(                                                                    \
            {c, left, right, groups, LEFT_FLAT, RIGHT_FLAT, {NULL, NULL}, COLUMNS, true});         \
    }
#define EMULATED_WGMMA_BYTES(...) EMULATED_WGMMA_OF_BYTES(__VA_ARGS__)
#define EMULATED_WGMMA_OF_BYTES(NAME, COLUMNS, SUMS, A, B, P, LEFT, RIGHT)                         \
    static void NAME(float (&c)[SUMS], unsigned long long left, unsigned long long right,          \
                     int add) {                                                                    \
        emulated_product_later({c, left, right, groups, false, false,                              \
                                {ml_load_##LEFT, ml_load_##RIGHT}, COLUMNS, add != 0});            \
    }
template <class T> static void keep_in_registers(T &) {}
template <int> static void decrease_registers() {}
template <int> static void increase_registers() {}

static void (*entered)(const void *);
static const void *arguments;

static void *emulated_thread(void *number) {
    blockIdx.x = (unsigned)((long)number / THREADS), threadIdx.x = (unsigned)((long)number % THREADS);
    entered(arguments);
    return NULL;
}
static void emulated_run(void (*enter)(const void *), const void *given) {
    pthread_t threads[2 * THREADS];
    pthread_attr_t attributes;
    entered = enter, arguments = given;
    pthread_barrier_init(&of_pair, NULL, 2 * THREADS);
    for (int block = 0; block < 2; block++) {
        arena[block] = (char *)aligned_alloc(1024, ARENA);
        memset(arena[block], 0xff, ARENA);
        barrier_count[block] = 0;
        memset(barriers[block], 0, sizeof barriers[block]);
        pthread_barrier_init(&of_block[block], NULL, THREADS);
        for (int warp = 0; warp < WARPS; warp++)
            pthread_barrier_init(&of_warp[block][warp], NULL, 32);
    }
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    for (long i = 0; i < 2 * THREADS; i++)
        if (pthread_create(&threads[i], &attributes, emulated_thread, (void *)i))
            emulated_fail("the system gives no more threads");
    for (int i = 0; i < 2 * THREADS; i++) pthread_join(threads[i], NULL);
    for (int block = 0; block < 2; block++) free(arena[block]);
}
