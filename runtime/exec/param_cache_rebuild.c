/* The parameter cache of a program (param_cache.c) is rebuilt before a run where another
 * program, or the script, has set a parameter since the last one; that of all ranks before they run
 * programs of groups (ml_program_refresh). */
#include "runtime/exec/session.h"

/* When the latest of the states that cached ones are computed of was set. */
static uint64_t sources_set_at(const ml_program *program, const ml_plan *plan) {
    uint64_t latest = 1; /* a state that was never computed has 0 */
    for (int i = 0; i < plan->cache_source_count; i++) {
        const session_state *state = &program->session->states[plan->cache_sources[i]];
        if (state->set_at > latest) latest = state->set_at;
    }
    return latest;
}

/* Programs share cached states: one that has been computed since its parameters were set last is
 * not computed again, whichever program did it. */
static bool cache_is_stale(const ml_program *program, const ml_plan *rebuild) {
    const ml_roots *cached = &rebuild->roots;
    uint64_t built_at = UINT64_MAX;
    for (int i = 0; i < cached->update_count; i++) {
        const session_state *state = &program->session->states[cached->updates[i].state];
        if (state->set_at < built_at) built_at = state->set_at;
    }
    return built_at < sources_set_at(program, rebuild);
}

/* What is set in part stays stale where the rest of it is: where that was set after `sources`. */
static void states_set(ml_session *session, const ml_roots *roots, uint64_t sources) {
    for (int i = 0; i < roots->update_count; i++) {
        session_state *state = &session->states[roots->updates[i].state];
        if (!roots->updates[i].part || state->set_at >= sources) state->set_at = session->clock;
    }
}

bool program_has_joint_rebuilds(const ml_program *program) {
    for (const ml_plan *r = program->plan->rebuild; r != NULL; r = r->next)
        if (r->all_ranks) return true;
    return false;
}

ml_status program_run_joint_rebuilds(ml_program *program) {
    ml_session *session = program->session;
    ml_executable **executable = program->rebuilds;
    for (const ml_plan *r = program->plan->rebuild; r != NULL; r = r->next, executable++) {
        if (!r->all_ranks || !cache_is_stale(program, r)) continue;
        ML_TRY(session->device->ops->run(*executable));
        states_set(session, &r->roots, 0);
    }
    return ML_OK;
}

/* Ranks that run other programs would wait for this one's collectives for ever. */
static ml_status fail_unrefreshed(const ml_program *program) {
    const char *name = program->plan->roots.name;
    ml_fail(ML_INVALID, "the program \"%s\" of a group reads parameters that all ranks gather",
            name != NULL ? name : "");
    return ml_help("p:refresh() on all ranks, before one of them runs a program after an update");
}

ml_status program_rebuild_cache(ml_program *program) {
    ml_session *session = program->session;
    const ml_roots *roots = &program->plan->roots;
    ml_executable **executable = program->rebuilds;
    for (const ml_plan *r = program->plan->rebuild; r != NULL; r = r->next, executable++) {
        if (!cache_is_stale(program, r)) continue;
        if (r->all_ranks) return fail_unrefreshed(program);
        ML_TRY(session->device->ops->run(*executable));
    }
    const uint64_t sources = sources_set_at(program, program->plan);
    if (roots->update_count > 0) session->clock++;
    states_set(session, roots, sources);
    /* With its parameters the run sets what it caches of them. */
    for (const ml_plan *r = program->plan->rebuild; r != NULL; r = r->next)
        states_set(session, &r->roots, 0);
    return ML_OK;
}

static void hold(ml_session *session, const ml_roots *roots) {
    for (int i = 0; i < roots->update_count; i++) {
        const uint32_t id = roots->updates[i].state;
        if (ml_graph_state(session->graph, id)->kind == ML_STATE_CACHE)
            session->states[id].holders++;
    }
}

static void release(ml_session *session, const ml_roots *roots) {
    for (int i = 0; i < roots->update_count; i++) {
        const uint32_t id = roots->updates[i].state;
        session_state *copy = &session->states[id];
        if (ml_graph_state(session->graph, id)->kind != ML_STATE_CACHE || --copy->holders > 0)
            continue;
        if (copy->together) continue;
        if (copy->memory != NULL) session->device->ops->release(session->device, copy->memory);
        session->state_bytes -= copy->bytes;
        *copy = (session_state){0};
    }
}

void program_hold_cache(ml_program *program) {
    program->holds = true;
    hold(program->session, &program->plan->roots);
    for (const ml_plan *r = program->plan->rebuild; r != NULL; r = r->next)
        hold(program->session, &r->roots);
}

void program_release_cache(ml_program *program) {
    if (!program->holds) return;
    program->holds = false;
    release(program->session, &program->plan->roots);
    for (const ml_plan *r = program->plan->rebuild; r != NULL; r = r->next)
        release(program->session, &r->roots);
}
