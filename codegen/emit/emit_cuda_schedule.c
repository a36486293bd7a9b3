/* Which threads do what: see emit_cuda.h. */
#include "codegen/emit/emit_cuda.h"

#include <string.h>

enum {
    MAX_VEC = 8,
    ELEMENT_THREADS = 256,
    ROW_THREADS = 128,   /* of a block of several small teams */
    CHUNK_THREADS = 512, /* chunks are few, so each gets many threads */
    SUMS_THREADS = 896,  /* where sums of columns leave no room for a second block */
    MAX_ELEMENTS = 32,   /* of a row in one thread, before a row gets more threads */
    WARP_ELEMENTS = 24,  /* the same of a row that is not walked and for which a warp will do ... */
    TEAM_ELEMENTS = 16,  /* ... and of others, where these many threads will do */
    TEAM_THREADS = 384,
    ROW_REGISTERS = 80, /* that a row's elements may take of a thread, likewise */
    FEW_ROWS = 256,
    MAX_UNROLLED = 16,   /* packs of a thread */
    REGISTERS = 65536,   /* of a multiprocessor */
    OWN_REGISTERS = 34,  /* for addresses and temporaries */
    LEAST_THREADS = 512, /* that a multiprocessor should hold at once, in blocks of any size */
    LONG_ROW_THREADS = 512,
    CACHED_BYTES = 64 << 10,
    LONGEST_ROW_THREADS = 1024, /* likewise, where one block has a multiprocessor alone */
    SHARED_BYTES = 110 << 10,   /* of a block, so that two fit */
    HELD_REGISTERS = 16,        /* for the rest of rows that shared memory has no room for */
    MAX_SLOTS = 4,
    TWO_BLOCKS_THREADS = 640,
    APART_FEW = 8,    /* rows side by side: as many elements as memory moves at least */
    APART_WARPS = 16, /* that share such rows, if they are long enough */
    APART_LEAST = 2,  /* elements of a thread then */
    CHUNK_APART_WARPS = 4,
    CHUNK_APART_LEAST = 16,
    WALK_LANES = 128,    /* shorter rows without sums of columns do as well by themselves ... */
    WALK_REGISTERS = 48, /* ... and those whose loads take no more of a thread */
    WALK_BLOCKS = 8,     /* a multiprocessor: most of them wait for their turn */
    TILE_THREADS = 1536, /* of a multiprocessor, of tiles */
    LEAST_TILE_TEAMS = 4,
    TILE_ROUNDS = 6,           /* rows that a team of a tile should have */
    LEAST_ROUNDS = 4,          /* rows of a team in a chunk, for any to be copied ahead */
    COLUMN_BYTES = 40 << 10,   /* of column results, and with other results ... */
    DECLARED_BYTES = 48 << 10, /* ... all that a kernel may declare */
    OTHER_BYTES = 5 << 10,     /* of other results, which few kernels exceed */
};

bool cuda_is_column(const cuda_shape *s, const ml_inst *inst) {
    return inst->kind == ML_INST_REDUCE && inst->scope == ML_SCOPE_COLUMN && !s->elementwise;
}

ml_dtype cuda_column_dtype(const ml_inst *inst) {
    ml_dtype dtype = (ml_dtype)inst->dtype;
    return dtype == ML_BF16 ? ML_F32 : dtype == ML_BOOL ? ML_I32 : dtype;
}

bool cuda_is_row_partial(const cuda_shape *s, int i) {
    const ml_inst *inst = &s->e->ir->inst[i];
    return inst->kind == ML_INST_REDUCE && inst->scope == ML_SCOPE_ALL && !s->elementwise &&
           s->e->place[i] < s->e->ir->row_loops;
}

int cuda_threads(const cuda_shape *s) {
    return s->team * s->teams;
}

