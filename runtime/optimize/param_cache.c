/* The parameter cache: parameters in the dtype in which products read them, as states.
 *
 * Without it a program that sets parameters would read all of them once more at the start of each
 * step to cast them. With it the kernel that computes a parameter's new value writes its cast too;
 * the casts of a merged product are side by side. Of a scaled product
 * (ops/quantize/scale_products.c) the largest element comes from that kernel, which is cached too,
 * and the values of 8 bits from the next. Of what no step sets, such as frozen weights, it writes
 * nothing, also where they lie beside what it writes (cache_updates.c). A program that runs once
 * for each microbatch sets no parameters: the one that applies its sums writes its cache.
 *
 * plan->rebuild computes the cache before the first run, and after another program has set a
 * parameter and not what is cached of it (exec/param_cache_rebuild.c): once a step what the layout
 * gathers once a step (ml_mesh_axis.keep), which is cached gathered, on a CPU too.
 *
 * What lies on ranks of several groups (gather_sharded.c) is cached gathered wherever the program
 * reads it, and its rebuild is of all ranks at once.
 *
 * Programs that run often (ml_roots), such as sampling, cache all that they gather, and what is
 * computed of parameters before a cast: the parts in bf16 of a router's weights. Programs that
 * cache the same values share the state. One that merges fewer of them reads parts of what another
 * has side by side: queries, keys and values are one product where a rank has whole sequences, and
 * what is gathered is a product of its own where it has not (merge_products.c). So does a program
 * of what it has side by side itself, of which another product reads one value.
 *
 * In memory they cost what the casts cost while all are alive, at the end of the forward pass; only
 * a program whose peak comes later, when few are left, needs more. */
#include "runtime/graph/rewrite.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/optimize/cache_updates.h"
#include "runtime/optimize/optimize.h"

enum { UNIT = 16 }; /* bytes, to which products want their operands aligned */

/* The state that holds a value: 1 + its number; 0: none does. With an axis it holds others too,
 * side by side along that axis. */
typedef struct {
    uint32_t state;
    ml_axis axis;
    int64_t start;
} place;

typedef struct {
    ml_plan *plan;
    ml_graph *g;
    ml_arena *scratch;
    uint32_t count;
    ml_ref *new_value; /* by state; 0 where the program does not set it */
    bool *sets;        /* by state: the program does */
    bool *set;         /* by state: a step does, by this program or by one after microbatches */
    bool all;          /* any parameter may be cached; else only what all ranks gather */
    bool often;        /* it runs several times before others set the rest */
    bool keeps;        /* it caches what it does not set: it runs often, or sets other parameters */
    bool *source;      /* by node: f32 parameters, moved at most */
    bool *cast;        /* by node: the same, cast to a narrow float; to 8 bits also scaled, and in
                          programs that run often whatever is derived */
    bool *derived;     /* by node: computed of such parameters and numbers alone, elementwise */
    bool *number;      /* by node: of these one number, a factor of a scaled product's scale */
    bool *cacheable; /* by node: f32 parameters after casts, moves and gathers that may be cached */
    bool casts;      /* casts are cached too: what products of a GPU read */
    bool *operand;   /* by node: a product reads it in memory; of what is gathered: anything */
    place *place;    /* by node */
    ml_ref *within;  /* by node: the CONCAT of whose state it is a part; 0: none */
    bool *listed;    /* by state: it is among `cached` */
    ml_update *cached; /* the states, and what they hold at first */
    int cached_count;
} work;

static bool is_product(const ml_graph *g, ml_ref n) {
    ml_op op = ml_graph_node(g, n)->op;
    /* those that widen are gradients of weights, but for DOT */
    return op == ML_OP_DOT || (ml_op_is(op, ML_PRODUCT) && !ml_op_is(op, ML_WIDENS));
}

/* Every element of the source once, or some of them. */
static bool rearranges(const ml_graph *g, ml_ref n) {
    ml_op op = ml_graph_node(g, n)->op;
    return op == ML_OP_CONCAT || ml_op_selects(op);
}

/* An all-gather over ranks of several groups. */
static bool over_all_ranks(const work *w, ml_ref n) {
    if (ml_graph_node(w->g, n)->op != ML_OP_ALL_GATHER) return false;
    const int64_t *args = ml_graph_args(w->g, n);
    return plan_layout_along(w->plan, (int)args[0], args[1]) != w->plan->layout;
}

