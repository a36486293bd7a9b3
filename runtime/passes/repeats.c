/* Finding regions that repeat (repeats.h): candidates are where the same window of nodes came
 * before, by a rolling hash of what the nodes are; operands then decide where a region ends. */
#include "runtime/passes/repeats.h"

enum {
    WINDOW = 24,     /* nodes */
    MOST_LAYERS = 4, /* of nodes that are like those of the next, but for their operands */
    SAMPLED = 8,     /* of so many neighbouring windows that with the least hash is looked up */
};
static const uint64_t BASE = 0x9e3779b97f4a7c15u;

typedef struct {
    uint64_t hash;
    ml_ref end; /* of the last window with this hash; 0: free */
} window;

typedef struct {
    const ml_graph *g;
    ml_arena *arena;
    uint32_t least, slots;
    uint64_t *label; /* by node: what it is, but for its operands, and which state it is */
    window *windows;
    ml_ref floor;         /* where a region may begin */
    uint32_t refused;     /* a distance between windows that is no period ... */
    ml_ref refused_until; /* ... up to this node */
    const int64_t **step; /* by node of a period: how its operands move from period to period */
    repeats *out;
} finder;

static uint64_t label_of(const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    const uint64_t head = (uint64_t)node->op | (uint64_t)node->flags << 8 |
                          (uint64_t)node->source_count << 16 | (uint64_t)node->arg_count << 32;
    uint64_t hash = ml_mix(head, node->type);
    if (node->op == ML_OP_STATE) {
        const ml_state *state = ml_graph_state(g, (uint32_t)args[0]);
        return ml_mix(hash, (uint64_t)state->kind << 1 | state->no_fp8);
    }
    for (int i = 0; i < node->arg_count; i++) hash = ml_mix(hash, (uint64_t)args[i]);
    return hash;
}

/* ---- A region -------------------------------------------------------------------------------- */

/* Whether the operands of n lie `step` after those of the node a period before. */
static bool steps_so(const ml_graph *g, ml_ref n, uint32_t period, const int64_t *step) {
    const ml_ref *now = ml_graph_sources(g, n), *before = ml_graph_sources(g, n - period);
    for (int k = 0; k < ml_graph_node(g, n)->source_count; k++)
        if ((int64_t)now[k] - before[k] != step[k]) return false;
    return true;
}

static void read_steps(finder *f, ml_ref begin, uint32_t period) {
    f->step = ML_NEW_ARRAY(f->arena, const int64_t *, period);
    for (uint32_t i = 0; i < period; i++) {
        const ml_ref *now = ml_graph_sources(f->g, begin + i);
        const ml_ref *before = ml_graph_sources(f->g, begin + i - period);
        int count = ml_graph_node(f->g, begin + i)->source_count;
        int64_t *step = ML_NEW_ARRAY(f->arena, int64_t, count + 1);
        for (int k = 0; k < count; k++) step[k] = (int64_t)now[k] - before[k];
        f->step[i] = step;
    }
}

/* Nodes begin .. end-1 repeat by their labels: add those that do by their operands too. */
static bool add_region(finder *f, ml_ref begin, ml_ref end, uint32_t period) {
    uint32_t periods = (end - begin) / period;
    const ml_ref middle = begin + periods / 2 * period;
    if (periods < f->least || periods < 2) return false;
    read_steps(f, middle, period);
    ml_ref up = middle, down = middle;
    while (up < end && steps_so(f->g, up, period, f->step[(up - middle) % period])) up++;
    while (down > begin + period &&
           steps_so(f->g, down - 1, period, f->step[period - 1 - (middle - down) % period]))
        down--;
    begin = down - period;
    periods = (up - begin) / period;
    if (periods < f->least) return false;
    *ML_PUSH(f->arena, f->out) = (repeat){begin, period, periods, 0, 0};
    f->floor = begin + periods * period;
    return true;
}

/* The window that ends before node `end` came before, ending at `before`. */
static void consider(finder *f, ml_ref before, ml_ref end) {
    const uint32_t period = end - before, count = ml_graph_count(f->g);
    const uint64_t *label = f->label;
    if (before - WINDOW < f->floor || (period == f->refused && end <= f->refused_until)) return;
    ml_ref first = end - WINDOW, last = end;
    while (first > f->floor + period && label[first - 1] == label[first - 1 - period]) first--;
    while (last < count && label[last] == label[last - period]) last++;
    for (uint32_t several = 1; several <= MOST_LAYERS; several++)
        if (add_region(f, first - period, last, several * period)) return;
    f->refused = period;
    f->refused_until = last;
}

static void look_up(finder *f, uint64_t hash, ml_ref end) {
    uint32_t at = (uint32_t)(hash >> 32) & (f->slots - 1);
    for (uint32_t tries = 0; tries < 16; tries++, at = (at + 1) & (f->slots - 1)) {
        window *w = &f->windows[at];
        if (w->end && w->hash != hash) continue;
        const ml_ref before = w->end;
        *w = (window){hash, end};
        if (before) consider(f, before, end);
        return;
    }
}

/* Calls look_up for windows of which one is in any SAMPLED neighbours: so, of nodes that repeat,
 * the same ones in each period. */