/* Whether the value is a multiple of n whatever the loops' indices are. */
static bool divisible(const ml_kernel_ir *ir, int i, int n) {
    if (i == ML_NO_INST || n == 1) return true;
    const ml_inst *inst = &ir->inst[i];
    if (inst->kind == ML_INST_CONST)
        return ml_dtypes[inst->dtype].kind == ML_KIND_INT && inst->constant.integer % n == 0;
    if (inst->kind != ML_INST_MAP) return false;
    switch ((ml_op)inst->op) {
    case ML_OP_MUL: return divisible(ir, inst->src[0], n) || divisible(ir, inst->src[1], n);
    case ML_OP_ADD:
    case ML_OP_SUB:
    case ML_OP_MAXIMUM:
    case ML_OP_MINIMUM: return divisible(ir, inst->src[0], n) && divisible(ir, inst->src[1], n);
    case ML_OP_CAST: return divisible(ir, inst->src[0], n);
    case ML_OP_WHERE: return divisible(ir, inst->src[1], n) && divisible(ir, inst->src[2], n);
    default: return false;
    }
}

/* Loads and stores whose addresses follow the innermost loop one by one. */
static bool is_contiguous(const cuda_shape *s, int i) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (inst->kind != ML_INST_LOAD && inst->kind != ML_INST_STORE) return false;
    int inner = e->inner;
    if (e->ir->operand[inst->operand].stride[inner] != 1) return false;
    if (strcmp(e->index[inner], "0LL") == 0) return false;
    /* a computed index or a guard that changes within the pack leaves single elements */
    if (inst->index != ML_NO_INST && e->depth[inst->index] >= inner) return false;
    return inst->guard == ML_NO_INST || e->depth[inst->guard] < inner;
}

static bool allows(const cuda_shape *s, int i, int vec) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    const ml_operand *operand = &e->ir->operand[inst->operand];
    for (int loop = 0; loop < e->inner; loop++)
        if (strcmp(e->index[loop], "0LL") != 0 && operand->stride[loop] % vec != 0) return false;
    return divisible(e->ir, inst->index, vec);
}

/* Whether an access is to a small operand that is read again and again: caches serve it. */
static bool is_cached(const cuda_shape *s, const ml_inst *inst) {
    const ml_kernel_ir *ir = s->e->ir;
    const ml_operand *operand = &ir->operand[inst->operand];
    int64_t elements = 1;
    if (inst->index != ML_NO_INST && ir->inst[inst->index].kind != ML_INST_CONST) return false;
    for (int loop = 0; loop < ir->loop_count; loop++)
        if (operand->stride[loop] != 0) elements *= ir->size[loop];
    return elements * ml_dtypes[operand->dtype].bytes <= CACHED_BYTES &&
           elements <= s->e->rows * s->e->columns / 8;
}

/* The largest pack that the innermost size and most of the contiguous accesses allow, of at most
 * 16 bytes, so that neighbouring threads touch neighbouring bytes; in rows of mostly bf16, of 16
 * bytes of that. Accesses that do not allow it are moved element by element. */
static void choose_vec(cuda_shape *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    int most = 0;
    s->vec = 1;
    for (int vec = 2; vec <= MAX_VEC && ir->size[e->inner] % vec == 0; vec *= 2) {
        int count = 0, widest = 1, streams[9] = {0}; /* by bytes of an element */
        for (int i = 0; i < ir->inst_count; i++) {
            if (!is_contiguous(s, i) || !allows(s, i, vec)) continue;
            const ml_operand *operand = &ir->operand[ir->inst[i].operand];
            int bytes = ml_dtypes[operand->dtype].bytes;
            count++;
            if (is_cached(s, &ir->inst[i])) continue;
            streams[bytes]++;
            if (bytes > widest) widest = bytes;
        }
        bool narrow = !s->elementwise && widest == 4 && streams[2] >= 2 * streams[4];
        if (count == 0 || count < most || vec * widest > (narrow ? 32 : 16)) continue;
        s->vec = vec;
        most = count;
    }
}

/* Loads of the same elements share a pack. */
static void find_packs(cuda_shape *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        s->pack[i] = -1;
        if (inst->kind != ML_INST_LOAD || !is_contiguous(s, i) || !allows(s, i, s->vec)) continue;
        s->pack[i] = i;
        s->first_stage[i] = e->stage[i];
        for (int j = 0; j < i; j++) {
            const ml_inst *other = &ir->inst[j];
            if (s->pack[j] == j && other->operand == inst->operand && other->index == inst->index &&
                other->guard == inst->guard)
                s->pack[i] = j;
        }
        int first = s->pack[i];
        if (e->stage[i] < s->first_stage[first]) s->first_stage[first] = e->stage[i];
    }
}

