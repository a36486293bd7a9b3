/* The collectives of CPU ranks, one function each, in chunks through the members' staging buffers.
 * Each member writes what others need into its own buffer, meets the others, and reads what it
 * needs out of theirs: one copy in and one out, at the speed of memcpy. */
#include <string.h>

#include "runtime/comm/wire_internal.h"

/* All-reduces up to this size are added up by every member alone, which saves a meeting. */
enum { SMALL_BYTES = 16 << 10 };

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static void copy(void *to, const void *from, int64_t bytes) {
    if (bytes > 0 && to != from) memmove(to, from, (size_t)bytes);
}

static comm_slot *slot_of(const ml_group *g, int member) {
    return comm_slot_of(g->comm->segment, g->index, g->ranks[member]);
}

static char *buffer_of(const ml_group *g, int member, uint32_t step) {
    return comm_buffer(g->comm->segment, slot_of(g, member), step);
}

static char *result_of(const ml_group *g, int member, uint32_t step) {
    return comm_result(g->comm->segment, slot_of(g, member), step);
}

/* One collective of one member: `count` as of ml_comm_collect, chunk in elements. */
typedef struct {
    ml_group *g;
    const char *in;
    char *out;
    int64_t count, chunk, width;
    ml_dtype dtype;
    ml_combine combine;
} collective;

static ml_status meet(ml_group *g, bool first) {
    return first ? comm_first_meet(g) : comm_meet(g);
}

/* Elements [at, at + the value) are the next chunk. */
static int64_t part_at(const collective *c, int64_t at) {
    return least(c->chunk, c->count - at);
}

static void put_chunk(const collective *c, int64_t at) {
    copy(buffer_of(c->g, c->g->rank, c->g->step), c->in + at * c->width, part_at(c, at) * c->width);
}

/* ---- All-reduce ------------------------------------------------------------------------------ */

static void sources_at(const collective *c, uint32_t step) {
    for (int i = 0; i < c->g->size; i++) c->g->sources[i] = buffer_of(c->g, i, step);
}

/* Every member adds up everything: for what is small. */
static ml_status all_reduce_alone(const collective *c) {
    ml_group *g = c->g;
    for (int64_t at = 0; at < c->count || at == 0; at += c->chunk) {
        uint32_t step = g->step;
        put_chunk(c, at);
        ML_TRY(meet(g, at == 0));
        sources_at(c, step);
        comm_reduce(c->dtype, c->combine, g->sources, g->size, 0, part_at(c, at),
                    c->out + at * c->width);
    }
    return ML_OK;
}

/* Member i of n adds up the i-th of n slices of a chunk; the result is gathered after the next
 * meeting, which is also the one of the next chunk. */
static void sum_slice(const collective *c, int64_t at, uint32_t step) {
    ml_group *g = c->g;
    int64_t part = part_at(c, at);
    int64_t from = part * g->rank / g->size, to = part * (g->rank + 1) / g->size;
    sources_at(c, step);
    comm_reduce(c->dtype, c->combine, g->sources, g->size, from, to - from,
                result_of(g, g->rank, step));
}

static void gather_slices(const collective *c, int64_t at, uint32_t step) {
    int64_t part = part_at(c, at);
    for (int i = 0; i < c->g->size; i++) {
        int64_t from = part * i / c->g->size, to = part * (i + 1) / c->g->size;
        copy(c->out + (at + from) * c->width, result_of(c->g, i, step), (to - from) * c->width);
    }
}

static ml_status all_reduce(const collective *c) {
    ml_group *g = c->g;
    int64_t at = 0;
    if (c->count * c->width <= SMALL_BYTES) return all_reduce_alone(c);
    for (; at < c->count; at += c->chunk) {
        uint32_t step = g->step;
        put_chunk(c, at);
        ML_TRY(meet(g, at == 0));
        sum_slice(c, at, step);
        if (at > 0) gather_slices(c, at - c->chunk, step - 1);
    }
    uint32_t last = g->step - 1;
    ML_TRY(comm_meet(g));
    gather_slices(c, at - c->chunk, last);
    return ML_OK;
}

/* ---- The others ------------------------------------------------------------------------------ */

