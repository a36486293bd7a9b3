/* The choice of what to keep (recompute_choose.h): a minimum cut for each price of a byte, found by
 * Dinic's algorithm over the values of one part; the curve of a class of parts by bisection of
 * prices; then the steps of all curves in order of seconds for each byte that they save. */
#include "runtime/passes/recompute_choose.h"

#include <string.h>

/* ---- Minimum cuts ---------------------------------------------------------------------------- */

/* Vertices: the source and sink of the flow, then two of each value. What is on the source's side:
 * the first where the backward pass has the value, the second where it is computed again. */
enum { FLOW_SOURCE, FLOW_SINK, FLOW_VALUES };

typedef struct {
    uint32_t to, next;
    double capacity;
} flow_edge;

typedef struct {
    flow_edge *edges; /* i and i ^ 1: there and back */
    uint32_t edge_count, vertex_count;
    uint32_t *first, *level, *queue, *at; /* by vertex */
    double least;                         /* smaller capacities are rounding errors */
    int64_t cuts;                         /* that were found so far */
} flow;

static uint32_t has(uint32_t value) {
    return FLOW_VALUES + 2 * value;
}

static uint32_t again(uint32_t value) {
    return FLOW_VALUES + 2 * value + 1;
}

static void flow_add(flow *f, uint32_t from, uint32_t to, double capacity, double back) {
    f->edges[f->edge_count] = (flow_edge){to, f->first[from], capacity};
    f->first[from] = f->edge_count++;
    f->edges[f->edge_count] = (flow_edge){from, f->first[to], back};
    f->first[to] = f->edge_count++;
}

static bool flow_levels(flow *f) {
    uint32_t begin = 0, end = 0;
    memset(f->level, 0, f->vertex_count * sizeof *f->level);
    f->level[FLOW_SOURCE] = 1;
    f->queue[end++] = FLOW_SOURCE;
    while (begin < end) {
        uint32_t v = f->queue[begin++];
        for (uint32_t e = f->first[v]; e != UINT32_MAX; e = f->edges[e].next) {
            uint32_t to = f->edges[e].to;
            if (f->level[to] || f->edges[e].capacity <= f->least) continue;
            f->level[to] = f->level[v] + 1;
            f->queue[end++] = to;
        }
    }
    return f->level[FLOW_SINK] != 0;
}

/* One more path from source to sink, its edges in `queue`; false where there is none. */
static bool flow_path(flow *f, uint32_t *length) {
    uint32_t v = FLOW_SOURCE;
    *length = 0;
    while (v != FLOW_SINK) {
        uint32_t e = f->at[v];
        if (e == UINT32_MAX) {
            if (*length == 0) return false;
            uint32_t back = f->queue[--*length] ^ 1;
            v = f->edges[back].to;
            f->at[v] = f->edges[f->at[v]].next;
        } else if (f->edges[e].capacity > f->least && f->level[f->edges[e].to] == f->level[v] + 1) {
            f->queue[(*length)++] = e;
            v = f->edges[e].to;
        } else {
            f->at[v] = f->edges[e].next;
        }
    }
    return true;
}

static void flow_run(flow *f) {
    uint32_t length;
    while (flow_levels(f)) {
        memcpy(f->at, f->first, f->vertex_count * sizeof *f->at);
        while (flow_path(f, &length)) {
            double amount = f->edges[f->queue[0]].capacity;
            for (uint32_t i = 1; i < length; i++) {
                double capacity = f->edges[f->queue[i]].capacity;
                if (capacity < amount) amount = capacity;
            }
            for (uint32_t i = 0; i < length; i++) {
                f->edges[f->queue[i]].capacity -= amount;
                f->edges[f->queue[i] ^ 1].capacity += amount;
            }
        }
    }
}

static void flow_begin(flow *f, const recompute_part *p, ml_arena *arena) {
    f->vertex_count = FLOW_VALUES + 2 * p->count;
    f->edges = ML_NEW_ARRAY(arena, flow_edge, 2 * (3 * (size_t)p->count + p->source_count) + 2);
    f->first = ML_NEW_ARRAY(arena, uint32_t, f->vertex_count);
    f->level = ML_NEW_ARRAY(arena, uint32_t, f->vertex_count);
    f->queue = ML_NEW_ARRAY(arena, uint32_t, f->vertex_count);
    f->at = ML_NEW_ARRAY(arena, uint32_t, f->vertex_count);
}

