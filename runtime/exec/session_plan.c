/* Plans of a session's programs: in the device's memory, beside what its other programs hold, and
 * with a retry where a step may have to be done again (overflow_retry.c). A run and a check plan
 * alike; a check plans all pipeline stages, and nothing is allocated. */
#include "runtime/exec/session.h"
#include "runtime/pipeline/plan.h"

/* ---- what is beside a plan ---- */
typedef struct {
    const ml_session *session;
    const ml_plans *others; /* of a check; NULL: those of the session */
    /* The program whose retry is planned, or the retry of the one that is; NULL: none. */
    ml_plan *partner;
    bool of_retry;           /* it is the program */
    const ml_plan *replaced; /* of the session, by the one that is planned; NULL: none */
    int64_t spare;           /* bytes that the plan is to leave unused */
    ml_arena *scratch;
    ml_rank_program *at; /* those beside it, then, with a partner, the pair */
    ml_rank_programs programs;
} beside_call;

static void list_session(beside_call *call) {
    const ml_session *session = call->session;
    for (const ml_program *p = session->programs; p != NULL; p = p->next)
        if (p->plan != NULL && p->owner == NULL && p->plan != call->partner &&
            p->plan != call->replaced)
            call->at[call->programs.count++] =
                (ml_rank_program){p->plan, p->retry ? p->retry->plan : NULL};
    ml_held_state *states =
        ML_NEW_ARRAY(call->scratch, ml_held_state, (size_t)session->state_count + 1);
    for (uint32_t id = 0; id < session->state_count; id++)
        if (session->states[id].memory != NULL && !session_elsewhere(session, id))
            states[call->programs.state_count++] =
                (ml_held_state){id, ml_plan_memory_kind(ml_graph_state(session->graph, id)->kind),
                                session->states[id].bytes};
    call->programs.states = states;
    call->programs.arena_bytes = session->arena_bytes;
}

/* With the states and the arena that there are already, whichever program they were for. */
static void list_programs(void *context) {
    beside_call *call = context;
    int count = call->others != NULL ? call->others->count : 0;
    for (const ml_program *p = call->session->programs; p != NULL; p = p->next) count++;
    call->at = ML_NEW_ARRAY(call->scratch, ml_rank_program, (size_t)count + 1);
    for (int i = 0; call->others != NULL && i < call->others->count; i++)
        call->at[call->programs.count++] =
            (ml_rank_program){call->others->at[i], call->others->at[i]->retry};
    if (call->others == NULL) list_session(call);
    call->programs.at = call->at;
    if (call->partner != NULL) call->programs.count++;
}

static void account_stage(ml_plan *plan, int coordinate) {
    if (plan != NULL && plan->pipeline != NULL) pipeline_memory(plan, coordinate);
}

static void account_stages(const beside_call *call, ml_plan *plan, int coordinate) {
    account_stage(plan, coordinate);
    account_stage(call->partner, coordinate);
    for (int i = 0; i < call->others->count; i++) account_stage(call->others->at[i], coordinate);
}

/* In a check of all stages, at the one that needs the most: it is not the one where the plan alone
 * does. */
static ml_beside find_at_stages(const beside_call *call, ml_plan *plan) {
    int64_t bytes = 0, needed = 0;
    ml_beside most = {0};
    for (int r = 0; r < plan->pipeline->ranks; r++) {
        account_stages(call, plan, r);
        const ml_beside beside = ml_plan_beside(plan, &call->programs);
        const int64_t now = plan->peak_bytes + beside.bytes;
        if (now > bytes) bytes = now;
        if (now + beside.later > needed) needed = now + beside.later, most = beside;
    }
    account_stages(call, plan, -1);
    most.bytes = bytes - plan->peak_bytes;
    most.later = needed - bytes;
    return most;
}

static ml_beside find_beside(void *context, ml_plan *plan) {
    const beside_call *call = context;
    if (call->partner != NULL)
        call->at[call->programs.count - 1] = call->of_retry
                                                 ? (ml_rank_program){call->partner, plan}
                                                 : (ml_rank_program){plan, call->partner};
    const bool stages = call->others != NULL && plan->pipeline != NULL && call->programs.count > 0;
    ml_beside beside = stages ? find_at_stages(call, plan) : ml_plan_beside(plan, &call->programs);
    beside.bytes += call->spare;
    return beside;
}

