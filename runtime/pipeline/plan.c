/* Plans of programs that are cut into pipeline stages: stages to pieces, pieces to tasks, transfers
 * to lanes of messages, and who needs how much memory. */
#include "runtime/pipeline/plan.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/plan/arena_place.h"
#include "runtime/plan/plan_internal.h"

typedef struct ml_staged_plan staged_plan;

/* What all plans of a program begin with, while it is made. */
typedef struct {
    ml_arena *arena;
    ml_graph *graph;
    const ml_layout *layout;
    const ml_cut *cut;
    staged_plan *staged;
} sharing;

typedef struct {
    ml_plan *plan;
    struct plan_base *base;
    const ml_target *target;
    plan_recompute recompute;
    bool overlap, copies;
    staged_plan *staged;
} staging;

/* ---- tasks ---- */
static void level_add(piece_levels *levels, int level) {
    int at = levels->count;
    for (int i = 0; i < levels->count; i++) {
        if (levels->level[i] == level) return;
    }
    if (levels->count == PIECES_MOST - 1) {
        ml_raise(ML_INVALID, "a pipeline stage waits for others more than %d times a run",
                 PIECES_MOST - 1);
    }
    for (; at > 0 && levels->level[at - 1] > level; at--) levels->level[at] = levels->level[at - 1];
    levels->level[at] = level;
    levels->count++;
}

/* The levels at which each stage has work: those of what it receives, and 0 where others wait for
 * something that needs nothing received. */
static void levels_find(sharing *s) {
    const ml_staged *c = &s->staged->cut;
    bool late =
        s->layout->stages.schedule == ML_SCHEDULE_ZERO_BUBBLE && s->staged->microbatches > 1;
    for (int i = 0; i < c->transfer_count; i++) {
        const ml_transfer *t = &c->transfers[i];
        level_add(&s->staged->stages[t->to].levels, t->to_level);
        if (t->from_level == 0) level_add(&s->staged->stages[t->from].levels, 0);
    }
    for (int v = 0; v < c->count; v++) {
        piece_levels *levels = &s->staged->stages[v].levels;
        if (levels->count == 0) level_add(levels, 0);
        levels->overlaps = s->staged->microbatches > 1;
    }
    for (int i = 0; late && i < c->transfer_count; i++) { /* others wait for the backward pass */
        piece_levels *levels = &s->staged->stages[c->transfers[i].from].levels;
        int last = levels->level[levels->count - 1];
        if (last > 0 && c->transfers[i].from_level == last) levels->late = true;
    }
}

static double flops_at(const ml_stage *stage, int level) {
    return level < stage->levels ? stage->flops[level] : 0;
}

/* Work in proportion: the largest task takes UNITS. Weight gradients take as long as the forward
 * pass, which is a third where it is in the same task. */
enum { UNITS = 1000 };
static void tasks_cost(sharing *s, const double *flops) {
    double most = 1;
    for (int t = 0; t < s->staged->task_count; t++) most = flops[t] > most ? flops[t] : most;
    for (int t = 0; t < s->staged->task_count; t++) {
        int64_t units = (int64_t)(UNITS * flops[t] / most);
        s->staged->tasks[t].cost = units > 0 ? units : 1;
    }
}

static void tasks_make(sharing *s) {
    staged_plan *staged = s->staged;
    ml_arena *arena = s->arena;
    for (int v = 0; v < staged->count; v++) {
        staged_stage *stage = &staged->stages[v];
        stage->first_task = staged->task_count;
        stage->task_count = stage->levels.count + stage->levels.late;
        staged->task_count += stage->task_count;
    }
    staged->tasks = ML_NEW_ARRAY(arena, ml_task, (size_t)staged->task_count);
    double *flops = ML_NEW_ARRAY(arena, double, (size_t)staged->task_count);
    for (int v = 0; v < staged->count; v++) {
        const staged_stage *stage = &staged->stages[v];
        int count = stage->levels.count;
        for (int i = 0; i < count; i++) {
            int t = stage->first_task + i;
            staged->tasks[t].stage = v;
            flops[t] = flops_at(&s->staged->cut.stages[v], stage->levels.level[i]);
        }
        if (!stage->levels.late) continue;
        int t = stage->first_task + count, main = t - 1;
        staged->tasks[t] = (ml_task){.stage = v, .late = true};
        flops[t] = count > 1 ? flops[stage->first_task] : flops[main] / 3;
        if (flops[t] > flops[main] / 2) flops[t] = flops[main] / 2;
        flops[main] -= flops[t];
    }
    tasks_cost(s, flops);
}