/* Put together once a step instead of for each microbatch: what all ranks gather, and what its
 * program does where its memory would be there anyway. */
static bool gathers(const work *w, ml_ref n) {
    const ml_node *node = ml_graph_node(w->g, n);
    if (over_all_ranks(w, n)) return true;
    return node->op == ML_OP_ALL_GATHER && w->all && w->often && w->plan->layout != NULL &&
           (w->plan->roots.often || w->plan->layout->axis[ml_graph_args(w->g, n)[0]].keep) &&
           w->cacheable[ml_graph_source(w->g, n, 0)];
}

/* Its sources precede it. */
static bool is_derived(const work *w, ml_ref n) {
    const ml_node *node = ml_graph_node(w->g, n);
    const ml_op_class op_class = ml_ops[node->op].op_class;
    bool derived = node->op == ML_OP_CONST || w->source[n] ||
                   (node->op != ML_OP_RANDOM && node->source_count > 0 &&
                    (op_class == ML_CLASS_MAP || op_class == ML_CLASS_REDUCE));
    for (int i = 0; i < node->source_count; i++)
        derived = derived && w->derived[ml_graph_source(w->g, n, i)];
    return derived;
}

/* The numbers of which the scale n of a product is made, that follow from parameters. */
static void find_numbers(work *w, ml_ref n) {
    const ml_node *node = ml_graph_node(w->g, n);
    if (w->derived[n])
        w->number[n] = node->op != ML_OP_CONST;
    else if (node->op == ML_OP_MUL)
        for (int i = 0; i < 2; i++) find_numbers(w, ml_graph_source(w->g, n, i));
}

/* Which nodes are parameters, and which are their casts. */
static void find_casts(work *w) {
    const ml_graph *g = w->g;
    for (ml_ref n = 1; n < w->count; n++) {
        const ml_node *node = ml_graph_node(g, n);
        int dtype = ml_graph_type(g, n)->dtype;
        if (node->flags & ML_NODE_FUNCTION) continue;
        if (node->op == ML_OP_STATE) {
            uint32_t state = (uint32_t)ml_graph_args(g, n)[0];
            ml_ref value = w->new_value[state];
            w->source[n] = w->derived[n] = dtype == ML_F32 &&
                                           (value != 0 ? value != n : w->keeps) &&
                                           ml_graph_state(g, state)->kind == ML_STATE_PARAMETER;
            /* Stored as products read them (stdlib/module.lua): side by side in merged ones. */
            w->cast[n] = ml_is_narrow((ml_dtype)dtype) && value == 0 && w->keeps &&
                         ml_graph_state(g, state)->kind == ML_STATE_PARAMETER;
            const bool narrow = dtype == ML_I8 || dtype == ML_E4M3; /* ops/quantize/weights.h */
            w->cacheable[n] = w->source[n] || (narrow && value == 0 && w->often);
            continue;
        }
        w->derived[n] = is_derived(w, n);
        if (over_all_ranks(w, n)) {
            const ml_ref part = ml_graph_source(g, n, 0);
            w->source[n] = w->source[part];
            w->cast[n] = w->cast[part];
            w->derived[n] = w->derived[part];
        }
        if (node->op == ML_OP_CAST) {
            const ml_ref from = ml_graph_source(g, n, 0);
            const bool scaled = (ml_dtypes[dtype].bytes == 1 || w->plan->roots.often) &&
                                w->derived[from] && ml_graph_type(g, n)->rank > 0;
            w->cast[n] = ml_is_narrow((ml_dtype)dtype) && (w->source[from] || scaled);
        }
        if (w->casts && ml_is_scaled_dot(g, n)) find_numbers(w, ml_graph_source(g, n, 2));
        if (w->casts && ml_op_is_ragged(node->op) &&
            ml_ragged_is_scaled(g, ml_graph_source(g, n, 0)))
            find_numbers(w, ml_graph_source(g, n, RAGGED_SCALE));
        w->cacheable[n] =
            gathers(w, n) || (node->op == ML_OP_CAST && w->cacheable[ml_graph_source(g, n, 0)]);
        if (!rearranges(g, n)) continue;
        w->source[n] = w->cast[n] = w->cacheable[n] = true;
        for (int i = 0; i < node->source_count; i++) {
            w->source[n] = w->source[n] && w->source[ml_graph_source(g, n, i)];
            w->cast[n] = w->cast[n] && w->cast[ml_graph_source(g, n, i)];
            w->cacheable[n] = w->cacheable[n] && w->cacheable[ml_graph_source(g, n, i)];
        }
    }
}