bool cuda_stores_pack(const cuda_shape *s, int i) {
    return s->e->ir->inst[i].kind == ML_INST_STORE && s->vec > 1 && is_contiguous(s, i) &&
           allows(s, i, s->vec);
}

/* Registers for one column of a row: packs in bytes / 4, column accumulators. */
double cuda_column_registers(const cuda_shape *s, double *accumulators) {
    const ml_kernel_ir *ir = s->e->ir;
    double packs = 0;
    *accumulators = 0;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        const ml_operand *operand = &ir->operand[inst->operand];
        if (s->pack[i] == i && !is_cached(s, &ir->inst[i]))
            packs += ml_dtypes[operand->dtype].bytes / 4.0;
        if (cuda_is_column(s, inst)) *accumulators += ml_dtypes[inst->dtype].bytes > 4 ? 2 : 1;
    }
    return packs + *accumulators;
}

/* Shared memory in which the teams' column results of one round meet, one sum after the other. */
int64_t cuda_column_bytes(const cuda_shape *s) {
    const ml_kernel_ir *ir = s->e->ir;
    int64_t most = 0;
    for (int i = 0; i < ir->inst_count; i++) {
        int64_t bytes = ml_dtypes[cuda_column_dtype(&ir->inst[i])].bytes;
        if (cuda_is_column(s, &ir->inst[i]) && bytes > most) most = bytes;
    }
    return s->in_registers && s->teams > 1 ? most * cuda_threads(s) * s->vec : 0;
}

