/* Recurrences by elements as one kernel against the reference's loop. */
#include "runtime/ops/recurrence/recurrence.h"
#include "tests/kernels/support.h"

static void check(fixture *f, ml_dtype dtype, const char *const axes[4], bool reverse) {
    ml_ref xghw[4];
    for (int i = 0; i < 4; i++) xghw[i] = fixture_input(f, dtype, axes[i], -1, 1);
    ml_ref y = fixture_recurrence(f, xghw, reverse);
    CHECK(ml_recurrence_elementwise(f->g, y));
    template_check(f, y, dtype == ML_F64 ? 1e-14 : dtype == ML_BF16 ? 1e-2 : 1e-6);
}

static const char *const rows[] = {"s9 b3 d8", "s9 b3", "b3 d8", "d8"};
static const char *const odd[] = {"b3 s17 d5", "s17 d5 b3", "d5 b3", "b3"};

static void by_elements(fixture *f) {
    const char *const numbers[] = {"s40", "s40", "", ""};
    check(f, ML_F64, rows, false);
    check(f, ML_F32, numbers, true);
    template_use_gaps(true);
    check(f, ML_BF16, odd, true);
    template_use_gaps(false);
}
TEST(kernels, recurrence) {
    fixture_run(by_elements, 1);
}

/* Inputs by a ring of slices in shared memory, whose last is not full; one that rows share. */
static const char *const blocks[] = {"s43 b2 d32", "s43 b2", "b2 d32", "d32"};

static void emulated(fixture *f) {
    check(f, ML_F32, rows, true);
    check(f, ML_BF16, blocks, false);
}
TEST(kernels, recurrence_emulated) {
    template_use_emulator(true);
    fixture_run(emulated, 2);
    template_use_emulator(false);
}