/* Whether source i of n is the bias of a product, which cuBLASLt reads from memory in the product's
 * dtype (takes_bias in codegen/lower/gemm.c). */
static bool is_bias(const ml_graph *g, ml_ref n, int i) {
    if (ml_graph_node(g, n)->op != ML_OP_ADD) return false;
    ml_ref product = ml_graph_source(g, n, 1 - i), bias = ml_graph_source(g, n, i);
    return ml_graph_node(g, product)->op == ML_OP_DOT &&
           ml_graph_type(g, bias)->rank < ml_graph_type(g, product)->rank;
}

/* What products read: casts, moved or not, and their biases. Other casts are fused into the kernels
 * that need them. */
static void find_operands(work *w) {
    const ml_graph *g = w->g;
    for (ml_ref n = w->count - 1; n > 0; n--) {
        const ml_node *node = ml_graph_node(g, n);
        bool moves = w->cast[n] && rearranges(g, n) && node->op != ML_OP_CONCAT;
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(g, n, i);
            bool joined = ml_graph_node(g, source)->op == ML_OP_CONCAT && !rearranges(g, n);
            bool reads =
                moves ? w->operand[n] : joined || is_bias(g, n, i) || (is_product(g, n) && i < 2);
            /* The gathered value is cached; or a part is cast before each gather, at little cost,
             * because other GPUs read it from the arena. */
            if (node->op == ML_OP_ALL_GATHER && (w->cacheable[source] || over_all_ranks(w, n)))
                continue;
            if ((gathers(w, source) && !over_all_ranks(w, source)) || (w->cast[source] && reads))
                w->operand[source] = true;
        }
    }
}

static bool holds(const work *w, ml_ref n) {
    int op = ml_graph_node(w->g, n)->op;
    if (gathers(w, n)) return w->operand[n];
    if (w->number[n]) return true;
    return w->casts && w->cast[n] && w->operand[n] && (op == ML_OP_CAST || op == ML_OP_CONCAT);
}

/* All-gathers over all ranks that the program itself reads, and not only other cached values. */
static void find_gathers_read(work *w) {
    const ml_graph *g = w->g;
    const ml_roots *roots = &w->plan->roots;
    bool *live = ML_NEW_ARRAY(w->scratch, bool, w->count);
    for (int i = 0; i < roots->output_count; i++) live[roots->outputs[i]] = true;
    for (int i = 0; i < roots->update_count; i++) live[roots->updates[i].value] = true;
    for (ml_ref n = w->count - 1; n > 0; n--) {
        if (!live[n]) continue;
        if (over_all_ranks(w, n)) w->operand[n] = true;
        if (holds(w, n)) continue;
        for (int i = 0; i < ml_graph_node(g, n)->source_count; i++)
            live[ml_graph_source(g, n, i)] = true;
    }
}

/* Any of the states that a cast is computed from. */
static uint32_t first_state(const work *w, ml_ref n) {
    while (ml_graph_node(w->g, n)->op != ML_OP_STATE) {
        const bool number = ml_graph_node(w->g, ml_graph_source(w->g, n, 0))->op == ML_OP_CONST;
        n = ml_graph_source(w->g, n, number);
    }
    return (uint32_t)ml_graph_args(w->g, n)[0];
}

/* Equal for what is computed from the same states in the same way, in any program. */
static uint64_t recipe_of(const work *w, ml_ref n) {
    const ml_graph *g = w->g;
    const ml_node *node = ml_graph_node(g, n);
    const ml_type *type = ml_graph_type(g, n);
    uint64_t hash = ml_hash(ml_graph_args(g, n), node->arg_count * sizeof(int64_t), node->op);
    hash = ml_hash(type->axis, type->rank * sizeof(ml_axis), hash);
    hash = ml_hash(type->size, type->rank * sizeof(int64_t), hash);
    for (int i = 0; i < node->source_count; i++) {
        uint64_t source = recipe_of(w, ml_graph_source(g, n, i));
        hash = ml_hash(&source, sizeof source, hash);
    }
    return hash;
}

