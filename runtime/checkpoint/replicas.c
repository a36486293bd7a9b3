/* Whether ranks that hold the same part of a state hold the same bits: a fault of memory or of a
 * kernel shows there long before the loss does. */
#include <stdio.h>
#include <string.h>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/parts.h"
#include "runtime/io/tensor_hash.h"

enum { WORDS = 3 }; /* of a rank and a state: halves of the hash, whether it holds it */

typedef struct {
    ml_session *session;
    ml_arena *arena;
    const ml_checkpoint_entry *states;
    int count, world;
    int64_t *words; /* [world][count][WORDS] */
} check;

typedef struct {
    const char *memory;
    int width;
    uint64_t hash;
} hash_call;

static ml_status run_hash(void *context, int64_t whole, int64_t part, int64_t bytes) {
    hash_call *call = context;
    call->hash +=
        ml_tensor_hash(call->memory + part, call->width, whole / call->width, bytes / call->width);
    return ML_OK;
}

static ml_status own_hash(check *c, int i) {
    ml_session *session = c->session;
    const session_state *held = &session->states[c->states[i].state];
    checkpoint_box box;
    ML_TRY(checkpoint_box_of(session, c->states[i].state, false, &box));
    if (checkpoint_box_bytes(&box) == 0 || held->memory == NULL || !held->initialized) return ML_OK;
    char *memory = ml_alloc((size_t)held->bytes + 1);
    if (memory == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while comparing replicas");
    hash_call call = {memory, box.width, 0};
    ml_device *device = session->device;
    ml_status status = device->ops->download(device, memory, held->memory, held->bytes);
    if (status == ML_OK) status = checkpoint_runs(&box, run_hash, &call);
    ml_free(memory);
    int64_t *words = &c->words[((int64_t)session->ranks.rank * c->count + i) * WORDS];
    words[0] = (int64_t)(call.hash & UINT32_MAX);
    words[1] = (int64_t)(call.hash >> 32);
    words[2] = 1;
    return status;
}

/* Whether two ranks hold the same part. Copies on several stages of a pipeline are not compared. */
static bool same_part(const check *c, const ml_placements *places, int a, int b) {
    const ml_layout *layout = c->session->ranks.layout;
    for (int i = 0; i < layout->count; i++) {
        bool matters = places->over[i].kind == ML_SPLIT ||
                       (layout->stages.on && i == layout->stages.mesh_axis);
        if (matters && ml_layout_coordinate(layout, a, i) != ml_layout_coordinate(layout, b, i))
            return false;
    }
    return true;
}

static const int64_t *words_of(const check *c, int rank, int i) {
    return &c->words[((int64_t)rank * c->count + i) * WORDS];
}

/* How many of the ranks that hold the same part have the same bits, and how many hold it. */
static void votes(const check *c, const ml_placements *places, int rank, int i, int *same,
                  int *all) {
    const int64_t *own = words_of(c, rank, i);
    *same = *all = 0;
    for (int r = 0; r < c->world; r++) {
        const int64_t *other = words_of(c, r, i);
        if (!other[2] || !same_part(c, places, rank, r)) continue;
        ++*all;
        *same += memcmp(own, other, 2 * sizeof *own) == 0;
    }
}

static ml_status compare(const check *c, bool *differs, char *what, size_t room) {
    size_t at = 0;
    int more = 0;
    for (int i = 0; i < c->count; i++) {
        ml_type local;
        ml_placements places;
        ML_TRY(session_place(c->session, c->states[i].state, &local, &places));
        for (int rank = 0; rank < c->world; rank++) {
            int same, all;
            if (!words_of(c, rank, i)[2]) continue;
            votes(c, &places, rank, i, &same, &all);
            if (same == all || (2 * same > all)) continue;
            *differs = true;
            if (at + 128 + strlen(c->states[i].name) > room) {
                more++;
                continue;
            }
            const char *form = 2 * same == all ? "%srank %d or its replica (state \"%s\")"
                                               : "%srank %d (state \"%s\")";
            at += (size_t)snprintf(what + at, room - at, form, at ? ", " : "", rank,
                                   c->states[i].name);
        }
    }
    if (more > 0) snprintf(what + at, room - at, " and %d more", more);
    return ML_OK;
}

static void words_new(void *context) {
    check *c = context;
    c->words = ML_NEW_ARRAY(c->arena, int64_t, (int64_t)c->world * c->count * WORDS + 1);
}

static ml_status check_run(check *c, bool *differs, char what[1024]) {
    ml_session *session = c->session;
    ML_TRY(ml_checkpoint_states(session, c->arena, &c->states, &c->count));
    ML_TRY(ml_protect(words_new, c));
    ML_TRY(program_settle_others(session, NULL));
    ML_TRY(session_grow(session));
    ml_status status = ML_OK;
    for (int i = 0; i < c->count && status == ML_OK; i++) {
        status = session_assign_state(session, c->states[i].state);
        if (status == ML_OK) status = own_hash(c, i);
    }
    ML_TRY(checkpoint_together(session, status, "compare its states"));
    ML_TRY(checkpoint_sum(session, c->words, (int64_t)c->world * c->count * WORDS));
    return compare(c, differs, what, 1024);
}

ml_status ml_replicas_check(ml_session *session, bool *differs, char what[1024]) {
    *differs = false;
    what[0] = 0;
    if (session->everyone == NULL || session->device == NULL) return ML_OK;
    check c = {.session = session, .world = ml_comm_world(session->comm)};
    c.arena = ml_arena_new();
    if (c.arena == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while comparing replicas");
    ml_status status = check_run(&c, differs, what);
    ml_arena_free(c.arena);
    return status;
}
