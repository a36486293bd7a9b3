/* The plan of a pipeline. First what all attempts at a plan share: stages, their tasks and costs,
 * channels, the schedule, slots. Then one attempt: each stage's program is split into task
 * programs, and messages get their addresses. */
#include <stdlib.h>
#include <string.h>

#include "runtime/pipeline/pipeline_internal.h"
#include "runtime/plan/arena_offsets.h"
#include "runtime/plan/plan_internal.h"

/* What all attempts share, while it is computed. */
typedef struct {
    ml_arena *arena;
    ml_graph *graph;
    const ml_layout *layout;
    int coordinate; /* along the stages' mesh axis; -1: all stages are planned */
    pipeline_plan *pipeline;
} sharing;

/* ---- tasks ---- */
static void wave_add(task_waves *waves, int wave) {
    int at = waves->count;
    for (int i = 0; i < waves->count; i++) {
        if (waves->wave[i] == wave) return;
    }
    if (waves->count == TASKS_MOST - 1) {
        ml_raise(ML_INVALID, "a pipeline stage waits for others more than %d times a run",
                 TASKS_MOST - 1);
    }
    for (; at > 0 && waves->wave[at - 1] > wave; at--) waves->wave[at] = waves->wave[at - 1];
    waves->wave[at] = wave;
    waves->count++;
}

/* The waves in which each stage has work: those of what it receives, and 0 where others wait for a
 * value that needs nothing received. Its last wave is split in two where the schedule does so and
 * other stages wait for a part of it. */
static void waves_find(sharing *s) {
    const ml_stage_graphs *c = &s->pipeline->cut;
    bool weight_grad = ml_schedules[s->layout->stages.schedule].splits_weight_grad &&
                       s->pipeline->microbatches > 1;
    for (int i = 0; i < c->transfer_count; i++) {
        const ml_transfer *t = &c->transfers[i];
        wave_add(&s->pipeline->stages[t->to].waves, t->to_wave);
        if (t->from_wave == 0) wave_add(&s->pipeline->stages[t->from].waves, 0);
    }
    for (int v = 0; v < c->count; v++) {
        task_waves *waves = &s->pipeline->stages[v].waves;
        if (waves->count == 0) wave_add(waves, 0);
        waves->overlaps = s->pipeline->microbatches > 1;
    }
    for (int i = 0; weight_grad && i < c->transfer_count; i++) {
        task_waves *waves = &s->pipeline->stages[c->transfers[i].from].waves;
        int last = waves->wave[waves->count - 1];
        if (last > 0 && c->transfers[i].from_wave == last) waves->weight_grad = true;
    }
}

static double flops_at(const ml_stage *stage, int wave) {
    return wave < stage->waves ? stage->flops[wave] : 0;
}

/* Work in proportion: the largest task takes UNITS. Weight gradients take as long as the forward
 * pass, which is a third where it is in the same task. */
enum { UNITS = 1000 };
static void tasks_cost(sharing *s, const double *flops) {
    double most = 1;
    for (int t = 0; t < s->pipeline->task_count; t++) most = flops[t] > most ? flops[t] : most;
    for (int t = 0; t < s->pipeline->task_count; t++) {
        int64_t units = (int64_t)(UNITS * flops[t] / most);
        s->pipeline->tasks[t].cost = units > 0 ? units : 1;
    }
}

static void tasks_make(sharing *s) {
    pipeline_plan *pipeline = s->pipeline;
    ml_arena *arena = s->arena;
    for (int v = 0; v < pipeline->count; v++) {
        pipeline_stage *stage = &pipeline->stages[v];
        stage->first_task = pipeline->task_count;
        stage->task_count = stage->waves.count + stage->waves.weight_grad;
        pipeline->task_count += stage->task_count;
    }
    pipeline->tasks = ML_NEW_ARRAY(arena, ml_task, (size_t)pipeline->task_count);
    double *flops = ML_NEW_ARRAY(arena, double, (size_t)pipeline->task_count);
    for (int v = 0; v < pipeline->count; v++) {
        const pipeline_stage *stage = &pipeline->stages[v];
        int count = stage->waves.count;
        for (int i = 0; i < count; i++) {
            int t = stage->first_task + i;
            pipeline->tasks[t].stage = v;
            flops[t] = flops_at(&s->pipeline->cut.stages[v], stage->waves.wave[i]);
        }
        if (!stage->waves.weight_grad) continue;
        int t = stage->first_task + count, main = t - 1;
        pipeline->tasks[t] = (ml_task){.stage = v, .weight_grad = true};
        flops[t] = count > 1 ? flops[stage->first_task] : flops[main] / 3;
        if (flops[t] > flops[main] / 2) flops[t] = flops[main] / 2;
        flops[main] -= flops[t];
    }
    tasks_cost(s, flops);
}