static int task_at(const staged_stage *stage, int level) {
    for (int i = 0; i < stage->levels.count; i++) {
        if (stage->levels.level[i] == level) return stage->first_task + i;
    }
    return stage->first_task;
}

/* ---- lanes ---- */
static int cell_of_input(const staged_stage *stage, uint32_t input) {
    for (int i = 0; i < stage->pieces.cell_count; i++) {
        if (stage->pieces.cells[i].input == input) return i;
    }
    return -1;
}

/* What is received and no longer needed still has to go somewhere. */
static int cell_spare(staged_stage *stage, int64_t bytes, ml_arena *arena) {
    piece_set *set = &stage->pieces;
    piece_cell *cells = ML_NEW_ARRAY(arena, piece_cell, (size_t)set->cell_count + 1);
    if (set->cell_count > 0) memcpy(cells, set->cells, sizeof *cells * (size_t)set->cell_count);
    cells[set->cell_count] = (piece_cell){UINT32_MAX, CELL_GIVEN, bytes, set->block_bytes};
    set->block_bytes += (bytes + PLACE_ALIGNMENT - 1) / PLACE_ALIGNMENT * PLACE_ALIGNMENT;
    set->cells = cells;
    return set->cell_count++;
}

static int lane_of(sharing *s, const ml_transfer *t) {
    staged_plan *staged = s->staged;
    staged_lane lane = {.from = t->from, .to = t->to};
    lane.from_task = task_at(&staged->stages[t->from], t->from_level);
    lane.to_task = task_at(&staged->stages[t->to], t->to_level);
    lane.local = t->from % staged->ranks == t->to % staged->ranks;
    for (int i = staged->lane_count - 1; i >= 0; i--) {
        const staged_lane *known = &staged->lanes[i];
        if (known->from_task == lane.from_task && known->to_task == lane.to_task) return i;
    }
    staged->lanes[staged->lane_count] = lane;
    return staged->lane_count++;
}

/* By lane, those of a lane in the order of the transfers. */
static void lanes_make(sharing *s) {
    staged_plan *staged = s->staged;
    const ml_staged *c = &staged->cut;
    int count = c->transfer_count;
    staged->lanes = ML_NEW_ARRAY(s->arena, staged_lane, (size_t)count + 1);
    staged->messages = ML_NEW_ARRAY(s->arena, staged_message, (size_t)count + 1);
    staged->message_of = ML_NEW_ARRAY(s->arena, int, (size_t)count + 1);
    staged->message_count = count;
    int *lane = ML_NEW_ARRAY(s->arena, int, (size_t)count + 1);
    for (int i = 0; i < count; i++) lane[i] = lane_of(s, &c->transfers[i]);
    int *next = ML_NEW_ARRAY(s->arena, int, (size_t)staged->lane_count + 2);
    for (int i = 0; i < count; i++) next[lane[i] + 1]++;
    for (int i = 0; i < staged->lane_count; i++) next[i + 1] += next[i];
    for (int i = 0; i < count; i++) {
        ml_type type = ml_plan_input_type(s->layout, s->graph, c->transfers[i].input);
        int at = staged->message_of[i] = next[lane[i]]++;
        staged->messages[at] = (staged_message){lane[i], -1, -1, ml_type_bytes(&type)};
        staged->lanes[lane[i]].bytes += staged->messages[at].bytes;
    }
}

/* Sums over all ranks and stages, which an account of one rank does not go over again. */
static void sums_make(sharing *s) {
    staged_plan *staged = s->staged;
    staged->sent = ML_NEW_ARRAY(s->arena, ml_traffic, (size_t)staged->ranks);
    for (int i = 0; i < staged->message_count; i++) {
        const staged_lane *lane = &staged->lanes[staged->messages[i].lane];
        ml_traffic *sent = &staged->sent[lane->from % staged->ranks];
        if (lane->local) continue;
        sent->count++;
        sent->bytes += staged->messages[i].bytes;
    }
    for (int v = 0; v < staged->count; v++)
        for (int i = 0; i < staged->cut.stages[v].levels; i++)
            staged->flops += staged->cut.stages[v].flops[i];
}

/* ---- what all plans begin with ---- */
static void inputs_level(sharing *s) {
    const ml_staged *c = &s->staged->cut;
    uint32_t inputs = ml_graph_input_count(s->graph);
    s->staged->input_level = ML_NEW_ARRAY(s->arena, int, (size_t)inputs + 1);
    for (int i = 0; i < c->transfer_count; i++)
        s->staged->input_level[c->transfers[i].input] = c->transfers[i].to_level;
}

