/* Chunked logits (passes.h): logits and what is computed from them, a part of the tokens at a time.
 *
 * The region of a large product is all that depends on it, up to where the cut axes are contracted
 * or other axes come in. `members` have the cut axes and none that the product lacks; `added` nodes
 * contract the cut axes (the loss, gradients of weights), so the chunks' results are combined;
 * `joined` nodes are products with other axes (the gradient of the product's operand): the chunks'
 * results are concatenated. The rewrite is sound because every other node of the region computes a
 * chunk of its result from the same chunk of its sources. It is worth it where no node beyond the
 * region reads a large member: then no large tensor is ever whole.
 *
 * Only the region of a loss is cut: one that sums over other axes (the vocabulary) and over the cut
 * ones down to a scalar (the loss) before any product follows. Large products inside layers, such
 * as the gradient of a feed-forward's hidden values, have regions too, but cutting those makes
 * plans larger, not smaller: their chunks run at one place, so all that they read, the gathered
 * weights and the weights' gradients are live at once, where the products of the whole would have
 * used them one after the other; and the peak of memory is at the logits, once, while a layer's
 * values are live in each layer. It would also send each layer's collectives in parts.
 *
 * Cut are the axes that one operand of the product brings, outermost first, so that the chunks of
 * that operand are views. All chunks are made where the product is visited; it waits for what the
 * region reads from outside.
 *
 * One run of the pass cuts all regions that do not overlap: a region lies between its product and
 * the last user of a member, in the order of nodes, and no large product that another region
 * begins before is looked at until the next run. Regions one after the other cannot wait for each
 * other: all that one reads comes before its end, and so does not depend on a later one. The walk
 * from a product ends with its last member's user, or where it turns out to be no loss, so that
 * finding regions takes time in proportion to the nodes. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"

#include <string.h>

#include "runtime/base/divisor.h"

enum {
    CUT_AXES = 2,
    MOST_CHUNKS = 64,    /* that are aimed at */
    MOST_PARTS = 256,    /* of one axis, where fewer do not divide it: each is nodes of its own */
    LARGE_SHARE = 4,     /* a tensor is large from a quarter of the product's elements */
    FARTHEST_SUM = 4096, /* nodes after the product: of a loss, if it is one */
};

typedef enum {
    APART,  /* does not depend on the product */
    MEMBER, /* made chunk by chunk */
    ADDED,
    JOINED,
    AFTER, /* needs results of all chunks */
} part;

typedef struct region {
    ml_ref product, last; /* its nodes are among these */
    ml_axis axis[CUT_AXES];
    int64_t chunks[CUT_AXES], size[CUT_AXES]; /* size: of a chunk along the axis */
    int64_t rows;                             /* of the product: what the uncut operand lacks */
    struct region *next;
} region;

typedef struct {
    rewrite *r;
    int64_t most_bytes;
    region *regions, **end; /* by product, ascending; `end`: where the next is put */
    region *at;             /* the one at hand */
    bool passed_over;       /* a large product inside another's region: for the next run */
    uint8_t *parts;         /* by node, of the region that it lies in */
    bool *wanted;           /* by node of a region: as a whole, by others */
    bool *is_root;          /* by node */
    ml_ref *last_user;      /* by node */
    ml_ref *made;           /* by node: in the chunk at hand; 0: not yet */
    ml_ref *touched;        /* nodes with `made` */
    uint32_t touched_count;
    ml_ref **pieces; /* by wanted node: each chunk's result; of ADDED one, their combination */
    ml_ref *whole;   /* by node of a region, once all chunks are made */
    int64_t start[CUT_AXES]; /* of the chunk at hand */
} state;

static const ml_type *type_of(const state *s, ml_ref n) {
    return ml_graph_type(s->r->from, n);
}

static bool is_cut(const state *s, int64_t axis) {
    return axis == s->at->axis[0] || (s->at->axis[1] && axis == s->at->axis[1]);
}

static bool in_any_region(const state *s, ml_ref n) {
    return s->parts[n] == MEMBER || s->parts[n] == ADDED || s->parts[n] == JOINED;
}

