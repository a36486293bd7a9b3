/* Kernels for CUDA, choices: vector width, and how many threads share a row, a chunk or a tile.
 *
 * Where a kernel sums up, what decides the order of its terms follows from the sizes of rows alone:
 * the vector width, the threads of a row, and where rows give sums of columns the teams, which get
 * the chunks' rows by turns. So a long sum has the same bits whatever shares its kernel, values
 * that are computed again for want of memory among it. */
#include "codegen/emit/cuda_choose.h"
#include "runtime/base/machine.h"

enum {
    MAX_VEC = 8,
    ROW_THREADS = 128,  /* of a block of several small teams */
    SUMS_THREADS = 896, /* where sums of columns leave no room for a second block */
    MAX_ELEMENTS = 32,  /* of a row in one thread, before a row gets more threads */
    /* Kernels without sums or a loop over rows: elements of a row in one thread, if a warp holds
     * the row so; for longer rows, if at most TEAM_THREADS threads hold the row so. */
    WARP_ELEMENTS = 24,
    TEAM_ELEMENTS = 16,
    TEAM_THREADS = 384,
    LONG_COLUMNS = 16384, /* rows of sums that shared memory holds, in narrow floats */
    SUM_BYTES = 32,       /* of a thread's pack of what is summed up */
    ROW_REGISTERS = 80,   /* registers of a thread for elements of its row */
    FEW_ROWS = 256,       /* fewer rows: a thread has one pack, so that there are enough threads */
    MAX_UNROLLED = 16,    /* packs of a thread whose loop is unrolled */
    /* Lanes over adjacent rows (lane_stride): rows side by side, as many elements as one memory
     * transaction moves; warps that share them at most; elements of a thread at least. CHUNK_: in a
     * loop over many rows, where lanes cover a warp of rows. */
    ADJACENT_FEW = 8,
    ADJACENT_WARPS = 16,
    ADJACENT_LEAST = 2,
    CHUNK_ADJACENT_WARPS = 4,
    CHUNK_ADJACENT_LEAST = 16,
    /* A persistent kernel (its blocks loop over rows, without sums of columns) has at least so many
     * threads a row; shorter rows are as fast with a block each ... */
    PERSISTENT_THREADS = 128,
    PERSISTENT_REGISTERS = 48, /* ... and so it is where a row's loads take no more of a thread */
    PERSISTENT_BLOCKS = 8,     /* a multiprocessor: most of them are queued */
    TILE_THREADS = 1536,       /* of a multiprocessor, of tiles */
    COLUMN_BYTES = 40 << 10,   /* of column results, and with other results ... */
    DECLARED_BYTES = 48 << 10, /* ... all that a kernel may declare */
};

/* The widest type in which the kernel sums up; 0: it does not. */
static int summed_bytes(const cuda_schedule *s) {
    const ml_kernel_ir *ir = s->e->ir;
    int most = 0;
    for (int i = 0; i < ir->inst_count; i++)
        if (ir->inst[i].kind == ML_INST_REDUCE && ir->inst[i].op == ML_OP_SUM &&
            ml_dtypes[ml_compute_dtype(ir->inst[i].dtype)].bytes > most)
            most = ml_dtypes[ml_compute_dtype(ir->inst[i].dtype)].bytes;
    return most;
}

/* The largest pack that the innermost size and most of the contiguous accesses allow, of at most
 * 16 bytes, so that neighbouring threads touch neighbouring bytes; in rows of mostly bf16, of 16
 * bytes of that. Accesses that do not allow it are moved element by element. */
void cuda_choose_vector(cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    int most = 0;
    s->vec = 1;
    for (int vec = 2; vec <= MAX_VEC && ir->size[e->inner] % vec == 0; vec *= 2) {
        int count = 0, widest = 1, streams[9] = {0}; /* by bytes of an element */
        for (int i = 0; i < ir->inst_count; i++) {
            if (!cuda_is_contiguous(s, i) || !cuda_allows(s, i, vec)) continue;
            const ml_operand *operand = &ir->operand[ir->inst[i].operand];
            int bytes = ml_dtypes[operand->dtype].bytes;
            count++;
            if (cuda_hits_cache(s, &ir->inst[i])) continue;
            streams[bytes]++;
            if (bytes > widest) widest = bytes;
        }
        bool narrow = !s->elementwise && widest == 4 && streams[2] >= 2 * streams[4];
        if (count == 0 || count < most || vec * widest > (narrow ? 32 : 16)) continue;
        s->vec = vec;
        most = count;
    }
    int bytes = summed_bytes(s);
    if (s->vec == 1 || bytes == 0) return;
    for (s->vec = 2; s->vec < MAX_VEC && 2 * s->vec * bytes <= SUM_BYTES;) {
        if (ir->size[e->inner] % (2 * s->vec) != 0) break;
        s->vec *= 2;
    }
}

