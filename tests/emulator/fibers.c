/* A block's threads as fibers. They switch where CUDA's threads wait for one another, in order of
 * their numbers, or backwards (blocks too) with EMULATOR_BACKWARDS=1: results must not depend on
 * it. Dynamic shared memory holds NaN patterns before each block. */
#include "fibers.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 1024, STACK = 128 << 10, WARPS = THREADS / 32, COPIES = 256, MASKS = 64 };

typedef struct {
    void *stack_pointer;
    emu_index index;
    int number;
    bool done;
} emu_thread;
typedef struct {
    int count, generation;
} barrier;
typedef struct {          /* what a warp's lanes exchange */
    unsigned mask[MASKS]; /* lanes that meet at a barrier of their own */
    barrier met[MASKS];
    uint64_t slots[32];
    unsigned fragments[32][8];
} warp;
typedef struct {
    unsigned to;
    const void *from;
    int bytes, group;
} pending_copy;

emu_thread *emu_now;
emu_index emu_block, emu_grid, emu_dimensions;
unsigned char emu_dynamic_shared[228 << 10] __attribute__((aligned(1024)));

static emu_thread threads[THREADS];
static char *stacks;
static void *scheduler;
static int total, alive;
static unsigned long progress; /* counts events: none in a round means that all wait for ever */
static barrier barriers[16];
static warp warps[WARPS];
static pending_copy copies[THREADS][COPIES];
static int copy_count[THREADS], copy_group[THREADS];
static void (*entry)(void *);
static void *arguments;

void emu_switch(void **save, void *load);
__asm__(".text\n"
        ".globl emu_switch\n"
        "emu_switch:\n"
        "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
        "  mov %rsp, (%rdi)\n"
        "  mov %rsi, %rsp\n"
        "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
        "  ret\n");

static void begin(void) {
    entry(arguments);
    emu_now->done = true;
    alive--;
    progress++;
    emu_switch(&emu_now->stack_pointer, scheduler);
}

/* `wanted` threads meet; 0: all that still run. */
static void meet(barrier *b, int wanted) {
    const int mine = b->generation;
    b->count++;
    progress++;
    while (b->generation == mine) {
        if (b->count >= (wanted ? wanted : alive)) {
            b->count = 0;
            b->generation++;
            progress++;
            return;
        }
        emu_switch(&emu_now->stack_pointer, scheduler);
    }
}

void emu_barrier(int id, int count) {
    meet(&barriers[id], id == 0 ? 0 : count);
}

void emu_warp_barrier(unsigned mask) {
    warp *w = &warps[emu_now->number / 32];
    int i = 0, lanes = 0;
    for (int lane = 0; lane < 32; lane++) {
        int thread = emu_now->number / 32 * 32 + lane;
        lanes += (mask >> lane & 1) && thread < total && !threads[thread].done;
    }
    if (!(mask >> (emu_now->number & 31) & 1)) emu_complain("a lane is not in its own mask");
    while (i < MASKS - 1 && w->mask[i] && w->mask[i] != mask) i++;
    w->mask[i] = mask;
    meet(&w->met[i], lanes);
}

bool emu_runs(int lane) {
    int thread = emu_now->number / 32 * 32 + lane;
    return thread < total && !threads[thread].done;
}

uint64_t *emu_slots(void) {
    return warps[emu_now->number / 32].slots;
}

unsigned (*emu_fragments(void))[8] {
    return warps[emu_now->number / 32].fragments;
}

/* cp.async: nothing arrives before it is waited for. */
void emu_copy_later(unsigned to, const void *from, int bytes) {
    int *count = &copy_count[emu_now->number];
    if ((to & 15) || (bytes && ((uintptr_t)from & 15))) emu_complain("cp.async is misaligned");
    if (*count == COPIES) {
        emu_complain("more copies are under way than the emulator keeps");
        return;
    }
    copies[emu_now->number][(*count)++] =
        (pending_copy){to, from, bytes, copy_group[emu_now->number]};
}

void emu_copy_commit(void) {
    copy_group[emu_now->number]++;
}

/* For all groups but the last so many; -1: for all, and what is in no group yet. */
void emu_copy_wait(int but) {
    const int n = emu_now->number;
    int left = 0;
    for (int i = 0; i < copy_count[n]; i++) {
        const pending_copy *c = &copies[n][i];
        if (but >= 0 && c->group >= copy_group[n] - but) {
            copies[n][left++] = *c;
            continue;
        }
        memset(emu_dynamic_shared + c->to, 0, 16);
        if (c->bytes) memcpy(emu_dynamic_shared + c->to, c->from, (size_t)c->bytes);
    }
    copy_count[n] = left;
}

