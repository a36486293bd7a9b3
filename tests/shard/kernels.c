/* What sharded programs ask of kernels beyond what others do: random numbers by given indices. */
#include "tests/ops/support.h"

/* The second half of a tensor's rows has the numbers that it has in the whole tensor. */
static void random_of_a_part(ops_case *c) {
    ml_type whole = ops_type(c, ML_F32, "s8 d5"), part = ops_type(c, ML_I64, "s4 d5");
    ml_ref key = ml_const_int(c->g, ML_I64, 1234567890123456789);
    ml_ref row = ml_map2(c->g, ML_OP_ADD, ml_iota(c->g, part.axis[0], 4),
                         ml_cast(c->g, ops_input(c, ML_I32, "", 4, 5), ML_I32));
    row = ml_map2(c->g, ML_OP_MUL, ml_cast(c->g, row, ML_I64), ml_const_int(c->g, ML_I64, 5));
    ml_ref column = ml_cast(c->g, ml_iota(c->g, part.axis[1], 5), ML_I64);
    ml_ref index =
        ml_map2(c->g, ML_OP_ADD, ml_broadcast(c->g, row, &part), ml_broadcast(c->g, column, &part));
    part.dtype = ML_F32;
    ml_ref sources[] = {key, index};
    ml_ref half = ml_graph_add(c->g, ML_OP_RANDOM, sources, 2, NULL, 0, &part);
    ml_ref all = ml_graph_add(c->g, ML_OP_RANDOM, &key, 1, NULL, 0, &whole);
    ml_ref same = ml_map2(c->g, ML_OP_EQ, half, ml_slice(c->g, all, whole.axis[0], 4, 8));
    ops_output(c, half, 0, "half of a random tensor");
    ops_output(c, ml_cast(c->g, same, ML_I32), 0, "whether it is half of the whole one");
    ops_output(c, ml_reduce(c->g, ML_OP_MIN, ml_cast(c->g, same, ML_I32), part.axis, 2), 0,
               "everywhere");
}
OPS_TEST(random_of_a_part) {
    ops_run(random_of_a_part, 1, OPS_UNFUSED);
}
