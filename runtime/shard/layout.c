/* The sharding spec: how a tensor is placed over the mesh (the rules of layout.h), what one rank
 * holds of it, and both as text. */
#include "runtime/shard/layout.h"

#include <math.h>
#include <string.h>

int64_t ml_layout_ranks(const ml_layout *layout) {
    int64_t ranks = 1;
    for (int i = 0; i < layout->count; i++) ranks *= layout->axis[i].size;
    return ranks;
}

double ml_layout_undivided(const ml_layout *layout, const ml_division *division, int i) {
    bool stages = layout->stages.on && layout->stages.mesh_axis == i;
    if (layout->axis[i].size == 1 || stages || division->flops <= 0) return 0;
    return division->over[i].flops / division->flops;
}

void ml_division_add(ml_division *to, const ml_division *division) {
    to->flops += division->flops;
    for (int i = 0; i < ML_MAX_MESH; i++) {
        ml_undivided *sum = &to->over[i];
        const ml_undivided *part = &division->over[i];
        double flops = sum->flops + part->flops;
        if (part->most > sum->most) *sum = *part;
        sum->flops = flops;
    }
}

int64_t ml_layout_coordinate(const ml_layout *layout, int64_t rank, int i) {
    for (int inner = layout->count - 1; inner > i; inner--) rank /= layout->axis[inner].size;
    return rank % layout->axis[i].size;
}

static void print_list(const ml_graph *g, const char *what, const ml_axis *axes, int count,
                       ml_text *out) {
    if (!count) return;
    ml_text_add(out, " %s(", what);
    for (int i = 0; i < count; i++)
        ml_text_add(out, "%s%s", i ? " " : "", ml_axis_name(g, axes[i]));
    ml_text_add(out, ")");
}

void ml_layout_print(const ml_layout *layout, const ml_graph *g, ml_text *out) {
    for (int i = 0; i < layout->count; i++) {
        const ml_mesh_axis *a = &layout->axis[i];
        ml_text_add(out, "%s%s=%lld", i ? ", " : "", a->name, (long long)a->size);
        print_list(g, "params", a->params, a->params_count, out);
        print_list(g, "acts", a->acts, a->acts_count, out);
        if (a->flat) ml_text_add(out, " flat");
        if (a->keep) ml_text_add(out, " keep");
    }
    if (layout->exchange > 0) ml_text_add(out, ", exchange=%g", layout->exchange);
}

int64_t ml_layout_parts(const ml_layout *layout, const ml_placements *p, int position) {
    int64_t parts = 1;
    for (int i = 0; i < layout->count; i++)
        if (p->over[i].kind == ML_SPLIT && p->over[i].axis == position)
            parts *= layout->axis[i].size;
        else if (ml_placement_shared(p->over[i]) && p->over[i].axis == position)
            parts *= p->over[i].batch;
    return parts;
}

bool ml_layout_uneven(const ml_layout *layout, const ml_type *type, const ml_placements *p,
                      int position) {
    return type->size[position] % ml_layout_parts(layout, p, position) != 0;
}

int64_t ml_layout_sent_places(const ml_layout *layout, const ml_type *type, const ml_placements *p,
                              int i) {
    enum { GRAIN = 8 }; /* of rows: keeps those of narrow tensors aligned */
    int64_t ranks = layout->axis[i].size, batch = p->over[i].batch;
    int64_t rows = type->size[p->over[i].axis] * type->size[batch];
    rows /= ranks * ml_layout_parts(layout, p, (int)batch);
    double wanted = ceil(layout->exchange * (double)rows / (double)ranks);
    if (wanted >= (double)rows) return rows; /* a factor may be beyond any integer */
    int64_t places = (int64_t)wanted;
    places = (places + GRAIN - 1) / GRAIN * GRAIN;
    return places < rows ? places : rows;
}

