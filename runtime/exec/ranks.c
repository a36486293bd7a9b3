/* Sessions on several ranks: the layout, the groups of ranks, and tensors cut and put together. */
#include <stdio.h>
#include <string.h>

#include "runtime/exec/session.h"

void ml_session_join(ml_session *session, ml_comm *comm) {
    session->comm = comm;
}

const ml_layout *ml_session_layout(const ml_session *session) {
    return session->ranks.layout;
}

/* The ranks of this one's collectives over mesh axis i, in order. */
static int peers_list(const ml_ranks *ranks, int i, int *peers) {
    ml_row row = ml_ranks_row(ranks, i);
    for (int64_t c = 0; c < row.size; c++) peers[c] = ranks->rank + (int)((c - row.at) * row.step);
    return (int)row.size;
}

static ml_status groups_make(ml_session *session, const ml_layout *layout) {
    int world = beside_core.world(session->comm), *peers = ml_alloc(sizeof(int) * (size_t)world);
    if (peers == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for %d ranks", world);
    session->everyone = beside_core.everyone(session->comm);
    ml_status status = ML_OK;
    for (int i = 0; i < layout->count && status == ML_OK; i++) {
        int count = peers_list(&session->ranks, i, peers);
        if (count == 1) continue;
        status = beside_core.group(session->comm, peers, count, &session->ranks.group[i]);
    }
    ml_free(peers);
    return status;
}

static ml_status ranks_fit(const ml_session *session, const ml_layout *layout) {
    int64_t ranks = ml_layout_ranks(layout);
    int world = session->comm != NULL ? beside_core.world(session->comm) : 1;
    if (ranks == world) return ML_OK;
    char mesh[256] = "";
    for (int i = 0; i < layout->count - session->groups.count; i++) {
        size_t length = strlen(mesh);
        snprintf(mesh + length, sizeof mesh - length, "%s%s=%lld", i ? "," : "",
                 layout->axis[i].name, (long long)layout->axis[i].size);
    }
    ml_fail(ML_INVALID, "the mesh %s has %lld rank%s, and %d %s running", mesh, (long long)ranks,
            ranks == 1 ? "" : "s", world, world == 1 ? "is" : "are");
    if (ranks > 1) return ml_help("mlua run -n %lld", (long long)ranks);
    const char *axis = layout->axis[0].name; /* where ranks are added most easily */
    for (int i = 1; i < layout->count; i++) {
        if (strcmp(layout->axis[i].name, "dp") == 0) axis = "dp";
    }
    return ml_help("give the mesh axes sizes whose product is %d, such as --mesh %s=%d", world,
                   axis, world);
}

void ml_session_set_groups(ml_session *session, const ml_groups *groups) {
    if (session->has_layout) return;
    session->groups = *groups;
    session->ranks.groups = &session->groups;
}

const ml_groups *ml_session_groups(const ml_session *session) {
    return &session->groups;
}

/* Of programs of groups, one rank: none. */
static ml_status find_group_layout(ml_session *session, int64_t size, const ml_layout **found) {
    *found = NULL;
    if (size == 0 || session->ranks.layout == NULL) return ML_OK;
    int k = 0;
    while (k < session->groups.count && session->groups.group[k] != size) k++;
    if (size == 1) k = session->groups.count;
    ml_layout *layout = &session->group_layouts[k];
    if (!ml_groups_layout(session->ranks.layout, &session->groups, size, layout))
        return ml_fail(ML_INTERNAL, "there are no groups of %lld ranks", (long long)size);
    if (ml_layout_ranks(layout) > 1) *found = layout;
    return ML_OK;
}

ml_status ml_session_use_groups(ml_session *session, int64_t size, ml_program *lead) {
    const ml_layout *layout;
    ML_TRY(find_group_layout(session, size, &layout));
    session->lead = lead;
    session->group_size = size;
    session->group_layout = layout;
    return ML_OK;
}

const ml_layout *session_program_layout(const ml_session *session) {
    return session->group_size > 0 ? session->group_layout : session->ranks.layout;
}

int64_t session_rank_under(const ml_session *session, const ml_layout *layout) {
    if (layout == NULL || layout == session->ranks.layout || layout == &session->unbounded)
        return session->ranks.rank;
    return ml_groups_rank(session->ranks.layout, &session->groups, session->ranks.rank, layout);
}

ml_status ml_session_lay_out(ml_session *session, const ml_layout *layout, bool plan_only) {
    if (session->has_layout) {
        if (memcmp(&session->layout, layout, sizeof *layout) == 0) return ML_OK;
        ml_fail(ML_INVALID, "the script uses two layouts");
        return ml_help("states live under one layout: pass the same to all programs");
    }
    if (!plan_only) {
        ML_TRY(ranks_fit(session, layout));
    }
    if (ml_layout_ranks(layout) > 1 && session->programs != NULL) {
        ml_fail(ML_INVALID, "a program was compiled before the layout was given");
        return ml_help("give the layout to the first m.compile or m.train of the script");
    }
    memcpy(&session->layout, layout, sizeof *layout);
    session->has_layout = true;
    if (ml_layout_ranks(layout) == 1) return ML_OK;
    session->ranks.layout = &session->layout;
    if (plan_only) return ML_OK;
    session->ranks.comm = session->comm;
    session->ranks.rank = beside_core.rank(session->comm);
    return groups_make(session, &session->layout);
}

ml_status session_ready(const ml_session *session) {
    bool several = session->comm != NULL && beside_core.world(session->comm) > 1;
    if (session->comm == NULL && session->ranks.layout != NULL) {
        int64_t ranks = ml_layout_ranks(session->ranks.layout);
        ml_fail(ML_INVALID, "the layout is for %lld ranks, and this is one", (long long)ranks);
        return ml_help("programs under it can be looked at here; mlua run -n %lld runs them",
                       (long long)ranks);
    }
    if (!several) return ML_OK;
    if (session->ranks.layout == NULL) {
        ml_fail(ML_INVALID, "%d ranks are running, and the script has no layout",
                beside_core.world(session->comm));
        return ml_help("pass layout = m.layout { ... } to m.train or m.compile");
    }
    return ML_OK;
}

/* The devices of the ranks must be alike, and plans must fit the smallest. */
ml_status session_devices_agree(ml_session *session) {
    ml_device *device = session->device;
    ml_comm *comm = session->comm;
    if (comm == NULL || beside_core.world(comm) == 1) return ML_OK;
    char what[128];
    ml_target *target = &device->target;
    int64_t facts[3] = {target->kind, target->arch, target->multiprocessors};
    snprintf(what, sizeof what, "the device (%s, architecture %d, %d processors)",
             device->ops->name, target->arch, target->multiprocessors);
    if (target->kind == ML_TARGET_C) facts[1] = facts[2] = 0;
    ml_status status = beside_core.agree(comm, ml_hash(facts, sizeof facts, 0), what);
    int64_t host = beside_core.host_ranks(comm);
    if (status == ML_OK) status = beside_core.least(comm, &target->memory_bytes);
    if (status == ML_OK) status = beside_core.least(comm, &target->link_bytes);
    if (status == ML_OK) status = beside_core.least(comm, &target->host_bytes);
    if (status == ML_OK) status = beside_core.least(comm, &target->host_memory);
    if (status == ML_OK) status = beside_core.least(comm, &host);
    target->host_ranks = (int)host;
    target->host_memory /= host > 0 ? host : 1;
    return status;
}

ml_status session_connect(ml_session *session) {
    ml_device *device = session->device;
    if (session->everyone == NULL || session->connected) return ML_OK;
    session->connected = true;
    return device->ops->join != NULL ? device->ops->join(device) : ML_OK;
}

ml_status ml_session_step(ml_session *session, int64_t *stop) {
    if (session->everyone == NULL) return ML_OK;
    beside_core.step(session->comm);
    int64_t least = -*stop;
    ml_status status = beside_core.least(session->comm, &least);
    *stop = -least;
    return status;
}

/* Through the device where that has its own ways, which also reach other hosts. */
ml_status session_collect(const ml_session *session, int i, ml_collective kind, const void *from,
                          void *to, int64_t count, ml_dtype dtype) {
    const ml_device *device = session->device;
    ml_group *group = session->ranks.group[i];
    if (device->ops->collect != NULL) {
        const ml_collective_step what = {.kind = kind,
                                         .mesh_axis = i,
                                         .ranks = session->ranks.layout->axis[i].size,
                                         .count = count,
                                         .dtype = dtype,
                                         .combine = ML_COMBINE_SUM};
        return device->ops->collect(session->device, &what, from, to);
    }
    return beside_core.collect(group, kind, from, to, count, dtype, ML_COMBINE_SUM);
}

/* ---- tensors ---- */
typedef struct {
    const ml_session *session;
    uint32_t state;
    ml_type type;
    ml_placements places;
} place_call;

static void place_body(void *context) {
    place_call *call = context;
    const ml_layout *layout = call->session->ranks.layout;
    call->type = ml_plan_state_type(layout, call->session->graph, call->state);
    if (layout == NULL) return;
    call->places = ml_plan_state_places(layout, call->session->graph, call->state);
}

ml_status session_place(const ml_session *session, uint32_t state, ml_type *local,
                        ml_placements *places) {
    place_call call = {.session = session, .state = state};
    ml_status status = ml_protect(place_body, &call);
    *local = call.type;
    *places = call.places;
    return status;
}

/* Blocks of all ranks along the mesh axes over which the tensor is split, the outermost first. */
static ml_status blocks_gather(const ml_session *session, const ml_type *local,
                               const ml_placements *places, char *blocks, char *other) {
    const ml_layout *layout = session->ranks.layout;
    int64_t count = ml_type_elements(local), bytes = ml_type_bytes(local);
    ml_status status = ML_OK;
    for (int i = layout->count - 1; i >= 0 && status == ML_OK; i--) {
        if (layout->axis[i].size == 1 || places->over[i].kind != ML_SPLIT) continue;
        status = session_collect(session, i, ML_COLLECTIVE_ALL_GATHER, blocks, other, count,
                                 (ml_dtype)local->dtype);
        count *= layout->axis[i].size;
        bytes *= layout->axis[i].size;
        if (status == ML_OK && bytes > 0) memcpy(blocks, other, (size_t)bytes);
    }
    return status;
}

/* Parts of which the last are filled up make more than the whole. */
static int64_t block_count(const ml_session *session, const ml_placements *places) {
    const ml_layout *layout = session->ranks.layout;
    int64_t count = 1;
    for (int i = 0; layout != NULL && i < layout->count; i++)
        if (places->over[i].kind == ML_SPLIT) count *= layout->axis[i].size;
    return count;
}

/* The rank that holds block `block`, among those that agree with this one where nothing is split.
 */
static int64_t block_rank(const ml_session *session, const ml_placements *places, int64_t block) {
    const ml_layout *layout = session->ranks.layout;
    int64_t rank = 0, step = 1;
    for (int i = layout->count - 1; i >= 0; i--) {
        int64_t size = layout->axis[i].size;
        bool split = size > 1 && places->over[i].kind == ML_SPLIT;
        int64_t own = ml_layout_coordinate(layout, session->ranks.rank, i);
        rank += step * (split ? block % size : own);
        if (split) block /= size;
        step *= size;
    }
    return rank;
}

/* Sums of which each rank has a part, added up. */
static ml_status parts_add(const ml_session *session, const ml_type *local,
                           const ml_placements *places, void *sum) {
    const ml_layout *layout = session->ranks.layout;
    ml_status status = ML_OK;
    for (int i = 0; i < layout->count && status == ML_OK; i++)
        if (layout->axis[i].size > 1 && places->over[i].kind == ML_PARTIAL_SUM)
            status = session_collect(session, i, ML_COLLECTIVE_ALL_REDUCE, sum, sum,
                                     ml_type_elements(local), (ml_dtype)local->dtype);
    return status;
}

typedef struct {
    const ml_session *session;
    const ml_type *global, *local;
    const ml_placements *places;
    int64_t count; /* of blocks */
    const char *blocks;
    void *whole;
} paste_call;

static void paste_body(void *context) {
    const paste_call *call = context;
    int64_t bytes = ml_type_bytes(call->local);
    for (int64_t block = 0; bytes > 0 && block < call->count; block++) {
        ml_shard_paste(call->session->ranks.layout, call->global, call->places,
                       block_rank(call->session, call->places, block),
                       ml_dtypes[call->global->dtype].bytes, call->blocks + block * bytes,
                       call->whole);
    }
}

ml_status session_gather(const ml_session *session, uint32_t state, const void *part, void *whole) {
    const ml_type *global = &ml_graph_state(session->graph, state)->type;
    ml_type local;
    ml_placements places;
    ml_status status = session_place(session, state, &local, &places);
    if (status != ML_OK) return status;
    int64_t count = block_count(session, &places), bytes = count * ml_type_bytes(&local);
    char *blocks = ml_alloc((size_t)bytes + 1), *other = ml_alloc((size_t)bytes + 1);
    if (blocks == NULL || other == NULL) {
        status = ml_fail(ML_NO_MEMORY, "out of memory while gathering a state of %lld bytes",
                         (long long)bytes);
    } else {
        memcpy(blocks, part, (size_t)ml_type_bytes(&local));
        status = parts_add(session, &local, &places, blocks);
        if (status == ML_OK) status = blocks_gather(session, &local, &places, blocks, other);
        paste_call call = {session, global, &local, &places, count, blocks, whole};
        if (status == ML_OK) status = ml_protect(paste_body, &call);
    }
    ml_free(blocks);
    ml_free(other);
    return status;
}

typedef struct {
    const ml_layout *layout;
    int64_t rank;
    const ml_type *global;
    const ml_placements *places;
    const void *whole;
    void *part;
} cut_call;

static void cut_body(void *context) {
    const cut_call *call = context;
    const ml_layout *layout = call->layout;
    int64_t rank = call->rank;
    bool holds = true; /* a sum lies with the first rank; others have zeros */
    for (int i = 0; i < layout->count; i++)
        if (call->places->over[i].kind == ML_PARTIAL_SUM)
            holds = holds && ml_layout_coordinate(layout, rank, i) == 0;
    if (holds) {
        ml_shard_cut(layout, call->global, call->places, rank, ml_dtypes[call->global->dtype].bytes,
                     call->whole, call->part);
        return;
    }
    ml_type local = ml_layout_local(layout, call->global, call->places);
    memset(call->part, 0, (size_t)ml_type_bytes(&local));
}

ml_status session_cut(const ml_session *session, const ml_layout *layout, const ml_type *global,
                      const ml_placements *places, const void *whole, void *part) {
    cut_call call = {layout, session_rank_under(session, layout), global, places, whole, part};
    return ml_protect(cut_body, &call);
}

typedef struct {
    const ml_layout *layout;
    int64_t rank;
    const ml_type *global;
    const ml_placements *places;
    int64_t first[ML_MAX_AXES], held[ML_MAX_AXES];
} range_call;

static void range_body(void *context) {
    range_call *call = context;
    ml_shard_range(call->layout, call->global, call->places, call->rank, call->first, call->held);
}

ml_status ml_program_own_rows(const ml_program *program, uint32_t input, int64_t *first,
                              int64_t *held) {
    const ml_session *session = program->session;
    const ml_type *global = &ml_graph_input(session->graph, input)->type;
    int i = 0;
    while (i < program->input_count && program->input_ids[i] != input) i++;
    *first = *held = 0;
    if (i == program->input_count) return ML_OK;
    *held = global->rank > 0 ? global->size[0] : 1;
    if (program->plan->layout == NULL || global->rank == 0) return ML_OK;
    const ml_layout *layout = program->plan->layout;
    range_call call = {
        layout, session_rank_under(session, layout), global, &program->input_places[i], {0}, {0}};
    ml_status status = ml_protect(range_body, &call);
    *first = call.first[0];
    *held = call.held[0];
    return status;
}
