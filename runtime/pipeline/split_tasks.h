/* Pieces: the graph of one virtual stage, cut into what runs between two messages.
 *
 * A piece holds what has the same level: it runs once its values are received, and sends when it is
 * done. A stage of a training program has two, forward and backward (the last stage one, for there
 * they follow each other); with `late` the weight-gradient work that nobody waits for is a
 * piece of its own, but for sums that need no product or collective: what these go over is at hand
 * in the piece before. Pieces run in order, each once a microbatch; microbatches overlap.
 *
 * What is in memory between pieces lies in cells: inputs of the program, received values, values
 * to send, and values that a later piece reads. All cells of a stage and microbatch are one block.
 * Rather than keep a value, a later piece computes it anew where that is light work (elementwise
 * ops, views, all-gathers) on values that take less room or are there anyway: normalised inputs,
 * activations, weights of FSDP.
 *
 * Weights side by side or in a narrower dtype, as products read them, are the same for all
 * microbatches of a step. Where microbatches overlap, a steady piece makes them once a step, before
 * all others and into a block of its own: for a pipeline what copies.c is for other programs.
 *
 * Where microbatches overlap, a state that the program updates is read by one piece alone, which
 * updates it too: the pieces of a microbatch see it as the microbatch before left it. What is not a
 * sum of gradients may not be read in a piece before the one that has its new value. */
#ifndef ML_SPLIT_TASKS_H
#define ML_SPLIT_TASKS_H

#include "runtime/graph/graph.h"

enum {
    TASKS_MOST = 32,         /* bits of a mask; the steady one is not among them */
    SAVED_GIVEN = -1,        /* an input, or received */
    SAVED_ONCE_PER_STEP = -2 /* the steady piece's, in its block */
};

typedef struct {
    uint32_t input;        /* id of the INPUT by which pieces read it; UINT32_MAX where none does */
    int from;              /* the piece that computes it, SAVED_GIVEN or SAVED_ONCE_PER_STEP */
    int64_t bytes, offset; /* in its block; offsets are multiples of 256 */
} saved_value;

typedef struct {
    int wave;
    bool weight_grad;
    ml_graph *graph;
    ml_roots roots; /* all outputs are kept: output i goes to cell exports[i] */
    int *exports;
} task_program;

typedef struct {
    int count, saved_count;
    task_program tasks[TASKS_MOST + 1];
    bool once_per_step; /* pieces[count] is the steady one */
    saved_value *saved;
    int *saved_of_output; /* by output of the stage's roots */
    int *task_of_output;  /* the piece after which it is there */
    int64_t buffer_bytes, once_bytes;
} task_programs;

/* Where to cut: the levels at which the stage has work, ascending, the same on every rank of the
 * stage. */
typedef struct {
    int count; /* at most TASKS_MOST - 1 */
    int wave[TASKS_MOST];
    bool weight_grad;   /* the last one in two */
    bool overlaps;      /* a microbatch begins before the one before it has ended */
    bool once_per_step; /* there may be a steady piece */
} task_waves;

/* Cut `g`, a rank's graph. input_level[id] of an INPUT that is received is at least 1 and one of
 * the levels, and 0 for inputs of the program. Raises ML_INVALID for a state that is read too early
 * (above). Graphs are to be freed by task_programs_free, the rest is
 * in `arena`. */
void task_programs_split(const ml_graph *g, const ml_roots *roots, const int *input_wave,
                         const task_waves *waves, ml_arena *arena, task_programs *out);
void task_programs_free(task_programs *set);

#endif
