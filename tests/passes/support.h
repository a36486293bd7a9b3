/* What the tests of the passes share: small graphs over random inputs, evaluated by the reference.
 *
 * A body gets a fixture with an empty graph; it may raise, which fails the test with the message.
 * Axes are written "b3 s4": names with sizes. */
#ifndef PASSES_SUPPORT_H
#define PASSES_SUPPORT_H

#include "runtime/passes/passes.h"
#include "tests/test.h"

enum { SUPPORT_INPUTS = 256 };

typedef struct {
    ml_graph *g;
    ml_arena *arena;
    double *inputs[SUPPORT_INPUTS], *states[SUPPORT_INPUTS];
    ml_ref nodes[SUPPORT_INPUTS]; /* by input */
    int input_count, state_count;
    uint64_t random;
    char label[160]; /* what is being checked, for messages */
} fixture;

typedef void fixture_body(fixture *f);
void fixture_run(fixture_body *body, uint64_t seed);

double fixture_uniform(fixture *f, double low, double high);
int64_t fixture_below(fixture *f, int64_t bound);
ml_type fixture_type(fixture *f, ml_dtype dtype, const char *axes);
ml_axis fixture_axis(fixture *f, const char *name);
/* Inputs and states with random values: uniform, or integers below `bound`. */
ml_ref fixture_input(fixture *f, ml_dtype dtype, const char *axes, double low, double high);
ml_ref fixture_index(fixture *f, const char *axes, int64_t bound);
ml_ref fixture_state(fixture *f, ml_dtype dtype, const char *axes);
ml_ref fixture_add_state(fixture *f, const ml_type *type);
/* sum(y * w) with random weights: a loss that sees every element. Casts to f64. */
ml_ref fixture_loss(fixture *f, ml_ref y);

double *fixture_value(fixture *f, const ml_graph *g, ml_ref n);
/* Gradients of loss by autodiff equal finite differences at every element of every float input. */
/* A recurrence over axis s of x and g, from h on, with w captured: h = tanh(h * g) + x * w, whose
 * step also gives h * g and sums x * h. All but x may lack axes of h. */
ml_ref fixture_recurrence(fixture *f, const ml_ref xghw[4], bool reverse);
/* A linear scan over axis s of q, k, v, decay and initial state (keys k, values v where the state
 * has them), then pairs. */
ml_ref fixture_linear_scan(fixture *f, const ml_ref *sources, int rank, bool after, bool reverse);
void fixture_check_gradients(fixture *f, ml_ref loss);
/* Each pass leaves the values of these nodes as they are, within `tolerance`. */
void fixture_check_passes(fixture *f, const ml_ref *nodes, int count, double tolerance);
void fixture_check_pass(fixture *f, const char *name, const ml_ref *nodes, int count,
                        double tolerance);
/* `type` in the form "f64[b=3, s=4]". */
const char *fixture_type_text(fixture *f, const ml_graph *g, ml_ref n);
/* How many live nodes of an op a pass leaves of a program with these outputs. */
int fixture_count_after(fixture *f, const char *pass, const ml_ref *nodes, int count, ml_op op);

#endif