/* A hash of all that a rank's stages are planned by. Ranks that plan alike may have other states,
 * which stand for one another throughout, and other numbers of levels in the same order. */
typedef struct {
    int user;        /* 1 + the last rank that has it */
    uint32_t number; /* in the order of their use there */
} shape_of_state;

typedef struct {
    const sharing *s;
    int rank;
    uint32_t states;       /* of the rank so far */
    shape_of_state *state; /* by id */
} rank_shape;

static uint64_t shape_state(rank_shape *r, uint32_t id, uint64_t shape) {
    shape_of_state *state = &r->state[id];
    if (state->user != r->rank + 1) *state = (shape_of_state){r->rank + 1, ++r->states};
    uint32_t fields[2] = {state->number, (uint32_t)ml_graph_state(r->s->graph, id)->kind};
    return ml_hash(fields, sizeof fields, shape);
}

/* Which of the levels an input comes at: 0 for one of the program. */
static uint64_t shape_input(const rank_shape *r, const piece_levels *levels, uint32_t id,
                            uint64_t shape) {
    int level = r->s->staged->input_level[id], at = 0;
    while (level > 0 && at < levels->count && levels->level[at] != level) at++;
    if (level > 0) at++;
    return ml_hash(&at, sizeof at, shape);
}

static uint64_t shape_node(rank_shape *r, const piece_levels *levels, const ml_graph *g, ml_ref n,
                           uint64_t shape) {
    const ml_node *node = ml_graph_node(g, n);
    const ml_type *type = ml_graph_type(g, n);
    const int64_t *args = ml_graph_args(g, n);
    uint32_t head[3] = {node->op, node->flags, type->dtype};
    shape = ml_hash(head, sizeof head, shape);
    shape = ml_hash(ml_graph_sources(g, n), node->source_count * sizeof(ml_ref), shape);
    shape = ml_hash(type->axis, type->rank * sizeof(ml_axis), shape);
    shape = ml_hash(type->size, type->rank * sizeof(int64_t), shape);
    if (node->op == ML_OP_STATE) return shape_state(r, (uint32_t)args[0], shape);
    if (node->op == ML_OP_INPUT) return shape_input(r, levels, (uint32_t)args[0], shape);
    return ml_hash(args, node->arg_count * sizeof(int64_t), shape);
}

static uint64_t shape_stage(rank_shape *r, int v, uint64_t shape) {
    const ml_stage *stage = &r->s->staged->cut.stages[v];
    const piece_levels *levels = &r->s->staged->stages[v].levels;
    const ml_roots *roots = &stage->roots;
    int head[] = {levels->count, levels->late, levels->overlaps, roots->kept, roots->output_count};
    shape = ml_hash(head, sizeof head, shape);
    for (ml_ref n = 1; n < ml_graph_count(stage->graph); n++)
        shape = shape_node(r, levels, stage->graph, n, shape);
    shape = ml_hash(roots->outputs, sizeof(ml_ref) * (size_t)roots->output_count, shape);
    for (int i = 0; i < roots->update_count; i++) {
        shape = ml_hash(&roots->updates[i].value, sizeof(ml_ref), shape);
        shape = shape_state(r, roots->updates[i].state, shape);
    }
    return shape;
}

/* By rank: the first that plans alike. */
static int *ranks_alike(const sharing *s) {
    const staged_plan *staged = s->staged;
    ml_arena *arena = s->arena;
    rank_shape r = {.s = s};
    r.state = ML_NEW_ARRAY(arena, shape_of_state, ml_graph_state_count(s->graph) + 1);
    uint64_t *shapes = ML_NEW_ARRAY(arena, uint64_t, (size_t)staged->ranks);
    int *like = ML_NEW_ARRAY(arena, int, (size_t)staged->ranks);
    for (; r.rank < staged->ranks; r.rank++) {
        r.states = 0;
        for (int v = r.rank; v < staged->count; v += staged->ranks)
            shapes[r.rank] = shape_stage(&r, v, shapes[r.rank]);
        while (shapes[like[r.rank]] != shapes[r.rank]) like[r.rank]++;
    }
    return like;
}