static int round_up_power(int64_t n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

static int at_most(int64_t n, int most) {
    return n < most ? (int)n : most;
}

/* Threads of a row of more than a warp's worth of packs: of all numbers of packs a thread may have,
 * the one that leaves the fewest lanes without work, where each warp counts as much as `warp` lanes
 * of 32: others wait for it; of equals the most packs. */
static int choose_lanes(int64_t packs, int64_t most, int warp) {
    int best = CUDA_MAX_THREADS;
    double best_share = 0;
    for (int64_t each = most < 1 ? 1 : most; each >= 1; each--) {
        int64_t team = ((packs + each - 1) / each + CUDA_WARP - 1) / CUDA_WARP * CUDA_WARP;
        int64_t rounds = (packs + team - 1) / team;
        double share = (double)packs / (double)(team * rounds);
        share /= 1 + (double)warp * (double)team / (CUDA_WARP * CUDA_WARP);
        if (team > CUDA_MAX_THREADS || share < best_share + 0.01) continue;
        best = (int)team;
        best_share = share;
    }
    return best;
}

/* Packs of a thread at most where registers hold `held`. Rows that are not walked get so many warps
 * that these hide each other's waiting for memory and for their team. */
static int64_t most_packs(const cuda_shape *s, int64_t packs, int64_t held) {
    int64_t few = TEAM_ELEMENTS / s->vec, least = (packs + TEAM_THREADS - 1) / TEAM_THREADS;
    if (few < least) few = least;
    if (s->e->columns <= WARP_ELEMENTS * CUDA_WARP) few = WARP_ELEMENTS / s->vec;
    return s->chunked || few > held ? held : few;
}

static int64_t processors_of(const cuda_shape *s) {
    return s->e->target.multiprocessors > 0 ? s->e->target.multiprocessors : 132;
}

static void choose_team(cuda_shape *s) {
    int64_t packs = (s->e->columns + s->vec - 1) / s->vec;
    int64_t rows = s->chunked ? s->e->rows / s->chunks + 1 : s->e->rows;
    double accumulators, each = cuda_column_registers(s, &accumulators);
    double elements = each > 0 ? ROW_REGISTERS / each : MAX_ELEMENTS;
    if (elements > MAX_ELEMENTS) elements = MAX_ELEMENTS;
    if (!s->chunked && rows < FEW_ROWS) elements = s->vec; /* threads are what lacks */
    /* room for rows ahead, and for two blocks */
    if (s->chunked && (accumulators > 0 || s->e->stages > 1)) elements = s->vec;
    if (s->tiled || packs <= CUDA_WARP)
        s->team = round_up_power(at_most(packs, CUDA_WARP));
    else
        s->team = choose_lanes(packs, most_packs(s, packs, (int64_t)elements / s->vec), 2);
    s->packs = s->tiled ? 1 : (int)((packs + s->team - 1) / s->team);
    s->unroll = s->packs <= MAX_UNROLLED;
    int threads = !s->chunked                     ? ROW_THREADS
                  : accumulators > 0 && !s->tiled ? SUMS_THREADS
                                                  : CHUNK_THREADS;
    s->teams = s->team < threads ? threads / s->team : 1;
    /* Threads that meet at a barrier by its team's number take all 16 of a block, and a
     * multiprocessor has 64. */
    if (s->team > CUDA_WARP) s->teams = s->chunked ? at_most(s->teams, 15) : 1;
    /* by whole warps, as a block's threads add up what they have of all rows */
    while (s->teams > 1 && s->teams / 2 >= rows && s->team * (s->teams / 2) % CUDA_WARP == 0)
        s->teams /= 2;
    while (s->tiled && s->teams > LEAST_TILE_TEAMS && rows < (int64_t)TILE_ROUNDS * s->teams)
        s->teams /= 2;
    s->in_registers = s->unroll && accumulators * s->vec * s->packs <= 64;
    if (!s->in_registers && accumulators > 0) s->teams = 1; /* one owner for each column */
    while (cuda_column_bytes(s) > COLUMN_BYTES ||
           (s->teams > 1 && cuda_column_bytes(s) + cuda_results_bytes(s) > DECLARED_BYTES))
        s->teams /= 2;
}

/* Where rows give sums of columns any block may have any row: blocks get them by turns, as many as
 * they have teams, and what all read at a time lies together. That does nothing for tiles, and
 * neighbouring rows for different blocks are worse than ranges. */
static bool choose_spread(const cuda_shape *s) {
    double accumulators;
    cuda_column_registers(s, &accumulators);
    return s->chunked && accumulators > 0 && !s->tiled;
}

/* Blocks of one multiprocessor. Tiles' work on a row is short. */
static int blocks_together(const cuda_shape *s) {
    return s->tiled ? TILE_THREADS / cuda_threads(s) : 2;
}

int64_t cuda_tiles(const cuda_shape *s) {
    int64_t width = (int64_t)s->team * s->vec;
    return s->tiled ? (s->e->columns + width - 1) / width : 1;
}

static bool writes_elements(const cuda_shape *s) {
    const emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (e->ir->inst[i].kind == ML_INST_STORE && e->place[i] == e->inner) return true;
    return false;
}

/* No more tiles that only read than run at once: each moves nothing while it waits for its first
 * rows and for its teams to meet. So chunks may be fewer and longer than there is room for results.
 * Tiles that write, and work more on what they read, do better where there are always some left. */
static void choose_tiles(cuda_shape *s) {
    choose_team(s);
    if (!s->tiled || !s->in_registers || s->teams == 1 || writes_elements(s)) return;
    int64_t most = processors_of(s) * blocks_together(s) / cuda_tiles(s);
    if (most < 1 || most >= s->chunks) return;
    s->chunks = most;
    choose_team(s);
}

/* Whether a load can be issued before the columns' loops are entered. */
static bool is_row_address(const cuda_shape *s, int i) {
    const emitter *e = s->e;
    const ml_inst *inst = &e->ir->inst[i];
    if (s->elementwise) return inst->index == ML_NO_INST && inst->guard == ML_NO_INST;
    return (inst->index == ML_NO_INST || e->place[inst->index] < e->ir->row_loops) &&
           (inst->guard == ML_NO_INST || e->place[inst->guard] < e->ir->row_loops);
}

bool cuda_reads_pack(const cuda_shape *s, int stage, int i, int pack) {
    bool folded = i == s->folded && pack == s->folded_pack;
    return (s->pack[i] == pack || folded) && s->e->need[stage][i];
}

/* The last pass that needs the elements of a pack. */
int cuda_last_stage(const cuda_shape *s, int pack) {
    const emitter *e = s->e;
    int last = 0;
    for (int stage = 0; stage < e->stages; stage++)
        for (int i = pack; i < e->ir->inst_count; i++)
            if (cuda_reads_pack(s, stage, i, pack)) last = stage;
    return last;
}

/* How many passes need the elements of a pack. */
static int readers(const cuda_shape *s, int pack) {
    const emitter *e = s->e;
    int count = 0;
    for (int stage = 0; stage < e->stages; stage++) {
        bool reads = false;
        for (int i = pack; i < e->ir->inst_count; i++)
            reads = reads || (s->pack[i] == pack && e->need[stage][i]);
        count += reads;
    }
    return count;
}

static bool is_read_again(const cuda_shape *s, int pack) {
    return readers(s, pack) > 1;
}

int cuda_pack_bytes(const cuda_shape *s, int pack) {
    return s->vec * ml_dtypes[s->e->ir->operand[s->e->ir->inst[pack].operand].dtype].bytes;
}

/* Registers of a thread that hold data. */
static double free_registers(const cuda_shape *s) {
    int threads = cuda_threads(s) > LEAST_THREADS ? cuda_threads(s) : LEAST_THREADS;
    double accumulators, limit = REGISTERS / threads;
    cuda_column_registers(s, &accumulators);
    double used = s->in_registers && !s->elementwise ? accumulators * s->vec * s->packs : 0;
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (s->hoisted[i] || s->e->buffered[i])
            used += s->vec * s->packs * (ml_dtypes[s->e->ir->inst[i].dtype].bytes > 4 ? 2 : 1);
    return (limit < 255 ? limit : 255) - OWN_REGISTERS - used;
}

/* Registers of packs that several passes need. */
static double registers_again(const cuda_shape *s) {
    double sum = 0;
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (s->pack[i] == i && is_row_address(s, i) && is_read_again(s, i))
            sum += s->packs * cuda_pack_bytes(s, i) / 4.0;
    return sum;
}

/* Values that take fewer registers from pass to pass than the packs they are made of, a sum of
 * several say, stay in their place. */
static void choose_instead(cuda_shape *s) {
    emitter *e = s->e;
    double packs = registers_again(s), left = free_registers(s);
    for (int i = e->ir->inst_count - 1; i >= 0; i--) {
        const ml_inst *inst = &e->ir->inst[i];
        double cost = s->vec * s->packs * (ml_dtypes[inst->dtype].bytes > 4 ? 2 : 1);
        if (inst->kind != ML_INST_MAP || e->place[i] != e->inner || cost >= packs || cost > left)
            continue;
        e->buffered[i] = true;
        cuda_find_needs(s);
        double rest = registers_again(s);
        if (rest + cost < packs) {
            packs = rest;
            left -= cost;
            s->instead = true;
        } else {
            e->buffered[i] = false;
            cuda_find_needs(s);
        }
    }
}

/* What stays in registers from pass to pass: loads that several passes need, then other loads
 * (issued ahead of the pass), then kept values. */
static void choose_registers(cuda_shape *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    double left = free_registers(s);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < ir->inst_count; i++) {
            if (s->staged[i]) continue;
            double cost = s->pack[i] == i ? s->packs * cuda_pack_bytes(s, i) / 4.0 : 0;
            if (s->pack[i] != i || s->cached[i] || !is_row_address(s, i) || cost > left) continue;
            bool again = is_read_again(s, i);
            if (!again && (round == 0 || is_cached(s, &ir->inst[i]))) continue;
            s->cached[i] = true;
            left -= cost;
        }
    }
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        bool later = false;
        for (int stage = e->stage[i] + 1; stage < e->stages; stage++)
            later = later || e->need[stage][i];
        double cost = s->vec * s->packs * (ml_dtypes[inst->dtype].bytes > 4 ? 2 : 1);
        if (!inst->kept || !later || e->buffered[i] || s->pack[i] >= 0 || e->place[i] != e->inner ||
            cost > left)
            continue;
        e->buffered[i] = true;
        left -= cost;
    }
}