/* The part of n in the region at hand: what comes before the product does not depend on it. */
static part part_of(const state *s, ml_ref n) {
    return n < s->at->product ? APART : (part)s->parts[n];
}

static bool in_region(const state *s, ml_ref n) {
    return n >= s->at->product && in_any_region(s, n);
}

static bool is_large(const state *s, ml_ref n) {
    int64_t elements = ml_type_elements(type_of(s, n));
    return elements * LARGE_SHARE >= ml_type_elements(type_of(s, s->at->product));
}

/* ---- Finding a region ------------------------------------------------------------------------ */

/* Into how many parts an axis is cut where `wanted` would do: the next divisor of its size above
 * that; for a size without one, such as a large prime, the next below, which may be 1. */
static int64_t parts_of_axis(int64_t size, int64_t wanted) {
    int64_t parts = ml_divisor_from(size, wanted < size ? wanted : size, MOST_PARTS);
    for (int64_t d = wanted; !parts; d--) parts = size % d == 0 ? d : 0;
    return parts;
}

/* The axes that only operand `side` of the product brings, and into how many chunks they are cut;
 * false where they cannot be cut. */
static bool choose_axes(state *s, int side) {
    region *at = s->at;
    const ml_type *type = type_of(s, at->product);
    const ml_type *own = type_of(s, ml_graph_source(s->r->from, at->product, side));
    const ml_type *other = type_of(s, ml_graph_source(s->r->from, at->product, 1 - side));
    int64_t wanted = (ml_type_bytes(type) + s->most_bytes - 1) / s->most_bytes;
    int count = 0;
    for (int i = 0; i < CUT_AXES; i++) at->chunks[i] = at->size[i] = 1;
    at->rows = 1;
    for (int i = 0; i < type->rank; i++)
        if (ml_type_find(other, type->axis[i]) < 0) at->rows *= type->size[i];
    if (wanted > MOST_CHUNKS) wanted = MOST_CHUNKS;
    for (int i = 0; i < own->rank && count < CUT_AXES && wanted > 1; i++) {
        if (ml_type_find(type, own->axis[i]) < 0 || ml_type_find(other, own->axis[i]) >= 0 ||
            own->size[i] == 1)
            continue;
        int64_t parts = parts_of_axis(own->size[i], wanted);
        if (parts == 1) continue;
        at->axis[count] = own->axis[i];
        at->chunks[count] = parts;
        at->size[count] = own->size[i] / parts;
        wanted = (wanted + at->chunks[count] - 1) / at->chunks[count];
        count++;
    }
    return count > 0;
}

/* How many of the cut axes n contracts, where combining the chunks' results is right. */
static int contracted(const state *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->r->from, n);
    bool combines = node->op == ML_OP_SUM || node->op == ML_OP_MAX || node->op == ML_OP_MIN ||
                    node->op == ML_OP_DOT;
    int count = 0;
    for (int i = 0; i < node->arg_count && combines; i++)
        count += is_cut(s, ml_graph_args(s->r->from, n)[i]);
    return count;
}

/* Whether a chunk of n's result needs the same chunk of its sources alone. */
static bool keeps_chunks(const state *s, ml_ref n) {
    for (int i = 0; i < CUT_AXES && s->at->axis[i]; i++) {
        int at = ml_type_find(type_of(s, n), s->at->axis[i]);
        if (at < 0 || type_of(s, n)->size[at] != s->at->size[i] * s->at->chunks[i]) return false;
        if (!rewrite_splits(s->r->from, n, s->at->axis[i])) return false;
    }
    return true;
}

/* Whether n has no other axes than the product, or no more elements than it has rows. */
static bool is_within(const state *s, ml_ref n) {
    const ml_type *type = type_of(s, n), *whole = type_of(s, s->at->product);
    bool within = true;
    for (int i = 0; i < type->rank; i++) within = within && ml_type_find(whole, type->axis[i]) >= 0;
    return within || ml_type_elements(type) <= s->at->rows;
}

