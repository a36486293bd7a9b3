/* States under pipeline stages: which rank keeps them, and bringing them to all ranks. */
#include <string.h>

#include "runtime/exec/session.h"

static bool pipelined(const ml_session *session) {
    return session->everyone != NULL && session->layout.stages.on;
}

static int coordinate(const ml_session *session) {
    return (int)ml_layout_coordinate(&session->layout, session->ranks.rank,
                                     session->layout.stages.mesh_axis);
}

static const struct ml_holder *holders(const ml_session *session, uint32_t state) {
    return state < session->stages.state_count ? session->stages.holders[state] : NULL;
}

bool session_holds(const ml_session *session, uint32_t state) {
    if (!pipelined(session) || session->stages.count == 0) return true;
    int ranks = (int)session->layout.axis[session->layout.stages.mesh_axis].size;
    for (const struct ml_holder *h = holders(session, state); h != NULL; h = h->next) {
        if (h->stage % ranks == coordinate(session)) return true;
    }
    return false;
}

bool session_home(const ml_session *session, uint32_t state) {
    if (!pipelined(session)) return true;
    int ranks = (int)session->layout.axis[session->layout.stages.mesh_axis].size;
    const struct ml_holder *home = holders(session, state);
    if (session->stages.count == 0) return coordinate(session) == 0;
    return home != NULL && home->stage % ranks == coordinate(session);
}

bool session_elsewhere(const ml_session *session, uint32_t state) {
    return holders(session, state) != NULL && !session_holds(session, state);
}

void session_release(ml_session *session) {
    ml_device *device = session->device;
    for (uint32_t id = 0; id < session->state_count; id++) {
        session_state *state = &session->states[id];
        if (state->memory == NULL || !session_elsewhere(session, id)) continue;
        device->ops->release(device, state->memory);
        session->state_bytes -= state->bytes;
        *state = (session_state){0};
    }
}

typedef struct {
    ml_session *session;
    uint32_t state;
} assign_call;

static void assign_body(void *context) {
    assign_call *call = context;
    ml_session *session = call->session;
    staged_programs.assign_state(session->graph, &session->layout, &session->stages, call->state);
}

ml_status session_assign_state(ml_session *session, uint32_t state) {
    if (!pipelined(session) || session->stages.count == 0) return ML_OK;
    if (holders(session, state) != NULL) return ML_OK;
    assign_call call = {session, state};
    return ml_protect(assign_body, &call);
}

/* What one rank has and the others are zero in, as sums of its words; parts of a sum as such. */
ml_status session_spread(const ml_session *session, uint32_t state, void *part, int64_t bytes) {
    if (!pipelined(session)) return ML_OK;
    int axis = session->layout.stages.mesh_axis;
    const ml_state *info = ml_graph_state(session->graph, state);
    if (info->kind == ML_STATE_GRADIENT) {
        int64_t count = bytes / ml_dtypes[info->type.dtype].bytes;
        return session_collect(session, axis, ML_COLLECTIVE_ALL_REDUCE, part, part, count,
                               (ml_dtype)info->type.dtype);
    }
    int64_t words = bytes / (int64_t)sizeof(int32_t), rest = bytes % (int64_t)sizeof(int32_t);
    ml_status status =
        session_collect(session, axis, ML_COLLECTIVE_ALL_REDUCE, part, part, words, ML_I32);
    int32_t tail = 0;
    if (status != ML_OK || rest == 0) return status;
    char *last = (char *)part + words * (int64_t)sizeof tail;
    memcpy(&tail, last, (size_t)rest);
    status = session_collect(session, axis, ML_COLLECTIVE_ALL_REDUCE, &tail, &tail, 1, ML_I32);
    memcpy(last, &tail, (size_t)rest);
    return status;
}