/* Loads of the same elements share a pack. */
void cuda_find_packs(cuda_schedule *s) {
    emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    for (int i = 0; i < ir->inst_count; i++) {
        const ml_inst *inst = &ir->inst[i];
        s->pack[i] = -1;
        if (inst->kind != ML_INST_LOAD || !cuda_is_contiguous(s, i) || !cuda_allows(s, i, s->vec))
            continue;
        s->pack[i] = i;
        s->first_phase[i] = e->phase[i];
        for (int j = 0; j < i; j++) {
            const ml_inst *other = &ir->inst[j];
            if (s->pack[j] == j && other->operand == inst->operand && other->index == inst->index &&
                other->guard == inst->guard)
                s->pack[i] = j;
        }
        int first = s->pack[i];
        if (e->phase[i] < s->first_phase[first]) s->first_phase[first] = e->phase[i];
    }
}

static int round_up_power(int64_t n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

int cuda_at_most(int64_t n, int most) {
    return n < most ? (int)n : most;
}

/* Threads of a row of more than a warp's worth of packs: of all numbers of packs a thread may have,
 * the one that leaves the fewest lanes without work, where each warp counts as much as `warp` lanes
 * of 32: others wait for it; of equals the most packs. */
int cuda_choose_lanes(int64_t packs, int64_t most, int warp) {
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

/* Packs of a thread at most where registers hold `held`. Kernels without a loop over rows get so
 * many warps a row that these hide each other's waiting for memory and for their team. */
static int64_t most_packs(const cuda_schedule *s, int64_t packs, int64_t held) {
    int64_t few = TEAM_ELEMENTS / s->vec, least = (packs + TEAM_THREADS - 1) / TEAM_THREADS;
    if (few < least) few = least;
    if (s->e->columns <= WARP_ELEMENTS * CUDA_WARP) few = WARP_ELEMENTS / s->vec;
    return s->chunked || few > held ? held : few;
}

static int64_t processors_of(const cuda_schedule *s) {
    return s->e->target.multiprocessors > 0 ? s->e->target.multiprocessors
                                            : ml_machine_planned.multiprocessors;
}

/* Threads of a row of so many packs where the kernel sums up: a pack each, as sums of columns take
 * registers, and more packs where that takes fewer warps. */
int cuda_summing_threads(const cuda_schedule *s, int64_t packs) {
    if (summed_bytes(s) == 0) return 0;
    if (packs <= CUDA_WARP) return round_up_power(packs);
    if (s->e->columns <= LONG_COLUMNS)
        return cuda_choose_lanes(packs, (packs + TEAM_THREADS - 1) / TEAM_THREADS, 2);
    int threads = 2 * s->e->columns <= CUDA_SHARED_BYTES ? CUDA_LONG_ROW_THREADS : CUDA_MAX_THREADS;
    return cuda_choose_lanes(packs, (packs + threads - 1) / threads, 0);
}

void cuda_choose_team(cuda_schedule *s) {
    int64_t packs = (s->e->columns + s->vec - 1) / s->vec;
    const int summing = cuda_summing_threads(s, packs);
    int64_t rows = s->chunked ? s->e->rows / s->chunks + 1 : s->e->rows;
    double accumulators, each = cuda_column_registers(s, &accumulators);
    double elements = each > 0 ? ROW_REGISTERS / each : MAX_ELEMENTS;
    if (elements > MAX_ELEMENTS) elements = MAX_ELEMENTS;
    if (!s->chunked && rows < FEW_ROWS) elements = s->vec; /* threads are what lacks */
    /* room for rows ahead, and for two blocks */
    if (s->chunked && (accumulators > 0 || s->e->phases > 1)) elements = s->vec;
    if (s->tiled || packs <= CUDA_WARP)
        s->team = round_up_power(cuda_at_most(packs, CUDA_WARP));
    else if (summing > 0)
        s->team = summing;
    else
        s->team = cuda_choose_lanes(packs, most_packs(s, packs, (int64_t)elements / s->vec), 2);
    s->packs = s->tiled ? 1 : (int)((packs + s->team - 1) / s->team);
    s->unroll = s->packs <= MAX_UNROLLED;
    int threads = !s->chunked ? ROW_THREADS : accumulators > 0 ? SUMS_THREADS : CUDA_CHUNK_THREADS;
    int whole = summing > 0 ? summing : s->team; /* of a row that no tiles cut */
    s->teams = whole < threads ? threads / whole : 1;
    /* Threads that meet at a barrier by its team's number take all 16 of a block, and a
     * multiprocessor has 64. */
    if (whole > CUDA_WARP) s->teams = s->chunked ? cuda_at_most(s->teams, 15) : 1;
    /* by whole warps, as a block's threads add up what they have of all rows */
    while (s->teams > 1 && s->teams / 2 >= rows && whole * (s->teams / 2) % CUDA_WARP == 0)
        s->teams /= 2;
    s->in_registers = s->unroll && accumulators * s->vec * s->packs <= 64;
    if (!s->in_registers && accumulators > 0) s->teams = 1; /* one owner for each column */
    while (cuda_column_bytes(s) > COLUMN_BYTES ||
           (s->teams > 1 && cuda_column_bytes(s) + cuda_results_bytes(s) > DECLARED_BYTES))
        s->teams /= 2;
}

/* Where rows give sums of columns any block may have any row: blocks get them by turns, as many as
 * they have teams, and what all read at a time is contiguous. */
bool cuda_choose_spread(const cuda_schedule *s) {
    double accumulators;
    cuda_column_registers(s, &accumulators);
    return s->chunked && accumulators > 0;
}

/* Blocks of one multiprocessor. Tiles' work on a row is short. */
int cuda_blocks_together(const cuda_schedule *s) {
    return s->tiled ? TILE_THREADS / cuda_threads(s) : 2;
}

static bool writes_elements(const cuda_schedule *s) {
    const emitter *e = s->e;
    for (int i = 0; i < e->ir->inst_count; i++)
        if (e->ir->inst[i].kind == ML_INST_STORE && e->loop[i] == e->inner) return true;
    return false;
}

/* Rows whose columns are strided in memory while adjacent rows are contiguous: where chunks' sums
 * are added up, say. A warp's lanes are mapped across adjacent rows then, so that its loads are
 * coalesced: 32 rows where there are many, few where threads are what lacks. */
bool cuda_choose_adjacent_rows(cuda_schedule *s) {
    const emitter *e = s->e;
    const ml_kernel_ir *ir = e->ir;
    int beside = ir->row_loops - 1, found = 0;
    bool fits = s->vec == 1 && !s->tiled && e->columns >= CUDA_WARP && beside >= 0 &&
                ir->size[beside] >= ADJACENT_FEW;
    for (int i = 0; i < ir->inst_count && fits; i++) {
        const ml_inst *inst = &ir->inst[i];
        const int64_t *stride = ir->operand[inst->operand].stride;
        bool argmax = inst->kind == ML_INST_REDUCE && inst->op == ML_OP_ARGMAX;
        if (argmax || cuda_is_column(s, inst)) fits = false;
        if (inst->kind != ML_INST_LOAD || e->loop[i] != e->inner) continue;
        if (cuda_hits_cache(s, inst) && stride[e->inner] == 0) continue;
        fits = fits && stride[beside] == 1 && stride[e->inner] != 1;
        found++;
    }
    if (!fits || found == 0) return false;
    bool many = s->chunked && e->rows / s->chunks >= ADJACENT_FEW * 2;
    int64_t least = many ? CHUNK_ADJACENT_LEAST : ADJACENT_LEAST;
    s->lane_stride = many ? CUDA_WARP : ADJACENT_FEW;
    s->team = CUDA_WARP / s->lane_stride;
    for (s->warps = 1; !writes_elements(s) &&
                       s->warps < (many ? CHUNK_ADJACENT_WARPS : ADJACENT_WARPS) &&
                       e->columns >= 2 * s->team * least;) {
        s->warps *= 2;
        s->team *= 2;
    }
    s->teams = s->lane_stride;
    while (cuda_threads(s) < ROW_THREADS) s->teams *= 2;
    s->packs = (int)((e->columns + s->team - 1) / s->team);
    s->unroll = s->packs <= MAX_UNROLLED;
    s->in_registers = true;
    return true;
}

/* Rows of several passes that do not fit in registers get a persistent kernel, whose blocks loop
 * over rows, although rows are independent: the next row's loads overlap the present one's work.
 * There are more blocks than run at once, since multiprocessors differ in memory bandwidth. */
bool cuda_choose_persistent(cuda_schedule *s) {
    double accumulators;
    if (s->chunked || s->e->phases < 3) return false;
    if (cuda_column_registers(s, &accumulators) * MAX_ELEMENTS <= PERSISTENT_REGISTERS)
        return false;
    s->chunked = true;
    for (int blocks = PERSISTENT_BLOCKS; blocks > 1; blocks /= 2) {
        s->chunks = blocks * processors_of(s);
        cuda_choose_team(s);
        if (cuda_rows_follow(s) && s->unroll && s->team >= PERSISTENT_THREADS) return true;
    }
    s->chunked = false;
    s->chunks = 0;
    return false;
}
