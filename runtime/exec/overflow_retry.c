/* A program whose layout bounds what ranks exchange (layout.h) has a retry: a program of the same
 * roots under the same layout without the bound. Where rows find no capacity slot, the step has
 * changed no state, or its states are restored (pipeline/retry.c), and the retry repeats it from
 * the inputs, which are still there. The retry's memory is reserved with the program's; its kernels
 * are compiled when it is first needed. After a step that was repeated the retry runs some at once,
 * twice as many after each failure in a row. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/exec/session.h"

/* ---- making ---- */
ml_status retry_inputs(ml_program *retry) {
    const ml_program *program = retry->owner;
    for (int i = 0; i < retry->input_count; i++) {
        int at = 0;
        while (at < program->input_count && program->input_ids[at] != retry->input_ids[i]) at++;
        if (at == program->input_count || program->input_bytes[at] != retry->input_bytes[i])
            return ml_fail(ML_INTERNAL, "a program and its retry differ in their inputs");
        retry->input_offsets[i] = program->input_offsets[at];
    }
    retry->inputs = program->inputs;
    retry->coordinates = program->coordinates;
    return ML_OK;
}

static void warn_absent(const ml_program *program) {
    ml_session *session = program->session;
    if (session->ranks.rank == 0 && !session->without_retry)
        fprintf(stderr,
                "mlua: no memory is left for steps that are done again: one that sends a rank more "
                "than %g times an even share of its rows ends the run; more memory or another "
                "exchange in the layout avoids that\n",
                program->plan->layout->exchange);
    session->without_retry = true;
}

/* Of the plan that was made without regard to a retry and the one that has a retry beside it, the
 * program takes the second where all ranks have such, else the first. */
static void plan_choose(ml_program *program, ml_plan *both, bool repeats) {
    ml_plan *left = both;
    if (both == program->plan) return;
    if (repeats) left = program->plan, program->plan = both;
    ml_plan_free(left);
}

/* Without memory for it there is none on any rank, and a step that needs it fails. */
ml_status retry_plan(ml_program *program, const ml_roots *roots) {
    ml_session *session = program->session;
    program->may_overflow = program->plan->roots.overflow_count > 0;
    if (program->plan->pipeline != NULL) ML_TRY(staged_programs.overflow_agree(program));
    if (!program->may_overflow) return ML_OK;
    ml_program *retry = ml_alloc(sizeof *retry);
    if (retry == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while making a program");
    program_enter(session, retry);
    retry->owner = program;
    program->retry = retry;
    ml_plan *both;
    ML_TRY(session_plan_retry(session, roots, program->plan, &both, &retry->plan));
    int64_t made = retry->plan != NULL;
    ml_status status = session->everyone != NULL ? beside_core.least(session->comm, &made) : ML_OK;
    plan_choose(program, both, status == ML_OK && made);
    if (status != ML_OK || made) return status;
    ml_program_free(retry);
    warn_absent(program);
    return ML_OK;
}

/* Inputs and buffers are the program's. */
static ml_status pipeline_reserve(ml_program *program) {
    const int64_t own = program->plan->buffer_bytes, other = program->retry->plan->buffer_bytes;
    if (!staged_programs.plans_alike(program, program->retry))
        return ml_fail(ML_INTERNAL, "a pipeline and its retry differ in what they send");
    return staged_programs.buffers_reserve(program, own > other ? own : other);
}

ml_status retry_reserve(ml_program *program) {
    ml_program *retry = program->retry;
    if (retry == NULL) return ML_OK;
    ML_TRY(program_reserve(retry));
    ML_TRY(retry_inputs(retry));
    if (program->plan->pipeline != NULL) ML_TRY(pipeline_reserve(program));
    /* Ranks compile together, and groups may need their retries when others do not. */
    if (!session_of_groups(program->session, program->plan->layout)) return ML_OK;
    retry->waits = program->session->together;
    return retry->waits ? ML_OK : program_compile(retry);
}

/* ---- running ---- */
enum { LONGEST_PAUSE = 64 };

bool retry_at_once(ml_program *program) {
    program->retried_at_once = program->pauses_left > 0;
    if (program->retried_at_once) program->pauses_left--;
    return program->retried_at_once;
}

void exchange_name(const ml_origin *origin, char name[EXCHANGE_NAME]) {
    bool module = origin->module != NULL && *origin->module;
    snprintf(name, EXCHANGE_NAME, "%s (%s:%d)", module ? origin->module : "a product by groups",
             origin->file != NULL ? origin->file : "?", origin->line);
}

/* The first exchange that did not fit; factor 0 where all did. What comes after it has NaN to
 * route. */
static ml_status overflow_find(ml_program *program, exchange_overflow *found) {
    const ml_roots *roots = &program->plan->roots;
    float *factors = ml_alloc((size_t)roots->overflow_count * sizeof *factors);
    if (factors == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while reading an output");
    ml_status status = program_download(program, roots->output_count - 1, factors);
    found->factor = 0;
    for (int i = roots->overflow_count; i-- > 0 && status == ML_OK;) {
        if (!(factors[i] > 0)) continue;
        found->factor = factors[i];
        exchange_name(roots->overflow_origins[i], found->name);
    }
    ml_free(factors);
    return status;
}

static double enough(double factor) {
    return ceil(factor * 11) / 10; /* a tenth more than this step needed */
}

enum { OVERFLOW_TEXT = EXCHANGE_NAME + 128 };

static ml_status run_again(ml_program *program, const char *text, double factor) {
    ml_session *session = program->session;
    ml_program *retry = program->retry;
    const char *name = program->plan->roots.name;
    if (program->again++ == 0) {
        if (session->ranks.rank == 0)
            fprintf(stderr,
                    "mlua: %s; such steps are done again with gathered weights, which "
                    "exchange = %.1f would save\n",
                    text, enough(factor));
        if (!session_of_groups(session, program->plan->layout)) ML_TRY(program_compile(retry));
    }
    if (session->ranks.rank == 0)
        ml_debug(1, "program \"%s\": %lld runs done again: %s\n", name != NULL ? name : "",
                 (long long)program->again, text);
    program->pause = program->pause == 0 ? 1 : 2 * program->pause;
    if (program->pause > LONGEST_PAUSE) program->pause = LONGEST_PAUSE;
    program->pauses_left = program->pause;
    return program_execute(retry);
}

ml_status retry_settle(ml_program *program, ml_program **done) {
    exchange_overflow found = {0};
    char text[OVERFLOW_TEXT];
    *done = program;
    if (!program->may_overflow) return ML_OK;
    if (program->retried_at_once) {
        *done = program->retry;
        return ML_OK;
    }
    ml_status status = program->plan->pipeline != NULL ? staged_programs.overflow(program, &found)
                                                       : overflow_find(program, &found);
    if (status == ML_OK && !(found.factor > 0)) program->pause = 0;
    if (status != ML_OK || !(found.factor > 0)) return status;
    snprintf(text, sizeof text,
             "%s sends one rank %.2f times an even share of its rows, and the layout has places "
             "for %g times",
             found.name, found.factor, program->plan->layout->exchange);
    if (program->retry != NULL) {
        *done = program->retry;
        return run_again(program, text, found.factor);
    }
    ml_fail(ML_INVALID, "%s", text);
    return ml_help("exchange = %.1f in the layout, or none: then weights are gathered, and no "
                   "load is too uneven; or more memory, so that such steps are done again",
                   enough(found.factor));
}
