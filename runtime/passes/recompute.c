/* Recomputation (passes.h): what the backward pass reads of the forward pass and can compute again
 * from tensors that are saved anyway gets an ML_NODE_COPY of its own there, so that the forward
 * value's live range ends in the forward pass.
 *
 * A node belongs to the backward phase if autodiff made it or if it depends on one that is (the
 * optimizer). A forward value that it reads is `needed`. Products, attention, reductions and
 * gathers are saved where they are needed. An elementwise value or a movement is expanded into its
 * sources, nearest first; of all cuts on the way, the one is chosen that adds the fewest bytes to
 * what is saved. Where that is the value itself, it is saved.
 *
 * This is selective recomputation: it is limited to values that cost at most one write, for a
 * product to read: what they are computed from is read by the backward phase's elementwise work
 * anyway. It stops when the writes add up to the given bytes. Where less is to be kept than that
 * leaves, recompute_parts.c chooses among all values, products and attention included.
 *
 * Where the backward phase gathers parameters again of which each rank holds a part (FSDP), what it
 * computes again reads them so too: those of the forward phase would be alive until then. */
#include "runtime/passes/passes.h"
#include "runtime/passes/recompute_parts.h"

#include <string.h>

#include "runtime/graph/collectives.h"

enum {
    MOST_EXPANDED = 40, /* nodes of one recomputation */
    SMALL_SHARE = 16,   /* of a value's bytes: what is read beside it does not count */
};

typedef enum {
    NOT_NEEDED,
    NEEDED,
    KEPT,   /* the backward phase reads the forward value */
    COPIED, /* the backward phase reads a copy */
} fate;

typedef struct {
    rewrite *r;
    bool *backward; /* by node: of the backward phase */
    bool *weight;   /* by node: a state, cast and moved: the same through the step */
    bool *gathered; /* by node: a parameter that ranks gather in each phase anew */
    bool *table;    /* by node: made of constants and indices alone, such as rotary tables */
    uint8_t *fates;
    ml_ref *copies; /* by node of `from`: its copy in `to` */
    ml_ref *until;  /* by node: a product that waits for the sources of this one; 0: does not */
    bool *compared; /* by node: an operand of a comparison with its largest element */
    const double *speeds; /* of collectives: bytes a second by mesh axis */
    double kept;          /* share of what selective recomputation leaves that is kept */
    recompute_curves *curves;
    bool *read;       /* by node: the backward phase's elementwise work reads it, or what it is made
                         from elementwise */
    bool *multiplied; /* by node: operand of a product of the backward phase */
    int64_t bytes_left; /* that may still be moved for recomputation */
} state;

static bool is_leaf(const state *s, ml_ref n) {
    return ml_ops[ml_graph_node(s->r->from, n)->op].op_class == ML_CLASS_LEAF;
}

static bool is_cheap(const state *s, ml_ref n) {
    return ml_op_is(ml_graph_node(s->r->from, n)->op, ML_CHEAP);
}

static int64_t bytes_of(const state *s, ml_ref n) {
    return ml_type_bytes(ml_graph_type(s->r->from, n));
}

/* ---- Phases and needs ------------------------------------------------------------------------ */

static void find_phases(state *s) {
    const ml_graph *g = s->r->from;
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!s->r->users[n]) continue;
        const ml_node *node = ml_graph_node(g, n);
        bool moves = node->op == ML_OP_CAST || ml_ops[node->op].op_class == ML_CLASS_MOVE;
        s->backward[n] = (node->flags & ML_NODE_BACKWARD) != 0;
        s->weight[n] = node->op == ML_OP_STATE || (moves && node->source_count > 0);
        s->table[n] = node->op == ML_OP_CONST || node->op == ML_OP_IOTA || node->source_count > 0;
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(g, n, i);
            s->backward[n] = s->backward[n] || s->backward[source];
            s->weight[n] = s->weight[n] && s->weight[source];
            s->table[n] = s->table[n] && s->table[source];
        }
    }
}

static bool gathers(const ml_graph *g, ml_ref n) {
    ml_op op = ml_graph_node(g, n)->op;
    return ml_ops[op].op_class == ML_CLASS_COLLECTIVE &&
           !ml_collectives[ml_collective_of(op)].combines;
}

/* Over mesh axes over which the backward phase gathers parameters in nodes of its own. Vectors, as
 * gains and biases, take little memory and stay. */