static int task_at(const pipeline_stage *stage, int wave) {
    for (int i = 0; i < stage->waves.count; i++) {
        if (stage->waves.wave[i] == wave) return stage->first_task + i;
    }
    return stage->first_task;
}

/* ---- channels ---- */
static int channel_of(sharing *s, const ml_transfer *t) {
    pipeline_plan *pipeline = s->pipeline;
    pipeline_channel channel = {.from = t->from, .to = t->to};
    channel.from_task = task_at(&pipeline->stages[t->from], t->from_wave);
    channel.to_task = task_at(&pipeline->stages[t->to], t->to_wave);
    channel.local = t->from % pipeline->ranks == t->to % pipeline->ranks;
    for (int i = pipeline->channel_count - 1; i >= 0; i--) {
        const pipeline_channel *known = &pipeline->channels[i];
        if (known->from_task == channel.from_task && known->to_task == channel.to_task) return i;
    }
    pipeline->channels[pipeline->channel_count] = channel;
    return pipeline->channel_count++;
}

/* Messages by channel, those of a channel in the order of the transfers. */
static void channels_make(sharing *s) {
    pipeline_plan *pipeline = s->pipeline;
    const ml_stage_graphs *c = &pipeline->cut;
    int count = c->transfer_count;
    pipeline->channels = ML_NEW_ARRAY(s->arena, pipeline_channel, (size_t)count + 1);
    pipeline->messages = ML_NEW_ARRAY(s->arena, pipeline_message, (size_t)count + 1);
    pipeline->message_of = ML_NEW_ARRAY(s->arena, int, (size_t)count + 1);
    pipeline->message_count = count;
    int *channel = ML_NEW_ARRAY(s->arena, int, (size_t)count + 1);
    for (int i = 0; i < count; i++) channel[i] = channel_of(s, &c->transfers[i]);
    int *next = ML_NEW_ARRAY(s->arena, int, (size_t)pipeline->channel_count + 2);
    for (int i = 0; i < count; i++) next[channel[i] + 1]++;
    for (int i = 0; i < pipeline->channel_count; i++) next[i + 1] += next[i];
    for (int i = 0; i < count; i++) {
        ml_type type = ml_plan_input_type(s->layout, s->graph, c->transfers[i].input);
        int at = pipeline->message_of[i] = next[channel[i]]++;
        pipeline->messages[at] = (pipeline_message){channel[i], -1, -1, ml_type_bytes(&type)};
        pipeline->channels[channel[i]].bytes += pipeline->messages[at].bytes;
    }
}

/* Sums over all ranks and stages, for the account of any rank. */
static void sums_make(sharing *s) {
    pipeline_plan *pipeline = s->pipeline;
    pipeline->sent = ML_NEW_ARRAY(s->arena, ml_traffic, (size_t)pipeline->ranks);
    for (int i = 0; i < pipeline->message_count; i++) {
        const pipeline_channel *channel = &pipeline->channels[pipeline->messages[i].channel];
        ml_traffic *sent = &pipeline->sent[channel->from % pipeline->ranks];
        if (channel->local) continue;
        sent->count++;
        sent->bytes += pipeline->messages[i].bytes;
    }
    for (int v = 0; v < pipeline->count; v++)
        for (int i = 0; i < pipeline->cut.stages[v].waves; i++)
            pipeline->flops += pipeline->cut.stages[v].flops[i];
}

/* ---- what all attempts share ---- */
static void inputs_wave(sharing *s) {
    const ml_stage_graphs *c = &s->pipeline->cut;
    uint32_t inputs = ml_graph_input_count(s->graph);
    s->pipeline->input_wave = ML_NEW_ARRAY(s->arena, int, (size_t)inputs + 1);
    for (int i = 0; i < c->transfer_count; i++)
        s->pipeline->input_wave[c->transfers[i].input] = c->transfers[i].to_wave;
}