static part classify(const state *s, ml_ref n) {
    int cut = 1 + (s->at->axis[1] != 0);
    if (contracted(s, n) == cut) return ADDED;
    if (!keeps_chunks(s, n)) return AFTER;
    if (is_within(s, n)) return MEMBER;
    return ml_graph_node(s->r->from, n)->op == ML_OP_DOT ? JOINED : AFTER;
}

/* Give n its part. false where a large member would have to be whole. */
static bool add_node(state *s, ml_ref n) {
    int count = ml_graph_node(s->r->from, n)->source_count;
    bool depends = false, after = false, large = false;
    for (int i = 0; i < count; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        depends = depends || part_of(s, source) != APART;
        after = after || part_of(s, source) > MEMBER;
        large = large || (part_of(s, source) == MEMBER && is_large(s, source));
    }
    if (!depends) return true;
    part is = s->parts[n] = after ? AFTER : (uint8_t)classify(s, n);
    for (int i = 0; i < count && is == AFTER; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        if (in_region(s, source)) s->wanted[source] = true;
    }
    if (s->is_root[n] || is == ADDED || is == JOINED) s->wanted[n] = true; /* no member reads it */
    return is == AFTER ? !large : !(is == MEMBER && s->is_root[n] && is_large(s, n));
}

/* Give the nodes after the product their parts, up to the last that can be of the region: false as
 * soon as it turns out that it is no loss, or that a large member would have to be whole. */
static bool walk(state *s) {
    region *at = s->at;
    bool sums = false, ends = false;
    ml_ref reach = s->last_user[at->product];
    for (ml_ref n = at->product + 1; n <= reach; n++) {
        if (!s->r->users[n]) continue;
        at->last = n;
        if (!add_node(s, n)) return false;
        bool reduces = ml_ops[ml_graph_node(s->r->from, n)->op].op_class == ML_CLASS_REDUCE;
        if (s->parts[n] == MEMBER && s->last_user[n] > reach) reach = s->last_user[n];
        sums = sums || (s->parts[n] == MEMBER && reduces);
        ends = ends || (sums && s->parts[n] == ADDED && ml_type_elements(type_of(s, n)) == 1);
        if (!ends && (s->parts[n] == JOINED || n - at->product > FARTHEST_SUM)) return false;
    }
    return ends;
}

/* Whether `product` begins the region of a loss that can be cut along what operand `side` brings:
 * it is one of `regions` then. */
static bool find_region(state *s, ml_ref product, int side) {
    region *at = s->at = ML_NEW_ARRAY(s->r->scratch, region, 1);
    *at = (region){.product = product, .last = product};
    if (s->is_root[product] || !choose_axes(s, side)) return false;
    s->parts[product] = MEMBER;
    if (!walk(s)) {
        uint32_t count = at->last - product + 1;
        memset(s->parts + product, 0, count * sizeof *s->parts);
        memset(s->wanted + product, 0, count * sizeof *s->wanted);
        return false;
    }
    *s->end = at;
    s->end = &at->next;
    return true;
}

static void input_edges(void *context, rewrite_edge *edge, void *edges) {
    state *s = context;
    for (s->at = s->regions; s->at; s->at = s->at->next) {
        for (ml_ref n = s->at->product + 1; n <= s->at->last; n++) {
            if (!in_region(s, n)) continue;
            for (int i = 0; i < ml_graph_node(s->r->from, n)->source_count; i++) {
                ml_ref source = ml_graph_source(s->r->from, n, i);
                if (part_of(s, source) == APART) edge(edges, source, s->at->product);
            }
        }
    }
}

static void find_readers(state *s) {
    const ml_roots *roots = s->r->roots;
    for (int i = 0; i < roots->output_count; i++) s->is_root[roots->outputs[i]] = true;
    for (int i = 0; i < roots->update_count; i++) s->is_root[roots->updates[i].value] = true;
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!s->r->users[n]) continue;
        for (int i = 0; i < ml_graph_node(s->r->from, n)->source_count; i++)
            s->last_user[ml_graph_source(s->r->from, n, i)] = n;
    }
}