/* What lies in a part of a CONCAT, before its axes were made one. */
static ml_ref leaf_of(const ml_graph *g, ml_ref part) {
    while (ml_graph_node(g, part)->op == ML_OP_MERGE || ml_graph_node(g, part)->op == ML_OP_RENAME)
        part = ml_graph_source(g, part, 0);
    return part;
}

/* The values that lie side by side in n: itself where it is no CONCAT. */
static int list_leaves(const work *w, ml_ref n, ml_ref **leaves) {
    const ml_node *node = ml_graph_node(w->g, n);
    const bool joins = node->op == ML_OP_CONCAT;
    const int count = joins ? node->source_count : 1;
    *leaves = ML_NEW_ARRAY(w->scratch, ml_ref, count);
    for (int i = 0; i < count; i++)
        (*leaves)[i] = joins ? leaf_of(w->g, ml_graph_source(w->g, n, i)) : n;
    return count;
}

static uint32_t add_state(work *w, ml_ref n, uint64_t recipe) {
    const ml_state *of = ml_graph_state(w->g, first_state(w, n));
    ml_ref *leaves;
    const int count = list_leaves(w, n, &leaves);
    uint64_t *parts = ML_NEW_ARRAY(w->scratch, uint64_t, count);
    for (int i = 0; i < count; i++) parts[i] = recipe_of(w, leaves[i]);
    ml_state state = {
        .name = ml_arena_format(w->scratch, "%s%s %s", of->name != NULL ? of->name : "?",
                                gathers(w, n) ? "," : " in",
                                gathers(w, n)  ? "gathered"
                                : w->number[n] ? "largest"
                                               : ml_dtypes[ml_graph_type(w->g, n)->dtype].name),
        .kind = ML_STATE_CACHE,
        .type = *ml_graph_type(w->g, n),
        .origin = of->origin,
        .recipe = recipe,
        .parts = parts,
        .part_count = count > 1 ? count : 0,
    };
    return ml_graph_add_state(w->g, &state);
}

/* ---- Parts of what other programs cache ------------------------------------------------------ */

/* A state of several parts: what they are in this program (0: it lacks one), and where each begins
 * along the axis (0: the program does not read the state). */
typedef struct {
    ml_ref *leaves;
    int64_t *starts;
    ml_axis axis;
    bool built;
} holder;

/* A value whose leaves are those of a state from number `at` on. */
typedef struct {
    ml_ref value;
    uint32_t state;
    int at;
} part_use;

typedef struct {
    work *w;
    ml_index by_part; /* states by the recipe of each part */
    holder *holders;  /* by state */
    ML_VEC(part_use) uses;
} part_search;

static bool sets_parameters(const work *w) {
    const ml_roots *roots = &w->plan->roots;
    for (int i = 0; i < roots->update_count; i++)
        if (ml_graph_state(w->g, roots->updates[i].state)->kind == ML_STATE_PARAMETER) return true;
    return false;
}

static bool is_leaf(const work *w, ml_ref n) {
    return (w->cast[n] || holds(w, n)) && ml_graph_node(w->g, n)->op != ML_OP_CONCAT;
}

/* A value of the program is a part of each state that has its recipe among its parts, also one
 * that products read as it is stored. */
static void find_leaf(part_search *s, ml_ref n) {
    uint32_t cursor = 0, id;
    const uint64_t recipe = recipe_of(s->w, n);
    while ((id = ml_index_next(&s->by_part, recipe, &cursor)) != ML_INDEX_NONE) {
        const ml_state *state = ml_graph_state(s->w->g, id);
        holder *h = &s->holders[id];
        if (h->leaves == NULL) h->leaves = ML_NEW_ARRAY(s->w->scratch, ml_ref, state->part_count);
        for (int i = 0; i < state->part_count; i++)
            if (state->parts[i] == recipe) h->leaves[i] = n;
    }
}

/* Whether the state holds these leaves one after another. */
static bool match(part_search *s, uint32_t id, ml_ref value, const ml_ref *leaves, int count) {
    const ml_state *state = ml_graph_state(s->w->g, id);
    int at = 0, i = 0;
    while (recipe_of(s->w, leaves[0]) != state->parts[at]) at++;
    if (at + count > state->part_count) return false;
    while (i < count && recipe_of(s->w, leaves[i]) == state->parts[at + i]) i++;
    if (i < count) return false;
    *ML_PUSH(s->w->scratch, &s->uses) = (part_use){value, id, at};
    return true;
}

