/* The parameter cache of a program (param_cache.c) is rebuilt before a run where another
 * program, or the script, has set a parameter since the last one. */
#include "runtime/exec/session.h"

static bool cache_is_stale(const ml_program *program) {
    const ml_plan *plan = program->plan;
    for (int i = 0; i < plan->cache_source_count; i++)
        if (program->session->states[plan->cache_sources[i]].set_at > program->cache_built_at)
            return true;
    return program->cache_built_at == 0;
}

ml_status program_rebuild_cache(ml_program *program) {
    ml_session *session = program->session;
    const ml_roots *roots = &program->plan->roots;
    if (program->rebuild != NULL && cache_is_stale(program)) {
        ML_TRY(session->device->ops->run(program->rebuild));
        program->cache_built_at = session->clock;
    }
    if (roots->update_count > 0) session->clock++;
    for (int i = 0; i < roots->update_count; i++)
        session->states[roots->updates[i].state].set_at = session->clock;
    if (program->rebuild != NULL) program->cache_built_at = session->clock; /* it sets them too */
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