static void states_list(sharing *s, int v) {
    staged_stage *stage = &s->staged->stages[v];
    const ml_stage *cut = &s->staged->cut.stages[v];
    uint32_t nodes = ml_graph_count(cut->graph);
    stage->states =
        ML_NEW_ARRAY(s->arena, uint32_t, (size_t)nodes + (size_t)cut->roots.update_count);
    for (ml_ref n = 1; n < nodes; n++) {
        if (ml_graph_node(cut->graph, n)->op != ML_OP_STATE) continue;
        stage->states[stage->state_count++] = (uint32_t)ml_graph_args(cut->graph, n)[0];
    }
    for (int i = 0; i < cut->roots.update_count; i++)
        stage->states[stage->state_count++] = cut->roots.updates[i].state;
}

static void schedule_make(sharing *s) {
    staged_plan *staged = s->staged;
    const ml_stages *how = &s->layout->stages;
    ml_arena *arena = s->arena;
    ml_pipeline_problem *problem = &staged->problem;
    problem->kind = staged->microbatches > 1 ? how->schedule : ML_SCHEDULE_1F1B;
    problem->ranks = staged->ranks;
    problem->chunks = staged->count / staged->ranks;
    problem->microbatches = staged->microbatches;
    problem->task_count = staged->task_count;
    problem->tasks = staged->tasks;
    ml_task_edge *edges = ML_NEW_ARRAY(arena, ml_task_edge,
                                       (size_t)staged->lane_count + (size_t)staged->task_count + 1);
    problem->edges = edges;
    for (int i = 0; i < staged->lane_count; i++) {
        edges[problem->edge_count++] =
            (ml_task_edge){staged->lanes[i].from_task, staged->lanes[i].to_task};
    }
    for (int v = 0; v < staged->count; v++) {
        const staged_stage *stage = &staged->stages[v];
        for (int i = 1; i < stage->task_count; i++) {
            int t = stage->first_task + i;
            edges[problem->edge_count++] = (ml_task_edge){t - 1, t};
        }
    }
    ml_pipeline_make(problem, arena, &staged->pipeline);
}

/* Those of this rank; in a check, of one rank of each shape. */
static void stages_choose(sharing *s) {
    staged_plan *staged = s->staged;
    bool check = s->cut->coordinate < 0;
    const int *like = check ? ranks_alike(s) : NULL;
    for (int v = 0; v < staged->count; v++) {
        int rank = v % staged->ranks, planned = check ? like[rank] : s->cut->coordinate;
        staged->stages[v].like = check ? v - rank + planned : -1;
        staged->stages[v].planned = rank == planned;
        if (check) states_list(s, v);
    }
}

/* Of those whose memory is to be known: blocks. */
static void slots_find(sharing *s) {
    for (int v = 0; v < s->staged->count; v++)
        if (s->cut->coordinate < 0 || s->staged->stages[v].planned)
            staged_slots(s->staged, v, s->arena);
}

void staged_share(struct plan_base *base, const ml_layout *layout, const ml_cut *cut) {
    sharing s = {.arena = base->arena, .graph = base->global, .layout = layout, .cut = cut};
    staged_plan *staged = s.staged = base->staged = ML_NEW(base->arena, staged_plan);
    staged->microbatches = base->roots.microbatches > 1 ? base->roots.microbatches : 1;
    staged->ranks = (int)layout->axis[layout->stages.mesh_axis].size;
    staged->fed_count = ml_graph_input_count(base->global);
    ml_stage_cut(base->global, &base->roots, layout, cut->map, base->arena, &staged->cut);
    staged->count = staged->cut.count;
    staged->map = cut->map;
    staged->stages = ML_NEW_ARRAY(base->arena, staged_stage, (size_t)staged->count);
    inputs_level(&s);
    levels_find(&s);
    tasks_make(&s);
    stages_choose(&s);
    lanes_make(&s);
    sums_make(&s);
    schedule_make(&s);
    slots_find(&s);
}

/* ---- stages and pieces ---- */
static ml_plan *part_new(const staging *s, ml_graph **graph, const ml_roots *roots,
                         ml_plan **place) {
    ml_plan *part = *place = plan_empty();
    part->layout = s->plan->layout;
    part->graph = *graph;
    *graph = NULL;
    plan_roots(part, roots);
    return part;
}

static void pieces_plan(staging *s, staged_stage *stage) {
    piece_set *set = &stage->pieces;
    ml_arena *arena = s->plan->arena;
    pieces_cut(stage->local->graph, &stage->local->roots, s->staged->input_level, &stage->levels,
               arena, set);
    stage->plans = ML_NEW_ARRAY(arena, ml_plan *, PIECES_MOST + 1);
    stage->plan_count = set->count + set->steady;
    for (int p = 0; p < stage->plan_count; p++) {
        piece *piece = &set->pieces[p];
        ml_plan *part = part_new(s, &piece->graph, &piece->roots, &stage->plans[p]);
        part->piece = true;
        plan_steps(part, s->target, s->overlap);
    }
}