static void find_holder(part_search *s, ml_ref n) {
    uint32_t cursor = 0, id;
    ml_ref *leaves;
    const int count = list_leaves(s->w, n, &leaves);
    const uint64_t first = recipe_of(s->w, leaves[0]);
    while ((id = ml_index_next(&s->by_part, first, &cursor)) != ML_INDEX_NONE)
        if (match(s, id, n, leaves, count)) return;
}

/* The axes of a value that the state lacks. */
static int list_inner(const ml_type *type, const ml_type *whole, ml_axis *axes, int64_t *sizes) {
    int count = 0;
    for (int i = 0; i < type->rank; i++)
        if (ml_type_find(whole, type->axis[i]) < 0)
            axes[count] = type->axis[i], sizes[count++] = type->size[i];
    return count;
}

/* The one axis of the state that a leaf lacks, along which parts lie; 0: there is no such one. */
static ml_axis outer_axis(const ml_type *leaf, const ml_type *whole) {
    ml_axis found = 0;
    for (int i = 0; i < whole->rank; i++) {
        if (ml_type_find(leaf, whole->axis[i]) >= 0) continue;
        if (found != 0) return 0;
        found = whole->axis[i];
    }
    return found;
}

/* As merge_products.c does. */
static ml_ref flatten(ml_graph *g, ml_ref x, const ml_type *whole, ml_axis to) {
    ml_axis axes[ML_MAX_AXES];
    int64_t sizes[ML_MAX_AXES];
    const int count = list_inner(ml_graph_type(g, x), whole, axes, sizes);
    if (count == 1) return ml_rename(g, x, axes[0], to);
    x = ml_merge(g, x, axes[0], axes[1], to);
    for (int i = 2; i < count; i++) x = ml_merge(g, x, to, axes[i], to);
    return x;
}

/* What the state holds, of the program's leaves: where it has all, where products can read each
 * where it is, and where that is what the state was made for. */
static void build_whole(part_search *s, uint32_t id) {
    work *w = s->w;
    const ml_state *state = ml_graph_state(w->g, id);
    holder *h = &s->holders[id];
    ml_axis axis = 0;
    ml_ref *parts = ML_NEW_ARRAY(w->scratch, ml_ref, state->part_count);
    h->built = true;
    h->starts = ML_NEW_ARRAY(w->scratch, int64_t, (size_t)state->part_count + 1);
    ml_graph_set_flags(w->g, 0);
    for (int i = 0; i < state->part_count; i++) {
        const ml_ref leaf = h->leaves[i];
        if (leaf == 0 || (axis = outer_axis(ml_graph_type(w->g, leaf), &state->type)) == 0) return;
        ml_graph_set_origin(w->g, ml_graph_origin(w->g, leaf));
        parts[i] = flatten(w->g, leaf, &state->type, axis);
        const int64_t size = ml_type_size(ml_graph_type(w->g, parts[i]), axis);
        if (size * ml_dtypes[state->type.dtype].bytes % UNIT != 0) return;
        h->starts[i + 1] = h->starts[i] + size;
    }
    const ml_ref whole = ml_concat(w->g, parts, state->part_count, axis);
    if (recipe_of(w, whole) != state->recipe) return;
    h->axis = axis;
    w->listed[id] = true;
    w->cached[w->cached_count++] = (ml_update){id, whole};
}

/* Of values that are not side by side with others already, also of one that some program caches as
 * it is: that may be no more than planned. A program that sets parameters updates each with those
 * that it is computed from. */
static void share_parts(work *w, const ml_index *known, uint32_t states) {
    part_search s = {.w = w, .by_part.arena = w->scratch};
    bool any = false;
    for (uint32_t id = 0; id < states; id++) {
        const ml_state *state = ml_graph_state(w->g, id);
        for (int i = 0; i < state->part_count; i++) ml_index_add(&s.by_part, state->parts[i], id);
        any = any || state->part_count > 0;
    }
    if (!any || sets_parameters(w)) return;
    s.holders = ML_NEW_ARRAY(w->scratch, holder, (size_t)states + 1);
    for (ml_ref n = 1; n < w->count; n++)
        if (is_leaf(w, n)) find_leaf(&s, n);
    for (ml_ref n = 1; n < w->count; n++) {
        uint32_t cursor = 0;
        const bool joins = ml_graph_node(w->g, n)->op == ML_OP_CONCAT;
        if (!holds(w, n)) continue;
        if (joins && ml_index_next(known, recipe_of(w, n), &cursor) != ML_INDEX_NONE) continue;
        find_holder(&s, n);
    }
    for (uint32_t i = 0; i < s.uses.count; i++) {
        const part_use *use = &s.uses.at[i];
        const holder *h = &s.holders[use->state];
        if (!h->built) build_whole(&s, use->state);
        if (h->axis == 0) continue;
        w->place[use->value] = (place){use->state + 1, h->axis, h->starts[use->at]};
    }
}