/* Shared memory that one block may have, less what kernels declare themselves. */
static int64_t most_shared(const cuda_shape *s) {
    int64_t results = cuda_results_bytes(s);
    return ml_target_shared(s->e->target.arch) - (results > OTHER_BYTES ? results : OTHER_BYTES);
}

/* Whether a pack can be copied to shared memory before its row begins: its address is known then,
 * and it is no operand that caches serve. */
static bool may_stage(const cuda_shape *s, int i) {
    const ml_kernel_ir *ir = s->e->ir;
    const ml_inst *inst = &ir->inst[i];
    if (s->pack[i] != i || inst->guard != ML_NO_INST || s->e->target.arch < 80) return false;
    if (inst->index != ML_NO_INST && ir->inst[inst->index].kind != ML_INST_CONST) return false;
    return cuda_pack_bytes(s, i) % 16 == 0 && !is_cached(s, inst);
}

/* Stage packs that may be (or only those that passes read again) in as many slots as `bytes` of
 * shared memory hold, if they are `least` at least. Where they hold no slot but `least` is 0, most
 * of one will do. */
static bool stage_rows(cuda_shape *s, bool only_again, int64_t bytes, int least) {
    emitter *e = s->e;
    int64_t all = 0, round = 0;
    for (int i = 0; i < e->ir->inst_count; i++) {
        s->staged[i] = may_stage(s, i) && readers(s, i) > only_again;
        if (s->staged[i]) round += (int64_t)cuda_threads(s) * cuda_pack_bytes(s, i);
    }
    int64_t slot = round * s->packs;
    s->resident = s->packs;
    s->slots = slot == 0 ? 0 : at_most(bytes / slot, only_again ? 1 : MAX_SLOTS);
    if (slot > 0 && s->slots == 0 && least == 0 && slot < 2 * bytes) {
        s->slots = 1;
        s->resident = (int)(bytes / round);
    }
    s->held = (s->packs - s->resident) * (round / cuda_threads(s)) / 4 <= HELD_REGISTERS;
    for (int i = 0; i < e->ir->inst_count; i++) {
        if (!s->staged[i]) continue;
        s->shared[i] = all;
        all += (int64_t)s->resident * cuda_threads(s) * cuda_pack_bytes(s, i);
    }
    s->slot_bytes = all;
    if (s->slots >= least && s->slots > 0) return true;
    memset(s->staged, 0, (size_t)e->ir->inst_count * sizeof *s->staged);
    s->slots = 0;
    return false;
}