static void states_list(sharing *s, int v) {
    pipeline_stage *stage = &s->pipeline->stages[v];
    const ml_stage *cut = &s->pipeline->cut.stages[v];
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
    pipeline_plan *pipeline = s->pipeline;
    const ml_stages *how = &s->layout->stages;
    ml_arena *arena = s->arena;
    ml_pipeline_problem *problem = &pipeline->problem;
    problem->kind = pipeline->microbatches > 1 ? (ml_schedule_kind)how->schedule : ML_SCHEDULE_1F1B;
    problem->ranks = pipeline->ranks;
    problem->chunks = pipeline->count / pipeline->ranks;
    problem->microbatches = pipeline->microbatches;
    problem->task_count = pipeline->task_count;
    problem->tasks = pipeline->tasks;
    ml_task_edge *edges = ML_NEW_ARRAY(
        arena, ml_task_edge, (size_t)pipeline->channel_count + (size_t)pipeline->task_count + 1);
    problem->edges = edges;
    for (int i = 0; i < pipeline->channel_count; i++) {
        edges[problem->edge_count++] =
            (ml_task_edge){pipeline->channels[i].from_task, pipeline->channels[i].to_task};
    }
    for (int v = 0; v < pipeline->count; v++) {
        const pipeline_stage *stage = &pipeline->stages[v];
        for (int i = 1; i < stage->task_count; i++) {
            int t = stage->first_task + i;
            edges[problem->edge_count++] = (ml_task_edge){t - 1, t};
        }
    }
    ml_pipeline_schedule_build(problem, arena, &pipeline->schedule);
}

/* Those of this rank; in a check, of one rank of each shape. */
static void stages_choose(sharing *s) {
    pipeline_plan *pipeline = s->pipeline;
    bool check = s->coordinate < 0;
    const int *representative =
        check ? pipeline_representatives(pipeline, s->graph, s->arena) : NULL;
    for (int v = 0; v < pipeline->count; v++) {
        int rank = v % pipeline->ranks, planned = check ? representative[rank] : s->coordinate;
        pipeline->stages[v].representative = check ? v - rank + planned : -1;
        pipeline->stages[v].planned = rank == planned;
        if (check) states_list(s, v);
    }
}

/* Of stages whose memory is to be known. */
static void slots_find(sharing *s) {
    for (int v = 0; v < s->pipeline->count; v++)
        if (s->coordinate < 0 || s->pipeline->stages[v].planned)
            pipeline_slots_assign(s->pipeline, v, s->arena);
}

/* The schedule and the slots for `count` microbatches; the pipeline keeps the most slots and
 * messages in flight of all counts. */
static void count_make(sharing *s, int count, struct pipeline_count *out) {
    pipeline_plan *pipeline = s->pipeline;
    ml_pipeline_schedule *schedule = &pipeline->schedule, most = *schedule;
    pipeline->problem.microbatches = pipeline->microbatches = count;
    ml_pipeline_schedule_build(&pipeline->problem, s->arena, schedule);
    for (int i = 0; i < pipeline->channel_count; i++)
        if (most.in_flight[i] > schedule->in_flight[i]) schedule->in_flight[i] = most.in_flight[i];
    out->slot_of = ML_NEW_ARRAY(s->arena, int *, (size_t)pipeline->count);
    for (int v = 0; v < pipeline->count; v++) {
        pipeline_stage *stage = &pipeline->stages[v];
        if (s->coordinate >= 0 && !stage->planned) continue;
        int slots = stage->slots;
        pipeline_slots_assign(pipeline, v, s->arena);
        out->slot_of[v] = stage->slot_of;
        if (slots > stage->slots) stage->slots = slots;
    }
    out->schedule = *schedule;
}

/* Steps of other programs' microbatches too, whose number varies: all counts up to the most, which
 * the plan has in the end. */
static void counts_make(sharing *s) {
    pipeline_plan *pipeline = s->pipeline;
    int most = pipeline->microbatches, chunks = pipeline->count / pipeline->ranks;
    struct pipeline_count *counts = ML_NEW_ARRAY(s->arena, struct pipeline_count, (size_t)most + 1);
    for (int count = 1; count <= most; count++)
        if (chunks == 1 || count % pipeline->ranks == 0) count_make(s, count, &counts[count]);
    for (int count = 1; count <= most; count++)
        counts[count].schedule.in_flight = pipeline->schedule.in_flight;
    pipeline->counts = counts;
}

