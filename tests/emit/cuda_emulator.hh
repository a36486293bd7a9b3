/* Enough of CUDA to run this project's generated kernels on the CPU, for tests on machines without
 * a GPU: a block's threads are fibers that switch at barriers and shuffles. One block runs at a
 * time, so `__shared__` is static. Included before a kernel's source by tests/emit/cuda.c. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include "tests/emulator/casts.hh"

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct emulated_index { unsigned x, y, z; };

enum emulated_state { EMULATED_READY, EMULATED_BARRIER, EMULATED_SHUFFLE, EMULATED_DONE };
struct emulated_thread {
    ucontext_t context; /* where it starts */
    void *place[5];     /* where it waits */
    bool started;
    emulated_state state;
    int barrier, count, other;
    unsigned mask;
    unsigned long long given, taken;
};
enum { EMULATED_THREADS = 1024, EMULATED_STACK = 64 << 10 };
static emulated_thread emulated[EMULATED_THREADS];
static char *emulated_stacks;
static void *emulated_scheduler[5];
static int emulated_threads, emulated_arrived[16]; /* at barriers, without waiting there */
static void (*emulated_entry)(void *);
static void *emulated_arguments;
static emulated_index threadIdx, blockIdx, gridDim;

#define __global__
#define __grid_constant__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

/* Not by swapcontext, which asks the kernel each time. */
static __attribute__((noinline)) void emulated_jump(void **place) { __builtin_longjmp(place, 1); }
static __attribute__((noinline)) void emulated_wait(emulated_state state) {
    emulated_thread *self = &emulated[threadIdx.x];
    self->state = state;
    if (__builtin_setjmp(self->place) == 0) emulated_jump(emulated_scheduler);
}
static __attribute__((noinline)) void emulated_resume(emulated_thread *t) {
    if (__builtin_setjmp(emulated_scheduler) != 0) return;
    if (t->started) emulated_jump(t->place);
    t->started = true;
    setcontext(&t->context);
}
static inline void emulated_barrier(int barrier, int count) {
    emulated[threadIdx.x].barrier = barrier;
    emulated[threadIdx.x].count = count;
    emulated_wait(EMULATED_BARRIER);
}
static inline void __syncthreads() { emulated_barrier(0, 0); }
template <typename T> static inline T emulated_take(unsigned lanes, T value, unsigned lane) {
    unsigned self = threadIdx.x;
    emulated[self].mask = lanes;
    emulated[self].other = (int)((self & ~31u) | (lane & 31u));
    memcpy(&emulated[self].given, &value, sizeof value);
    emulated_wait(EMULATED_SHUFFLE);
    memcpy(&value, &emulated[self].taken, sizeof value);
    return value;
}
template <typename T> static inline T __shfl_xor_sync(unsigned lanes, T value, int mask) {
    return emulated_take(lanes, value, threadIdx.x ^ (unsigned)mask);
}
template <typename T> static inline T __shfl_sync(unsigned lanes, T value, int from) {
    return emulated_take(lanes, value, (unsigned)from);
}