static void find_gathered(state *s) {
    const ml_graph *g = s->r->from;
    bool again[ML_MAX_MESH] = {0};
    bool *made = ML_NEW_ARRAY(s->r->scratch, bool, s->r->count); /* of parameters alone */
    for (ml_ref n = 1; n < s->r->count; n++) {
        const ml_node *node = ml_graph_node(g, n);
        bool moves = node->op == ML_OP_CAST || ml_ops[node->op].op_class == ML_CLASS_MOVE;
        made[n] = s->weight[n] || ((moves || gathers(g, n)) && node->source_count > 0);
        for (int i = 0; i < node->source_count; i++)
            made[n] = made[n] && made[ml_graph_source(g, n, i)];
        if (s->r->users[n] && s->backward[n] && made[n] && gathers(g, n) &&
            node->flags & ML_NODE_COPY)
            again[ml_graph_args(g, n)[0]] = true;
    }
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!made[n] || s->backward[n]) continue;
        s->gathered[n] = gathers(g, n) && again[ml_graph_args(g, n)[0]];
        for (int i = 0; i < ml_graph_node(g, n)->source_count; i++)
            s->gathered[n] = s->gathered[n] || s->gathered[ml_graph_source(g, n, i)];
        if (ml_graph_type(g, n)->rank < 2) s->gathered[n] = false;
    }
}

/* The value of a node is its memory: a view keeps what it is a view of. */
static bool reads_memory_of(ml_op user) {
    return ml_op_is(user, ML_PRODUCT) || ml_ops[user].op_class == ML_CLASS_MAP ||
           ml_ops[user].op_class == ML_CLASS_REDUCE || ml_ops[user].op_class == ML_CLASS_MOVE;
}

/* Mark what the backward phase reads. What a routine such as the attention gradient reads is kept:
 * it would have to be written a second time. So is what is compared with its largest element, which
 * must be the same numbers as before. So are weights and tables, of which there is one for
 * the whole batch. */
static void find_needs(state *s) {
    const ml_graph *g = s->r->from;
    for (ml_ref n = 1; n < s->r->count; n++)
        if (s->r->users[n]) ml_mark_compared(g, n, s->compared);
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!s->r->users[n] || !s->backward[n]) continue;
        const ml_node *node = ml_graph_node(g, n);
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(g, n, i);
            if (s->backward[source] || is_leaf(s, source)) continue;
            bool copyable = is_cheap(s, source) && !s->weight[source] && !s->table[source] &&
                            reads_memory_of(node->op);
            if (!copyable)
                s->fates[source] = KEPT;
            else if (s->fates[source] == NOT_NEEDED)
                s->fates[source] = NEEDED;
        }
    }
    for (ml_ref n = 1; n < s->r->count; n++)
        if (s->compared[n] && !s->backward[n]) s->fates[n] = KEPT;
}

/* ---- Cuts ------------------------------------------------------------------------------------ */

typedef struct {
    ml_ref open[MOST_EXPANDED * 3 + 1]; /* the cut, ascending */
    int open_count;
    ml_ref expanded[MOST_EXPANDED];
    int expanded_count;
} cut;

static bool is_free(const state *s, ml_ref n) {
    return is_leaf(s, n) || s->weight[n] || s->table[n] || s->fates[n] == KEPT;
}

/* Bytes that keeping a cut adds. */
static int64_t cost_of(const state *s, const cut *c) {
    int64_t bytes = 0;
    for (int i = 0; i < c->open_count; i++)
        if (!is_free(s, c->open[i])) bytes += bytes_of(s, c->open[i]);
    return bytes;
}

static bool open_node(cut *c, ml_ref n) {
    int at = c->open_count;
    for (int i = 0; i < c->open_count; i++)
        if (c->open[i] == n) return true;
    if (at == (int)(sizeof c->open / sizeof *c->open)) return false;
    for (; at > 0 && c->open[at - 1] > n; at--) c->open[at] = c->open[at - 1];
    c->open[at] = n;
    c->open_count++;
    return true;
}

/* Replace the latest node of the cut that costs something and is cheap to make by its sources. */
static bool expand_once(const state *s, cut *c) {
    int at = c->open_count - 1;
    while (at >= 0 && (is_free(s, c->open[at]) || !is_cheap(s, c->open[at]))) at--;
    if (at < 0 || c->expanded_count == MOST_EXPANDED) return false;
    ml_ref n = c->open[at];
    memmove(c->open + at, c->open + at + 1, sizeof(ml_ref) * (size_t)(c->open_count - at - 1));
    c->open_count--;
    c->expanded[c->expanded_count++] = n;
    const ml_graph *g = s->r->from;
    for (int i = 0; i < ml_graph_node(g, n)->source_count; i++)
        if (!open_node(c, ml_graph_source(g, n, i))) return false;
    return true;
}

/* What recomputing n from a cut moves: it is written again, for products, and what else it is made
 * of is read. */
static int64_t moved_by(const state *s, ml_ref n, const cut *c) {
    int64_t own = bytes_of(s, n), bytes = s->multiplied[n] ? own : 0;
    for (int i = 0; i < c->open_count; i++) {
        int64_t read = bytes_of(s, c->open[i]);
        if (!s->read[c->open[i]] && read * SMALL_SHARE > own) bytes += read;
    }
    return bytes;
}