void pipeline_partition(ml_graph *global, const ml_roots *roots, const ml_layout *layout,
                        ml_stage_map *map, int coordinate, ml_arena *arena, pipeline_plan **out) {
    sharing s = {.arena = arena, .graph = global, .layout = layout, .coordinate = coordinate};
    pipeline_plan *pipeline = s.pipeline = *out = ML_NEW(arena, pipeline_plan);
    pipeline->microbatches = roots->microbatches > 1 ? roots->microbatches : 1;
    pipeline->ranks = (int)layout->axis[layout->stages.mesh_axis].size;
    pipeline->script_inputs = ml_graph_input_count(global);
    ml_stage_cut(global, roots, layout, map, arena, &pipeline->cut);
    pipeline->count = pipeline->cut.count;
    pipeline->map = map;
    pipeline->stages = ML_NEW_ARRAY(arena, pipeline_stage, (size_t)pipeline->count);
    inputs_wave(&s);
    waves_find(&s);
    tasks_make(&s);
    stages_choose(&s);
    channels_make(&s);
    sums_make(&s);
    schedule_make(&s);
    slots_find(&s);
    if (roots->mixed) counts_make(&s);
}

void pipeline_partition_free(pipeline_plan *pipeline) {
    if (pipeline != NULL) ml_stage_graphs_free(&pipeline->cut);
}

uint64_t pipeline_hash(const pipeline_plan *pipeline, uint64_t seed) {
    for (int i = 0; i < pipeline->message_count; i++) {
        const pipeline_message *m = &pipeline->messages[i];
        int64_t fields[] = {m->channel, m->bytes};
        seed = ml_hash(fields, sizeof fields, seed);
    }
    for (int i = 0; i < pipeline->channel_count; i++) {
        const pipeline_channel *channel = &pipeline->channels[i];
        int fields[] = {channel->from, channel->to, channel->from_task, channel->to_task};
        seed = ml_hash(fields, sizeof fields, seed);
    }
    for (int r = 0; r < pipeline->ranks; r++)
        for (int i = 0; i < pipeline->schedule.action_count[r]; i++) {
            const ml_action *a = &pipeline->schedule.actions[r][i];
            int fields[] = {a->task, a->microbatch};
            seed = ml_hash(fields, sizeof fields, seed);
        }
    return seed;
}

/* ---- stages and tasks ---- */
void pipeline_plan_begin(ml_plan *plan, const pipeline_plan *partition) {
    pipeline_plan *pipeline = plan->pipeline = ML_NEW(plan->arena, pipeline_plan);
    *pipeline = *partition;
    pipeline->stages = ML_NEW_ARRAY(plan->arena, pipeline_stage, (size_t)pipeline->count);
    memcpy(pipeline->stages, partition->stages, sizeof *pipeline->stages * (size_t)pipeline->count);
}

ml_plan *pipeline_stage_begin(ml_plan *plan, int v, bool once_per_step) {
    pipeline_stage *stage = &plan->pipeline->stages[v];
    ml_stage *cut = &plan->pipeline->cut.stages[v];
    stage->representative = v;
    stage->waves.once_per_step = once_per_step;
    return plan_of_part(plan, &cut->graph, &cut->roots, &stage->local);
}

static void outputs_find(ml_plan *plan, int v) {
    pipeline_stage *stage = &plan->pipeline->stages[v];
    const ml_stage *cut = &plan->pipeline->cut.stages[v];
    int outputs = plan->roots.output_count;
    stage->outputs = ML_NEW_ARRAY(plan->arena, int, (size_t)outputs + 1);
    stage->output_task = ML_NEW_ARRAY(plan->arena, int, (size_t)outputs + 1);
    for (int i = 0; i < outputs; i++) {
        int at = cut->output_of[i];
        stage->outputs[i] = at >= 0 ? stage->tasks.saved_of_output[at] : -1;
        stage->output_task[i] = at >= 0 ? stage->tasks.task_of_output[at] : 0;
    }
}

void pipeline_stage_split(ml_plan *plan, int v) {
    pipeline_stage *stage = &plan->pipeline->stages[v];
    task_set *set = &stage->tasks;
    ml_plan *local = stage->local;
    stage->overflow_flags = local->roots.overflow_count;
    if (stage->overflow_flags > 0) local->roots.kept++; /* as what others wait for: not deferred */
    task_set_split(local->graph, &local->roots, plan->pipeline->input_wave, &stage->waves,
                   plan->arena, set);
    stage->plans = ML_NEW_ARRAY(plan->arena, ml_plan *, TASKS_MOST + 1);
    stage->plan_count = set->count + set->once_per_step;
    for (int p = 0; p < stage->plan_count; p++) {
        split_task *task = &set->tasks[p];
        ml_plan *part = plan_of_part(plan, &task->graph, &task->roots, &stage->plans[p]);
        part->local = part->pipeline_task = true;
    }
    if (stage->overflow_flags > 0) {
        stage->overflow_saved = set->saved_of_output[local->roots.output_count - 1];
        stage->overflow_task = set->task_of_output[local->roots.output_count - 1];
    }
    outputs_find(plan, v);
}