/* Fates of least cost where a byte costs `price` seconds. */
static void cut_at(flow *f, const recompute_part *p, double price, uint8_t *fates) {
    double all = 1e-30;
    for (uint32_t v = 0; v < p->count; v++) {
        all += price * (double)p->values[v].bytes;
        if (p->values[v].seconds > 0) all += p->values[v].seconds;
    }
    const double infinite = 4 * all;
    f->edge_count = 0;
    f->cuts++;
    f->least = 1e-13 * all;
    memset(f->first, 0xff, f->vertex_count * sizeof *f->first);
    for (uint32_t v = 0; v < p->count; v++) {
        const recompute_value *value = &p->values[v];
        double seconds = value->seconds < 0 ? infinite : value->seconds;
        if (value->needed) flow_add(f, FLOW_SOURCE, has(v), infinite, 0);
        flow_add(f, has(v), again(v), price * (double)value->bytes, infinite);
        flow_add(f, again(v), FLOW_SINK, seconds, 0);
        for (uint32_t i = 0; i < value->source_count; i++) {
            uint32_t source = p->sources[value->first_source + i];
            flow_add(f, again(v), value->output ? again(source) : has(source), infinite, 0);
        }
    }
    flow_run(f);
    for (uint32_t v = 0; v < p->count; v++)
        fates[v] = f->level[again(v)] ? RECOMPUTE_AGAIN
                   : f->level[has(v)] ? RECOMPUTE_KEPT
                                      : RECOMPUTE_UNUSED;
}

/* ---- The curve of a part --------------------------------------------------------------------- */

typedef struct {
    int64_t bytes;
    double seconds;
    uint8_t *fates;
} point;

/* What is known of parts that are alike, whatever is to be kept. */
typedef struct {
    uint64_t hash;
    recompute_part part;
    flow flow;
    point *points; /* from the most bytes to the least, convex */
    uint32_t count, capacity;
    bool has_others; /* these are found: choices beside the points, each once */
    ML_VEC(uint8_t *) others;
    ML_VEC(uint64_t) other_hashes;
} curve;

struct recompute_curves {
    ml_arena *arena;
    ML_VEC(curve *) known;
};

recompute_curves *recompute_curves_new(ml_arena *arena) {
    recompute_curves *curves = ML_NEW(arena, recompute_curves);
    curves->arena = arena;
    return curves;
}

int64_t recompute_curves_cuts(const recompute_curves *curves) {
    int64_t cuts = 0;
    for (uint32_t k = 0; k < curves->known.count; k++) cuts += curves->known.at[k]->flow.cuts;
    return cuts;
}

void recompute_cost(const recompute_part *part, const uint8_t *fates, int64_t *bytes,
                    double *seconds) {
    *bytes = 0;
    *seconds = 0;
    for (uint32_t v = 0; v < part->count; v++) {
        if (fates[v] == RECOMPUTE_KEPT) *bytes += part->values[v].bytes;
        if (fates[v] == RECOMPUTE_AGAIN) *seconds += part->values[v].seconds;
    }
}

static point solve(curve *c, double price, ml_arena *arena) {
    point p = {.fates = ML_NEW_ARRAY(arena, uint8_t, (size_t)c->part.count + 1)};
    cut_at(&c->flow, &c->part, price, p.fates);
    recompute_cost(&c->part, p.fates, &p.bytes, &p.seconds);
    return p;
}

static void append(curve *c, point p, ml_arena *arena) {
    if (c->count == c->capacity) {
        c->capacity = 2 * c->capacity + 8;
        point *points = ML_NEW_ARRAY(arena, point, c->capacity);
        if (c->count) memcpy(points, c->points, c->count * sizeof *points);
        c->points = points;
    }
    c->points[c->count++] = p;
}

/* Append what the curve has between two of its points, and the second. */
static void bisect(curve *c, point from, point to, int depth, ml_arena *arena) {
    const double rounding = 1e-9;
    if (from.bytes <= to.bytes) return;
    double price = (to.seconds - from.seconds) / (double)(from.bytes - to.bytes);
    double cost = from.seconds + price * (double)from.bytes;
    if (depth > 0 && price > 0) {
        point middle = solve(c, price, arena);
        double least = middle.seconds + price * (double)middle.bytes;
        if (least < cost * (1 - rounding) && middle.bytes < from.bytes && middle.bytes > to.bytes) {
            bisect(c, from, middle, depth - 1, arena);
            bisect(c, middle, to, depth - 1, arena);
            return;
        }
    }
    append(c, to, arena);
}