static ml_status begin_beside(beside_call *call) {
    call->scratch = ml_arena_new();
    if (call->scratch == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while planning");
    return ml_protect(list_programs, call);
}

typedef struct {
    beside_call *call;
    ml_plan *plan;
    ml_beside beside;
} find_call;

static void find_body(void *context) {
    find_call *find = context;
    find->beside = find_beside(find->call, find->plan);
}

ml_status session_beside(const ml_session *session, ml_plan *plan, ml_beside *beside) {
    beside_call call = {session};
    find_call find = {&call, plan};
    ml_status status = begin_beside(&call);
    if (status == ML_OK) status = ml_protect(find_body, &find);
    ml_arena_free(call.scratch);
    *beside = find.beside;
    return status;
}

/* ---- a plan ---- */
typedef struct {
    ml_session *session;
    const ml_roots *roots;
    const ml_target *target;
    const ml_plans *others; /* as of beside_call */
    bool pipelined;
} request;

typedef struct {
    ml_compile_input input;
    ml_plan *plan;
    int64_t needed; /* of the rank, with what is beside the plan and what is made later */
} planning;

/* Programs are named to users: in profiles and messages a repetition is apart from its step. */
static ml_roots retry_roots(const ml_roots *roots, ml_arena *arena) {
    ml_roots again = *roots;
    again.name = ml_arena_format(arena, "%s, repeated", roots->name ? roots->name : "program");
    return again;
}

static void plan_body(void *context) {
    planning *p = context;
    const beside_call *call = p->input.beside_context;
    ml_compile_input input = p->input;
    ml_roots again;
    if (call->of_retry) {
        again = retry_roots(input.roots, call->scratch);
        input.roots = &again;
    }
    ml_compile(&input, &p->plan);
    if (p->plan->fewer == NULL) {
        const ml_beside beside = find_beside(p->input.beside_context, p->plan);
        p->plan->needed_bytes = p->plan->peak_bytes + beside.bytes + beside.later;
    }
    p->needed = p->plan->needed_bytes;
}

/* On one rank of several, the plan of its pipeline stages. */
static ml_status plan_beside(const request *r, const ml_layout *layout, beside_call *beside,
                             planning *p) {
    ml_session *session = r->session;
    ml_cut cut = {&session->stages, -1};
    if (r->pipelined && layout != NULL && layout->stages.on && session->everyone != NULL) {
        int64_t rank = session_rank_under(session, layout);
        cut.coordinate = (int)ml_layout_coordinate(layout, rank, layout->stages.mesh_axis);
    }
    *p = (planning){{session->graph, r->roots, r->target, layout, r->pipelined ? &cut : NULL,
                     &session->options, find_beside, beside,
                     session->group_size > 0 ? session->ranks.layout : NULL,
                     r->pipelined ? session->applied : (ml_plan_list){0}}};
    ml_status status = begin_beside(beside);
    if (status == ML_OK) status = ml_protect(plan_body, p);
    ml_arena_free(beside->scratch);
    if (status == ML_OK) return ML_OK;
    ml_plan_free(p->plan);
    p->plan = NULL;
    return status;
}

ml_status session_plan(ml_session *session, const ml_roots *roots, const ml_layout *layout,
                       bool pipelined, ml_plan **plan) {
    const request r = {session, roots, &session->device->target, NULL, pipelined};
    beside_call beside = {session};
    planning p;
    ml_status status = plan_beside(&r, layout, &beside, &p);
    *plan = p.plan;
    return status;
}

/* ---- a plan and that of its retry ---- */
bool session_of_groups(const ml_session *session, const ml_layout *layout) {
    const ml_layout *first = session->group_layouts;
    return layout >= first && layout <= first + ML_MAX_MESH;
}

/* The layout, the session's or one of groups, without `exchange`. */
static const ml_layout *unbounded_of(ml_session *session, const ml_layout *layout) {
    ml_layout *unbounded = &session->unbounded;
    if (session_of_groups(session, layout))
        unbounded = &session->group_unbounded[layout - session->group_layouts];
    *unbounded = session_of_groups(session, layout) ? *layout : session->layout;
    unbounded->exchange = 0;
    return unbounded;
}

/* Of the program that has `plan` now, and is to have `partner`. */
static ml_status plan_retry(const request *r, const ml_plan *plan, ml_plan *partner, planning *p) {
    ml_session *session = r->session;
    beside_call beside = {session, r->others, .partner = partner, .of_retry = true,
                          .replaced = plan};
    ml_compile_log *log = session->options.log;
    session->options.log = NULL; /* that of the program itself */
    ml_status status = plan_beside(r, unbounded_of(session, plan->layout), &beside, p);
    session->options.log = log;
    return status;
}

enum { SMALLER = 4 };

/* A plan with a retry beside it, and that; NULL in *retry where none is found. *both is `plan`, the
 * one in the budget, or, where no retry fits beside that, a smaller one. */
static ml_status plan_both(const request *r, ml_plan *plan, ml_plan **both, ml_plan **retry) {
    const int64_t limit = r->target->memory_bytes;
    planning smaller = {.plan = plan, .needed = plan->needed_bytes}, other = {{0}};
    ml_status status = ML_OK;
    for (int i = 0; status == ML_OK; i++) {
        status = plan_retry(r, plan, smaller.plan, &other);
        const int64_t over = other.needed - limit;
        if (status != ML_OK || limit <= 0 || over <= 0 || other.needed <= smaller.needed) break;
        ml_plan_free(other.plan);
        other.plan = NULL;
        if (i == SMALLER) break;
        beside_call beside = {.session = r->session,
                              .others = r->others,
                              .replaced = plan,
                              .spare = limit - smaller.needed + over};
        if (smaller.plan != plan) ml_plan_free(smaller.plan);
        status = plan_beside(r, plan->layout, &beside, &smaller);
        if (status != ML_OK || smaller.needed > limit) break;
        smaller.needed -= beside.spare;
    }
    *retry = other.plan;
    *both = *retry != NULL ? smaller.plan : plan;
    if (*retry == NULL && smaller.plan != plan) ml_plan_free(smaller.plan);
    return status;
}

ml_status session_plan_retry(ml_session *session, const ml_roots *roots, ml_plan *plan,
                             ml_plan **both, ml_plan **retry) {
    const request r = {session, roots, &session->device->target, NULL, plan->pipeline != NULL};
    return plan_both(&r, plan, both, retry);
}

/* ---- a check ---- */
typedef struct {
    ml_plan *plan, *retry;
} pair;

static void account_pair(void *context) {
    const pair *both = context;
    account_stage(both->retry, both->plan->pipeline ? both->plan->pipeline->coordinate : 0);
}

static ml_status check_retry(const request *r, ml_plan **plan) {
    ml_plan *both = NULL, *retry = NULL;
    if (!(*plan)->may_overflow) return ML_OK;
    ml_status status = plan_both(r, *plan, &both, &retry);
    if (status != ML_OK || retry == NULL) return status;
    if (both != *plan) ml_plan_free(*plan);
    *plan = both;
    status = ml_protect(account_pair, &(pair){*plan, retry});
    if (status == ML_OK)
        ml_plan_set_retry(*plan, retry);
    else
        ml_plan_free(retry);
    return status;
}

static void show_chain(const ml_kernel *kernel, ml_target_kind kind, ml_index *seen) {
    for (; kernel != NULL; kernel = kernel->next) {
        uint32_t cursor = 0;
        show_chain(kernel->fallback, kind, seen);
        if (ml_index_next(seen, kernel->key, &cursor) != ML_INDEX_NONE) continue;
        ml_index_add(seen, kernel->key, 0);
        beside_core.show_kernel(kernel, kind, seen->arena);
    }
}

/* Each kernel that loading the plan would compile, where its source is asked for. */
static void show_kernels(void *context) {
    const ml_plan *plan = context;
    ml_index seen = {.arena = plan->arena};
    const ml_plan *part;
    for (int p = 0; (part = ml_plan_part(plan, p)) != NULL; p++) {
        const ml_schedule *s = part->schedule;
        for (uint32_t i = 0; i < s->steps.count; i++)
            show_chain(s->steps.at[i].kernel, s->target->kind, &seen);
    }
}

ml_status ml_session_show(ml_plan *plan) {
    return ml_protect(show_kernels, plan);
}

void ml_session_applies(ml_session *session, ml_plan_list microbatches) {
    session->applied = microbatches;
}

ml_status ml_session_plan_alone(ml_session *session, const ml_roots *roots, const ml_target *target,
                                const ml_plans *others, ml_plan **plan) {
    const request r = {session, roots, target, others, true};
    beside_call beside = {session, others};
    planning p;
    ml_status status = plan_beside(&r, session_program_layout(session), &beside, &p);
    *plan = p.plan;
    if (status == ML_OK) status = check_retry(&r, plan);
    if (status == ML_OK) return ML_OK;
    ml_plan_free(*plan);
    *plan = NULL;
    return status;
}

ml_status ml_session_plan(ml_session *session, const ml_roots *roots, const ml_target *target,
                          const ml_plans *others, ml_plan **plan) {
    ml_status status = ml_session_plan_alone(session, roots, target, others, plan);
    if (status == ML_OK) status = ml_session_show(*plan);
    if (status == ML_OK) return ML_OK;
    ml_plan_free(*plan);
    *plan = NULL;
    return status;
}
