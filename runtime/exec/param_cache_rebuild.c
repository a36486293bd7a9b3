/* Copies of parameters that a program keeps (plan/param_cache.c): made anew before a run where
 * something else has set a parameter since the program's last one. */
#include "runtime/exec/session.h"

static bool copies_stale(const ml_program *program) {
    const ml_plan *plan = program->plan;
    for (int i = 0; i < plan->copied_count; i++)
        if (program->session->states[plan->copied[i]].set_at > program->copied_at) return true;
    return program->copied_at == 0;
}

ml_status program_refresh(ml_program *program) {
    ml_session *session = program->session;
    const ml_roots *roots = &program->plan->roots;
    if (program->refresh != NULL && copies_stale(program)) {
        ml_status status = session->device->ops->run(program->refresh);
        if (status != ML_OK) return status;
        program->copied_at = session->clock;
    }
    if (roots->update_count > 0) session->clock++;
    for (int i = 0; i < roots->update_count; i++)
        session->states[roots->updates[i].state].set_at = session->clock;
    if (program->refresh != NULL) program->copied_at = session->clock; /* it sets them too */
    return ML_OK;
}

void program_keep_copies(ml_program *program) {
    const ml_plan *refresh = program->plan->refresh;
    program->keeps = refresh != NULL;
    for (int i = 0; program->keeps && i < refresh->roots.update_count; i++)
        program->session->states[refresh->roots.updates[i].state].keepers++;
}

void program_drop_copies(ml_program *program) {
    ml_session *session = program->session;
    for (int i = 0; program->keeps && i < program->plan->refresh->roots.update_count; i++) {
        session_state *copy = &session->states[program->plan->refresh->roots.updates[i].state];
        if (--copy->keepers > 0) continue;
        if (copy->memory != NULL) session->device->ops->release(session->device, copy->memory);
        session->state_bytes -= copy->bytes;
        *copy = (session_state){0};
    }
    program->keeps = false;
}