static ml_ref read_part(const work *w, ml_graph *to, const place *p, const ml_type *type) {
    const ml_type *whole = &ml_graph_state(w->g, p->state - 1)->type;
    const int64_t id = p->state - 1, all = ml_type_size(whole, p->axis);
    const int64_t size = ml_type_elements(type) / (ml_type_elements(whole) / all);
    ml_axis axes[ML_MAX_AXES];
    int64_t sizes[ML_MAX_AXES];
    const int count = list_inner(type, whole, axes, sizes);
    ml_ref x = ml_graph_add(to, ML_OP_STATE, NULL, 0, &id, 1, whole);
    x = ml_slice(to, x, p->axis, p->start, p->start + size);
    if (count == 1) x = ml_rename(to, x, p->axis, axes[0]);
    for (int i = count; i-- > 1;) {
        int64_t outer = 1;
        for (int k = 0; k < i; k++) outer *= sizes[k];
        x = ml_split(to, x, p->axis, i == 1 ? axes[0] : p->axis, outer, axes[i], sizes[i]);
    }
    return ml_permute(to, x, type);
}

/* Of values that the program caches side by side with others too, such as keys that one product
 * reads with the values and another one alone: where products can read each where it is. */
static void find_within(work *w, ml_ref whole) {
    const ml_type *type = ml_graph_type(w->g, whole);
    const ml_axis axis = (ml_axis)ml_graph_args(w->g, whole)[0];
    const int bytes = ml_dtypes[type->dtype].bytes;
    const bool aligned = ml_type_size(type, axis) * bytes % UNIT == 0;
    ml_ref *leaves;
    const int count = list_leaves(w, whole, &leaves);
    int64_t start = 0;
    for (int i = 0; i < count; i++) {
        const ml_ref leaf = leaves[i], part = ml_graph_source(w->g, whole, i);
        const bool apart =
            is_leaf(w, leaf) && holds(w, leaf) && w->place[leaf].state == 0 && w->within[leaf] == 0;
        if (apart && aligned && start * bytes % UNIT == 0 &&
            outer_axis(ml_graph_type(w->g, leaf), type) == axis &&
            recipe_of(w, flatten(w->g, leaf, type, axis)) == recipe_of(w, part)) {
            w->within[leaf] = whole;
            w->place[leaf] = (place){0, axis, start};
        }
        start += ml_type_size(ml_graph_type(w->g, part), axis);
    }
}

/* ---- The states ------------------------------------------------------------------------------ */

/* A state for each cached value: an existing one where another program caches the same. */
static void add_states(work *w) {
    ml_index known = {.arena = w->scratch};
    uint32_t states = ml_graph_state_count(w->g);
    w->listed = ML_NEW_ARRAY(w->scratch, bool, (size_t)states + w->count);
    for (uint32_t id = 0; id < states; id++) {
        const ml_state *state = ml_graph_state(w->g, id);
        if (state->kind == ML_STATE_CACHE) ml_index_add(&known, state->recipe, id);
    }
    share_parts(w, &known, states);
    for (ml_ref n = 1; n < w->count; n++)
        if (ml_graph_node(w->g, n)->op == ML_OP_CONCAT && holds(w, n) && w->place[n].state == 0)
            find_within(w, n);
    for (ml_ref n = 1; n < w->count; n++) {
        if (!holds(w, n) || w->place[n].state != 0 || w->within[n] != 0) continue;
        uint64_t recipe = recipe_of(w, n);
        uint32_t cursor = 0, id = ml_index_next(&known, recipe, &cursor);
        if (id == ML_INDEX_NONE) {
            id = add_state(w, n, recipe);
            ml_index_add(&known, recipe, id);
        }
        w->place[n].state = id + 1;
        if (!w->listed[id]) w->cached[w->cached_count++] = (ml_update){id, n};
        w->listed[id] = true;
    }
    for (ml_ref n = 1; n < w->count; n++)
        if (w->within[n] != 0) w->place[n].state = w->place[w->within[n]].state;
}

