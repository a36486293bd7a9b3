#include "runtime/checkpoint/parts.h"

#include <string.h>

enum { PIECE = 4 << 20, SHARED_FROM = 1 << 16 }; /* bytes: of a piece; that replicas share */

typedef struct {
    const ml_session *session;
    const ml_type *global;
    const ml_placements *places;
    checkpoint_box *box;
} range_call;

static void range_body(void *context) {
    const range_call *call = context;
    ml_shard_range(call->session->ranks.layout, call->global, call->places,
                   call->session->ranks.rank, call->box->first, call->box->held);
}

static void box_clear(checkpoint_box *box) {
    box->held[0] = 0;
}

int64_t checkpoint_box_bytes(const checkpoint_box *box) {
    int64_t bytes = box->width;
    for (int i = 0; i < (box->rank > 0 ? box->rank : 1); i++) bytes *= box->held[i];
    return bytes;
}

int64_t checkpoint_row_bytes(const checkpoint_box *box) {
    int64_t bytes = box->width;
    for (int i = 1; i < box->rank; i++) bytes *= box->local[i];
    return bytes;
}

fill_box checkpoint_box_whole(const checkpoint_box *box) {
    fill_box from = {0};
    int64_t s = 1, d = 1;
    if (checkpoint_box_bytes(box) == 0) return (fill_box){.rank = 1};
    for (int i = box->rank - 1; i >= 0; i--) {
        fill_box_add(&from, box->held[i], s, d);
        from.source += box->first[i] * s;
        s *= box->size[i];
        d *= box->local[i];
    }
    fill_box_join(&from);
    return from;
}

checkpoint_box checkpoint_box_rows(const checkpoint_box *box, int64_t begin, int64_t end) {
    checkpoint_box rows = *box;
    rows.row += begin;
    rows.first[0] += begin;
    rows.held[0] = end - begin;
    return rows;
}

/* The ranks that hold the same box share its rows, or take turns with small ones. */
static void box_share(const ml_session *session, uint32_t state, const ml_placements *places,
                      checkpoint_box *box) {
    const ml_layout *layout = session->ranks.layout;
    int64_t replicas = 1, own = 0;
    if (layout == NULL) return;
    for (int i = 0; i < layout->count; i++) {
        if (places->over[i].kind == ML_SPLIT) continue;
        if (layout->stages.on && i == layout->stages.mesh_axis) continue;
        replicas *= layout->axis[i].size;
        own = own * layout->axis[i].size + ml_layout_coordinate(layout, session->ranks.rank, i);
    }
    const int64_t rows = box->held[0];
    if (checkpoint_box_bytes(box) < SHARED_FROM || box->rank == 0) {
        if (own != state % replicas) box_clear(box);
    } else {
        *box = checkpoint_box_rows(box, rows * own / replicas, rows * (own + 1) / replicas);
    }
}

ml_status checkpoint_box_of(const ml_session *session, uint32_t state, bool owned,
                            checkpoint_box *box) {
    const ml_type *global = &ml_graph_state(session->graph, state)->type;
    ml_type local;
    ml_placements places;
    ML_TRY(session_place(session, state, &local, &places));
    *box = (checkpoint_box){.rank = global->rank, .width = ml_dtypes[global->dtype].bytes};
    box->size[0] = box->local[0] = box->held[0] = 1;
    for (int i = 0; i < global->rank; i++) {
        box->size[i] = box->held[i] = global->size[i];
        box->local[i] = local.size[i];
    }
    if (session->ranks.layout != NULL && global->rank > 0) {
        range_call call = {session, global, &places, box};
        ML_TRY(ml_protect(range_body, &call));
    }
    if (!(owned ? session_home(session, state) : session_holds(session, state)))
        box_clear(box);
    else if (owned)
        box_share(session, state, &places, box);
    return ML_OK;
}

ml_status checkpoint_runs(const checkpoint_box *box, checkpoint_run *run, void *context) {
    const int axes = box->rank > 0 ? box->rank : 1;
    int inner = axes - 1; /* a run is of this axis, and all of those within */
    while (inner > 0 && box->held[inner] == box->size[inner] &&
           box->held[inner] == box->local[inner])
        inner--;
    int64_t whole = 0, part = 0, step = box->width, stride = box->width, bytes = box->width;
    int64_t steps[ML_MAX_AXES], strides[ML_MAX_AXES], at[ML_MAX_AXES] = {0}, count = 1;
    for (int i = axes - 1; i >= 0; i--) {
        steps[i] = step;
        strides[i] = stride;
        whole += box->first[i] * step;
        step *= box->size[i];
        stride *= box->local[i];
        if (i >= inner)
            bytes *= box->held[i];
        else
            count *= box->held[i];
    }
    if (bytes == 0) return ML_OK;
    for (int64_t n = 0; n < count; n++) {
        int64_t to = whole, from = part;
        for (int i = 0; i < inner; i++) {
            to += at[i] * steps[i];
            from += at[i] * strides[i];
        }
        ML_TRY(run(context, to, from, bytes));
        for (int i = inner - 1; i >= 0 && ++at[i] == box->held[i]; i--) at[i] = 0;
    }
    return ML_OK;
}

int64_t checkpoint_pieces(const checkpoint_box *box, int item, checkpoint_piece *pieces) {
    if (checkpoint_box_bytes(box) == 0) return 0;
    const int64_t row = checkpoint_box_bytes(box) / box->held[0];
    const int64_t rows = row < PIECE ? PIECE / row : 1;
    int64_t count = 0;
    for (int64_t at = 0; at < box->held[0]; at += rows, count++) {
        int64_t end = at + rows < box->held[0] ? at + rows : box->held[0];
        if (pieces != NULL) pieces[count] = (checkpoint_piece){item, at, end};
    }
    return count;
}

ml_status checkpoint_together(const ml_session *session, ml_status status, const char *what) {
    if (session->everyone == NULL) return status;
    /* the lowest rank that failed, and how; the error of this rank's own stays */
    enum { STATUSES = 256 };
    int64_t failed =
        status == ML_OK ? INT64_MAX : (int64_t)session->ranks.rank * STATUSES + (int)status;
    ml_error own = *ml_error_last();
    ML_TRY(ml_comm_least(session->comm, &failed));
    if (status != ML_OK) *ml_error_last() = own;
    if (status != ML_OK || failed == INT64_MAX) return status;
    return ml_fail((ml_status)(failed % STATUSES), "rank %lld could not %s",
                   (long long)(failed / STATUSES), what);
}

ml_status checkpoint_prepare(ml_session *session, const uint32_t *states, int count) {
    if (session->device == NULL) return ml_fail(ML_INTERNAL, "the session has no device yet");
    ML_TRY(program_settle_others(session, NULL));
    ML_TRY(session_grow(session));
    for (int i = 0; i < count; i++) ML_TRY(session_assign_state(session, states[i]));
    return ML_OK;
}

ml_status checkpoint_sum(ml_session *session, int64_t *values, int64_t count) {
    const ml_layout *layout = session->ranks.layout;
    if (session->everyone == NULL || layout == NULL) return ML_OK;
    ML_TRY(session_connect(session));
    for (int i = 0; i < layout->count; i++)
        if (layout->axis[i].size > 1)
            ML_TRY(session_collect(session, i, ML_COLLECTIVE_ALL_REDUCE, values, values, count,
                                   ML_I64));
    return ML_OK;
}
