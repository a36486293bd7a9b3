/* The parameter cache of a program (param_cache.c) is rebuilt before a run where another
 * program, or the script, has set a parameter since the last one. */
#include "runtime/exec/session.h"

/* Programs share cached states: one that has been computed since its parameters were set last is
 * not computed again, whichever program did it. */
static bool cache_is_stale(const ml_program *program) {
    const session_state *states = program->session->states;
    const ml_plan *plan = program->plan;
    const ml_roots *cached = &plan->rebuild->roots;
    uint64_t built_at = UINT64_MAX, set_at = 1; /* a state that was never computed has 0 */
    for (int i = 0; i < cached->update_count; i++) {
        const session_state *state = &states[cached->updates[i].state];
        if (state->set_at < built_at) built_at = state->set_at;
    }
    for (int i = 0; i < plan->cache_source_count; i++) {
        const session_state *state = &states[plan->cache_sources[i]];
        if (state->set_at > set_at) set_at = state->set_at;
    }
    return built_at < set_at;
}

static void states_set(ml_session *session, const ml_roots *roots) {
    for (int i = 0; i < roots->update_count; i++)
        session->states[roots->updates[i].state].set_at = session->clock;
}

ml_status program_rebuild_cache(ml_program *program) {
    ml_session *session = program->session;
    const ml_roots *roots = &program->plan->roots;
    if (program->rebuild != NULL && cache_is_stale(program))
        ML_TRY(session->device->ops->run(program->rebuild));
    if (roots->update_count > 0) session->clock++;
    states_set(session, roots);
    if (program->rebuild != NULL) /* with its parameters the run sets what it caches of them */
        states_set(session, &program->plan->rebuild->roots);
    return ML_OK;
}

void program_hold_cache(ml_program *program) {
    const ml_plan *rebuild = program->plan->rebuild;
    program->holds = rebuild != NULL;
    for (int i = 0; program->holds && i < rebuild->roots.update_count; i++)
        program->session->states[rebuild->roots.updates[i].state].holders++;
}

void program_release_cache(ml_program *program) {
    ml_session *session = program->session;
    for (int i = 0; program->holds && i < program->plan->rebuild->roots.update_count; i++) {
        session_state *copy = &session->states[program->plan->rebuild->roots.updates[i].state];
        if (--copy->holders > 0) continue;
        if (copy->memory != NULL) session->device->ops->release(session->device, copy->memory);
        session->state_bytes -= copy->bytes;
        *copy = (session_state){0};
    }
    program->holds = false;
}
