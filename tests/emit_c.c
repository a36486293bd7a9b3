/* Kernels for the CPU, from hand-made IR, against the interpreter of emit_ir.c. */
#include <stdio.h>

#include "tests/emit_cases.h"
#include "tests/test.h"

TEST(emit, kernels_for_the_cpu) {
    ir_kernel k;
    double tolerance;
    const char *name;
    for (int i = 0; (name = emit_case(&k, i, &tolerance)) != NULL; i++) {
        double worst = ir_compare(&k, 1 + i % 4);
        if (!(worst <= tolerance)) {
            fprintf(stderr, "%s: off by %g\n", name, worst);
            CHECK(worst <= tolerance);
        }
        ir_free(&k);
    }
}
