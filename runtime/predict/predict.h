/* How long a plan takes on a device of which only rates are known (base/rates.h): no device is
 * used, and plans do not depend on it.
 *
 * A step's time follows from its shape: products by tiles and waves, attention by its FLOPs and
 * pairs, other kernels by bytes, collectives by bytes, ranks and links (step_time.c). A plan is
 * replayed in its order: computation in one stream, the collectives of each mesh axis in another
 * (plan_time.c). A pipeline's tasks, so timed, are replayed in the order of its schedule. */
#ifndef ML_PREDICT_H
#define ML_PREDICT_H

#include "runtime/base/rates.h"
#include "runtime/base/sequences.h"
#include "runtime/plan/plan.h"

/* What computation waits for. */
typedef enum {
    PREDICT_PRODUCTS,
    PREDICT_ATTENTION,
    PREDICT_MEMORY, /* kernels and copies: bytes */
    PREDICT_SIMPLE, /* kernels: elementwise work; launches */
    PREDICT_KINDS
} predict_kind;
extern const char *const predict_names[PREDICT_KINDS];

/* Of one run of a program on the rank that takes longest; seconds. */
typedef struct {
    double seconds;
    double busy[PREDICT_KINDS]; /* of a rank's computation: in a pipeline the mean of its ranks */
    double exposed;             /* in which computation waits for collectives, likewise */
    double sent;                /* in which collectives are under way, likewise */
    double copied, held;        /* in which copies to and from the host are under way, each way
                                   summed; in which computation waits for them, likewise */
    double bubble;              /* share in which the ranks of a pipeline wait for one another */
} ml_prediction;

/* Products that were timed by their very shape. `seconds` of the step's product, by groups too, in
 * which these have `rows` of the rows; 0: it was not timed, and rates say how long it takes. */
typedef struct predict_products {
    double (*seconds)(struct predict_products *products, const ml_step *step, int64_t rows);
} predict_products;

/* By what times are predicted. `rows`: those of a program, whose attention keeps the sequences of a
 * row apart; NULL: each row is one. `products` NULL: none was timed. `microbatch`: of a program
 * that applies sums of gradients the one of the microbatch before it, beside which collectives may
 * lead, and of a rebuild of its parameter cache the same after it, beside which prefetches
 * continue; NULL: they start with the program, and end with it. */
typedef struct {
    const ml_rates *rates;
    ml_sequence_rows *rows;
    predict_products *products;
    const ml_plan *microbatch;
} predict_basis;

/* A step alone; *kind (NULL: not asked) becomes what bounds it. A WAIT takes no time. */
double predict_step(const predict_basis *by, const ml_schedule *s, const ml_layout *layout,
                    uint32_t step, predict_kind *kind);
/* Whether ranks along a mesh axis are on several hosts. */
bool predict_leaves_host(const ml_rates *rates, const ml_target *target, const ml_layout *layout,
                         int axis);
/* Bytes that leave a rank in a collective over mesh axis `axis`, `begins` a launch of their own. */
double predict_collective(const ml_rates *rates, const ml_target *target, const ml_layout *layout,
                          int axis, int64_t ranks, double bytes, bool begins);
/* A program, with all its microbatches where it is cut into stages. Raises. */
void predict_plan(const predict_basis *by, const ml_plan *plan, ml_prediction *out);
/* Of a program that is cut into stages, one microbatch on the rank that takes longest, of those
 * that the plan has; another program's run. Raises. */
void predict_microbatch(const predict_basis *by, const ml_plan *plan, ml_prediction *out);
/* Adds `times` runs of one to another. */
void predict_add(ml_prediction *sum, const ml_prediction *one, double times);

#endif
