/* The collectives, in chunks through the members' staging buffers. Each member writes what others
 * need into its own buffer, meets the others, and reads what it needs out of theirs: one copy in
 * and one out, at the speed of memcpy. */
#include <string.h>

#include "runtime/comm/wire.h"

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

static ml_status meet(ml_group *g, bool first) {
    return first ? comm_first_meet(g) : comm_meet(g);
}

static ml_status start(ml_group *g, comm_kind kind, ml_reduce_op op, ml_dtype dtype,
                       int64_t count) {
    if (count < 0) return ml_fail(ML_INTERNAL, "a collective of %lld elements", (long long)count);
    if (g->comm->wire && g->size > 1)
        return ml_fail(ML_INVALID,
                       "ranks on the CPU must be on one host, and rank %d is on another; use "
                       "GPUs, or start all ranks on one host",
                       g->comm->wire->other_rank);
    return comm_begin(g, comm_describe(kind, op, dtype, count));
}

/* ---- All-reduce -------------------------------------------------------------------------------
 */

/* Every member adds up everything: for what is small. */
static ml_status all_reduce_alone(ml_group *g, const char *in, char *out, int64_t count,
                                  ml_dtype dtype, ml_reduce_op op) {
    int64_t width = ml_dtypes[dtype].bytes;
    int64_t chunk = (int64_t)g->comm->segment->chunk_bytes / width;
    for (int64_t at = 0; at < count || at == 0; at += chunk) {
        int64_t part = least(chunk, count - at);
        uint32_t step = g->step;
        copy(buffer_of(g, g->rank, step), in + at * width, part * width);
        ml_status status = meet(g, at == 0);
        if (status != ML_OK) return status;
        for (int i = 0; i < g->size; i++) g->sources[i] = buffer_of(g, i, step);
        comm_reduce(dtype, op, g->sources, g->size, 0, part, out + at * width);
    }
    return ML_OK;
}

/* Member i of n adds up the i-th of n slices of a chunk; the result is gathered after the next
 * meeting, which is also the one of the next chunk. */
typedef struct {
    int64_t count, chunk, width;
    ml_dtype dtype;
    ml_reduce_op op;
} sum_shape;

static void sum_slice(ml_group *g, const sum_shape *s, int64_t at, uint32_t step) {
    int64_t part = least(s->chunk, s->count - at);
    int64_t from = part * g->rank / g->size, to = part * (g->rank + 1) / g->size;
    for (int i = 0; i < g->size; i++) g->sources[i] = buffer_of(g, i, step);
    comm_reduce(s->dtype, s->op, g->sources, g->size, from, to - from, result_of(g, g->rank, step));
}

static void gather_slices(ml_group *g, const sum_shape *s, int64_t at, uint32_t step, char *out) {
    int64_t part = least(s->chunk, s->count - at);
    for (int i = 0; i < g->size; i++) {
        int64_t from = part * i / g->size, to = part * (i + 1) / g->size;
        copy(out + (at + from) * s->width, result_of(g, i, step), (to - from) * s->width);
    }
}

static ml_status all_reduce_slices(ml_group *g, const sum_shape *s, const char *in, char *out) {
    ml_status status;
    int64_t at = 0;
    for (; at < s->count; at += s->chunk) {
        uint32_t step = g->step;
        copy(buffer_of(g, g->rank, step), in + at * s->width,
             least(s->chunk, s->count - at) * s->width);
        if ((status = meet(g, at == 0)) != ML_OK) return status;
        sum_slice(g, s, at, step);
        if (at > 0) gather_slices(g, s, at - s->chunk, step - 1, out);
    }
    uint32_t last = g->step - 1;
    if ((status = comm_meet(g)) != ML_OK) return status;
    gather_slices(g, s, at - s->chunk, last, out);
    return ML_OK;
}

ml_status ml_comm_all_reduce(ml_group *g, const void *in, void *out, int64_t count, ml_dtype dtype,
                             ml_reduce_op op) {
    int64_t width = ml_dtypes[dtype].bytes;
    if (g->size == 1) return copy(out, in, count * width), ML_OK;
    ml_status status = start(g, COMM_ALL_REDUCE, op, dtype, count);
    if (status != ML_OK) return status;
    if (count * width <= SMALL_BYTES) return all_reduce_alone(g, in, out, count, dtype, op);
    sum_shape shape = {count, (int64_t)g->comm->segment->chunk_bytes / width, width, dtype, op};
    return all_reduce_slices(g, &shape, in, out);
}

/* ---- The others -------------------------------------------------------------------------------
 */

