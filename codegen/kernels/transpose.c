/* An operand of a product of 8-bit floats, transposed (cuda/transpose.cu): Hopper's products read
 * both operands along the sum, which for one of them mostly is across its memory. The value that
 * is written has the axes of the columns first, which are contiguous in what is read. */
#include "codegen/kernels/template.h"

enum { TILE = 128, THREADS = 256 };

static int64_t stride_of(const ml_value *from, const ml_value *to, int i) {
    return from->stride[ml_type_find(&from->type, to->type.axis[i])];
}

/* The first axes that are written, up to the innermost of what is read. */
static int64_t column_count(const ml_value *from, const ml_value *to) {
    int64_t columns = 1;
    for (int i = 0; i < to->type.rank; i++) {
        columns *= to->type.size[i];
        if (stride_of(from, to, i) == 1) return columns;
    }
    ml_raise(ML_INTERNAL, "what is transposed is not contiguous");
}

void ml_template_transpose(ml_schedule *s, ml_step *step) {
    ml_template t = template_begin(s);
    const ml_value *from = template_value(s, step, 0), *to = template_value(s, step, 1);
    const int64_t columns = column_count(from, to), rows = ml_type_elements(&to->type) / columns;
    template_set(&t, "POINTERS", "2");
    template_set(&t, "FROM", "0");
    template_set(&t, "TO", "1");
    template_set(&t, "MATRIX", "0LL");
    template_set(&t, "ROWS", "%lldLL", (long long)rows);
    template_set(&t, "COLUMNS", "%lldLL", (long long)columns);
    template_set(&t, "ROW", "%lldLL", (long long)stride_of(from, to, to->type.rank - 1));
    step->kernel = template_file(&t, "transpose.cu", "transpose", 2);
    template_launch(step->kernel, (columns + TILE - 1) / TILE, (rows + TILE - 1) / TILE, 1, THREADS,
                    0);
}
