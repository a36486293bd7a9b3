/* Copies of parameters that a program keeps (plan/param_cache.c): made anew before a run where
 * something else has set a parameter since the program's last one. */
#include "runtime/exec/session.h"

static bool copies_stale(const ml_program *program) {
    const ml_plan *plan = program->plan;
    for (int i = 0; i < plan->cache_source_count; i++)
        if (program->session->states[plan->cache_sources[i]].set_at > program->cache_built_at)
            return true;
    return program->cache_built_at == 0;
}

ml_status program_rebuild_cache(ml_program *program) {
    ml_session *session = program->session;
    const ml_roots *roots = &program->plan->roots;
    if (program->rebuild != NULL && copies_stale(program)) {
        ml_status status = session->device->ops->run(program->rebuild);
        if (status != ML_OK) return status;
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
    program->keeps = rebuild != NULL;
    for (int i = 0; program->keeps && i < rebuild->roots.update_count; i++)
        program->session->states[rebuild->roots.updates[i].state].keepers++;
}

void program_release_cache(ml_program *program) {
    ml_session *session = program->session;
    for (int i = 0; program->keeps && i < program->plan->rebuild->roots.update_count; i++) {
        session_state *copy = &session->states[program->plan->rebuild->roots.updates[i].state];
        if (--copy->keepers > 0) continue;
        if (copy->memory != NULL) session->device->ops->release(session->device, copy->memory);
        session->state_bytes -= copy->bytes;
        *copy = (session_state){0};
    }
    program->keeps = false;
}