/* From a price at which time counts alone to one at which bytes do. */
static void curve_find(curve *c, ml_arena *arena) {
    enum { DEEPEST = 12 };
    double seconds = 0, least_seconds = 0, bytes = 1, least_bytes = 0;
    for (uint32_t v = 0; v < c->part.count; v++) {
        const recompute_value *value = &c->part.values[v];
        double b = (double)value->bytes, s = value->seconds;
        bytes += b;
        if (b > 0 && (least_bytes == 0 || b < least_bytes)) least_bytes = b;
        if (s <= 0) continue;
        seconds += s;
        if (least_seconds == 0 || s < least_seconds) least_seconds = s;
    }
    flow_begin(&c->flow, &c->part, arena);
    point fastest = solve(c, 1e-3 * (least_seconds + 1e-12) / bytes, arena);
    append(c, fastest, arena);
    if (least_bytes == 0) return;
    bisect(c, fastest, solve(c, 2 * (seconds + 1e-12) / least_bytes, arena), DEEPEST, arena);
}

/* ---- Bytes to spare -------------------------------------------------------------------------- */

/* What is computed again for nothing else than values that are kept now. */
static void prune(const recompute_part *p, uint8_t *fates, uint8_t *used) {
    memset(used, 0, p->count);
    for (uint32_t v = p->count; v-- > 0;) {
        const recompute_value *value = &p->values[v];
        if (!used[v] && !value->needed) {
            fates[v] = RECOMPUTE_UNUSED;
            continue;
        }
        for (uint32_t i = 0; fates[v] == RECOMPUTE_AGAIN && i < value->source_count; i++)
            used[p->sources[value->first_source + i]] = 1;
    }
}

/* An output of an operator that is not computed again is kept. */
static bool complete(const recompute_part *p, const uint8_t *fates) {
    for (uint32_t v = 0; v < p->count; v++)
        if (p->values[v].output && fates[v] == RECOMPUTE_AGAIN && p->values[v].source_count &&
            fates[p->sources[p->values[v].first_source]] != RECOMPUTE_AGAIN)
            return false;
    return true;
}

/* Keep what is computed again, the most seconds for each byte first, in `spare` bytes. */
static void keep_more(const recompute_part *p, uint8_t *fates, int64_t spare, ml_arena *arena) {
    enum { MOST_VALUES = 512 }; /* the work grows with the square */
    if (p->count > MOST_VALUES) return;
    uint8_t *trial = ML_NEW_ARRAY(arena, uint8_t, p->count + 1);
    uint8_t *used = ML_NEW_ARRAY(arena, uint8_t, p->count + 1);
    uint8_t *best = ML_NEW_ARRAY(arena, uint8_t, p->count + 1);
    int64_t bytes, limit;
    double seconds;
    recompute_cost(p, fates, &bytes, &seconds);
    limit = bytes + spare;
    for (double gain = 1; gain > 0;) {
        gain = 0;
        for (uint32_t v = 0; v < p->count; v++) {
            if (fates[v] != RECOMPUTE_AGAIN || bytes + p->values[v].bytes > limit) continue;
            memcpy(trial, fates, p->count);
            trial[v] = RECOMPUTE_KEPT;
            prune(p, trial, used);
            int64_t b;
            double s;
            recompute_cost(p, trial, &b, &s);
            double more = (double)(b - bytes), saved = seconds - s;
            double ratio = saved / (more > 1 ? more : 1);
            if (b > limit || saved <= 0 || ratio <= gain || !complete(p, trial)) continue;
            gain = ratio;
            memcpy(best, trial, p->count);
        }
        if (gain > 0) memcpy(fates, best, p->count);
        recompute_cost(p, fates, &bytes, &seconds);
    }
}

typedef struct {
    const recompute_part *part;
    int64_t bytes; /* at most */
    uint8_t *best;
    double seconds; /* of the best */
} spare_search;

static void try_choice(spare_search *s, const uint8_t *fates, ml_arena *arena) {
    int64_t bytes;
    double seconds;
    recompute_cost(s->part, fates, &bytes, &seconds);
    if (bytes > s->bytes) return;
    uint8_t *trial = ML_NEW_ARRAY(arena, uint8_t, (size_t)s->part->count + 1);
    memcpy(trial, fates, s->part->count);
    keep_more(s->part, trial, s->bytes - bytes, arena);
    recompute_cost(s->part, trial, &bytes, &seconds);
    if (s->best == NULL || seconds < s->seconds) s->best = trial, s->seconds = seconds;
}

