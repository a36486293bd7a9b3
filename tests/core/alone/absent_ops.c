/* In place of runtime/ops and codegen/lower/{routines,recurrence,loop}.c: no op has an interface.
 */
#include "codegen/lower/lower_internal.h"
#include "runtime/graph/op_interface.h"

const ml_op_interface *const ml_op_interfaces[ML_OP_COUNT];
const lower_routine lower_routines[ML_OP_COUNT];

bool lower_one_kernel(lowering *l, ml_ref n) {
    (void)l, (void)n;
    return false;
}
void lower_recurrence_layouts(lowering *l) {
    (void)l;
}
ml_graph *ml_loop_body(const ml_schedule *s, const ml_step *step, ml_roots *roots) {
    (void)s, (void)step, (void)roots;
    ml_raise(ML_INTERNAL, "the core has no loops");
}