static void begin(rewrite *r) {
    state *s = r->context;
    ml_ref last = 0; /* of the regions found so far */
    s->r = r;
    s->end = &s->regions;
    s->parts = ML_NEW_ARRAY(r->scratch, uint8_t, r->count);
    s->wanted = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->is_root = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->last_user = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->made = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->touched = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->pieces = ML_NEW_ARRAY(r->scratch, ml_ref *, r->count);
    s->whole = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    find_readers(s);
    for (ml_ref n = 1; n < r->count; n++) {
        if (!r->users[n] || ml_graph_node(r->from, n)->op != ML_OP_DOT) continue;
        if (ml_type_bytes(ml_graph_type(r->from, n)) <= s->most_bytes) continue;
        if (n <= last)
            s->passed_over = s->passed_over || !in_any_region(s, n);
        else if (find_region(s, n, 0) || find_region(s, n, 1))
            last = s->at->last;
    }
    if (s->regions && !rewrite_order(r, input_edges, s))
        ml_raise(ML_INTERNAL, "the chunks of product %%%u wait for themselves",
                 s->regions->product);
    s->at = s->regions;
}

/* ---- Making the chunks ----------------------------------------------------------------------- */

static ml_type chunk_type(const state *s, ml_ref n) {
    ml_type type = *type_of(s, n);
    for (int i = 0; i < CUT_AXES && s->at->axis[i]; i++) {
        int at = ml_type_find(&type, s->at->axis[i]);
        if (at >= 0) type.size[at] = s->at->size[i];
    }
    return type;
}

static ml_ref chunk_of(state *s, ml_ref n);

/* The chunk of n from the chunks of its sources. */
static ml_ref make_chunk(state *s, ml_ref n) {
    const ml_graph *from = s->r->from;
    const ml_node *node = ml_graph_node(from, n);
    ml_type type = chunk_type(s, n);
    ml_ref few[8], *sources = few;
    if (node->source_count > 8) sources = ML_NEW_ARRAY(s->r->scratch, ml_ref, node->source_count);
    for (int i = 0; i < node->source_count; i++)
        sources[i] = chunk_of(s, ml_graph_source(from, n, i));
    ml_graph_set_origin(s->r->to, ml_graph_origin(from, n));
    ml_graph_set_flags(s->r->to, node->flags & (uint8_t)~ML_NODE_GRADIENT);
    if (s->parts[n] == ADDED && ml_is_narrow(type.dtype)) { /* rounded once, when all are added */
        type.dtype = ML_F32;
        if (node->op != ML_OP_DOT) sources[0] = ml_cast(s->r->to, sources[0], ML_F32);
    }
    return ml_graph_add(s->r->to, node->op, sources, node->source_count, ml_graph_args(from, n),
                        node->arg_count, &type);
}

static ml_ref slice_of(state *s, ml_ref n) {
    const region *at = s->at;
    ml_ref made = s->r->map[n];
    ml_graph_set_origin(s->r->to, ml_graph_origin(s->r->from, n));
    for (int i = 0; i < CUT_AXES && at->axis[i]; i++)
        if (ml_type_find(type_of(s, n), at->axis[i]) >= 0)
            made = ml_slice(s->r->to, made, at->axis[i], s->start[i], s->start[i] + at->size[i]);
    return made;
}

/* The chunk of a node of the region or of what it reads. Large elementwise values, such as the test
 * for the target, are computed by the chunk too: whole they would have to be kept. */
static ml_ref chunk_of(state *s, ml_ref n) {
    if (s->made[n]) return s->made[n];
    ml_op op = (ml_op)ml_graph_node(s->r->from, n)->op;
    bool maps = ml_op_is_function(op) || op == ML_OP_BROADCAST;
    bool cut = false;
    for (int i = 0; i < type_of(s, n)->rank; i++) cut = cut || is_cut(s, type_of(s, n)->axis[i]);
    /* What another region has made stands there as a whole. */
    bool again = cut && maps && !in_any_region(s, n) && is_large(s, n);
    ml_ref made = in_region(s, n) || again ? make_chunk(s, n) : slice_of(s, n);
    s->touched[s->touched_count++] = n;
    return s->made[n] = made;
}

