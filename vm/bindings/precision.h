/* In which dtype products run.
 *
 * Parameters are read in the compute dtype (vm_state_value), and products run in it unless the
 * script specifies another. What is f32 only by default (inputs without a dtype, random
 * draws, and what is computed from them) stays f32 in elementwise ops and sums, and is cast where
 * it is an operand of a product. The script specifies f32 by x:cast("f32"), by dtype="f32" in an
 * input's spec or of the product itself, by state:read() and by gradients: such operands stay as
 * they are, and so does the product that has one. A cast that a script writes is a CAST node even
 * where it changes no dtype, by which it is known later.
 *
 * Where products run in f32 all the same while the compute dtype is bf16, `mlua check` reports
 * where: a GPU multiplies bf16 some fifteen times as fast. */
#ifndef ML_PRECISION_H
#define ML_PRECISION_H

#include <jansson.h>

#include "vm/vm.h"

/* With --dtype fp8: mark a DOT of bf16 with a parameter of a block for the compiler. Its sizes must
 * be what 8-bit products take. */
void precision_mark_fp8(lua_State *L, ml_ref product);
/* Add a product whose first `operands` sources are multiplied. */
ml_ref precision_product(lua_State *L, vm_node *node, int operands);
/* Cast them in place as a product would; false where nothing changes. */
bool precision_narrow(lua_State *L, ml_ref *operands, int count);
/* The script has written this cast, or given this input its dtype. */
ml_ref precision_explicit_cast(lua_State *L, ml_ref n, ml_dtype dtype);
void precision_explicit_input(lua_State *L, ml_ref input);
/* Whether node n is a product that runs in f32 although the compute dtype is bf16. */
bool precision_is_wide(lua_State *L, const ml_graph *g, ml_ref n);

/* Products in f32 where the compute dtype is bf16, by the script's lines. */
enum { PRECISION_LINES = 10 };
typedef struct {
    const ml_origin *origin;
    double flops;
    int count;
    bool modules; /* of several modules */
} precision_line;
typedef struct {
    double flops, wide_flops, scaled_flops; /* of all products; of those in f32, of 8 bits */
    int count, wide_count, scaled_count;
    precision_line lines[PRECISION_LINES]; /* those with most FLOPs first */
    int line_count;
} precision_report;
void precision_add(lua_State *L, precision_report *r, const ml_plan *part, double times);
void precision_print(const precision_report *r);
void precision_json(const precision_report *r, json_t *object);
void precision_register(lua_State *L);

#endif