bool cuda_is_alone(const cuda_shape *s) {
    return s->slots * s->slot_bytes > SHARED_BYTES;
}

/* Whether a team walks enough rows for it to pay that work is done ahead of them. */
bool cuda_rows_follow(const cuda_shape *s) {
    return s->chunked && s->e->rows / s->chunks >= (int64_t)LEAST_ROUNDS * s->teams;
}

/* Rows whose elements lie far apart, beside those of the next row: where chunks' sums are added up,
 * say. Rows side by side then, so that what a warp reads at once lies together: a warp's worth
 * where there are many, few where threads are what lacks. */
static bool choose_apart(cuda_shape *s) {
    const emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    int beside = ir->row_loops - 1, found = 0;
    bool fits = s->vec == 1 && !s->tiled && e->columns >= CUDA_WARP && beside >= 0 &&
                ir->size[beside] >= APART_FEW;
    for (int i = 0; i < ir->inst_count && fits; i++) {
        const ml_inst *inst = &ir->inst[i];
        const int64_t *stride = ir->operand[inst->operand].stride;
        bool argmax = inst->kind == ML_INST_REDUCE && inst->op == ML_OP_ARGMAX;
        if (argmax || cuda_is_column(s, inst)) fits = false;
        if (inst->kind != ML_INST_LOAD || e->place[i] != e->inner) continue;
        if (is_cached(s, inst) && stride[e->inner] == 0) continue;
        fits = fits && stride[beside] == 1 && stride[e->inner] != 1;
        found++;
    }
    if (!fits || found == 0) return false;
    bool many = s->chunked && e->rows / s->chunks >= APART_FEW * 2;
    int64_t least = many ? CHUNK_APART_LEAST : APART_LEAST;
    s->apart = many ? CUDA_WARP : APART_FEW;
    s->team = CUDA_WARP / s->apart;
    for (s->warps = 1; !writes_elements(s) && s->warps < (many ? CHUNK_APART_WARPS : APART_WARPS) &&
                       e->columns >= 2 * s->team * least;) {
        s->warps *= 2;
        s->team *= 2;
    }
    s->teams = s->apart;
    while (cuda_threads(s) < ROW_THREADS) s->teams *= 2;
    s->packs = (int)((e->columns + s->team - 1) / s->team);
    s->unroll = s->packs <= MAX_UNROLLED;
    s->in_registers = true;
    return true;
}