/* Whether the curve has the choice, as a point or beside them. */
static bool has_choice(const curve *c, const uint8_t *fates, uint64_t hash) {
    for (uint32_t i = 0; i < c->count; i++)
        if (memcmp(c->points[i].fates, fates, c->part.count) == 0) return true;
    for (uint32_t i = 0; i < c->others.count; i++)
        if (c->other_hashes.at[i] == hash && memcmp(c->others.at[i], fates, c->part.count) == 0)
            return true;
    return false;
}

static void add_other(curve *c, const uint8_t *fates, ml_arena *arena) {
    const uint64_t hash = ml_hash(fates, c->part.count, 0);
    if (has_choice(c, fates, hash)) return;
    uint8_t *other = ML_NEW_ARRAY(arena, uint8_t, (size_t)c->part.count + 1);
    memcpy(other, fates, c->part.count);
    *ML_PUSH(arena, &c->others) = other;
    *ML_PUSH(arena, &c->other_hashes) = hash;
}

enum { PRICES = 5, MOST_VALUES = 96 };

/* At and around the price of a step of the curve. */
static double price_near(const curve *c, uint32_t i) {
    static const double around[PRICES] = {0.25, 0.5, 1, 2, 4};
    const point *p = &c->points[i / PRICES];
    return around[i % PRICES] * ((p[1].seconds - p->seconds) / (double)(p->bytes - p[1].bytes));
}

/* Cuts where value v costs as many bytes. A cheaper value that the cut keeps anyway changes
 * nothing, nor does a dearer one that it does not keep. */
static void add_others(curve *c, uint32_t v, int64_t bytes, const uint8_t *cuts, ml_arena *arena) {
    recompute_value *value = &c->part.values[v];
    const int64_t own = value->bytes;
    uint8_t fates[MOST_VALUES];
    for (uint32_t i = 0; i < PRICES * (c->count - 1); i++) {
        const uint8_t *cut = cuts + i * c->part.count;
        if ((cut[v] == RECOMPUTE_KEPT) == (bytes < own)) {
            add_other(c, cut, arena);
            continue;
        }
        value->bytes = bytes;
        cut_at(&c->flow, &c->part, price_near(c, i), fates);
        value->bytes = own;
        add_other(c, fates, arena);
    }
}

/* Cuts that are made to keep one value or not to: it costs nothing to keep, or far more than it
 * does. */
static void find_others(curve *c, ml_arena *arena) {
    enum { FAR = 64 };
    const uint32_t count = c->part.count, prices = PRICES * (c->count - 1);
    if (c->has_others || count > MOST_VALUES) return;
    c->has_others = true;
    uint8_t *cuts = ML_NEW_ARRAY(arena, uint8_t, (size_t)prices * count + 1);
    for (uint32_t i = 0; i < prices; i++)
        cut_at(&c->flow, &c->part, price_near(c, i), cuts + (size_t)i * count);
    for (uint32_t v = 0; v < count; v++) {
        const recompute_value *value = &c->part.values[v];
        if (value->bytes == 0 || value->seconds <= 0) continue;
        add_others(c, v, 0, cuts, arena);
        add_others(c, v, FAR * value->bytes, cuts, arena);
    }
}

/* The fastest choice that was found of at most so many bytes. */
static uint8_t *fastest_in(const curve *c, int64_t bytes, ml_arena *arena) {
    spare_search s = {.part = &c->part, .bytes = bytes};
    for (uint32_t i = 0; i < c->count; i++) try_choice(&s, c->points[i].fates, arena);
    for (uint32_t i = 0; i < c->others.count; i++) try_choice(&s, c->others.at[i], arena);
    return s.best;
}

/* ---- All parts ------------------------------------------------------------------------------- */

static uint64_t hash_of(const recompute_part *p) {
    uint64_t hash = ml_hash(&p->count, sizeof p->count, 1);
    for (uint32_t v = 0; v < p->count; v++) {
        const recompute_value *value = &p->values[v];
        int64_t fields[] = {value->bytes, value->needed, value->output, value->source_count};
        hash = ml_hash(fields, sizeof fields, hash);
        hash = ml_hash(&value->seconds, sizeof value->seconds, hash);
    }
    return ml_hash(p->sources, p->source_count * sizeof *p->sources, hash);
}

/* Of parts that are alike. */
typedef struct {
    curve *curve;
    uint32_t members;
    uint32_t at;      /* the point that members have */
    uint32_t ahead;   /* so many of them have the next one */
    uint8_t *between; /* the fates of one more */
} part_class;

