/* Ops of which the program that is linked has the interface. */
#include "runtime/graph/op_interface.h"

const ml_op_interface *ml_op_interface_of(ml_op op) {
    if (!ml_op_interfaces[op])
        ml_raise(ML_INTERNAL, "%s has no interface: this program is linked without it",
                 ml_ops[op].name);
    return ml_op_interfaces[op];
}