ml_type ml_layout_local(const ml_layout *layout, const ml_type *type, const ml_placements *p) {
    ml_type local = *type;
    for (int i = 0; i < local.rank; i++)
        local.size[i] = ml_part_size(local.size[i], ml_layout_parts(layout, p, i));
    for (int i = 0; i < layout->count; i++) {
        if (p->over[i].kind != ML_SENT) continue;
        local.size[p->over[i].batch] = layout->axis[i].size;
        local.size[p->over[i].axis] = ml_layout_sent_places(layout, type, p, i);
    }
    return local;
}

/* ---- The sharding spec ----------------------------------------------------------------------- */

/* What mesh axis i could be for an axis of `size` elements, of which others take `parts`. */
static void list_divisors(const ml_layout *layout, int i, int64_t size, int64_t parts,
                          ml_text *out) {
    int listed = 0;
    int64_t each = size % parts ? 1 : size / parts;
    for (int64_t d = 1; d <= each && d <= 1 << 16 && listed < 12; d++) {
        if (each % d) continue;
        if (!listed++)
            ml_text_add(out, "%s=1", layout->axis[i].name);
        else
            ml_text_add(out, ", %lld", (long long)d);
    }
}

void ml_layout_indivisible(const ml_layout *layout, const ml_graph *g, const ml_type *type,
                           const ml_placements *p, int i, int position, const char *what) {
    ml_text over = {.arena = ml_graph_arena((ml_graph *)g)}, help = over;
    int64_t parts = ml_layout_parts(layout, p, position);
    const char *name = ml_axis_name(g, type->axis[position]);
    for (int j = 0; j < layout->count; j++)
        if (p->over[j].kind == ML_SPLIT && p->over[j].axis == position)
            ml_text_add(&over, "%s=%lld x ", layout->axis[j].name, (long long)layout->axis[j].size);
    ml_text_add(&over, "%s=%lld", layout->axis[i].name, (long long)layout->axis[i].size);
    list_divisors(layout, i, type->size[position], parts, &help);
    ml_fail(ML_INVALID, "cannot split \"%s\" of %s, %lld elements, over %s", name, what,
            (long long)type->size[position], over.text);
    bool input = strncmp(what, "input ", 6) == 0; /* of a program of its own, maybe */
    ml_help("sizes that divide: %s; or leave \"%s\" out of what %s splits%s", help.text, name,
            layout->axis[i].name,
            input ? "; or call the axis otherwise in a program beside training, such as \"sample\""
                  : "");
    ml_raise_last();
}

static bool divides(const ml_layout *layout, const ml_type *type, const ml_placements *p, int i,
                    int position) {
    int64_t parts = ml_layout_parts(layout, p, position) * layout->axis[i].size;
    return type->size[position] % parts == 0;
}

/* Rules 2 and 3: where mesh axis i splits the axis at `position`, if it does. */
static void place_listed(const ml_layout *layout, const ml_graph *g, const ml_type *type, int i,
                         int position, const char *what, ml_placements *p) {
    int64_t parts = ml_layout_parts(layout, p, position);
    bool even = divides(layout, type, p, i, position);
    if (type->size[position] < parts * layout->axis[i].size) return;
    if (!even && parts > 1 && what) ml_layout_indivisible(layout, g, type, p, i, position, what);
    if (even || parts == 1) p->over[i] = (ml_placement){ML_SPLIT, (uint8_t)position};
}

/* Rule 6: the longest axis that no mesh axis splits, in equal parts of which the last are padded.
 */
static void place_uneven(const ml_layout *layout, const ml_type *type, int i, ml_placements *p) {
    int longest = -1;
    for (int position = 0; position < type->rank; position++) {
        int64_t size = type->size[position];
        if (ml_layout_parts(layout, p, position) > 1 || size < layout->axis[i].size) continue;
        if (longest < 0 || size > type->size[longest]) longest = position;
    }
    if (longest >= 0) p->over[i] = (ml_placement){ML_SPLIT, (uint8_t)longest};
}

/* Rules 4 and 5 (ZeRO-1): the first axis that divides. An axis that an inner mesh axis splits is
 * cut inside of those parts: to cut it around them, they would have to be gathered. */