typedef struct {
    part_class *classes;
    uint32_t count;
    uint32_t *of_part;
} part_classes;

/* The curve of a part, found anew where no part before was alike. Layers repeat: the last one is
 * looked at first. */
static curve *curve_of(recompute_curves *curves, const recompute_part *part) {
    const uint64_t hash = hash_of(part);
    ml_arena *arena = curves->arena;
    for (uint32_t k = curves->known.count; k-- > 0;)
        if (curves->known.at[k]->hash == hash) return curves->known.at[k];
    curve *c = *ML_PUSH(arena, &curves->known) = ML_NEW(arena, curve);
    c->hash = hash;
    c->part = *part;
    c->part.values = ML_NEW_ARRAY(arena, recompute_value, (size_t)part->count + 1);
    c->part.sources = ML_NEW_ARRAY(arena, uint32_t, (size_t)part->source_count + 1);
    memcpy(c->part.values, part->values, part->count * sizeof *part->values);
    memcpy(c->part.sources, part->sources, part->source_count * sizeof *part->sources);
    curve_find(c, arena);
    return c;
}

static void classes_find(part_classes *all, recompute_curves *curves, const recompute_part *parts,
                         uint32_t count, ml_arena *arena) {
    all->classes = ML_NEW_ARRAY(arena, part_class, (size_t)count + 1);
    all->of_part = ML_NEW_ARRAY(arena, uint32_t, (size_t)count + 1);
    for (uint32_t i = 0; i < count; i++) {
        curve *c = curve_of(curves, &parts[i]);
        uint32_t k = all->count;
        while (k > 0 && all->classes[k - 1].curve != c) k--;
        if (k == 0) {
            all->classes[all->count].curve = c;
            k = ++all->count;
        }
        all->of_part[i] = k - 1;
        all->classes[k - 1].members++;
    }
}

/* The step that adds the fewest seconds for each byte that it saves; NULL: all are made. */
static part_class *cheapest_step(const part_classes *all) {
    part_class *best = NULL;
    double least = 0;
    for (uint32_t i = 0; i < all->count; i++) {
        part_class *c = &all->classes[i];
        if (c->at + 1 >= c->curve->count) continue;
        const point *p = &c->curve->points[c->at];
        double price = (p[1].seconds - p->seconds) / (double)(p->bytes - p[1].bytes);
        if (best == NULL || price < least) best = c, least = price;
    }
    return best;
}

/* Of the step that saves more than is asked for: as many members as it takes, and the fastest
 * choice in what is left for one more. */
static void step_partly(part_class *c, int64_t excess, recompute_curves *curves, ml_arena *arena) {
    const point *p = &c->curve->points[c->at];
    int64_t saved = p->bytes - p[1].bytes;
    c->ahead = (uint32_t)(excess / saved);
    int64_t left = excess - (int64_t)c->ahead * saved;
    if (left <= 0) return;
    find_others(c->curve, curves->arena);
    c->between = fastest_in(c->curve, p->bytes - left, arena);
}

void recompute_choose(const recompute_part *parts, uint32_t count, double kept,
                      recompute_curves *curves, ml_arena *arena, uint8_t **fates) {
    part_classes all = {0};
    if (curves == NULL) curves = recompute_curves_new(arena);
    classes_find(&all, curves, parts, count, arena);
    double most = 0, least = 0;
    for (uint32_t i = 0; i < all.count; i++) {
        const curve *known = all.classes[i].curve;
        most += (double)all.classes[i].members * (double)known->points[0].bytes;
        least += (double)all.classes[i].members * (double)known->points[known->count - 1].bytes;
    }
    int64_t excess = (int64_t)((1 - kept) * (most - least));
    part_class *c;
    while (excess > 0 && (c = cheapest_step(&all)) != NULL) {
        const point *p = &c->curve->points[c->at];
        int64_t saved = c->members * (p->bytes - p[1].bytes);
        if (saved > excess) {
            step_partly(c, excess, curves, arena);
            break;
        }
        excess -= saved;
        c->at++;
    }
    for (uint32_t i = 0; i < count; i++) {
        c = &all.classes[all.of_part[i]];
        fates[i] = c->curve->points[c->at].fates;
        if (c->ahead > 0) {
            c->ahead--;
            fates[i] = c->curve->points[c->at + 1].fates;
        } else if (c->between != NULL) {
            fates[i] = c->between;
            c->between = NULL;
        }
    }
}