static void keep_result(state *s, ml_ref n, int64_t chunk) {
    int64_t count = s->at->chunks[0] * s->at->chunks[1];
    ml_op op = (ml_op)ml_graph_node(s->r->from, n)->op;
    if (!s->pieces[n]) s->pieces[n] = ML_NEW_ARRAY(s->r->scratch, ml_ref, count);
    if (s->parts[n] != ADDED || chunk == 0) {
        s->pieces[n][s->parts[n] == ADDED ? 0 : chunk] = s->made[n];
        return;
    }
    ml_op combine = op == ML_OP_MAX ? ML_OP_MAXIMUM : op == ML_OP_MIN ? ML_OP_MINIMUM : ML_OP_ADD;
    s->pieces[n][0] = ml_map2(s->r->to, combine, s->pieces[n][0], s->made[n]);
}

/* The chunks' results side by side, along the inner axis first. */
static ml_ref join(state *s, ml_ref n) {
    const region *at = s->at;
    ml_graph *to = s->r->to;
    ml_ref *pieces = s->pieces[n];
    if (at->axis[1])
        for (int64_t i = 0; i < at->chunks[0]; i++)
            pieces[i] = ml_concat(to, pieces + i * at->chunks[1], (int)at->chunks[1], at->axis[1]);
    return ml_concat(to, pieces, (int)at->chunks[0], at->axis[0]);
}

static void make_chunks(state *s) {
    const ml_graph *from = s->r->from;
    const region *at = s->at;
    for (int64_t chunk = 0; chunk < at->chunks[0] * at->chunks[1]; chunk++) {
        while (s->touched_count) s->made[s->touched[--s->touched_count]] = 0;
        s->start[0] = chunk / at->chunks[1] * at->size[0];
        s->start[1] = chunk % at->chunks[1] * at->size[1];
        for (ml_ref n = at->product; n <= at->last; n++) {
            if (!in_region(s, n)) continue;
            (void)chunk_of(s, n);
            if (s->wanted[n]) keep_result(s, n, chunk);
        }
    }
    for (ml_ref n = at->product; n <= at->last; n++) {
        if (!in_region(s, n)) continue;
        s->whole[n] = s->made[n]; /* of a node that none but its chunks' users read */
        if (!s->wanted[n]) continue;
        ml_graph_set_origin(s->r->to, ml_graph_origin(from, n));
        ml_graph_set_flags(s->r->to, ml_graph_node(from, n)->flags & (uint8_t)~ML_NODE_GRADIENT);
        s->whole[n] = s->parts[n] == ADDED ? s->pieces[n][0] : join(s, n);
        s->whole[n] = ml_cast(s->r->to, s->whole[n], (ml_dtype)type_of(s, n)->dtype);
    }
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    if (s->at && n == s->at->product) {
        make_chunks(s);
        s->at = s->at->next;
    }
    return in_any_region(s, n) ? s->whole[n] : rewrite_copy(r, n, sources);
}

static int64_t count_large(const ml_graph *g, int64_t most_bytes) {
    int64_t count = 0;
    for (ml_ref n = 1; n < ml_graph_count(g) && most_bytes > 0; n++)
        count +=
            ml_graph_node(g, n)->op == ML_OP_DOT && ml_type_bytes(ml_graph_type(g, n)) > most_bytes;
    return count;
}

bool ml_chunk_logits_applies(const ml_graph *g, int64_t most_bytes) {
    return count_large(g, most_bytes) > 0;
}

ml_graph *ml_chunk_logits(const ml_graph *from, ml_roots *roots, int64_t most_bytes) {
    state s = {.most_bytes = most_bytes};
    int64_t before = count_large(from, most_bytes), left;
    ml_graph *g = rewrite_run(from, roots, begin, rule, &s);
    /* Fewer each time, unless MOST_CHUNKS were too few: chunks that are large are not cut again,
     * or their number would grow without end. */
    while (s.regions && s.passed_over && (left = count_large(g, most_bytes)) < before) {
        before = left;
        s = (state){.most_bytes = most_bytes};
        ml_graph *next = rewrite_run(g, roots, begin, rule, &s);
        ml_graph_free(g);
        g = next;
    }
    return g;
}
