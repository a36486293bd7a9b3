/* Copies of parameters that a program keeps (plan/copies.c): made anew before a run where something
 * else has set a parameter since the program's last one. */
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

void program_drop_copies(ml_program *program) {
    ml_session *session = program->session;
    const ml_plan *refresh = program->plan != NULL ? program->plan->refresh : NULL;
    for (int i = 0; refresh != NULL && i < refresh->roots.update_count; i++) {
        uint32_t id = refresh->roots.updates[i].state;
        if (id >= session->state_count || session->states[id].memory == NULL) continue;
        session->device->ops->release(session->device, session->states[id].memory);
        session->state_bytes -= session->states[id].bytes;
        session->states[id] = (session_state){0};
    }
}