/* Whether to recompute n, which saves so many bytes; if so they are spent. What is rounded to 8
 * bits from a kept value of 16 may be read for that alone: else a program would keep both, and with
 * products in 8 bits need more memory than without. */
static bool afford(state *s, ml_ref n, const cut *c, int64_t saved) {
    enum { WIDE_AND_OWN = 3 }; /* bytes moved for each of n */
    int64_t moved = moved_by(s, n, c);
    bool rounds = ml_dtypes[ml_graph_type(s->r->from, n)->dtype].bytes == 1;
    bool good =
        moved <= s->bytes_left && (rounds ? moved <= saved * WIDE_AND_OWN : moved * 7 <= saved * 8);
    if (good) s->bytes_left -= moved;
    return good;
}

/* Decide about a needed value: keep it, or expand it up to the cheapest cut and keep that. */
static void decide(state *s, ml_ref n) {
    cut now = {.open = {n}, .open_count = 1}, best = now;
    int64_t cheapest = bytes_of(s, n);
    while (cheapest > 0 && expand_once(s, &now)) {
        int64_t cost = cost_of(s, &now);
        if (cost < cheapest) cheapest = cost, best = now;
    }
    if (!afford(s, n, &best, bytes_of(s, n) - cheapest)) {
        s->fates[n] = KEPT;
        return;
    }
    for (int i = 0; i < best.open_count; i++)
        if (!is_leaf(s, best.open[i])) s->fates[best.open[i]] = KEPT;
    for (int i = 0; i < best.expanded_count; i++)
        if (s->fates[best.expanded[i]] != KEPT) s->fates[best.expanded[i]] = COPIED;
}

/* ---- Order ----------------------------------------------------------------------------------- */

/* A weight gradient that multiplies a recomputed value waits until the elementwise work that reads
 * the same part of the forward pass is done: one kernel can then do both. So it is placed right
 * before the first product or routine after that work, where nothing on the way depends on it. */
enum { LONGEST_WAIT = 4096, MOST_PASSED = 3 /* products that it lets go first */ };

static bool multiplies_copy(const state *s, ml_ref n) {
    ml_op op = ml_graph_node(s->r->from, n)->op;
    if (!s->backward[n] || !ml_op_is(op, ML_PRODUCT | ML_WIDENS)) return false;
    for (int i = 0; i < 2; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        if (!s->backward[source] && s->fates[source] == COPIED) return true;
    }
    return false;
}

static bool is_heavy(const state *s, ml_ref n) {
    ml_op_class op_class = ml_ops[ml_graph_node(s->r->from, n)->op].op_class;
    return op_class == ML_CLASS_CONTRACT || op_class == ML_CLASS_ROUTINE;
}

/* Whether n depends on any marked node; if so it is marked too. */
static bool taint(const state *s, ml_ref n, ml_ref first, uint8_t *tainted) {
    for (int i = 0; i < ml_graph_node(s->r->from, n)->source_count; i++) {
        ml_ref source = ml_graph_source(s->r->from, n, i);
        if (source >= first && tainted[source - first]) tainted[n - first] = 1;
    }
    return tainted[n - first];
}

/* Whether backward node n reads a forward tensor of about the size of `like`. */
static bool reads_forward(const state *s, ml_ref n, ml_ref like) {
    const ml_graph *g = s->r->from;
    int64_t elements = ml_type_elements(ml_graph_type(g, like));
    for (int i = 0; i < ml_graph_node(g, n)->source_count; i++) {
        ml_ref source = ml_graph_source(g, n, i);
        if (!s->backward[source] && !s->weight[source] &&
            ml_type_elements(ml_graph_type(g, source)) >= elements / 2)
            return true;
    }
    return false;
}

static void find_wait(state *s, ml_ref n, uint8_t *tainted) {
    memset(tainted, 0, LONGEST_WAIT);
    tainted[0] = 1;
    ml_ref left = ml_graph_source(s->r->from, n, 0), right = ml_graph_source(s->r->from, n, 1);
    ml_ref copied = !s->backward[left] && s->fates[left] == COPIED ? left : right;
    bool shared = false;
    int passed = 0;
    for (ml_ref next = n + 1; next < s->r->count && next - n < LONGEST_WAIT; next++) {
        if (!s->r->users[next]) continue;
        bool depends = taint(s, next, n, tainted);
        if (!is_heavy(s, next)) {
            shared = shared || (s->backward[next] && reads_forward(s, next, copied));
        } else if (shared && !multiplies_copy(s, next)) {
            s->until[n] = depends ? 0 : next;
            return;
        } else if (++passed > MOST_PASSED)
            return;
    }
}

