/* The table of interfaces: one for each ML_ROUTINE row of ops.def. A row whose interface no folder
 * defines does not link. */
#include "runtime/graph/op_interface.h"

#define ML_MAP(...)
#define ML_OP(...)
#define ML_ROUTINE(ident, ...) extern const ml_op_interface ml_interface_##ident;
#include "runtime/graph/ops.def"
#undef ML_ROUTINE

const ml_op_interface *const ml_op_interfaces[ML_OP_COUNT] = {
#define ML_ROUTINE(ident, ...) [ML_OP_##ident] = &ml_interface_##ident,
#include "runtime/graph/ops.def"
#undef ML_ROUTINE
};
