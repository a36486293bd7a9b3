/* Attention on Hopper's warpgroup products (cuda/attention_wgmma*): bf16, heads of up to 128,
 * forward 256. Chooses how a block is cut: MLUA_WGMMA=N takes variant N of the forward kernel,
 * from 1. */
#include "codegen/kernels/attention.h"

enum {
    ROWS = 64 /* of a warpgroup */,
    VARIANTS = 3,
    MOST_SHARED = 227 * 1024 /* bytes of an SM */
};

typedef struct {
    int groups, tile, slots, resident; /* warpgroups, rows of tiles, blocks on a multiprocessor */
    int works;                         /* blocks of queries of a thread block; 0: one */
    bool turns;
} forward_cut;

static const forward_cut forward_cuts[4][VARIANTS] = {
    /* heads of 64 */
    {{.groups = 2, .tile = 128, .slots = 6, .resident = 1, .works = 8, .turns = true},
     {.groups = 1, .tile = 128, .slots = 4, .resident = 2},
     {.groups = 1, .tile = 64, .slots = 4, .resident = 3}},
    /* heads of 128 */
    {{.groups = 2, .tile = 128, .slots = 4, .resident = 1, .works = 4, .turns = true},
     {.groups = 2, .tile = 64, .slots = 6, .resident = 1},
     {.groups = 3, .tile = 64, .slots = 5, .resident = 1, .turns = true}},
    /* heads of 192 */
    {{.groups = 2, .tile = 128, .slots = 3, .resident = 1, .turns = true},
     {.groups = 2, .tile = 64, .slots = 6, .resident = 1, .turns = true},
     {.groups = 2, .tile = 64, .slots = 6, .resident = 1}},
    /* heads of 256 */
    {{.groups = 2, .tile = 64, .slots = 4, .resident = 1, .turns = true},
     {.groups = 2, .tile = 64, .slots = 4, .resident = 1},
     {.groups = 2, .tile = 64, .slots = 4, .resident = 1}},
};

/* The gradient: tiles of 64 queries by 128 keys. Threads that copy would need 64 registers, but
 * with heads of 128 those that compute need 232: with fewer, ptxas serializes their products. */
enum { QUERIES = 64, KEYS = 128 };
typedef struct {
    int slots, key_slots, fewer;
} backward_cut;
static const backward_cut backward_cuts[2] = {{4, 2, 56}, {2, 1, 40}};

/* Columns of tiles: heads' sizes in whole blocks, as zeros where there are no more. */
static int64_t width_of(const attention_printer *p) {
    return attention_round_up(p->a->head_dim, 64);
}

static int64_t query_tiles(const attention_printer *p) {
    return attention_divide_up(p->a->seq, QUERIES);
}

static int64_t key_blocks(const attention_printer *p) {
    return attention_divide_up(p->a->kv_seq, KEYS);
}

static void bind_cut(attention_printer *p, const forward_cut *cut, int fewer) {
    attention_set(p, "GROUPS", cut->groups);
    attention_set(p, "TILE", cut->tile);
    attention_set(p, "SLOTS", cut->slots);
    attention_set(p, "BLOCKS_PER_SM", cut->resident);
    attention_set(p, "FEWER_REGISTERS", fewer);
}

/* ---- Forward */

/* Blocks of queries of a thread block: fewer than the cut's where multiprocessors would be idle. */
static int works_of_block(const attention_printer *p, const forward_cut *cut, int64_t blocks) {
    int64_t all = blocks * p->a->heads * p->batches, works = cut->works > 0 ? cut->works : 1;
    int64_t at_once = (int64_t)p->schedule->target->multiprocessors * cut->resident;
    while (works > 1 && (works > blocks || all / works < 4 * at_once)) works /= 2;
    return (int)works;
}

static void forward(attention_printer *p, const forward_cut *cut) {
    const ml_attention_step *a = p->a;
    int64_t rows = cut->groups * ROWS, blocks = attention_divide_up(a->seq, rows);
    int works = works_of_block(p, cut, blocks), buffers = works > 1 ? 2 : 1;
    int64_t pairs = (works + 1) / 2, per_head = blocks;
    if (works > 1) per_head = attention_divide_up((blocks + 1) / 2, pairs);
    int64_t list_bytes = 4 * buffers * (attention_divide_up(a->kv_seq, cut->tile) + 1);
    int64_t bytes =
        1024 + (buffers * rows + cut->slots * cut->tile) * width_of(p) * 2 + 16 * cut->slots + 16;
    bool listed = p->masks > 0 && bytes + list_bytes <= MOST_SHARED / cut->resident;
    bind_cut(p, cut, cut->groups * cut->resident == 2 ? 40 : 32);
    attention_set(p, "TAKE_TURNS", cut->turns);
    attention_set(p, "WORKS", works);
    attention_set(p, "BLOCKS_PER_HEAD", per_head);
    attention_set(p, "LISTED", listed);
    if (a->args.score && listed == (p->masks > 0)) attention_open_score(p);
    ml_kernel *kernel = attention_kernel(
        p, "attention_wgmma_forward.cu", "attention", per_head * a->heads * p->batches,
        (uint32_t)(cut->groups + 1) * 128, bytes + (listed ? list_bytes : 0));
    p->step->kernel = listed ? attention_states_kernel(p) : kernel;
    if (listed) p->step->kernel->next = kernel;
}

/* ---- Backward */