/* Rows of several passes that are too much for registers are walked by blocks although they need
 * nothing from each other: what a row waits for is under way while others are worked on. There are
 * more blocks than run at once, since multiprocessors differ in what memory gives them. */
static bool choose_walk(cuda_shape *s) {
    double accumulators;
    if (s->chunked || s->e->stages < 3) return false;
    if (cuda_column_registers(s, &accumulators) * MAX_ELEMENTS <= WALK_REGISTERS) return false;
    s->chunked = true;
    for (int blocks = WALK_BLOCKS; blocks > 1; blocks /= 2) {
        s->chunks = blocks * processors_of(s);
        choose_team(s);
        if (cuda_rows_follow(s) && s->unroll && s->team >= WALK_LANES) return true;
    }
    s->chunked = false;
    s->chunks = 0;
    return false;
}

/* Rows of a chunk follow each other: while one is worked on the next ones are under way. */
static void stage_ahead(cuda_shape *s) {
    if (!cuda_rows_follow(s)) return;
    int64_t all = most_shared(s), part = all / blocks_together(s);
    bool alone = cuda_threads(s) > TWO_BLOCKS_THREADS;
    if (stage_rows(s, false, part - cuda_column_bytes(s), 2) || !alone) return;
    if (stage_rows(s, false, all - cuda_column_bytes(s), 2)) s->slots = 2; /* more do not help */
}

/* Long rows do not fit in registers. Packs that several passes need are kept in shared memory: one
 * row of each of two blocks, so that one loads while the other computes, or as much of a row as one
 * block has room for. Where rows follow each other the last pass makes room for the next one. */
static bool choose_shared(cuda_shape *s) {
    emitter *e = s->e;
    cuda_shape before = *s;
    int64_t packs = (e->columns + s->vec - 1) / s->vec;
    s->teams = 1;
    s->unroll = false;
    for (int least = 1; least >= 0; least--) {
        int threads = least == 1 ? LONG_ROW_THREADS : LONGEST_ROW_THREADS;
        s->team = choose_lanes(packs, (packs + threads - 1) / threads, 0);
        s->packs = (int)((packs + s->team - 1) / s->team);
        if (stage_rows(s, true, least == 1 ? SHARED_BYTES : most_shared(s), least)) return true;
    }
    *s = before;
    return false;
}

/* Index arithmetic over loops first .. in 32 bits where every offset and count fits. */
static const char *choose_integer(const cuda_shape *s, int first) {
    const ml_kernel_ir *ir = s->e->ir;
    int64_t limit = (int64_t)1 << 30, count = 1;
    for (int loop = first; loop < ir->loop_count; loop++) {
        if (ir->size[loop] >= limit / count) return "long long";
        count *= ir->size[loop];
    }
    for (int k = 0; k < ir->operand_count; k++) {
        int64_t reach = 0;
        for (int loop = first; loop < ir->loop_count; loop++) {
            int64_t stride = ir->operand[k].stride[loop];
            reach += (ir->size[loop] - 1) * (stride < 0 ? -stride : stride);
        }
        if (reach >= limit) return "long long";
    }
    return "int";
}

/* Not where registers cannot hold rows whole, or only those of so many threads that a
 * multiprocessor has room for one block alone. */
static bool fits_registers(const cuda_shape *s) {
    for (int i = 0; i < s->e->ir->inst_count; i++)
        if (s->pack[i] == i && is_row_address(s, i) && is_read_again(s, i) && !s->cached[i] &&
            !s->staged[i])
            return false;
    return cuda_threads(s) <= LONG_ROW_THREADS;
}

