/* Keys and values that are linear in smaller tensors of their positions, which are kept instead:
 * k = sum of x M over some x {features}, with M {features, heads, head_dim} that depends on neither
 * tokens nor positions, and v likewise (latent attention: DeepSeek-AI 2024, arXiv:2405.04434).
 * q k = (q M) x: queries are brought to the features, and so are values from them. */
#include "runtime/increment/internal.h"
#include "runtime/ops/attention/attention.h"

enum { MOST_TERMS = 8 };

typedef struct {
    ml_ref base;      /* x, one vector a position */
    ml_axis features; /* its axis */
    ml_ref matrix;    /* M; 0: elements `first` .. of the axis head_dim are x itself */
    ml_axis axis;     /* then: head_dim, by the name that it has in the node at hand */
    int64_t first;
} term;
typedef struct {
    term at[MOST_TERMS];
    int count;
} terms;

struct latent {
    terms k, v;
    ml_ref bases[2 * MOST_TERMS]; /* of both, each once */
    int64_t first[2 * MOST_TERMS];
    int count;
    int64_t size; /* features of all */
};

/* ---- What is linear -------------------------------------------------------------------------- */

/* The axis of a vector a position; 0 where n has others, or none. */
static ml_axis vector_axis(const increment *inc, ml_ref n) {
    const place *p = &inc->places[n];
    ml_type rest = increment_without(ml_graph_type(inc->g, n), p->axis, p->batch);
    bool plain = p->fed && !p->other && !p->chunk && !p->inner && !p->lead;
    return plain && p->kind == ROWS_OF_POSITIONS && rest.rank == 1 ? rest.axis[0] : 0;
}

static bool push(terms *out, term t) {
    if (out->count == MOST_TERMS) return false;
    out->at[out->count++] = t;
    return true;
}

static bool find(increment *inc, ml_ref n, terms *out);

static bool find_product(increment *inc, ml_ref n, terms *out) {
    const ml_graph *g = inc->g;
    const int64_t *args = ml_graph_args(g, n);
    ml_ref x = ml_graph_source(g, n, 0), matrix = ml_graph_source(g, n, 1);
    if (!inc->places[x].fed) {
        x = matrix;
        matrix = ml_graph_source(g, n, 0);
    }
    const place *p = &inc->places[x];
    const ml_type *t = ml_graph_type(g, matrix);
    ml_axis features = vector_axis(inc, x);
    if (!features || inc->places[matrix].fed || inc->places[matrix].given ||
        !increment_names(g, n, features) || ml_type_find(t, p->axis) >= 0 ||
        (p->batch && ml_type_find(t, p->batch) >= 0))
        return false;
    for (int i = 0; i < ml_graph_node(g, n)->arg_count; i++)
        if (args[i] != features && ml_type_find(t, (ml_axis)args[i]) >= 0) return false;
    return push(out, (term){.base = x, .features = features, .matrix = matrix});
}

/* Elements `from` .. of an axis of `size` of the result are those of the terms. */
static bool place_terms(increment *inc, terms *all, int count, ml_axis axis, int64_t from,
                        int64_t size) {
    ml_graph *g = inc->g;
    for (int i = count; i < all->count; i++) {
        term *t = &all->at[i];
        if (!t->matrix) {
            if (t->axis != axis) return false;
            t->first += from;
            continue;
        }
        int64_t own = ml_type_size(ml_graph_type(g, t->matrix), axis);
        if (!own) return false;
        t->matrix = ml_pad(g, t->matrix, axis, from, size - from - own);
    }
    return true;
}

static bool slice_terms(increment *inc, terms *all, int count, ml_axis axis, int64_t first,
                        int64_t last) {
    ml_graph *g = inc->g;
    int kept = count;
    for (int i = count; i < all->count; i++) {
        term t = all->at[i];
        bool along =
            t.matrix ? ml_type_find(ml_graph_type(g, t.matrix), axis) >= 0 : t.axis == axis;
        if (along && t.matrix) t.matrix = ml_slice(g, t.matrix, axis, first, last);
        if (along && !t.matrix) {
            int64_t size = ml_type_size(ml_graph_type(g, t.base), t.features);
            if (t.first >= last || t.first + size <= first) continue;
            if (t.first < first || t.first + size > last) return false;
            t.first -= first;
        }
        all->at[kept++] = t;
    }
    all->count = kept;
    return true;
}

static bool concat_terms(increment *inc, ml_ref n, terms *out) {
    ml_graph *g = inc->g;
    ml_axis axis = (ml_axis)ml_graph_args(g, n)[0];
    int64_t from = 0, size = ml_type_size(ml_graph_type(g, n), axis);
    for (int i = 0; i < ml_graph_node(g, n)->source_count; i++) {
        ml_ref s = ml_graph_source(g, n, i);
        int count = out->count;
        double value;
        bool zero = ml_graph_constant(g, s, &value) && value == 0;
        if (!zero && (!find(inc, s, out) || !place_terms(inc, out, count, axis, from, size)))
            return false;
        from += ml_type_size(ml_graph_type(g, s), axis);
    }
    return true;
}