/* ---- Updates and rebuilds -------------------------------------------------------------------- */

/* What a step sets: of a program of microbatches the parameters whose gradients it adds up, all
 * where it does not say which. */
static void find_set(work *w) {
    const ml_roots *r = &w->plan->roots;
    const uint32_t states = ml_graph_state_count(w->g);
    bool known = false;
    for (uint32_t id = 0; id < states; id++) {
        const ml_ref value = w->new_value[id];
        const bool itself = value != 0 && ml_graph_node(w->g, value)->op == ML_OP_STATE &&
                            (uint32_t)ml_graph_args(w->g, value)[0] == id;
        w->sets[id] = w->set[id] = value != 0 && !itself;
    }
    if (r->microbatches <= 1) return;
    for (int i = 0; i < r->update_count; i++) {
        const uint32_t of = ml_graph_state(w->g, r->updates[i].state)->gradient_of;
        if (of != 0) w->set[of - 1] = known = true;
    }
    for (uint32_t id = 0; id < states && !known; id++)
        if (ml_graph_state(w->g, id)->kind == ML_STATE_PARAMETER) w->set[id] = true;
}

/* The plan sets the copies with the parameters that it sets. */
static void add_updates(work *w) {
    ml_plan *plan = w->plan;
    const uint32_t states = ml_graph_state_count(w->g);
    cache_updates c = {plan, w->scratch, w->new_value, w->sets};
    c.listed = ML_NEW_ARRAY(w->scratch, bool, states + 1);
    c.source = ML_NEW_ARRAY(w->scratch, bool, states + 1);
    ml_ref *renewed = ML_NEW_ARRAY(w->scratch, ml_ref, w->count);
    for (int i = 0; i < w->cached_count; i++)
        if (w->cached[i].value < w->count) /* else build_whole: no parameter of it is set */
            cache_updates_add(&c, w->g, &w->cached[i], renewed);
    for (int i = 0; i < plan->applied.count; i++) cache_updates_of(&c, plan->applied.at[i]);
    plan->cache_sources = ML_NEW_ARRAY(plan->arena, uint32_t, states + 1);
    for (uint32_t id = 0; id < states; id++)
        if (c.source[id]) plan->cache_sources[plan->cache_source_count++] = id;
    ml_roots *r = &plan->roots;
    ml_update *updates =
        ML_NEW_ARRAY(plan->arena, ml_update, (size_t)r->update_count + c.list.count);
    int count = r->update_count;
    for (int i = 0; i < count; i++) updates[i] = r->updates[i];
    for (uint32_t i = 0; i < c.list.count; i++) updates[count++] = c.list.at[i];
    r->updates = updates;
    r->update_count = count;
}

static void list_sources(ml_plan *plan, const ml_graph *g) {
    plan->cache_sources = ML_NEW_ARRAY(plan->arena, uint32_t, (size_t)ml_graph_state_count(g) + 1);
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_STATE)
            plan->cache_sources[plan->cache_source_count++] = (uint32_t)ml_graph_args(g, n)[0];
}

static bool is_of_all_ranks(const work *w, ml_ref n) {
    if (over_all_ranks(w, n)) return true;
    for (int i = 0; i < ml_graph_node(w->g, n)->source_count; i++)
        if (is_of_all_ranks(w, ml_graph_source(w->g, n, i))) return true;
    return false;
}

static bool gathers_all_ranks(const work *w, const ml_roots *cached) {
    for (int i = 0; i < cached->update_count; i++)
        if (is_of_all_ranks(w, cached->updates[i].value)) return true;
    return false;
}

/* One rebuild for each class, as each is stale at times of its own: of what no step sets after the
 * first step alone. Their steps follow when the program's are compiled. */