static void place_flat(const ml_layout *layout, const ml_type *type, int i, ml_placements *p) {
    for (int within = 0; within < 2; within++)
        for (int position = 0; position < type->rank; position++) {
            bool taken = false;
            for (int k = i + 1; k < layout->count; k++)
                taken = taken || (p->over[k].kind == ML_SPLIT && p->over[k].axis == position);
            if (taken != within || !divides(layout, type, p, i, position)) continue;
            p->over[i] = (ml_placement){ML_SPLIT, (uint8_t)position, .within = (uint8_t)within};
            return;
        }
}

/* Where a type has the axis, or its segments (runtime/ops/recurrence/segments.c); -1: nowhere. */
static int find_axis(const ml_graph *g, const ml_type *type, ml_axis axis) {
    const int found = ml_type_find(type, axis);
    if (found >= 0) return found;
    const char *whole = ml_axis_name(g, axis);
    const size_t length = strlen(whole);
    for (int i = 0; i < type->rank; i++) {
        const char *name = ml_axis_name(g, type->axis[i]);
        if (strncmp(name, whole, length) == 0 && strncmp(name + length, "'segments", 9) == 0)
            return i;
    }
    return -1;
}

ml_placements ml_layout_place(const ml_layout *layout, const ml_graph *g, const ml_type *type,
                              int state_kind, const char *what) {
    ml_placements p = {0};
    for (int i = 0; i < layout->count; i++) {
        const ml_mesh_axis *a = &layout->axis[i];
        if (a->size == 1) continue;
        int count = state_kind >= 0 ? a->params_count : a->acts_count;
        const ml_axis *listed = state_kind >= 0 ? a->params : a->acts;
        for (int k = 0; k < count; k++) {
            int position = find_axis(g, type, listed[k]);
            if (position < 0) continue;
            place_listed(layout, g, type, i, position, what, &p);
            break;
        }
    }
    for (int i = 0; i < layout->count; i++) {
        bool stages = layout->stages.on && layout->stages.mesh_axis == i;
        if (layout->axis[i].size == 1 || p.over[i].kind == ML_SPLIT) continue;
        bool flat = state_kind == ML_STATE_OPTIMIZER ||
                    (state_kind == ML_STATE_PARAMETER && layout->axis[i].keep &&
                     !layout->stages.on); /* whose every microbatch would gather them */
        if (flat && layout->axis[i].flat) {
            place_flat(layout, type, i, &p);
            if (p.over[i].kind != ML_SPLIT) place_uneven(layout, type, i, &p);
        } else if (state_kind == ML_STATE_GRADIENT && !stages)
            p.over[i] = (ml_placement){ML_PARTIAL_SUM, 0};
    }
    return p;
}

void ml_layout_print_type(const ml_layout *layout, const ml_graph *g, const ml_type *type,
                          const ml_placements *p, ml_text *out) {
    static const char *const partial[] = {
        [ML_PARTIAL_SUM] = "partial",     [ML_PARTIAL_MAX] = "partial max",
        [ML_PARTIAL_MIN] = "partial min", [ML_OWNED] = "own rows",
        [ML_SENT] = "sent rows",          [ML_SHARED] = "shared",
        [ML_SHARED_SUM] = "shared sum"};
    ml_text_add(out, "%s", ml_dtypes[type->dtype].name);
    for (int k = 0; k < type->rank; k++) {
        ml_text_add(out, "%s%s=%lld", k ? ", " : "[", ml_axis_name(g, type->axis[k]),
                    (long long)type->size[k]);
        for (int within = 0; within < 2; within++)
            for (int i = 0; i < layout->count; i++)
                if (p->over[i].kind == ML_SPLIT && p->over[i].axis == k &&
                    p->over[i].within == within)
                    ml_text_add(out, "@%s", layout->axis[i].name);
    }
    if (type->rank) ml_text_add(out, "]");
    for (int i = 0; i < layout->count; i++)
        if (p->over[i].kind >= ML_PARTIAL_SUM)
            ml_text_add(out, " %s(%s)", partial[p->over[i].kind], layout->axis[i].name);
}