static void rename_terms(increment *inc, ml_ref n, terms *all, int count) {
    ml_graph *g = inc->g;
    const int64_t *args = ml_graph_args(g, n);
    for (int i = count; i < all->count; i++) {
        term *t = &all->at[i];
        if (!t->matrix) t->axis = increment_renamed(g, n, t->axis);
        for (int k = 0; t->matrix && k < ml_graph_node(g, n)->arg_count; k += 2)
            if (ml_type_find(ml_graph_type(g, t->matrix), (ml_axis)args[k]) >= 0)
                t->matrix = ml_rename(g, t->matrix, (ml_axis)args[k], (ml_axis)args[k + 1]);
    }
}

/* Along the axes of one position. */
static bool find_move(increment *inc, ml_ref n, terms *out) {
    ml_graph *g = inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    const place *p = &inc->places[n];
    int count = out->count;
    bool cuts = node.op == ML_OP_SLICE || node.op == ML_OP_PAD || node.op == ML_OP_CONCAT;
    if (cuts && (args[0] == p->axis || args[0] == p->batch)) return false;
    if (node.op == ML_OP_CONCAT) return concat_terms(inc, n, out);
    bool passes = node.op == ML_OP_BROADCAST || node.op == ML_OP_PERMUTE ||
                  node.op == ML_OP_RENAME || node.op == ML_OP_STOP_GRADIENT || cuts;
    if (!passes || !find(inc, ml_graph_source(g, n, 0), out)) return false;
    if (node.op == ML_OP_RENAME) rename_terms(inc, n, out, count);
    if (node.op == ML_OP_SLICE)
        return slice_terms(inc, out, count, (ml_axis)args[0], args[1], args[2]);
    if (node.op == ML_OP_PAD)
        return place_terms(inc, out, count, (ml_axis)args[0], args[1],
                           ml_type_size(ml_graph_type(g, n), (ml_axis)args[0]));
    return true;
}

/* n as a sum of terms, which are added to *out. */
static bool find(increment *inc, ml_ref n, terms *out) {
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    ml_axis own = vector_axis(inc, n);
    if (!inc->places[n].fed) return false;
    if (own) return push(out, (term){.base = n, .features = own, .axis = own});
    if (op == ML_OP_DOT) return find_product(inc, n, out);
    if (op == ML_OP_ADD)
        return find(inc, ml_graph_source(inc->g, n, 0), out) &&
               find(inc, ml_graph_source(inc->g, n, 1), out);
    return find_move(inc, n, out);
}

/* ---- Whether it is kept ---------------------------------------------------------------------- */

static int64_t bytes_of(const increment *inc, ml_ref n) {
    const place *p = &inc->places[n];
    ml_type rest = increment_without(ml_graph_type(inc->g, n), p->axis, p->batch);
    return ml_type_bytes(&rest);
}

static void add_bases(const increment *inc, latent *l, const terms *of) {
    for (int i = 0; i < of->count; i++) {
        const term *t = &of->at[i];
        bool known = false;
        for (int k = 0; k < l->count; k++) known |= l->bases[k] == t->base;
        if (known) continue;
        l->bases[l->count] = t->base;
        l->first[l->count++] = l->size;
        l->size += ml_type_size(ml_graph_type(inc->g, t->base), t->features);
    }
}

/* All heads of keys are heads of queries, or share what is theirs. */
static bool fits(const increment *inc, const terms *of, const ml_attention_args *a, int64_t heads) {
    for (int i = 0; i < of->count; i++) {
        const term *t = &of->at[i];
        if (!t->matrix && t->axis != a->head_dim) return false;
        if (!t->matrix) continue;
        const ml_type *m = ml_graph_type(inc->g, t->matrix);
        int64_t own = ml_type_size(m, a->kv_heads);
        if (ml_type_find(m, a->head_dim) < 0 || (own && own != heads)) return false;
        if (m->rank != 2 + (own > 0) || t->features == a->heads) return false;
    }
    return true;
}

/* Products with all features take more operations: they are worth less than half the bytes. */
const latent *increment_latent(increment *inc, ml_ref n) {
    ml_attention_args a;
    ml_attention_read(inc->g, n, &a);
    ml_ref q = ml_graph_source(inc->g, n, 0), k = ml_graph_source(inc->g, n, 1);
    ml_ref v = ml_graph_source(inc->g, n, 2);
    int64_t heads = ml_type_size(ml_graph_type(inc->g, q), a.heads), bytes = 0;
    latent *l = ML_NEW(inc->arena, latent);
    *l = (latent){0};
    if (!find(inc, k, &l->k) || !find(inc, v, &l->v)) return NULL;
    if (!fits(inc, &l->k, &a, heads) || !fits(inc, &l->v, &a, heads)) return NULL;
    add_bases(inc, l, &l->k);
    add_bases(inc, l, &l->v);
    for (int i = 0; i < l->count; i++) bytes += bytes_of(inc, l->bases[i]);
    return 2 * bytes < bytes_of(inc, k) + bytes_of(inc, v) ? l : NULL;
}