/* out is what the members [first, first + members) have, one behind the other. */
static ml_status take(ml_group *g, comm_kind kind, int first, int members, const void *in,
                      void *out, int64_t count, ml_dtype dtype) {
    int64_t bytes = count * ml_dtypes[dtype].bytes;
    if (g->size == 1) return copy(out, in, bytes), ML_OK;
    ml_status status = start(g, kind, 0, dtype, count);
    if (status != ML_OK) return status;
    int64_t chunk = (int64_t)g->comm->segment->chunk_bytes;
    for (int64_t at = 0; at < bytes || at == 0; at += chunk) {
        int64_t part = least(chunk, bytes - at);
        uint32_t step = g->step;
        copy(buffer_of(g, g->rank, step), (const char *)in + at, part);
        if ((status = meet(g, at == 0)) != ML_OK) return status;
        for (int i = first; i < first + members; i++)
            copy((char *)out + (i - first) * bytes + at,
                 i == g->rank ? (const char *)in + at : buffer_of(g, i, step), part);
    }
    return ML_OK;
}

ml_status ml_comm_all_gather(ml_group *g, const void *in, void *out, int64_t count,
                             ml_dtype dtype) {
    return take(g, COMM_ALL_GATHER, 0, g->size, in, out, count, dtype);
}

/* Elements of each member's block that go into one chunk. */
static int64_t block_part(const ml_group *g, int64_t width) {
    int64_t part = (int64_t)g->comm->segment->chunk_bytes / (width * g->size);
    return part > 0 ? part : 1;
}

/* Fill this member's buffer with part [at, at + part) of the block for each other member. */
static void stage_blocks(ml_group *g, const char *in, int64_t count, int64_t at, int64_t part,
                         int64_t width) {
    char *buffer = buffer_of(g, g->rank, g->step);
    for (int i = 0; i < g->size; i++)
        if (i != g->rank)
            copy(buffer + i * part * width, in + (i * count + at) * width, part * width);
}

ml_status ml_comm_reduce_scatter(ml_group *g, const void *in, void *out, int64_t count,
                                 ml_dtype dtype, ml_reduce_op op) {
    int64_t width = ml_dtypes[dtype].bytes;
    if (g->size == 1) return copy(out, in, count * width), ML_OK;
    ml_status status = start(g, COMM_REDUCE_SCATTER, op, dtype, count);
    if (status != ML_OK) return status;
    int64_t chunk = block_part(g, width);
    for (int64_t at = 0; at < count || at == 0; at += chunk) {
        int64_t part = least(chunk, count - at);
        uint32_t step = g->step;
        stage_blocks(g, in, count, at, part, width);
        if ((status = meet(g, at == 0)) != ML_OK) return status;
        for (int i = 0; i < g->size; i++)
            g->sources[i] = i == g->rank ? (const char *)in + (i * count + at) * width
                                         : buffer_of(g, i, step) + g->rank * part * width;
        comm_reduce(dtype, op, g->sources, g->size, 0, part, (char *)out + at * width);
    }
    return ML_OK;
}

ml_status ml_comm_all_to_all(ml_group *g, const void *in, void *out, int64_t count,
                             ml_dtype dtype) {
    int64_t width = ml_dtypes[dtype].bytes;
    if (g->size == 1) return copy(out, in, count * width), ML_OK;
    ml_status status = start(g, COMM_ALL_TO_ALL, 0, dtype, count);
    if (status != ML_OK) return status;
    int64_t chunk = block_part(g, width);
    for (int64_t at = 0; at < count || at == 0; at += chunk) {
        int64_t part = least(chunk, count - at);
        uint32_t step = g->step;
        stage_blocks(g, in, count, at, part, width);
        if ((status = meet(g, at == 0)) != ML_OK) return status;
        for (int i = 0; i < g->size; i++)
            copy((char *)out + (i * count + at) * width,
                 i == g->rank ? (const char *)in + (i * count + at) * width
                              : buffer_of(g, i, step) + g->rank * part * width,
                 part * width);
    }
    return ML_OK;
}

ml_status ml_comm_shift(ml_group *g, const void *in, void *out, int64_t count, ml_dtype dtype) {
    return take(g, COMM_SHIFT, (g->rank + g->size - 1) % g->size, 1, in, out, count, dtype);
}

ml_status ml_comm_mirror(ml_group *g, const void *in, void *out, int64_t count, ml_dtype dtype) {
    return take(g, COMM_MIRROR, g->size - 1 - g->rank, 1, in, out, count, dtype);
}
