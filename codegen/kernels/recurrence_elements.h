/* Inside of the kernels of recurrences by elements: the text of a step and of its operands, which
 * recurrence_forms.c puts into one of several files. */
#ifndef ML_KERNELS_RECURRENCE_ELEMENTS_H
#define ML_KERNELS_RECURRENCE_ELEMENTS_H

#include "codegen/kernels/recurrence.h"

typedef enum {
    FORM_C,
    FORM_PLAIN,
    FORM_POSITIONS,
    FORM_RING,
    FORM_PARALLEL,
    FORM_PACKED,
} kernel_form;

/* A value that does not depend on states, and that parts of a kernel share: an array over a warp's
 * positions. */
typedef struct {
    ml_ref node;
    const char *made,
        *name; /* the statements that compute it, for comparison; the element's text */
} fixed_value;

typedef struct {
    ml_schedule *schedule;
    ml_step *step;
    ml_template text;
    ml_recurrence r;
    ml_type space; /* the rows: axes of every state and result */
    kernel_form form;
    int64_t lanes;     /* rows side by side that are computed together; 0: one */
    const char *lane;  /* index text of values by lane */
    int sources;       /* reads that are the node's sources */
    int *edge, *shift; /* by input: the read that has its value where it begins, and how far it is
                          off; shift 0: as it stands */
    int threads, stages, stage_bytes; /* ring; the latter: of all inputs so far */
    int width, positions;             /* ring: rows of a block, positions of a stage */
    ml_refs factors;                  /* parallel, positions: of the states, one after another */
    uint32_t max_plus;                /* likewise: which states are */
    const char **values;              /* by read: its text in the step */
    int warps, span;                  /* packed: of a block; positions of a warp in a stage */
    ml_recurrence of;                 /* what is computed again; length 0: nothing */
    ml_text first, declare, load, work, last, copy, advance, compose, gather, begin, total;
    ml_text restart, replay, save, store; /* packed */
    ML_VEC(fixed_value) fixed;            /* packed: what is computed once of the inputs */
    ml_text ready, kept;                  /* likewise, before states are computed again; after */
} recurrence_elements;

int64_t elements_rows_of(const recurrence_elements *p);
ml_dtype elements_dtype_of(const recurrence_elements *p, int i);
ml_ref elements_of_forward(const recurrence_elements *p, ml_ref source);
void elements_find_shifts(recurrence_elements *p);
bool elements_is_input(const recurrence_elements *p, int i);
bool elements_is_ringed(const recurrence_elements *p, int i);
void elements_declare_sources(recurrence_elements *p);
void elements_fix_inputs(recurrence_elements *p, ml_text *out, ml_ref n, const ml_recurrence *r,
                         const char *const *values);
void elements_print_compose(recurrence_elements *p);
void elements_declare_again(recurrence_elements *p, int j);
void elements_declare_again_sources(recurrence_elements *p);
void elements_print_replay(recurrence_elements *p);
void elements_print_step(recurrence_elements *p);

#endif