static void wait_edges(void *context, rewrite_edge *edge, void *edges) {
    const state *s = context;
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!s->until[n]) continue;
        int count = ml_graph_node(s->r->from, s->until[n])->source_count;
        for (int i = 0; i < count; i++) edge(edges, ml_graph_source(s->r->from, s->until[n], i), n);
    }
}

static void find_order(state *s) {
    rewrite *r = s->r;
    s->until = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    uint8_t *tainted = ML_NEW_ARRAY(r->scratch, uint8_t, LONGEST_WAIT);
    for (ml_ref n = 1; n < r->count; n++)
        if (r->users[n] && multiplies_copy(s, n)) find_wait(s, n, tainted);
    if (!rewrite_order(r, wait_edges, s)) r->order = NULL; /* they wait for each other */
}

/* What elementwise work and products of the backward phase read of the forward phase. */
static void find_readers(state *s) {
    const ml_graph *g = s->r->from;
    for (ml_ref n = s->r->count; n-- > 1;) { /* users before what they use */
        if (!s->r->users[n]) continue;
        const ml_node *node = ml_graph_node(g, n);
        int op_class = ml_ops[node->op].op_class;
        bool works = op_class == ML_CLASS_MAP || op_class == ML_CLASS_REDUCE;
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(g, n, i);
            if (s->backward[source]) continue;
            if (s->backward[n] ? works : s->read[n] && is_cheap(s, n)) s->read[source] = true;
            if (s->backward[n] && ml_op_is(node->op, ML_PRODUCT)) s->multiplied[source] = true;
        }
    }
}

/* Choose anew among all values of the forward pass, with less kept. */
static void decide_all(state *s) {
    rewrite *r = s->r;
    bool *kept = ML_NEW_ARRAY(r->scratch, bool, r->count);
    bool *light = ML_NEW_ARRAY(r->scratch, bool, r->count);
    uint8_t *fates = ML_NEW_ARRAY(r->scratch, uint8_t, (size_t)r->count + 1);
    for (ml_ref n = 1; n < r->count; n++) {
        kept[n] = is_leaf(s, n) || s->weight[n] || s->table[n];
        light[n] = s->fates[n] == COPIED;
    }
    recompute_program_choose(&(recompute_program){.r = r,
                                                  .backward = s->backward,
                                                  .kept = kept,
                                                  .fixed = s->compared,
                                                  .light = light,
                                                  .speeds = s->speeds,
                                                  .share = s->kept,
                                                  .curves = s->curves},
                             fates);
    for (ml_ref n = 1; n < r->count; n++)
        if (fates[n] != RECOMPUTE_UNUSED) s->fates[n] = fates[n] == RECOMPUTE_AGAIN ? COPIED : KEPT;
}

static void begin(rewrite *r) {
    state *s = r->context;
    s->r = r;
    s->read = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->multiplied = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->backward = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->compared = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->weight = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->gathered = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->table = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->fates = ML_NEW_ARRAY(r->scratch, uint8_t, r->count);
    s->copies = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    find_phases(s);
    find_gathered(s);
    find_needs(s);
    find_readers(s);
    for (ml_ref n = 1; n < r->count; n++)
        if (s->fates[n] == NEEDED) decide(s, n);
    if (s->kept < 1) decide_all(s);
    find_order(s);
}

/* ---- Copies ---------------------------------------------------------------------------------- */

/* The copy of n for the backward phase; n itself where it is kept. Equal nodes are one: a parameter
 * is gathered once for what is computed again and for gradients. Recursion is at most as deep as
 * a cut is expanded. */
static ml_ref copy_of(state *s, ml_ref n) {
    rewrite *r = s->r;
    if (s->fates[n] != COPIED && !s->gathered[n]) return r->map[n];
    if (s->copies[n]) return s->copies[n];
    const ml_node *node = ml_graph_node(r->from, n);
    ml_ref *sources = ML_NEW_ARRAY(r->scratch, ml_ref, node->source_count);
    for (int i = 0; i < node->source_count; i++)
        sources[i] = copy_of(s, ml_graph_source(r->from, n, i));
    return s->copies[n] = rewrite_copy_again(r, n, sources);
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    if (!s->backward[n]) return rewrite_copy(r, n, sources);
    int count = ml_graph_node(r->from, n)->source_count;
    ml_ref *own = ML_NEW_ARRAY(r->scratch, ml_ref, count);
    for (int i = 0; i < count; i++) {
        ml_ref source = ml_graph_source(r->from, n, i);
        own[i] = s->backward[source] ? sources[i] : copy_of(s, source);
    }
    return rewrite_copy(r, n, own);
}

ml_graph *ml_recompute(const ml_graph *from, ml_roots *roots, int64_t bytes, double kept,
                       const double *speeds, recompute_curves *curves) {
    state s = {.bytes_left = bytes, .kept = kept, .speeds = speeds, .curves = curves};
    return rewrite_run(from, roots, begin, rule, &s);
}