/* One block after another. */
static void emulated_start() {
    for (;;) {
        emulated_entry(emulated_arguments);
        emulated_wait(EMULATED_DONE);
    }
}
/* All lanes of a shuffle's mask are present, or have ended. */
static bool emulated_shuffle_ready(int thread) {
    int warp = thread & ~31;
    for (int i = warp; i < warp + 32 && i < emulated_threads; i++)
        if (emulated[thread].mask >> (i - warp) & 1 && emulated[i].state != EMULATED_DONE &&
            (emulated[i].state != EMULATED_SHUFFLE || emulated[i].mask != emulated[thread].mask))
            return false;
    return true;
}
static bool emulated_release_shuffles() {
    static bool ready[EMULATED_THREADS];
    bool any = false;
    for (int i = 0; i < emulated_threads; i++)
        any |= ready[i] = emulated[i].state == EMULATED_SHUFFLE && emulated_shuffle_ready(i);
    for (int i = 0; i < emulated_threads; i++) {
        if (!ready[i]) continue;
        int other = emulated[i].other;
        bool takes_part = emulated[i].mask >> (other & 31) & 1;
        if (!takes_part || other >= emulated_threads || emulated[other].state == EMULATED_DONE) {
            fprintf(stderr, "emulated block: thread %d takes from %d, which gives nothing\n", i, other);
            abort();
        }
        emulated[i].taken = emulated[other].given;
        emulated[i].state = EMULATED_READY;
    }
    return any;
}
/* Barrier 0 is the whole block's; the others count their threads. */
static bool emulated_release_barrier(int barrier) {
    int waiting = 0, running = 0, wanted = 0;
    for (int i = 0; i < emulated_threads; i++) {
        bool here = emulated[i].state == EMULATED_BARRIER && emulated[i].barrier == barrier;
        waiting += here;
        running += !here && emulated[i].state != EMULATED_DONE;
        if (here) wanted = emulated[i].count;
    }
    int arrived = emulated_arrived[barrier];
    if (waiting == 0 || (barrier > 0 ? waiting + arrived < wanted : running > 0)) return false;
    if (barrier > 0) emulated_arrived[barrier] -= wanted - waiting;
    for (int i = 0; i < emulated_threads; i++)
        if (emulated[i].state == EMULATED_BARRIER && emulated[i].barrier == barrier)
            emulated[i].state = EMULATED_READY;
    return true;
}
static void emulated_block() {
    memset(emulated_arrived, 0, sizeof emulated_arrived);
    for (int i = 0; i < emulated_threads; i++) emulated[i].state = EMULATED_READY;
    for (bool progress = true; progress;) {
        progress = false;
        for (int i = 0; i < emulated_threads; i++) {
            if (emulated[i].state != EMULATED_READY) continue;
            threadIdx.x = (unsigned)i;
            emulated_resume(&emulated[i]);
            progress = true;
        }
        progress |= emulated_release_shuffles();
        for (int barrier = 0; barrier < 16; barrier++) progress |= emulated_release_barrier(barrier);
    }
    for (int i = 0; i < emulated_threads; i++)
        if (emulated[i].state != EMULATED_DONE) {
            fprintf(stderr, "emulated block: thread %d waits for ever\n", i);
            abort();
        }
}
static void emulated_launch(void (*entry)(void *), void *arguments, unsigned gx, unsigned gy, int block) {
    emulated_stacks = (char *)malloc((size_t)EMULATED_THREADS * EMULATED_STACK);
    emulated_entry = entry;
    emulated_arguments = arguments;
    emulated_threads = block;
    for (int i = 0; i < emulated_threads; i++) {
        emulated_thread *t = &emulated[i];
        getcontext(&t->context);
        t->context.uc_stack.ss_sp = emulated_stacks + (size_t)i * EMULATED_STACK;
        t->context.uc_stack.ss_size = EMULATED_STACK;
        t->context.uc_link = NULL;
        t->started = false;
        makecontext(&t->context, emulated_start, 0);
    }
    gridDim = {(unsigned)gx, (unsigned)gy, 1};
    for (blockIdx.y = 0; blockIdx.y < gy; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++) emulated_block();
    free(emulated_stacks);
}

static inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static inline float __uint_as_float(unsigned i) { float f; memcpy(&f, &i, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned i; memcpy(&i, &f, 4); return i; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float rsqrtf(float a) { return 1 / sqrtf(a); }
/* what the kernels say in PTX (tests/emit/cuda.c puts these in their place) */
static inline unsigned short emulated_bf16(float x) {
    unsigned u = __float_as_uint(x);
    return x != x ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
/* f16, rounded to nearest, ties to even; of_f16: back */
static inline unsigned emulated_f16(float x) {
    unsigned sign = __float_as_uint(x) >> 16 & 0x8000, infinite = 0x7c00;
    float a = fabsf(x);
    if (a != a) return 0x7fff;
    if (a >= 65520.0f) return sign | infinite;
    int exponent = a < 6.103515625e-5f ? -14 : ilogbf(a);
    unsigned steps = (unsigned)rintf(ldexpf(a, 10 - exponent));
    return sign | ((unsigned)(exponent + 14) * 1024 + steps);
}
static inline float emulated_of_f16(unsigned bits) {
    unsigned exponent = bits >> 10 & 31, steps = bits & 1023;
    float a = exponent == 31 ? (steps ? NAN : INFINITY)
              : exponent == 0 ? ldexpf((float)steps, -24)
                              : ldexpf((float)(1024 + steps), (int)exponent - 25);
    return bits & 0x8000 ? -a : a;
}
static inline float emulated_max(float a, float b) { return a != a || a > b ? a : b; }
static inline float emulated_min(float a, float b) { return a != a || a < b ? a : b; }
static inline unsigned emulated_max2(unsigned a, unsigned b) {
    float low = emulated_max(__uint_as_float(a << 16), __uint_as_float(b << 16));
    float high =
        emulated_max(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u));
    return __float_as_uint(high) | __float_as_uint(low) >> 16;
}
static inline float emulated_exp2(float x) { return exp2f(x); }
static inline float emulated_tanh(float x) { return tanhf(x); }