/* The result is the operands of members [first, first + members), one after another. */
static ml_status take(const collective *c, int first, int members) {
    ml_group *g = c->g;
    for (int64_t at = 0; at < c->count || at == 0; at += c->chunk) {
        uint32_t step = g->step;
        put_chunk(c, at);
        ML_TRY(meet(g, at == 0));
        for (int i = first; i < first + members; i++)
            copy(c->out + ((i - first) * c->count + at) * c->width,
                 i == g->rank ? c->in + at * c->width : buffer_of(g, i, step),
                 part_at(c, at) * c->width);
    }
    return ML_OK;
}

static ml_status all_gather(const collective *c) {
    return take(c, 0, c->g->size);
}

static ml_status shift(const collective *c) {
    return take(c, (c->g->rank + c->g->size - 1) % c->g->size, 1);
}

static ml_status reverse(const collective *c) {
    return take(c, c->g->size - 1 - c->g->rank, 1);
}

/* The operand is one block for each member. Called after a meeting with the blocks that all members
 * have for this one, part [at, at + part) of each, in sources. */
typedef void block_use(const collective *c, int64_t at, int64_t part);

static ml_status exchange_blocks(const collective *c, int64_t count, block_use *use) {
    ml_group *g = c->g;
    const int64_t width = c->width;
    int64_t chunk = c->chunk / g->size > 0 ? c->chunk / g->size : 1;
    for (int64_t at = 0; at < count || at == 0; at += chunk) {
        int64_t part = least(chunk, count - at);
        uint32_t step = g->step;
        char *buffer = buffer_of(g, g->rank, step);
        for (int i = 0; i < g->size; i++)
            if (i != g->rank)
                copy(buffer + i * part * width, c->in + (i * count + at) * width, part * width);
        ML_TRY(meet(g, at == 0));
        for (int i = 0; i < g->size; i++)
            g->sources[i] = i == g->rank ? c->in + (i * count + at) * width
                                         : buffer_of(g, i, step) + g->rank * part * width;
        use(c, at, part);
    }
    return ML_OK;
}

static void reduce_blocks(const collective *c, int64_t at, int64_t part) {
    comm_reduce(c->dtype, c->combine, c->g->sources, c->g->size, 0, part, c->out + at * c->width);
}

static ml_status reduce_scatter(const collective *c) {
    return exchange_blocks(c, c->count, reduce_blocks);
}

static void copy_blocks(const collective *c, int64_t at, int64_t part) {
    int64_t block = c->count / c->g->size;
    for (int i = 0; i < c->g->size; i++)
        copy(c->out + (i * block + at) * c->width, c->g->sources[i], part * c->width);
}

static ml_status all_to_all(const collective *c) {
    return exchange_blocks(c, c->count / c->g->size, copy_blocks);
}

ml_status ml_comm_collect(ml_group *g, ml_collective kind, const void *in, void *out, int64_t count,
                          ml_dtype dtype, ml_combine combine) {
    static ml_status (*const entries[ML_COLLECTIVE_KINDS])(const collective *) = {
#define ML_COLLECTIVE(ident, name, ...) [ML_COLLECTIVE_##ident] = name,
#include "runtime/graph/collectives.def"
#undef ML_COLLECTIVE
    };
    const ml_comm *comm = g->comm;
    int64_t width = ml_dtypes[dtype].bytes;
    if (count < 0 || !entries[kind])
        return ml_fail(ML_INTERNAL, "%s of %lld elements", ml_collectives[kind].label,
                       (long long)count);
    if (g->size == 1) return copy(out, in, count * width), ML_OK;
    if (comm->wire)
        return ml_fail(ML_INVALID,
                       "ranks on the CPU must be on one host, and rank %d is on another; use "
                       "GPUs, or start all ranks on one host",
                       comm->wire->other_rank);
    if (!ml_collectives[kind].combines) combine = ML_COMBINE_SUM; /* compared with the others' */
    ML_TRY(comm_begin(g, comm_describe(COMM_COLLECTIVES + kind, combine, dtype, count)));
    int64_t chunk = (int64_t)comm->segment->chunk_bytes / width;
    return entries[kind](&(collective){g, in, out, count, chunk, width, dtype, combine});
}