/* Where parts of the workspace are, in f32 elements (cuda/attention_wgmma_grad.cuh). */
typedef struct {
    int64_t sums, turns, counter, entries, end;
} workspace;

static workspace lay_out(const attention_printer *p) {
    int64_t tiles = p->batches * p->a->heads * query_tiles(p);
    workspace w = {.sums = tiles * 2 * QUERIES};
    w.turns = w.sums + tiles * QUERIES * width_of(p);
    w.counter = w.turns + tiles;
    w.entries = w.end = w.counter + 1;
    if (p->masks > 0)
        w.end +=
            p->batches * (p->masked_by_head ? p->a->heads : 1) * query_tiles(p) * key_blocks(p);
    return w;
}

int64_t attention_wgmma_workspace(const attention_printer *p) {
    return attention_wgmma_serves(p) ? lay_out(p).end : 0;
}

static void bind_workspace(attention_printer *p) {
    const workspace w = lay_out(p);
    template_set(&p->text, "SUMS_AT", "%lldLL", (long long)w.sums);
    template_set(&p->text, "TURNS_AT", "%lldLL", (long long)w.turns);
    template_set(&p->text, "COUNTER_AT", "%lldLL", (long long)w.counter);
    template_set(&p->text, "ENTRIES_AT", "%lldLL", (long long)w.entries);
}

/* Items in the order in which they are begun: heads in groups, the first one with what is left
 * over, and in a group the first keys of all its heads first, which most queries see: the last
 * items are short. Items of a head that begin together wait for each other's dq, tile by tile; of
 * so many heads only a few do, and few of those that a head has: with heads of 64, 1,024 tokens (8
 * items a head; 768 heads) groups of 4 took 2,640 us, of 8 1,690, 16 1,110, 66 880, 132 940, and
 * short items first, which hardly wait, 915. More at once find more of what they read and add to in
 * the L2 cache: heads of 128, 4,096 tokens, documents: one of a head 1,244 us, four 1,090, 6 to 16
 * 1,068. */
static void bind_order(attention_printer *p) {
    enum { OF_A_HEAD = 8 };
    int64_t heads = p->a->kv_heads * p->batches, together = heads, at_once = key_blocks(p) / 4;
    at_once = at_once < 1 ? 1 : at_once > OF_A_HEAD ? OF_A_HEAD : at_once;
    int64_t fewest = (p->schedule->target->multiprocessors + at_once - 1) / at_once;
    if (fewest > 0 && heads > fewest) together = (heads + heads / fewest - 1) / (heads / fewest);
    int64_t groups = (heads + together - 1) / together;
    attention_set(p, "TOGETHER", together);
    attention_set(p, "FIRST_HEADS", heads - (groups - 1) * together);
}

static ml_kernel *gradient_kernel(attention_printer *p) {
    const backward_cut *cut = &backward_cuts[width_of(p) == 128];
    bind_cut(p, &(forward_cut){.groups = 2, .tile = QUERIES, .slots = cut->slots, .resident = 1},
             cut->fewer);
    int64_t items = key_blocks(p) * p->a->kv_heads * p->batches, width = width_of(p);
    attention_set(p, "KEY_SLOTS", cut->key_slots);
    attention_set(p, "ITEMS", items);
    bind_order(p);
    int64_t blocks = p->schedule->target->multiprocessors;
    int64_t shared = cut->key_slots * 2 * KEYS * width * 2 + cut->slots * 2 * QUERIES * width * 2 +
                     2 * KEYS * QUERIES * 2 + 2 * QUERIES * width * 4 +
                     cut->slots * (8 * QUERIES + 32 + 16) + 32 + cut->key_slots * 8 + 40;
    return attention_kernel(p, "attention_wgmma_grad.cu", "attention_grad dq dk dv",
                            blocks > 0 && blocks < items ? blocks : items, 384, 1024 + shared);
}

static void backward(attention_printer *p) {
    int64_t tiles = query_tiles(p) * p->a->heads * p->batches;
    bind_workspace(p);
    attention_set(p, "LISTED", p->masks > 0);
    if (p->a->args.score) attention_open_score(p);
    ml_kernel *gradient = gradient_kernel(p);
    ml_kernel *begin =
        attention_kernel(p, "attention_wgmma_grad_begin.cu", "attention_grad", tiles, 128, 0);
    begin->next = gradient;
    gradient->next =
        attention_kernel(p, "attention_wgmma_grad_dq.cu", "attention_grad dq", tiles, 128, 0);
    p->step->kernel = p->masks > 0 ? attention_states_kernel(p) : begin;
    if (p->masks > 0) p->step->kernel->next = begin;
}

bool attention_wgmma_serves(const attention_printer *p) {
    enum { HOPPER = 90 };
    const ml_attention_step *a = p->a;
    return p->schedule->target->arch == HOPPER && !p->schedule->target->no_wgmma &&
           a->head_dim <= (a->backward ? 128 : 256) && a->value_dim == a->head_dim &&
           attention_aligned(p);
}

bool attention_wgmma(attention_printer *p) {
    if (!attention_wgmma_serves(p)) return false;
    int variant = p->schedule->target->attention_tiles;
    attention_bind_units(p);
    if (p->a->backward)
        backward(p);
    else
        forward(p, &forward_cuts[width_of(p) / 64 - 1][variant < VARIANTS ? variant : 0]);
    return true;
}