/* ---- messages ---- */
static int saved_of_input(const pipeline_stage *stage, uint32_t input) {
    for (int i = 0; i < stage->tasks.saved_count; i++) {
        if (stage->tasks.saved[i].input == input) return i;
    }
    return -1;
}

/* A message that no task reads any more still needs a destination. */
static int saved_spare(pipeline_stage *stage, int64_t bytes, ml_arena *arena) {
    task_set *set = &stage->tasks;
    saved_value *saved = ML_NEW_ARRAY(arena, saved_value, (size_t)set->saved_count + 1);
    if (set->saved_count > 0) memcpy(saved, set->saved, sizeof *saved * (size_t)set->saved_count);
    saved[set->saved_count] = (saved_value){UINT32_MAX, SAVED_GIVEN, bytes, set->buffer_bytes};
    set->buffer_bytes += memory_padded(bytes);
    set->saved = saved;
    return set->saved_count++;
}

/* The saved values at both ends of a message, where that stage is planned. */
static void messages_locate(ml_plan *plan) {
    pipeline_plan *pipeline = plan->pipeline;
    ml_arena *arena = plan->arena;
    pipeline_message *messages =
        ML_NEW_ARRAY(arena, pipeline_message, (size_t)pipeline->message_count);
    memcpy(messages, pipeline->messages, sizeof *messages * (size_t)pipeline->message_count);
    pipeline->messages = messages;
    for (int i = 0; i < pipeline->cut.transfer_count; i++) {
        const ml_transfer *t = &pipeline->cut.transfers[i];
        pipeline_message *m = &messages[pipeline->message_of[i]];
        pipeline_stage *from = &pipeline->stages[t->from], *to = &pipeline->stages[t->to];
        if (from->planned) m->saved_from = from->tasks.saved_of_output[t->output];
        if (to->planned) {
            m->saved_to = saved_of_input(to, t->input);
            if (m->saved_to < 0) m->saved_to = saved_spare(to, m->bytes, arena);
        }
        if (from->planned && from->tasks.saved[m->saved_from].bytes != m->bytes)
            ml_raise(ML_INTERNAL, "stage %d sends another size than stage %d expects", t->from,
                     t->to);
        if (from->planned && from->first_task + from->tasks.task_of_output[t->output] >
                                 pipeline->channels[m->channel].from_task)
            ml_raise(ML_INTERNAL, "stage %d would send what it has not computed yet", t->from);
    }
}

void pipeline_set_microbatches(ml_plan *plan, int microbatches) {
    pipeline_plan *pipeline = plan->pipeline;
    if (pipeline->microbatches == microbatches) return;
    const struct pipeline_count *count = pipeline->counts ? &pipeline->counts[microbatches] : NULL;
    if (count == NULL || count->schedule.actions == NULL)
        ml_raise(ML_INVALID, "the schedule has no step of %d microbatches", microbatches);
    pipeline->problem.microbatches = pipeline->microbatches = microbatches;
    pipeline->schedule = count->schedule;
    for (int v = 0; v < pipeline->count; v++) pipeline->stages[v].slot_of = count->slot_of[v];
}

void pipeline_plan_end(ml_plan *plan, int coordinate) {
    pipeline_plan *pipeline = plan->pipeline;
    messages_locate(plan);
    pipeline->until = pipeline_overflow_time(pipeline);
    for (int r = 0; r < pipeline->ranks; r++)
        if (coordinate < 0 || coordinate == r) pipeline_states_check(plan, r);
    pipeline_memory(plan, coordinate);
}

void pipeline_plan_free(pipeline_plan *pipeline) {
    if (pipeline == NULL) return;
    for (int v = 0; v < pipeline->count && pipeline->stages != NULL; v++) {
        pipeline_stage *stage = &pipeline->stages[v];
        for (int p = 0; p < stage->plan_count; p++) plan_free(stage->plans[p]);
        task_set_free(&stage->tasks);
        plan_free(stage->local);
    }
}