static void look_up_windows(finder *f) {
    const uint32_t count = ml_graph_count(f->g);
    uint64_t hash = 0, oldest = 1, least = UINT64_MAX;
    ml_ref found = 0;
    for (int i = 0; i < WINDOW; i++) oldest *= BASE;
    for (ml_ref n = 1; n < count; n++) {
        hash = hash * BASE + f->label[n] - (n > WINDOW ? f->label[n - WINDOW] * oldest : 0);
        const uint64_t mixed = ml_mix(hash, 0);
        if (mixed > least && n < found + SAMPLED) continue;
        least = mixed;
        found = n;
        if (n >= WINDOW && n >= f->floor) look_up(f, mixed, n + 1);
    }
}

static void find_regions(finder *f) {
    const uint32_t count = ml_graph_count(f->g);
    f->label = ML_NEW_ARRAY(f->arena, uint64_t, count);
    for (f->slots = 64; f->slots < count / SAMPLED * 4; f->slots *= 2) {}
    f->windows = ML_NEW_ARRAY(f->arena, window, f->slots);
    f->floor = 1;
    for (ml_ref n = 1; n < count; n++) f->label[n] = label_of(f->g, n);
    look_up_windows(f);
}

/* ---- How regions are linked ------------------------------------------------------------------ */

/* An operand of region `user` in period t is in region `source`, in period sign t + shift. */
typedef struct {
    int user, source, sign;
    int64_t shift;
} tie;
typedef ML_VEC(tie) ties;

int repeats_of(const repeats *all, ml_ref n) {
    int low = 0, high = (int)all->count - 1;
    while (low <= high) {
        const int at = (low + high) / 2;
        const repeat *r = &all->at[at];
        if (n < r->first)
            high = at - 1;
        else if (n - r->first >= r->period * r->count)
            low = at + 1;
        else
            return at;
    }
    return -1;
}

static bool add_link(const repeats *all, ml_arena *arena, int user, ml_ref source, int64_t step,
                     ties *out) {
    const int of = repeats_of(all, source);
    if (of < 0 || (step != all->at[of].period && step != -(int64_t)all->at[of].period))
        return false;
    const int sign = step > 0 ? 1 : -1;
    const int64_t time = all->at[user].count / 2;
    const int64_t shift = repeats_time(&all->at[of], source) - sign * time;
    const tie *last = out->count ? &out->at[out->count - 1] : NULL;
    if (last && last->user == user && last->source == of && last->sign == sign &&
        last->shift == shift)
        return true;
    *ML_PUSH(arena, out) = (tie){user, of, sign, shift};
    return true;
}

static bool find_links(const ml_graph *g, const repeats *all, ml_arena *arena, ties *out) {
    for (uint32_t r = 0; r < all->count; r++) {
        const repeat *of = &all->at[r];
        const ml_ref middle = of->first + of->count / 2 * of->period;
        for (ml_ref n = middle; n < middle + of->period; n++)
            for (int k = 0; k < ml_graph_node(g, n)->source_count; k++) {
                const ml_ref source = ml_graph_source(g, n, k);
                const int64_t step = (int64_t)source - ml_graph_source(g, n - of->period, k);
                if (step && !add_link(all, arena, (int)r, source, step, out)) return false;
            }
    }
    return true;
}

/* The layers of both where those of one are known; false where they contradict. */
static bool follow(repeats *all, const tie *l, bool *changed) {
    repeat *user = &all->at[l->user], *source = &all->at[l->source];
    if (!user->direction && !source->direction) return true;
    if (!user->direction) {
        user->direction = l->sign * source->direction;
        user->layer = repeats_layer(source, l->shift);
        *changed = true;
    } else if (!source->direction) {
        source->direction = l->sign * user->direction;
        source->layer = repeats_layer(user, 0) - source->direction * l->shift;
        *changed = true;
    }
    const int64_t apart = user->layer - repeats_layer(source, l->shift);
    return user->direction == l->sign * source->direction && apart <= REPEATS_NEAR &&
           apart >= -REPEATS_NEAR;
}

static bool number_layers(repeats *all, const ties *known) {
    uint32_t largest = 0;
    bool changed = true;
    for (uint32_t r = 1; r < all->count; r++)
        if (all->at[r].period * all->at[r].count > all->at[largest].period * all->at[largest].count)
            largest = r;
    all->at[largest].direction = 1;
    while (changed) {
        changed = false;
        for (uint32_t i = 0; i < known->count; i++)
            if (!follow(all, &known->at[i], &changed)) return false;
    }
    return true;
}

/* Whether a node of a function, which no operand reaches, is in a region. */
static bool has_function(const ml_graph *g, const repeats *all) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->flags & ML_NODE_FUNCTION && repeats_of(all, n) >= 0) return true;
    return false;
}

void repeats_find(const ml_graph *g, uint32_t least, ml_arena *arena, repeats *out) {
    finder f = {.g = g, .arena = arena, .least = least, .out = out};
    ties known = {0};
    uint32_t linked = 0;
    *out = (repeats){0};
    find_regions(&f);
    if (!out->count) return;
    if (!has_function(g, out) && find_links(g, out, arena, &known) && number_layers(out, &known))
        for (uint32_t r = 0; r < out->count; r++)
            if (out->at[r].direction) out->at[linked++] = out->at[r];
    out->count = linked;
}