static void move_to_shared(cuda_shape *s) {
    emitter *e = s->e;
    size_t count = (size_t)e->ir->inst_count;
    bool *cached = s->cached, *buffered = e->buffered;
    double accumulators;
    cuda_column_registers(s, &accumulators);
    if (accumulators > 0) return; /* those stay in registers whatever the rest does */
    s->cached = ML_NEW_ARRAY(e->arena, bool, count + 1);
    e->buffered = ML_NEW_ARRAY(e->arena, bool, count + 1);
    memset(s->invariant, 0, count * sizeof(bool));
    memset(s->hoisted, 0, count * sizeof(bool));
    cuda_find_needs(s);
    if (choose_shared(s)) return;
    s->cached = cached;
    e->buffered = buffered;
}

/* Two packs a thread, both loaded first, so that enough bytes are under way; more where an index
 * has to be loaded before them. */
static void choose_elements(cuda_shape *s) {
    const ml_kernel_ir *ir = s->e->ir;
    s->teams = 1;
    s->packs = 2;
    s->unroll = s->in_registers = true;
    s->team = s->chunked ? CHUNK_THREADS : ELEMENT_THREADS;
    choose_registers(s);
    for (int i = 0; i < ir->inst_count; i++)
        if (s->pack[i] == i && is_row_address(s, i) && !s->cached[i] && !is_cached(s, &ir->inst[i]))
            s->packs = 1;
}

/* How many blocks registers are to leave room for, as shared memory does. */
static void choose_blocks(cuda_shape *s) {
    double accumulators;
    cuda_column_registers(s, &accumulators);
    if (s->instead && s->slots == 0) s->blocks = 1; /* without it ptxas spills, to fit one more */
    if (s->slots == 0 || s->resident < s->packs) return;
    if (cuda_threads(s) > TWO_BLOCKS_THREADS) {
        s->blocks = 1;
        return;
    }
    if (accumulators * s->vec * s->packs <= CUDA_TWO_BLOCKS_SUMS) s->blocks = blocks_together(s);
}

void cuda_choose_shape(cuda_shape *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    size_t count = (size_t)ir->inst_count + 1;
    s->folded = s->folded_pack = s->online = -1;
    s->elementwise = ir->row_loops == ir->loop_count;
    s->chunks = ir->chunks;
    s->chunked = ir->chunks > 0;
    s->tiled = s->chunked && !s->elementwise;
    for (int i = 0; i < ir->inst_count; i++)
        if (ir->inst[i].kind == ML_INST_REDUCE && ir->inst[i].scope != ML_SCOPE_COLUMN)
            s->tiled = false;
    s->pack = ML_NEW_ARRAY(e->arena, int, count);
    s->first_stage = ML_NEW_ARRAY(e->arena, int, count);
    s->cached = ML_NEW_ARRAY(e->arena, bool, count);
    choose_vec(s);
    find_packs(s);
    s->shared = ML_NEW_ARRAY(e->arena, int64_t, count);
    s->staged = ML_NEW_ARRAY(e->arena, bool, count);
    s->next = ML_NEW_ARRAY(e->arena, bool, count);
    s->hit = ML_NEW_ARRAY(e->arena, int, count);
    s->zero = ML_NEW_ARRAY(e->arena, bool, count);
    s->largest = ML_NEW_ARRAY(e->arena, int, count);
    s->invariant = ML_NEW_ARRAY(e->arena, bool, count);
    s->hoisted = ML_NEW_ARRAY(e->arena, bool, count);
    s->integer = choose_integer(s, 0);
    s->column_integer = choose_integer(s, s->elementwise ? e->inner : ir->row_loops);
    cuda_find_hits(s);
    cuda_find_largest(s);
    emit_needs(e);
    if (s->elementwise) {
        choose_elements(s);
        return;
    }
    s->apart = 1;
    if (!choose_apart(s) && !choose_walk(s)) choose_tiles(s);
    s->spread = choose_spread(s);
    cuda_choose_hoisted(s);
    cuda_find_needs(s);
    if (s->unroll && s->in_registers) stage_ahead(s);
    if (s->unroll && !s->chunked) choose_instead(s);
    if (s->unroll) choose_registers(s);
    if (!fits_registers(s)) move_to_shared(s);
    cuda_find_needs(s);
    cuda_choose_folded(s);
    cuda_choose_online(s);
    cuda_choose_kept(s);
    cuda_choose_next(s);
    choose_blocks(s);
}
