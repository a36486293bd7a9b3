/* Tasks: the graph of one virtual stage, split into what runs between two receives.
 *
 * A task computes what has the same wave: it runs once its messages have arrived, and sends when it
 * is done. A stage of a training program has two, forward and backward (the last stage one, for
 * there they follow each other). With `weight_grad` the last wave is split in two: the
 * input-gradient task has what messages need, the weight-gradient task the rest, but for sums that
 * need no product or collective, since what they reduce is at hand in the task before. Tasks run in
 * order, each once a microbatch; microbatches overlap.
 *
 * Saved values are what is in memory between tasks: inputs of the program, received values, values
 * to send, and values that a later task reads. Those of one microbatch are its microbatch buffer.
 * Rather than read a saved value, a later task recomputes it where that is light work (elementwise
 * ops, views, all-gathers) on values that take less memory or are saved anyway: normalised inputs,
 * activations, weights of FSDP.
 *
 * Weights concatenated or in a narrower dtype, as products read them, are the same for all
 * microbatches of a step. Where microbatches overlap, the once-per-step task computes them before
 * all others, into a buffer of its own: for a pipeline what param_cache.c is for other
 * programs.
 *
 * Where microbatches overlap, a state that the program updates is read by one task alone, which
 * updates it too: the tasks of a microbatch see it as the microbatch before left it. What is not a
 * sum of gradients may not be read in a task before the one that has its new value. */
#ifndef ML_SPLIT_TASKS_H
#define ML_SPLIT_TASKS_H

#include "runtime/graph/graph.h"

enum {
    TASKS_MOST = 32,         /* bits of a mask; the once-per-step task is none of them */
    SAVED_GIVEN = -1,        /* an input, or received */
    SAVED_ONCE_PER_STEP = -2 /* of the once-per-step task, in its buffer */
};

typedef struct {
    uint32_t input;        /* id of the INPUT by which tasks read it; UINT32_MAX where none does */
    int from;              /* the task that computes it, SAVED_GIVEN or SAVED_ONCE_PER_STEP */
    int64_t bytes, offset; /* in its buffer; offsets are multiples of 256 */
    bool on_host;          /* it waits in host memory (offload_saved.c), and is in no buffer */
} saved_value;

typedef struct {
    int wave;
    bool weight_grad;
    ml_graph *graph;
    ml_roots roots; /* output i becomes saved value exports[i] */
    int *exports;
} split_task;

typedef struct {
    int count, saved_count;
    split_task tasks[TASKS_MOST + 1];
    bool once_per_step; /* tasks[count] is the once-per-step task */
    saved_value *saved;
    int *saved_of_output; /* by output of the stage's roots */
    int *task_of_output;  /* the task that computes it */
    int64_t buffer_bytes, once_bytes;
} task_set;

/* Where to split: the waves in which the stage has work, ascending, the same on every rank. */
typedef struct {
    int count; /* at most TASKS_MOST - 1 */
    int wave[TASKS_MOST];
    bool weight_grad;   /* the last wave is two tasks */
    bool overlaps;      /* a microbatch begins before the previous one has ended */
    bool once_per_step; /* there may be a once-per-step task */
} task_waves;

/* Split `g`, the graph of one rank. input_wave[id] of an INPUT that is received is one of the
 * waves, at least 1, and 0 for inputs of the program. Raises ML_INVALID for a state that is read
 * too early (above). The graphs are freed by task_set_free, the rest is in `arena`. */
void task_set_split(const ml_graph *g, const ml_roots *roots, const int *input_wave,
                    const task_waves *waves, ml_arena *arena, task_set *out);
void task_set_free(task_set *set);

#endif