static void stage_plan(staging *s, int v) {
    staged_stage *stage = &s->staged->stages[v];
    ml_stage *cut = &s->base->staged->cut.stages[v];
    stage->like = v;
    stage->levels.steady = s->copies;
    ml_plan *local = part_new(s, &cut->graph, &cut->roots, &stage->local);
    plan_local(local, s->target, s->recompute, false,
               stage->levels.late ? s->staged->input_level : NULL, s->base, &s->base->parts[v]);
    stage->watched = local->roots.watched;
    if (stage->watched > 0) local->roots.kept++; /* as what others wait for: not put off */
    pieces_plan(s, stage);
    if (stage->watched > 0) {
        stage->watched_cell = stage->pieces.cell_of_output[local->roots.output_count - 1];
        stage->watched_piece = stage->pieces.piece_of_output[local->roots.output_count - 1];
    }
    int outputs = s->plan->roots.output_count;
    stage->outputs = ML_NEW_ARRAY(s->plan->arena, int, (size_t)outputs + 1);
    stage->output_piece = ML_NEW_ARRAY(s->plan->arena, int, (size_t)outputs + 1);
    for (int i = 0; i < outputs; i++) {
        int at = cut->output_of[i];
        stage->outputs[i] = at >= 0 ? stage->pieces.cell_of_output[at] : -1;
        stage->output_piece[i] = at >= 0 ? stage->pieces.piece_of_output[at] : 0;
    }
}

/* ---- messages ---- */
/* Where the messages of stages that are planned lie in their blocks. */
static void cells_find(staging *s) {
    staged_plan *staged = s->staged;
    ml_arena *arena = s->plan->arena;
    staged_message *messages = ML_NEW_ARRAY(arena, staged_message, (size_t)staged->message_count);
    memcpy(messages, staged->messages, sizeof *messages * (size_t)staged->message_count);
    staged->messages = messages;
    for (int i = 0; i < staged->cut.transfer_count; i++) {
        const ml_transfer *t = &staged->cut.transfers[i];
        staged_message *m = &messages[staged->message_of[i]];
        staged_stage *from = &staged->stages[t->from], *to = &staged->stages[t->to];
        if (from->planned) m->cell_from = from->pieces.cell_of_output[t->output];
        if (to->planned) {
            m->cell_to = cell_of_input(to, t->input);
            if (m->cell_to < 0) m->cell_to = cell_spare(to, m->bytes, arena);
        }
        if (from->planned && from->pieces.cells[m->cell_from].bytes != m->bytes)
            ml_raise(ML_INTERNAL, "stage %d sends another size than stage %d expects", t->from,
                     t->to);
        if (from->planned && from->first_task + from->pieces.piece_of_output[t->output] >
                                 staged->lanes[m->lane].from_task)
            ml_raise(ML_INTERNAL, "stage %d would send what it has not computed yet", t->from);
    }
}

void staged_make(ml_plan *plan, const ml_target *target, const ml_cut *cut,
                 plan_recompute recompute, bool overlap, bool copies) {
    staging s = {.plan = plan,
                 .base = plan->base,
                 .target = target,
                 .recompute = recompute,
                 .overlap = overlap,
                 .copies = copies};
    staged_plan *staged = s.staged = plan->staged = ML_NEW(plan->arena, staged_plan);
    *staged = *plan->base->staged;
    staged->stages = ML_NEW_ARRAY(plan->arena, staged_stage, (size_t)staged->count);
    memcpy(staged->stages, plan->base->staged->stages,
           sizeof *staged->stages * (size_t)staged->count);
    for (int v = 0; v < staged->count; v++)
        if (staged->stages[v].planned) stage_plan(&s, v);
    cells_find(&s);
    staged->until = staged_watched_until(staged);
    for (int r = 0; r < staged->ranks; r++)
        if (cut->coordinate < 0 || cut->coordinate == r) staged_check_states(plan, r);
    staged_account(plan, cut->coordinate);
}

void staged_free(staged_plan *staged) {
    if (staged == NULL) return;
    for (int v = 0; v < staged->count && staged->stages != NULL; v++) {
        staged_stage *stage = &staged->stages[v];
        for (int p = 0; p < stage->plan_count; p++) ml_plan_free(stage->plans[p]);
        pieces_free(&stage->pieces);
        ml_plan_free(stage->local);
    }
}
