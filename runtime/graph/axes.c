/* Tensor types as values: what needs no graph. */
#include <string.h>

#include "runtime/graph/graph.h"

int ml_type_find(const ml_type *t, ml_axis axis) {
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] == axis) return i;
    return -1;
}

ml_type ml_type_fronted(const ml_type *t, int position) {
    ml_type out = *t;
    for (int i = position; i > 0; i--) {
        out.axis[i] = out.axis[i - 1];
        out.size[i] = out.size[i - 1];
    }
    out.axis[0] = t->axis[position];
    out.size[0] = t->size[position];
    return out;
}

int64_t ml_type_size(const ml_type *t, ml_axis axis) {
    int at = ml_type_find(t, axis);
    return at < 0 ? 0 : t->size[at];
}

enum { LARGE_PART = 256, PART_GRAIN = 16 };

int64_t ml_part_size(int64_t whole, int64_t parts) {
    int64_t part = whole / parts + (whole % parts != 0);
    if (whole % parts == 0 || part < LARGE_PART) return part;
    return (part + PART_GRAIN - 1) / PART_GRAIN * PART_GRAIN;
}

bool ml_is_part(int64_t whole, int64_t part) {
    if (part < 1 || part > whole) return part == whole;
    if (part >= LARGE_PART && part % PART_GRAIN == 0) return true;
    int64_t parts = (whole + part - 1) / part;
    return (whole + parts - 1) / parts == part;
}

int64_t ml_type_elements(const ml_type *t) {
    int64_t count = 1;
    for (int i = 0; i < t->rank; i++) count *= t->size[i];
    return count;
}

int64_t ml_type_bytes(const ml_type *t) {
    return ml_type_elements(t) * ml_dtypes[t->dtype].bytes;
}

bool ml_type_equal(const ml_type *a, const ml_type *b) {
    if (a->dtype != b->dtype || a->rank != b->rank) return false;
    for (int i = 0; i < a->rank; i++)
        if (a->axis[i] != b->axis[i] || a->size[i] != b->size[i]) return false;
    return true;
}

bool ml_type_same_axes(const ml_type *a, const ml_type *b) {
    if (a->rank != b->rank) return false;
    for (int i = 0; i < a->rank; i++) {
        int at = ml_type_find(b, a->axis[i]);
        if (at < 0 || a->size[i] != b->size[at]) return false;
    }
    return true;
}

void ml_type_print(const ml_graph *g, const ml_type *t, ml_text *out) {
    ml_text_add(out, "%s", ml_dtypes[t->dtype].name);
    if (!t->rank) return;
    for (int i = 0; i < t->rank; i++)
        ml_text_add(out, "%s%s=%lld", i ? ", " : "[", ml_axis_name(g, t->axis[i]),
                    (long long)t->size[i]);
    ml_text_add(out, "]");
}
