/* What the tests of pipeline stages share: a program cut into stages, run stage by stage and level
 * by level with what they send passed by hand, must give what it gives whole. */
#ifndef STAGE_SUPPORT_H
#define STAGE_SUPPORT_H

#include "runtime/pipeline/stage.h"
#include "tests/shard/support.h"

enum { STAGE_SUPPORT_STAGES = 16 };

/* What all stages hold; NaN where they hold nothing. */
typedef struct {
    fixture *f;
    ml_layout layout;
    ml_stage_map map;
    /* By stage, by state; none where there are more stages than that: then nothing runs. */
    double **states[STAGE_SUPPORT_STAGES];
    ml_stage_graphs last; /* of the last program; its graphs are freed */
} stage_pipeline;

stage_pipeline stage_pipeline_of(fixture *f, int ranks, int chunks);
/* A new state with random values, zeros for a sum of gradients; those beyond SUPPORT_INPUTS have
 * none. */
ml_ref stage_state(fixture *f, const char *name, ml_state_kind kind, const ml_type *type);
/* Cut the program and run it, whole and in stages: outputs on one stage of each rank, and new
 * values at all holders, are the same. The states of both get their new values. */
void stage_run(stage_pipeline *p, const ml_roots *program);

#endif