void increment_need_latent(increment *inc, const latent *l) {
    for (int i = 0; i < l->count; i++) inc->needs[l->bases[i]] |= 1 << AT_NEW;
}

/* ---- Values ---------------------------------------------------------------------------------- */

ml_axis increment_latent_axis(increment *inc) {
    return ml_axis_named(inc->g, "latent'");
}

ml_ref increment_latent_pool(increment *inc, const latent *l, ml_ref n, int64_t ring) {
    ml_graph *g = inc->g;
    ml_axis axis = increment_latent_axis(inc);
    ml_ref parts[2 * MOST_TERMS];
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, ml_graph_source(g, n, 1))->dtype;
    for (int i = 0; i < l->count; i++) {
        ml_ref base = l->bases[i];
        lifting by = increment_by(inc, &inc->places[base], AT_NEW);
        ml_type type = increment_lifted_type(ml_graph_type(g, base), &by);
        parts[i] = ml_broadcast(g, inc->values[AT_NEW][base], &type);
        parts[i] = ml_cast(g, ml_rename(g, parts[i], vector_axis(inc, base), axis), dtype);
    }
    ml_ref value = l->count > 1 ? ml_concat(g, parts, l->count, axis) : parts[0];
    return increment_pool(inc, n, 0, ring, value);
}

static ml_ref matrix_of(increment *inc, const term *t, const ml_attention_args *a, ml_dtype dtype) {
    ml_graph *g = inc->g;
    ml_ref m = t->matrix;
    if (a->kv_heads != a->heads && ml_type_find(ml_graph_type(g, m), a->kv_heads) >= 0)
        m = ml_rename(g, m, a->kv_heads, a->heads);
    return ml_cast(g, m, dtype);
}

/* q {row, new, heads, head_dim} over the features of base i; 0 where keys do not read it. */
static ml_ref query_part(increment *inc, const latent *l, const ml_attention_args *a, ml_ref q,
                         int i) {
    ml_graph *g = inc->g;
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, q)->dtype;
    ml_axis axis = increment_latent_axis(inc);
    ml_ref sum = 0;
    for (int k = 0; k < l->k.count; k++) {
        const term *t = &l->k.at[k];
        if (t->base != l->bases[i]) continue;
        int64_t size = ml_type_size(ml_graph_type(g, t->base), t->features);
        ml_ref part = t->matrix ? ml_dot(g, q, matrix_of(inc, t, a, dtype), &a->head_dim, 1, dtype)
                                : ml_slice(g, q, a->head_dim, t->first, t->first + size);
        part = ml_rename(g, part, t->matrix ? t->features : a->head_dim, axis);
        sum = sum ? ml_map2(g, ML_OP_ADD, sum, part) : part;
    }
    return sum;
}

ml_ref increment_latent_query(increment *inc, const latent *l, const ml_attention_args *a,
                              ml_ref q) {
    ml_graph *g = inc->g;
    ml_axis axis = increment_latent_axis(inc);
    ml_ref parts[2 * MOST_TERMS];
    for (int i = 0; i < l->count; i++) {
        ml_type type = increment_without(ml_graph_type(g, q), a->head_dim, 0);
        int64_t end = i + 1 < l->count ? l->first[i + 1] : l->size;
        increment_push(&type, axis, end - l->first[i]);
        ml_ref part = query_part(inc, l, a, q, i);
        if (!part) part = ml_const(g, (ml_dtype)type.dtype, 0);
        parts[i] = ml_broadcast(g, part, &type);
    }
    return l->count > 1 ? ml_concat(g, parts, l->count, axis) : parts[0];
}

/* From sums of features, {row, new, heads, features}, to those of values, of head_dim `size`. */
ml_ref increment_latent_value(increment *inc, const latent *l, const ml_attention_args *a,
                              ml_ref value, int64_t size) {
    ml_graph *g = inc->g;
    ml_axis axis = increment_latent_axis(inc);
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, value)->dtype;
    ml_ref sum = 0;
    for (int k = 0; k < l->v.count; k++) {
        const term *t = &l->v.at[k];
        int i = 0;
        while (l->bases[i] != t->base) i++;
        int64_t own = ml_type_size(ml_graph_type(g, t->base), t->features);
        ml_ref part = ml_slice(g, value, axis, l->first[i], l->first[i] + own);
        part = ml_rename(g, part, axis, t->matrix ? t->features : a->head_dim);
        if (t->matrix)
            part = ml_dot(g, part, matrix_of(inc, t, a, dtype), &t->features, 1, dtype);
        else
            part = ml_pad(g, part, a->head_dim, t->first, size - t->first - own);
        sum = sum ? ml_map2(g, ML_OP_ADD, sum, part) : part;
    }
    return sum;
}
