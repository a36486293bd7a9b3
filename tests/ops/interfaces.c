/* Each routine's interface says all that the core must know of an op (graph/op_interface.h). */
#include "runtime/graph/op_interface.h"
#include "tests/test.h"

TEST(ops, interfaces_are_complete) {
    for (int op = 0; op < ML_OP_COUNT; op++) {
        const ml_op_interface *own = ml_op_interfaces[op];
        if (!own) continue;
        bool complete = ml_ops[op].op_class == ML_CLASS_ROUTINE;
        complete = complete && own->infer && own->gradient && own->flops;
        complete = complete && (ml_ops[op].outputs == -1) == (own->outputs != NULL);
        complete = complete && (ml_ops[op].outputs == 1) == (own->output_type == NULL);
        complete = complete && (!own->decomposes || own->define);
        complete = complete && (own->decomposes || own->evaluate || own->evaluate_all);
        complete = complete && (own->propose != NULL) != (own->place != NULL);
        CHECK_TEXT(complete ? "" : ml_ops[op].name, "");
    }
}