static void build_rebuilds(work *w) {
    ml_plan **last = &w->plan->rebuild;
    for (cache_class class = 0; class < CACHE_CLASSES; class ++) {
        ml_update *updates = ML_NEW_ARRAY(w->scratch, ml_update, (size_t)w->cached_count + 1);
        ml_roots roots = {.updates = updates, .name = "parameter cache"};
        for (int i = 0; i < w->cached_count; i++)
            if (cache_class_of(w->g, w->cached[i].value, w->set) == class)
                updates[roots.update_count++] = w->cached[i];
        if (roots.update_count == 0) continue;
        ml_graph *none = NULL;
        ml_plan *rebuild = plan_of_part(w->plan, &none, &roots, last);
        rebuild->graph = ml_graph_extract(w->g, &rebuild->roots);
        rebuild->all_ranks = gathers_all_ranks(w, &roots);
        if (rebuild->all_ranks) {
            rebuild->layout = w->plan->update_layout;
            plan_graph_set(rebuild, plan_gather_joined(rebuild->graph, &rebuild->roots));
        }
        if (rebuild->layout != NULL)
            ml_shard_traffic(rebuild->graph, rebuild->layout, rebuild->traffic);
        rebuild->parts = ML_NEW(rebuild->arena, ml_plan *);
        rebuild->parts[rebuild->part_count++] = rebuild;
        list_sources(rebuild, rebuild->graph);
        last = &rebuild->next;
    }
}

static ml_ref read_cached(rewrite *r, ml_ref n, const ml_ref *sources) {
    const work *w = r->context;
    if (n >= w->count || w->place[n].state == 0) return rewrite_copy(r, n, sources);
    const place *p = &w->place[n];
    const ml_type *type = ml_graph_type(r->from, n);
    const int64_t id = p->state - 1;
    if (p->axis != 0) return read_part(w, r->to, p, type);
    return ml_graph_add(r->to, ML_OP_STATE, NULL, 0, &id, 1, type);
}

typedef struct {
    ml_plan *plan;
    bool all;
    ml_arena *scratch;
    ml_graph *graph;
} cache_call;

static void cache_body(void *context) {
    cache_call *call = context;
    ml_plan *plan = call->plan;
    const ml_target *target = plan->target;
    ml_graph *g = plan->graph;
    size_t count = ml_graph_count(g), states = ml_graph_state_count(g);
    work w = {
        .plan = plan, .g = g, .scratch = call->scratch, .count = (uint32_t)count, .all = call->all};
    w.often = plan->roots.microbatches > 1 || plan->roots.often;
    w.keeps = w.all && (w.often || sets_parameters(&w));
    w.new_value = ML_NEW_ARRAY(w.scratch, ml_ref, states + 1);
    w.sets = ML_NEW_ARRAY(w.scratch, bool, states + 1);
    w.set = ML_NEW_ARRAY(w.scratch, bool, states + 1);
    w.source = ML_NEW_ARRAY(w.scratch, bool, count);
    w.cast = ML_NEW_ARRAY(w.scratch, bool, count);
    w.derived = ML_NEW_ARRAY(w.scratch, bool, count);
    w.number = ML_NEW_ARRAY(w.scratch, bool, count);
    w.cacheable = ML_NEW_ARRAY(w.scratch, bool, count);
    w.casts = w.all && target->kind == ML_TARGET_CUDA && !target->no_fuse;
    w.operand = ML_NEW_ARRAY(w.scratch, bool, count);
    w.place = ML_NEW_ARRAY(w.scratch, place, count);
    w.within = ML_NEW_ARRAY(w.scratch, ml_ref, count);
    w.cached = ML_NEW_ARRAY(w.scratch, ml_update, count);
    for (int i = 0; i < plan->roots.update_count; i++)
        w.new_value[plan->roots.updates[i].state] = plan->roots.updates[i].value;
    find_set(&w);
    find_casts(&w);
    find_operands(&w);
    find_gathers_read(&w);
    add_states(&w);
    if (w.cached_count == 0 && plan->applied.count == 0) return;
    build_rebuilds(&w);
    add_updates(&w);
    call->graph = rewrite_run(plan->graph, &plan->roots, NULL, read_cached, &w);
    if (w.often && plan->layout != NULL) ml_shard_traffic(call->graph, plan->layout, plan->traffic);
}

ml_graph *plan_param_cache(ml_plan *plan, bool all) {
    cache_call call = {plan, all, ml_arena_new(), plan->graph};
    if (call.scratch == NULL) ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
    ml_status status = ml_protect(cache_body, &call);
    ml_arena_free(call.scratch);
    if (status != ML_OK) ml_raise_last();
    return call.graph;
}