static void prepare_block(emu_index size, char *block_stacks) {
    total = alive = (int)(size.x * size.y * size.z);
    memset(barriers, 0, sizeof barriers);
    memset(warps, 0, sizeof warps);
    memset(copy_count, 0, sizeof copy_count);
    memset(copy_group, 0, sizeof copy_group);
    for (int i = 0; i < total; i++) {
        const unsigned n = (unsigned)i;
        void **top = (void **)(block_stacks + (size_t)(i + 1) * STACK - 64);
        threads[i] = (emu_thread){.number = i};
        threads[i].index = (emu_index){n % size.x, n / size.x % size.y, n / size.x / size.y};
        *--top = NULL; /* begin() never returns; this aligns its stack */
        *--top = (void *)begin;
        for (int k = 0; k < 6; k++) *--top = NULL;
        threads[i].stack_pointer = top;
    }
}

/* Until all threads are done, or none can go on. */
static void advance_block(bool backwards) {
    while (alive > 0) {
        const unsigned long before = progress;
        for (int k = 0; k < total; k++) {
            emu_thread *t = &threads[backwards ? total - 1 - k : k];
            if (t->done) continue;
            emu_now = t;
            emu_switch(&scheduler, t->stack_pointer);
        }
        if (progress == before) return;
    }
}

void emu_yield(void) {
    emu_switch(&emu_now->stack_pointer, scheduler);
}

static void begin_launch(void (*function)(void *), void *data, emu_index grid, emu_index block) {
    entry = function, arguments = data;
    emu_grid = grid, emu_dimensions = block;
}

static emu_index block_index(unsigned n) {
    return (emu_index){n % emu_grid.x, n / emu_grid.x % emu_grid.y, n / emu_grid.x / emu_grid.y};
}

static bool runs_backwards(void) {
    const char *order = getenv("EMULATOR_BACKWARDS");
    return order && *order == '1';
}

int fibers_run(void (*function)(void *), void *data, emu_index grid, emu_index block,
               unsigned shared_bytes) {
    const bool backwards = runs_backwards();
    const unsigned blocks = grid.x * grid.y * grid.z;
    if (!stacks) stacks = malloc((size_t)THREADS * STACK);
    begin_launch(function, data, grid, block);
    for (unsigned i = 0; i < blocks; i++) {
        emu_block = block_index(backwards ? blocks - 1 - i : i);
        memset(emu_dynamic_shared, 0xff, shared_bytes);
        prepare_block(block, stacks);
        advance_block(backwards);
        if (alive > 0) return 1;
    }
    return 0;
}

/* A block that does not run at the moment. */
typedef struct {
    emu_thread threads[THREADS];
    barrier barriers[16];
    warp warps[WARPS];
    int alive;
    unsigned char *shared;
} resting;

static void exchange(resting *block, bool rests, unsigned shared_bytes) {
    void *here[] = {threads, barriers, warps, emu_dynamic_shared};
    void *there[] = {block->threads, block->barriers, block->warps, block->shared};
    const size_t bytes[] = {sizeof threads, sizeof barriers, sizeof warps, shared_bytes};
    for (int i = 0; i < 4; i++)
        memcpy(rests ? there[i] : here[i], rests ? here[i] : there[i], bytes[i]);
    if (rests)
        block->alive = alive;
    else
        alive = block->alive;
}

/* Kernels that copy asynchronously are not run so. */
int fibers_run_together(void (*function)(void *), void *data, emu_index grid, emu_index block,
                        unsigned shared_bytes) {
    const bool backwards = runs_backwards();
    const unsigned blocks = grid.x * grid.y * grid.z;
    const size_t block_bytes = (size_t)(block.x * block.y * block.z) * STACK;
    resting *all = calloc(blocks, sizeof *all);
    char *memory = malloc(blocks * block_bytes);
    unsigned waiting = blocks;
    begin_launch(function, data, grid, block);
    for (unsigned i = 0; i < blocks; i++) {
        all[i].shared = malloc(shared_bytes + 1);
        memset(emu_dynamic_shared, 0xff, shared_bytes);
        prepare_block(block, memory + i * block_bytes);
        exchange(&all[i], true, shared_bytes);
    }
    for (unsigned long before = progress - 1; waiting > 0 && progress != before;) {
        before = progress;
        for (unsigned i = 0; i < blocks; i++) {
            const unsigned n = backwards ? blocks - 1 - i : i;
            if (all[n].alive == 0) continue;
            emu_block = block_index(n);
            exchange(&all[n], false, shared_bytes);
            advance_block(backwards);
            exchange(&all[n], true, shared_bytes);
            waiting -= all[n].alive == 0;
        }
    }
    for (unsigned i = 0; i < blocks; i++) free(all[i].shared);
    free(all);
    free(memory);
    return waiting > 0;
}
